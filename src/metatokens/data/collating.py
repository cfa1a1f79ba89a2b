"""Insert landmarks while a batch is made, for trainers that do not support meta-tokens."""

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import pairwise, product
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import meta_token_id
from metatokens.errors import UserError

_COUNTED = {"labels": IGNORED_LABEL, "completion_mask": 0}  # what losses read, and its value where nothing counts

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
        if not isinstance(batch, MutableMapping):
            return batch
        for prefix, (name, ignored) in product(("", "KL_"), _COUNTED.items()):
            ids, counted = batch.get(f"{prefix}input_ids"), batch.get(prefix + name)
            if not isinstance(counted, Tensor) or not isinstance(ids, Tensor) or counted.shape != ids.shape:
                continue
            text_alone = counted.masked_fill(ids == self.meta_token_id, ignored)
            if name == "completion_mask" and _REFERENCES & batch.keys() and not counted.equal(text_alone):
                warnings.warn(_BEFORE, stacklevel=2)
            batch[prefix + name] = text_alone
        return batch

    def _with_meta_tokens_in_each(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a row of several sequences: each for itself."""
        ends = np.cumsum(row["seq_lengths"]).tolist()
        token_fields = [name for name, x in row.items() if np.size(x) == ends[-1] and name != "seq_lengths"]
        filled: dict[str, Any] = dict(row) | {name: [] for name in token_fields} | {"seq_lengths": []}
        for start, end in pairwise([0, *ends]):
            sequence = self._with_meta_tokens({name: row[name][start:end] for name in token_fields})
            filled["seq_lengths"].append(len(sequence["input_ids"]))
            for name in token_fields:
                filled[name] += list(sequence[name])
        return filled

    def _with_meta_tokens(self, example: Mapping[str, Any]) -> dict[str, Any]:
        if self.landmarks is None:
            return dict(example)
        if "position_ids" in example:
            raise UserError("an example has position_ids, which landmarks would shift; insert the landmarks first.")
        if "seq_lengths" in example:
            return self._with_meta_tokens_in_each(example)
        if "input_ids" not in example:
            raise UserError(
                f"an example has no input_ids, but {', '.join(example)}: put landmarks into such rows before they are "
                "batched, by Landmarks(tokenizer, rule).insert_into(ids)."
            )
        length = len(example["input_ids"])
        mask = example.get("attention_mask")
        is_padding = np.zeros(length, dtype=bool) if mask is None else np.asarray(mask) == 0
        text = np.flatnonzero(~is_padding)
        has_landmark = self.landmarks(np.asarray(example["input_ids"])[text])
        gaps = text[has_landmark] + 1
        excess = 0 if self.max_length is None else max(0, length + len(gaps) - self.max_length)
        # Padding is dropped first, then the end.
        dropped = np.flatnonzero(np.insert(is_padding, gaps, False))[:excess]
        value_of_landmark = {"input_ids": self.meta_token_id, "labels": IGNORED_LABEL, "attention_mask": 1}
        filled = dict(example)
        for name, field in example.items():
            values = field.tolist() if hasattr(field, "tolist") else field
            if _is_of_tokens(values, length):
                longer = np.insert(values, gaps, value_of_landmark.get(name, 0))
                filled[name] = np.delete(longer, dropped)[: self.max_length].tolist()
        return filled


def _is_of_tokens(values: Any, length: int) -> bool:
    """Whether a field has a number for each token."""
    return isinstance(values, Sequence) and len(values) == length and all(isinstance(value, Real) for value in values)
