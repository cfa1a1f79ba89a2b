"""Retrofitted models that forget text, against the same model with a mask of four dimensions written pair by pair."""

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GPT2LMHeadModel, PreTrainedModel, StaticCache

from metatokens import add_meta_attention, load_meta, save_meta, set_text_window
from metatokens.errors import UserError
from tests.model import generating, in_pieces
from tests.model.generating import beams_of, by_hand, samples_of
from tests.model.text_window import PROMPTS, ROWS, SINKS, WINDOW, held, seen
from tests.model.tiny_models import META, pad, random_rows, tiny_model
from tests.retrofit.architectures import base, error, train_like

NAMES = (
    "cohere", "deepseek_v3", "falcon", "gemma", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "llama", "mixtral",
    "olmo2", "opt", "phi", "qwen3", "smollm3", "stablelm", "xglm",
)  # fmt: skip
FEW = ("gpt2", "gpt_neox", "llama", "mixtral", "opt")
EOS = 2


def model_of(name: str, window: int | None = WINDOW, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A retrofitted model whose meta-attention has an effect."""
    plain = base(name).to(dtype)
    model = train_like(add_meta_attention(plain, meta_token_id=META, heads=2, head_size=16, freeze=False))
    set_text_window(model, window, SINKS)
    return model


shared = functools.cache(model_of)


@torch.no_grad()
def dense(name: str, row: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits (length, vocabulary) of a model that sees everything, under a mask by the rule."""
    mask = torch.zeros(1, 1, len(row), len(row), dtype=dtype).masked_fill(~seen(row), torch.finfo(dtype).min)
    given = {"attention_mask": mask, "position_ids": torch.arange(len(row))[None]}
    return shared(name, None, dtype)(torch.tensor([row]), use_cache=False, **given).logits[0]


in_steps = torch.no_grad()(in_pieces.in_steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_and_steps_are_the_masked_recomputation(name: str, dtype: torch.dtype) -> None:
    model = shared(name, dtype=dtype)
    ids, mask = pad(ROWS)
    wanted = torch.cat([dense(name, row, dtype) for row in ROWS])[:, :META]
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
    pieces, cache = in_steps(model, ids, mask, (20, 25, *range(36, 44)))
    assert max(held(cache)) < 40
    assert cache.get_seq_length() == 44
    for found in (whole, pieces):
        difference = (found[mask.bool()][:, :META] - wanted).abs()
        if dtype == torch.float32:
            assert difference.max() < 2e-5 * wanted.abs().max()
        else:  # in half precision the two ways round differently, and experts may change
            assert difference.float().mean() < 0.02 * wanted.float().abs().mean()


def generate(model: PreTrainedModel, rows: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """The new ids for left-padded rows, which do not end early."""
    return generating.generate(model, rows, suppress_tokens=[EOS], **options).tolist()


@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_generation_is_the_masked_recomputation(name: str, meta_every: int | None) -> None:
    def score(read: Sequence[int]) -> Tensor:
        scores = dense(name, read)[-1].log_softmax(dim=-1)
        scores[[META, EOS]] = -torch.inf
        return scores

    model = shared(name)
    greedy = [beams_of(score, row, 8, meta_every, 1) for row in PROMPTS]
    sampled = samples_of(score, PROMPTS, 8, meta_every)
    beams = [beams_of(score, row, 4, meta_every, 3) for row in PROMPTS]
    for chunk in (None, 7):
        options = {"meta_every": meta_every, "prefill_chunk_size": chunk}
        cache = DynamicCache()
        assert generate(model, PROMPTS, max_new_tokens=8, past_key_values=cache, **options) == greedy
        assert max(held(cache)) < 34
        assert generate(model, PROMPTS, max_new_tokens=8, do_sample=True, top_k=0, **options) == sampled
        assert generate(model, PROMPTS, max_new_tokens=4, num_beams=3, **options) == beams


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", NAMES)
def test_generated_tokens_in_bfloat16_differ_by_rounding_alone(name: str, chunk: int | None) -> None:
    row, model = PROMPTS[0], shared(name, dtype=torch.bfloat16)
    new = generate(model, [row], max_new_tokens=8, prefill_chunk_size=chunk)[0]
    scores = dense(name, [*row, *new], torch.bfloat16)[len(row) - 1 : -1].float()
    scores[:, [META, EOS]] = -100.0
    behind = scores.amax(dim=1) - scores[torch.arange(len(new)), new]
    assert behind.max() < 0.02 * scores[:, META + 1 :].std()


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("name", FEW)
def test_a_chat_goes_on_with_the_same_cache(
    name: str, chunk: int | None, meta_every: int | None, mode: dict[str, Any]
) -> None:
    model, (ids, mask) = shared(name), pad(PROMPTS)
    options = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": [EOS], "meta_every": meta_every}
    cache = DynamicCache()
    first = {"past_key_values": cache, "max_new_tokens": 6, "prefill_chunk_size": chunk}
    ids = model.generate(ids, attention_mask=mask, **first, **options)
    ids = torch.cat([ids, torch.tensor(random_rows([9] * 3, seed=6))], dim=1)
    mask = torch.cat([mask, torch.ones(3, 15, dtype=torch.long)], dim=1)
    whole, whole_mask = by_hand(ids, mask, cache, META)
    options |= {"max_new_tokens": 7} | mode
    torch.manual_seed(5)
    wanted = model.generate(whole, attention_mask=whole_mask, use_cache=False, **options)[:, whole.shape[1] :]
    torch.manual_seed(5)
    cache.batch_repeat_interleave(mode.get("num_beams", 1))
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, prefill_chunk_size=chunk, **options)
    assert torch.equal(found[:, ids.shape[1] :], wanted)
    assert max(held(cache)) < 40


@pytest.mark.parametrize("name", FEW)
def test_guesses_that_are_cropped_change_nothing(name: str) -> None:
    rows = [[5, META, 9] * 12]
    wanted = generate(shared(name), rows, max_new_tokens=20, use_cache=False)
    assert generate(shared(name), rows, max_new_tokens=20, prompt_lookup_num_tokens=3) == wanted


@pytest.mark.parametrize("name", FEW)
def test_a_cache_can_be_cropped_where_nothing_is_missing(name: str) -> None:
    model, (ids, mask) = shared(name), pad(ROWS)
    _, cache = in_steps(model, ids, mask, (20, 40, 41, 42, 43))
    cache.crop(-4)
    more = torch.tensor(random_rows([9] * 4, seed=7))
    ids, mask = torch.cat([ids[:, :40], more], dim=1), torch.cat([mask[:, :40], torch.ones_like(more)], dim=1)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits[:, 40:]
    found, _ = in_steps(model, more, mask, (1, 3), cache)
    assert error(found[..., :META], wanted[..., :META]) < 1e-4
    with pytest.raises(UserError, match="text was dropped from this cache; only its last"):
        cache.crop(-30)


@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("name", FEW)
def test_a_cache_of_a_fixed_size(name: str, meta_every: int | None) -> None:
    """One for all tokens, and one that is smaller than the text, whose places are taken again."""
    options = {"max_new_tokens": 20, "meta_every": meta_every}
    wanted = generate(shared(name), PROMPTS, use_cache=False, **options)
    options["disable_compile"] = True
    assert generate(shared(name), PROMPTS, cache_implementation="static", **options) == wanted
    cache = StaticCache(shared(name).config, max_cache_len=32)
    assert generate(shared(name), PROMPTS, past_key_values=cache, prefill_chunk_size=4, **options) == wanted
    assert int(cache.get_seq_length()) > 50


@pytest.mark.parametrize("name", FEW)
def test_the_eager_attention_function(name: str) -> None:
    model, (ids, mask) = model_of(name), pad(ROWS)
    model.set_attn_implementation("eager")
    wanted = torch.cat([dense(name, row) for row in ROWS])[:, :META]
    found, _ = in_steps(model, ids, mask, (20, 36))
    assert error(found[mask.bool()][:, :META], wanted) < 1e-4


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles flex attention with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it compiles
def test_flex_attention() -> None:
    model, (ids, mask) = model_of("llama"), pad(ROWS)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=False).logits
    wanted = torch.cat([dense("llama", row) for row in ROWS])[:, :META]
    assert error(found[mask.bool()][:, :META], wanted) < 1e-4


def test_the_window_is_saved_with_the_model_and_with_what_was_added(tmp_path: Path) -> None:
    model, (ids, mask) = add_meta_attention(base("llama"), meta_token_id=META, heads=2, head_size=16), pad(ROWS)
    assert (model.config.text_window, model.config.text_sinks) == (None, 4)
    set_text_window(train_like(model), WINDOW, SINKS)
    model.save_pretrained(tmp_path / "whole")
    save_meta(model, tmp_path / "delta")
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        for loaded in (
            AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
            load_meta(base("llama"), tmp_path / "delta"),
        ):
            assert (loaded.config.text_window, loaded.config.text_sinks) == (WINDOW, SINKS)
            assert torch.equal(loaded(ids, attention_mask=mask).logits, wanted)
    set_text_window(model, None)
    assert model.config.text_window is None


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
    model, ids = shared("llama"), torch.tensor(ROWS[:1])
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
