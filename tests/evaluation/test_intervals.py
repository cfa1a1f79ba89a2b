"""Intervals, against statsmodels, scipy and formulas written out here."""

from math import sqrt
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from metatokens.evaluation.intervals import (
    Difference,
    Estimate,
    mean,
    newcombe,
    order,
    student,
    student_pooled,
    wilson_interval,
)
from tests.paper.report.made_lines import wilson

COUNTS = st.integers(1, 600).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
VALUES = st.lists(st.floats(-5, 5).map(lambda value: round(value, 3)), min_size=2, max_size=6).filter(
    lambda drawn: len(set(drawn)) > 1
)


@given(COUNTS)
def test_wilsons_interval(counted: tuple[int, int]) -> None:
    expected, rate = proportion_confint(*counted, method="wilson"), counted[0] / counted[1]
    low, high = wilson_interval(*counted)
    assert (low, high) == pytest.approx(expected, abs=1e-9)
    assert 0 <= low <= rate <= high <= 1
    assert wilson(rate, counted[1]) == pytest.approx(expected, abs=1e-9)  # the formula that tests of reports use


@pytest.mark.parametrize("counts", [(1, 0), (3, 2), (-1, 2)])
def test_impossible_counts(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"n|k|successes"):
        wilson_interval(*counts)


@given(COUNTS, COUNTS)
def test_newcombes_interval(a: tuple[int, int], b: tuple[int, int]) -> None:
    found = newcombe(*(Estimate(hits / n, *wilson_interval(hits, n)) for hits, n in (a, b)))
    assert found is not None
    assert found.value == a[0] / a[1] - b[0] / b[1]
    assert found[1:] == pytest.approx(confint_proportions_2indep(*a, *b, method="newcomb"), abs=1e-6)


def test_newcombes_interval_needs_both_intervals() -> None:
    whole = Estimate(0.5, 0.4, 0.6)
    assert newcombe(whole, whole) == Difference(0.0, pytest.approx(-sqrt(0.02)), pytest.approx(sqrt(0.02)))
    for partial in (None, Estimate(None, 0.4, 0.6), Estimate(0.5, None, 0.6), Estimate(0.5, 0.4, None)):
        assert newcombe(whole, partial) is None
        assert newcombe(partial, whole) is None


@given(VALUES)
def test_students_interval(values: list[float]) -> None:
    found = student(values)
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), np.std(values, ddof=1) / sqrt(len(values)))
    assert found == pytest.approx((fmean(values), low, high), abs=1e-9)
    assert student(values[:1]) is None


@given(VALUES, VALUES)
def test_the_pooled_interval_of_two_groups_is_students_of_two_samples(a: list[float], b: list[float]) -> None:
    found = student_pooled(a, b, [a, b])
    expected = CompareMeans(DescrStatsW(a), DescrStatsW(b)).tconfint_diff(usevar="pooled")
    assert found == pytest.approx((fmean(a) - fmean(b), *expected), abs=1e-9)


def test_the_pooled_spread_is_of_every_group_with_two_values() -> None:
    found = student_pooled([4.0], [1.0, 3.0], [[1.0, 3.0], [0.0, 1.0, 5.0], [9.0]])
    common = (2 + 14) / (1 + 2)  # sums of squares over degrees of freedom
    reach = 3.182446305284263 * sqrt(common * (1 + 1 / 2))  # t(3) at 97.5 %
    assert found == pytest.approx((2.0, 2 - reach, 2 + reach))
    assert student_pooled([4.0], [1.0], [[4.0], [1.0]]) is None
    assert student_pooled([], [1.0, 2.0], [[1.0, 2.0]]) is None


def test_an_order_is_of_all_values() -> None:
    assert [order(a, b) for a, b in (([1, 2], [3, 4]), ([3, 4], [1, 2]), ([1, 3], [2, 4]), ([1, 2], [2, 3]))] == [
        (1, 1, 1), (-1, -1, -1), (0, 0, 0), (0, 0, 0)
    ]  # fmt: skip
    assert order([], [1]) is None
    assert order([1], []) is None


def test_a_mean_averages_the_ends_and_adds_the_counts() -> None:
    none = Estimate(None, None, None, 7)
    found = mean([Estimate(0.2, 0.1, 0.4, 50), none, Estimate(0.6, 0.5, 0.8, 70, 0.1)])
    assert found == (pytest.approx(0.4), pytest.approx(0.3), pytest.approx(0.6), 120, 0.1)
    assert mean([Estimate(0.2, 0.1, 0.4), Estimate(0.6, None, 0.8)]) == (0.4, None, pytest.approx(0.6), 0, None)
    assert mean([none]) is None
