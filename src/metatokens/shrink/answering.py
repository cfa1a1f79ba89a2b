"""Asking a model about a text that its cache holds."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metatokens.data.landmarks import Landmarks
from metatokens.shrink.lookups import Question

AT_ONCE = 512  # tokens of a text that are read in one forward pass


@torch.inference_mode()
def read(model: Any, ids: Sequence[int]) -> Any:
    """The cache that holds a text, read by chunks; a model with a text window has forgotten most of it."""
    cache = None
    for start in range(0, len(ids), AT_ONCE):
        chunk = torch.tensor([list(ids[start : start + AT_ONCE])], device=model.device)
        cache = model(
            chunk, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).past_key_values
    return cache


@torch.inference_mode()
def answer_logits(
    model: Any, cache: Any, question: Question, landmarks: Landmarks | None = None, start: int = 0
) -> Tensor:
    """The logits of an answer's tokens, (tokens, vocabulary) float32, after a text in a cache, which stays as it is.

    Args:
        model: in evaluation mode.
        cache: of the text.
        question: about the text.
        landmarks: where meta-tokens are inserted, if anywhere.
        start: tokens of the text, without meta-tokens.
    """
    ids = question.ids if landmarks is None else landmarks.insert_into(question.ids, start)
    asked = torch.tensor([[*ids, *question.answer[:-1]]], device=model.device)
    output = model(
        asked,
        past_key_values=copy.deepcopy(cache),
        use_cache=True,
        logits_to_keep=len(question.answer),
    )
    logits: Tensor = output.logits[0].float()
    return logits


def is_answered(logits: Tensor, question: Question) -> bool:
    """Whether each token of the answer is the likeliest one."""
    likeliest: list[int] = logits.argmax(dim=-1).tolist()
    return likeliest == question.answer
