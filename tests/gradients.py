"""Gradients of logits that were computed in two ways."""

import torch
from torch import Tensor


def far(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number, which is at least 1."""
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1))


def gradients_far(model: torch.nn.Module, found: Tensor, expected: Tensor) -> float:
    """How far apart the gradients of the weights are, by `far`, for the same random weights of the logits."""
    weigh = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(expected)
    both = []
    for logits in (found, expected):
        model.zero_grad()
        (logits * weigh).sum().backward()
        both.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    assert both[0].keys() == both[1].keys()
    return max(far(both[0][name], gradient) for name, gradient in both[1].items())
