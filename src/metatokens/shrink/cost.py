"""What a cache costs: its bytes, and tokens a second, next to the full cache, side by side."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel

from metatokens.model.generation import READ_AT_ONCE
from metatokens.retrofit.text_window import apply_text_window, text_window_of
from metatokens.shrink.answering import read

CONTINUATION = 32  # tokens by which a text is continued


class Cost(BaseModel):
    """What the cache of a text costs.

    Attributes:
        cache: `full` or `shrunk`.
        length: tokens of the text.
        cache_bytes: after the text and its continuation.
        read_per_second: tokens of the text.
        new_per_second: tokens of its continuation.
        device: cpu or cuda.
        threads: of the processor.
    """

    cache: str
    length: int
    cache_bytes: int
    read_per_second: float
    new_per_second: float
    device: str
    threads: int


def costs(model: Any, text: npt.ArrayLike, length: int) -> list[Cost]:
    """The cost of the full cache and of the model's own, each measured once, after a short text that warms up.

    Args:
        model: with a text window.
        text: ids, (tokens,), repeated up to the length; a model's limit does not matter here.
        length: tokens.
    """
    ids = np.resize(text, length).tolist()
    # The model's own window comes last, so that it has it afterwards.
    windows: dict[str, dict[str, Any]] = {
        "full": {"window": None},
        "shrunk": text_window_of(model.config),
    }
    measured = []
    for cache, window in windows.items():
        apply_text_window(model, **window)
        _timed(model, ids[:READ_AT_ONCE])
        reading, writing, size = _timed(model, ids)
        measured.append(
            Cost(
                cache=cache,
                length=length,
                cache_bytes=size,
                read_per_second=round(length / reading, 1),
                new_per_second=round(CONTINUATION / writing, 2),
                device=model.device.type,
                threads=torch.get_num_threads(),
            )
        )
    return measured


@torch.inference_mode()
def _timed(model: Any, ids: list[int]) -> tuple[float, float, int]:
    """Seconds to read a text and to continue it, and the bytes of the cache."""
    start = _now(model)
    cache = read(model, ids)
    middle = _now(model)
    token = torch.tensor([ids[-1:]], device=model.device)
    for _ in range(CONTINUATION):
        output = model(token, past_key_values=cache, use_cache=True)
        token = output.logits[:, -1:].argmax(dim=-1)
    end = _now(model)
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return middle - start, end - middle, size


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
