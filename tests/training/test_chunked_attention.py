"""Attention by chunks gives what `sdpa` gives, for any mask, and a training with a text window uses it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from metatokens.model import chunked_attention
from metatokens.training.pretrain import pretrain
from tests.numbers import rounding_bound
from tests.retrofit.forgetful import forgetful_retrofit
from tests.training.conftest import Pretraining

HEADS, KEY_HEADS, SIZE, LENGTH = 4, 2, 8, 50
MODULE = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, is_causal=True)
# A sum of products of numbers near 1, over the keys and over the size of a head, forwards and backwards.
ROUNDED = rounding_bound(torch.float64, 4 * (LENGTH + SIZE), magnitude=10)


def masks() -> dict[str, torch.Tensor | None]:
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
        "added to the logits": torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(
            ~causal, -9.0
        ),
        "without a row for each query": key.expand(2, 1, 1, -1) < 9,
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_what_sdpa_gives(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(("options", "is_used"), [(["training.text_window=8"], True), ([], False)])
def test_a_training_that_forgets_attends_by_chunks(
    options: list[str],
    is_used: bool,
    pretraining: Pretraining,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = []

    def watched(*args, **kwargs):
        used.append(args)
        return chunked_attention.chunked_attention(*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa_by_chunks", watched)
    pretrain(pretraining(*options), tmp_path / "run")
    assert bool(used) == is_used
    for file in (tmp_path / "run").rglob("*.json"):
        assert "by_chunks" not in file.read_text(encoding="utf-8")


def test_a_base_that_computes_attention_itself_keeps_its_own() -> None:
    model = forgetful_retrofit("falcon", ())
    with chunked_attention.attention_by_chunks(model):
        assert model.config._attn_implementation == "sdpa"
