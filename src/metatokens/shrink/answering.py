"""Asking a model about a text that its cache holds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metatokens.data.landmarks import Landmarks, with_landmarks
from metatokens.model.generation import READ_AT_ONCE
from metatokens.model.positions import rotates_by_length
from metatokens.shrink.lookups import Question


@torch.inference_mode()
def read(model: Any, ids: Sequence[int]) -> Any:
    """The cache that holds a text, read by chunks; a model with a text window has forgotten most of it."""
    cache = None
    # Where longer texts have other frequencies, a chunk would have those of its own length.
    size = len(ids) if rotates_by_length(model.config) else READ_AT_ONCE
    for chunk in torch.tensor([ids], device=model.device).split(size, dim=1):
        cache = model(
            chunk, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).past_key_values
    return cache


@torch.inference_mode()
def answer_logits(
    model: Any,
    text: Sequence[int],
    questions: Sequence[Question],
    landmarks: Landmarks | None = None,
) -> list[Tensor]:
    """The logits of each answer's tokens, (tokens, vocabulary) float32, after a text.

    Args:
        model: in evaluation mode.
        text: ids without meta-tokens.
        questions: about the text, each by itself.
        landmarks: where meta-tokens are inserted into the text and the questions, if anywhere.
    """
    rows = []
    for question in questions:
        ids = with_landmarks(landmarks, question.ids, before=text)
        rows.append([*ids, *question.answer[:-1]])
    longest = max(map(len, rows))
    # Padding comes after the tokens of its row, so it changes none of them.
    padded = [row + row[-1:] * (longest - len(row)) for row in rows]
    cache = read(model, with_landmarks(landmarks, text))
    cache.batch_repeat_interleave(len(rows))
    output = model(torch.tensor(padded, device=model.device), past_key_values=cache, use_cache=True)
    return [
        logits[len(row) - len(question.answer) : len(row)].float()
        for logits, row, question in zip(output.logits, rows, questions, strict=True)
    ]


def is_answered(logits: Tensor, question: Question) -> bool:
    """Whether each token of the answer is the likeliest one."""
    likeliest: list[int] = logits.argmax(dim=-1).tolist()
    return likeliest == question.answer
