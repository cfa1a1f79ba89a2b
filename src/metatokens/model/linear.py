"""Linear layers: their product, fast for few rows, and those that write to the residual stream."""

from typing import TypeGuard

import torch
from torch import Tensor, nn

FEW_ROWS = 128


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a linear layer, (..., in features) -> (..., out features), fast for few rows too, as in decoding.

    For one row x, MKL computes x W^T on one core, and for two rows it takes twice as long. W X^T with two columns or
    more runs on all cores, at the speed of memory (benchmarks/LOG.md). From about 128 rows on, both are equally fast.
    A layer that was replaced, quantised or given a hook is called as usual.
    """
    if not _is_plain_linear(layer, x):
        return layer(x)
    rows = x.numel() // layer.in_features
    if not 0 < rows <= FEW_ROWS:
        return layer(x)
    columns = x.reshape(rows, -1)
    if rows == 1:
        columns = torch.cat([columns, columns])
    product = torch.mm(layer.weight, columns.t()).t()[:rows]
    if layer.bias is not None:
        product = product + layer.bias
    return product.contiguous().view(*x.shape[:-1], layer.out_features)


def _is_plain_linear(layer: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether calling the layer does nothing but an MKL product."""
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(x.device.type)
    ):
        return False
    is_plain = (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and "forward" not in vars(layer)
    )
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks
    return (
        is_plain
        and not has_hooks
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
    )


def residual_linear(in_features: int, out_features: int, *, bias: bool) -> nn.Linear:
    """A layer that writes to the residual stream; GPT-2 scales its initial weights down with depth."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    vars(layer)["writes_to_residual"] = True
    return layer
