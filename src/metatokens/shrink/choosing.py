"""Which heads look things up: what an answer loses if one key-value head alone forgets the text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch.nn.functional import cross_entropy

from metatokens.retrofit.text_window import apply_text_window
from metatokens.shrink.answering import answer_logits, is_answered
from metatokens.shrink.lookups import Asked

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


def loss_without(
    head: Head | None, model: Any, heads: Sequence[Head], texts: Sequence[Asked], window: int
) -> HeadLoss:
    """The loss of answers if one head sees a window alone.

    Args:
        head: that one; None: all heads see everything.
        model: a retrofitted model with the full cache, and so it is afterwards.
        heads: all of the model.
        texts: texts with questions, to which the answer is farther than the window.
        window: of the head that forgets.
    """
    if head is None:
        return _loss(model, texts, None)
    apply_text_window(model, window, full_heads=[other for other in heads if other != head])
    loss = _loss(model, texts, head)
    apply_text_window(model, None)
    return loss


def _loss(model: Any, texts: Sequence[Asked], head: Head | None) -> HeadLoss:
    losses, hits = [], []
    for asked in texts:
        logits_of_answers = answer_logits(model, asked.text, asked.questions)
        for question, logits in zip(asked.questions, logits_of_answers, strict=True):
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
