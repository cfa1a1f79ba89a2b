"""The rule by which text is forgotten, pair by pair, and what the tests of it share."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from metatokens import MetaGPT2ForCausalLM
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import META, random_rows

WINDOW, SINKS = 5, 2
SMALL = {"text_window": WINDOW, "text_sinks": SINKS, "max_position_embeddings": 96}
ROWS = random_rows((44, 31, 12, 1), seed=3, meta_rate=0.2)
PROMPTS = random_rows((34, 25, 6), seed=5, meta_rate=0.2)


def seen(row: Sequence[int], window: int = WINDOW, sinks: int = SINKS) -> Tensor:
    """Which keys each query sees, (T, T): the rule, pair by pair."""
    mask = torch.zeros(len(row), len(row), dtype=torch.bool)
    for query in range(len(row)):
        for key in range(query + 1):
            mask[query, key] = row[key] == META or key < sinks or query - key < window
    return mask


def seen_by_layers(row: Sequence[int], layers: int, full: Sequence[int]) -> Tensor:
    """The same for each layer, (layers, T, T), some of which see everything."""
    everything = torch.ones(len(row), len(row)).tril().bool()
    return torch.stack([everything if layer in full else seen(row) for layer in range(layers)])


def expected(model: MetaGPT2ForCausalLM, rows: Sequence[Sequence[int]]) -> Tensor:
    """The oracle's logits of all tokens, row after row."""
    oracle, (window, sinks) = DenseOracle(model), (model.config.text_window, model.config.text_sinks)
    return torch.cat([oracle.logits(row, seen(row, window, sinks)) for row in rows]).detach()


def in_steps(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cuts: Sequence[int], cache: DynamicCache | None = None
) -> tuple[Tensor, DynamicCache]:
    """The logits (batch, length, vocabulary) of a text that is read in pieces between `cuts`, and the cache."""
    pieces, before = [], mask.shape[1] - ids.shape[1]
    for start, end in pairwise([0, *cuts, ids.shape[1]]):
        given = {"attention_mask": mask[:, : before + end], "past_key_values": cache, "use_cache": True}
        out = model(ids[:, start:end], **given)
        cache, pieces = out.past_key_values, [*pieces, out.logits]
    return torch.cat(pieces, dim=1), cache


def held(cache: DynamicCache) -> list[int]:
    """The number of entries of each layer."""
    return [layer.keys.shape[2] for layer in cache.layers]
