"""Sequences that are packed into one row, and the logits of each of them alone."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, PreTrainedModel

from tests.retrofit.architectures import META

# Without a meta-token; beginning with one; of one token; of meta-tokens alone.
SEQUENCES = [
    [5, 6, 7, 8, 9, 10],
    [META, 11, 12, META, 13, 14, 15, META, 16],
    [META],
    [17],
    [18, 19, META, META, 20, 21, 22, 23, 24, 25, META, 26],
    [META, META, META],
    [27, 28, 29, 30],
]


def packed(sequences: Sequence[Sequence[int]] = SEQUENCES) -> dict[str, Tensor]:
    """What transformers' collator makes of them, without labels."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": list(sequence)} for sequence in sequences])
    del batch["labels"]
    return batch


def alone(model: PreTrainedModel, sequences: Sequence[Sequence[int]] = SEQUENCES) -> Tensor:
    """The same logits, (1, tokens, META), from a pass for each sequence."""
    logits = [model(torch.tensor([sequence]), use_cache=False).logits for sequence in sequences]
    return torch.cat(logits, dim=1)[..., :META]


def block_mask(sequences: Sequence[Sequence[int]] = SEQUENCES) -> Tensor:
    """The mask of four dimensions that separates them, (1, 1, tokens, tokens) bool."""
    causal = [torch.ones(len(sequence), len(sequence)).tril() for sequence in sequences]
    return torch.block_diag(*causal).bool()[None, None]
