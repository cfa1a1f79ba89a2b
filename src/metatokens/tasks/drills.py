"""Drills: prompts of copying with random entries of the vocabulary in place of the text.

Every task needs a model to find a bracket, or a token that occurred before. A drill trains only that.
"""

import numpy as np
from numpy.random import Generator

from metatokens.errors import UserError
from metatokens.tasks.copying import QUESTION
from metatokens.tasks.curriculum import ATTEMPTS, TaskData
from metatokens.tasks.example import Encoded
from metatokens.tasks.phases import Sizes

_DISTINCT = 0.3  # of drills repeat no entry


def draw_drill(data: TaskData, index: int, train_length: int, sizes: Sizes) -> Encoded:
    """Draw the index-th drill of a task; the arguments are those of `TaskData.train`.

    Whatever the task, the question and the markers are those of copying in condition `paper`.

    Raises:
        UserError: if no prompt is so short.
    """
    encoder = data.encoder
    marker = encoder.meta_token_id
    question = encoder.encode_text(f"\n{QUESTION}", True)
    generator = data.generator(index, f"drill train {train_length}")
    room = train_length - len(encoder.beginning) - len(question) - 3  # markers
    for _ in range(ATTEMPTS):
        m, n, _ = sizes.draw(generator)
        if m * n > room:
            continue
        text = _draw_text(generator, data.text_entries, m * n)
        start = int(generator.integers(m * n - n + 1))
        before, bracketed, after = np.split(text, [start, start + n])
        prompt = [
            *encoder.beginning,
            *before,
            marker,
            *bracketed,
            marker,
            *after,
            *question,
            marker,
        ]
        ids = np.array([*prompt, *bracketed, encoder.eos_token_id], dtype=np.int32)
        return Encoded(input_ids=ids, answer_start=len(prompt))
    raise UserError(f"no drill has at most {train_length} tokens; try another length.")


def _draw_text(generator: Generator, entries: np.ndarray, length: int) -> np.ndarray:
    """Draw `length` entries of a vocabulary.

    In three of ten drills no entry is repeated, if the vocabulary is large enough. The others draw from a set of about
    `length` / 3 to `length` entries. So entries repeat, and one entry does not determine the next.
    """
    distinct = generator.choice(entries, size=min(length, len(entries)), replace=False)
    if generator.random() < _DISTINCT and length <= len(distinct):
        return distinct
    size = int(generator.integers(max(2, len(distinct) // 3), len(distinct) + 1))
    return distinct[generator.integers(size, size=length)]
