"""Gradients, and how far apart numbers are that were computed in two ways."""

from collections.abc import Iterable

import torch
from torch import Tensor

Gradients = dict[str, Tensor]  # by the name of the weight


def far(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number, which is at least 1."""
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1))


def largest(errors: Iterable[float]) -> float:
    """The largest of some errors; NaN if one of them is, which `max` may drop."""
    return float(torch.tensor([*errors]).max())


def gradients_of(model: torch.nn.Module) -> Gradients:
    """A copy of the gradients of all weights that have one."""
    gradients = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            gradients[name] = weight.grad.clone()
    return gradients


def gradients_by(model: torch.nn.Module, loss: Tensor) -> Gradients:
    """The gradients of a loss alone."""
    model.zero_grad()
    loss.backward()
    return gradients_of(model)


def gradients_far(model: torch.nn.Module, computed: Tensor, expected: Tensor) -> float:
    """How far apart the gradients of the weights are, by `far`, for the same random weights of the logits."""
    weights_of_logits = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(
        expected
    )
    gradients = gradients_by(model, (computed * weights_of_logits).sum())
    expected_gradients = gradients_by(model, (expected * weights_of_logits).sum())
    assert gradients.keys() == expected_gradients.keys()
    return largest(far(gradients[name], gradient) for name, gradient in expected_gradients.items())
