"""The compared models: dense equals gathered, and all have the sizes of their shape."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from benchmarks.speed.cost import weights
from benchmarks.speed.peers import PEERS, SHAPES, Shape, dense_model
from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM

META = 31
SHAPE = Shape(width=24, layers=3, heads=2, vocabulary=40)
POSITIONS = pytest.mark.parametrize("position_embedding", ["learned", "rope", "none"])


def both_ways(**fields: Any) -> tuple[MetaGPT2ForCausalLM, MetaGPT2ForCausalLM]:
    """A random model, and a copy of it with a dense mask."""
    sizes = {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    ids = {"meta_token_id": META, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    config = MetaGPT2Config(
        **(sizes | ids | {"bias": True, "max_position_embeddings": 64} | fields)
    )
    gathered = MetaGPT2ForCausalLM(config).double().eval()
    for parameter in gathered.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return gathered, dense_model(copy.deepcopy(gathered))


def ragged(
    meta_rates: tuple[float, ...] = (0.3, 0.1, 0.0, 0.6), length: int = 15
) -> tuple[Tensor, Tensor]:
    """Rows with different numbers of meta-tokens; row i is padded on the left by i places."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(META, (len(meta_rates), length), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < torch.tensor(meta_rates)[:, None]] = META
    mask = (torch.arange(length) >= torch.arange(len(ids))[:, None]).long()
    return ids, mask


@POSITIONS
@pytest.mark.parametrize("meta_rates", [(0.3, 0.1, 0.0, 0.6), (0.0, 0.0), (1.0,)])
def test_dense_meta_attention_is_the_gathered_one(
    position_embedding: str, meta_rates: tuple[float, ...]
) -> None:
    gathered, dense = both_ways(position_embedding=position_embedding)
    ids, mask = ragged(meta_rates)
    expected, actual = (
        gathered(ids, attention_mask=mask).logits,
        dense(ids, attention_mask=mask).logits,
    )
    assert expected.std() > 0.5
    assert (actual - expected)[mask.bool()].abs().max() < 1e-11


def test_dense_meta_attention_has_the_same_gradients() -> None:
    gathered, dense = both_ways()
    ids, _ = ragged()
    for model in (gathered, dense):
        model.train()(ids, labels=ids.masked_fill(ids == META, -100)).loss.backward()
    expected = dict(gathered.named_parameters())
    for name, parameter in dense.named_parameters():
        assert (parameter.grad - expected.pop(name).grad).abs().max() < 1e-11, name
    assert not expected


@POSITIONS
@settings(deadline=None, max_examples=15)
@given(cuts=st.sets(st.integers(1, 14)))
def test_dense_meta_attention_step_by_step(position_embedding: str, cuts: set[int]) -> None:
    gathered, dense = both_ways(position_embedding=position_embedding)
    ids, mask = ragged()
    cache, pieces = DynamicCache(), []
    for start, end in pairwise([0, *sorted(cuts), 15]):
        pieces.append(
            dense(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        )
    expected = gathered(ids, attention_mask=mask).logits
    assert (torch.cat(pieces, dim=1) - expected)[mask.bool()].abs().max() < 1e-11
    # Every token is stored, as in the paper.
    assert cache.layers[0].second.keys.shape == cache.layers[0].keys.shape


@pytest.mark.parametrize("meta_every", [None, 2])
def test_dense_meta_attention_generates_the_same(meta_every: int | None) -> None:
    gathered, dense = both_ways()
    ids, mask = ragged()
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 9,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = gathered.generate(ids, **options, meta_every=meta_every)
    assert torch.equal(dense.generate(ids, **options, meta_every=meta_every), expected)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_the_sizes_of_its_shape(name: str) -> None:
    config = PEERS[name].config(SHAPE, 16)
    table = 16 * SHAPE.width * (config.position_embedding == "learned")
    model = PEERS[name].make(config)
    assert (
        sum(parameter.numel() for parameter in model.parameters()) == sum(weights(config)) + table
    )


def test_the_papers_shape() -> None:
    sizes = {
        name: sum(weights(PEERS[name].config(SHAPES["paper"], 1024)))
        for name in ("gpt2", "meta", "twin")
    }
    assert sizes == {"gpt2": 123_587_328, "meta": 151_908_096, "twin": 151_908_096}
