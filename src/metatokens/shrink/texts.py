"""A user's text: prose to train and to measure on, and the names and words that look-ups are about."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import read_corpus
from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import encode_text
from metatokens.errors import UserError
from metatokens.files import sha256_of
from metatokens.recipe import Split
from metatokens.tasks.content import split_of

MOST_CHARACTERS = 50_000_000  # of a user's text; the rest is not read
HELD_OUT_EVERY = 10  # of so many documents or records, the last is held out
FEWEST_WORDS = 64  # of a split, and of the names of a split
MOST_BETWEEN_ENDS = 200  # tokens, in the mean, between the ends of sentences or lines
NUMBERS = range(100, 10_000)  # that look-ups are about
Item = TypeVar("Item")
_WORD = re.compile(r"[^\W\d_]+")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}\b")  # within a sentence


@dataclass(frozen=True)
class Entities:
    """What the placeholders of forms stand for, in one split; those of another split are others."""

    names: Sequence[str]
    words: Sequence[str]
    numbers: Sequence[str]

    @classmethod
    def of(cls, documents: Sequence[str], split: Split) -> "Entities":
        """The names and words of documents that belong to a split.

        A name has a capital letter within a sentence, and seldom none. If there are few names, words stand in.

        Raises:
            UserError: if there are too few words.
        """
        text = "\n".join(documents)
        counts = Counter(_WORD.findall(text))
        names = {
            name for name in _NAME.findall(text) if counts[name] > max(1, 4 * counts[name.lower()])
        }
        words = {
            word
            for word, count in counts.items()
            if word.islower()
            and 4 <= len(word) <= 9
            and count > 1
            and word.capitalize() not in names
        }
        words_of_split = _of_split(words, split)
        if len(words_of_split) < FEWEST_WORDS:
            raise UserError(
                f"the text has {len(words_of_split)} words in lower-case letters to ask for in the {split} split, and "
                f"{FEWEST_WORDS} are needed: give more text with --text, in a script that has such letters."
            )
        names_of_split = _of_split(names, split)
        # Both splits have names, or none: a test would ask about another kind of thing than the training.
        if min(len(_of_split(names, "train")), len(_of_split(names, "test"))) < FEWEST_WORDS:
            names_of_split = [word.capitalize() for word in words_of_split]
        return cls(names_of_split, words_of_split, _of_split(map(str, NUMBERS), split))


def _of_split(entities: Iterable[str], split: Split) -> list[str]:
    return sorted(entity for entity in entities if split_of(entity) == split)


class Prose:
    """Documents as one row of token ids.

    Two line feeds are between them, and no control token: in a chat that would end a message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]):
        texts = [f"{document}\n\n" for document in documents]
        encoded = encode_text(tokenizer, texts, continues=True)
        self.ids = np.fromiter(chain.from_iterable(encoded), np.int64)
        self._tokenizer = tokenizer

    @cached_property
    def ends(self) -> np.ndarray:
        """The indices of the last tokens of sentences, (sentences,) int64; in text with few of them also of lines.

        Raises:
            UserError: if the text has few of both.
        """
        is_end = Landmarks(self._tokenizer, "sentence")(self.ids)
        fewest = len(self.ids) // MOST_BETWEEN_ENDS
        if is_end.sum() < fewest:
            is_end |= Landmarks(self._tokenizer, "line")(self.ids)
        if is_end.sum() < fewest:
            raise UserError(
                f"the text has {is_end.sum():,} ends of sentences and lines in {len(self.ids):,} tokens, and facts go "
                "behind such ends: give text with more of them."
            )
        return np.flatnonzero(is_end)

    def excerpt(self, generator: np.random.Generator, length: int) -> list[int]:
        """A random excerpt of `length` tokens."""
        start = int(generator.integers(len(self.ids) - length + 1))
        return self.ids[start : start + length].tolist()

    def excerpts(self, count: int, length: int) -> list[list[int]]:
        """Excerpts of `length` tokens at equal distances: `count`, or as many as do not overlap."""
        count = min(count, len(self.ids) // length)
        starts = np.linspace(0, len(self.ids) - length, count).astype(int)
        return [self.ids[start : start + length].tolist() for start in starts]


def split_apart(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """The items to train on, and those to measure on, every tenth."""
    train = [item for number, item in enumerate(items, start=1) if number % HELD_OUT_EVERY]
    return train, [*items[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]


class UserText:
    """What a user gives as text, cut into documents to train on and documents to measure on.

    Attributes:
        train: the prose to train on.
        held_out: the prose to measure on.
        entities: by split, `train` and `test`, what look-ups are about.
        sha256: of the documents.
        is_cut: whether the corpora have more text, which is not read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, corpora: Sequence[str]):
        """Read the corpora, as `read_corpus` takes them.

        Raises:
            UserError: if a corpus cannot be read, or has too few words.
        """
        documents, self.is_cut = _documents(corpora)
        self._documents = len(documents)
        train, held_out = split_apart(documents)
        self.train = Prose(tokenizer, train)
        self.held_out = Prose(tokenizer, held_out)
        self.sha256 = sha256_of("\0".join(documents).encode())
        self.entities = {split: Entities.of(documents, split) for split in ("train", "test")}

    def check_holds(self, longest: int) -> None:
        """Refuse a text without an excerpt of `longest` tokens to train on, and one to measure on.

        Raises:
            UserError: if there is none.
        """
        for name, prose in (("to train on", self.train), ("held out", self.held_out)):
            if len(prose.ids) <= longest:
                raise UserError(
                    f"the text has {len(prose.ids):,} tokens {name}, and needs more than {longest:,} (every tenth of "
                    f"its {self._documents} documents is held out): give more text with --text, or smaller lengths in "
                    "tests.texts and mixture.longest."
                )


def _documents(corpora: Sequence[str]) -> tuple[list[str], bool]:
    """The first documents of the corpora, and whether there are more.

    Each once, so that none is both trained on and measured on.
    """
    documents: dict[str, None] = {}
    characters = 0
    for text in chain.from_iterable(map(read_corpus, corpora)):
        if characters > MOST_CHARACTERS:
            return [*documents], True
        documents[text] = None
        characters += len(text)
    return [*documents], False
