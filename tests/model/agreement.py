"""Whether logits and gradients that were computed in two ways agree."""

import torch
from torch import Tensor

from tests.gradients import Gradients, far
from tests.model.dense_oracle import DenseOracle
from tests.numbers import ROUNDED_DOUBLE

# Rotary tables are float32 in transformers, whatever the model's type, so they bound the agreement with the formula.
TOLERANCE = {"learned": ROUNDED_DOUBLE, "none": ROUNDED_DOUBLE, "rope": 3e-6}


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """The largest difference is at most `tolerance`, as a share of the largest number, which is at least 1."""
    assert actual.shape == expected.shape
    assert far(actual, expected) <= tolerance


def assert_gradients_close(actual: Gradients, expected: Gradients, tolerance: float) -> None:
    """The same weights have gradients, which agree as by `assert_close`."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert far(actual[name], gradient) <= tolerance, name


def assert_gradients_of(model: torch.nn.Module, oracle: DenseOracle, tolerance: float) -> None:
    """A model's gradients are the oracle's. A module that took no part may have none, or zeros."""
    for name, weight in model.named_parameters():
        expected = oracle.weights[name].grad
        zeros = torch.zeros_like(weight)
        assert_close(
            zeros if weight.grad is None else weight.grad,
            zeros if expected is None else expected,
            tolerance,
        )


def assert_same_values_and_gradients(
    model: torch.nn.Module, oracle: DenseOracle, actual: Tensor, expected: Tensor
) -> None:
    """Logits of a `MetaGPT2` are the oracle's, and so are the gradients of a random sum of them."""
    tolerance = TOLERANCE[oracle.config.position_embedding]
    assert_close(actual, expected, tolerance)
    weights = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    # The embedding's gradient has passed every layer.
    assert_gradients_of(model, oracle, 20 * tolerance)
