"""Meta-tokens for trainers that know nothing of them: put in as a batch is made."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import meta_token_id
from metatokens.errors import UserError

_POSITIONS = ("position_ids", "seq_lengths")  # of sequences that are packed into one


class MetaTokenCollator:
    """A collator that puts landmarks into each sequence, then calls another collator.

    For `transformers.Trainer`, TRL's `SFTTrainer` and their like:
    `trainer.data_collator = MetaTokenCollator(trainer.data_collator, tokenizer, "sentence")`.
    No meta-token has a label then, not even one that was in the sequence already, since the losses that TRL computes
    by itself would count it.

    Args:
        collator: makes a batch of examples.
        tokenizer: the model's; `add_meta_attention` gives it the meta-token.
        landmarks: the rule for where they go, see `Landmarks`; None puts none in.
        max_length: positions after which a sequence with landmarks is cut, since a trainer cuts it before it has them;
            of a model with a learned table of positions, the table's.

    Raises:
        UserError: if there is no such rule, or the tokenizer has no meta-token or does not fit the rule; on a call, if
            an example has no `input_ids`, or several sequences are packed into one.
    """

    def __init__(
        self,
        collator: Callable[[list[dict[str, Any]]], Any],
        tokenizer: PreTrainedTokenizerBase,
        landmarks: str | None = None,
        *,
        max_length: int | None = None,
    ):
        self.collator, self.max_length, self.meta_token_id = collator, max_length, meta_token_id(tokenizer)
        self.landmarks = None if landmarks is None else Landmarks(tokenizer, landmarks)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Any:
        """The batch of examples with `input_ids` and other fields of as many numbers.

        At a meta-token `labels` are -100, `attention_mask` is 1, and all other such fields are 0, as `completion_mask`.
        Padding, where `attention_mask` is 0, stays as it is: it gets no meta-token, and no rule counts or reads it.
        """
        batch: Any = self.collator([self._with_meta_tokens(example) for example in examples])
        ids, labels = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "labels"))
        if isinstance(labels, Tensor) and isinstance(ids, Tensor) and labels.shape == ids.shape:
            batch["labels"] = labels.masked_fill(ids == self.meta_token_id, IGNORED_LABEL)
        return batch

    def _with_meta_tokens(self, example: Mapping[str, Any]) -> dict[str, Any]:
        if packed := [name for name in _POSITIONS if name in example]:
            raise UserError(f"sequences that are packed into one ({packed[0]}) see one another; train them apart.")
        if self.landmarks is None:
            return dict(example)
        if "input_ids" not in example:
            raise UserError(
                f"an example has no input_ids, but {', '.join(example)}: put landmarks into the prompts of such rows "
                "before they are batched, by Landmarks(tokenizer, rule).put_into(ids)."
            )
        length = len(example["input_ids"])
        mask = example.get("attention_mask")
        text = np.arange(length) if mask is None else np.flatnonzero(np.asarray(mask))  # the rest is padding
        behind = text[self.landmarks(np.asarray(example["input_ids"])[text])] + 1
        filled = {"input_ids": self.meta_token_id, "labels": IGNORED_LABEL, "attention_mask": 1}
        own = dict(example)
        for name, given in example.items():
            values = given.tolist() if hasattr(given, "tolist") else given
            if isinstance(values, Sequence) and len(values) == length and all(isinstance(one, Real) for one in values):
                own[name] = np.insert(values, behind, filled.get(name, 0))[: self.max_length].tolist()
        return own
