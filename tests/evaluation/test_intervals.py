"""Wilson's interval."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.evaluation.intervals import wilson_interval


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_the_closed_formula(counts: tuple[int, int]) -> None:
    successes, n = counts
    z, p = 1.959963984540054, successes / n  # z: the normal distribution's 97.5 % point
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = wilson_interval(successes, n)
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=1e-9)
    assert 0 <= low <= p <= high <= 1


@pytest.mark.parametrize("counts", [(1, 0), (3, 2), (-1, 2)])
def test_impossible_counts(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"n|k|successes"):
        wilson_interval(*counts)
