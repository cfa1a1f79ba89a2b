"""Positions that a training step draws: they make a model ready for sequences longer than it saw.

Randomised positions (Ruoss et al., 2023), drawn from 2,304, of 128 tokens are 18 apart on average, and those of a test
are all 1 apart, which training hardly ever shows. With a range of its own for each sequence it shows every spacing in
between as well. One jump leaves neighbours neighbours everywhere but at one place (PoSE, Zhu et al., 2023).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from metatokens.errors import UserError
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import check_length
from metatokens.recipe import TrainingSettings

_JUMPING = 0.5  # of the sequences; the others keep plain positions


@contextmanager
def drawn_positions(model: MetaGPT2ForCausalLM, settings: TrainingSettings) -> Iterator[None]:
    """Meanwhile a training step gives each sequence positions of its own, by `random_positions` or `position_jumps`.

    In evaluation mode positions stay plain, and with neither setting always. They are drawn from torch's generator,
    which a checkpoint of Trainer holds, so that a resumed run draws what an undisturbed one does.

    Args:
        model: gets a hook for as long; its weights and what is saved of it stay as they are.
        settings: of the recipe.

    Raises:
        UserError: if the limit is beyond a learned table; and in training, for a sequence longer than the limit.
    """
    sample: Callable[[int, int], Tensor]
    if limit := settings.random_positions:
        sample = partial(sample_positions, limit=limit, shortest=settings.random_positions_from)
    elif limit := settings.position_jumps:
        sample = partial(jumped_positions, limit=limit)
    else:
        yield
        return
    check_length(model.config, limit)

    def draw(module: MetaGPT2ForCausalLM, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not module.training:
            return None
        return args, kwargs | {"position_ids": sample(*kwargs["input_ids"].shape).to(module.device)}

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
    _check(length, limit, "random_positions")
    scores = torch.rand(batch, limit)
    if shortest is not None:
        least = max(length, shortest)
        own = least * (limit / least) ** torch.rand(batch, 1)
        scores[torch.arange(limit) >= own.floor()] = -1.0
    return scores.topk(length, dim=1).indices.sort(dim=1).values


def jumped_positions(batch: int, length: int, limit: int) -> Tensor:
    """For each row its positions, (batch, length) int64: 0, 1, 2 and so on, in half of the rows with one jump.

    Where it stands is uniform, and how far it goes too, from 0 to what keeps the last position below the limit.

    Args:
        batch: rows.
        length: positions of a row.
        limit: they are below it.

    Raises:
        UserError: if `length` is more than `limit`.
    """
    _check(length, limit, "position_jumps")
    places = torch.arange(length).expand(batch, length)
    start = torch.randint(length, (batch, 1))
    size = torch.randint(limit - length + 1, (batch, 1))
    size[torch.rand(batch, 1) >= _JUMPING] = 0
    return places + size * (places >= start)


def _check(length: int, limit: int, setting: str) -> None:
    if length > limit:
        raise UserError(
            f"a training sequence has {length} tokens, and training.{setting} offers {limit} positions; "
            "it must be as long as the longest sequence at least."
        )
