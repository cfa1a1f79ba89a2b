"""Text that a `MetaGPT2` forgets, in whole passes and in steps, against the oracle with a mask written pair by pair."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metatokens.errors import UserError
from tests.model.agreement import (
    TOLERANCE,
    assert_close,
    assert_same_values_and_gradients,
)
from tests.model.dense_oracle import DenseOracle
from tests.model.in_pieces import in_steps
from tests.model.text_window import MIXED, ROWS, SMALL, expected_of_rows, seen_in_blocks
from tests.model.tiny_models import (
    FEW_VARIANTS,
    VARIANTS,
    Fields,
    pad,
    parametrize,
    shared_model,
    tiny_model,
)
from tests.numbers import ROUNDED_DOUBLE, decoder_roundings, rounding_error

WINDOWS = pytest.mark.parametrize("window", [SMALL, MIXED], ids=["text_window", "text_full_layers"])


@pytest.mark.quick(fields=FEW_VARIANTS)
@WINDOWS
@pytest.mark.parametrize("side", ["left", "right"])
@VARIANTS
def test_a_pass_is_the_masked_formula_forward_and_backward(
    fields: Fields, side: str, window: Fields
) -> None:
    model = tiny_model(**fields | window)
    oracle = DenseOracle(model)
    ids, mask = pad(ROWS, side)

    logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]

    expected = torch.cat([oracle.logits(row, seen_in_blocks(model, row)) for row in ROWS])
    assert_same_values_and_gradients(model, oracle, logits, expected)


@pytest.mark.quick(fields=FEW_VARIANTS)
@WINDOWS
@VARIANTS
@settings(max_examples=5)
@given(cuts=st.sets(st.integers(1, 43)), side=st.sampled_from(["left", "right"]))
@example(cuts={20, 40}, side="right")
@example(cuts={*range(1, 44)}, side="left")
@example(cuts={3, 30, *range(36, 44)}, side="left")
def test_steps_of_any_size_give_the_masked_formula(
    fields: Fields, window: Fields, cuts: set[int], side: str
) -> None:
    model = shared_model(**fields | window)
    ids, mask = pad(ROWS, side)

    logits, cache = in_steps(model, ids, mask, sorted(cuts))

    tolerance = TOLERANCE[model.config.position_embedding]
    assert_close(logits[mask.bool()], expected_of_rows(model), tolerance)
    assert cache.get_seq_length() == 44


@parametrize(
    [
        {"text_window": 1, "text_sinks": 0},
        {"text_window": 1},
        {"text_window": 40},
        {"text_sinks": 0},
    ]
)
def test_windows_of_other_sizes(fields: Fields) -> None:
    model = tiny_model(**{"position_embedding": "none"} | SMALL | fields)
    ids, mask = pad(ROWS)
    whole = model(ids, attention_mask=mask).logits
    pieces, _ = in_steps(model, ids, mask, range(3, 44, 4))
    for logits in (whole, pieces):
        assert_close(logits[mask.bool()], expected_of_rows(model), ROUNDED_DOUBLE)


@torch.no_grad()
def test_bfloat16() -> None:
    model = tiny_model(dtype=torch.bfloat16, **SMALL)
    ids, mask = pad(ROWS)
    expected = expected_of_rows(model)
    roundings = decoder_roundings(torch.bfloat16, blocks=2, width=32, length=44)
    bound = rounding_error(torch.bfloat16, roundings, float(expected.std()))

    whole = model(ids, attention_mask=mask, use_cache=False).logits
    pieces, _ = in_steps(model, ids, mask, range(1, 44))

    for logits in (whole, pieces):
        assert (logits[mask.bool()] - expected).abs().mean() < bound


def test_an_attention_function_without_masks_is_refused() -> None:
    model = tiny_model(**SMALL)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="a text_window needs attention that takes masks"):
        model(torch.tensor(ROWS[:1]))
