"""Text that a `MetaGPT2` forgets, in whole passes and in steps, against the oracle with a mask written pair by pair."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.model.agreement import (
    TOLERANCE,
    assert_close,
    assert_gradients_close,
    assert_same_values_and_gradients,
    gradients_by,
)
from tests.model.dense_oracle import DenseOracle
from tests.model.in_pieces import in_steps
from tests.model.text_window import MIXED, ROWS, SMALL, expected_of_rows, seen_in_blocks
from tests.model.tiny_models import (
    FEW_VARIANTS,
    META,
    SECOND,
    VARIANTS,
    Fields,
    pad,
    parametrize,
    random_rows,
    shared_model,
    tiny_model,
)
from tests.numbers import ROUNDED, ROUNDED_DOUBLE, decoder_roundings, rounding_error

WINDOWS = pytest.mark.parametrize("window", [SMALL, MIXED], ids=["text_window", "text_full_layers"])


@pytest.mark.quick(fields=FEW_VARIANTS)
@WINDOWS
@pytest.mark.parametrize("side", ["left", "right"])
@VARIANTS
def test_a_pass_is_the_masked_formula_forward_and_backward(fields: Fields, side: str, window: Fields) -> None:
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
def test_steps_of_any_size_give_the_masked_formula(fields: Fields, window: Fields, cuts: set[int], side: str) -> None:
    model = shared_model(**fields | window)
    ids, mask = pad(ROWS, side)

    logits, cache = in_steps(model, ids, mask, sorted(cuts))

    tolerance = TOLERANCE[model.config.position_embedding]
    assert_close(logits[mask.bool()], expected_of_rows(model), tolerance)
    assert cache.get_seq_length() == 44


@parametrize([{"text_window": 1, "text_sinks": 0}, {"text_window": 1}, {"text_window": 40}, {"text_sinks": 0}])
def test_windows_of_other_sizes(fields: Fields) -> None:
    model = tiny_model(**{"position_embedding": "none"} | SMALL | fields)
    ids, mask = pad(ROWS)
    whole = model(ids, attention_mask=mask).logits
    pieces, _ = in_steps(model, ids, mask, range(3, 44, 4))
    for logits in (whole, pieces):
        assert_close(logits[mask.bool()], expected_of_rows(model), ROUNDED_DOUBLE)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@SECOND
def test_the_weights_of_forgotten_text_are_zero(second_attention: str, attention: str) -> None:
    model = tiny_model(second_attention=second_attention, dtype=torch.float32, **MIXED)
    model.set_attn_implementation(attention)
    oracle = DenseOracle(model)
    oracle.logits(ROWS[0], seen_in_blocks(model, ROWS[0]))

    outputs = model(torch.tensor(ROWS[:1]), output_attentions=True, use_cache=False)

    weights = {"attention": outputs.attentions, "second_attention": outputs.meta_attentions}
    for name, of_layers in weights.items():
        for layer, of_layer in enumerate(of_layers or ()):
            assert_close(of_layer[0], oracle.seen[f"model.layers.{layer}.{name}"], ROUNDED)


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


def training_batch() -> dict[str, Tensor]:
    """Rows with the positions of their meta-tokens and labels, as a training gives them for a graph."""
    ids = torch.tensor(random_rows((30, 30), meta_rate=0.2))
    labels = ids.masked_fill(ids == META, -100)
    meta_positions = [torch.nn.functional.pad(row.nonzero()[:, 0], (0, 16), value=-1)[:16] for row in ids == META]
    scored = torch.arange(29).expand(2, -1).masked_fill(labels[:, 1:] == -100, -1)
    return {
        "input_ids": ids,
        "labels": labels,
        "meta_positions": torch.stack(meta_positions),
        "scored_positions": scored.sort(dim=1, descending=True).values,
    }


@pytest.mark.quick(second_attention=["meta"], window=[MIXED])
@WINDOWS
@SECOND
def test_a_training_step_compiles_and_may_be_checkpointed(second_attention: str, window: Fields) -> None:
    torch._dynamo.reset()
    model, batch = tiny_model(second_attention=second_attention, **window).train(), training_batch()
    expected = gradients_by(model, model(**batch).loss)

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_gradients_close(gradients_by(model, compiled(**batch).loss), expected, ROUNDED)
    checkpoint_activations(model)
    assert_gradients_close(gradients_by(model, model(**batch).loss), expected, ROUNDED)


def test_an_attention_function_without_masks_is_refused() -> None:
    model = tiny_model(**SMALL)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="a text_window needs attention that takes masks"):
        model(torch.tensor(ROWS[:1]))
