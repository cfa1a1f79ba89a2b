"""Operations on caches, of both callers, include the keys and values of meta-attention."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from metatokens.errors import UserError
from tests.model.agreement import assert_close
from tests.retrofit.architectures import LENGTH, META, logits, shared, with_meta_tokens
from tests.retrofit.callers import rounded, shared_model_of

READ = 14
FIRST, REST = with_meta_tokens().split([READ, LENGTH - READ], dim=1)


@cache
def filled(caller: str) -> Cache:
    """A cache that has read `FIRST`, to be copied."""
    with torch.no_grad():
        return shared_model_of(caller)(FIRST, use_cache=True).past_key_values


# What is done to a cache, and the ids that it then holds.
CHANGES: dict[str, tuple[Callable[[Cache], object], Tensor]] = {
    "copied": (lambda cache: None, FIRST),
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), FIRST[[1, 0]]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([1])), FIRST[[1]]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), FIRST[[0, 0, 1, 1]]),
    "cropped": (lambda cache: cache.crop(-5), FIRST[:, :-5]),
    "reset": (lambda cache: cache.reset(), FIRST[:, :0]),
}
# With sliding windows, and layers without keys, whose caches transformers can change in fewer ways.
CASES = {
    **{
        name: list(CHANGES)
        for name in ("rope-meta", "rope-causal", "rope-none", "llama", "gpt_neox", "bloom")
    },
    "gemma3_text": ["copied", "reordered", "selected", "repeated", "reset"],
    "qwen3_next": ["copied", "reordered"],
}


@pytest.mark.quick(caller=["rope-meta", "llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize(
    ("caller", "change"),
    [(caller, change) for caller, changes in CASES.items() for change in changes],
)
@torch.no_grad()
def test_a_cache_that_was_changed_goes_on(caller: str, change: str) -> None:
    model, cache = shared_model_of(caller), deepcopy(filled(caller))
    apply, held = CHANGES[change]

    apply(cache)

    rest = REST[:1].expand(len(held), -1)
    mask = torch.ones(len(held), held.shape[1] + rest.shape[1], dtype=torch.long)
    after = model(rest, past_key_values=cache, use_cache=True, attention_mask=mask).logits[
        ..., :META
    ]
    expected = logits(model, torch.cat([held, rest], dim=1))[:, held.shape[1] :]
    assert_close(after, expected, rounded(model))


def test_blocks_with_a_state_forget_tokens_that_were_guessed_wrong() -> None:
    """Such a layer of the cache has no length by which its meta-tokens could be found."""
    model = shared("lfm2_moe")
    with_metas = with_meta_tokens()[:1]
    # Few words, so that guesses are right.
    ids = torch.where(with_metas == META, META, with_metas % 12 + 1)
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 20,
        "do_sample": False,
        "eos_token_id": None,
    }
    expected = model.generate(ids, use_cache=False, **options)

    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), expected)


# The first two tokens, the meta-tokens (every fourth), and a window.
STAYING = [
    0,
    1,
    3,
    7,
    11,
    12,
    13,
]
COMPRESSED = pytest.mark.parametrize("caller", ["rope-meta", "llama", "gpt_neox"])


def ids_of_compressed() -> Tensor:
    """Ids in which every fourth is a meta-token."""
    ids = with_meta_tokens()
    ids[ids == META] = 5
    ids[:, 3::4] = META
    return ids


@torch.no_grad()
def compressed(
    model: PreTrainedModel, entries: list[int] | slice = STAYING, read: int = READ
) -> Cache:
    """A cache of the first tokens without some entries, as methods that compress caches leave it."""
    cache = model(ids_of_compressed()[:, :read], use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, entries].contiguous()
        layer.values = layer.values[:, :, entries].contiguous()
    return cache


@COMPRESSED
@torch.no_grad()
def test_a_cache_from_which_entries_were_dropped(caller: str) -> None:
    """If positions are given, the rest is right: meta-tokens still see earlier ones, whose entries stayed."""
    model, ids = shared_model_of(caller), ids_of_compressed()
    mask = torch.ones(LENGTH, LENGTH).tril().bool()
    mask[READ:, :READ] = False
    mask[READ:, STAYING] = True
    expected = logits(model, ids, attention_mask=mask.expand(2, 1, -1, -1))[:, READ:]

    cache, pieces = compressed(model), []
    for start, end in ((READ, READ + 4), (READ + 4, LENGTH)):
        positions = torch.arange(start, end).expand(2, -1)
        pieces.append(
            model(ids[:, start:end], past_key_values=cache, position_ids=positions).logits
        )

    assert_close(torch.cat(pieces, dim=1)[..., :META], expected, rounded(model))
    with pytest.raises(
        UserError, match="entries were dropped from this cache, so that it cannot be cropped"
    ):
        cache.crop(-2)


@COMPRESSED
@torch.no_grad()
def test_what_a_compressed_cache_cannot_do_is_refused(caller: str) -> None:
    model, rest = shared_model_of(caller), ids_of_compressed()[:, READ : READ + 4]
    with pytest.raises(
        UserError, match="is not after that of the last meta-token in the cache: give position_ids"
    ):
        model(rest, past_key_values=compressed(model))
    positions = torch.arange(READ, READ + 4).expand(2, -1)
    mask = torch.ones(2, 1, 4, len(STAYING) + 4).tril(len(STAYING)).bool()
    with pytest.raises(UserError, match="a mask of four dimensions"):
        model(rest, past_key_values=compressed(model), position_ids=positions, attention_mask=mask)
