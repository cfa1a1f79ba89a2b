"""The interval of a share of answers that come in clusters."""

import numpy as np
import pytest

from metatokens.evaluation.intervals import clustered_interval, wilson_interval


@pytest.mark.parametrize("is_all_or_nothing", [True, False])
def test_an_interval_holds_the_truth_in_95_percent_of_the_cases(is_all_or_nothing):
    draw = np.random.default_rng(0)
    holds = []
    for _ in range(500):
        clusters = []
        for size in draw.integers(1, 12, size=80):
            answers = draw.random(1 if is_all_or_nothing else size) < 0.7
            clusters.append(np.resize(answers, size))
        low, high = clustered_interval(clusters)
        holds.append(low <= 0.7 <= high)
    # Four standard errors below 95 %, and never much above it.
    assert 0.91 < np.mean(holds) < 0.99


def test_without_a_difference_between_clusters_it_is_that_of_single_answers():
    assert clustered_interval([[True, False]] * 50) == wilson_interval(50, 100)
    assert clustered_interval([[True] * 8]) == wilson_interval(8, 8)
