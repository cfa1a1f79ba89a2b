"""Batches that list the positions of their meta-tokens and labels.

A model that has these positions needs no device sync to find them, and computes no logits that are not scored.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.rows import positions_of

Batch = dict[str, Tensor]
Collate = Callable[[list[Any]], Batch]
MULTIPLE = 8  # numbers of positions are rounded up to it, since a model is compiled once per shape


def with_hints(collator: Collate, model: Any) -> Collate:
    """A collator whose batches also hold the positions that the model would otherwise look for in them."""
    if isinstance(model, MetaGPT2ForCausalLM):
        add_hints: Any = partial(with_positions, meta_token_id=model.config.meta_token_id)
    elif model._supports_logits_to_keep():
        add_hints = with_logits_to_keep
    else:
        return collator
    return partial(_collated, collator=collator, change=add_hints)


def _collated(items: list[Any], collator: Collate, change: Callable[[Batch], Batch]) -> Batch:
    """A batch that a collator makes, changed; `functools.partial` of it is a collator, which can be pickled."""
    return change(collator(items))


def with_positions(batch: Batch, meta_token_id: int | None, *, multiple: int = MULTIPLE) -> Batch:
    """A batch with `meta_positions` and `scored_positions`, as `MetaGPT2ForCausalLM.forward` takes them.

    Args:
        batch: `input_ids` and `labels`, each (batch, length).
        meta_token_id: the model's; None if it has none.
        multiple: round the numbers of positions up to a multiple of this.
    """
    labels = batch["labels"][:, 1:]
    is_scored = labels != IGNORED_LABEL
    if meta_token_id is not None:
        is_scored = is_scored & (labels != meta_token_id)
        is_meta = batch["input_ids"] == meta_token_id
        batch = batch | {"meta_positions": positions_of(is_meta, multiple=multiple)}
    return batch | {"scored_positions": positions_of(is_scored, multiple=multiple)}


def with_logits_to_keep(batch: Batch) -> Batch:
    """A batch that makes a model of transformers compute logits only in scored columns.

    A prompt of a thousand tokens has few scored tokens, those of the answer, and the output layer may be larger than
    the rest of the model.

    Args:
        batch: `input_ids` and `labels`, each (batch, length).

    Returns:
        The batch with `logits_to_keep`, (kept,), the columns that precede a label in any row, and `shift_labels`,
        (batch, kept), the labels that follow these columns.
    """
    following = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    columns = (following != IGNORED_LABEL).any(dim=0).nonzero()[:, 0]
    return batch | {"logits_to_keep": columns, "shift_labels": following[:, columns]}
