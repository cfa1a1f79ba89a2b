"""The linear layer that takes another product for few rows."""

import pytest
import torch
from torch.nn.functional import linear

from metatokens.model.attention import FEW_ROWS, Projection


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (3,), (8, 16), (FEW_ROWS + 1,), (2, 0)])
def test_it_is_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = Projection(24, 40, bias=bias, dtype=torch.float64)
    x = torch.randn(*shape, 24, dtype=torch.float64)
    expected = linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        found = layer(x)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    assert torch.equal(layer(x), expected)  # with gradients it is the plain product


def test_few_rows_take_the_other_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, called = Projection(24, 40), []
    monkeypatch.setattr(torch, "mm", lambda *given: called.append(given[1].shape) or given[0] @ given[1])
    with torch.no_grad():
        for rows in (1, 2, FEW_ROWS, FEW_ROWS + 1):
            layer(torch.randn(rows, 24))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(torch.randn(1, 24)).dtype == torch.bfloat16
    assert called == [(24, 2), (24, 2), (24, FEW_ROWS)]
