"""Meta-tokens for trainers that know nothing of them: put in as a batch is made."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.errors import UserError

_POSITIONS = ("position_ids", "seq_lengths")  # of sequences that are packed into one


class MetaTokenCollator:
    """A collator that puts a meta-token behind every so many tokens of each sequence, then calls another collator.

    For `transformers.Trainer`, TRL's `SFTTrainer` and their like:
    `trainer.data_collator = MetaTokenCollator(trainer.data_collator, tokenizer.meta_token_id, every=8)`.
    No meta-token has a label then, not even one that was in the sequence already, since the losses that TRL computes
    by itself would count it.

    Args:
        collator: makes a batch of examples.
        meta_token_id: of the tokenizer.
        every: tokens of text between two meta-tokens, as `meta_every` of `generate()`; None puts none in.

    Raises:
        UserError: if `every` is not a whole number of at least 1, or the tokenizer has no meta-token; on a call, if
            several sequences are packed into one.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], Any], meta_token_id: int, every: int | None = None):
        if type(meta_token_id) is not int:
            raise UserError(f"meta_token_id is {meta_token_id!r}; give that of a tokenizer with a meta-token.")
        if every is not None and (type(every) is not int or every < 1):
            raise UserError(f"every is {every!r}; it must be a whole number, at least 1.")
        self.collator, self.meta_token_id, self.every = collator, meta_token_id, every

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Any:
        """The batch of examples with `input_ids` and other fields of as many numbers.

        At a meta-token `labels` are -100, `attention_mask` is 1, and all other such fields are 0, as `completion_mask`.
        """
        batch: Any = self.collator([self._with_meta_tokens(example) for example in examples])
        ids, labels = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "labels"))
        if isinstance(labels, Tensor) and isinstance(ids, Tensor) and labels.shape == ids.shape:
            batch["labels"] = labels.masked_fill(ids == self.meta_token_id, IGNORED_LABEL)
        return batch

    def _with_meta_tokens(self, example: Mapping[str, Any]) -> dict[str, Any]:
        if packed := [name for name in _POSITIONS if name in example]:
            raise UserError(f"sequences that are packed into one ({packed[0]}) see one another; train them apart.")
        if self.every is None:
            return dict(example)
        length = len(example["input_ids"])
        filled = {"input_ids": self.meta_token_id, "labels": IGNORED_LABEL, "attention_mask": 1}
        own = dict(example)
        for name, given in example.items():
            values = given.tolist() if hasattr(given, "tolist") else given
            if isinstance(values, Sequence) and len(values) == length and all(isinstance(one, Real) for one in values):
                own[name] = with_meta_tokens(values, filled.get(name, 0), self.every)
        return own


def with_meta_tokens(values: Sequence[Any], value: int, every: int) -> list[Any]:
    """The values, a further one behind every so many of them."""
    parts = [values[start : start + every] for start in range(0, len(values), every)]
    return [one for part in parts for one in (*part, *[value] * (len(part) == every))]
