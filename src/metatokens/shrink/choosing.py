"""Which blocks look things up: what an answer loses if one block alone forgets the text."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch.nn.functional import cross_entropy

from metatokens.decoder import own_blocks
from metatokens.retrofit.text_window import apply_text_window
from metatokens.shrink.answering import answer_logits, is_answered, read
from metatokens.shrink.lookups import Asked

Watch = Callable[[int, int], None]  # takes what is done, and all


class BlockLoss(BaseModel):
    """What answers cost if one block forgets, or none.

    Attributes:
        block: its number, from 0; None: none forgets.
        loss: nats of an answer, the mean over questions.
        answered: how many questions are answered.
        n: questions.
    """

    block: int | None
    loss: float
    answered: int
    n: int


def losses_of_blocks(
    model: Any, tests: Sequence[Asked], window: int, watch: Watch
) -> list[BlockLoss]:
    """The loss of answers with the full cache, and if one block after another sees a window alone.

    Args:
        model: a retrofitted model; afterwards it has the full cache.
        tests: texts with questions, to which the answer is farther than the window.
        window: of the block that forgets.
        watch: called after each block.
    """
    blocks = range(own_blocks(model.config))
    losses = []
    for done, forgetting in enumerate((None, *blocks), start=1):
        if forgetting is not None:
            others = [block for block in blocks if block != forgetting]
            apply_text_window(model, window, full_layers=others)
        losses.append(_loss(model, tests, forgetting))
        watch(done, len(blocks) + 1)
    apply_text_window(model, None)
    return losses


def _loss(model: Any, tests: Sequence[Asked], block: int | None) -> BlockLoss:
    losses, hits = [], []
    for asked in tests:
        cache = read(model, asked.text)
        for question, logits in zip(
            asked.questions, answer_logits(model, cache, asked.questions), strict=True
        ):
            target = torch.tensor(question.answer, device=logits.device)
            losses.append(cross_entropy(logits, target, reduction="sum").item())
            hits.append(is_answered(logits, question))
    mean = round(float(np.mean(losses)), 4)
    return BlockLoss(block=block, loss=mean, answered=sum(hits), n=len(hits))


def most_needed(losses: Sequence[BlockLoss], count: int) -> list[int]:
    """The blocks whose forgetting costs most."""
    of_blocks = [loss for loss in losses if loss.block is not None]
    ranked = sorted(of_blocks, key=lambda loss: loss.loss, reverse=True)
    return sorted(loss.block for loss in ranked[:count] if loss.block is not None)
