"""Meta-attention, and the model around it, against the dense masked oracle: outputs and gradients."""

import pytest
import torch
from dense_oracle import DenseOracle
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import FAMILY, META, QUICK, pad, random_rows, tiny_model
from torch import Tensor

from metatokens.model.attention import MetaRows
from metatokens.model.positions import position_ids_from_mask

# Rotary tables are float32 in transformers, whatever the model's type, so they bound the agreement with the formula.
TOLERANCE = {"learned": 1e-11, "none": 1e-11, "rope": 3e-6}

ragged_rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = max(1.0, expected.abs().max().item())
    assert (actual - expected).abs().max().item() <= tolerance * scale


def assert_same_gradients(model: torch.nn.Module, oracle: DenseOracle, tolerance: float) -> None:
    for name, parameter in model.named_parameters():
        expected = oracle.weights[name].grad
        if expected is None or parameter.grad is None:  # a module that took no part in either
            assert expected is None or not expected.any()
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert_close(parameter.grad, expected, tolerance)


@pytest.mark.parametrize("position_embedding", ["none", "rope"])
@QUICK
@given(rows=ragged_rows, side=st.sampled_from(["left", "right"]), seed=st.integers(0, 99))
@example(rows=[[False] * 5, [False] * 3], side="left", seed=0)  # no meta-token at all
@example(rows=[[True] * 6, [True] * 6], side="right", seed=0)  # nothing but meta-tokens
@example(rows=[[False, True], [True] * 7, [False] * 7], side="left", seed=0)
@example(rows=[[False, True], [True] * 7, [False] * 7], side="right", seed=0)
def test_meta_attention_is_the_masked_formula(
    position_embedding: str, rows: list[list[bool]], side: str, seed: int
) -> None:
    model = tiny_model(seed=seed, position_embedding=position_embedding, num_hidden_layers=1)
    oracle = DenseOracle(model)
    _, mask = pad([[0] * len(row) for row in rows], side)
    is_meta = torch.zeros_like(mask, dtype=torch.bool)
    is_meta[mask.bool()] = torch.tensor([flag for row in rows for flag in row])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*mask.shape, 32, dtype=torch.float64, generator=generator, requires_grad=True)
    weigh = torch.randn(*mask.shape, 32, dtype=torch.float64, generator=generator)

    found = MetaRows.find(is_meta)
    assert (found is None) == (not is_meta.any())
    actual = x
    if found is not None:
        rotary = None
        if model.model.rotary_positions is not None:
            tables = model.model.rotary_positions(x, position_ids_from_mask(mask))
            rotary = (found.gather(tables[0]), found.gather(tables[1]))
        module = model.model.layers[0].second_attention
        actual = found.scatter_add(x, module(found.gather(x), rows=found, rotary=rotary, cache=None))
    (actual * weigh).sum().backward()

    dense_x = x.detach().clone().requires_grad_()
    expected = dense_x.clone()
    for i, real in enumerate(mask.bool()):
        added = oracle.meta_attention(dense_x[i, real], "model.layers.0.second_attention", is_meta[i, real])
        expected = expected.index_put((torch.tensor(i), real.nonzero().squeeze(1)), added, accumulate=True)
    (expected * weigh).sum().backward()

    tolerance = TOLERANCE[position_embedding]
    assert_close(actual, expected, tolerance)
    assert_close(x.grad, dense_x.grad, tolerance)
    assert_same_gradients(model, oracle, tolerance)


@QUICK
@given(rows=ragged_rows, seed=st.integers(0, 99))
def test_rows_of_text_receive_exactly_zero(rows: list[list[bool]], seed: int) -> None:
    _, mask = pad([[0] * len(row) for row in rows], "right")
    is_meta = torch.zeros_like(mask, dtype=torch.bool)
    is_meta[mask.bool()] = torch.tensor([flag for row in rows for flag in row])
    x = torch.randn(*mask.shape, 8, generator=torch.Generator().manual_seed(seed))
    if (found := MetaRows.find(is_meta)) is not None:
        result = found.scatter_add(x, torch.full((*found.index.shape, 8), 1e30))
        assert torch.equal(result[~is_meta], x[~is_meta])
        assert (result[is_meta] == 1e30).all()


def test_meta_attention_leaves_the_residual_of_text_bit_equal() -> None:
    ids, mask = pad(random_rows((12, 9, 7)))
    model = tiny_model(num_hidden_layers=1, dtype=torch.float32)
    before = model(ids, attention_mask=mask).logits
    with torch.no_grad():
        for parameter in model.model.layers[0].second_attention.parameters():
            parameter.mul_(-7).add_(0.1)
    after = model(ids, attention_mask=mask).logits
    is_meta = (ids == META) & mask.bool()
    assert torch.equal(after[~is_meta & mask.bool()], before[~is_meta & mask.bool()])
    assert ((after - before)[is_meta].abs().amax(dim=-1) > 1e-3).all()


ROWS = [*random_rows((13, 8, 1)), [META] * 6, random_rows([10], seed=1, meta_rate=0.0)[0]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("position_embedding", "second_attention"), FAMILY)
def test_model_is_the_formulas_forward_and_backward(
    position_embedding: str, second_attention: str, bias: bool, side: str
) -> None:
    model = tiny_model(position_embedding=position_embedding, second_attention=second_attention, bias=bias)
    oracle = DenseOracle(model)
    ids, mask = pad(ROWS, side)
    actual = model(ids, attention_mask=mask).logits[mask.bool()]
    expected = torch.cat([oracle.logits(row) for row in ROWS])
    weigh = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (actual * weigh).sum().backward()
    (expected * weigh).sum().backward()
    tolerance = TOLERANCE[position_embedding]
    assert_close(actual, expected, tolerance)
    assert_same_gradients(model, oracle, 20 * tolerance)  # the embedding's gradient has passed every layer


def test_a_batch_without_meta_tokens_skips_the_module() -> None:
    model = tiny_model()
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(p.grad is None for p in model.model.layers[0].second_attention.parameters())
