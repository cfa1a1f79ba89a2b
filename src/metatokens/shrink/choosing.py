"""Which heads look things up: what an answer loses if one key-value head alone forgets the text."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch.nn.functional import cross_entropy

from metatokens.retrofit.text_window import apply_text_window
from metatokens.shrink.answering import answer_logits, is_answered, read
from metatokens.shrink.lookups import Asked

Watch = Callable[[int, int], None]  # takes what is done, and all
Head = tuple[int, int]  # a block, and one of its key-value heads, from 0


class HeadLoss(BaseModel):
    """The loss of answers if one key-value head forgets the text, or none does.

    Attributes:
        head: a block, and one of its heads; None: none forgets.
        loss: nats of an answer, the mean over questions.
        answered: how many questions are answered.
        n: questions.
    """

    head: Head | None
    loss: float
    answered: int
    n: int


def losses_of_heads(
    model: Any, heads: Sequence[Head], tests: Sequence[Asked], window: int, watch: Watch
) -> list[HeadLoss]:
    """The loss of answers with the full cache, and if one head after another sees a window alone.

    Args:
        model: a retrofitted model; afterwards it has the full cache.
        heads: all of the model.
        tests: texts with questions, to which the answer is farther than the window.
        window: of the head that forgets.
        watch: called after each head.
    """
    losses = []
    for done, forgetting in enumerate((None, *heads), start=1):
        if forgetting is not None:
            others = [head for head in heads if head != forgetting]
            apply_text_window(model, window, full_heads=others)
        losses.append(_loss(model, tests, forgetting))
        watch(done, len(heads) + 1)
    apply_text_window(model, None)
    return losses


def _loss(model: Any, tests: Sequence[Asked], head: Head | None) -> HeadLoss:
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
    return HeadLoss(head=head, loss=mean, answered=sum(hits), n=len(hits))


def most_needed(losses: Sequence[HeadLoss], count: int) -> list[Head]:
    """The heads whose forgetting costs most."""
    ranked = sorted(losses, key=lambda loss: loss.loss, reverse=True)
    heads = [loss.head for loss in ranked if loss.head is not None]
    return sorted(heads[:count])
