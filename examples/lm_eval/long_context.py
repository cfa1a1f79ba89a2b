"""Two recall tasks in long texts, after RULER (Hsieh et al., 2024): a needle, and variable tracking.

Both hide short sentences in ordinary text, the haystack, and ask the same question whatever its length. A prompt of
`needle`, whose completion is " 4821", and one of `variable_tracking`, whose completion is " KD RS TB":

    ... It was the best of times. The number of the tiger is 4821. _PAUSE_ It was the worst of times. _PAUSE_ ...
    Q: What is the number of the tiger? _PAUSE_

    ... VAR KD = 5108. _PAUSE_ ... VAR RS = VAR KD. _PAUSE_ ... VAR TB = VAR RS. _PAUSE_ ...
    Q: Which variables have the value 5108? _PAUSE_

Every sentence ends in a meta-token, so none points at the answer. There are three further needles, and a second chain
of variables.
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase

import numpy as np
from transformers import PreTrainedTokenizerBase

from metatokens.data.prompts import SegmentEncoder
from metatokens.errors import UserError
from metatokens.recipe import Split
from metatokens.tasks.content import stable_hash
from metatokens.tasks.example import Example, encode_example
from metatokens.tasks.inventory import INVENTORY

LONG_CONTEXT_TASKS = ("needle", "variable_tracking")
NEEDLES = 4
CHAINS, HOPS = 2, 2
TRAIN_SHARE = 0.8  # share of the haystack's sentences; the rest are for tests

_SENTENCE = re.compile(r"\S.{15,}?[.!?][\"')]*(?=\s)", re.DOTALL)
_SHORTEST = 10  # tokens of the shortest sentence to look for
_OBJECTS = [item for items in INVENTORY.values() for item in items]
_NAMES = [first + second for first in ascii_uppercase for second in ascii_uppercase]


class LongContextData:
    """The examples of one task, each a function of its seed, index, split and length.

    Args:
        task: one of LONG_CONTEXT_TASKS.
        tokenizer: measures lengths and gives the ids.
        documents: the haystack; its first sentences are for training, its last for tests.
        seed: 0 or more; each seed gives other examples.

    Raises:
        UserError: if the task is unknown, or the haystack is too short for tests.
    """

    def __init__(
        self,
        task: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        documents: Sequence[str],
        seed: int = 0,
    ):
        if task not in LONG_CONTEXT_TASKS:
            raise UserError(
                f"unknown task {task!r}; the tasks are {', '.join(LONG_CONTEXT_TASKS)}."
            )
        self._task, self._seed, self._encoder = task, seed, SegmentEncoder(tokenizer)
        sentences = [
            " ".join(sentence.split()) for text in documents for sentence in _SENTENCE.findall(text)
        ]
        start = int(len(sentences) * TRAIN_SHARE)
        self._sentences: dict[Split, list[str]] = {
            "train": sentences[:start],
            "test": sentences[start:],
        }
        self._sizes = {
            split: [self._size_of(sentence) for sentence in of_split]
            for split, of_split in self._sentences.items()
        }

    def _size_of(self, sentence: str) -> int:
        """The tokens that a sentence and its separator take."""
        return len(self._encoder.encode_text(f" {sentence}", True)) + 1

    def example(self, index: int, length: int, split: Split) -> Example:
        """Draw an example of a split, with as many sentences as fit into `length` tokens.

        Raises:
            UserError: if the length is too short for the question, or the haystack for the length.
        """
        generator = np.random.default_rng(
            [self._seed, index, stable_hash(f"{self._task} {split} {length}")]
        )
        hidden, question, answer = {"needle": _needles, "variable_tracking": _chains}[self._task](
            generator
        )
        asked = f"\nQ: {question}"
        room = length - sum(map(self._size_of, [*hidden, asked]))
        sentences, sizes = self._sentences[split], self._sizes[split]
        if room < 0 or sum(sizes) < room:
            raise UserError(
                f"{self._task} cannot be asked in {length:,} tokens: its question and what is hidden need "
                f"{length - room:,}, and there are {len(sentences):,} sentences to {split} on."
            )
        start, lines = int(generator.integers(len(sentences))), []
        for i in [*range(start, len(sentences)), *range(start)]:
            if sizes[i] <= room:
                lines.append(sentences[i])
                room -= sizes[i]
            elif room < _SHORTEST:
                break
        indices = generator.integers(len(lines) + 1, size=len(hidden)).tolist()
        # Last first, so that indices stay valid.
        for index_of_line, sentence in zip(
            sorted(indices, reverse=True), reversed(hidden), strict=True
        ):
            lines.insert(index_of_line, sentence)
        first, *others = lines
        segments = [first, *(f" {line}" for line in others), asked, ""]
        return encode_example(
            self._encoder,
            segments,
            answer,
            task=self._task,
            seed=self._seed,
            index=index,
            split=split,
        )


def _needles(generator: np.random.Generator) -> tuple[list[str], str, str]:
    objects = [_OBJECTS[i] for i in generator.permutation(len(_OBJECTS))[:NEEDLES]]
    numbers = generator.permutation(np.arange(1_000, 10_000))[:NEEDLES].tolist()
    asked = int(generator.integers(NEEDLES))
    hidden = [
        f"The number of the {name} is {number}."
        for name, number in zip(objects, numbers, strict=True)
    ]
    return hidden, f"What is the number of the {objects[asked]}?", f" {numbers[asked]}"


def _chains(generator: np.random.Generator) -> tuple[list[str], str, str]:
    names = [_NAMES[i] for i in generator.permutation(len(_NAMES))[: CHAINS * (HOPS + 1)]]
    chains = [names[start : start + HOPS + 1] for start in range(0, len(names), HOPS + 1)]
    values = generator.permutation(np.arange(1_000, 10_000))[:CHAINS].tolist()
    # Shuffle the chains' turns; each chain's own statements keep their order.
    turns = generator.permutation(np.repeat(np.arange(CHAINS), HOPS + 1)).tolist()
    hidden, done = [], [0] * CHAINS
    for chain in turns:
        step, variables = done[chain], chains[chain]
        value = f"VAR {variables[step - 1]}" if step else values[chain]
        hidden.append(f"VAR {variables[step]} = {value}.")
        done[chain] += 1
    asked = int(generator.integers(CHAINS))
    answer = "".join(f" {name}" for name in chains[asked])
    return hidden, f"Which variables have the value {values[asked]}?", answer
