"""Greedy decoding from a cache, the same for models of this package and for the presses."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Forward = Callable[
    [Sequence[int]], Tensor
]  # reads tokens; gives the last one's logits, (vocabulary,)


def continue_greedily(
    forward: Forward, question: Sequence[int], new_tokens: int, stop: Sequence[int]
) -> list[int]:
    """The likeliest tokens after a question, at most `new_tokens` of them, up to a token of `stop`."""
    output: list[int] = []
    unread = question
    while len(output) < new_tokens:
        token = int(forward(unread).argmax())
        if token in stop:
            break
        output.append(token)
        unread = [token]
    return output


def stop_tokens(model: Any) -> list[int]:
    """The ids at which a model of transformers ends a text."""
    ids = model.generation_config.eos_token_id
    return ids if isinstance(ids, list) else [ids]
