"""The rule by which text is forgotten, pair by pair, and what the tests of it share."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import META, random_rows

WINDOW, SINKS, FULL = 5, 2, [1]
SMALL = {"text_window": WINDOW, "text_sinks": SINKS, "max_position_embeddings": 96}
MIXED = SMALL | {"num_hidden_layers": 3, "text_full_layers": FULL}
WINDOWS = pytest.mark.parametrize("window", [SMALL, MIXED], ids=["text_window", "text_full_layers"])
ROWS = random_rows((44, 31, 12, 1), seed=3, meta_rate=0.2)
PROMPTS = random_rows((34, 25, 6), seed=5, meta_rate=0.2)


def seen(
    row: Sequence[int],
    window: int = WINDOW,
    sinks: int = SINKS,
    meta: int = META,
    positions: Sequence[int] | None = None,
) -> Tensor:
    """Which keys each query sees, (T, T): the rule, pair by pair. Without `positions`, they count from 0."""
    at = positions or range(len(row))
    mask = torch.zeros(len(row), len(row), dtype=torch.bool)
    for query in range(len(row)):
        for key in range(query + 1):
            mask[query, key] = row[key] == meta or at[key] < sinks or at[query] - at[key] < window
    return mask


def seen_by_layers(
    row: Sequence[int], layers: int, full: Sequence[int], window: int = WINDOW, sinks: int = SINKS
) -> Tensor:
    """The same for each layer, (layers, T, T), some of which see everything."""
    everything, own = torch.ones(len(row), len(row)).tril().bool(), seen(row, window, sinks)
    return torch.stack([everything if layer in full else own for layer in range(layers)])


def rule_of(model: MetaGPT2ForCausalLM) -> Callable[[Sequence[int]], Tensor]:
    """`seen_by_layers` of a row, with the model's settings."""
    config = model.config
    own = config.num_hidden_layers, config.text_full_layers or (), config.text_window, config.text_sinks
    return lambda row: seen_by_layers(row, *own)


def expected(model: MetaGPT2ForCausalLM, rows: Sequence[Sequence[int]]) -> Tensor:
    """The oracle's logits of all tokens, row after row."""
    oracle, rule = DenseOracle(model), rule_of(model)
    return torch.cat([oracle.logits(row, rule(row)) for row in rows]).detach()
