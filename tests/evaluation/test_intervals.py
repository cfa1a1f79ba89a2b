"""The interval of a proportion, against statsmodels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.proportion import proportion_confint

from metatokens.evaluation.intervals import wilson_interval
from tests.paper.report.made_lines import wilson

COUNTS = st.integers(1, 600).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(COUNTS)
def test_wilsons_interval(counted: tuple[int, int]) -> None:
    expected, rate = proportion_confint(*counted, method="wilson"), counted[0] / counted[1]
    low, high = wilson_interval(*counted)
    assert (low, high) == pytest.approx(expected, abs=1e-9)
    assert 0 <= low <= rate <= high <= 1
    # The formula that tests of reports use.
    assert wilson(rate, counted[1]) == pytest.approx(expected, abs=1e-9)
