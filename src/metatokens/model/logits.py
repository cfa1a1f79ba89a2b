"""Logits of chosen positions, without those of all others, and few at a time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from metatokens.model.attention import linear
from metatokens.model.gpt_neo import GPTNeoForCausalLM
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.retrofit.classes import decoder_of

PIECE = 2**21  # logits at a time, in 8 MB: a batch's are more than all weights where the vocabulary is large


def logits_at(model: Any, input_ids: Tensor, chosen: Tensor, *, most: int = PIECE) -> Iterator[Tensor]:
    """Next-token logits at some positions, row by row, in pieces: each (positions of the piece, vocabulary).

    Args:
        model: any that `load_model` gives, in evaluation mode.
        input_ids: (batch, length), without padding on the left.
        chosen: (batch, length) bool.
        most: logits of a piece, which is one position at least.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # of PEFT, with its adapters in it
    if isinstance(model, MetaGPT2ForCausalLM | GPTNeoForCausalLM):
        states = model.model(input_ids, use_cache=False, keep=chosen).last_hidden_state
        head: Callable[[Tensor], Tensor] = partial(linear, model.lm_head)
    else:
        decoder, _ = decoder_of(model)
        output = decoder(input_ids, use_cache=False)
        states, head = output[0][chosen], partial(_head, model, decoder, output)
    for piece in states.split(max(1, most // model.config.get_text_config().vocab_size)):
        yield head(piece)


def _head(model: Any, decoder: Any, output: Any, states: Tensor) -> Tensor:
    """The logits of some states. The base may scale or cap them, so its own code runs on the given states."""
    output["last_hidden_state"] = states[None]
    with patch.object(decoder, "forward", lambda *args, **kwargs: output):
        return model(states.new_zeros((1, 1), dtype=torch.int64), use_cache=False).logits[0]
