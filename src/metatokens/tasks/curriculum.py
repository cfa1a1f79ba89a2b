"""Draw the examples of a task: for training up to a length, for testing by length, or by phase (paper, Appendix D).

An example is a function of its task, condition, seed, index and purpose (training or testing, with the length or phase
asked for), the tokenizer, and for copying the documents. So any process can make any example at any time. `paper`,
`decoy` and `landmark` show the same content at an index, except where it fits the length or the condition in only one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import cast, get_args

import numpy as np
from numpy.random import Generator
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import read_corpus
from metatokens.data.prompts import SegmentEncoder
from metatokens.data.tokenizer import text_vocab_size
from metatokens.errors import UserError
from metatokens.recipe import Condition, Facts, Split
from metatokens.tasks import TASKS, copying, module_of
from metatokens.tasks.content import Content, stable_hash
from metatokens.tasks.example import Example, encode_example
from metatokens.tasks.inventory import INVENTORY
from metatokens.tasks.phases import FACTS, Sizes, phase_of_length, sizes_of

CONDITIONS: tuple[Condition, ...] = get_args(Condition)
COPIED_DOCUMENTS = 500  # at most
# One content in ten is for testing, and one in a hundred may have the length: then all attempts fail with probability
# (1 - 1/1000)^10000 = e^-10.
ATTEMPTS = 10_000


class TaskData:
    """The examples of one task in one condition, made on demand.

    Args:
        task: one of TASKS.
        tokenizer: measures lengths and gives the ids.
        condition: one of CONDITIONS.
        seed: 0 or more; another seed gives other examples.
        documents: for copying, the texts that excerpts are taken from.

    Raises:
        UserError: if there is no such task or condition, the condition is not for the task, the tokenizer has no
            meta-token, or copying gets fewer than three documents of at least nine words.
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
        if task not in TASKS or condition not in CONDITIONS:
            raise UserError(
                f"no task {task!r} in condition {condition!r}; the tasks are {', '.join(TASKS)}, and the conditions "
                f"{', '.join(CONDITIONS)}."
            )
        self._is_facts = condition in get_args(Facts)
        if self._is_facts and task != "list_recall":
            raise UserError(
                f"condition {condition} is for list_recall, whose lists are the facts, not for {task}."
            )
        self.encoder = SegmentEncoder(tokenizer)
        self._task = task
        self._condition = cast(Condition, condition)
        self._seed = seed
        self._draw: Callable[[Generator, int, int, int, Split], Content | None]
        self._draw = copying.Excerpts(documents).draw if task == "copying" else module_of(task).draw

    def train(self, index: int, train_length: int, sizes: Sizes | None = None) -> Example:
        """Draw the index-th training example, with a prompt of at most `train_length` tokens.

        Args:
            index: 0 or more.
            train_length: tokens.
            sizes: how many lists and items; by default those of a phase, drawn uniformly from phase 1 to the length's.
                The conditions `facts_K` have sizes of their own.

        Raises:
            UserError: if no such prompt was found.
        """
        generator = self.generator(index, f"train {train_length}")
        phase = None
        if sizes is None:
            phase = int(generator.integers(1, phase_of_length(train_length) + 1))
            sizes = FACTS if self._is_facts else sizes_of(self._task, phase)
        return self._find(generator, index, phase, sizes, "train", up_to=train_length)

    def test(self, index: int, length: int) -> Example:
        """Draw the index-th test example of bin `length`: its prompt has (length / 2, length] tokens.

        Raises:
            UserError: if no such prompt was found.
        """
        generator = self.generator(index, f"test {length}")
        phase = phase_of_length(length)
        sizes = self._sizes(phase, length)
        return self._find(generator, index, phase, sizes, "test", above=length // 2, up_to=length)

    def sample(self, index: int, phase: int, split: Split) -> Example:
        """Draw the index-th example of a phase, 1 to 5, and split, of any length.

        Raises:
            UserError: if no such prompt was found.
        """
        generator = self.generator(index, f"phase {phase} {split}")
        return self._find(generator, index, phase, self._sizes(phase), split)

    def generator(self, index: int, purpose: str) -> Generator:
        """The source of randomness of an example, the same in all conditions."""
        return np.random.default_rng([self._seed, index, stable_hash(f"{self._task} {purpose}")])

    @cached_property
    def text_entries(self) -> np.ndarray:
        """The ids of the vocabulary that a text may have."""
        control = [*self.encoder.tokenizer.all_special_ids, self.encoder.meta_token_id]
        return np.setdiff1d(np.arange(text_vocab_size(self.encoder.tokenizer)), control)

    def _sizes(self, phase: int, length: int = 0) -> Sizes:
        if self._is_facts:
            return FACTS
        sizes = sizes_of(self._task, phase, length)
        if self._condition == "long_prompt":  # asks about as much as in phase 1
            [asked] = sizes_of(self._task, 1).lengths
            sizes = replace(sizes, asked=asked)
        return sizes

    def _find(
        self,
        generator: Generator,
        index: int,
        phase: int | None,
        sizes: Sizes,
        split: Split,
        *,
        above: int = 0,
        up_to: float = math.inf,
    ) -> Example:
        """Draw contents until one is in the split and its prompt has (above, up_to] tokens."""
        for _ in range(ATTEMPTS):
            m, n, asked = sizes.draw(generator)
            if m * n > up_to:  # a word is one token or more
                continue
            content = self._draw(generator, m, n, asked, split)
            if content is None or not content.is_for(self._condition):
                continue
            example = encode_example(
                self.encoder,
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
        raise UserError(
            f"no {self._task} prompt with {above + 1:,} to {up_to:,} tokens was found in {ATTEMPTS:,} attempts; try "
            "another length or tokenizer, or longer documents."
        )


def documents_for(task: str, corpus: str) -> list[str]:
    """The documents that `copying` takes its excerpts from, the first ones of a corpus; none for the other tasks."""
    if task != "copying":
        return []
    return list(islice(read_corpus(corpus), COPIED_DOCUMENTS))


def task_texts() -> list[str]:
    """Texts with every item, category and question, for a tokenizer to be trained on in addition to a corpus."""
    lists = [f"{category}: {' '.join(items)}" for category, items in INVENTORY.items()]
    bits = f"Bits: {' '.join(map(str, range(26)))}"  # the places of phases 1 to 3
    questions = chain.from_iterable(module_of(task).QUESTIONS for task in TASKS)
    return [*lists, bits, *questions]
