"""The sentences of the first screen, and the tables of the claims; the data choose the words."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from metatokens.paper import rule
from metatokens.paper.claims import Claim, ClaimResult, MeasuredStratum
from metatokens.paper.report.make_table import Row, Table
from metatokens.paper.report.text import NOT_RUN, listed, number, words
from metatokens.paper.rule import Effect

# By unit: the factor, the digits after the point, and the word.
_UNITS = {
    "points": (100.0, 1, "points"),
    "nats": (1.0, 2, "nats"),
    "logits": (1.0, 2, "logits"),
    "cosine": (1.0, 2, "cosine"),
    "times": (1.0, 2, "times"),
    "percent": (100.0, 1, "% perplexity"),
}


def amount(effect: Effect, unit: str) -> str:
    """An effect and its interval: `+11.2 points (+4.0 to +18.4)`, `−1.9 % perplexity (−3.4 to −0.2)`."""
    ends = [end for end in (effect.value, effect.low, effect.high) if math.isfinite(end)]
    if not ends:
        return NOT_RUN
    scale, digits, word = _UNITS[unit]
    if unit == "percent":  # the logarithm of how many times as much the other side has
        ends = [math.expm1(-end) for end in (ends[0], *reversed(ends[1:]))]
    shown = [number(scale * end, digits, "+") for end in ends]
    interval = f" ({shown[1]} to {shown[2]})" if len(shown) == 3 else ""
    return f"{shown[0]} {word}{interval}"


def verdict(result: ClaimResult) -> str:
    """The verdict in words: with the smallest effect of interest, or with the tasks that a supported claim needs."""
    claim = result.claim
    scale, _, word = _UNITS[claim.unit]
    smallest = -math.expm1(-claim.smallest) if claim.unit == "percent" else claim.smallest
    if result.without:
        return f"supported only with {listed([_task(task) for task in result.without])}"
    if result.verdict in ("no lead", "within"):
        of = " of" if result.verdict == "no lead" else ""
        return f"{result.verdict}{of} {scale * smallest:.3g} {word}"
    return result.verdict


def _task(task: str) -> str:
    return words("task", task).lower()


def _of_tasks(effects: Mapping[str, Effect], unit: str) -> list[str]:
    """Effects, each after the name of its task."""
    return [f"{_task(task)} {amount(effect, unit)}" for task, effect in effects.items()]


# --- The first screen


def sentences(results: Sequence[ClaimResult]) -> list[str]:
    """How many claims have each verdict, and the main claims task by task."""
    primary = [result for result in results if result.claim.primary and result.strata]
    return [counts(results), *(_by_task(result, len(primary)) for result in primary)]


def counts(results: Sequence[ClaimResult]) -> str:
    """How many of the paper's claims have each verdict; those that are true by construction are counted apart."""
    of_paper = [result for result in results if result.claim.number is not None]
    told = Counter(verdict(result) for result in of_paper if not result.claim.by_construction)
    constructed = len(of_paper) - told.total()
    verdicts = listed([f"{count} {word}" for word, count in told.most_common()])
    return (
        f"The paper makes {len(of_paper)} claims. {constructed} are true by construction: the way of measuring decides "
        f"them. At this scale the other {told.total()} are: {verdicts}."
    )


def _by_task(result: ClaimResult, tests: int) -> str:
    """A main claim, task by task; the mean of tasks, which carries the verdict, comes last."""
    tasks = _of_tasks(result.tasks, "points")
    without = [f"; without {effect}" for effect in _of_tasks(result.without, "points")]
    lost = "" if result.holds_among(tests) else f", but not if corrected for {tests} main claims"
    return (
        f"Main claim, \u201c{result.claim.text}\u201d: {', '.join(tasks)}. In the mean of tasks "
        f"{amount(result.effect, 'points')}{''.join(without)}: {verdict(result)}{lost}."
    )


# --- The claims


def claim_tables(results: Sequence[ClaimResult]) -> list[Table]:
    """A table for each question: its claims with verdict, effect, effect by task, and runs."""
    tables = []
    for question in dict.fromkeys(result.claim.question for result in results):
        of_question = [result for result in results if result.claim.question == question]
        rows = [_claim_row(result) for result in of_question if result.verdict != "not measured"]
        left_out = [
            _left_out(result.claim) for result in of_question if result.verdict == "not measured"
        ]
        header = ("claim", "verdict", "difference (95 % interval)", "by task", "runs a side")
        note = f"Not measured: {'; '.join(left_out)}." if left_out else ""
        tables.append(Table(question, header, rows, note))
    return tables


def _left_out(claim: Claim) -> str:
    return f"{claim.title} ({claim.note})" if claim.note else claim.title


def _claim_row(result: ClaimResult) -> Row:
    claim = result.claim
    main = "Main claim: " if claim.primary else ""
    built = "True by construction. " if claim.by_construction else ""
    label = [f"{main}{claim.title} ({claim.source})"]
    if claim.note:
        label.append(built + claim.note)
    without = [f"without {effect}" for effect in _of_tasks(result.without, claim.unit)]
    by_task = [effect.replace(" points", "") for effect in _of_tasks(result.tasks, claim.unit)]
    runs = {len(sample) for stratum in result.strata for sample in stratum.samples}
    return (
        tuple(label),
        verdict(result),
        (amount(result.effect, claim.unit), *without),
        "" if len(by_task) < 2 or claim.universal else tuple(by_task),
        " or ".join(map(str, sorted(runs))) or NOT_RUN,
    )


def evidence(result: ClaimResult) -> Table:
    """A row for each stratum of a claim: its effect, the means compared, the number of runs and the settings."""
    rows = [
        _evidence_row(result.claim, stratum, rule.effect([stratum])) for stratum in result.strata
    ]
    rows += [_evidence_row(result.claim, stratum, Effect()) for stratum in result.empty_strata]
    header = ("", "difference (95 % interval)", "means compared", "runs", "settings")
    return Table(f"{result.claim.title}: {verdict(result)}", header, rows)


def _evidence_row(claim: Claim, stratum: MeasuredStratum, effect: Effect) -> Row:
    label = [words(key, value) for key, value in stratum.fields.items() if value != "rope"]
    if len(claim.b) > 1 and isinstance(stratum.against, dict):
        label.append(f"against {stratum.against['model']}")
    return (
        ", ".join(label) or "all",
        amount(effect, claim.unit),
        _means(claim, stratum),
        " and ".join(str(len(sample)) for sample in stratum.samples) or NOT_RUN,
        _settings(stratum),
    )


def _means(claim: Claim, stratum: MeasuredStratum) -> str:
    """The means of what was compared, over the settings that count."""
    scale, digits, _ = _UNITS[claim.unit]
    counted = [setting.means for setting in stratum.settings if not setting.left_out]
    means = np.mean(counted or [setting.means for setting in stratum.settings], axis=0)
    shown = np.exp(means) if claim.unit == "percent" else scale * means
    return ", ".join(number(value, digits) for value in shown)


def _settings(stratum: MeasuredStratum) -> str:
    """Its settings, and why some were left out."""
    by_reason: dict[str, list[str]] = {}
    for setting in stratum.settings:
        labels = [words(*item) for item in setting.fields.items() if item[0] not in stratum.fields]
        by_reason.setdefault(setting.left_out or "counted", []).append(" \u2192 ".join(labels))
    return "; ".join(f"{reason}: {', '.join(labels)}" for reason, labels in by_reason.items())
