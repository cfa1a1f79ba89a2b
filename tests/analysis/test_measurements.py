"""The records of analyses: means, intervals and quantiles, computed by hand."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metatokens.analysis.samples import Samples, summary
from metatokens.evaluation.intervals import wilson_interval
from metatokens.records import QUANTILES

FIELDS = {"analysis": "sharpness", "model": "meta", "position_embedding": "rope", "seed": 0}


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_with_one_value_an_example_the_interval_is_the_usual_one(values: list[float]) -> None:
    found = summary([np.array([value]) for value in values])
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert found["n"] == len(values)
    assert found["value"] == pytest.approx(statistics.fmean(values))
    assert (found["low"], found["high"]) == pytest.approx(
        (found["value"] - 1.96 * error, found["value"] + 1.96 * error)
    )


def test_values_of_one_example_count_as_one_in_the_interval() -> None:
    once = summary([np.array([value]) for value in (1.0, 2.0, 4.0)])
    often = summary([np.full(50, value) for value in (1.0, 2.0, 4.0)])
    assert often["n"] == 150
    assert (often["value"], often["low"], often["high"]) == pytest.approx((once["value"], once["low"], once["high"]))


def test_the_interval_covers_the_mean_of_examples_of_different_sizes() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        sizes = generator.integers(1, 9, size=60)
        found = summary([generator.normal(generator.normal(3, 1), 1, size=size) for size in sizes])
        hits += found["low"] <= 3 <= found["high"]
    assert 0.91 < hits / 400 < 0.98


def test_quantiles() -> None:
    found = summary([np.arange(60.0), np.arange(60.0, 101.0)])
    assert found["quantiles"] == pytest.approx([100 * level for level in QUANTILES])


def test_proportions_have_no_quantiles_and_stay_in_range() -> None:
    found = summary([np.array([True] * 9), np.array([True, False])])
    assert (found["value"], found["n"]) == (pytest.approx(10 / 11), 11)
    assert 0 <= found["low"] < found["value"] < found["high"] <= 1
    assert "quantiles" not in found
    certain = summary([np.array([True] * 9)] * 4)
    assert (certain["low"], certain["high"]) == wilson_interval(4, 4)


def test_nothing_to_average_and_a_single_example() -> None:
    assert summary([np.array([])]) == {"value": None, "n": 0}
    single = summary([np.array([1.0, 3.0])])
    assert (single["value"], "low" in single) == (2.0, False)


def test_samples_are_filed_by_their_fields() -> None:
    samples = Samples()
    samples.add(0, torch.tensor([[1.0, 2.0]]), metric="similarity_centred", layer=0)
    samples.add(1, torch.tensor(6.0), metric="similarity_centred", layer=0)
    samples.add(0, torch.tensor(5.0), metric="similarity_centred", layer=1)
    samples.add(0, torch.tensor(3.0), metric="similarity_centred", layer=0)
    first, second = samples.measurements(**FIELDS | {"analysis": "residual"})
    assert (first.layer, first.value, first.n, second.layer, second.value, second.n) == (0, 3.0, 4, 1, 5.0, 1)
    expected = summary([np.array([1.0, 2.0, 3.0]), np.array([6.0])])
    assert (first.low, first.high) == pytest.approx((expected["low"], expected["high"]))
