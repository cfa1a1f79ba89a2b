"""Operations on the base's caches include the keys and values of meta-attention."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from metatokens.errors import UserError
from tests.model.generating import assert_a_chat_goes_on
from tests.model.tiny_models import tiny_model
from tests.retrofit.architectures import LENGTH, META, ROUNDED, error, logits, retrofitted, with_meta_tokens

READ = 14
NAMES = ("llama", "gpt_neox", "gemma3_text", "bloom", "qwen3_next")  # with sliding windows, and layers without keys
FIRST, REST = with_meta_tokens()[:, :READ], with_meta_tokens()[:, READ:]


def filled(model: PreTrainedModel, cache: Cache | None = None) -> Cache:
    with torch.no_grad():
        return model(FIRST, past_key_values=cache, use_cache=True).past_key_values


@torch.no_grad()
def read_on(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long)
    return model(ids, past_key_values=cache, use_cache=True, attention_mask=mask).logits[..., :META]


@pytest.mark.parametrize(
    ("change", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([1, 0]), [1, 0]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_cache(name: str, change: str, argument: Any, rows: list[int]) -> None:
    model = retrofitted(name)
    cache = filled(model)
    if name == "qwen3_next" and change != "reorder_cache":
        with pytest.raises(AttributeError):  # the base's own: its linear layers have no such method
            getattr(cache, change)(argument)
        return
    getattr(cache, change)(argument)
    rest = REST[:1].expand(len(rows), -1)
    expected = logits(model, torch.cat([FIRST[rows], rest], dim=1))[:, READ:]
    assert error(read_on(model, cache, rest), expected) < ROUNDED


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_a_cache_is_a_copy(name: str) -> None:
    model = retrofitted(name)
    cache = filled(model)
    copied = deepcopy(cache)
    expected = logits(model, with_meta_tokens())[:, READ:]
    for one in (copied, cache):
        assert error(read_on(model, one, REST), expected) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bloom"])
def test_a_cropped_cache_forgets_meta_tokens_too(name: str) -> None:
    model = retrofitted(name)
    cache = filled(model)
    cache.crop(-5)
    expected = logits(model, torch.cat([FIRST[:, :-5], REST], dim=1))[:, READ - 5 :]
    assert error(read_on(model, cache, REST), expected) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize(
    "make", [lambda model: DynamicCache(), lambda model: StaticCache(model.config, max_cache_len=LENGTH)]
)
def test_caches_that_a_user_makes(name: str, make: Callable[[PreTrainedModel], Cache]) -> None:
    model = retrofitted(name)
    cache = make(model)
    filled(model, cache)
    assert error(read_on(model, cache, REST), logits(model, with_meta_tokens())[:, READ:]) < ROUNDED
    cache.reset()
    with torch.no_grad():
        again = model(FIRST, past_key_values=cache, use_cache=True).logits[..., :META]
    assert error(again, logits(model, FIRST)) < ROUNDED


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_mask_as_long_as_a_static_cache(name: str) -> None:
    model = retrofitted(name)
    cache, mask = StaticCache(model.config, max_cache_len=LENGTH + 9), torch.zeros(2, LENGTH + 9, dtype=torch.long)
    read = []
    for first, last in ((0, READ), (READ, LENGTH)):
        mask[:, first:last] = 1
        out = model(with_meta_tokens()[:, first:last], past_key_values=cache, attention_mask=mask, use_cache=True)
        read.append(out.logits[..., :META])
    assert error(torch.cat(read, dim=1), logits(model, with_meta_tokens())) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text", "mistral", "qwen3"])
def test_padded_rows_in_a_static_cache(name: str) -> None:
    model, ids = retrofitted(name), with_meta_tokens()
    mask = torch.ones_like(ids)
    ids[0, :5] = mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "meta_every": 2}
    got = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(got, model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize(
    "options", [{"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 5}], ids=str
)
def test_other_ways_to_generate(options: dict[str, Any]) -> None:
    model, ids = retrofitted("llama"), with_meta_tokens()[:1]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(
        model.generate(ids, max_new_tokens=8, do_sample=False, disable_compile=True, **options), expected
    )


def test_blocks_with_a_state_forget_tokens_that_were_guessed_wrong() -> None:
    """Such a layer of the cache has no length by which its meta-tokens could be found."""
    model, ids = retrofitted("lfm2_moe"), with_meta_tokens()[:1] % 12  # few words, so that guesses are found
    ids = torch.where(with_meta_tokens()[:1] == META, META, ids + 1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), expected)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids, past_key_values=cache)  # one pass alone
    before = [layer.second.slots.tolist() for layer in cache.layers]
    cache.crop(-7)
    for layer, slots in zip(cache.layers, before, strict=True):
        assert layer.second.slots.tolist() == [[slot for slot in row if slot < ids.shape[1] - 7] for row in slots]
        assert 0 < layer.second.slots.shape[1] < len(slots[0])


KEPT = [0, 1, 3, 7, 11, 12, 13]  # the first two tokens, the meta-tokens (every fourth), and a window


def dropped(model: PreTrainedModel, ids: Tensor) -> Cache:
    """A cache of the first tokens in which only some are kept, as methods that compress caches do."""
    with torch.no_grad():
        cache = model(ids[:, :READ], use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, KEPT].contiguous(), layer.values[:, :, KEPT].contiguous()
    return cache


def with_dropped_entries(name: str) -> tuple[PreTrainedModel, Tensor]:
    ids = with_meta_tokens()
    ids[ids == META] = 5
    ids[:, 3::4] = META
    is_own = name == "meta_gpt2"
    return tiny_model(vocab_size=320, meta_token_id=META) if is_own else retrofitted(name), ids


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "meta_gpt2"])
def test_a_cache_from_which_entries_were_dropped(name: str) -> None:
    """If positions are given, the rest is right: meta-tokens still see earlier ones, whose entries were kept."""
    model, ids = with_dropped_entries(name)
    mask = torch.ones(LENGTH, LENGTH).tril().bool()
    mask[READ:, [place for place in range(READ) if place not in KEPT]] = False
    expected = model(ids, attention_mask=mask.expand(2, 1, -1, -1), use_cache=False).logits[:, READ:, :META]
    cache, got = dropped(model, ids), []
    for first, last in ((READ, READ + 4), (READ + 4, LENGTH)):
        positions = torch.arange(first, last).expand(2, -1)
        got.append(model(ids[:, first:last], past_key_values=cache, position_ids=positions).logits[..., :META])
    assert error(torch.cat(got, dim=1), expected) < ROUNDED
    with pytest.raises(UserError, match="entries were dropped from this cache, so that it cannot be cropped"):
        cache.crop(-2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "meta_gpt2"])
def test_the_length_of_a_cache_is_no_position_where_entries_were_dropped(name: str) -> None:
    model, ids = with_dropped_entries(name)
    with pytest.raises(UserError, match="is not after that of the last meta-token in the cache: give position_ids"):
        model(ids[:, READ : READ + 4], past_key_values=dropped(model, ids))
    rest, positions = ids[:, READ : READ + 4], torch.arange(READ, READ + 4).expand(2, -1)
    mask = torch.ones(2, 1, 4, len(KEPT) + 4).tril(len(KEPT)).bool()
    with pytest.raises(UserError, match="a mask of four dimensions"):
        model(rest, past_key_values=dropped(model, ids), position_ids=positions, attention_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "meta_gpt2"])
def test_entries_that_were_dropped_are_remembered(name: str) -> None:
    """Even if the cache has grown since, so that no slot is beyond its length."""
    model, ids = with_dropped_entries(name)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 2:].contiguous(), layer.values[:, :, 2:].contiguous()
    ids[:, 8:12] = 5
    model(ids[:, 8:12], past_key_values=cache, position_ids=torch.arange(8, 12).expand(2, -1))
    with pytest.raises(UserError, match="so that it cannot be cropped"):
        cache.crop(-6)
    mask, positions = torch.ones(2, 1, 1, 11).bool(), torch.tensor([[15]]).expand(2, -1)
    with pytest.raises(UserError, match="a mask of four dimensions"):
        model(ids[:, 15:16], past_key_values=cache, position_ids=positions, attention_mask=mask)


def test_a_conversation_goes_on_behind_inserted_tokens() -> None:
    model, ids = retrofitted("llama"), with_meta_tokens()[:1]
    options = {"max_new_tokens": 5, "do_sample": False, "meta_every": 2}
    cache, mask = DynamicCache(), torch.ones_like(ids)
    ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert cache.inserted == [LENGTH + 2, LENGTH + 4]  # the fifth id was not read
    assert_a_chat_goes_on(model, ids, mask, cache, **options)
