"""All 95 % intervals: of a proportion, of a mean, of the mean of several figures, and of the difference of two."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev, variance
from typing import NamedTuple

from scipy.stats import binomtest
from scipy.stats import t as student_t


class Estimate(NamedTuple):
    """A figure with its interval; `value` is None where the model cannot be run, `low` and `high` where unknown."""

    value: float | None
    low: float | None
    high: float | None
    n: int = 0
    chance: float | None = None

    @classmethod
    def of(cls, ends: Iterable[float], n: int = 0, chance: float = math.nan) -> "Estimate":
        """Make an estimate from (value, low, high) and chance as a data frame holds them, with NaN for None."""
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


def normal_interval(mean: float, standard_error: float) -> tuple[float, float]:
    """The 95 % interval of a mean with this standard error, as (low, high), by the normal approximation."""
    return mean - 1.96 * standard_error, mean + 1.96 * standard_error


def mean(ones: Iterable[Estimate]) -> Estimate | None:
    """The mean of several figures of the same prompts, such as those of seeds or heads; None if there are none.

    The figures are taken as fully dependent, so the half-widths of their intervals are averaged. Result lines do not
    show how much the shared prompts move them together; independent figures would have a narrower interval.
    """
    run = [one for one in ones if one.value is not None]
    if not run:
        return None
    values, lows, highs, ns, chances = zip(*run, strict=True)
    low, high = (None if None in ends else fmean(ends) for ends in (lows, highs))
    return Estimate(fmean(values), low, high, sum(ns), next((one for one in chances if one is not None), None))


def newcombe(a: Estimate | None, b: Estimate | None) -> Difference | None:
    """a - b with Newcombe's hybrid score interval, made from the two intervals; None if one is missing.

    Source: R. G. Newcombe, Statistics in Medicine 17 (1998), method 10. The method assumes independent samples; for
    models that share a test set its interval is usually too wide.
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
    """The mean of differences with Student's interval; None for fewer than two."""
    if len(gaps) < 2:
        return None
    reach = float(student_t.ppf(0.975, len(gaps) - 1)) * stdev(gaps) / math.sqrt(len(gaps))
    return Difference(fmean(gaps), fmean(gaps) - reach, fmean(gaps) + reach)


def student_pooled(a: Sequence[float], b: Sequence[float], groups: Iterable[Sequence[float]]) -> Difference | None:
    """mean(a) - mean(b) with Student's interval, whose variance is pooled over all the groups.

    So a side with a single value can be compared too. None if a side is empty or no group has two values.
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
    """1 if all of a come before all of b, -1 if after, 0 if they overlap; None if a side is empty.

    With three values on each side, chance gives 1 once in twenty times, and -1 as often.
    """
    if not a or not b:
        return None
    before = float((max(a) < min(b)) - (max(b) < min(a)))
    return Difference(before, before, before)
