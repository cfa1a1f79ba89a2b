"""All 95 % intervals: of a proportion, of the mean of several figures, and of the difference of two."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev, variance
from typing import NamedTuple

from scipy.stats import binomtest
from scipy.stats import t as student_t


class Estimate(NamedTuple):
    """One figure, or the difference of two; `value` is None where the model cannot be run, ends where not known."""

    value: float | None
    low: float | None
    high: float | None
    n: int = 0
    chance: float | None = None

    @classmethod
    def of(cls, ends: Iterable[float], n: int = 0, chance: float = math.nan) -> "Estimate":
        """From the value, the two ends and chance as a frame has them, NaN where there is none."""
        value, low, high, chance_or_none = (None if math.isnan(end) else end for end in (*ends, chance))
        return cls(value, low, high, n, chance_or_none)


class Difference(NamedTuple):
    """The difference of two figures with its interval."""

    value: float
    low: float
    high: float


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The Wilson 95 % score interval of a proportion, as (low, high).

    Raises:
        ValueError: if n is 0 or successes is outside [0, n].
    """
    interval = binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def mean(ones: Iterable[Estimate]) -> Estimate | None:
    """The mean of several figures of the same prompts, such as those of seeds, or of heads; None where there is none.

    They are taken as wholly dependent: the half-widths of their intervals are averaged. How far the prompts move them
    together cannot be told from the lines, and independent ones would have a narrower interval.
    """
    run = [one for one in ones if one.value is not None]
    if not run:
        return None
    values, lows, highs, ns, chances = zip(*run, strict=True)
    low, high = (None if None in ends else fmean(ends) for ends in (lows, highs))
    return Estimate(fmean(values), low, high, sum(ns), next((one for one in chances if one is not None), None))


def newcombe(a: Estimate | None, b: Estimate | None) -> Difference | None:
    """a - b with Newcombe's hybrid score interval, made from the intervals of the two; None where one is missing.

    Source: R. G. Newcombe, Statistics in Medicine 17 (1998), method 10. It takes the two samples as independent; on a
    test set that the models share it is usually the wider one.
    """
    if a is None or a.value is None or a.low is None or a.high is None:
        return None
    if b is None or b.value is None or b.low is None or b.high is None:
        return None
    gap = a.value - b.value
    down = math.hypot(a.value - a.low, b.high - b.value)
    up = math.hypot(a.high - a.value, b.value - b.low)
    return Difference(gap, gap - down, gap + up)


def student(gaps: Sequence[float]) -> Difference | None:
    """The mean of differences with Student's interval; None of fewer than two."""
    if len(gaps) < 2:
        return None
    reach = float(student_t.ppf(0.975, len(gaps) - 1)) * stdev(gaps) / math.sqrt(len(gaps))
    return Difference(fmean(gaps), fmean(gaps) - reach, fmean(gaps) + reach)


def student_pooled(a: Sequence[float], b: Sequence[float], groups: Iterable[Sequence[float]]) -> Difference | None:
    """mean(a) - mean(b) with Student's interval; the spread is that within all the groups, taken to be alike.

    So a side of a single value can be compared too. None where a side is empty, or no group has two values.
    """
    spread = [(variance(group), len(group) - 1) for group in groups if len(group) > 1]
    freedom = sum(degrees for _, degrees in spread)
    if not a or not b or not freedom:
        return None
    common = sum(one * degrees for one, degrees in spread) / freedom
    gap = fmean(a) - fmean(b)
    reach = float(student_t.ppf(0.975, freedom)) * math.sqrt(common * (1 / len(a) + 1 / len(b)))
    return Difference(gap, gap - reach, gap + reach)


def order(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """1 where all of a come before all of b, -1 where after, 0 where they overlap; None where a side is empty.

    Of three on each side, one chance in twenty each way.
    """
    if not a or not b:
        return None
    before = float((max(a) < min(b)) - (max(b) < min(a)))
    return Difference(before, before, before)
