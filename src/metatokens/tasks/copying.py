"""Copying: repeat the part of a text that two meta-tokens bracket (paper, appendix "Example Prompts").

    prompt    There _PAUSE_ was hardly a clue _PAUSE_ to be found.
              Q: Copy the bracketed text. _PAUSE_
    answer    was hardly a clue

In condition `landmark` the question is "Copy the 4 words after There", where a run of punctuation counts as
a word. The answer is exactly the bracketed text; the paper adds a full stop.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from metatokens.errors import UserError
from metatokens.recipe import Split
from metatokens.tasks.content import Content
from metatokens.tasks.shortcuts import MARK, ParsedPrompt, Rule, Table

QUESTION = "Q: Copy the bracketed text."
DECOY_QUESTION = "Q: Copy the first bracketed text."
FIRST_QUESTION = "Q: Copy the first {n} words."
LANDMARK_QUESTION = "Q: Copy the {n} words after {before}"
QUESTIONS = [
    QUESTION,
    DECOY_QUESTION,
    *(FIRST_QUESTION.format(n=n) for n in range(3, 26)),
    "Q: Copy the 3 words after it",
]
CHANCE = 0.0

# A word or a run of punctuation, with the space before it.
_PIECE = re.compile(r"\s*(?:\w+|[^\w\s]+)")
# Of ten documents; the other seven are for training.
_SPLITS: dict[int, Split] = {
    0: "train",
    1: "test",
    2: "validation",
}
_BEFORE = 2  # pieces that the question quotes
_SHORTEST = 3 * 3  # pieces: the smallest m n of any phase


class _Document(NamedTuple):
    """A text, and the character offset at which each of its pieces ends."""

    text: str
    ends: np.ndarray


class _Excerpt(NamedTuple):
    """Pieces of a text in a row: the offsets at which they start, and at which the last one ends."""

    text: str
    offsets: list[int]

    def between(self, start: int, end: int) -> str:
        """The text from the start of a piece to that of another."""
        return self.text[self.offsets[start] : self.offsets[end]]

    def words(self, start: int, end: int) -> str:
        """The same with single spaces, as a question quotes it."""
        return " ".join(self.between(start, end).split())


class Excerpts:
    """Excerpts of documents for the task to ask about.

    Each document is in one split: of ten of similar length, one is for testing and one for validation.

    Args:
        documents: texts. Copies of a text, and texts too short for an excerpt, are skipped.

    Raises:
        UserError: if fewer than three different documents have at least nine words and punctuation marks.
    """

    def __init__(self, documents: Iterable[str]):
        distinct = map(_document, dict.fromkeys(documents))
        self._documents = sorted(distinct, key=lambda document: -len(document.ends))
        # In pieces, from the longest document on.
        self._lengths = np.array([len(document.ends) for document in self._documents])
        self._total_lengths = self._lengths.cumsum()
        long_enough = self._count_of_length(_SHORTEST)
        if long_enough < len(_SPLITS):
            raise UserError(
                f"copying needs {len(_SPLITS)} documents of at least {_SHORTEST} words and punctuation marks, to "
                f"train, validate and test on; {long_enough} of the {len(self._documents)} given are that long."
            )

    def draw(
        self, generator: Generator, m: int, n: int, asked: int, split: Split
    ) -> Content | None:
        """Draw an excerpt of m n pieces, and bracket `asked` of them, at any distance from its end.

        Decoys are one to three bracketed parts further on; there are none if fewer than two pieces follow.

        Returns:
            None if no document is as long, or the document is in another split.
        """
        size = m * n
        if size > self._lengths[0]:
            return None
        number, excerpt = self._draw_excerpt(generator, size)
        start = int(generator.integers(size - asked + 1))
        end = start + asked
        following = size - end
        pairs = min(int(generator.integers(1, 4)), following // 2)
        decoys = (generator.permutation(following)[: 2 * pairs] + end + 1).tolist()
        # Only after the last draw: the next attempt's numbers depend on it.
        if _SPLITS.get(number % 10, "train") != split:
            return None
        landmarks = range(n, size + 1, n)
        gaps = sorted({0, start, end, *decoys, *landmarks})
        quoted = excerpt.words(max(0, start - _BEFORE), start)
        landmark_question = None
        if start == 0:
            landmark_question = FIRST_QUESTION.format(n=asked)
        elif excerpt.words(0, size).count(quoted) == 1:
            landmark_question = LANDMARK_QUESTION.format(n=asked, before=quoted)
        decoyed = sorted([start, end, *decoys]) if decoys else []
        return Content(
            pieces=[excerpt.between(gap, next_gap) for gap, next_gap in pairwise(gaps)],
            markers=(gaps.index(start), gaps.index(end)),
            decoyed=tuple(map(gaps.index, decoyed)),
            landmarks=tuple(map(gaps.index, landmarks)),
            question=QUESTION,
            decoy_question=DECOY_QUESTION,
            landmark_question=landmark_question,
            answer=excerpt.between(start, end),
        )

    def _count_of_length(self, length: int) -> int:
        """The number of documents of at least so many pieces."""
        return int((self._lengths >= length).sum())

    def _draw_excerpt(self, generator: Generator, length: int) -> tuple[int, _Excerpt]:
        """Draw a document in proportion to its length, and `length` pieces of it in a row, without space before them.

        Returns:
            The document's number, and the excerpt.
        """
        long_enough = self._count_of_length(length)
        drawn = generator.integers(self._total_lengths[long_enough - 1])
        number = int(np.searchsorted(self._total_lengths, drawn, side="right"))
        text, ends = self._documents[number]
        first = int(generator.integers(len(ends) - length + 1))
        start = int(ends[first - 1]) if first else 0
        while text[start].isspace():
            start += 1
        return number, _Excerpt(text, [start, *ends[first : first + length].tolist()])


def _document(text: str) -> _Document:
    ends = [piece.end() for piece in _PIECE.finditer(text)]
    return _Document(text, np.array(ends, dtype=np.int32))


# --- shortcuts

TABLES: dict[str, Table] = {}


def rules(condition: str) -> dict[str, Rule]:
    """In condition `landmark`, whose markers do not bracket the answer, the text between them; elsewhere none."""
    return (
        {"the text between the first two markers": _between_marks}
        if condition == "landmark"
        else {}
    )


def _between_marks(prompt: ParsedPrompt) -> str | None:
    _, *parts = prompt.text.split(MARK, 2)
    return parts[0].strip() if len(parts) == 2 else None
