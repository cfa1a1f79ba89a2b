"""What all decoders have in common: blocks, a kind of positions, and logits at chosen positions."""

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from metatokens.errors import UserError

PIECE = 2**21  # logits at a time, 8 MB; with a large vocabulary, a batch's logits are larger than the model


def decoder_of(model: PreTrainedModel) -> tuple[Any, Any]:
    """The module that runs a language model's blocks, and the list of its blocks."""
    count = model.config.get_text_config().num_hidden_layers
    for root in (model.get_decoder(), model.base_model):  # in some models, get_decoder() returns a head
        for module in root.modules():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) >= count:
                    return module, child
    raise UserError(f"meta-attention cannot be added to a {type(model).__name__}: it has no list of {count} blocks.")


def position_embedding_of(model: PreTrainedModel) -> str:
    """The kind of a decoder's positions: `learned` (a table, which limits the length), `rope` or `none`."""
    tables = (name for name, one in decoder_of(model)[0].named_children() if isinstance(one, nn.Embedding))
    if any(re.search("pos|wpe", name) for name in tables):  # other tables are of tokens, in some models one per layer
        return "learned"
    has_angles = getattr(model.config.get_text_config(), "rope_parameters", None) or hasattr(model.config, "rotary_dim")
    return "rope" if has_angles else "none"


def logits_at(model: Any, input_ids: Tensor, chosen: Tensor, *, most: int = PIECE) -> Iterator[Tensor]:
    """Next-token logits at some positions, row by row, in pieces of shape (positions, vocabulary).

    Args:
        model: any model that `load_model` returns, in evaluation mode.
        input_ids: (batch, length), without left padding.
        chosen: (batch, length) bool.
        most: logits in a piece, which has at least one position.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # unwraps PEFT's wrapper; the adapters stay
    decoder, _ = decoder_of(model)
    output = decoder(input_ids, use_cache=False)
    for piece in output[0][chosen].split(max(1, most // model.config.get_text_config().vocab_size)):
        yield _head(model, decoder, output, piece)


def _head(model: Any, decoder: Any, output: Any, states: Tensor) -> Tensor:
    """The logits of final states, by the model's own forward, since it may scale or cap them."""
    output["last_hidden_state"] = states[None]
    with patch.object(decoder, "forward", lambda *args, **kwargs: output):
        return model(states.new_zeros((1, 1), dtype=torch.int64), use_cache=False).logits[0]
