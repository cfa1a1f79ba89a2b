"""A pass of a retrofitted model inside a pass of another one, or of the same one, as a hook runs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from tests.checkpointing import checkpoint_activations
from tests.gradients import gradients_by
from tests.model.agreement import assert_gradients_close
from tests.model.text_window import FULL
from tests.model.tiny_models import random_rows
from tests.retrofit.architectures import LENGTH, error, logits, retrofitted, text, with_meta_tokens
from tests.retrofit.forgetful import forgetful_retrofit

OUTER, INNER = with_meta_tokens(), with_meta_tokens(seed=2)[:, : LENGTH - 5]


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


def assert_no_pass_runs(model: PreTrainedModel) -> None:
    """A block that is run on its own is refused, as outside all passes."""
    block = decoder_of(model)[1][0]
    with pytest.raises(UserError, match="ran outside a pass of its model"):
        block(torch.zeros(1, 2, 64))


@pytest.mark.parametrize("part_name", ["", "input_layernorm", "self_attn", "mlp"])
@pytest.mark.parametrize("ids", [INNER, text(seed=3)], ids=["meta-tokens", "text alone"])
@pytest.mark.parametrize("kind", ["another", "copy", "itself"])
def test_both_passes_are_as_if_alone(kind: str, ids: torch.Tensor, part_name: str) -> None:
    outer = retrofitted("llama")
    inner = outer if kind == "itself" else retrofitted("gpt_neox" if kind == "another" else "llama")
    expected_outer, expected_inner = logits(outer, OUTER), logits(inner, ids)
    inner_errors: list[float] = []
    calls: list[str] = []

    def run() -> None:
        calls.append(part_name)
        if len(calls) <= 2:  # once inside a pass inside the outer one
            inner_errors.append(error(logits(inner, ids), expected_inner))

    with during(outer, part_name, run):
        assert error(logits(outer, OUTER), expected_outer) == 0
    assert inner_errors == [0, 0]
    assert_no_pass_runs(outer)


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["before the pass", "inside the pass", "refused inputs"])
def test_an_error_inside_leaves_the_outer_pass_as_it_is(
    stage: str, exception: type[BaseException]
) -> None:
    outer, inner = retrofitted("llama"), retrofitted("llama")
    expected = logits(outer, OUTER)

    def fail(*args: Any) -> None:
        raise exception

    if stage == "before the pass":
        decoder_of(inner)[0].register_forward_pre_hook(fail, prepend=True)
    elif stage == "inside the pass":
        decoder_of(inner)[1][1].self_attn.register_forward_hook(fail)
    mask = torch.ones(2, 3) if stage == "refused inputs" else None

    def run() -> None:
        with pytest.raises((exception, UserError)):
            logits(inner, INNER, attention_mask=mask)

    with during(outer, "self_attn", run):
        assert error(logits(outer, OUTER), expected) == 0
    assert_no_pass_runs(outer)


@pytest.mark.parametrize("full", [None, FULL])
def test_a_backward_pass_inside_another_pass(full: list[int] | None) -> None:
    """Activation checkpointing then computes blocks of one model again while another one runs."""
    outer, inner = forgetful_retrofit("llama", full), forgetful_retrofit("llama", full).train()
    checkpoint_activations(inner)
    inner.enable_input_require_grads()
    ids = torch.tensor(random_rows((LENGTH, LENGTH)))
    expected, gradients = logits(outer, ids), []

    def step() -> None:
        with torch.enable_grad():
            loss = inner(ids[:, 3:], labels=ids[:, 3:], use_cache=False).loss
            gradients.append(gradients_by(inner, loss))

    step()
    with during(outer, "self_attn", step):
        assert error(logits(outer, ids), expected) == 0
    for inside in gradients[1:]:
        assert_gradients_close(inside, gradients[0], 0.0)


def test_each_thread_has_its_passes() -> None:
    outer, inner = retrofitted("llama"), retrofitted("llama")
    barrier, outputs = Barrier(2), {}
    expected = {seed: logits(outer, with_meta_tokens(seed)) for seed in (4, 5)}

    def run(seed: int) -> None:
        outputs[seed] = logits(outer, with_meta_tokens(seed))

    def meet() -> None:
        barrier.wait(60)
        logits(inner, INNER)

    with during(outer, "self_attn", meet):
        threads = [Thread(target=run, args=(seed,)) for seed in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for seed, output in outputs.items():
        assert error(output, expected[seed]) < 1e-5
    assert outputs.keys() == expected.keys()
