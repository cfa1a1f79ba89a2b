"""The records of analyses: means and intervals, computed by hand."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metatokens.analysis.samples import Samples, summary
from metatokens.evaluation.intervals import wilson_interval


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_with_one_value_an_example_the_interval_is_the_usual_one(values):
    summarized = summary([np.array([value]) for value in values])

    mean = statistics.fmean(values)
    reach = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    assert summarized["n"] == len(values)
    assert summarized["value"] == pytest.approx(mean)
    assert summarized["low"] == pytest.approx(mean - reach)
    assert summarized["high"] == pytest.approx(mean + reach)


def test_values_of_one_example_count_as_one_in_the_interval():
    once = summary([np.array([value]) for value in (1.0, 2.0, 4.0)])
    often = summary([np.full(50, value) for value in (1.0, 2.0, 4.0)])

    assert often["n"] == 150
    for end in ("value", "low", "high"):
        assert often[end] == pytest.approx(once[end])


def test_the_interval_covers_the_mean_of_examples_of_different_sizes():
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        examples = []
        for size in draw.integers(1, 9, size=60):
            mean_of_example = draw.normal(3, 1)
            examples.append(draw.normal(mean_of_example, 1, size=size))
        summarized = summary(examples)
        covered += summarized["low"] <= 3 <= summarized["high"]

    assert 0.91 < covered / 400 < 0.98


def test_proportions_stay_in_range():
    summarized = summary([np.array([True] * 9), np.array([True, False])])
    certain = summary([np.array([True] * 9)] * 4)

    assert summarized["value"] == pytest.approx(10 / 11)
    assert 0 <= summarized["low"] < summarized["value"] < summarized["high"] <= 1
    assert (certain["low"], certain["high"]) == wilson_interval(4, 4)


def test_nothing_to_average_and_a_single_example():
    single = summary([np.array([1.0, 3.0])])

    assert summary([np.array([])]) == {"value": None, "n": 0}
    assert single["value"] == 2.0
    assert "low" not in single


def test_samples_are_filed_by_their_fields():
    samples = Samples()
    samples.add(torch.tensor([[1.0, 2.0]]), metric="similarity_centred", layer=0)
    samples.add(torch.tensor(5.0), metric="similarity_centred", layer=1)
    samples.add(torch.tensor(3.0), metric="similarity_centred", layer=0)
    samples.next_example()
    samples.add(torch.tensor(6.0), metric="similarity_centred", layer=0)

    first, second = samples.measurements(
        analysis="residual", model="meta", position_embedding="rope", seed=0
    )

    expected = summary([np.array([1.0, 2.0, 3.0]), np.array([6.0])])
    assert (first.layer, first.value, first.n) == (0, 3.0, 4)
    assert (second.layer, second.value, second.n) == (1, 5.0, 1)
    assert first.low == pytest.approx(expected["low"])
    assert first.high == pytest.approx(expected["high"])
