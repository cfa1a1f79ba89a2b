"""Sentences computed from the results: what the intervals say, whatever they say.

Two models are said to differ only where the 95 % interval of their difference excludes zero.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from metatokens.evaluation.results import Result
from metatokens.report.estimates import (
    SEPARATOR,
    Difference,
    Estimate,
    difference,
    measured_conditions,
    model_of,
    pivot,
    select,
)
from metatokens.report.inputs import CurvePoint, ModelInfo
from metatokens.report.learning import BUDGET, LEARNED_LOSS, learning
from metatokens.report.tables import EN_DASH, MINUS, commonest_answer, key_lengths, name, percent, tokens

BASELINES = ("gpt2", "pause")  # neither has a second attention module
CONTROL = "twin"  # the second module of equal size, over all positions
SUBJECT = "meta"
PAPER_PARAMETERS = 152e6


@dataclass(frozen=True)
class Finding:
    """One thing that came out."""

    place: str
    """Where it holds."""
    verdict: str
    """A clause without figures."""
    detail: str
    """The figures behind it."""


def gains(results: Sequence[Result], task: str | None) -> list[Finding]:
    """Does `meta` gain over the baselines, and does the control explain it? At the train length and at the longest."""
    condition = measured_conditions(results, task)[0]
    cells = pivot(results, "length", metric="exact_match", task=task, condition=condition)
    commonest = commonest_answer(results, task)
    findings = []
    for length, place in key_lengths(results, task).items():
        families: dict[str, dict[str, Estimate]] = defaultdict(dict)
        for label, row in cells.items():
            if length in row:
                families[label.removeprefix(model_of(label)).removeprefix(SEPARATOR)][model_of(label)] = row[length]
        for variant, family in families.items():
            compared = {model: cell for model, cell in family.items() if cell.low is not None}
            verdict, clauses = _explain_gain(compared)
            sentences = [clauses, _above_chance(compared, commonest.get(length)), _not_run(family)]
            where = f"{place}, {variant}" if variant else place
            findings.append(Finding(where, verdict, " ".join(filter(None, sentences))))
    return findings


def in_one_sentence(task: str | None, found: Sequence[Finding]) -> str:
    """What came out, without figures: each verdict once, with the places where it holds."""
    places: dict[str, list[str]] = defaultdict(list)
    for finding in found:
        places[finding.verdict].append(finding.place)
    verdicts = [f"at {' and '.join(where)}, {verdict}" for verdict, where in places.items()]
    return f"{name(task)}: {'; '.join(verdicts)}."


def marker_effects(results: Sequence[Result], task: str | None, models: Collection[str]) -> list[Finding]:
    """What each of the models loses at the train length when the context has no markers, or decoys beside them."""
    conditions = measured_conditions(results, task)
    length, place = next(iter(key_lengths(results, task).items()))
    cells = {
        condition: pivot(results, "length", metric="exact_match", task=task, condition=condition)
        for condition in conditions
    }
    findings = []
    for label, row in cells[conditions[0]].items():
        if model_of(label) not in models:
            continue
        base = row.get(length)
        for condition in conditions[1:]:
            other = cells[condition].get(label, {}).get(length)
            if base is None or other is None or (gap := difference(other, base)) is None:
                continue
            cause = {"none": "without the markers", "decoy": "among decoy markers"}.get(str(condition), str(condition))
            change = "loses" if gap.high < 0 else "gains" if gap.low > 0 else "changes by nothing measurable"
            chance = "" if other.chance is None else f", where chance is {percent(other.chance)} %"
            detail = f"{percent(base.value)} % becomes {percent(other.value)} %{chance} ({_points(gap)} points)."
            findings.append(Finding(f"{label} {cause}, {place}", change, detail))
    return findings


def budgets(curves: Sequence[CurvePoint]) -> list[Finding]:
    """For each task: was every model trained long enough to be compared?"""
    runs = learning(curves)
    findings = []
    for task, length in dict.fromkeys((run.task, run.train_length) for run in runs):
        group = [run for run in runs if (run.task, run.train_length) == (task, length)]
        place = f"{name(task)} at {tokens(length)} tokens" if length else name(task)
        learners = [run for run in group if run.learned]
        if not learners:
            detail = f"No model's answer loss stays under {LEARNED_LOSS}; all were trained for {group[0].steps:,} steps or more."
            findings.append(Finding(place, "no model learns it in the steps given", detail))
            continue
        slowest = max(learners, key=lambda run: run.learned.step if run.learned else 0)
        least = min(group, key=lambda run: run.budget or 0)
        enough = (least.budget or 0) >= BUDGET
        detail = (
            f"Learned by {_listed(dict.fromkeys(run.label for run in learners))}; the slowest of them, {slowest.label}, "
            f"needs {slowest.learned.step if slowest.learned else 0:,} steps, and every model had {least.budget or 0:.2f} "
            f"times that or more (asked for: {BUDGET})."
        )
        findings.append(Finding(place, "the budget suffices" if enough else "the budget is too short", detail))
    return findings


def perplexities(results: Sequence[Result]) -> list[str]:
    """Which models beat the unigram, and what inserted meta-tokens change."""
    rows = pivot(results, "condition", metric="perplexity")
    sentences = []
    for placement in sorted({place for row in rows.values() for place in row}, key=lambda place: place != "none"):
        values = {label: row[placement] for label, row in rows.items() if placement in row and row[placement].value}
        where = "the text alone" if placement == "none" else f"text with inserted meta-tokens ({placement})"
        below = [label for label, cell in values.items() if cell.chance and (cell.value or 0) < cell.chance]
        if any(cell.chance for cell in values.values()):
            sentences.append(f"On {where}, below the unigram perplexity: {_listed(below)}.")
        if placement != "none":
            changes = [
                f"{label} {100 * ((cell.value or 0) / alone.value - 1):+.1f} %".replace("-", MINUS)
                for label, cell in values.items()
                if (alone := rows[label].get("none")) and alone.value
            ]
            if changes:
                sentences.append(f"Insertion ({placement}) changes perplexity on the same text tokens by {_listed(changes)}.")
    return sentences


def accuracy_summary(results: Sequence[Result], task: str | None, condition: str | None) -> str:
    """One line of figures for a reader who cannot see the picture."""
    cells = pivot(results, "length", metric="exact_match", task=task, condition=condition)
    parts = []
    for length, place in key_lengths(results, task).items():
        row = [f"{label} {percent(cell[length].value)}" for label, cell in cells.items() if length in cell]
        parts.append(f"at {place} {_listed(row)}")
    return f"{name(task)}, percent exactly right: {'; '.join(parts)}."


def final_losses(curves: Sequence[CurvePoint], task: str | None) -> str:
    """The last logged loss of each model, in one line."""
    last: dict[str, CurvePoint] = {}
    for point in sorted((point for point in curves if point.task == task), key=lambda point: point.step):
        last[point.model] = point
    row = [f"{model} {point.loss:.3g} after {point.step:,} steps" for model, point in last.items()]
    return f"{name(task) if task else 'Pretraining'}, last loss: {_listed(row)}."


def caution(results: Sequence[Result], task: str | None, models: Mapping[str, ModelInfo]) -> str:
    """Seeds, n and sizes: what these figures cannot show."""
    seeds = sorted({result.seed for result in results})
    listed = ", ".join(map(str, seeds))
    sentences = [
        f"One training seed ({listed}): the intervals cover the draw of test prompts, not the luck of training."
        if len(seeds) == 1
        else f"{len(seeds)} seeds ({listed}): an interval shown covers those of all seeds."
    ]
    counts = []
    for length in key_lengths(results, task):
        n = {result.n for result in select(results, metric="exact_match", task=task, length=length) if result.n}
        if n:
            counts.append(f"n = {EN_DASH.join(map(str, sorted({min(n), max(n)})))} at {tokens(length)} tokens")
    sentences.append(f"{_listed(counts)}." if counts else "")
    sizes = [info.parameters for info in models.values() if info.parameters]
    if sizes:
        ends = EN_DASH.join(dict.fromkeys(_millions(size) for size in (min(sizes), max(sizes))))
        small = "Small models: " if max(sizes) < PAPER_PARAMETERS / 10 else "Models: "
        sentences.append(f"{small}{ends} million parameters, where the paper's has {_millions(PAPER_PARAMETERS)}.")
    return " ".join(filter(None, sentences))


def _explain_gain(cells: Mapping[str, Estimate]) -> tuple[str, str]:
    """A verdict without figures, and the comparisons behind it."""
    baselines = [model for model in BASELINES if model in cells]
    if SUBJECT not in cells or not baselines:
        return _ranking(cells)
    base = max(baselines, key=lambda model: cells[model].value or 0)
    pairs = [(SUBJECT, base)] + ([(SUBJECT, CONTROL), (CONTROL, base)] if CONTROL in cells else [])
    signs = [_sign(cells[a], cells[b]) for a, b in pairs]
    clauses = "; ".join(_clause(a, cells[a], b, cells[b]) for a, b in pairs) + "."
    match signs:
        case [-1, *_]:
            verdict = f"{SUBJECT} is below {base}"
        case [0, -1, _]:
            verdict = f"the control {CONTROL} is above {SUBJECT}, which gains nothing measurable over {base}"
        case [0, *_]:
            verdict = f"{SUBJECT} gains nothing measurable over {base}"
        case [1]:
            verdict = f"{SUBJECT} is above {base}; without a {CONTROL} nothing says why"
        case [1, 1, 1]:
            verdict = f"{SUBJECT} is above {base}, and the control {CONTROL} explains part of the gain"
        case [1, 1, _]:
            verdict = f"{SUBJECT} is above {base}, and the control {CONTROL} does not explain the gain"
        case [1, 0, _]:
            verdict = f"{SUBJECT} is above {base}, but not measurably above the control {CONTROL}"
        case _:
            verdict = f"{SUBJECT} is above {base}, and the control {CONTROL} is above {SUBJECT}"
    return verdict, clauses


def _ranking(cells: Mapping[str, Estimate]) -> tuple[str, str]:
    ranked = sorted(cells, key=lambda model: -(cells[model].value or 0))
    if len(ranked) < 2:
        return "nothing to compare", f"Only {ranked[0]} was measured." if ranked else "No model was measured."
    a, b = ranked[:2]
    verdict = f"{a} is above {b}" if _sign(cells[a], cells[b]) else f"{a} and {b} do not measurably differ"
    return verdict, _clause(a, cells[a], b, cells[b]) + "."


def _sign(a: Estimate, b: Estimate) -> int:
    gap = difference(a, b)
    return 0 if gap is None else (gap.low > 0) - (gap.high < 0)


def _clause(name_a: str, a: Estimate, name_b: str, b: Estimate) -> str:
    gap = difference(a, b)
    if gap is None:
        return f"{name_a} and {name_b} have no intervals to compare"
    if gap.low <= 0 <= gap.high:
        return f"{name_a} and {name_b} do not differ by anything that n = {min(a.n, b.n)} can show ({_points(gap)} points)"
    side = "above" if gap.value > 0 else "below"
    near, far = sorted((abs(100 * gap.low), abs(100 * gap.high)))
    return f"{name_a} is {abs(100 * gap.value):.1f} points {side} {name_b} ({near:.1f} to {far:.1f})"


def _points(gap: Difference) -> str:
    low, high = (f"{100 * bound:+.1f}".replace("-", MINUS) for bound in (gap.low, gap.high))
    return f"{low} to {high}"


def _above_chance(cells: Mapping[str, Estimate], commonest: float | None) -> str:
    chance = max((cell.chance for cell in cells.values() if cell.chance is not None), default=None)
    floors = [(chance, "chance"), (commonest, "always giving the commonest answer")]
    floor, called = max(((value, text) for value, text in floors if value is not None), default=(None, ""))
    if floor is None:
        return ""
    above = [model for model, cell in cells.items() if cell.low is not None and cell.low > floor]
    return f"Above {called} ({percent(floor)} %): {_listed(above)}."


def _not_run(cells: Mapping[str, Estimate]) -> str:
    missing = [model for model, cell in cells.items() if cell.value is None]
    return f"Cannot be run at this length: {_listed(missing)}." if missing else ""


def _listed(items: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(items) or "none"


def _millions(parameters: float) -> str:
    return f"{parameters / 1e6:.2f}" if parameters < 1e6 else f"{parameters / 1e6:,.0f}"
