"""Position jumps, which prepare a model for sequences longer than those it is trained on (PoSE, Zhu et al., 2023)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens.errors import UserError
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import check_length

_JUMPING = 0.5  # share of the sequences that have a jump


@contextmanager
def position_jumps(model: PreTrainedModel, limit: int | None) -> Iterator[None]:
    """Within the context, each training step gives its sequences the positions that `jumped_positions` draws.

    Evaluation mode keeps plain positions. The positions are drawn from torch's generator, whose state Trainer saves in
    each checkpoint, so a resumed run draws the same ones.

    Args:
        model: has a hook within the context; neither its weights nor what is saved of it change.
        limit: all positions are below it; None: no jumps.

    Raises:
        UserError: if the model has fewer learned positions than `limit`, or no positions.
    """
    if limit is None:
        yield
        return
    check_length(model.config, limit)
    if model.config.position_embedding == "none":
        raise UserError("training.position_jumps has no effect in a model without position ids.")

    def draw(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not module.training:
            return None
        ids = args[0] if args else kwargs["input_ids"]
        batch, length = ids.shape
        drawn = {"position_ids": jumped_positions(batch, length, limit).to(module.device)}
        if not isinstance(module, MetaGPT2ForCausalLM):
            # Without a mask, a model of transformers takes a gap in the positions for the start of another sequence.
            mask = kwargs.get("attention_mask")  # PEFT gives None
            drawn["attention_mask"] = torch.ones_like(ids) if mask is None else mask
        return args, kwargs | drawn

    with model.register_forward_pre_hook(draw, with_kwargs=True):
        yield


def jumped_positions(batch: int, length: int, limit: int) -> Tensor:
    """Positions 0, 1, 2, ..., (batch, length) int64; each row has one jump with probability 1/2.

    The index of the jump is uniform. So is its size, from 0 to the largest that keeps the last position below `limit`.

    Raises:
        UserError: if a row is longer than `limit`.
    """
    if length > limit:
        raise UserError(
            f"a training sequence has {length} tokens, and training.position_jumps offers {limit} positions; "
            "it must be at least as large as the longest sequence."
        )
    indices = torch.arange(length).expand(batch, length)
    start = torch.randint(length, (batch, 1))
    size = torch.randint(limit - length + 1, (batch, 1))
    size[torch.rand(batch, 1) >= _JUMPING] = 0
    return indices + size * (indices >= start)
