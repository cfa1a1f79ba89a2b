"""Gradients of a retrofitted Llama in two processes, one of which reads no meta-token, by DDP and by `fully_shard`."""

from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tests.retrofit.architectures import retrofitted, text, with_meta_tokens


def batch() -> Tensor:
    """Four rows; the last two have no meta-token."""
    return torch.cat([with_meta_tokens(), text(seed=2)])


def gradients(model: PreTrainedModel, ids: Tensor, scale: int = 1) -> dict[str, Tensor]:
    """Of the mean loss over the labels of the whole batch."""
    count = torch.tensor(batch()[:, 1:].numel())  # as Trainer passes it, meta-tokens among them
    (model(ids, labels=ids, num_items_in_batch=count).loss * scale).backward()
    named = {name.removeprefix("module."): weight for name, weight in model.named_parameters()}
    return {name: weight.grad for name, weight in named.items() if weight.grad is not None}


def compute(kind: str, dtype: torch.dtype, out: Path) -> None:
    """What each process does; the first one writes the gradients, by parameter."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = retrofitted("llama", freeze=True, dtype=dtype).train()
    if kind == "fsdp":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    own = gradients(model, batch()[2 * rank : 2 * rank + 2], scale=2)  # both take the mean over the processes
    own = {name: one.full_tensor() if kind == "fsdp" else one for name, one in own.items()}
    if rank == 0:
        torch.save(own, out)
    # The wrapper holds the group. Were it the last to, the group's threads would be waited for with the interpreter's
    # lock held, which they may want too.
    del model
    distributed.destroy_process_group()
