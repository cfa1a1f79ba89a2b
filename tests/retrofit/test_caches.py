"""Operations on caches, of both callers, include the keys and values of meta-attention."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import Cache

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


@pytest.mark.parametrize("caller", ["rope-meta", "llama", "gpt_neox"])
@torch.no_grad()
def test_a_cache_from_which_other_code_dropped_entries_is_refused(caller: str) -> None:
    model, cache = shared_model_of(caller), deepcopy(filled(caller))
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, 2:]
    message = "entries were dropped from this cache"

    with pytest.raises(UserError, match=message):
        model(REST, past_key_values=cache)
    with pytest.raises(UserError, match=message):
        cache.crop(-2)


def test_a_block_with_a_state_does_not_forget_meta_tokens() -> None:
    """As it would have to where `generate` guesses tokens, and some are wrong."""
    with pytest.raises(UserError, match="a block with a state cannot forget meta-tokens"):
        shared("lfm2_moe").generate(FIRST[:1], max_new_tokens=20, prompt_lookup_num_tokens=3)
