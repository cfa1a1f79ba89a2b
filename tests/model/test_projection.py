"""The product for few rows, against the plain linear layer."""

import pytest
import torch
from torch import nn

from metatokens.model.linear import FEW_ROWS, linear
from tests.model.agreement import assert_close
from tests.numbers import ROUNDED_DOUBLE


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2, 1), (3,), (FEW_ROWS + 1,), (2, 0)])
def test_it_is_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias, dtype=torch.float64)
    x = torch.randn(*shape, 24, dtype=torch.float64)
    expected = nn.functional.linear(x, layer.weight, layer.bias)

    assert torch.equal(linear(layer, x), expected)  # with gradients it is the plain product
    with torch.no_grad():
        product = linear(layer, x)
    assert product.is_contiguous()
    if x.numel():
        assert_close(product, expected, ROUNDED_DOUBLE)
    assert product.shape == expected.shape


@torch.no_grad()
def test_a_layer_that_has_hooks_or_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    x, calls = torch.randn(1, 24), []
    hooked, patched = nn.Linear(24, 40), nn.Linear(24, 40)
    hooked.register_forward_hook(lambda *_: calls.append("hook"))
    # As accelerate's offloading does.
    monkeypatch.setattr(patched, "forward", lambda x: calls.append("forward"))
    linear(hooked, x)
    linear(patched, x)

    assert calls == ["hook", "forward"]
