"""The content that a task draws: pieces of text, and the gaps between them where a condition puts meta-tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

from metatokens.recipe import Condition, Split

OPENING = "\nQ:"  # of the question of every task
# Lines per landmark, by condition.
LINES = {
    "landmark": 1,
    "facts_1": 1,
    "facts_2": 2,
    "facts_4": 4,
    "facts_8": 8,
}


def stable_hash(text: str) -> int:
    """A 64-bit hash that is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def split_of(key: str) -> Split:
    """The split of whatever decides an answer, so that no training prompt has the answer to a test prompt.

    A tenth of all keys is for testing and a tenth for validation.
    """
    splits: dict[int, Split] = {0: "test", 1: "validation"}
    return splits.get(stable_hash(key) % 10, "train")


@dataclass(frozen=True, kw_only=True)
class Content:
    """The text of a prompt and its possible meta-tokens; a condition selects from them.

    Gap g is the place before piece g, and gap len(pieces) is the end of the context. Gaps are listed in ascending
    order.
    """

    pieces: Sequence[str]
    """The context, cut wherever a meta-token may go."""
    repeated: Sequence[str] = ()
    """Pieces that follow if the markers give the answer away: in list recall, the list that the question is about."""
    markers: tuple[int, ...]
    """Gaps, of `pieces` and `repeated`, of the meta-tokens that the question is about."""
    decoyed: tuple[int, ...]
    """Gaps of all meta-tokens in condition `decoy`, where further ones do not change the answer; empty if none fit."""
    decoy_repeated: Sequence[str] | None = None
    """Replaces `repeated` in condition `decoy`, whose gaps are then those of `pieces` and of this."""
    landmarks: tuple[int, ...]
    """Gaps of the meta-tokens that do not depend on the question: one after each line, in parity and copying after
    every few bits or words."""
    question: str
    decoy_question: str | None = None
    """Replaces `question` in condition `decoy`."""
    landmark_question: str | None
    """The question that needs no marker; None if there is no way to ask it."""
    answer: str

    def is_for(self, condition: Condition) -> bool:
        """Whether a prompt in that condition can be made of it."""
        if condition == "decoy":
            return bool(self.decoyed)
        return condition in ("paper", "long_prompt") or self.landmark_question is not None

    def segments(self, condition: Condition) -> tuple[str, ...]:
        """The prompt's text segments, with a meta-token at each join; the last meta-token ends the prompt."""
        pieces = self.pieces
        question = self.landmark_question
        if condition in LINES:
            every = LINES[condition]
            gaps: tuple[int, ...] = (*self.landmarks[every - 1 : -1 : every], self.landmarks[-1])
        elif condition == "decoy":
            gaps = self.decoyed
            pieces = [*pieces, *(self.decoy_repeated or self.repeated)]
            question = self.decoy_question or self.question
        else:
            gaps = self.markers
            pieces = [*pieces, *self.repeated]
            question = self.question
        segments = ["".join(pieces[start:end]) for start, end in pairwise((0, *gaps, len(pieces)))]
        segments[-1] += f"\n{question}"
        return (*segments, "")
