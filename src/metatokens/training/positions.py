"""Randomised positions in training (Ruoss et al., 2023): they make a model ready for sequences longer than it saw.

Drawn from 2,304, the positions of 128 tokens are 18 apart on average, and those of a test are all 1 apart, which
training hardly ever shows. With a range of its own for each sequence it shows every spacing in between as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metatokens.errors import UserError
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import check_length


@contextmanager
def randomized_positions(model: MetaGPT2ForCausalLM, limit: int | None, shortest: int | None = None) -> Iterator[None]:
    """Meanwhile a training step gives each sequence a sorted random sample of the positions 0 ... limit - 1.

    In evaluation mode positions stay plain, and with a limit of None always. The sample is drawn from torch's
    generator, which a checkpoint of Trainer holds, so that a resumed run draws what an undisturbed one does.

    Args:
        model: gets a hook for as long; its weights and what is saved of it stay as they are.
        limit: the longest sequence that the model is to be ready for, in tokens.
        shortest: where given, a sequence's own limit is drawn, between this or the batch's length and `limit`. A row
            that is padded to that length gets the first of its sample's positions.

    Raises:
        UserError: if the limit is beyond a learned table; and in training, for a sequence longer than the limit.
    """
    if limit is None:
        yield
        return
    check_length(model.config, limit)

    def draw(module: MetaGPT2ForCausalLM, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not module.training:
            return None
        batch, length = kwargs["input_ids"].shape
        return args, kwargs | {"position_ids": sample_positions(batch, length, limit, shortest).to(module.device)}

    hook = model.register_forward_pre_hook(draw, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def sample_positions(batch: int, length: int, limit: int, shortest: int | None = None) -> Tensor:
    """For each row its own ascending sample without replacement, (batch, length) int64.

    Args:
        batch: rows.
        length: positions of a row.
        limit: they are below it.
        shortest: where given, below the row's own limit, log-uniform between this (`length`, if that is more) and
            `limit`.

    Raises:
        UserError: if `length` is more than `limit`.
    """
    if length > limit:
        raise UserError(
            f"a training sequence has {length} tokens, and training.random_positions offers {limit} positions; "
            "it must be as long as the longest sequence at least."
        )
    scores = torch.rand(batch, limit)
    if shortest is not None:
        least = max(length, shortest)
        own = least * (limit / least) ** torch.rand(batch, 1)
        scores[torch.arange(limit) >= own.floor()] = -1.0
    return scores.topk(length, dim=1).indices.sort(dim=1).values
