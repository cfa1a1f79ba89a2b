"""Retrofitted models as one graph: `torch.compile(fullgraph=True)`, `torch.export`, and a compiled decoding step."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from transformers import CompileConfig, PreTrainedModel, StaticCache

from metatokens.errors import UserError
from tests.gradients import far
from tests.model.tiny_models import tiny_model
from tests.retrofit.architectures import (
    LENGTH,
    META,
    ROUNDED,
    ROUNDED_GRADIENT,
    error,
    logits,
    retrofitted,
    text,
    with_meta_tokens,
)

NAMES = (
    "cohere2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mixtral", "olmo2", "opt", "phi", "qwen3",
    "starcoder2",
)  # fmt: skip


def counted() -> tuple[Callable[..., Any], list[torch.fx.GraphModule]]:
    """A backend of torch.compile, and the graphs that it gets."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    return note, graphs


def whole(model: PreTrainedModel, backend: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.quick(name=["llama"])
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_pass_is_one_graph(name: str) -> None:
    (backend, graphs), model = counted(), retrofitted(name)
    compiled = whole(model, backend)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        for ids in (with_meta_tokens(), text(), with_meta_tokens(2)):
            assert error(compiled(ids, use_cache=False).logits[..., :META], logits(model, ids)) < ROUNDED
        assert len(graphs) == 1
        got = compiled(ids, attention_mask=mask, use_cache=False).logits[..., :META]
    assert error(got[mask.bool()], logits(model, ids, attention_mask=mask)[mask.bool()]) < ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_of_a_compiled_pass_goes_on(name: str) -> None:
    """Such a cache grows. Finding the meta-tokens for it breaks the graph."""
    (backend, graphs), model, ids = counted(), retrofitted(name), with_meta_tokens()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        first = compiled(ids[:, :16])
        for run in (model, compiled):
            rest = run(ids[:, 16:], past_key_values=copy.deepcopy(first.past_key_values)).logits
            got = torch.cat([first.logits, rest], dim=1)[..., :META]
            assert error(got, logits(model, ids)) < ROUNDED
    assert graphs


@pytest.mark.quick(name=["gpt2"])
@pytest.mark.parametrize("name", NAMES)
def test_an_exported_pass(name: str) -> None:
    model = retrofitted(name)
    exported = torch.export.export(model, (), {"input_ids": text(), "use_cache": False}).module()
    for ids in (with_meta_tokens(), text()):
        with torch.no_grad():
            got = exported(input_ids=ids, use_cache=False).logits[..., :META]
        assert error(got, logits(model, ids)) < ROUNDED


@pytest.mark.quick(is_added=[True], heads=[4])
@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("is_added", [False, True], ids=["bool", "added"])
def test_a_mask_of_four_dimensions(is_added: bool, heads: int) -> None:
    """Both forms take from it which positions any head sees; what it adds to logits is the base's."""
    (backend, _), model, ids = counted(), retrofitted("llama"), with_meta_tokens()
    drawn = torch.rand(2, heads, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
    causal = torch.ones(LENGTH, LENGTH).tril().bool()
    mask = (causal & (drawn < 0.7)) | torch.eye(LENGTH).bool()
    if is_added:
        mask = (-3 * drawn).masked_fill(~mask, torch.finfo(torch.float32).min)
    got = whole(model, backend)(ids, attention_mask=mask, use_cache=False).logits[..., :META]
    assert error(got, logits(model, ids, attention_mask=mask)) < ROUNDED


@torch.no_grad()
@pytest.mark.parametrize("is_added", [False, True], ids=["bool", "added"])
def test_a_mask_of_four_dimensions_with_a_cache_of_a_fixed_size(is_added: bool) -> None:
    model, ids = retrofitted("llama"), with_meta_tokens()
    cache = StaticCache(model.config, max_cache_len=LENGTH + 4)
    model(ids[:, :10], past_key_values=cache)
    mask = torch.ones(LENGTH, LENGTH + 4).tril()[10:].bool()
    mask[:, :10] = False  # the rest does not see the beginning
    mask = mask.expand(2, 1, -1, -1)
    if is_added:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    positions = torch.arange(10, LENGTH)[None]
    got = model(ids[:, 10:], past_key_values=cache, attention_mask=mask, position_ids=positions).logits[..., :META]
    assert error(got, logits(model, ids[:, 10:], position_ids=positions)) < ROUNDED


@pytest.mark.parametrize("make", [tiny_model, partial(retrofitted, "llama")])
def test_an_exported_pass_with_a_cache_that_grows_is_refused(make: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(UserError, match=r"a cache that grows holds meta-tokens alone.* give use_cache=False"):
        torch.export.export(make(), (), {"input_ids": torch.tensor([[3, 4, 5, 6]])}, strict=False)


def test_a_whole_graph_with_a_cache_that_grows_says_what_breaks_it() -> None:
    backend, _ = counted()
    with pytest.raises(Unsupported, match=r"a cache that grows holds meta-tokens alone.* give use_cache=False"):
        whole(retrofitted("llama"), backend)(text())


# OPT by itself does not compile so. In this small cohere2, with sliding windows alone, a cache does not show its size.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cohere2", "opt")])
def test_a_compiled_step_is_one_graph(name: str) -> None:
    (backend, graphs), model, ids = counted(), retrofitted(name), with_meta_tokens()
    cache, compiled = StaticCache(model.config, max_cache_len=LENGTH + 4), whole(model, backend)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        steps = [compiled(ids[:, place : place + 1], past_key_values=cache).logits for place in range(10, LENGTH)]
    assert error(torch.cat(steps, dim=1)[..., :META], logits(model, ids)[:, 10:]) < ROUNDED
    # The length is a number of Python in a sliding window: a second graph is for any length, as without meta-attention.
    assert len(graphs) == (2 if name == "gemma3_text" else 1)


def test_training_is_one_graph() -> None:
    (backend, graphs), ids = counted(), with_meta_tokens()
    gradients = []
    for is_compiled in (False, True):
        model = retrofitted("llama").train()
        run = whole(model, backend) if is_compiled else model
        run(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert len(graphs) == 1
    assert gradients[0].keys() == gradients[1].keys()
    assert max(far(one, gradients[1][name]) for name, one in gradients[0].items()) < ROUNDED_GRADIENT


@pytest.mark.quick(meta_every=[3])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, as it compiles
@pytest.mark.parametrize("meta_every", [None, 3])
def test_generate_compiles_its_step(meta_every: int | None) -> None:
    (backend, graphs), model, ids = counted(), retrofitted("llama"), with_meta_tokens()
    options = {"max_new_tokens": 13, "do_sample": False, "eos_token_id": None, "meta_every": meta_every}
    expected = model.generate(ids, **options)
    compiled = CompileConfig(backend=backend, fullgraph=True, dynamic=False, mode=None)
    compiled._compile_all_devices = True  # by default transformers compiles nothing on a CPU
    assert torch.equal(model.generate(ids, cache_implementation="static", compile_config=compiled, **options), expected)
    assert len(graphs) == (1 if meta_every is None else 2)  # a text token, alone or with an inserted one
