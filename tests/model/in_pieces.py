"""Texts that a model reads in pieces, with a cache, and what the cache holds."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.model.agreement import assert_close
from tests.model.tiny_models import META, random_rows
from tests.numbers import ROUNDED_DOUBLE
from tests.retrofit.architectures import ROUNDED


@torch.no_grad()
def in_steps(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor | None,
    cuts: Sequence[int],
    cache: DynamicCache | None = None,
) -> tuple[Tensor, DynamicCache]:
    """The logits (batch, length, vocabulary) of a text that is read in pieces between `cuts`, and the cache."""
    pieces = []
    cached = 0 if mask is None else mask.shape[1] - ids.shape[1]
    for start, end in pairwise([0, *cuts, ids.shape[1]]):
        mask_so_far = None if mask is None else mask[:, : cached + end]
        out = model(
            ids[:, start:end], attention_mask=mask_so_far, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1), cache


@torch.no_grad()
def assert_continues(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache
) -> None:
    """New tokens after what the cache holds get the logits of a pass over everything."""
    assert cache.get_seq_length() == ids.shape[1]
    new = torch.tensor(random_rows([24] * len(ids), seed=7, meta_rate=0.3))
    whole, whole_mask = torch.cat([ids, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)
    expected = model(whole, attention_mask=whole_mask, use_cache=False).logits[:, -24:]

    logits, _ = in_steps(model, new, whole_mask, (1, 3, 22), cache)

    tolerance = ROUNDED_DOUBLE if model.dtype == torch.float64 else ROUNDED
    assert_close(logits[..., :META], expected[..., :META], tolerance)


def sizes_of(cache: DynamicCache) -> list[int]:
    """The number of entries of each layer."""
    return [layer.keys.shape[2] for layer in cache.layers]


def full_layers_alone_hold_all(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether the layers that forget text hold fewer entries than were read, and equally many."""
    sizes, total = sizes_of(cache), int(cache.get_seq_length())
    fewest, full_layers = min(sizes), model.config.text_full_layers or []
    blocks = range(model.config.num_hidden_layers)
    expected = [total if block in full_layers else fewest for block in blocks]
    return fewest < total and sizes[: len(blocks)] == expected
