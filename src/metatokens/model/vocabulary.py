"""The rows of a vocabulary: those that text uses, the meta-token's, and padding."""

import math
from typing import Any, cast

from torch import nn

from metatokens.errors import UserError


class MetaVocabulary:
    """Mixin for a language model with a meta-token: it keeps that row when its tables are resized."""

    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As transformers', but never without a row for the meta-token.

        Rows up to `new_num_tokens` are entries in use from then on; those that fill a multiple up are padding.

        Raises:
            UserError: if so few rows leave the meta-token out, as those of a tokenizer that does not know it.
        """
        meta, multiple = self.config.meta_token_id, pad_to_multiple_of or 1
        if meta is not None and new_num_tokens is not None and math.ceil(new_num_tokens / multiple) * multiple <= meta:
            raise UserError(
                f"{new_num_tokens} rows leave out the meta-token, whose id is {meta}: keep the "
                f"{self.config.get_text_config().vocab_size} rows that there are, or ask for more."
            )
        model = cast(Any, super())
        table: nn.Embedding = model.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is not None:
            self.config.unpadded_vocab_size = max(new_num_tokens, 1 + (-1 if meta is None else meta))
        return table
