"""Which examples there are: phases, lengths, conditions, and the split (paper, Table 6).

An example is a function of its task, condition, seed, index, purpose (train or test, and the length or phase
asked for), the tokenizer, and for copying the documents; nothing else, so any process can make any of them at
any time. The conditions of one index show the same content, unless it fits the length, or the condition, in the one
and not in the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import islice
from typing import Literal, cast, get_args

import numpy as np
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import read_corpus
from metatokens.data.tokenizer import text_vocab_size
from metatokens.errors import UserError
from metatokens.tasks import TASKS, copying
from metatokens.tasks.encoding import SegmentEncoder
from metatokens.tasks.example import CONDITIONS, Condition, Content, Example, Split, encode_example, stable_hash
from metatokens.tasks.inventory import INVENTORY
from metatokens.tasks.store import StoredExample

_TASKS = {task: import_module(f"metatokens.tasks.{task}") for task in TASKS}
COPIED_DOCUMENTS = 500  # at most

Drawn = Literal["train", "validation"]  # the splits that are for training
_ATTEMPTS = 10_000  # finds a test prompt (one in ten) of a length that one in a hundred has, but for odds of e^-10


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many lists a prompt has, and how many items each list has."""

    lists: tuple[int, int]
    """The range of m, both ends included."""
    lengths: tuple[tuple[int, int], ...]
    """Ranges of n, equally likely, both ends included."""
    asked: tuple[int, int] | None = None
    """The range of how much is asked about, at most n: a list's items, the bits or words up to a marker; default: n."""

    def __str__(self) -> str:
        lists, *lengths = (" to ".join(map(str, dict.fromkeys(ends))) for ends in (self.lists, *self.lengths))
        return f"{lists} lists of {' or '.join(lengths)} items"

    def draw(self, generator: np.random.Generator) -> tuple[int, int, int]:
        """Draw m, n, and how much of n is asked about."""
        low, high = self.lengths[generator.integers(len(self.lengths))]
        m_low, m_high = self.lists
        m, n = int(generator.integers(m_low, m_high + 1)), int(generator.integers(low, high + 1))
        return m, n, n if self.asked is None else min(n, int(generator.integers(self.asked[0], self.asked[1] + 1)))


PHASES = {
    1: Sizes((3, 8), ((3, 10),)),
    2: Sizes((8, 12), ((3, 8), (9, 16))),
    3: Sizes((12, 19), ((3, 8), (9, 16), (17, 25))),
    4: Sizes((15, 20), ((40, 60),)),
    5: Sizes((15, 20), ((90, 110),)),
}
# Of parity, whose marked bits decide the split: with 10 at most, as in the paper, few would be left to test.
_PARITY_PHASES = PHASES | {1: Sizes((3, 8), ((3, 16),))}

_PHASE_OF_LENGTH = {128: 1, 256: 2, 512: 3, 1024: 4, 2048: 5}


def phase_of_length(length: int) -> int:
    """The hardest phase at a prompt length in tokens: that of the next listed length, 5 beyond 2,048."""
    return next((phase for listed, phase in _PHASE_OF_LENGTH.items() if length <= listed), max(PHASES))


class TaskData:
    """The examples of one task in one condition, made on demand.

    Args:
        task: one of TASKS.
        tokenizer: measures lengths and gives the ids.
        condition: one of CONDITIONS.
        seed: 0 or more; another seed, other examples.
        documents: for copying, the texts that it takes its excerpts from.

    Raises:
        UserError: if the task or the condition is unknown, the seed negative, or no document long enough.
    """

    def __init__(
        self,
        task: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        condition: str = "paper",
        seed: int = 0,
        documents: Sequence[str] = (),
    ):
        if task not in TASKS:
            raise UserError(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}.")
        if condition not in CONDITIONS:
            raise UserError(f"unknown condition {condition!r}; the conditions are {', '.join(CONDITIONS)}.")
        if seed < 0:
            raise UserError(f"the seed is {seed}; it must be 0 or more.")
        self._task, self._condition, self._seed = task, cast(Condition, condition), seed
        self._encoder = SegmentEncoder(tokenizer)
        self._phases = _PARITY_PHASES if task == "parity" else PHASES
        self._vocabulary_size = text_vocab_size(tokenizer)
        self._special = {*tokenizer.all_special_ids, self._encoder.meta_token_id}
        self._draw: Callable[[np.random.Generator, int, int, int, Split], Content | None]
        self._longest_context = math.inf
        if task == "copying":
            excerpts = copying.Excerpts(documents)
            self._draw, self._longest_context = excerpts.draw, excerpts.longest
        else:
            self._draw = _TASKS[task].draw

    def train(self, index: int, train_length: int, sizes: Sizes | None = None, split: Drawn = "train") -> Example:
        """The index-th training example with a prompt of at most `train_length` tokens.

        Args:
            index: 0 or more.
            train_length: tokens.
            sizes: how many lists and items; by default a phase drawn uniformly from those up to the length's.
            split: `validation` for prompts that are neither trained on nor tested.

        Raises:
            UserError: if no such prompt was found.
        """
        generator = self._generator(index, f"{split} {train_length}")
        if sizes is not None:
            return self._find(generator, index, None, sizes, split, 0, train_length)
        phase = int(generator.integers(1, phase_of_length(train_length) + 1))
        return self._find(generator, index, phase, self._phases[phase], split, 0, train_length)

    @cached_property
    def _entries(self) -> np.ndarray:
        """Of the vocabulary, those that stand for text."""
        return np.setdiff1d(np.arange(self._vocabulary_size), [*self._special])

    def drill(self, index: int, train_length: int, sizes: Sizes, split: Drawn = "train") -> StoredExample:
        """The index-th drill: a prompt of copying with random entries of the vocabulary in place of the text.

        Question and markers are those of the condition `paper`, and whichever the task, it is copying that is asked
        for: every task needs to find a bracket, or a token that stood there before. Arguments are those of `train`.

        Raises:
            UserError: if no prompt is so short.
        """
        generator = self._generator(index, f"drill {split} {train_length}")
        question, marker = self._encoder.encode_text(f"\n{copying.QUESTION}"), self._encoder.meta_token_id
        beginning = self._encoder.beginning
        most = train_length - len(beginning) - len(question) - 3  # markers
        for _ in range(_ATTEMPTS):
            m, n, _ = sizes.draw(generator)
            if m * n <= most:
                ids, start = copying.draw_drill(generator, self._entries, m, n)
                bracketed = ids[start : start + n]
                prompt = [*beginning, *ids[:start], marker, *bracketed, marker, *ids[start + n :], *question, marker]
                whole = np.array([*prompt, *bracketed, self._encoder.eos_token_id], dtype=np.int32)
                return StoredExample(whole, len(prompt))
        raise UserError(f"no drill of {sizes} has at most {train_length} tokens; try another length.")

    def test(self, index: int, length: int) -> Example:
        """The index-th test example of bin `length`: its prompt has (length / 2, length] tokens.

        Raises:
            UserError: if no such prompt was found.
        """
        generator = self._generator(index, f"test {length}")
        phase = phase_of_length(length)
        return self._find(generator, index, phase, self._sizes(phase, length), "test", length // 2, length)

    def _sizes(self, phase: int, length: int = 0) -> Sizes:
        """A phase's, and of a bin beyond the last one, longer lists; in `long_prompt`, the question as in phase 1."""
        sizes, times = self._phases[phase], max(1, length // max(_PHASE_OF_LENGTH))
        if times > 1:
            sizes = replace(sizes, lengths=tuple((low * times, high * times) for low, high in sizes.lengths))
        if self._condition == "long_prompt":
            [asked] = self._phases[1].lengths
            sizes = replace(sizes, asked=asked)
        return sizes

    def sample(self, index: int, phase: int, split: Split) -> Example:
        """The index-th example of a phase and split, of whatever length.

        Raises:
            UserError: if the phase or the split is unknown, or no such prompt was found.
        """
        if phase not in PHASES:
            raise UserError(f"unknown phase {phase}; the phases are 1 to {max(PHASES)}.")
        if split not in get_args(Split):
            raise UserError(f"unknown split {split!r}; the splits are {', '.join(get_args(Split))}.")
        return self._find(self._generator(index, f"phase {phase} {split}"), index, phase, self._sizes(phase), split)

    def _generator(self, index: int, purpose: str) -> np.random.Generator:
        # The condition is left out, so that all conditions draw the same contents.
        return np.random.default_rng([self._seed, index, stable_hash(f"{self._task} {purpose}")])

    def _find(
        self,
        generator: np.random.Generator,
        index: int,
        phase: int | None,
        sizes: Sizes,
        split: Split,
        above: int = 0,
        up_to: float = math.inf,
    ) -> Example:
        """Draw contents until one is in the split and its prompt has (above, up_to] tokens."""
        for _ in range(_ATTEMPTS):
            m, n, asked = sizes.draw(generator)
            if m * n > min(up_to, self._longest_context):  # a word is one token or more
                continue
            content = self._draw(generator, m, n, asked, split)
            if content is None or not content.is_for(self._condition):
                continue
            example = encode_example(
                self._encoder,
                content.segments(self._condition),
                content.answer,
                task=self._task,
                phase=phase,
                seed=self._seed,
                index=index,
                split=split,
                condition=self._condition,
            )
            if above < example.n_tokens <= up_to:
                return example
        what = f"of phase {phase}" if phase else f"of {sizes}"
        length = f" and {above + 1:,} to {up_to:,} tokens" if up_to < math.inf else ""
        documents = f", documents of {self._longest_context:,} words" if self._task == "copying" else ""
        raise UserError(
            f"no {self._task} prompt {what}{length} was found in {_ATTEMPTS:,} attempts "
            f"(vocabulary of {self._vocabulary_size:,} entries{documents}); try another length or tokenizer."
        )


def documents_for(task: str, corpus: str) -> list[str]:
    """What the task `copying` copies from, the first documents of a corpus; nothing for the other tasks."""
    return list(islice(read_corpus(corpus), COPIED_DOCUMENTS)) if task == "copying" else []


def task_texts() -> list[str]:
    """Texts that show every item, category and question, for a tokenizer to be trained on beside a corpus."""
    return [
        *(f"{category}: {' '.join(items)}" for category, items in INVENTORY.items()),
        f"Bits: {' '.join(map(str, range(26)))}",  # the places of phases 1 to 3
        *(question for task in _TASKS.values() for question in task.QUESTIONS),
    ]


def chance(task: str) -> float | None:
    """Exact match of blind guessing among the answers a question allows; None where their number varies."""
    return _TASKS[task].CHANCE
