"""Copying: repeat the part of a text that two meta-tokens bracket (paper, appendix "Example Prompts").

    prompt    There _PAUSE_ was hardly a clue _PAUSE_ to be found.
              Q: Copy the bracketed text. _PAUSE_
    answer    was hardly a clue

In conditions `landmark` and `none` the question is "Copy the 4 words after There", where a run of punctuation counts as
a word. The answer is exactly the bracketed text; the paper adds a full stop.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from metatokens.errors import UserError
from metatokens.recipe import Split
from metatokens.tasks.content import Content

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

_PIECE = re.compile(r"\s*(?:\w+|[^\w\s]+)")  # a word or a run of punctuation, with the space before it
_SPLITS: dict[int, Split] = {0: "train", 1: "test", 2: "validation"}  # of ten documents; the other seven are train
_BEFORE = 2  # pieces that the question quotes
_SHORTEST = 3 * 3  # pieces: the smallest m n of any phase


class Excerpts:
    """Excerpts of documents for the task to ask about.

    Each document is in one split: of ten of similar length, one is for testing and one for validation.

    Args:
        documents: texts. Copies of a text, and texts too short for an excerpt, are skipped.

    Raises:
        UserError: if fewer than three different documents have at least nine words and punctuation marks.
    """

    def __init__(self, documents: Sequence[str]):
        documents = list(dict.fromkeys(documents))
        ends = [np.array([piece.end() for piece in _PIECE.finditer(text)], dtype=np.int32) for text in documents]
        longest_first = sorted(range(len(documents)), key=lambda i: -len(ends[i]))
        self._texts = [documents[i] for i in longest_first]
        self._ends = [ends[i] for i in longest_first]  # where each piece ends, as character offsets
        lengths = np.array([len(ends_of_text) for ends_of_text in self._ends], dtype=np.int64)  # in pieces
        self._negative_lengths = -lengths  # ascending, as searchsorted wants it
        self._total_lengths = np.cumsum(lengths)
        self.longest = int(lengths.max(initial=0))
        """The length of the longest possible excerpt, in pieces."""
        long_enough = int((lengths >= _SHORTEST).sum())
        if long_enough < len(_SPLITS):
            raise UserError(
                f"copying needs {len(_SPLITS)} documents of at least {_SHORTEST} words and punctuation marks, to "
                f"train, validate and test on; {long_enough} of the {len(documents)} given are that long."
            )

    def draw(self, generator: np.random.Generator, m: int, n: int, asked: int, split: Split) -> Content | None:
        """Draw an excerpt of m n pieces, at most `longest`, and bracket `asked` of them, at any distance from its end.

        Decoys are one to three bracketed parts further on; there are none if fewer than two pieces follow.

        Returns:
            None if the document is in another split.
        """
        document, text, offsets = self._draw_excerpt(generator, m * n)
        start = int(generator.integers(m * n - asked + 1))
        end = start + asked
        following = m * n - end
        pairs = min(int(generator.integers(1, 4)), following // 2)
        decoys = (generator.permutation(following)[: 2 * pairs] + end + 1).tolist()
        # Only after the last draw: the next attempt's numbers depend on it.
        if _SPLITS.get(document % 10, _SPLITS[0]) != split:
            return None
        landmarks = range(n, m * n + 1, n)
        gaps = sorted({0, start, end, *decoys, *landmarks})
        quoted = " ".join(text[offsets[max(0, start - _BEFORE)] : offsets[start]].split())
        whole = " ".join(text[offsets[0] : offsets[-1]].split())
        landmark_question = None
        if start == 0:
            landmark_question = FIRST_QUESTION.format(n=asked)
        elif whole.count(quoted) == 1:
            landmark_question = LANDMARK_QUESTION.format(n=asked, before=quoted)
        decoyed = sorted([start, end, *decoys]) if decoys else []
        return Content(
            pieces=[text[offsets[gap] : offsets[next_gap]] for gap, next_gap in pairwise(gaps)],
            markers=(gaps.index(start), gaps.index(end)),
            decoyed=tuple(map(gaps.index, decoyed)),
            landmarks=tuple(map(gaps.index, landmarks)),
            question=QUESTION,
            decoy_question=DECOY_QUESTION,
            landmark_question=landmark_question,
            answer=text[offsets[start] : offsets[end]],
        )

    def _draw_excerpt(self, generator: np.random.Generator, length: int) -> tuple[int, str, list[int]]:
        """Draw a document in proportion to its length, and `length` pieces of it in a row, without space before them.

        Returns:
            The document's number, its text, and the offsets at which the pieces start and the last one ends.
        """
        long_enough = int(np.searchsorted(self._negative_lengths, -length, side="right"))
        drawn = generator.integers(self._total_lengths[long_enough - 1])
        document = int(np.searchsorted(self._total_lengths, drawn, side="right"))
        text, ends = self._texts[document], self._ends[document]
        first = int(generator.integers(len(ends) - length + 1))
        start = int(ends[first - 1]) if first else 0
        while text[start].isspace():
            start += 1
        return document, text, [start, *ends[first : first + length].tolist()]
