"""The formulas against PyTorch's FLOP counter, the models' parameters, and a count of the bytes that a run reads."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.cost import (
    decode_bytes,
    flops,
    forward_products,
    weights,
)
from benchmarks.speed.peers import dense_model
from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM
from metatokens.training.batches import with_positions

META = 40
SECOND = {"gpt2": "none", "twin": "causal", "meta": "meta", "dense": "meta"}
MODELS = pytest.mark.parametrize("name", SECOND)


def tiny(name: str, **fields: Any) -> MetaGPT2ForCausalLM:
    """A model whose sizes are all different."""
    sizes = {
        "vocab_size": 41,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 52,
    }
    ids = {"meta_token_id": META, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    config = MetaGPT2Config(
        **(sizes | ids | {"second_attention": SECOND[name], "max_position_embeddings": 64} | fields)
    )
    model = MetaGPT2ForCausalLM(config).eval()
    return dense_model(model) if name == "dense" else model


def batch(meta_counts: list[int], length: int = 19) -> Tensor:
    """Rows of text with the given numbers of meta-tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(META, (len(meta_counts), length), generator=generator)
    for row, count in zip(ids, meta_counts, strict=True):
        row[torch.randperm(length, generator=generator)[:count]] = META
    return ids


class Counter(FlopCounterMode):
    """PyTorch's counter, with attention as explicit products and without the products of rotary angles."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.attention = sdpa_kernel(SDPBackend.MATH)

    def __enter__(self) -> "Counter":
        self.attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.attention.__exit__(*error)

    @property
    def products(self) -> int:
        angles = [
            sum(c.values())
            for name, c in self.get_flop_counts().items()
            if name.endswith("rotary_emb")
        ]
        return self.get_total_flops() - sum(angles)


@MODELS
@pytest.mark.parametrize("position_embedding", ["learned", "rope", "none"])
@pytest.mark.parametrize("meta_counts", [[4, 4, 4], [5, 0, 2], [0, 0, 0]])
def test_forward_and_backward_equal_the_counter(
    name: str, position_embedding: str, meta_counts: list[int]
) -> None:
    model, ids = tiny(name, position_embedding=position_embedding), batch(meta_counts)
    sizes: dict[str, Any] = {
        "batch": 3,
        "length": 19,
        "meta_tokens": max(meta_counts),
        "dense": name == "dense",
    }
    with Counter() as forward, torch.no_grad():
        model(ids, use_cache=False)
    assert forward.products == flops(forward_products(model.config, **sizes))

    labels = ids.masked_fill(ids == META, -100)
    labels[:, :6] = -100
    labelled = with_positions({"input_ids": ids, "labels": labels}, META, multiple=1)
    scored = labelled["scored_positions"].numel()
    with Counter() as step:
        model.train()(**labelled).loss.backward()
    assert step.products == flops(
        forward_products(model.config, **sizes, scored=scored), training=True
    )


@MODELS
@pytest.mark.parametrize("meta_every", [None, 3])
def test_generation_equals_the_counter(name: str, meta_every: int | None) -> None:
    model, ids = tiny(name, position_embedding="none"), batch([4, 2])
    ids[:, -1] = 0
    with Counter() as counter:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=11, meta_every=meta_every
        )
    sizes: dict[str, Any] = {"batch": 2, "scored": 2, "dense": name == "dense"}
    expected = flops(forward_products(model.config, length=19, meta_tokens=4, **sizes))
    read, inserted = 19, 0
    # Each new token but the last is read, and the meta-token behind every third one.
    for text in range(1, 11):
        rides = int(meta_every == 3 and text in (3, 6, 9))
        meta: dict[str, int] = {"meta_tokens": rides, "cached_meta": 4 + inserted}
        expected += flops(
            forward_products(model.config, length=1 + rides, cached=read, **meta, **sizes)
        )
        read, inserted = read + 1 + rides, inserted + rides
    assert counter.products == expected


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_a_causal_kernel_needs_the_pairs_up_to_the_diagonal(length: int) -> None:
    sizes: dict[str, Any] = {"batch": 1, "length": length, "skips_masked": True}
    twin = forward_products(tiny("twin").config, **sizes)
    # Scores; three layers of two modules.
    pairs = sum(p.rows * p.columns for p in twin if p.inner == 12) / 6
    # Rounded down to a whole number a row.
    assert length * length / 2 <= pairs <= length * (length + 1) / 2
    dense = forward_products(tiny("dense").config, **sizes, meta_tokens=1, dense=True)
    assert sum(p.rows * p.columns for p in dense if p.inner == 12) / 3 == pairs + length * length


@MODELS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("position_embedding", ["learned", "rope"])
def test_weights_are_the_models_but_for_a_table_of_positions(
    name: str, bias: bool, position_embedding: str
) -> None:
    model = tiny(name, bias=bias, position_embedding=position_embedding)
    table = model.config.max_position_embeddings * model.config.hidden_size
    assert sum(weights(model.config)) == model.num_parameters() - table * (
        position_embedding == "learned"
    )


def test_the_papers_sizes() -> None:
    paper, gpt2 = MetaGPT2Config.paper(), MetaGPT2Config.paper(second_attention="none")
    assert sum(weights(paper)) == 151_908_096
    assert sum(weights(gpt2)) == 123_587_328
    common, second = weights(paper)
    assert round(100 * second / common) == 23  # what a dense mask adds in products with weights
    assert round(100 * second / common * 102 / 1024, 1) == 2.3  # and gathering
    # Attention's own products included: pausing GPT-2 on the same block, and a dense mask.
    block: dict[str, Any] = {"batch": 1, "length": 1024, "meta_tokens": 102, "skips_masked": True}
    base = flops(forward_products(gpt2, **block))
    assert round(flops(forward_products(paper, **block)) / base, 3) == 1.022
    assert round(flops(forward_products(paper, **block, dense=True)) / base, 2) == 1.35


@MODELS
@pytest.mark.parametrize("meta_every", [None, 3])
def test_decoding_reads_the_weights_it_runs_and_the_cache_it_sees(
    name: str, meta_every: int | None
) -> None:
    model, ids = tiny(name, bias=True), batch([5, 5])
    ids[:, -1] = 1
    read = 0

    def run_module(module: torch.nn.Module, *_: Any) -> None:
        nonlocal read
        read += sum(parameter.numel() for parameter in module.parameters(recurse=False))

    def see_cache(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal read
        for layer in kwargs["past_key_values"].layers:
            read += layer.keys.numel() + layer.values.numel()

    def see_second(layer: int, kwargs: dict[str, Any]) -> None:
        nonlocal read
        if (
            second := kwargs["cache"].layers[layer].second
        ) is not None:  # a second causal attention has layers
            read += second.keys.numel() + second.values.numel()

    with torch.inference_mode():
        context = model(ids[:, :-1], use_cache=True).past_key_values
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
            module.register_forward_pre_hook(run_module)
    model.model.register_forward_pre_hook(see_cache, with_kwargs=True)
    for i, block in enumerate(model.model.layers):
        if block.second_attention is not None:
            block.second_attention.register_forward_pre_hook(
                lambda module, args, kwargs, i=i: see_second(i, kwargs), with_kwargs=True
            )
    options: dict[str, Any] = {
        "past_key_values": context,
        "max_new_tokens": 8,
        "meta_every": meta_every,
    }
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    prompt: dict[str, Any] = {
        "batch": 2,
        "context": 19,
        "context_meta": int((ids[0] == META).sum()),
    }
    options: dict[str, Any] = {
        "new_tokens": 8,
        "meta_every": meta_every,
        "item_size": 4,
        "dense": name == "dense",
    }
    assert decode_bytes(model.config, **prompt, **options) == 4 * read
