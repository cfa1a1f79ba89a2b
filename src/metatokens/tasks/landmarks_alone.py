"""Questions that see the meta-tokens of their documents alone, and so can recall only what these hold of the text.

A document's tokens see everything before them. The tokens of question and answer see the document's meta-tokens and one
another. With a `text_window` instead, text that is still in sight could also pass facts on, layer by layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from metatokens.data.tokenizer import encode_text
from metatokens.errors import UserError
from metatokens.tasks.content import OPENING
from metatokens.tasks.example import Encoded


class LandmarksAlone:
    """The masks of a task's examples, for a model and its tokenizer.

    Raises:
        UserError: if the model's attention implementation is not `sdpa`.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase):
        attention = model.config._attn_implementation
        if attention != "sdpa":
            raise UserError(
                f"a question that sees landmarks alone needs attention 'sdpa', and this has {attention!r}."
            )
        [self._opening] = encode_text(tokenizer, [OPENING], continues=True)
        self._meta_token_id = model.config.meta_token_id

    def start(self, example: Encoded) -> int:
        """The index of the question's first token, which is the line feed before the last `Q:` of the prompt.

        Raises:
            UserError: if the ids do not show where the question begins.
        """
        prompt = list(example.input_ids[: example.answer_start])
        size = len(self._opening)
        for start in range(len(prompt) - size, -1, -1):
            if prompt[start : start + size] == self._opening:
                return start
        raise UserError(
            "the ids that this tokenizer gives a prompt do not show where its question begins."
        )

    def mask(self, input_ids: Tensor, examples: Sequence[Encoded]) -> Tensor:
        """True where a query sees a key, (batch, 1, length, length), for `input_ids` (batch, length) on the CPU."""
        position = torch.arange(input_ids.shape[1])
        question_start = torch.tensor([self.start(example) for example in examples])
        in_document = position < question_start[:, None]
        is_forgotten = in_document & (input_ids != self._meta_token_id)
        is_causal = position <= position[:, None]
        return (is_causal & (in_document[:, :, None] | ~is_forgotten[:, None, :]))[:, None]
