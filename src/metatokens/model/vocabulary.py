"""Resizing a vocabulary that has a meta-token, and saving its model."""

import math
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from metatokens.errors import UserError
from metatokens.model.configuration import UNSAVED


@torch.compiler.disable
def check_ids(ids: Tensor, used: int) -> None:
    """Refuse to train rows that pad a table: `generate()` never returns their tokens.

    Args:
        ids: (batch, length), of a training step.
        used: the entries in use.

    Raises:
        UserError: if there is an id of another row.
    """
    largest = int(ids.max())
    if largest >= used:
        raise UserError(
            f"the batch has the id {largest}, and the model uses {used} entries of its table: after adding tokens, "
            "call model.resize_token_embeddings(len(tokenizer))."
        )


class MetaVocabulary:
    """Mixin for a model: its resized tables keep the meta-token's row, and saving names an unnamed model."""

    saved_as = UNSAVED

    def save_pretrained(
        self: Any, save_directory: str | PathLike, *args: Any, **kwargs: Any
    ) -> None:
        """Save as transformers does, and name an unsaved model after the folder, where TRL and PEFT then find it.

        A Trainer's checkpoints, which are deleted later, give no name, and neither do adapters, which transformers
        saves alone.
        """
        generation_config: Any = getattr(self, "generation_config", None)
        if getattr(generation_config, "meta_every", None) is not None:
            # transformers, when it loads one that is derived from the model's configuration, drops custom settings.
            generation_config._from_model_config = False
        model = cast(Any, super())
        model.save_pretrained(save_directory, *args, **kwargs)
        is_checkpoint = Path(save_directory).name.startswith("checkpoint-")
        saves_adapters_alone = getattr(self, "_hf_peft_config_loaded", False)
        is_named = self.config.name_or_path != self.saved_as
        if not (is_named or is_checkpoint or saves_adapters_alone):
            self.saved_as = self.name_or_path = self.config.name_or_path = str(save_directory)

    def push_to_hub(self: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """Push as transformers does, by way of a temporary folder, and name an unnamed model after the repository."""
        was_named = self.config.name_or_path != self.saved_as
        commit = cast(Any, super()).push_to_hub(repo_id, *args, **kwargs)
        if not was_named:
            self.saved_as = self.name_or_path = self.config.name_or_path = repo_id
        return commit

    def resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize as transformers does, but never drop the meta-token's row.

        The first `new_num_tokens` rows, and all up to the meta-token's, are then in use; further ones, up to the
        multiple, are padding.

        Raises:
            UserError: if the rows would leave out the meta-token, as with the size of a tokenizer that lacks it.
        """
        multiple = pad_to_multiple_of or 1
        up_to_meta_token = 0 if self.config.meta_token_id is None else self.config.meta_token_id + 1
        if (
            new_num_tokens is not None
            and math.ceil(new_num_tokens / multiple) * multiple < up_to_meta_token
        ):
            raise UserError(
                f"{new_num_tokens} rows leave out the meta-token, of the id {self.config.meta_token_id}: ask for more."
            )
        model = cast(Any, super())
        table: nn.Embedding = model.resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        if new_num_tokens is not None:
            self.config.unpadded_vocab_size = max(new_num_tokens, up_to_meta_token)
        return table
