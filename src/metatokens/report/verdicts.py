"""When a claim holds: the rule that docs/paper_map.md wrote down before the run, under "Verdicts"."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, stdev
from typing import Literal

from scipy.stats import t as student

from metatokens.report.estimates import Difference, Estimate, difference
from metatokens.report.grid import Cell
from metatokens.report.wording import MINUS, NOT_YET, percent, signed

Verdict = Literal["holds", "does not hold", "cannot be told at this scale"]

HAIR = 0.02  # of a proportion: as close to guessing, or to 1, as this, a figure tells nothing apart
SMALL = 0.05  # of a proportion: a gain below this is none to speak of, and a loss below this is a match
FEWEST = 3  # informative comparisons that a verdict asks for, where a claim lists so many
BY_LUCK = 1 / 20  # of the informative comparisons, those against a claim that holds nevertheless


@dataclass(frozen=True)
class Comparison:
    """The difference of two figures, or of one and a bound: what the claim says is that it lies above a margin."""

    label: str
    gap: Difference | None = None
    """None where a figure was not run, or cannot be."""
    by_seed: tuple[float, ...] = ()
    """The difference of each seed that both sides have; one alone has no sign to agree with."""
    is_informative: bool = True
    """Whether the figures can tell: not both at guessing, nor both at 1, nor against a bound of another machine."""
    figures: str = ""
    """The two figures as a reader sees them."""

    def side(self, margin: float) -> int:
        """1 where it lies above the margin, with every seed; -1 where below; 0 where that cannot be told."""
        if self.gap is None:
            return 0
        if self.gap.low > margin and all(gap > margin for gap in self.by_seed):
            return 1
        return -1 if self.gap.high < margin and all(gap < margin for gap in self.by_seed) else 0


@dataclass(frozen=True)
class Claim:
    """Something said to be so, and the comparisons that it rests on."""

    text: str
    source: str
    section: str
    """The anchor of the section that shows it."""
    comparisons: tuple[Comparison, ...]
    margin: float = 0.0
    """Above which each difference is said to lie; negative for a claim that nothing is lost."""
    negligible: float = SMALL
    """A difference shown to be below this is none to speak of."""
    is_universal: bool = False
    """Whether one exception refutes it."""
    unit: Literal["points", "percent", "nats", "times", "plain"] = "points"
    decisive: str = ""
    """What stands first among the figures."""

    @cached_property
    def informative(self) -> list[Comparison]:
        """The comparisons that were run and leave room for a difference."""
        return [one for one in self.comparisons if one.gap is not None and one.is_informative]

    @property
    def for_it(self) -> int:
        """How many informative comparisons lie above the margin."""
        return sum(one.side(self.margin) > 0 for one in self.informative)

    @property
    def against(self) -> int:
        """How many lie below it."""
        return sum(one.side(self.margin) < 0 for one in self.informative)

    @property
    def short(self) -> int:
        """How many are shown to be no gain to speak of, those against included."""
        return sum(self._is_short(one) for one in self.informative)

    @property
    def run(self) -> list[Comparison]:
        """The comparisons that were run."""
        return [one for one in self.comparisons if one.gap is not None]

    @property
    def verdict(self) -> Verdict:
        """What the comparisons say of the claim."""
        informative = len(self.informative)
        if self.is_universal and self.short:
            return "does not hold"
        if informative < min(FEWEST, len(self.comparisons)) or informative == 0:
            return "cannot be told at this scale"
        if self.is_universal:
            complete = self.for_it == informative and len(self.run) == len(self.comparisons)
            return "holds" if complete else "cannot be told at this scale"
        if 2 * self.for_it >= informative and self.against <= BY_LUCK * informative:
            return "holds"
        if self.against > self.for_it or 2 * self.short > informative:
            return "does not hold"
        return "cannot be told at this scale"

    def says(self, one: Comparison) -> str:
        """What one of the comparisons says of the claim, in a word or two."""
        if one.gap is None:
            return NOT_YET
        if not one.is_informative:
            return "uninformative"
        side = one.side(self.margin)
        return {1: "for", -1: "against"}.get(side, "short" if self._is_short(one) else "open")

    def so_far(self) -> str:
        """After a verdict: whether what is still to be run may turn it."""
        if not self.run:
            return " (not run)"
        is_settled = self.is_universal and self.verdict == "does not hold"
        return " (so far)" if 2 * len(self.run) < len(self.comparisons) and not is_settled else ""

    def counts(self) -> str:
        """`31 : 2 of 36`, for and against of the informative comparisons; an ellipsis where nothing was run."""
        if not self.run:
            return NOT_YET
        further = {"short": self.short - self.against, "not run": len(self.comparisons) - len(self.run)}
        told = [f"{self.for_it} : {self.against} of {len(self.informative)}"]
        told += [f"{number} {what}" for what, number in further.items() if number]
        if self.unit == "points" and not any(one.by_seed for one in self.run):
            told.append("one seed")
        elif self.unit == "points" and (single := sum(not one.by_seed for one in self.informative)):
            told.append(f"{single} of one seed")
        return ", ".join(told)

    def middle(self) -> str:
        """The median difference, or the one that there is with its interval; empty where none is informative."""
        gaps = [one.gap for one in self.informative if one.gap]
        if len(self.comparisons) == 1:
            return self.interval(gaps[0]) if gaps and not self.decisive else ""
        return self.amount(median(gap.value for gap in gaps)) if gaps else ""

    def tally(self) -> str:
        """All the figures in a line."""
        middle = self.middle()
        spread = f"{'median ' if len(self.comparisons) > 1 else ''}{middle}" if middle else ""
        counts = self.counts().replace(" : ", " for, ").replace(" of ", " against of ", 1)
        return "; ".join(filter(None, [self.decisive, counts, spread]))

    def _is_short(self, one: Comparison) -> bool:
        return one.side(self.margin) <= 0 and one.side(max(self.margin, self.negligible)) < 0

    def amount(self, value: float) -> str:
        """A difference in the claim's unit."""
        match self.unit:
            case "points":
                return f"{signed(value)} points"
            case "percent":
                return f"{signed(math.expm1(value))}\u00a0%"
            case "nats" | "times" as unit:
                return f"{value:+.3g} {unit}".replace("-", MINUS)
            case _:
                return f"{value:+.3g}".replace("-", MINUS)

    def interval(self, gap: Difference | None) -> str:
        """A difference and its interval in the claim's unit; an ellipsis where it was not run."""
        if gap is None:
            return NOT_YET
        unit = {"points": " points", "percent": "\u00a0%", "nats": " nats", "times": " times", "plain": ""}[self.unit]
        value, low, high = (self.amount(end).removesuffix(unit) for end in (gap.value, gap.low, gap.high))
        return f"{value} ({low} to {high}){unit}"


def between(label: str, a: Cell | None, b: Cell | None, *, floor: float = 0.0, is_match: bool = False) -> Comparison:
    """a - b by the seeds that both have, with Newcombe's interval.

    Args:
        label: what is compared.
        a, b: the figures; None where one was not run.
        floor: what guessing scores.
        is_match: whether the claim is that nothing is lost, of which two figures at 1 tell something.
    """
    seeds = sorted(a.seeds.keys() & b.seeds.keys()) if a and b else []
    if not a or not b or not seeds:
        return Comparison(label)
    ours, theirs = a.pooled(seeds), b.pooled(seeds)
    assert ours is not None
    assert theirs is not None
    gaps = tuple((a.seeds[seed].value or 0.0) - (b.seeds[seed].value or 0.0) for seed in seeds)
    figures = f"{percent(ours.value)} v {percent(theirs.value)}"
    is_low = all(one.low is not None and one.low <= floor + HAIR for one in (ours, theirs))
    is_high = not is_match and all(one.value is not None and one.value >= 1 - HAIR for one in (ours, theirs))
    by_seed = gaps if len(gaps) > 1 else ()
    return Comparison(label, difference(ours, theirs), by_seed, not is_low and not is_high, figures)


def less(a: Cell | None, b: Cell | None) -> Cell | None:
    """a - b seed by seed, each with Newcombe's interval; None where one of them was not run, or cannot be."""
    if not a or not b:
        return None
    gaps = {seed: difference(a.seeds[seed], b.seeds[seed]) for seed in sorted(a.seeds.keys() & b.seeds.keys())}
    found = {seed: Estimate(gap.value, gap.low, gap.high, a.seeds[seed].n, None) for seed, gap in gaps.items() if gap}
    return Cell(found) if found else None


def above(label: str, cell: Cell | None, bound: float) -> Comparison:
    """A figure less a bound."""
    if cell is None or (pooled := cell.pooled()) is None:
        return Comparison(label)
    values = tuple((one.value or 0.0) - bound for one in cell.seeds.values())
    return Comparison(label, shifted(pooled, bound), values if len(values) > 1 else (), figures=percent(pooled.value))


def shifted(figure: Estimate, bound: float) -> Difference | None:
    """A figure and its interval, less a bound that is known."""
    if figure.value is None or figure.low is None or figure.high is None:
        return None
    return Difference(figure.value - bound, figure.low - bound, figure.high - bound)


def mean_gap(values: Sequence[float]) -> Difference | None:
    """The mean of differences with Student's 95 % interval; None of fewer than two."""
    if len(values) < 2:
        return None
    reach = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Difference(fmean(values), fmean(values) - reach, fmean(values) + reach)
