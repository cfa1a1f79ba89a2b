"""The report on any run that is no grid: its models side by side, in sentences that are true whatever came out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from metatokens.experiment.variants import MODELS
from metatokens.report.blocks import Block, Fold, Section, picture
from metatokens.report.derive import select
from metatokens.report.figures import lines
from metatokens.report.figures.style import Style
from metatokens.report.frame import Inputs
from metatokens.report.gains import SUBJECT, Gain, gains, key_lengths
from metatokens.records import ModelInfo
from metatokens.report.intervals import Difference, newcombe
from metatokens.report.labels import (
    labelled,
    labels_in_order,
    measured_conditions,
    measured_tasks,
    model_of,
    pivot,
)
from metatokens.report.learning import BUDGET, LEARNED_LOSS, learning
from metatokens.report.tables import run as tables
from metatokens.report.tables.table import Table, span
from metatokens.report.text import name, percent, signed, tokens

PAPER_PARAMETERS = 152e6
_MARKERS = {"paper": "with markers", "none": "without markers", "decoy": "among decoys"}


@dataclass(frozen=True)
class Finding:
    """One thing that came out: where, and the figures."""

    place: str
    detail: str


@dataclass(frozen=True)
class Headline:
    """The first screen: what was compared and what came out."""

    verdict: str
    table: Table
    key: str
    """How to read the table."""
    findings: Sequence[Finding]
    caution: str
    descriptions: Mapping[str, str]
    """What each row's model is."""


def headline(inputs: Inputs) -> Headline:
    """The first task's accuracy at the key lengths; perplexity where no accuracy was measured."""
    figures = labelled(inputs.figures)
    infos = {model: info for run in inputs.runs for model, info in run.models.items()}
    task = next(iter(measured_tasks(figures)), "")
    if not len(select(figures, metric="exact_match")):
        table, found, verdict = tables.perplexity(figures), [], "No accuracy was measured."
    else:
        condition = measured_conditions(figures, task)[0]
        table = tables.accuracy(figures, task, condition, lengths=key_lengths(figures, task))
        verdict = _verdict(figures, task)
        found = [Finding(gain.place, _detail(gain)) for gain in gains(figures, task)]
        found += _marker_effects(figures, task)
    positions = inputs.values("position_embedding")
    key = "In brackets: 95\u00a0% intervals. " if found else ""
    descriptions = {model: about["description"] for model, about in MODELS.items()}
    descriptions |= {model: info.description for model, info in infos.items() if info.description}
    return Headline(
        key=f"{key}Positions: {', '.join(positions) or 'not named'}.",
        verdict=verdict,
        table=table,
        findings=found,
        caution=_caution(figures, task, infos),
        descriptions={row[0]: descriptions.get(model_of(row[0]), "") for row in table.rows},
    )


def sections(inputs: Inputs, styles: Mapping[str, Style]) -> list[Section]:
    """The sections on what came out; one without data says so.

    Args:
        inputs: what was read.
        styles: a style for each label, from `figures.style.palette`.
    """
    figures = labelled(inputs.figures)
    return [
        _accuracy(figures, styles),
        _markers(figures, styles),
        _training(figures, inputs.curves, styles),
        _perplexity(figures),
        majority(inputs),
        examples(inputs),
    ]


def majority(inputs: Inputs) -> Section:
    """What always giving the commonest answer would score."""
    title = "The commonest answer"
    if not len(inputs.select(metric="majority_rate")):
        return Section("majority", title, "No majority rate was measured.")
    return Section(
        "majority",
        title,
        "What always giving the commonest of the test answers would score. A model that scores no higher need not have "
        "read the prompt.",
        [tables.majority_rates(labelled(inputs.figures))],
    )


def examples(inputs: Inputs) -> Section:
    """One prompt of each task."""
    if not inputs.examples:
        return Section("examples", "Examples", "No examples: there is no examples.jsonl beside the results.")
    intro = "One prompt of each task. A tinted _PAUSE_ is a meta-token; any other text is text."
    return Section("examples", "Examples", intro, inputs.examples)


def budget(curves: pd.DataFrame) -> str:
    """Was every model trained long enough to be compared? One sentence for each answer."""
    answers: dict[str, list[str]] = defaultdict(list)
    least: dict[str, float | None] = {}
    for run in learning(curves):
        place = name(run.task) + (f" at {tokens(run.train_length)}" + " tokens" if run.train_length else "")
        known = least.get(place)
        least[place] = run.budget if known is None or run.budget is None else min(known, run.budget)
    for place, ratio in least.items():
        if ratio is None:
            answers["Learned by no model in the steps given"].append(place)
        elif ratio >= BUDGET:
            answers[f"Every model had {BUDGET} times the slowest learner's steps or more"].append(place)
        else:
            answers[f"A model had less than {BUDGET} times the slowest learner's steps"].append(
                f"{place} ({ratio:.2f})"
            )
    return " ".join(f"{answer}: {_list(places)}." for answer, places in answers.items())


def _accuracy(figures: pd.DataFrame, styles: Mapping[str, Style]) -> Section:
    anchor, title = "accuracy", "Accuracy by prompt length"
    tasks = measured_tasks(figures)
    if not tasks:
        return Section(anchor, title, "No accuracy was measured.")
    conditions = {task: measured_conditions(figures, task)[0] for task in tasks}
    summaries = [_summary(figures, task, condition) for task, condition in conditions.items()]
    by_token = [
        tables.accuracy(figures, task, condition, metric="token_accuracy")
        for task, condition in conditions.items()
        if len(select(figures, metric="token_accuracy", task=task, condition=condition))
    ]
    blocks: list[Block] = [
        picture("accuracy", " ".join(summaries), partial(lines.accuracy, figures, styles)),
        *(_verdict(figures, task) for task in tasks),
        *(tables.accuracy(figures, task, condition) for task, condition in conditions.items()),
        Fold("Differences between models, with intervals", [tables.differences(figures)]),
    ]
    if by_token:
        blocks.append(Fold("Token accuracy: answer tokens right, one by one", by_token))
    return Section(
        anchor,
        title,
        "An answer counts when all of it is right. Bands and brackets are 95\u00a0% intervals. Length L stands for "
        "prompts of more than L/2 and up to L tokens, meta-tokens included. Two models are said to differ where the "
        "95\u00a0% interval of their difference (Newcombe) excludes zero, without correction for several comparisons.",
        blocks,
    )


def _markers(figures: pd.DataFrame, styles: Mapping[str, Style]) -> Section:
    blocks: list[Block] = []
    for number, task in enumerate(measured_tasks(figures), start=1):
        conditions = measured_conditions(figures, task)
        if len(conditions) > 1:
            summary = " ".join(f"In {condition}: {_summary(figures, task, condition)}" for condition in conditions)
            draw = partial(lines.marker_conditions, figures, styles, task)
            blocks += [
                picture(f"markers_{number}", summary, draw),
                tables.marker_conditions(figures, task),
                *(tables.accuracy(figures, task, condition) for condition in conditions[1:]),
            ]
    title = "Do the markers give the answer away?"
    if not blocks:
        return Section("markers", title, "Only one marker condition was measured.")
    return Section(
        "markers",
        title,
        "In condition \u201cpaper\u201d a meta-token marks the place that the question asks about. In "
        "\u201cnone\u201d each marker of the context is the ordinary text \u201c|\u201d. In \u201cdecoy\u201d "
        "further meta-tokens stand where they leave the answer unchanged.",
        blocks,
    )


def _training(figures: pd.DataFrame, curves: pd.DataFrame, styles: Mapping[str, Style]) -> Section:
    title = "Training curves"
    losses = labelled(curves.dropna(subset="loss"))
    if not len(losses):
        return Section("training", title, "No training curves: there is no curves.jsonl beside the results.")
    blocks: list[Block] = []
    tasks = list(dict.fromkeys(losses["task"]))
    if "" in tasks:
        unigrams = select(figures, metric="perplexity", condition="none")["chance"].dropna()
        unigram = None if unigrams.empty else unigrams.iloc[0]
        draw = partial(lines.pretraining, losses, styles, unigram)
        blocks.append(picture("pretraining", _final_losses(losses, ""), draw))
    if any(tasks):
        summary = " ".join(_final_losses(losses, task) for task in tasks if task)
        draw = partial(lines.fine_tuning, losses, styles)
        blocks += [picture("fine_tuning", summary, draw), budget(losses), tables.learning_steps(losses)]
    return Section(
        "training",
        title,
        "Pretraining loss is over text tokens, fine-tuning loss over answer tokens. A task counts as learned from the "
        f"first logged step from which the answer loss stays under {LEARNED_LOSS}, the dashed line.",
        blocks,
    )


def _perplexity(figures: pd.DataFrame) -> Section:
    if not len(select(figures, metric="perplexity")):
        return Section("perplexity", "Perplexity", "No perplexity was measured.")
    return Section(
        "perplexity",
        "Perplexity",
        "Held-out text, the same text tokens for every model and column; no meta-token is ever a target.",
        [_perplexities(figures), tables.perplexity(figures)],
    )


def _verdict(figures: pd.DataFrame, task: str) -> str:
    """What came out on one task, without figures: each verdict once, with the lengths where it holds."""
    places: dict[str, list[str]] = defaultdict(list)
    for gain in gains(figures, task):
        places[gain.verdict()].append(gain.place)
    return f"{name(task)}: {'; '.join(f'at {_and(where)}, {what}' for what, where in places.items())}."


def _marker_effects(figures: pd.DataFrame, task: str) -> list[Finding]:
    """What `meta` loses at the train length when the context has no markers, or decoys beside them."""
    length, place = next(iter(key_lengths(figures, task).items()))
    trained, *others = measured_conditions(figures, task)
    base = pivot(figures, "length", metric="exact_match", task=task, condition=trained)
    changes: dict[str, list[str]] = defaultdict(list)
    before = {label: row[length].pooled() for label, row in base.items() if length in row}
    for condition in others:
        for label, row in pivot(figures, "length", metric="exact_match", task=task, condition=condition).items():
            after = row[length].pooled() if length in row else None
            if model_of(label) == SUBJECT and after and (gap := newcombe(after, before.get(label))):
                changes[label].append(f"{_marked(condition)} {_percent(after.value)} ({_bounds(gap)} points)")
    return [
        Finding(f"{label} at {place}", f"{_marked(trained)} {_percent(one.value)}, {', '.join(change)}.")
        for label, change in changes.items()
        if (one := before[label])
    ]


def _perplexities(figures: pd.DataFrame) -> str:
    """Which models beat the unigram, and what inserted meta-tokens change."""
    rows = pivot(figures, "condition", metric="perplexity")
    pooled = {label: {place: cell.pooled() for place, cell in row.items()} for label, row in rows.items()}
    sentences = []
    for placement in sorted({place for row in rows.values() for place in row}, key=lambda place: place != "none"):
        values = {label: one.value for label, row in pooled.items() if (one := row.get(placement))}
        unigram = next((cell.chance for row in rows.values() if (cell := row.get(placement)) and cell.chance), None)
        if unigram:
            where = "On the text alone" if placement == "none" else f"With inserted meta-tokens ({placement})"
            below = [label for label, value in values.items() if value and value < unigram]
            sentences.append(f"{where}, below the unigram perplexity: {_list(below)}.")
        alone = {label: one.value for label, row in pooled.items() if (one := row.get("none"))}
        changes = [
            f"{label} {signed(value / before - 1)}\u00a0%"
            for label, value in values.items()
            if placement != "none" and value and (before := alone.get(label))
        ]
        if changes:
            sentences.append(f"Insertion changes the perplexity of the same text tokens: {_list(changes)}.")
    return " ".join(sentences)


def _summary(figures: pd.DataFrame, task: str, condition: str) -> str:
    """One line of figures for a reader who cannot see the picture."""
    cells = pivot(figures, "length", metric="exact_match", task=task, condition=condition)
    parts = []
    for length, place in key_lengths(figures, task).items():
        pooled = {label: row[length].pooled() for label, row in cells.items() if length in row}
        row = (f"{label} {percent(one.value if one else None)}" for label, one in pooled.items())
        parts.append(f"at {place} {_list(row)}")
    return f"{name(task)}, percent exactly right: {'; '.join(parts)}."


def _final_losses(losses: pd.DataFrame, task: str) -> str:
    """The last logged loss of each model, in one line."""
    last = select(losses, task=task).sort_values("step", kind="stable").groupby("label").last()
    labels = [label for label in labels_in_order(losses) if label in last.index]
    row = (f"{label} {last['loss'][label]:.3g} after {last['step'][label]:,.0f} steps" for label in labels)
    return f"{name(task) if task else 'Pretraining'}, last loss: {_list(row)}."


def _caution(figures: pd.DataFrame, task: str, models: Mapping[str, ModelInfo]) -> str:
    """Seeds, n and sizes: what these figures cannot show."""
    seeds = [f"{seed:.0f}" for seed in sorted(set(figures[figures["metric"] != "majority_rate"]["seed"]))]
    sentences = [
        f"One training seed ({seeds[0]}): intervals cover the draw of test prompts, not the luck of training."
        if len(seeds) == 1
        else f"{len(seeds)} seeds ({_list(seeds)}): an interval covers those of all seeds."
    ]
    lengths_by_n: dict[str, list[str]] = defaultdict(list)
    measured = select(figures, metric="exact_match", task=task)
    for length in key_lengths(figures, task):
        n = {int(one) for one in select(measured, length=length)["n"] if one}
        if n:
            lengths_by_n[span(map(str, sorted({min(n), max(n)})))].append(tokens(length))
    if lengths_by_n:
        counts = (f"n\u00a0=\u00a0{n} at {_and(lengths)} tokens" for n, lengths in lengths_by_n.items())
        sentences.append(f"{_list(counts)}.")
    sizes = [info.parameters for info in models.values() if info.parameters]
    if sizes:
        small = "Small models: " if max(sizes) < PAPER_PARAMETERS / 10 else "Models: "
        ends = span(dict.fromkeys(_millions(size) for size in (min(sizes), max(sizes))))
        sentences.append(f"{small}{ends} million parameters; the paper's has {_millions(PAPER_PARAMETERS)} million.")
    return " ".join(sentences)


def _detail(gain: Gain) -> str:
    """Which models are above guessing where not all are, the pairs that differ, then those that do not."""
    sentences = []
    if floor := gain.above_guessing():
        called, rate, above = floor
        if not above:
            sentences.append(f"No model is above {called} ({_percent(rate)}).")
        elif len(above) < len(gain.cells):
            sentences.append(f"Above {called} ({_percent(rate)}): {_list(above)}.")
    differ, same = [], []
    for a, b, one in gain.pairs():
        if one.gap is None:
            continue
        if side := one.side(0.0):
            near, far = sorted((abs(one.gap.low), abs(one.gap.high)))
            word = "above" if side > 0 else "below"
            differ.append(f"{a} is {percent(abs(one.gap.value))} points {word} {b} ({percent(near)} to {percent(far)})")
        else:
            same.append(f"{a} and {b} ({_bounds(one.gap)})")
    if differ:
        sentences.append(f"{'; '.join(differ)}.")
    if same:
        n = min(cell.n for cell in gain.cells.values())
        sentences.append(f"No difference that n\u00a0=\u00a0{n} can show: {_list(same)}.")
    if gain.not_run:
        sentences.append(f"Cannot be run at this length: {_list(gain.not_run)}.")
    return " ".join(sentences) or f"{gain.verdict()}."


def _marked(condition: str) -> str:
    return _MARKERS.get(condition, f"in {condition}")


def _bounds(gap: Difference) -> str:
    return f"{signed(gap.low)} to {signed(gap.high)}"


def _percent(value: float | None) -> str:
    return f"{percent(value)}\u00a0%"


def _list(items: Iterable[str]) -> str:
    return ", ".join(items) or "none"


def _and(items: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def _millions(parameters: float) -> str:
    return f"{parameters / 1e6:.2f}" if parameters < 1e6 else f"{parameters / 1e6:,.0f}"
