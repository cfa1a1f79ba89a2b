"""Gradients in two processes, one of which reads no meta-token, by DDP and by `fully_shard`."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from metatokens import set_text_window
from tests.forked import Run
from tests.model.tiny_models import tiny_model
from tests.retrofit.architectures import META, ROWS, retrofitted, text, with_meta_tokens

pytestmark = pytest.mark.skipif(
    not distributed.is_gloo_available(), reason="this torch has no gloo"
)


def batch() -> Tensor:
    """Four rows; the last two have no meta-token."""
    return torch.cat([with_meta_tokens(), text(seed=2)])


def make(name: str, dtype: torch.dtype, window: int | None) -> PreTrainedModel:
    """A model to train, the same in every process."""
    if name == "meta_gpt2":
        model = tiny_model(vocab_size=ROWS, meta_token_id=META, dtype=dtype)
    else:
        model = retrofitted(name, freeze=True, dtype=dtype)
    set_text_window(model, window)
    return model.train()


def gradients(model: PreTrainedModel, ids: Tensor, scale: int = 1) -> dict[str, Tensor]:
    """The gradients of the mean loss over the labels of the whole batch."""
    count = torch.tensor(batch()[:, 1:].numel())  # as Trainer passes it, meta-tokens included
    (model(ids, labels=ids, num_items_in_batch=count, use_cache=False).loss * scale).backward()
    named = {name.removeprefix("module."): weight for name, weight in model.named_parameters()}
    return {name: weight.grad for name, weight in named.items() if weight.grad is not None}


def compute(name: str, kind: str, dtype: torch.dtype, window: int | None, out: Path) -> None:
    """Run one process of a training; the first one writes the gradients."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = make(name, dtype, window)
    if kind == "fsdp":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
    else:
        model = DistributedDataParallel(model)
    # Both wrappers average over the processes.
    shared = gradients(model, batch()[2 * rank : 2 * rank + 2], scale=2)
    if kind == "fsdp":
        shared = {name: gradient.full_tensor() for name, gradient in shared.items()}
    if rank == 0:
        torch.save(shared, out)
    # The wrapper holds the group. If it were the last to hold it, the group's threads would be joined under the
    # interpreter's lock, which they may need too.
    del model
    distributed.destroy_process_group()


# Next to a frozen base in either precision, what was added is in float32.
@pytest.mark.parametrize(
    ("name", "kind", "dtype", "window"),
    [
        ("meta_gpt2", "fsdp", torch.float32, 3),
        ("llama", "fsdp", torch.float32, None),
        ("llama", "ddp", torch.float32, 3),
        ("llama", "ddp", torch.bfloat16, None),
        ("llama", "fsdp", torch.bfloat16, None),
    ],
)
def test_gradients_are_those_of_one_process(
    name: str, kind: str, dtype: torch.dtype, window: int | None, tmp_path: Path, run_ranks: Run
) -> None:
    run_ranks(2, compute, name, kind, dtype, window, tmp_path / "gradients.pt")
    shared = torch.load(tmp_path / "gradients.pt", weights_only=True)
    ids = batch()

    assert [bool((row == META).any()) for row in ids] == [True, True, False, False]
    model = make(name, dtype, window)
    # Half a batch at a time: the loss assumes that every part has the same share of meta-tokens among its labels.
    expected: dict[str, Tensor] = {}
    for half in ids.split(2):
        model.zero_grad()
        for name, gradient in gradients(model, half).items():
            expected[name] = expected.get(name, 0) + gradient
    assert shared.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=1e-6)
