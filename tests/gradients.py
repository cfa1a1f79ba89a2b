"""Gradients of logits that were computed in two ways."""

from collections.abc import Iterable

import torch
from torch import Tensor


def far(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number, which is at least 1."""
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1))


def largest(errors: Iterable[float]) -> float:
    """The largest of some errors; NaN if one of them is, which `max` may drop."""
    return float(torch.tensor([*errors]).max())


def gradients_far(model: torch.nn.Module, computed: Tensor, expected: Tensor) -> float:
    """How far apart the gradients of the weights are, by `far`, for the same random weights of the logits."""
    weights_of_logits = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(
        expected
    )
    gradients = _gradients(model, computed, weights_of_logits)
    expected_gradients = _gradients(model, expected, weights_of_logits)
    assert gradients.keys() == expected_gradients.keys()
    return largest(far(gradients[name], gradient) for name, gradient in expected_gradients.items())


def _gradients(
    model: torch.nn.Module, logits: Tensor, weights_of_logits: Tensor
) -> dict[str, Tensor]:
    model.zero_grad()
    (logits * weights_of_logits).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients
