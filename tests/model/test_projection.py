"""The product for few rows, against the plain linear layer."""

import pytest
import torch
from torch import nn

from metatokens.model.attention import FEW_ROWS, linear
from tests.model.tiny_models import random_rows, tiny_model
from tests.numbers import ROUNDED_DOUBLE


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (3,), (8, 16), (FEW_ROWS + 1,), (2, 0)])
def test_it_is_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias, dtype=torch.float64)
    x = torch.randn(*shape, 24, dtype=torch.float64)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        found = linear(layer, x)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert torch.allclose(found, expected, rtol=0, atol=ROUNDED_DOUBLE)
    assert torch.equal(linear(layer, x), expected)  # with gradients it is the plain product


def test_few_rows_take_the_other_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, called = nn.Linear(24, 40), []
    monkeypatch.setattr(torch, "mm", lambda *given: called.append(given[1].shape) or given[0] @ given[1])
    with torch.no_grad():
        for rows in (1, 2, FEW_ROWS, FEW_ROWS + 1):
            linear(layer, torch.randn(rows, 24))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(layer, torch.randn(1, 24)).dtype == torch.bfloat16
    assert called == [(24, 2), (24, 2), (24, FEW_ROWS)]


def test_a_layer_that_has_hooks_or_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seen = torch.randn(1, 24), []
    hooked, patched = nn.Linear(24, 40), nn.Linear(24, 40)
    hooked.register_forward_hook(lambda *_: seen.append("hook"))
    monkeypatch.setattr(patched, "forward", lambda x: seen.append("forward"))  # as accelerate's offloading does
    with torch.no_grad():
        for layer in (hooked, patched):
            linear(layer, x)
    assert seen == ["hook", "forward"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")  # torch's own
def test_dynamic_quantisation_converts_every_layer() -> None:
    model = tiny_model(dtype=torch.float32)
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    dynamic = torch.ao.nn.quantized.dynamic.Linear
    assert sum(isinstance(module, dynamic) for module in quantised.modules()) == linears
    ids = torch.tensor(random_rows((9,)))
    assert (quantised(ids).logits - model(ids).logits).abs().max() < 0.2 * model(ids).logits.abs().max()
    quantised.generate(ids, max_new_tokens=4, meta_every=2)
