"""Meta-attention, and the model around it, against the dense masked oracle: outputs and gradients."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

from metatokens.model.positions import position_ids_from_mask
from metatokens.model.rows import GatheredRows, positions_of
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import (
    FAMILIES,
    META,
    OPTIONS,
    SECOND,
    VARIANTS,
    Fields,
    pad,
    parametrize,
    random_rows,
    tiny_model,
)
from tests.numbers import ROUNDED, ROUNDED_DOUBLE

# Rotary tables are float32 in transformers, whatever the model's type, so they bound the agreement with the formula.
TOLERANCE = {"learned": ROUNDED_DOUBLE, "none": ROUNDED_DOUBLE, "rope": 3e-6}

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

    found = GatheredRows.at(positions_of(is_meta))
    assert (found is None) == (not is_meta.any())
    actual = x
    if found is not None:
        rotary = None
        if model.model.rotary_emb is not None:
            tables = model.model.rotary_emb(x, position_ids_from_mask(mask))
            rotary = (found.gather(tables[0]), found.gather(tables[1]))
        module = model.model.layers[0].second_attention
        actual = found.scatter_add(
            x, module(found.gather(x), rows=found, rotary=rotary, mask=None, attend=sdpa, cache=None)[0]
        )
    (actual * weigh).sum().backward()

    dense_x = x.detach().clone().requires_grad_()
    expected = dense_x.clone()
    for i, real in enumerate(mask.bool()):
        causal = torch.ones(int(real.sum()), int(real.sum())).tril().bool()
        added = oracle.meta_attention(dense_x[i, real], "model.layers.0.second_attention", is_meta[i, real], causal)
        expected = expected.index_put((torch.tensor(i), real.nonzero().squeeze(1)), added, accumulate=True)
    (expected * weigh).sum().backward()

    tolerance = TOLERANCE[position_embedding]
    assert_close(actual, expected, tolerance)
    assert_close(x.grad, dense_x.grad, tolerance)
    assert_same_gradients(model, oracle, tolerance)


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
@VARIANTS
def test_model_is_the_formulas_forward_and_backward(fields: Fields, bias: bool, side: str) -> None:
    model = tiny_model(**fields, bias=bias)
    oracle = DenseOracle(model)
    ids, mask = pad(ROWS, side)
    actual = model(ids, attention_mask=mask).logits[mask.bool()]
    expected = torch.cat([oracle.logits(row) for row in ROWS])
    weigh = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (actual * weigh).sum().backward()
    (expected * weigh).sum().backward()
    tolerance = TOLERANCE[model.config.position_embedding]
    assert_close(actual, expected, tolerance)
    assert_same_gradients(model, oracle, 20 * tolerance)  # the embedding's gradient has passed every layer


@parametrize(OPTIONS)
def test_each_option_makes_a_difference(fields: Fields) -> None:
    ids, mask = pad(ROWS)
    plain_fields = {name: fields[name] for name in ("position_embedding", "num_hidden_layers") if name in fields}
    model, plain = tiny_model(**fields), tiny_model(**plain_fields)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert (plain(ids, attention_mask=mask).logits - model(ids, attention_mask=mask).logits).abs().max() > 0.01


def test_a_batch_without_meta_tokens_skips_the_module() -> None:
    model = tiny_model()
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(p.grad is None for p in model.model.layers[0].second_attention.parameters())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@FAMILIES
def test_a_mask_of_four_dimensions_replaces_the_causal_one_in_both_attentions(
    fields: Fields, attention: str, dtype: torch.dtype
) -> None:
    model = tiny_model(**fields)
    model.set_attn_implementation(attention)
    rows = random_rows((12, 12), seed=7)
    seen = torch.rand(2, 12, 12, generator=torch.Generator().manual_seed(1)) < 0.6
    seen = (seen.tril() | torch.eye(12, dtype=torch.bool))[:, None]
    mask = seen if dtype == torch.bool else torch.zeros(2, 1, 12, 12, dtype=dtype).masked_fill(~seen, -1e30)
    oracle = DenseOracle(model)
    expected = torch.stack([oracle.logits(row, causal=one[0]) for row, one in zip(rows, seen, strict=True)])
    tolerance = ROUNDED if attention == "eager" else TOLERANCE[fields["position_embedding"]]  # its softmax is float32
    assert_close(model(torch.tensor(rows), attention_mask=mask).logits, expected, tolerance)
    last = model(torch.tensor(rows), attention_mask=mask, logits_to_keep=1).logits
    assert_close(last, expected[:, -1:], tolerance)
    weighed = model(torch.tensor(rows), attention_mask=mask, output_attentions=True)
    assert_close(weighed.logits, expected, ROUNDED)
    head = model(torch.tensor(rows)[:, :7], attention_mask=mask[:, :, :7, :7])
    tail = model(torch.tensor(rows)[:, 7:], attention_mask=mask[:, :, 7:], past_key_values=head.past_key_values)
    assert_close(tail.logits, expected[:, 7:], tolerance)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("second_attention", ["meta", "causal"])
def test_the_weights_of_both_attentions(second_attention: str, side: str) -> None:
    model = tiny_model(second_attention=second_attention, dtype=torch.float32)  # as transformers' eager softmax is
    model.set_attn_implementation("eager")
    oracle = DenseOracle(model)
    ids, mask = pad(ROWS, side)
    outputs = model(ids, attention_mask=mask, output_attentions=True)
    assert len(outputs.attentions) == len(outputs.meta_attentions) == 2
    for number, (row, real) in enumerate(zip(ROWS, mask.bool(), strict=True)):
        oracle.logits(row)
        for layer in range(2):
            found = [one[layer][number][:, real][..., real] for one in (outputs.attentions, outputs.meta_attentions)]
            for name, weights in zip(("attention", "second_attention"), found, strict=True):
                expected = oracle.seen[f"model.layers.{layer}.{name}"]
                assert weights.shape == (4, len(row), len(row))
                assert (weights - expected).abs().max() < ROUNDED, name


def test_the_weights_of_a_decoding_step() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    oracle = DenseOracle(model)
    (row,) = random_rows((9,), seed=2)
    row[8] = META
    head = model(torch.tensor([row[:6]]), output_attentions=True)
    tail = model(torch.tensor([row[6:]]), past_key_values=head.past_key_values, output_attentions=True)
    oracle.logits(row)
    for layer, weights in enumerate(tail.meta_attentions):
        assert weights.shape == (1, 4, 3, 9)
        assert (weights[0] - oracle.seen[f"model.layers.{layer}.second_attention"][:, 6:]).abs().max() < ROUNDED


def test_without_meta_tokens_meta_attention_has_no_weights() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    outputs = model(torch.tensor([[1, 2, 3]]), output_attentions=True)
    assert [one.shape for one in outputs.meta_attentions] == [(1, 4, 3, 3)] * 2
    assert not any(one.any() for one in outputs.meta_attentions)


@SECOND
def test_weights_that_the_attention_function_lacks_are_computed_by_another(second_attention: str) -> None:
    ids, mask = pad(ROWS, "right")
    model = tiny_model(second_attention=second_attention, dtype=torch.float32)
    outputs = model(ids, attention_mask=mask, output_attentions=True)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask, output_attentions=True)
    for name in ("attentions", "meta_attentions"):
        if name == "attentions" or second_attention != "none":
            assert all(map(torch.equal, outputs[name], expected[name]))
