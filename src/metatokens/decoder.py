"""What every decoder has: its blocks, its kind of positions, and logits of chosen positions."""

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.errors import UserError

PIECE = 2**21  # logits at a time, in 8 MB: a batch's are more than all weights where the vocabulary is large


def decoder_of(model: PreTrainedModel) -> tuple[Any, Any]:
    """The module that runs a language model's blocks, and the blocks.

    Raises:
        UserError: if there is none.
    """
    count = model.config.get_text_config().num_hidden_layers
    for root in (model.get_decoder(), model.base_model):  # the first is a head in some models
        for module in root.modules():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) >= count:
                    return module, child
    raise UserError(f"meta-attention cannot be added to a {type(model).__name__}: it has no list of {count} blocks.")


def position_embedding_of(model: PreTrainedModel) -> str:
    """`learned` if a decoder has a table of them, beyond which a sequence has no place; otherwise `rope` or `none`."""
    tables = (name for name, one in decoder_of(model)[0].named_children() if isinstance(one, nn.Embedding))
    if any(re.search("pos|wpe", name) for name in tables):  # others are of tokens, some with one for each layer
        return "learned"
    has_angles = getattr(model.config.get_text_config(), "rope_parameters", None) or hasattr(model.config, "rotary_dim")
    return "rope" if has_angles else "none"


def logits_at(model: Any, input_ids: Tensor, chosen: Tensor, *, most: int = PIECE) -> Iterator[Tensor]:
    """Next-token logits at some positions, row by row, in pieces: each (positions of the piece, vocabulary).

    Args:
        model: any that `load_model` gives, in evaluation mode.
        input_ids: (batch, length), without padding on the left.
        chosen: (batch, length) bool.
        most: logits of a piece, which is one position at least.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # of PEFT, with its adapters in it
    decoder, _ = decoder_of(model)
    output = decoder(input_ids, use_cache=False)
    for piece in output[0][chosen].split(max(1, most // model.config.get_text_config().vocab_size)):
        yield _head(model, decoder, output, piece)


def _head(model: Any, decoder: Any, output: Any, states: Tensor) -> Tensor:
    """The logits of some states. The base may scale or cap them, so its own code runs on the given states."""
    output["last_hidden_state"] = states[None]
    with patch.object(decoder, "forward", lambda *args, **kwargs: output):
        return model(states.new_zeros((1, 1), dtype=torch.int64), use_cache=False).logits[0]
