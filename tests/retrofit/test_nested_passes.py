"""A pass of a retrofitted model inside a pass of another one, or of the same one, as a hook runs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.model.text_window import FULL
from tests.model.tiny_models import random_rows
from tests.retrofit.architectures import LENGTH, error, logits, retrofitted, text, with_meta_tokens
from tests.retrofit.text_window import model_of

OUTER, INNER = with_meta_tokens(), with_meta_tokens(seed=2)[:, : LENGTH - 5]
PLACES = ("", "input_layernorm", "self_attn", "mlp")  # of the second block: the block itself, and parts of it


@contextmanager
def during(model: PreTrainedModel, part_name: str, run: Callable[[], Any]) -> Iterator[None]:
    """Run a function before and after a part of the model's second block."""
    part = decoder_of(model)[1][1].get_submodule(part_name)

    def before(module: nn.Module, args: tuple) -> None:
        run()

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        run()

    handles = [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def no_pass_runs(model: PreTrainedModel) -> bool:
    """Whether a block that is run on its own is refused, as outside all passes."""
    block = decoder_of(model)[1][0]
    with pytest.raises(UserError, match="ran outside a pass of its model"):
        block(torch.zeros(1, 2, 64))
    return True


@pytest.mark.parametrize("part_name", PLACES)
@pytest.mark.parametrize("ids", [INNER, text(seed=3)], ids=["meta-tokens", "text alone"])
@pytest.mark.parametrize("kind", ["another", "copy", "itself"])
def test_both_passes_are_as_if_alone(kind: str, ids: Tensor, part_name: str) -> None:
    outer = retrofitted("llama")
    inner = outer if kind == "itself" else retrofitted("gpt_neox") if kind == "another" else deepcopy(outer)
    wanted_outer, wanted_inner = logits(outer, OUTER), logits(inner, ids)
    calls, errors = [], []

    def run() -> None:
        calls.append(part_name)
        if len(calls) <= 2:  # once inside a pass inside the outer one
            errors.append(error(logits(inner, ids), wanted_inner))

    with during(outer, part_name, run):
        assert error(logits(outer, OUTER), wanted_outer) == 0
    assert errors == [0, 0]
    assert no_pass_runs(outer)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["before the pass", "inside the pass", "refused inputs"])
def test_an_error_inside_leaves_the_outer_pass_as_it_is(stage: str, kind: type[BaseException]) -> None:
    outer = retrofitted("llama")
    inner, wanted = deepcopy(outer), logits(outer, OUTER)

    def fail(*args: Any) -> None:
        raise kind

    if stage == "before the pass":
        decoder_of(inner)[0].register_forward_pre_hook(fail, prepend=True)
    elif stage == "inside the pass":
        decoder_of(inner)[1][1].self_attn.register_forward_hook(fail)
    mask = torch.ones(2, 3) if stage == "refused inputs" else None

    def run() -> None:
        with pytest.raises((kind, UserError)):
            logits(inner, INNER, attention_mask=mask)

    with during(outer, "self_attn", run):
        assert error(logits(outer, OUTER), wanted) == 0
    run()
    assert no_pass_runs(outer)


@pytest.mark.parametrize("full", [None, FULL])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_backward_pass_inside_another_pass(is_checkpointed: bool, full: list[int] | None) -> None:
    """Activation checkpointing then computes blocks of one model again while another one runs."""
    outer, inner = model_of("llama", full), model_of("llama", full).train()
    ids = torch.tensor(random_rows((LENGTH, LENGTH)))
    if is_checkpointed:
        checkpoint_activations(inner)
        inner.enable_input_require_grads()
    wanted, gradients = logits(outer, ids), []

    def step() -> None:
        with torch.enable_grad():
            inner.zero_grad()
            inner(ids[:, 3:], labels=ids[:, 3:], use_cache=False).loss.backward()
        gradients.append([weight.grad.clone() for weight in inner.parameters() if weight.grad is not None])

    step()
    with during(outer, "self_attn", step):
        assert error(logits(outer, ids), wanted) == 0
    for inside in gradients[1:]:
        assert max(error(a, b) for a, b in zip(inside, gradients[0], strict=True)) == 0


def test_each_thread_has_its_passes() -> None:
    outer, barrier, outputs = retrofitted("llama"), Barrier(2), {}
    inner, seeds = deepcopy(outer), (4, 5)
    wanted = {seed: logits(outer, with_meta_tokens(seed)) for seed in seeds}

    def run(seed: int) -> None:
        outputs[seed] = logits(outer, with_meta_tokens(seed))

    def meet() -> None:
        barrier.wait(60)
        logits(inner, INNER)

    with during(outer, "self_attn", meet):
        threads = [Thread(target=run, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(error(outputs[seed], wanted[seed]) < 1e-5 for seed in seeds)


def test_a_graph_of_a_pass_with_another_pass_inside() -> None:
    torch._dynamo.reset()
    outer = retrofitted("llama")
    inner, outputs = deepcopy(outer), []
    wanted_outer, wanted_inner = logits(outer, OUTER), logits(inner, INNER)
    part = decoder_of(outer)[1][1].self_attn
    part.register_forward_hook(lambda *_: outputs.append(inner(INNER, use_cache=False).logits))
    compiled = torch.compile(outer, backend="eager", fullgraph=True)
    assert error(logits(compiled, OUTER), wanted_outer) < 1e-5
    [output] = outputs
    assert error(output[..., : wanted_inner.shape[-1]], wanted_inner) < 1e-5
