"""Sentences computed from the results, true whatever the results are."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from metatokens.records import ModelInfo, Result
from metatokens.report.estimates import (
    Difference,
    Labels,
    difference,
    measured_conditions,
    model_of,
    pivot,
    select,
)
from metatokens.report.gains import SUBJECT, Gain, gains, key_lengths
from metatokens.report.inputs import CurvePoint
from metatokens.report.learning import BUDGET, learning
from metatokens.report.wording import EN_DASH, name, percent, signed, tokens

PAPER_PARAMETERS = 152e6
_MARKERS = {"paper": "with markers", "none": "without markers", "decoy": "among decoys"}


@dataclass(frozen=True)
class Finding:
    """One thing that came out: where, and the figures."""

    place: str
    detail: str


def verdict(results: Sequence[Result], task: str | None) -> str:
    """What came out on one task, without figures: each verdict once, with the lengths where it holds."""
    places: dict[str, list[str]] = defaultdict(list)
    for gain in gains(results, task):
        places[gain.verdict()].append(gain.place)
    return f"{name(task)}: {'; '.join(f'at {_and(where)}, {what}' for what, where in places.items())}."


def comparisons(results: Sequence[Result], task: str | None) -> list[Finding]:
    """The differences behind the verdict, and which models are above chance."""
    return [Finding(gain.place, _detail(gain)) for gain in gains(results, task)]


def marker_effects(results: Sequence[Result], task: str | None) -> list[Finding]:
    """What `meta` loses at the train length when the context has no markers, or decoys beside them."""
    length, place = next(iter(key_lengths(results, task).items()))
    trained, *others = measured_conditions(results, task)
    base = pivot(results, "length", metric="exact_match", task=task, condition=trained)
    changes: dict[str, list[str]] = defaultdict(list)
    for condition in others:
        for label, row in pivot(results, "length", metric="exact_match", task=task, condition=condition).items():
            before, after = base.get(label, {}).get(length), row.get(length)
            if model_of(label) == SUBJECT and before and after and (gap := difference(after, before)):
                changes[label].append(f"{_markers(condition)} {_percent(after.value)} ({_bounds(gap)} points)")
    return [
        Finding(
            f"{label} at {place}",
            f"{_markers(trained)} {_percent(base[label][length].value)}, {', '.join(change)}.",
        )
        for label, change in changes.items()
    ]


def budget(curves: Sequence[CurvePoint]) -> str:
    """Was every model trained long enough to be compared? One sentence for each answer."""
    answers: dict[str, list[str]] = defaultdict(list)
    least: dict[str, float | None] = {}
    for run in learning(curves):
        place = name(run.task) + (f" at {tokens(run.train_length)} tokens" if run.train_length else "")
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


def perplexities(results: Sequence[Result]) -> str:
    """Which models beat the unigram, and what inserted meta-tokens change."""
    rows = pivot(results, "condition", metric="perplexity")
    sentences = []
    for placement in sorted({place for row in rows.values() for place in row}, key=lambda place: place != "none"):
        values = {label: row[placement].value for label, row in rows.items() if placement in row}
        chances = [row[placement].chance for row in rows.values() if placement in row]
        unigram = next((chance for chance in chances if chance), None)
        if unigram:
            where = "On the text alone" if placement == "none" else f"With inserted meta-tokens ({placement})"
            below = [label for label, value in values.items() if value and value < unigram]
            sentences.append(f"{where}, below the unigram perplexity: {_list(below)}.")
        alone = {label: row["none"].value for label, row in rows.items() if "none" in row}
        changes = [
            f"{label} {signed(value / before - 1)}\u00a0%"
            for label, value in values.items()
            if placement != "none" and value and (before := alone.get(label))
        ]
        if changes:
            sentences.append(f"Insertion changes the perplexity of the same text tokens: {_list(changes)}.")
    return " ".join(sentences)


def accuracy_summary(results: Sequence[Result], task: str | None, condition: str | None) -> str:
    """One line of figures for a reader who cannot see the picture."""
    cells = pivot(results, "length", metric="exact_match", task=task, condition=condition)
    parts = []
    for length, place in key_lengths(results, task).items():
        row = [f"{label} {percent(cell[length].value)}" for label, cell in cells.items() if length in cell]
        parts.append(f"at {place} {_list(row)}")
    return f"{name(task)}, percent exactly right: {'; '.join(parts)}."


def final_losses(curves: Sequence[CurvePoint], task: str | None) -> str:
    """The last logged loss of each model, in one line."""
    labels = Labels(curves)
    last = {labels(point): point for point in sorted(curves, key=lambda point: point.step) if point.task == task}
    row = [f"{label} {last[label].loss:.3g} after {last[label].step:,} steps" for label in labels.all if label in last]
    return f"{name(task) if task else 'Pretraining'}, last loss: {_list(row)}."


def caution(results: Sequence[Result], task: str | None, models: Mapping[str, ModelInfo]) -> str:
    """Seeds, n and sizes: what these figures cannot show."""
    seeds = [str(seed) for seed in sorted({result.seed for result in results if result.metric != "majority_rate"})]
    sentences = [
        f"One training seed ({seeds[0]}): intervals cover the draw of test prompts, not the luck of training."
        if len(seeds) == 1
        else f"{len(seeds)} seeds ({_list(seeds)}): an interval covers those of all seeds."
    ]
    lengths_by_n: dict[str, list[str]] = defaultdict(list)
    for length in key_lengths(results, task):
        n = {result.n for result in select(results, metric="exact_match", task=task, length=length) if result.n}
        if n:
            lengths_by_n[EN_DASH.join(map(str, sorted({min(n), max(n)})))].append(tokens(length))
    if lengths_by_n:
        counts = (f"n\u00a0=\u00a0{n} at {_and(lengths)} tokens" for n, lengths in lengths_by_n.items())
        sentences.append(f"{_list(counts)}.")
    sizes = [info.parameters for info in models.values() if info.parameters]
    if sizes:
        small = "Small models: " if max(sizes) < PAPER_PARAMETERS / 10 else "Models: "
        ends = EN_DASH.join(dict.fromkeys(_millions(size) for size in (min(sizes), max(sizes))))
        sentences.append(f"{small}{ends} million parameters; the paper's has {_millions(PAPER_PARAMETERS)} million.")
    return " ".join(sentences)


def _detail(gain: Gain) -> str:
    """Which models are above chance where not all are, the pairs that differ, then those that do not."""
    sentences = []
    if floor := gain.above_floor():
        called, rate, above = floor
        if not above:
            sentences.append(f"No model is above {called} ({_percent(rate)}).")
        elif len(above) < len(gain.cells):
            sentences.append(f"Above {called} ({_percent(rate)}): {_list(above)}.")
    differ, same = [], []
    for a, b in gain.pairs():
        gap = difference(gain.cells[a], gain.cells[b])
        if gap is None:
            continue
        if gap.low <= 0 <= gap.high:
            same.append(f"{a} and {b} ({_bounds(gap)})")
        else:
            side = "above" if gap.value > 0 else "below"
            near, far = sorted((abs(gap.low), abs(gap.high)))
            differ.append(f"{a} is {percent(abs(gap.value))} points {side} {b} ({percent(near)} to {percent(far)})")
    if differ:
        sentences.append(f"{'; '.join(differ)}.")
    if same:
        n = min(cell.n for cell in gain.cells.values())
        sentences.append(f"No difference that n\u00a0=\u00a0{n} can show: {_list(same)}.")
    if gain.not_run:
        sentences.append(f"Cannot be run at this length: {_list(gain.not_run)}.")
    return " ".join(sentences) or f"{gain.verdict()}."


def _markers(condition: str | None) -> str:
    return _MARKERS.get(str(condition), f"in {condition}")


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
