"""Attention by chunks gives what `sdpa` gives, for any mask, and a training with a text window uses it."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from metatokens.training import chunked_attention
from tests.numbers import rounding_bound

HEADS, KEY_HEADS, SIZE, LENGTH = 4, 2, 8, 50
MODULE = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, is_causal=True)
# A sum of products of numbers near 1, over the keys and over the size of a head, forwards and backwards.
ROUNDED = rounding_bound(torch.float64, 4 * (LENGTH + SIZE), magnitude=10)


def masks():
    """Masks by name, in which each query sees itself."""
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    causal = (key <= query).expand(2, 1, -1, -1)
    window = causal & ((query - key < 5) | (key < 2))
    drawn = torch.rand(2, HEADS, LENGTH, LENGTH, generator=torch.manual_seed(0)) < 0.1
    return {
        "window": window,
        "drawn": (drawn & causal) | (key == query),
        "causal": causal,
        "none": None,
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_what_sdpa_gives(name, chunk, monkeypatch):
    monkeypatch.setattr(chunked_attention, "CHUNK", chunk)
    generator = torch.manual_seed(1)
    results = []
    inputs = [
        torch.randn(
            2, heads, LENGTH, SIZE, generator=generator, dtype=torch.float64, requires_grad=True
        )
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weights = torch.randn(2, LENGTH, HEADS, SIZE, generator=generator, dtype=torch.float64)
    for attend in (sdpa_attention_forward, chunked_attention.chunked_attention):
        output, _ = attend(MODULE, *inputs, masks()[name])
        results.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    for expected, actual in zip(*results, strict=True):
        assert actual.shape == expected.shape
        assert (actual - expected).abs().max() <= ROUNDED
