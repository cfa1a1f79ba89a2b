"""The texts of the experiment: prose, and prose with facts that are asked for at its end."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import read_corpus
from metatokens.data.insertion import IGNORED_LABEL
from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import encode_text, meta_token_id
from metatokens.evaluation.accuracy import TEST_SEED
from metatokens.tasks import TASKS
from metatokens.tasks.content import split_of
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.inventory import INVENTORY

CITIES = (
    "Oslo Paris London Rome Madrid Berlin Vienna Prague Dublin Athens Cairo Delhi Tokyo Lima Boston Chicago Denver "
    "Dallas Houston Seattle Austin Miami Atlanta Detroit Toronto Sydney Moscow Warsaw Budapest Lisbon Brussels "
    "Amsterdam Geneva Milan Naples Venice Florence Istanbul Mumbai"
)
WORDS = [word for words in INVENTORY.values() for word in words]
UNSEEN_CITIES = (
    "Lyon Turin Porto Seville Valencia Bilbao Nice Lille Hamburg Munich Cologne Dresden Leipzig Zurich Basel Krakow "
    "Riga Tallinn Helsinki Stockholm Copenhagen Bergen Glasgow Leeds Bristol Cardiff Belfast Nairobi Lagos Havana "
    "Bogota Quito Santiago Manila Jakarta Bangkok Seoul Beijing Shanghai"
)
ANSWER = " {}"
FACT, QUESTION = " The code word for {} is {}.", "\nThe code word for {} is"
# Cities, fact and question: of the training, and in three respects unlike it.
FORMS = {
    "facts": (CITIES, FACT, QUESTION),
    "facts_cities": (UNSEEN_CITIES, FACT, QUESTION),
    "facts_wording": (
        CITIES,
        " In {} the old name of the harbour was {}.",
        "\nIn {} the old name of the harbour was",
    ),
    "facts_question": (CITIES, FACT, "\nQuestion: What is the code word for {}?\nAnswer:"),
}
FACTS = 8  # in a text
TASK_LENGTH = 256  # tokens of the longest prompts of the four tasks

# Ids of a text; of each question and its answer.
Asked = tuple[list[int], list[tuple[list[int], list[int]]]]


class Texts:
    """Corpora, as `metatokens tokenize --corpus` takes them; lines that end within a paragraph are joined."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, specs: Sequence[str]):
        documents = chain.from_iterable(map(read_corpus, specs))
        self.tokenizer, self.documents = (
            tokenizer,
            [re.sub(r"(?<!\n)\n(?!\n)", " ", one.strip()) for one in documents],
        )
        encoded = encode_text(tokenizer, self.documents)
        self.ids = np.array(
            [*chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in encoded)]
        )
        self.ends = np.flatnonzero(Landmarks(tokenizer, "sentence")(self.ids))

    def prose(self, generator: np.random.Generator, length: int) -> list[int]:
        """A random excerpt of `length` tokens."""
        start = int(generator.integers(len(self.ids) - length))
        return self.ids[start : start + length].tolist()

    def excerpts(self, count: int, length: int) -> list[list[int]]:
        """Excerpts of `length` tokens at equal distances."""
        starts = np.linspace(0, len(self.ids) - length, count).astype(int)
        return [self.ids[start : start + length].tolist() for start in starts]

    def asked(
        self,
        generator: np.random.Generator,
        length: int,
        split: str,
        beyond: int,
        count: int = FACTS,
        form: str = "facts",
    ) -> Asked:
        """A text of `length` tokens with facts of a split after sentences, `beyond` tokens or more before its end."""
        pairs, (cities, fact, question) = [], FORMS[form]
        for city in generator.permutation(cities.split())[:count]:
            words = generator.permutation(WORDS)
            pairs.append(
                (city, next(word for word in words if split_of(f"{city} {word}") == split))
            )
        *facts, end = encode_text(self.tokenizer, [*(fact.format(*pair) for pair in pairs), "\n"])
        size = length - sum(map(len, facts)) - len(end)
        start = int(generator.choice(self.ends[self.ends < len(self.ids) - size - 1])) + 1
        places = self.ends[(self.ends >= start) & (self.ends < start + size - beyond)] - start + 1
        cuts = [0, *sorted(generator.choice([0, *places], count).tolist()), size]
        pieces = [self.ids[start + a : start + b].tolist() for a, b in pairwise(cuts)]
        text = [*chain.from_iterable(chain.from_iterable(zip(pieces, [*facts, end], strict=True)))]
        order = generator.permutation(count)
        questions = encode_text(self.tokenizer, [question.format(pairs[i][0]) for i in order])
        answers = encode_text(self.tokenizer, [ANSWER.format(pairs[i][1]) for i in order])
        return text, [*zip(questions, answers, strict=True)]

    def tests(self, count: int, length: int, beyond: int, form: str = "facts") -> list[Asked]:
        """The test texts of a length, with `count` questions or a few more."""
        seeds = ([TEST_SEED, length, number] for number in range(-(-count // FACTS)))
        return [
            self.asked(np.random.default_rng(seed), length, "test", beyond, form=form)
            for seed in seeds
        ]

    def task(self, name: str, seed: int) -> TaskData:
        """A task's prompts with a meta-token after each line."""
        return TaskData(
            name,
            tokenizer=self.tokenizer,
            condition="landmark",
            seed=seed,
            documents=self.documents,
        )


@dataclass
class Mixture:
    """What is trained on: of eight batches four are prose, three are facts and one is a task.

    Before that, in the first half of the steps, seven of eight are facts and one is prose: one fact in an eighth of the
    length at first, then two in a quarter, four in a half and eight in all of it. Or all are prose.
    """

    texts: Texts
    # Puts an arm's meta-tokens into ids; with `has_own`, a task's prompt has its own.
    put: Callable[..., list[int]]
    steps: int
    batch: int
    length: int  # tokens of a text
    beyond: int  # as in `Texts.asked`
    seed: int
    prose: bool = False  # all batches are

    def __len__(self) -> int:
        return self.steps * self.batch

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator, step = np.random.default_rng([self.seed, index]), index // self.batch
        is_early = 2 * step < self.steps
        if self.prose or step % (8 if is_early else 2) == 0:
            ids = self.put(self.texts.prose(generator, self.length))
            return _item(ids, range(1, len(ids)))
        if step % 8 == 7 and not is_early:
            example = self._tasks[TASKS[step // 8 % len(TASKS)]].train(index, TASK_LENGTH)
            ids = self.put(example.input_ids, has_own=True)
            return _item(
                ids, range(len(ids) - len(example.input_ids) + example.answer_start, len(ids))
            )
        count = 2 ** (8 * step // self.steps) if is_early else FACTS
        length = self.length * count // FACTS
        beyond = min(self.beyond, length // 2 + 8)
        text, questions = self.texts.asked(generator, length, "train", beyond, count)
        scored: list[int] = []
        for question, answer in questions:
            text = text + question + answer
            scored += range(len(text) - len(answer), len(text))
        ids = self.put(text)
        return _item(
            ids, np.flatnonzero(np.array(ids) != meta_token_id(self.texts.tokenizer))[scored]
        )

    @cached_property
    def _tasks(self) -> dict[str, Any]:
        return {name: self.texts.task(name, self.seed) for name in TASKS}


def _item(ids: list[int], scored: Iterable[int]) -> dict[str, list[int]]:
    labels = [IGNORED_LABEL] * len(ids)
    for place in scored:
        labels[place] = ids[place]
    return {"input_ids": ids, "labels": labels}
