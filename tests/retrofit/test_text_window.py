"""Retrofitted models that forget text, against the same model with a mask for each block, written pair by pair."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GPT2LMHeadModel, StaticCache
from transformers.models.llama import modeling_llama

from metatokens import add_meta_attention, load_meta, save_meta, set_text_window
from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.gradients import far
from tests.model import in_pieces
from tests.model.generating import assert_a_chat_goes_on, beams_of, samples_of
from tests.model.in_pieces import assert_full_layers_alone_hold_all, held
from tests.model.text_window import FULL, PROMPTS, ROWS, SINKS, WINDOW, seen_by_layers
from tests.model.tiny_models import META, pad, random_rows, tiny_model
from tests.numbers import decoder_roundings, rounding_bound, rounding_error
from tests.retrofit.architectures import ROUNDED, ROUNDED_GRADIENT, base, error
from tests.retrofit.text_window import BLOCKS, EOS, FEW, NAMES, dense, generate, masked, model_of, shared

in_steps = torch.no_grad()(in_pieces.in_steps)


@pytest.mark.quick(name=FEW)
@BLOCKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_and_steps_are_the_masked_recomputation(name: str, dtype: torch.dtype, full: tuple[int, ...]) -> None:
    model, (ids, mask) = shared(name, full, dtype), pad(ROWS)
    wanted = torch.cat([dense(name, row, full, dtype) for row in ROWS])[:, :META]
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
    pieces, cache = in_steps(model, ids, mask, (20, 25, *range(36, 44)))
    assert_full_layers_alone_hold_all(model, cache)
    assert min(held(cache)) < 40
    assert cache.get_seq_length() == 44
    roundings, scale = decoder_roundings(dtype, blocks=4, width=64, length=44), float(wanted.float().std())
    for found in (whole, pieces):  # rounding may send some tokens to another expert
        assert (found[mask.bool()][:, :META] - wanted).float().abs().mean() < rounding_error(dtype, roundings, scale)
        assert dtype != torch.float32 or error(found[mask.bool()][:, :META], wanted) < ROUNDED


@pytest.mark.quick(name=FEW)
@BLOCKS
@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_generation_is_the_masked_recomputation(name: str, meta_every: int | None, full: tuple[int, ...]) -> None:
    def score(read: Sequence[int]) -> Tensor:
        scores = dense(name, read, full)[-1].log_softmax(dim=-1)
        scores[[META, EOS]] = -torch.inf
        return scores

    model = shared(name, full)
    greedy = [beams_of(score, row, 8, meta_every, 1) for row in PROMPTS]
    sampled = samples_of(score, PROMPTS, 8, meta_every)
    beams = [beams_of(score, row, 4, meta_every, 3) for row in PROMPTS]
    for chunk in (None, 7):
        options = {"meta_every": meta_every, "prefill_chunk_size": chunk}
        cache = DynamicCache()
        assert generate(model, PROMPTS, max_new_tokens=8, past_key_values=cache, **options) == greedy
        assert_full_layers_alone_hold_all(model, cache)
        assert min(held(cache)) < 34
        assert generate(model, PROMPTS, max_new_tokens=8, do_sample=True, top_k=0, **options) == sampled
        assert generate(model, PROMPTS, max_new_tokens=4, num_beams=3, **options) == beams


@pytest.mark.quick(name=FEW)
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", NAMES)
def test_generated_tokens_in_bfloat16_differ_by_rounding_alone(name: str, chunk: int | None) -> None:
    row, model = PROMPTS[0], shared(name, (), torch.bfloat16)
    new = generate(model, [row], max_new_tokens=8, prefill_chunk_size=chunk)[0]
    scores = dense(name, [*row, *new], (), torch.bfloat16)[len(row) - 1 : -1].float()
    roundings, scale = decoder_roundings(torch.bfloat16, blocks=4, width=64, length=44), float(scores.std())
    scores[:, [META, EOS]] = -torch.inf
    behind = scores.amax(dim=1) - scores[torch.arange(len(new)), new]
    assert behind.max() < rounding_bound(torch.bfloat16, roundings, scale)


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("name", FEW)
def test_a_chat_goes_on_with_the_same_cache(
    name: str, chunk: int | None, meta_every: int | None, mode: dict[str, Any]
) -> None:
    model, (ids, mask) = shared(name, ()), pad(PROMPTS)
    cache, options = DynamicCache(), {"do_sample": False, "pad_token_id": 0, "suppress_tokens": [EOS]}
    options |= {"meta_every": meta_every, "prefill_chunk_size": chunk}
    ids = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, **options)
    assert_a_chat_goes_on(model, ids, mask, cache, max_new_tokens=7, **options | mode)
    assert max(held(cache)) < 40


@BLOCKS
@pytest.mark.parametrize("name", FEW)
def test_guesses_that_are_cropped_change_nothing(name: str, full: tuple[int, ...]) -> None:
    model, rows = shared(name, full), [[5, META, 9] * 12]
    wanted = generate(model, rows, max_new_tokens=20, use_cache=False)
    assert generate(model, rows, max_new_tokens=20, prompt_lookup_num_tokens=3) == wanted


@pytest.mark.parametrize("name", FEW)
def test_a_cache_can_be_cropped_where_nothing_is_missing(name: str) -> None:
    model, (ids, mask) = shared(name, ()), pad(ROWS)
    _, cache = in_steps(model, ids, mask, (20, 40, 41, 42, 43))
    cache.crop(-4)
    more = torch.tensor(random_rows([9] * 4, seed=7))
    ids, mask = torch.cat([ids[:, :40], more], dim=1), torch.cat([mask[:, :40], torch.ones_like(more)], dim=1)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits[:, 40:]
    found, _ = in_steps(model, more, mask, (1, 3), cache)
    assert error(found[..., :META], wanted[..., :META]) < ROUNDED
    with pytest.raises(UserError, match="text was dropped from this cache; only its last"):
        cache.crop(-30)


@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("name", FEW)
def test_a_cache_of_a_fixed_size(name: str, meta_every: int | None) -> None:
    """One for all tokens, and one that is smaller than the text, whose places are taken again."""
    model, options = shared(name, ()), {"max_new_tokens": 20, "meta_every": meta_every}
    wanted = generate(model, PROMPTS, use_cache=False, **options)
    options["disable_compile"] = True
    assert generate(model, PROMPTS, cache_implementation="static", **options) == wanted
    cache = StaticCache(model.config, max_cache_len=32)
    assert generate(model, PROMPTS, past_key_values=cache, prefill_chunk_size=4, **options) == wanted
    assert int(cache.get_seq_length()) > 50


@BLOCKS
@pytest.mark.parametrize("name", FEW)
def test_training_hides_the_same_text_with_activation_checkpointing_too(name: str, full: tuple[int, ...]) -> None:
    ids, gradients = torch.tensor(random_rows((30, 30), meta_rate=0.2)), []
    for way in ("masked", "plain", "checkpointed"):
        model = model_of(name, None if way == "masked" else full).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if way == "checkpointed":
            checkpoint_activations(model)
            model.enable_input_require_grads()
        if way == "masked":
            count = len(decoder_of(model)[1])
            masks = torch.stack([seen_by_layers(row, count, full) for row in ids.tolist()], dim=1)[:, :, None]
            loss = masked(model, masks, input_ids=ids, labels=ids).loss
        else:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    for found in gradients[1:]:
        assert max(far(a, b) for a, b in zip(found, gradients[0], strict=True)) < ROUNDED_GRADIENT


@pytest.mark.quick(name=["gpt2", "llama"])
@pytest.mark.parametrize("name", FEW)
def test_the_eager_attention_function(name: str) -> None:
    model, (ids, mask) = model_of(name, ()), pad(ROWS)
    model.set_attn_implementation("eager")
    wanted = torch.cat([dense(name, row, ()) for row in ROWS])[:, :META]
    found, _ = in_steps(model, ids, mask, (20, 36))
    assert error(found[mask.bool()][:, :META], wanted) < ROUNDED


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles flex attention with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it compiles
def test_flex_attention() -> None:
    model, (ids, mask) = model_of("llama", ()), pad(ROWS)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=False).logits
    wanted = torch.cat([dense("llama", row, ()) for row in ROWS])[:, :META]
    assert error(found[mask.bool()][:, :META], wanted) < ROUNDED


@pytest.mark.filterwarnings("ignore:::peft", "ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's
@BLOCKS
def test_the_window_is_saved_with_the_model_and_with_what_was_added(full: tuple[int, ...], tmp_path: Path) -> None:
    model, (ids, mask) = model_of("llama", None), pad(ROWS)
    assert (model.config.text_window, model.config.text_sinks, model.config.text_full_layers) == (None, 4, None)
    set_text_window(model, WINDOW, SINKS, full)
    model.save_pretrained(tmp_path / "whole")
    save_meta(model, tmp_path / "delta")
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        for loaded in (
            AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
            load_meta(base("llama"), tmp_path / "delta"),
        ):
            assert (loaded.config.text_window, loaded.config.text_sinks) == (WINDOW, SINKS)
            assert loaded.config.text_full_layers == ([*full] or None)
            assert torch.equal(loaded(ids, attention_mask=mask).logits, wanted)
        set_text_window(loaded, None)
        assert loaded.config.text_window is None
        tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # its adapters add nothing yet
        assert torch.equal(tuned(ids, attention_mask=mask).logits, wanted)


def test_other_layers_are_chosen_and_none() -> None:
    model, (ids, mask) = model_of("llama"), pad(ROWS)
    count = len(decoder_of(model)[1])
    with torch.no_grad():
        set_text_window(model, WINDOW, SINKS, [0])
        row = torch.tensor(ROWS[:1])
        masks = seen_by_layers(ROWS[0], count, [0])[:, None, None]
        wanted = masked(shared("llama", None), masks, input_ids=row).logits
        assert error(model(row, use_cache=False).logits, wanted) < ROUNDED
        pieces, cache = in_steps(model, row, torch.ones_like(row), (20, *range(30, 44)))
        assert error(pieces, wanted) < ROUNDED
        assert held(cache)[0] == 44 > held(cache)[1]
        set_text_window(model, WINDOW)  # with the sinks and full layers that it has
        assert (model.config.text_sinks, model.config.text_full_layers) == (SINKS, [0])
        set_text_window(model, WINDOW, SINKS, [])
        window = model(ids, attention_mask=mask).logits
        set_text_window(model, WINDOW, SINKS, range(count))
        everything = model(ids, attention_mask=mask).logits
        set_text_window(model, None)
        assert model.config.text_full_layers is None
        plain = model(ids, attention_mask=mask).logits
    assert error(everything[mask.bool()], plain[mask.bool()]) < ROUNDED
    assert error(window[mask.bool()], plain[mask.bool()]) > 0.01


@pytest.mark.quick(use_cache=[False])
@pytest.mark.parametrize("use_cache", [False, None])
def test_a_compiled_model_has_the_masks_of_each_pass(use_cache: bool | None) -> None:
    torch._dynamo.reset()
    model = model_of("llama")
    compiled = torch.compile(model, backend="eager")
    for seed, length in enumerate((30, 30, 33)):
        ids = torch.tensor(random_rows((length, length), meta_rate=0.2, seed=seed))
        with torch.no_grad():
            wanted = model(ids, use_cache=use_cache).logits
            assert error(compiled(ids, use_cache=use_cache).logits, wanted) < ROUNDED


def test_a_base_that_changes_the_mask_before_its_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = model_of("llama", None), modeling_llama.create_causal_mask

    def changed(*args: Any, **kwargs: Any) -> Any:
        mask = make(*args, **kwargs)
        return mask if mask is None else mask.clone()

    monkeypatch.setattr(modeling_llama, "create_causal_mask", changed)
    set_text_window(model, WINDOW, SINKS)
    with pytest.raises(UserError, match="its blocks have masks of their own"):
        set_text_window(model, WINDOW, SINKS, FULL)
    assert (model.config.text_window, model.config.text_full_layers) == (WINDOW, None)


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("mistral", {}, "some of its blocks have a sliding window of their own, or a state instead of a cache"),
        ("gemma3_text", {}, "a sliding window of their own"),
        ("gpt_neo", {}, "a sliding window of their own"),
        ("llama4_text", {}, "a sliding window of their own"),
        ("qwen3_next", {}, "or a state instead of a cache"),
        ("bloom", {}, "it must take masks of four dimensions"),
        ("mpt", {}, "text that is forgotten changes what it predicts"),
        ("falcon", {"alibi": True}, "it must take masks of four dimensions"),
    ],
)
def test_a_base_with_masks_of_its_own_is_refused(name: str, choices: dict[str, Any], message: str) -> None:
    model = add_meta_attention(base(name, **choices), meta_token_id=META)
    with pytest.raises(UserError, match=message):
        set_text_window(model, WINDOW)
    assert model.config.text_window is None


def test_what_would_be_wrong_is_refused() -> None:
    model, ids = shared("llama", ()), torch.tensor(ROWS[:1])
    for window, sinks in ((0, 4), (5, -1)):
        with pytest.raises(UserError, match="in the settings of meta-attention, text_"):
            set_text_window(model, window, sinks)
        with pytest.raises(UserError, match="they must be at least 1 and 0"):
            set_text_window(tiny_model(), window, sinks)
    with pytest.raises(UserError, match="call add_meta_attention first"):
        set_text_window(GPT2LMHeadModel(base("gpt2").config), 5)
    with pytest.raises(UserError, match="would replace the text_window"):
        model(ids, attention_mask=torch.ones(1, 1, 44, 44).bool())
    with pytest.raises(UserError, match="a cache of 30 tokens is too small for the text_window"):
        model(ids, past_key_values=StaticCache(model.config, max_cache_len=30))
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(UserError, match="learned prompts"):
        model(ids, past_key_values=cache, attention_mask=torch.ones(1, 47))
