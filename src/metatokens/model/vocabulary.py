"""Resizing a vocabulary that has a meta-token, and saving its model."""

import math
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from metatokens.errors import UserError
from metatokens.model.configuration import UNSAVED
from metatokens.model.generation import keep_meta_every


@torch.compiler.disable
def check_ids(ids: Tensor, used: int) -> None:
    """Refuse to train rows that pad a table: `generate()` never returns their tokens.

    Args:
        ids: (batch, length), of a training step.
        used: the entries in use.

    Raises:
        UserError: if there is an id of another row.
    """
    if (largest := int(ids.max())) >= used:
        raise UserError(
            f"the batch has the id {largest}, and the model uses {used} entries of its table: after adding tokens, "
            "call model.resize_token_embeddings(len(tokenizer))."
        )


class MetaVocabulary:
    """Mixin for a model: its resized tables keep the meta-token's row, and saving names an unnamed model."""

    saved_as = UNSAVED

    def save_pretrained(self: Any, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, and name an unsaved model after the folder, where TRL and PEFT then find it.

        A Trainer's checkpoints, which are deleted later, give no name.
        """
        model: Any = super()
        keep_meta_every(getattr(self, "generation_config", None))
        model.save_pretrained(save_directory, *args, **kwargs)
        if self.config.name_or_path == self.saved_as and not Path(save_directory).name.startswith("checkpoint-"):
            self.saved_as = self.name_or_path = self.config.name_or_path = str(save_directory)

    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize as transformers does, but never drop the meta-token's row.

        The first `new_num_tokens` rows, and all up to the meta-token's, are then in use; further ones, up to the
        multiple, are padding.

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
