"""Logits of chosen positions, without those of all others."""

from typing import Any

from torch import Tensor

from metatokens.model.attention import linear
from metatokens.model.gpt_neo import GPTNeoForCausalLM
from metatokens.model.modeling import MetaGPT2ForCausalLM


def logits_at(model: Any, input_ids: Tensor, chosen: Tensor) -> Tensor:
    """Next-token logits at some positions, (chosen, vocabulary), row by row.

    Args:
        model: any that `load_model` gives, in evaluation mode.
        input_ids: (batch, length), without padding on the left.
        chosen: (batch, length) bool.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # of PEFT, with its adapters in it
    if isinstance(model, MetaGPT2ForCausalLM | GPTNeoForCausalLM):
        states = model.model(input_ids, use_cache=False, keep=chosen).last_hidden_state
        return linear(model.lm_head, states)
    columns = chosen.any(dim=0).nonzero()[:, 0]  # the head of a base may do more than a linear layer
    if model._supports_logits_to_keep():
        return model(input_ids, use_cache=False, logits_to_keep=columns).logits[chosen[:, columns]]
    return model(input_ids, use_cache=False).logits[chosen]
