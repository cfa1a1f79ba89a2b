"""The rule by which text is forgotten, pair by pair, and what the tests of it share."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens import MetaGPT2ForCausalLM
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import META, random_rows

WINDOW, SINKS, FULL = 5, 2, [1]
SMALL = {"text_window": WINDOW, "text_sinks": SINKS, "max_position_embeddings": 96}
MIXED = SMALL | {"num_hidden_layers": 3, "text_full_layers": FULL}
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
    if positions is None:
        positions = range(len(row))
    mask = torch.zeros(len(row), len(row), dtype=torch.bool)
    for query in range(len(row)):
        for key in range(query + 1):
            is_near = positions[query] - positions[key] < window
            mask[query, key] = row[key] == meta or positions[key] < sinks or is_near
    return mask


def seen_in_blocks(model: PreTrainedModel, row: Sequence[int]) -> Tensor:
    """The same for each block of a model, (blocks, T, T). Without a window, and in some blocks, all text is seen."""
    config, blocks = model.config, range(model.config.num_hidden_layers)
    everything = torch.ones(len(row), len(row)).tril().bool()
    if config.text_window is None:
        return everything.expand(len(blocks), -1, -1)
    with_window = seen(row, config.text_window, config.text_sinks)
    full_blocks = config.text_full_layers or ()
    return torch.stack([everything if block in full_blocks else with_window for block in blocks])


@cache
@torch.no_grad()
def expected_of_rows(model: MetaGPT2ForCausalLM) -> Tensor:
    """The oracle's logits of all tokens of `ROWS`, row after row, computed once for a model that does not change."""
    oracle = DenseOracle(model)
    return torch.cat([oracle.logits(row, seen_in_blocks(model, row)) for row in ROWS])
