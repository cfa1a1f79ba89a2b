"""Meta-attention, and the model around it, against the dense masked oracle: outputs and gradients."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM
from tests.model.agreement import TOLERANCE, assert_close, assert_same_values_and_gradients
from tests.model.dense_oracle import DenseOracle
from tests.model.text_window import MIXED, seen_in_blocks
from tests.model.tiny_models import (
    FAMILIES,
    FAMILY,
    FEW_VARIANTS,
    META,
    SECOND,
    VARIANTS,
    Fields,
    pad,
    random_rows,
    tiny_model,
)
from tests.numbers import ROUNDED

ROWS = [*random_rows((13, 8, 1)), [META] * 6, random_rows([10], seed=1, meta_rate=0.0)[0]]
ragged_rows = st.lists(
    st.lists(st.sampled_from([5, 6, META]), min_size=1, max_size=9), min_size=1, max_size=4
)


def assert_is_the_formula(model: MetaGPT2ForCausalLM, rows: list[list[int]], side: str) -> None:
    """Logits and gradients of a padded batch are those of the oracle for each row."""
    oracle, (ids, mask) = DenseOracle(model), pad(rows, side)
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    expected = torch.cat([oracle.logits(row) for row in rows])
    assert_same_values_and_gradients(model, oracle, logits, expected)


@pytest.mark.quick(fields=FEW_VARIANTS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bias", [True, False])
@VARIANTS
def test_model_is_the_formulas_forward_and_backward(fields: Fields, bias: bool, side: str) -> None:
    assert_is_the_formula(tiny_model(**fields, bias=bias), ROWS, side)


@pytest.mark.parametrize("position_embedding", ["none", "rope"])
@given(rows=ragged_rows, side=st.sampled_from(["left", "right"]), seed=st.integers(0, 99))
@example(rows=[[5] * 5, [6] * 3], side="left", seed=0)  # no meta-token at all
@example(rows=[[META] * 6, [META] * 6], side="right", seed=0)  # nothing but meta-tokens
@example(rows=[[5, META], [META] * 7, [5] * 7], side="left", seed=0)
@example(rows=[[5, META], [META] * 7, [5] * 7], side="right", seed=0)
def test_any_rows(position_embedding: str, rows: list[list[int]], side: str, seed: int) -> None:
    model = tiny_model(seed=seed, position_embedding=position_embedding, num_hidden_layers=1)
    assert_is_the_formula(model, rows, side)


@torch.no_grad()
def test_meta_attention_leaves_the_residual_of_text_bit_equal() -> None:
    ids, mask = pad(random_rows((12, 9, 7)))
    model = tiny_model(num_hidden_layers=1, dtype=torch.float32)
    before = model(ids, attention_mask=mask).logits
    for parameter in model.model.layers[0].second_attention.parameters():
        parameter.mul_(-7).add_(0.1)
    after = model(ids, attention_mask=mask).logits
    is_meta, is_text = (ids == META) & mask.bool(), (ids != META) & mask.bool()

    assert torch.equal(after[is_text], before[is_text])
    assert ((after - before)[is_meta].abs().amax(dim=-1) > 1e-3).all()


def random_masks(length: int) -> Tensor:
    """Which keys each query sees, itself included, at random, (2, 1, length, length) bool."""
    drawn = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(1))
    return (drawn < 0.6).tril() | torch.eye(length, dtype=torch.bool)


@pytest.mark.quick(fields=FAMILY[::4])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@FAMILIES
def test_a_mask_of_four_dimensions_replaces_the_causal_one_in_both_attentions(
    fields: Fields, attention: str, dtype: torch.dtype
) -> None:
    model, rows, is_seen = tiny_model(**fields), random_rows((12, 12), seed=7), random_masks(12)
    model.set_attn_implementation(attention)
    ids, mask = torch.tensor(rows), is_seen
    if dtype != torch.bool:
        mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill(~is_seen, -1e30)
    oracle = DenseOracle(model)
    expected = torch.stack(
        [oracle.logits(row, causal[0]) for row, causal in zip(rows, is_seen, strict=True)]
    )

    whole = model(ids, attention_mask=mask).logits
    with_weights = model(ids, attention_mask=mask, output_attentions=True).logits
    head = model(ids[:, :7], attention_mask=mask[:, :, :7, :7])
    tail = model(
        ids[:, 7:], attention_mask=mask[:, :, 7:], past_key_values=head.past_key_values
    ).logits

    # Its softmax is float32.
    tolerance = ROUNDED if attention == "eager" else TOLERANCE[fields["position_embedding"]]
    assert_close(whole, expected, tolerance)
    assert_close(tail, expected[:, 7:], tolerance)
    assert_close(with_weights, expected, ROUNDED)


# --- attention weights


@pytest.mark.parametrize("window", [{}, MIXED], ids=["all text", "text_full_layers"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@SECOND
def test_the_weights_of_both_attentions(
    second_attention: str, attention: str, side: str, window: Fields
) -> None:
    """If the attention function returns no weights, another one computes them."""
    # As the eager softmax is.
    model = tiny_model(second_attention=second_attention, dtype=torch.float32, **window)
    model.set_attn_implementation(attention)
    oracle, (ids, mask) = DenseOracle(model), pad(ROWS, side)

    outputs = model(ids, attention_mask=mask, output_attentions=True, use_cache=False)

    assert model.config._attn_implementation == attention
    weights = {"attention": outputs.attentions}
    if second_attention != "none":
        weights["second_attention"] = outputs.meta_attentions
    for number, row in enumerate(ROWS):
        real = mask[number].bool()
        oracle.logits(row, seen_in_blocks(model, row))
        for name, of_layers in weights.items():
            for layer, of_layer in enumerate(of_layers):
                actual = of_layer[number][:, real][..., real]
                assert_close(actual, oracle.seen[f"model.layers.{layer}.{name}"], ROUNDED)
