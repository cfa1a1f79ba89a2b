"""Texts that a model reads in pieces, with a cache, and what the cache holds."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache
from tests.model.test_attention_oracle import assert_close
from tests.model.tiny_models import random_rows
from tests.numbers import ROUNDED_DOUBLE


def in_steps(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cuts: Sequence[int], cache: DynamicCache | None = None
) -> tuple[Tensor, DynamicCache]:
    """The logits (batch, length, vocabulary) of a text that is read in pieces between `cuts`, and the cache."""
    pieces, before = [], 0 if mask is None else mask.shape[1] - ids.shape[1]
    for start, end in pairwise([0, *cuts, ids.shape[1]]):
        seen = None if mask is None else mask[:, : before + end]
        out = model(ids[:, start:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        cache, pieces = out.past_key_values, [*pieces, out.logits]
    return torch.cat(pieces, dim=1), cache


def assert_continues(model: MetaGPT2ForCausalLM, ids: Tensor, mask: Tensor, cache: MetaTokenCache) -> None:
    """New tokens after what the cache holds get the logits of a pass over everything."""
    assert cache.get_seq_length() == ids.shape[1]
    new = torch.tensor(random_rows([24] * len(ids), seed=7, meta_rate=0.3))
    mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    wanted = model(torch.cat([ids, new], dim=1), attention_mask=mask, use_cache=False).logits[:, -24:]
    assert_close(in_steps(model, new, mask, (1, 3, 22), cache)[0], wanted, ROUNDED_DOUBLE)


def held(cache: DynamicCache) -> list[int]:
    """The number of entries of each layer."""
    return [layer.keys.shape[2] for layer in cache.layers]


def assert_full_layers_alone_hold_all(model: PreTrainedModel, cache: DynamicCache) -> None:
    """The layers that forget text, and the notes on them, hold fewer entries than were read, and equally many."""
    sizes, total, full = held(cache), int(cache.get_seq_length()), model.config.text_full_layers or []
    few = min(sizes)
    assert few < total
    layers = [total if number in full else few for number in range(model.config.num_hidden_layers)]
    kinds = 2 if getattr(model.config, "second_attention", None) == "causal" else 1
    notes = [few, total] if full else [few]
    assert sizes == layers * kinds + notes
