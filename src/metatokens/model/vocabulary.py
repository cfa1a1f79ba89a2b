"""Resizing a vocabulary that has a meta-token."""

import math
from typing import Any, cast

from torch import nn

from metatokens.errors import UserError


class MetaVocabulary:
    """Mixin for a language model: resizing its tables keeps the meta-token's row."""

    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize as transformers does, but never drop the meta-token's row.

        The first `new_num_tokens` rows are then in use; further ones, up to the multiple, are padding.

        Raises:
            UserError: if the rows would leave out the meta-token, as with the size of a tokenizer that lacks it.
        """
        meta, multiple = self.config.meta_token_id, pad_to_multiple_of or 1
        if meta is not None and new_num_tokens is not None and math.ceil(new_num_tokens / multiple) * multiple <= meta:
            raise UserError(
                f"{new_num_tokens} rows leave out the meta-token, whose id is {meta}: keep the present "
                f"{self.config.get_text_config().vocab_size} rows, or ask for more."
            )
        model = cast(Any, super())
        table: nn.Embedding = model.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is not None:
            self.config.unpadded_vocab_size = max(new_num_tokens, 1 + (-1 if meta is None else meta))
        return table
