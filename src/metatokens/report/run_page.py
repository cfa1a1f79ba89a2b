"""The report on any run that is no grid: its models side by side, in sentences that are true whatever came out."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from metatokens.experiment.models import MODELS
from metatokens.records import ModelInfo
from metatokens.report.blocks import Block, Fold, Section, picture
from metatokens.report.compare import difference
from metatokens.report.derive import select
from metatokens.report.figures import lines
from metatokens.report.figures.style import Style
from metatokens.report.frame import Cell, Inputs
from metatokens.report.gains import SUBJECT, Gain, gains, key_lengths
from metatokens.report.intervals import Difference
from metatokens.report.labels import (
    labelled,
    labels_in_order,
    measured_conditions,
    measured_tasks,
    model_of,
    rows,
)
from metatokens.report.learning import BUDGET, LEARNED_LOSS, learning
from metatokens.report.tables import cost
from metatokens.report.tables import run as tables
from metatokens.report.tables.table import Table, span
from metatokens.report.text import name, percent, signed, tokens
from metatokens.report.words import sections as worded

PAPER_PARAMETERS = 152e6
_MARKERS = {"paper": "with markers", "none": "without markers", "decoy": "among decoys"}


@dataclass(frozen=True)
class Headline:
    """The first screen: what was compared and what came out."""

    verdict: str
    table: Table
    key: str
    """How to read the table."""
    findings: Sequence[tuple[str, str]]
    """What came out: where, and the figures."""
    caution: str
    descriptions: Mapping[str, str]
    """What each row's model is."""


def headline(inputs: Inputs) -> Headline:
    """The first task's accuracy at the key lengths; perplexity where no accuracy was measured."""
    infos = {model: info for run in inputs.read.runs for model, info in run.models.items()}
    task = next(iter(measured_tasks(inputs)), None)
    if task is None:
        table = cost.perplexity(inputs, rows(inputs, metric="perplexity"))
        found, verdict = [], "No accuracy was measured."
    else:
        condition = measured_conditions(inputs, task)[0]
        table = tables.accuracy(inputs, task, condition, lengths=key_lengths(inputs, task))
        verdict = _verdict(inputs, task)
        found = [(gain.place, _detail(gain)) for gain in gains(inputs, task)]
        found += _marker_effects(inputs, task)
    positions = inputs.values("position_embedding")
    descriptions = {model: about["description"] for model, about in MODELS.items()}
    descriptions |= {model: info.description for model, info in infos.items() if info.description}
    return Headline(
        key=("In brackets: 95\u00a0% intervals. " if found else "")
        + f"Positions: {', '.join(positions) or 'not named'}.",
        verdict=verdict,
        table=table,
        findings=found,
        caution=_caution(inputs, task, infos),
        descriptions={row[0]: descriptions.get(model_of(row[0]), "") for row in table.rows},
    )


def sections(inputs: Inputs, styles: Mapping[str, Style]) -> list[Section]:
    """The sections on what came out; one without data says so.

    Args:
        inputs: what was read, its figures with labels.
        styles: a style for each label, from `figures.style.palette`.
    """
    return [
        _accuracy(inputs, styles),
        _markers(inputs, styles),
        _training(inputs, styles),
        _perplexity(inputs),
        majority(inputs),
        examples(inputs),
    ]


def majority(inputs: Inputs) -> Section:
    """What always giving the commonest answer would score."""
    if not len(inputs.select(metric="majority_rate")):
        return Section("majority", worded()["majority"].title, "No majority rate was measured.")
    return Section("majority", *worded()["majority"][:2], [tables.majority_rates(inputs)])


def examples(inputs: Inputs) -> Section:
    """One prompt of each task."""
    if not inputs.read.examples:
        return Section("examples", "Examples", "No examples: there is no examples.jsonl beside the results.")
    return Section("examples", *worded()["examples"][:2], inputs.read.examples)


def budget(curves: pd.DataFrame) -> str:
    """Was every model trained long enough to be compared? One sentence for each answer."""
    answers: dict[str, list[str]] = defaultdict(list)
    for place, ratio in learning(curves).groupby("place", sort=False)["budget"].min().items():
        if math.isnan(ratio):
            answers["Learned by no model in the steps given"].append(str(place))
        elif ratio < BUDGET:
            answers[f"A model had less than {BUDGET} times the slowest learner's steps"].append(
                f"{place} ({ratio:.2f})"
            )
        else:
            answers[f"Every model had {BUDGET} times the slowest learner's steps or more"].append(str(place))
    return " ".join(f"{answer}: {', '.join(places)}." for answer, places in answers.items())


def _accuracy(inputs: Inputs, styles: Mapping[str, Style]) -> Section:
    conditions = {task: measured_conditions(inputs, task)[0] for task in measured_tasks(inputs)}
    if not conditions:
        return Section("accuracy", worded()["accuracy"].title, "No accuracy was measured.")
    by_token = [
        tables.accuracy(inputs, task, condition, metric="token_accuracy")
        for task, condition in conditions.items()
        if len(inputs.select(metric="token_accuracy", task=task, condition=condition))
    ]
    verdicts = [_verdict(inputs, task) for task in conditions]
    blocks: list[Block] = [
        picture("accuracy", " ".join(verdicts), partial(lines.accuracy, inputs, styles)),
        *verdicts,
        *(tables.accuracy(inputs, task, condition) for task, condition in conditions.items()),
        Fold("Differences between models, with intervals", [tables.differences(inputs)]),
        *([Fold("Token accuracy: answer tokens right, one by one", by_token)] if by_token else []),
    ]
    return Section("accuracy", *worded()["accuracy"][:2], blocks)


def _markers(inputs: Inputs, styles: Mapping[str, Style]) -> Section:
    blocks: list[Block] = []
    words = worded()["markers"]
    for number, task in enumerate(measured_tasks(inputs), start=1):
        conditions = measured_conditions(inputs, task)
        if len(conditions) > 1:
            draw = partial(lines.marker_conditions, inputs, styles, task)
            blocks += [
                picture(f"markers_{number}", f"{name(task)} by condition and length", draw),
                tables.marker_conditions(inputs, task),
                *(tables.accuracy(inputs, task, condition) for condition in conditions[1:]),
            ]
    return Section("markers", words.title, words.text if blocks else "Only one marker condition was measured.", blocks)


def _training(inputs: Inputs, styles: Mapping[str, Style]) -> Section:
    losses = labelled(inputs.curves.dropna(subset="loss"))
    words = worded()["curves"]
    if not len(losses):
        return Section("training", words.title, "No training curves: there is no curves.jsonl beside the results.")
    blocks: list[Block] = []
    if (losses["task"] == "").any():
        unigrams = inputs.select(metric="perplexity", condition="none")["chance"].dropna()
        unigram = None if unigrams.empty else unigrams.iloc[0]
        draw = partial(lines.pretraining, losses, styles, unigram)
        blocks.append(picture("pretraining", _final_losses(select(losses, task="")), draw))
    if (losses["task"] != "").any():
        alt = _final_losses(losses[losses["task"] != ""])
        draw = partial(lines.fine_tuning, losses, styles)
        blocks += [picture("fine_tuning", alt, draw), budget(losses), tables.learning_steps(losses)]
    return Section("training", words.title, words.of(learned_loss=LEARNED_LOSS).text, blocks)


def _perplexity(inputs: Inputs) -> Section:
    named = rows(inputs, metric="perplexity")
    if not named:
        return Section("perplexity", "Perplexity", "No perplexity was measured.")
    return Section("perplexity", *worded()["held-out"][:2], [cost.perplexity(inputs, named)])


def _verdict(inputs: Inputs, task: str) -> str:
    """What came out on one task, without figures: each verdict once, with the lengths where it holds."""
    places: dict[str, list[str]] = defaultdict(list)
    for gain in gains(inputs, task):
        places[gain.verdict()].append(gain.place)
    return f"{name(task)}: {'; '.join(f'at {_and(where)}, {what}' for what, where in places.items())}."


def _marker_effects(inputs: Inputs, task: str) -> Iterable[tuple[str, str]]:
    """What `meta` loses at the train length when the context has no markers, or decoys beside them."""
    length, place = next(iter(key_lengths(inputs, task).items()))
    trained, *others = measured_conditions(inputs, task)
    for label, fields in rows(inputs, metric="exact_match", task=task, condition=trained, model=SUBJECT):
        cells = inputs.cells([{**fields, "length": length, "condition": one} for one in (trained, *others)])
        changes = [
            f"{_marked(other)} {_percent(cell)} ({_bounds(gap)} points)"
            for other, cell in zip(others, cells[1:], strict=True)
            if (gap := difference(cell, cells[0]).gap)
        ]
        if changes:
            yield f"{label} at {place}", f"{_marked(trained)} {_percent(cells[0])}, {', '.join(changes)}."


def _final_losses(losses: pd.DataFrame) -> str:
    """The last logged loss of each model, in one line."""
    last = losses.sort_values("step", kind="stable").groupby(["task", "label"])[["loss", "step"]].last()
    order = labels_in_order(losses)
    said = (
        f"{name(task) if task else 'pretraining'}, {label}: {row.loss:.3g} after {row.step:,.0f} steps"
        for (task, label), row in sorted(last.iterrows(), key=lambda one: (one[0][0], order.index(one[0][1])))
    )
    return f"Last loss: {'; '.join(said)}."


def _caution(inputs: Inputs, task: str | None, models: Mapping[str, ModelInfo]) -> str:
    """Seeds, n and sizes: what these figures cannot show."""
    measured = inputs.figures[inputs.figures["metric"] != "majority_rate"]
    seeds = [f"{seed:.0f}" for seed in sorted(set(measured["seed"]))]
    sentences = [
        f"One training seed ({seeds[0]}): intervals cover the draw of test prompts, not the luck of training."
        if len(seeds) == 1
        else f"{len(seeds)} seeds ({', '.join(seeds)}): their figures and the ends of their intervals are averaged."
    ]
    by_n: dict[str, list[str]] = defaultdict(list)
    for length in key_lengths(inputs, task) if task is not None else ():
        ns = [n for n in inputs.values("n", metric="exact_match", task=task, length=length) if n]
        if ns:
            by_n[span(dict.fromkeys([f"{ns[0]}", f"{ns[-1]}"]))].append(tokens(length))
    counts = [f"n\u00a0=\u00a0{n} at {_and(lengths)} tokens" for n, lengths in by_n.items()]
    sentences += [f"{', '.join(counts)}."] if counts else []
    sizes = [info.parameters for info in models.values() if info.parameters]
    if sizes:
        small = "Small models: " if max(sizes) < PAPER_PARAMETERS / 10 else "Models: "
        ends = span(dict.fromkeys(_millions(size) for size in (min(sizes), max(sizes))))
        sentences.append(f"{small}{ends} million parameters; the paper's has {_millions(PAPER_PARAMETERS)} million.")
    return " ".join(sentences)


def _detail(gain: Gain) -> str:
    """Which models are above guessing where not all are, the pairs that differ, then those that do not."""
    sentences = []
    above = gain.above_guessing()
    if len(above) < len(gain.cells):
        sentences.append(f"Above guessing ({percent(gain.guessing)}\u00a0%): {', '.join(above) or 'no model'}.")
    differ, same = [], []
    for a, b, one in gain.pairs():
        if one.gap and (side := one.side(0.0)):
            near, far = sorted((abs(one.gap.low), abs(one.gap.high)))
            word = "above" if side > 0 else "below"
            differ.append(f"{a} is {percent(abs(one.gap.value))} points {word} {b} ({percent(near)} to {percent(far)})")
        elif one.gap:
            same.append(f"{a} and {b} ({_bounds(one.gap)})")
    if differ:
        sentences.append(f"{'; '.join(differ)}.")
    if same:
        n = min(cell.n for cell in gain.cells.values())
        several = " in every seed" if any(len(cell.seeds) > 1 for cell in gain.cells.values()) else ""
        sentences.append(f"No difference{several} that n\u00a0=\u00a0{n} can show: {', '.join(same)}.")
    if gain.not_run:
        sentences.append(f"Cannot be run at this length: {', '.join(gain.not_run)}.")
    return " ".join(sentences) or f"{gain.verdict()}."


def _marked(condition: str) -> str:
    return _MARKERS.get(condition, f"in {condition}")


def _bounds(gap: Difference) -> str:
    return f"{signed(gap.low)} to {signed(gap.high)}"


def _percent(cell: Cell | None) -> str:
    pooled = cell.pooled() if cell else None
    return f"{percent(pooled.value if pooled else None)}\u00a0%"


def _and(items: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def _millions(parameters: float) -> str:
    return f"{parameters / 1e6:.2f}" if parameters < 1e6 else f"{parameters / 1e6:,.0f}"
