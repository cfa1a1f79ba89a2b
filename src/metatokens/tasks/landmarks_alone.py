"""Questions that see the meta-tokens of their document alone, and so can recall only what these hold of the text.

The document's own tokens see everything before them. The tokens of question and answer see the document's meta-tokens,
and everything of their own before them. In a `text_window` facts would also hop from text to text, layer by layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from metatokens.data.tokenizer import encode_text
from metatokens.errors import UserError
from metatokens.tasks.example import Encoded

ALONE = "landmarks_alone"  # the `intervention` of a result that was measured so
_OPENING = "\nQ:"  # of the question of every task


def landmarks_alone(input_ids: Tensor, starts: Tensor, meta_token_id: int) -> Tensor:
    """The mask (batch, 1, length, length), True where a query sees a key.

    Args:
        input_ids: (batch, length), padded on the right.
        starts: (batch,), the index of the first token of each question.
        meta_token_id: the meta-token.
    """
    place = torch.arange(input_ids.shape[1])
    in_document = place < starts[:, None]
    is_forgotten = in_document & (input_ids != meta_token_id)
    is_causal = place <= place[:, None]
    return (is_causal & (in_document[:, :, None] | ~is_forgotten[:, None, :]))[:, None]


class LandmarksAlone:
    """The masks and the cache of a task's examples whose questions see the meta-tokens alone.

    Args:
        model: any model that takes masks of four dimensions.
        tokenizer: the model's.

    Raises:
        UserError: if the attention function cannot take such masks.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase):
        if (attention := model.config._attn_implementation) != "sdpa":
            raise UserError(f"a question that sees landmarks alone needs attention 'sdpa', and this has {attention!r}.")
        [self._opening] = encode_text(tokenizer, [_OPENING])
        self._meta_token_id = model.config.meta_token_id

    def start(self, example: Encoded) -> int:
        """The index of the question's first token: of the line feed before its last `Q:`."""
        prompt, size = list(example.input_ids[: example.answer_start]), len(self._opening)
        starts = (start for start in range(len(prompt) - size, -1, -1) if prompt[start : start + size] == self._opening)
        if (start := next(starts, None)) is None:
            raise UserError("this tokenizer's ids do not show where the question of a prompt begins, the line with 'Q:'.")
        return start

    def mask(self, input_ids: Tensor, examples: Sequence[Encoded]) -> Tensor:
        """The mask of a batch, as `landmarks_alone` makes it; `input_ids` (batch, length) are on the CPU."""
        return landmarks_alone(input_ids, torch.tensor(list(map(self.start, examples))), self._meta_token_id)

    def kept(self, examples: Sequence[Encoded]) -> tuple[list[int], list[int]]:
        """How many meta-tokens each document has, and how many tokens."""
        sizes = list(map(self.start, examples))
        metas = [
            sum(token == self._meta_token_id for token in example.input_ids[:size])
            for example, size in zip(examples, sizes, strict=True)
        ]
        return metas, sizes
