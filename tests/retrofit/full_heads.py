"""Retrofitted models in which some key-value heads see all text, and what they should predict."""

from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens import set_text_window
from tests.model.text_window import SINKS, WINDOW, seen
from tests.retrofit.forgetful import block_masks, forgetful_retrofit, shared_remembering

HEADS = [(0, 1), (2, 0)]  # block 1 forgets alone


def with_full_heads(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = forgetful_retrofit(name, None, dtype)
    set_text_window(model, WINDOW, SINKS, full_heads=HEADS)
    return model


shared = cache(with_full_heads)  # for tests that do not change it


def masks_of_heads(model: PreTrainedModel, row: list[int]) -> Tensor:
    """Which keys the heads of each block see, (blocks, 1, heads, T, T): the rule, pair by pair."""
    config = model.config
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    everything = torch.ones(len(row), len(row)).tril().bool()
    with_window = seen(row)
    blocks = []
    for block in range(config.num_hidden_layers):
        of_heads = []
        for head in range(heads):
            key_value_head = head * key_value_heads // heads
            of_heads.append(everything if (block, key_value_head) in HEADS else with_window)
        blocks.append(torch.stack(of_heads))
    return torch.stack(blocks)[:, None]


def expected_logits(name: str, row: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A pass of a model that sees everything, under those masks, (length, entries)."""
    model = shared_remembering(name, dtype)
    with torch.no_grad(), block_masks(model, masks_of_heads(model, row)) as inputs:
        return model(torch.tensor([row]), **inputs).logits[0]
