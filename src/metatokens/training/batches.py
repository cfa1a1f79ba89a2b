"""Batches that say where their meta-tokens and labels are, so that the model does not wait for the device."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.model.rows import positions_of

Batch = dict[str, Tensor]
MULTIPLE = 8  # of the numbers of positions: batches of few shapes, for a model that is compiled for each


class WithPositions:
    """A collator whose batches say where everything is."""

    def __init__(self, collator: Callable[[list[Any]], Batch], meta_token_id: int | None):
        self.collator, self.meta_token_id = collator, meta_token_id

    def __call__(self, items: list[Any]) -> Batch:
        """A batch."""
        return with_positions(self.collator(items), self.meta_token_id)


def with_positions(batch: Batch, meta_token_id: int | None, *, multiple: int = MULTIPLE) -> Batch:
    """A batch with `meta_positions` and `scored_positions`, as `MetaGPT2ForCausalLM.forward` takes them.

    Args:
        batch: `input_ids` and `labels`, each (batch, length).
        meta_token_id: the model's; None if it has none.
        multiple: of which the numbers of positions are one.
    """
    labels = batch["labels"][:, 1:]
    counts = labels != IGNORED_LABEL
    found = {}
    if meta_token_id is not None:
        counts = counts & (labels != meta_token_id)
        found["meta_positions"] = positions_of(batch["input_ids"] == meta_token_id, multiple=multiple)
    return batch | found | {"scored_positions": positions_of(counts, multiple=multiple)}
