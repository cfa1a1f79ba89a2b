"""Insert landmarks while a batch is made, for trainers that do not support meta-tokens."""

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import meta_token_id
from metatokens.errors import UserError

# The labels that losses read, and the value that they ignore.
_COUNTED = {
    "labels": IGNORED_LABEL,
    "completion_mask": 0,
}

_REFERENCES = {"ref_chosen_logps", "ref_logps"}  # of DPO and KTO with precompute_ref_log_probs
_BEFORE = (
    "TRL computed the reference's log-probabilities before this batch. They fit it only if this collator was given to "
    "the trainer as data_collator=, and none was read from a file of TRL that was written with another one."
)


class MetaTokenCollator:
    """A collator that puts landmarks into each sequence, then calls another collator.

    It works with `transformers.Trainer`, TRL's `SFTTrainer` and similar trainers:
    `trainer.data_collator = MetaTokenCollator(trainer.data_collator, tokenizer, "sentence")`.
    No meta-token keeps a label or a place in a `completion_mask`, not even one that was in the sequence before, since
    losses that TRL computes would count it. If a row holds several sequences, whose `seq_lengths` TRL's packing gives,
    each gets landmarks of its own.

    Args:
        collator: makes a batch of examples.
        tokenizer: the model's; `add_meta_attention` gives it the meta-token.
        landmarks: the rule for landmarks, see `Landmarks`; None inserts none.
        max_length: the length to which sequences with landmarks are truncated, since a trainer truncates them before
            they have any. Give it for a model with learned positions.

    Raises:
        UserError: if the rule is unknown, or the tokenizer has no meta-token or does not fit the rule; on a call with a
            rule, if an example has no `input_ids`, or has `position_ids`.
    """

    def __init__(
        self,
        collator: Callable[[list[dict[str, Any]]], Any],
        tokenizer: PreTrainedTokenizerBase,
        landmarks: str | None = None,
        *,
        max_length: int | None = None,
    ):
        self.collator = collator
        self.max_length = max_length
        self.meta_token_id = meta_token_id(tokenizer)
        self.landmarks = None if landmarks is None else Landmarks(tokenizer, landmarks)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Any:
        """Make a batch of examples with `input_ids` and other fields, such as `completion_mask`, of the same length.

        At a meta-token `labels` are -100, `attention_mask` is 1, and the other fields are 0. Padding, where
        `attention_mask` is 0, stays as it is: it gets no meta-token, and rules ignore it.
        """
        batch: Any = self.collator([self._with_meta_tokens(example) for example in examples])
        if isinstance(batch, MutableMapping):
            for prefix in ("", "KL_"):  # the second of KTO
                self._count_text_alone(batch, prefix)
        return batch

    def _count_text_alone(self, batch: MutableMapping[str, Any], prefix: str) -> None:
        """Take meta-tokens out of what losses count, in the fields that begin with a prefix."""
        ids = batch.get(f"{prefix}input_ids")
        if not isinstance(ids, Tensor):
            return
        for name, ignored in _COUNTED.items():
            counted = batch.get(prefix + name)
            if not isinstance(counted, Tensor) or counted.shape != ids.shape:
                continue
            text_alone = counted.masked_fill(ids == self.meta_token_id, ignored)
            if (
                name == "completion_mask"
                and _REFERENCES & batch.keys()
                and not counted.equal(text_alone)
            ):
                warnings.warn(_BEFORE, stacklevel=3)
            batch[prefix + name] = text_alone

    def _with_meta_tokens(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """An example with landmarks in all fields that have a number for each token."""
        if self.landmarks is None:
            return dict(example)
        if "position_ids" in example:
            raise UserError(
                "an example has position_ids, which landmarks would shift; insert the landmarks first."
            )
        if "seq_lengths" in example:
            return self._with_meta_tokens_in_each(example)
        if "input_ids" not in example:
            raise UserError(
                f"an example has no input_ids, but {', '.join(example)}: put landmarks into such rows before they are "
                "batched, by Landmarks(tokenizer, rule).insert_into(ids)."
            )
        ids = np.asarray(example["input_ids"])
        is_padding = np.asarray(example.get("attention_mask", np.ones_like(ids))) == 0
        text = np.flatnonzero(~is_padding)
        gaps = text[self.landmarks(ids[text])] + 1
        # Padding is dropped first, then the end.
        excess = 0 if self.max_length is None else max(0, len(ids) + len(gaps) - self.max_length)
        dropped = np.flatnonzero(np.insert(is_padding, gaps, False))[:excess]
        value_of_landmark = {
            "input_ids": self.meta_token_id,
            "labels": IGNORED_LABEL,
            "attention_mask": 1,
        }
        filled = dict(example)
        for name, field in example.items():
            values = field.tolist() if hasattr(field, "tolist") else field
            if _is_of_tokens(values, len(ids)):
                longer = np.insert(values, gaps, value_of_landmark.get(name, 0))
                filled[name] = np.delete(longer, dropped)[: self.max_length].tolist()
        return filled

    def _with_meta_tokens_in_each(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of several sequences, with landmarks in each of them."""
        ends = np.cumsum(row["seq_lengths"]).tolist()
        token_fields = [
            name for name in row if name != "seq_lengths" and np.size(row[name]) == ends[-1]
        ]
        filled: dict[str, Any] = dict(row) | {name: [] for name in [*token_fields, "seq_lengths"]}
        for start, end in pairwise([0, *ends]):
            sequence = self._with_meta_tokens({name: row[name][start:end] for name in token_fields})
            filled["seq_lengths"].append(len(sequence["input_ids"]))
            for name in token_fields:
                filled[name] += sequence[name]
        return filled


def _is_of_tokens(values: Any, length: int) -> bool:
    """Whether a field has a number for each token."""
    return (
        isinstance(values, Sequence)
        and len(values) == length
        and all(isinstance(value, Real) for value in values)
    )
