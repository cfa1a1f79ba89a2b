"""How a claim and its comparisons read: verdict, counts, median, and every comparison in a table."""

import math
from statistics import median

from metatokens.evaluation.intervals import Difference
from metatokens.paper.report.compare import Comparison
from metatokens.paper.report.tables.table import Table
from metatokens.paper.report.text import MINUS, NOT_YET, name, signed
from metatokens.paper.report.verdict import Judged

MARKS = {"holds": "\u2713", "does not hold": "\u2717", "holds in part": "\u25d0", "cannot be told at this scale": "?"}
_UNITS = {"points": " points", "percent": "\u00a0%", "nats": " nats", "times": " times", "plain": ""}
PLURALS = {
    "holds": "hold",
    "does not hold": "do not hold",
    "holds in part": "hold in part",
    "cannot be told at this scale": "cannot be told",
}
_SEEDS = {1: "one seed", 2: "two seeds"}
SIDES = ("for", "short", "open", "against")


def so_far(judged: Judged) -> str:
    """After a verdict: on how few trainings it rests, and whether what is still to be run may turn it."""
    if not judged.run:
        return " (not run)"
    few, total = judged.few_seeds, len(judged.informative)
    told = [_SEEDS[seeds] if n == total else f"{n} of {total} on {_SEEDS[seeds]}" for seeds, n in few.items()]
    is_settled = judged.claim.universal and judged.verdict == "does not hold"
    if 2 * len(judged.run) < len(judged.comparisons) and not is_settled:
        told.append("so far")
    return f" ({', '.join(told)})" if told else ""


def parts(judged: Judged) -> str:
    """Of a claim on several tasks, in which it holds, does not, and cannot be told; empty of others."""
    by_verdict: dict[str, list[str]] = {}
    for task, verdict in judged.by_task.items():
        by_verdict.setdefault(verdict.removesuffix(" at this scale"), []).append(name(task).lower())
    return "; ".join(f"{verdict} in {', '.join(tasks)}" for verdict, tasks in by_verdict.items())


def counts(judged: Judged) -> str:
    """`31 : 2 of 36`, for and against of the informative comparisons; an ellipsis where nothing was run."""
    if not judged.run:
        return NOT_YET
    further = {"short": judged.count("short"), "not run": len(judged.comparisons) - len(judged.run)}
    told = [f"{judged.count('for')} : {judged.count('against')} of {len(judged.informative)}"]
    told += [f"{number} {what}" for what, number in further.items() if number]
    return ", ".join(told)


def quote(judged: Judged) -> str:
    """The comparison that the claim names, or the only one: its figures, or how large it is; empty where not run."""
    only = judged.comparisons[0].label if len(judged.comparisons) == 1 else judged.claim.quote
    one = next((one for one in judged.run if one.label == only), None)
    if one is None:
        return ""
    return f"{one.label[0].lower()}{one.label[1:]}: {one.figures or _interval(judged, one.gap)}"


def tally(judged: Judged) -> str:
    """All the figures in a line."""
    gaps = [one.gap.value for one in judged.informative if one.gap and len(judged.comparisons) > 1]
    spread = f"median {_amount(judged, median(gaps))}" if gaps else ""
    told = counts(judged).replace(" : ", " for, ").replace(" of ", " against of ", 1)
    return "; ".join(filter(None, [quote(judged), told, spread, parts(judged)]))


def sentence(judged: Judged) -> str:
    """The verdict, the claim and its figures."""
    verdict = judged.verdict
    return f"{MARKS[verdict]} {verdict.capitalize()}{so_far(judged)}: {judged.claim.text} ({tally(judged)})."


def headline(judged: Judged) -> str:
    """The claim's verdict and counts as a sentence."""
    said, verdict = judged.claim.text.rpartition(": ")[2], judged.verdict.removesuffix(" at this scale")
    said = f"{said[0].lower()}{said[1:]}"
    is_told = "Whether" if judged.why else "That"
    counted = f"{judged.count('for')} of {len(judged.informative)} comparisons are for it"
    quoted = f" ({one})" if (one := quote(judged)) else ""
    return f"{is_told} {said} {verdict}{so_far(judged)}: {counted}, {judged.count('against')} against{quoted}."


def evidence(judged: Judged) -> Table:
    """The comparisons behind a claim."""
    claim = judged.claim
    rows = tuple(
        (
            one.label,
            one.figures,
            _order(one.gap) if claim.section == "learning" else _interval(judged, one.gap),
            " / ".join(_amount(judged, gap).split()[0] for gap in one.by_seed),
            _says(judged, one),
        )
        for one in judged.comparisons
    )
    spread = "quartiles of the rounds" if claim.section == "speed" else "95 % interval"
    header = ("comparison", "figures", f"difference ({spread})", "by seed", "says")
    return Table(f"{claim.text}: {judged.verdict}", header, rows)


def _says(judged: Judged, one: Comparison) -> str:
    if one.gap is None:
        return NOT_YET
    return judged.says(one) if judged.is_informative(one) else "uninformative"


def _order(gap: Difference | None) -> str:
    """Of two sides' seeds, which learned first; 1, 0 or -1 is no amount."""
    return NOT_YET if gap is None else {1.0: "all before", 0.0: "seeds overlap", -1.0: "all after"}[gap.value]


def _amount(judged: Judged, value: float) -> str:
    """A difference in the claim's unit."""
    unit = judged.claim.unit
    if unit in ("points", "percent"):
        return signed(math.expm1(value) if unit == "percent" else value) + _UNITS[unit]
    return f"{value:+.3g}{_UNITS[unit]}".replace("-", MINUS)


def _interval(judged: Judged, gap: Difference | None) -> str:
    """A difference and its interval in the claim's unit; an ellipsis where it was not run."""
    if gap is None:
        return NOT_YET
    unit = _UNITS[judged.claim.unit]
    value, low, high = (_amount(judged, end).removesuffix(unit) for end in gap)
    return f"{value} ({low} to {high}){unit}"
