"""Retrofitted models that forget text, against the same model with a mask for each block, written pair by pair."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel
from transformers.models.llama import modeling_llama

from metatokens import add_meta_attention, load_meta, save_meta, set_text_window
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.gradients import Gradients, gradients_by
from tests.model.agreement import assert_close, assert_gradients_close
from tests.model.in_pieces import full_layers_alone_hold_all, in_steps, sizes_of
from tests.model.text_window import FULL, PROMPTS, ROWS, SINKS, WINDOW, seen_in_blocks
from tests.model.tiny_models import META, pad, random_rows
from tests.numbers import decoder_roundings, rounding_bound
from tests.retrofit.architectures import ROUNDED, ROUNDED_GRADIENT, base, error
from tests.retrofit.forgetful import (
    BLOCKS,
    BOTH_CALLERS,
    EOS,
    FEW_RETROFITS,
    RETROFITS,
    assert_differ_by_rounding,
    block_masks,
    expected_logits,
    forgetful,
    forgetful_retrofit,
    generate_texts,
    shared_forgetful,
)

IDS = torch.tensor(ROWS[:1])


@pytest.mark.quick(name=["gpt2", "llama", "mixtral"])
@BLOCKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RETROFITS)
def test_a_pass_and_steps_are_the_masked_recomputation(
    name: str, dtype: torch.dtype, full: tuple[int, ...]
) -> None:
    model, (ids, mask) = shared_forgetful(name, full, dtype), pad(ROWS)
    expected = torch.cat([expected_logits(name, row, full, dtype) for row in ROWS])[:, :META]

    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
    pieces, cache = in_steps(model, ids, mask, (20, 25, *range(36, 44)))

    assert full_layers_alone_hold_all(model, cache)
    assert min(sizes_of(cache)) < 40
    assert cache.get_seq_length() == 44
    for logits in (whole, pieces):
        assert_differ_by_rounding(logits[mask.bool()][:, :META], expected)


@pytest.mark.quick(name=["llama"])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", RETROFITS)
def test_generated_tokens_in_bfloat16_differ_by_rounding_alone(
    name: str, chunk: int | None
) -> None:
    row, model = PROMPTS[0], shared_forgetful(name, (), torch.bfloat16)
    [new] = generate_texts(model, [row], max_new_tokens=8, prefill_chunk_size=chunk)

    scores = expected_logits(name, [*row, *new], (), torch.bfloat16)[len(row) - 1 : -1].float()
    roundings = decoder_roundings(torch.bfloat16, blocks=4, width=64, length=44)
    bound = rounding_bound(torch.bfloat16, roundings, float(scores.std()))
    scores[:, [META, EOS]] = -torch.inf
    of_new = scores[torch.arange(len(new)), new]
    assert (scores.amax(dim=1) - of_new).max() < bound


@pytest.mark.quick(name=["llama"])
@BLOCKS
@pytest.mark.parametrize("name", FEW_RETROFITS)
def test_training_hides_the_same_text_with_activation_checkpointing_too(
    name: str, full: tuple[int, ...]
) -> None:
    rows = random_rows((30, 30), meta_rate=0.2)
    ids = torch.tensor(rows)
    model, remembering = (
        forgetful_retrofit(name, full).train(),
        forgetful_retrofit(name, None).train(),
    )
    for module in [*model.modules(), *remembering.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    masks = torch.stack([seen_in_blocks(model, row) for row in rows], dim=1)[:, :, None]

    def gradients(trained: PreTrainedModel, **inputs: Any) -> Gradients:
        torch.manual_seed(7)  # OPT drops states without a module
        return gradients_by(trained, trained(ids, labels=ids, **inputs).loss)

    with block_masks(remembering, masks) as inputs:
        expected = gradients(remembering, **inputs)

    plain = gradients(model, use_cache=False)
    checkpoint_activations(model)
    model.enable_input_require_grads()
    checkpointed = gradients(model, use_cache=False)

    assert_gradients_close(plain, expected, ROUNDED_GRADIENT)
    assert_gradients_close(checkpointed, expected, ROUNDED_GRADIENT)


# Compiling flex attention takes minutes; without that it is the same function.
@pytest.mark.quick(stance=["force_eager"], caller=["llama"])
@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("stance", ["force_eager", "default"])
@pytest.mark.parametrize("caller", ["rope-meta", "rope-causal", "rope-none", "llama"])
def test_flex_attention(caller: str, stance: str) -> None:
    model, (ids, mask) = deepcopy(shared_forgetful(caller)).float(), pad(ROWS)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), torch.compiler.set_stance(stance):
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    expected = torch.cat([expected_logits(caller, row) for row in ROWS])

    assert_close(logits[mask.bool()][:, :META], expected[:, :META], ROUNDED)


# --- the function that sets a window


# PEFT's.
@pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")
@BLOCKS
@torch.no_grad()
def test_the_window_is_saved_with_the_model_and_with_what_was_added(
    full: tuple[int, ...], tmp_path: Path
) -> None:
    model, (ids, mask) = forgetful_retrofit("llama", None), pad(ROWS)
    assert (model.config.text_window, model.config.text_sinks, model.config.text_full_layers) == (
        None,
        4,
        None,
    )
    set_text_window(model, WINDOW, SINKS, full)
    expected = model(ids, attention_mask=mask).logits
    model.save_pretrained(tmp_path / "whole")
    save_meta(model, tmp_path / "delta")

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    put_together = load_meta(base("llama"), tmp_path / "delta")
    for loaded in (whole, put_together):
        assert (loaded.config.text_window, loaded.config.text_sinks) == (WINDOW, SINKS)
        assert loaded.config.text_full_layers == ([*full] or None)
        assert torch.equal(loaded(ids, attention_mask=mask).logits, expected)
    # Its adapters add nothing yet.
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert torch.equal(tuned(ids, attention_mask=mask).logits, expected)


@BOTH_CALLERS
@torch.no_grad()
def test_other_blocks_are_chosen_and_none(caller: str) -> None:
    model = forgetful(caller, FULL)
    blocks = range(model.config.num_hidden_layers)
    set_text_window(model, WINDOW)  # with the sinks and full layers that it has
    assert (model.config.text_sinks, model.config.text_full_layers) == (SINKS, FULL)
    with_window = model(IDS).logits

    set_text_window(model, WINDOW, SINKS, [0])
    _, cache = in_steps(model, IDS, torch.ones_like(IDS), (20, *range(30, 44)))
    assert sizes_of(cache)[0] == 44 > sizes_of(cache)[1]
    set_text_window(model, WINDOW, SINKS, blocks)
    with_full_blocks = model(IDS).logits
    set_text_window(model, None)
    assert model.config.text_full_layers is None
    without_window = model(IDS).logits

    assert error(with_full_blocks, without_window) < ROUNDED
    assert error(with_window, without_window) > 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "text_window"),
        ((5, -1), "text_sinks"),
        (("9",), "text_window"),
        ((WINDOW, SINKS, [3]), "text_full_layers is "),
        ((WINDOW, SINKS, [1, 0]), "text_full_layers is "),
        ((WINDOW, SINKS, 1), "full_layers are a list of blocks"),
        ((WINDOW, SINKS, 0), "full_layers are a list of blocks"),
        ((WINDOW, SINKS, None, (0, 1)), "full_heads one of pairs of a block and a head"),
    ],
    ids=str,
)
@BOTH_CALLERS
def test_a_window_that_cannot_be_is_refused(caller: str, arguments: tuple, message: str) -> None:
    model = forgetful(caller, FULL)
    with pytest.raises(UserError, match=message):
        set_text_window(model, *arguments)
    assert (model.config.text_window, model.config.text_full_layers) == (WINDOW, FULL)


@pytest.mark.parametrize("row", [3, 8, 9, 23])
def test_any_row_can_be_the_meta_token_of_a_model_with_a_window(row: int) -> None:
    """Those of a vocabulary's beginning too, which the check of the base has in its text."""
    model = add_meta_attention(base("llama"), meta_token_id=row, heads=2, head_size=16)
    set_text_window(model, WINDOW)
    assert model.config.text_window == WINDOW


def test_a_model_without_meta_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="call add_meta_attention first"):
        set_text_window(GPT2LMHeadModel(base("gpt2").config), 5)


def test_only_the_function_that_checks_the_base_sets_a_window(tmp_path: Path) -> None:
    forgetful_retrofit("llama").save_pretrained(tmp_path)
    for name, value in {"text_window": 9, "text_full_layers": [0]}.items():
        with pytest.raises(UserError, match=f"{name} is set by set_text_window"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **{name: value})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    with pytest.raises(UserError, match="text_full_layers is set by set_text_window"):
        loaded.config.text_full_layers = [0]
    # The check of the base compares in the base's precision.
    with torch.autocast("cpu", torch.bfloat16):
        set_text_window(loaded, 5, 2, FULL)


def test_a_base_that_changes_the_mask_before_its_blocks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, make_mask = forgetful_retrofit("llama", None), modeling_llama.create_causal_mask

    def make_copy(*args: Any, **kwargs: Any) -> Any:
        mask = make_mask(*args, **kwargs)
        return mask if mask is None else mask.clone()

    monkeypatch.setattr(modeling_llama, "create_causal_mask", make_copy)
    set_text_window(model, WINDOW, SINKS)
    model(IDS)
    set_text_window(model, WINDOW, SINKS, FULL)
    with pytest.raises(UserError, match="does not hand its blocks the mask that it is given"):
        model(IDS)


@pytest.mark.quick(name=["mistral", "qwen3_next", "bloom", "mpt"])
@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        (
            "mistral",
            {},
            "some of its blocks have a sliding window of their own, or a state instead of a cache",
        ),
        ("gpt_neo", {}, "a sliding window of their own"),
        ("llama4_text", {}, "a sliding window of their own"),
        ("qwen3_next", {}, "or a state instead of a cache"),
        ("bloom", {}, "it must take masks of four dimensions"),
        ("mpt", {}, "text that is forgotten changes what it predicts"),
        ("falcon", {"alibi": True}, "it must take masks of four dimensions"),
    ],
)
def test_a_base_with_masks_of_its_own_is_refused(
    name: str, choices: dict[str, Any], message: str
) -> None:
    model = add_meta_attention(base(name, **choices), meta_token_id=META)
    with pytest.raises(UserError, match=message):
        set_text_window(model, WINDOW)
    assert model.config.text_window is None
