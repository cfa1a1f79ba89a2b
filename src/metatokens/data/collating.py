"""Insert landmarks while a batch is made, for trainers that do not support meta-tokens."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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


def labelled_batch(
    rows: Sequence[tuple[Sequence[int] | np.ndarray, slice | list[int]]], pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Rows padded on the right, where causal attention needs no mask, and the labels of some of their tokens.

    Args:
        rows: token ids, and the indices of those that are labels.
        pad_token_id: pads the ids.

    Returns:
        `input_ids` and `labels`, each (batch, longest); labels are -100 elsewhere.
    """
    ids = [torch.tensor(row, dtype=torch.int64) for row, _ in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id)
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    for row, (_, labelled) in enumerate(rows):
        labels[row, labelled] = input_ids[row, labelled]
    return {"input_ids": input_ids, "labels": labels}


class MetaTokenCollator:
    """A collator that puts landmarks into each sequence, then calls another collator.

    It works with `transformers.Trainer`, TRL's `SFTTrainer` and similar trainers:
    `trainer.data_collator = MetaTokenCollator(trainer.data_collator, tokenizer, "sentence")`.
    No meta-token keeps a label or a place in a `completion_mask`, not even one that was in the sequence before, since
    losses that TRL computes would count it.

    Args:
        collator: makes a batch of examples.
        tokenizer: the model's; `add_meta_attention` gives it the meta-token.
        landmarks: the rule for landmarks, see `Landmarks`; None inserts none.

    Raises:
        UserError: if the rule is unknown, or the tokenizer has no meta-token or does not fit the rule; on a call with a
            rule, if an example has no `input_ids` of one text, or has `position_ids` or `seq_lengths`.
    """

    def __init__(
        self,
        collator: Callable[[list[dict[str, Any]]], Any],
        tokenizer: PreTrainedTokenizerBase,
        landmarks: str | None = None,
    ):
        self.collator = collator
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
            batch[prefix + name] = counted.masked_fill(ids == self.meta_token_id, ignored)

    def _with_meta_tokens(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """An example with landmarks in all fields that have a number for each token."""
        if self.landmarks is None:
            return dict(example)
        if "input_ids" not in example or example.keys() & {"position_ids", "seq_lengths"}:
            raise UserError(
                f"an example has {', '.join(example)}: landmarks need input_ids, and would shift position_ids and "
                "seq_lengths; put them in before, by Landmarks(tokenizer, rule).insert_into(ids)."
            )
        ids = np.asarray(example["input_ids"])
        if ids.ndim != 1:
            raise UserError(
                f"landmarks go into the ids of one text, and those of an example have {ids.ndim} axes."
            )
        mask = example.get("attention_mask")
        text = np.arange(len(ids)) if mask is None else np.flatnonzero(mask)  # without padding
        gaps = text[self.landmarks(ids[text])] + 1
        value_of_landmark = {
            "input_ids": self.meta_token_id,
            "labels": IGNORED_LABEL,
            "attention_mask": 1,
        }
        filled = dict(example)
        for name, field in example.items():
            values = field.tolist() if hasattr(field, "tolist") else field
            if _is_of_tokens(values, len(ids)):
                filled[name] = np.insert(values, gaps, value_of_landmark.get(name, 0)).tolist()
        return filled


def _is_of_tokens(values: Any, length: int) -> bool:
    """Whether a field has a number for each token."""
    return (
        isinstance(values, Sequence)
        and len(values) == length
        and all(isinstance(value, Real) for value in values)
    )
