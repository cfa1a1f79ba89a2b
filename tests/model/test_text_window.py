"""Text that is forgotten, in whole passes and in steps, against the oracle with a mask written pair by pair."""

import functools
import shutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM, set_text_window
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.gradients import far
from tests.model.dense_oracle import DenseOracle
from tests.model.in_pieces import in_steps
from tests.model.test_attention_oracle import TOLERANCE, assert_close, assert_same_gradients
from tests.model.text_window import FULL, ROWS, SMALL, WINDOWS, expected, rule_of
from tests.model.tiny_models import (
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


@WINDOWS
@pytest.mark.parametrize("side", ["left", "right"])
@VARIANTS
def test_a_pass_is_the_masked_formula_forward_and_backward(fields: Fields, side: str, window: Fields) -> None:
    model = tiny_model(**fields | window)
    oracle, rule = DenseOracle(model), rule_of(model)
    ids, mask = pad(ROWS, side)
    actual = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    wanted = torch.cat([oracle.logits(row, rule(row)) for row in ROWS])
    weigh = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (actual * weigh).sum().backward()
    (wanted * weigh).sum().backward()
    tolerance = TOLERANCE[model.config.position_embedding]
    assert_close(actual, wanted, tolerance)
    assert_same_gradients(model, oracle, 20 * tolerance)


@parametrize([{"text_window": 1, "text_sinks": 0}, {"text_window": 1}, {"text_window": 40}, {"text_sinks": 0}])
def test_windows_of_other_sizes(fields: Fields) -> None:
    model = tiny_model(**{"position_embedding": "none"} | SMALL | fields)
    ids, mask = pad(ROWS)
    wanted = expected(model, ROWS)
    for logits in (model(ids, attention_mask=mask).logits, in_steps(model, ids, mask, range(3, 44, 4))[0]):
        assert_close(logits[mask.bool()], wanted, ROUNDED_DOUBLE)


def test_a_window_as_long_as_the_text_changes_nothing() -> None:
    ids, mask = pad(ROWS)
    found, wanted = (
        model(ids, attention_mask=mask).logits[mask.bool()] for model in (shared_model(text_window=44), shared_model())
    )
    assert_close(found, wanted, ROUNDED_DOUBLE)


@WINDOWS
@pytest.mark.parametrize("side", ["left", "right"])
@SECOND
def test_the_eager_attention_function(second_attention: str, side: str, window: Fields) -> None:
    model = tiny_model(second_attention=second_attention, dtype=torch.float32, **window)
    model.set_attn_implementation("eager")
    ids, mask = pad(ROWS, side)
    wanted = expected(model, ROWS)
    for logits in (model(ids, attention_mask=mask).logits, in_steps(model, ids, mask, (20, 40))[0]):
        assert_close(logits[mask.bool()], wanted, ROUNDED)


@pytest.mark.quick(second_attention=["meta"])
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles flex attention with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it compiles
@SECOND
def test_flex_attention(second_attention: str) -> None:
    model = tiny_model(second_attention=second_attention, dtype=torch.float32, **SMALL)
    model.set_attn_implementation("flex_attention")
    ids, mask = pad(ROWS)
    with torch.no_grad():  # gradients need a GPU, and so do lengths that change from step to step
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    assert_close(logits[mask.bool()], expected(model, ROWS), ROUNDED)


@WINDOWS
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@SECOND
def test_the_weights_of_forgotten_text_are_zero(second_attention: str, attention: str, window: Fields) -> None:
    model = tiny_model(second_attention=second_attention, dtype=torch.float32, **window)
    model.set_attn_implementation(attention)
    outputs = model(torch.tensor(ROWS[:1]), output_attentions=True, use_cache=False)
    oracle = DenseOracle(model)
    oracle.logits(ROWS[0], rule_of(model)(ROWS[0]))
    names = {"attention": outputs.attentions, "second_attention": outputs.meta_attentions}
    for name in names if second_attention != "none" else ["attention"]:
        for layer in range(model.config.num_hidden_layers):
            assert (names[name][layer][0] - oracle.seen[f"model.layers.{layer}.{name}"]).abs().max() < ROUNDED


@functools.cache
def expected_once(model: MetaGPT2ForCausalLM) -> Tensor:
    """`expected` of `ROWS`, for a shared model."""
    return expected(model, ROWS)


@WINDOWS
@pytest.mark.parametrize("side", ["left", "right"])
@VARIANTS
@settings(max_examples=5)
@given(cuts=st.sets(st.integers(1, 43)))
@example(cuts={20, 40})
@example(cuts={*range(1, 44)})
@example(cuts={3, 30, *range(36, 44)})
def test_steps_of_any_size_give_the_masked_formula(fields: Fields, side: str, window: Fields, cuts: set[int]) -> None:
    model = shared_model(**fields | window)
    ids, mask = pad(ROWS, side)
    with torch.no_grad():
        logits, cache = in_steps(model, ids, mask, sorted(cuts))
    tolerance = TOLERANCE[model.config.position_embedding]
    assert_close(logits[mask.bool()], expected_once(model), tolerance)
    assert cache.get_seq_length() == 44


def test_bfloat16() -> None:
    model = tiny_model(dtype=torch.bfloat16, **SMALL)
    ids, mask = pad(ROWS)
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    wanted = expected(model, ROWS)
    roundings = decoder_roundings(torch.bfloat16, blocks=2, width=32, length=44)
    expected_error = rounding_error(torch.bfloat16, roundings, float(wanted.std()))
    for logits in (whole, in_steps(model, ids, mask, range(1, 44))[0]):
        assert (logits[mask.bool()] - wanted).abs().mean() < expected_error


@pytest.mark.quick(second_attention=["meta"])
@WINDOWS
@SECOND
def test_a_training_step_compiles_and_may_be_checkpointed(second_attention: str, window: Fields) -> None:
    torch._dynamo.reset()
    ids = torch.tensor(random_rows((30, 30), meta_rate=0.2))
    places = torch.stack([torch.nn.functional.pad(row.nonzero()[:, 0], (0, 16), value=-1)[:16] for row in ids == META])
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == META, -100), "meta_positions": places}
    ahead = torch.arange(29).expand(2, -1).masked_fill(batch["labels"][:, 1:] == -100, -1)
    batch["scored_positions"] = ahead.sort(dim=1, descending=True).values
    model = tiny_model(second_attention=second_attention, **window).train()
    model(**batch).loss.backward()
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    for change in ("compiled", "checkpointed"):
        model.zero_grad()
        if change == "compiled":
            torch.compile(model, backend="eager", fullgraph=True)(**batch).loss.backward()
        else:
            checkpoint_activations(model)
            model(**batch).loss.backward()
        for name, gradient in wanted.items():
            assert far(model.get_parameter(name).grad, gradient) < ROUNDED, (change, name)


def test_full_layers_are_set_and_unset() -> None:
    model, ids = tiny_model(num_hidden_layers=3, position_embedding="none"), torch.tensor(ROWS[:1])
    plain = model(ids).logits
    set_text_window(model, 5, 2, FULL)
    assert (model.config.text_window, model.config.text_full_layers) == (5, FULL)
    assert_close(model(ids).logits[0], expected(model, ROWS[:1]), ROUNDED_DOUBLE)
    set_text_window(model, 5, 2, range(3))
    assert_close(model(ids).logits, plain, ROUNDED_DOUBLE)
    with pytest.raises(UserError, match=r"the model cannot have this text window: .*'text_window' expected"):
        set_text_window(model, "3")  # type: ignore[arg-type]
    set_text_window(model, None)
    assert model.config.text_full_layers is None
    assert torch.equal(model(ids).logits, plain)


def test_an_attention_function_without_masks_is_refused() -> None:
    model = tiny_model(**SMALL)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="a text_window needs attention that takes masks"):
        model(torch.tensor(ROWS[:1]))
