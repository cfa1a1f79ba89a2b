"""Gradients of a model under `fully_shard`, to be compared with one process's.

Each of two processes gets one half of a batch, halves with very different numbers of labels.
"""

from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
META = 63


def model() -> MetaGPT2ForCausalLM:
    """The same one in every process."""
    torch.manual_seed(0)
    config = MetaGPT2Config(**SIZES, meta_token_id=META, bos_token_id=0, eos_token_id=0, initializer_range=0.2)
    return MetaGPT2ForCausalLM(config)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of four sequences: the first two have two labels each, the others all; one has no meta-token."""
    torch.manual_seed(1)
    ids = torch.randint(1, META, (4, 20))
    ids[0, 5] = ids[0, 9] = ids[2, 3] = ids[3, 17] = META
    labels = ids.masked_fill(ids == META, -100)
    labels[:2, :-2] = -100
    return ids, labels


def compute(out: Path) -> None:
    """What each process does; the first one writes the gradients, by parameter."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    sharded = model()
    for block in sharded.model.layers:
        fully_shard(block)
    fully_shard(sharded)
    assert isinstance(sharded, FSDPModule)
    assert all(isinstance(weight, DTensor) for weight in sharded.parameters())
    ids, labels = (part[2 * rank : 2 * rank + 2] for part in batch())
    count = (labels[:, 1:] != -100).sum()
    distributed.all_reduce(count)
    # FSDP averages over the processes, as DDP does.
    loss = sharded(ids, labels=labels, num_items_in_batch=count, use_cache=False).loss * distributed.get_world_size()
    loss.backward()
    gradients = {name: weight.grad.full_tensor() for name, weight in sharded.named_parameters()}
    if rank == 0:
        torch.save(gradients, out)
    distributed.destroy_process_group()
