r"""Draw prompts of recall suites into one file of JSON lines: RULER's needles, BABILong, and this package's tasks.

    python -m results.shrink.suites --tokenizer .real/smollm2 --text emma.txt.gz dracula.txt.gz \
        --counts 512:16,2048:10,4096:6 --out runs/suites/prompts.jsonl

**RULER** (github.com/NVIDIA/RULER, its templates and needles word by word). Keys are an adjective and a noun with a
hyphen, as there, but drawn from lists of this package. The haystack is RULER's noise, or sentences of held-out books in
place of essays: a stretch that begins anywhere, where RULER's begins at the first essay. An output is as long as the
references need, where RULER's has 128 tokens.

**BABILong** (github.com/booydar/babilong, its instructions, examples and template word by word). The facts are bAbI's
sentences of tasks 1 and 2, drawn here by bAbI's rules, in order among sentences of held-out books that name none of
bAbI's persons and things.

**The package's tasks**: test prompts that need no marker, without meta-tokens, and with `A:` after the question.
"""

import argparse
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import read_corpus
from metatokens.data.tokenizer import beginning_of, encode_text, load_tokenizer
from metatokens.errors import UserError
from metatokens.evaluation.accuracy import TEST_SEED
from metatokens.files import write_whole
from metatokens.records import split_at
from metatokens.tasks import TASKS
from metatokens.tasks.content import OPENING, stable_hash
from metatokens.tasks.curriculum import TaskData
from metatokens.tasks.inventory import INVENTORY
from results.shrink.prompts import ROOMS, Prompt, Suite

# --- RULER

TEMPLATE = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n{context}"
)
QUESTION = "\nWhat are all the special magic numbers for {query} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic numbers for {query} mentioned in the provided text are"
# RULER's own changes of the texts above if a single value is asked for, one after another.
OF_ONE = (("Some", "A"), ("are all", "is"), ("are", "is"), ("numbers", "number"))
NEEDLE = "One of the special magic numbers for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = np.linspace(0, 100, num=40).round().astype(int)  # of needles among sentences, in %
ADJECTIVES = (
    "ancient bitter brave bright calm careful clever cold curious dusty eager early faint famous fancy fierce gentle "
    "grand happy heavy hollow honest humble idle kind lazy little lonely lucky mellow modest narrow nimble noble odd "
    "pale patient plain polite proud quick quiet rapid rare rough rusty scarce secret sharp shy silent simple sleepy "
    "slow smooth soft solid steady strange stubborn sturdy subtle sudden swift tender thick tidy tiny tired tough vast "
    "warm weary wicked wide wild wise witty young zealous"
)
NOUNS = [noun for nouns in INVENTORY.values() for noun in nouns]


@dataclass(frozen=True)
class Needles:
    """A needle task of RULER: how many keys a text has, how many values each has, and how many keys are asked for."""

    is_noise: bool = False
    keys: int = 1
    values: int = 1
    asked: int = 1


NEEDLE_TASKS = {
    "niah_single_1": Needles(is_noise=True),
    "niah_single_2": Needles(),
    "niah_multikey_1": Needles(keys=4),
    "niah_multivalue": Needles(values=4),
    "niah_multiquery": Needles(keys=4, asked=4),
}
EXTRA = 16  # tokens of an output besides the references: words and commas between them

# --- BABILong

PERSONS = ("Mary", "John", "Daniel", "Sandra")
ITEMS = ("apple", "football", "milk")
MOVES = ("went to", "went back to", "journeyed to", "travelled to", "moved to")
TAKES = ("took", "got", "grabbed", "picked up")
DROPS = ("dropped", "left", "put down", "discarded")
THERE = ("", " there")
FACTS = {"qa1": range(2, 11, 2), "qa2": range(4, 15)}  # in a text
BABILONG_TOKENS = 20  # of an output
SHORTEST_SENTENCE = 10  # tokens
BABILONG_TEMPLATE = "{instruction}\n{examples}\n{post_prompt}\n<context>\n{context}\n</context>"
BABILONG_QUESTION = "\nQuestion: {question}"
BABILONG_PARTS = {
    "qa1": {
        "instruction": (
            "I will give you context with the facts about positions of different persons hidden in some random text "
            "and a question. You need to answer the question based only on the information from the facts. "
            "If a person was in different locations, use the latest location to answer the question."
        ),
        "examples": (
            "<example>\n"
            "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony. "
            "Where is Charlie?\n"
            "Answer: The most recent location of Charlie is balcony.\n"
            "</example>\n\n"
            "<example>\n"
            "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse "
            "travelled to balcony. Where is Alan?\n"
            "Answer: The most recent location of Alan is shop.\n"
            "</example>"
        ),
        "post_prompt": (
            "Always return your answer in the following format: "
            "The most recent location of \u2019person\u2019 is \u2019location\u2019. "
            "Do not write anything else after that. "
        ),
    },
    "qa2": {
        "instruction": (
            "I give you context with the facts about locations and actions of different persons "
            "hidden in some random text and a question."
            "You need to answer the question based only on the information from the facts.\n"
            "If a person got an item in the first location and travelled to the second location "
            "the item is also in the second location. "
            "If a person dropped an item in the first location and moved to the second location "
            "the item remains in the first location."
        ),
        "examples": (
            "<example>\n"
            "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. "
            "Where is the bottle?\n"
            "Answer: The bottle is in the balcony.\n"
            "</example>\n"
            "<example>\n"
            "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen. Where "
            "is the screw driver?\n"
            "Answer: The screw driver is in the kitchen.\n"
            "</example>"
        ),
        "post_prompt": (
            "Always return your answer in the following format: The \u2019item\u2019 is in \u2019location\u2019. "
            "Do not write anything else after that."
        ),
    },
}

# --- the rest

TOKENS_OF_A_SENTENCE = 8  # of a book, on average, at least
ANSWER_OF_TASK = "\nA:"
# After a full stop that ends no title; a closing quotation mark stays with its sentence.
_SENTENCE_END = re.compile(
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<=[.!?])([\"'\u201d\u2019)]*)\s+"
)
_NAMES = re.compile(rf"\b({'|'.join(PERSONS + ITEMS)})s?\b")


class Books:
    """Held-out books as sentences, with single spaces."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        self.texts = texts
        lines = (_SENTENCE_END.sub(r"\1\n", " ".join(text.split())) for text in texts)
        self.sentences = list(chain.from_iterable(line.split("\n") for line in lines))
        self._tokenizer = tokenizer

    @cached_property
    def background(self) -> list[str]:
        """The sentences that BABILong's facts are hidden among."""
        lengths = map(len, encode_text(self._tokenizer, self.sentences))
        return [
            sentence
            for sentence, length in zip(self.sentences, lengths, strict=True)
            if length >= SHORTEST_SENTENCE and not _NAMES.search(sentence)
        ]

    def parts(self) -> list[str]:
        """Each book in three parts of equal length: copying needs documents for three splits."""
        parts = []
        for text in self.texts:
            cuts = np.linspace(0, len(text), 4).astype(int).tolist()
            parts += [text[start:end] for start, end in pairwise(cuts)]
        return parts


@dataclass(frozen=True)
class Drawn:
    """A prompt whose context may still have any number of sentences."""

    context: Callable[[int], str]  # with so many sentences
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    new_tokens: int


class Suites:
    """Draws the prompts.

    Args:
        tokenizer: measures lengths.
        texts: held-out books.
        seed: of all draws.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], seed: int):
        self.tokenizer = tokenizer
        self.books = Books(texts, tokenizer)
        self.seed = seed

    def prompts(self, counts: dict[int, int]) -> Iterator[Prompt]:
        """So many prompts of each task, by length."""
        for length, number in counts.items():
            for task in NEEDLE_TASKS:
                for index in range(number):
                    drawn = self.needles(NEEDLE_TASKS[task], self._generator(task, length, index))
                    yield self._longest("ruler", task, length, drawn)
            for task in BABILONG_PARTS:
                for index in range(number):
                    drawn = self.babilong(task, self._generator(task, length, index))
                    yield self._longest("babilong", task, length, drawn)
            for task in TASKS:
                try:
                    yield from islice(self.of_package(task, length), number)
                except UserError as error:  # few tokenizers have prompts of all lengths
                    print(f"left out, {task} of {length} tokens: {error}", file=sys.stderr)

    def _generator(self, task: str, length: int, index: int) -> Generator:
        return np.random.default_rng([self.seed, stable_hash(task), length, index])

    def _longest(self, suite: Suite, task: str, length: int, drawn: Drawn) -> Prompt:
        """The prompt with the most sentences that leave room for its output."""
        room = length - drawn.new_tokens

        def tokens(sentences: int) -> int:
            return self._tokens(drawn.context(sentences), drawn.question + drawn.answer_prefix)

        enough_sentences = length // TOKENS_OF_A_SENTENCE
        sentences = bisect_right(range(enough_sentences), room, key=tokens) - 1
        if sentences < 1:
            raise UserError(f"{length} tokens have no room for a prompt of {task}.")
        return Prompt(
            suite=suite,
            task=task,
            length=length,
            context=drawn.context(sentences),
            question=drawn.question,
            answer_prefix=drawn.answer_prefix,
            references=drawn.references,
            new_tokens=drawn.new_tokens,
        )

    def _tokens(self, context: str, question: str) -> int:
        """The tokens of a context and of the question, which is encoded apart."""
        beginning = len(beginning_of(self.tokenizer))
        [of_context] = encode_text(self.tokenizer, [context])
        [of_question] = encode_text(self.tokenizer, [question], continues=True)
        return beginning + len(of_context) + len(of_question)

    def needles(self, task: Needles, generator: Generator) -> Drawn:
        """A prompt of RULER."""
        adjectives = ADJECTIVES.split()
        pairs = generator.choice(len(adjectives) * len(NOUNS), task.keys, replace=False)
        keys = [f"{adjectives[pair // len(NOUNS)]}-{NOUNS[pair % len(NOUNS)]}" for pair in pairs]
        values = generator.choice(9 * 10**6, (task.keys, task.values), replace=False) + 10**6
        needles = [
            NEEDLE.format(key=key, value=value)
            for key, of_key in zip(keys, values, strict=True)
            for value in of_key
        ]
        needles = generator.permutation(needles).tolist()
        asked = generator.permutation(task.keys)[: task.asked]
        references = tuple(str(value) for value in values[asked].ravel())
        *first, last = [keys[key] for key in asked]
        query = f"{', '.join(first)}, and {last}" if first else last
        template, question, answer_prefix = TEMPLATE, QUESTION, ANSWER_PREFIX
        if len(references) == 1:
            template, question, answer_prefix = map(_of_one, (template, question, answer_prefix))
        hidden = self._in_noise if task.is_noise else self._in_books
        haystack = hidden(needles, generator)
        [of_references] = encode_text(self.tokenizer, [" ".join(references)])
        return Drawn(
            context=lambda sentences: template.format(context=haystack(sentences)),
            question=question.format(query=query),
            answer_prefix=answer_prefix.format(query=query),
            references=references,
            new_tokens=len(of_references) + EXTRA,
        )

    def _in_noise(self, needles: Sequence[str], generator: Generator) -> Callable[[int], str]:
        """Needles among so many lines of noise."""
        depths = sorted(generator.random(len(needles)), reverse=True)

        def text(lines: int) -> str:
            with_needles = [NOISE] * lines
            for depth, needle in zip(depths, needles, strict=True):
                with_needles.insert(int(depth * lines), needle)
            return "\n".join(with_needles)

        return text

    def _in_books(self, needles: Sequence[str], generator: Generator) -> Callable[[int], str]:
        """Needles between so many sentences of a book."""
        depths = sorted(generator.choice(DEPTHS, len(needles), replace=False))
        start = _start(generator, self.books.sentences)

        def text(sentences: int) -> str:
            positions = [int(sentences * depth / 100) for depth in depths]
            haystack = self.books.sentences[start : start + sentences]
            return " ".join(_inserted(haystack, needles, positions))

        return text

    def babilong(self, task: str, generator: Generator) -> Drawn:
        """A prompt of BABILong."""
        number = int(generator.choice(FACTS[task]))
        story = _story_of_persons if task == "qa1" else _story_of_items
        facts, question, room = story(generator, number)
        background = self.books.background
        start = _start(generator, background)
        depths = np.sort(generator.random(len(facts)))
        parts = BABILONG_PARTS[task]

        def context(sentences: int) -> str:
            positions = (depths * (sentences + 1)).astype(int).tolist()
            haystack = background[start : start + sentences]
            text = " ".join(_inserted(haystack, facts, positions))
            return BABILONG_TEMPLATE.format(context=text, **parts)

        return Drawn(
            context=context,
            question=BABILONG_QUESTION.format(question=question),
            answer_prefix="",
            references=(room,),
            new_tokens=BABILONG_TOKENS,
        )

    def of_package(self, task: str, length: int) -> Iterator[Prompt]:
        """Prompts of a task of this package that leave room for the answer."""
        data = TaskData(
            task,
            tokenizer=self.tokenizer,
            condition="landmark",
            seed=TEST_SEED,
            documents=self.books.parts() if task == "copying" else (),
        )
        for index in count():
            example = data.test(index, length)
            text = "".join(split_at(example.prompt, example.markers))
            context, opening, asked = text.rpartition(OPENING)
            [answer] = encode_text(self.tokenizer, [example.completion], continues=True)
            new_tokens = len(answer) + 1  # a word has to end
            question = opening + asked
            if self._tokens(context, question + ANSWER_OF_TASK) + new_tokens <= length:
                yield Prompt(
                    suite="metatokens",
                    task=task,
                    length=length,
                    context=context,
                    question=question,
                    answer_prefix=ANSWER_OF_TASK,
                    references=(example.completion,),
                    new_tokens=new_tokens,
                )


def _of_one(text: str) -> str:
    for several, single in OF_ONE:
        text = text.replace(several, single)
    return text


def _start(generator: Generator, sentences: Sequence[str]) -> int:
    """The first sentence of a stretch, in the first half, so that there is enough after it."""
    return int(generator.integers(len(sentences) // 2))


def _inserted(
    sentences: Sequence[str], further: Sequence[str], positions: Sequence[int]
) -> list[str]:
    """Sentences with further ones before those at some positions, which ascend."""
    merged: list[str] = []
    start = 0
    for position, sentence in zip(positions, further, strict=True):
        merged += [*sentences[start:position], sentence]
        start = position
    return [*merged, *sentences[start:]]


# --- bAbI's stories

Story = tuple[list[str], str, str]  # facts, a question, and the room that answers it


@dataclass
class World:
    """Where persons and items are in a story.

    Attributes:
        rooms: of the persons who have moved.
        holders: of the items that are carried.
        lying: the rooms of the items that were dropped.
    """

    rooms: dict[str, str] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    lying: dict[str, str] = field(default_factory=dict)

    def move(self, generator: Generator, person: str) -> str:
        """A person goes to another room."""
        others = [room for room in ROOMS if room != self.rooms.get(person)]
        self.rooms[person] = _any_of(generator, others)
        return f"{person} {_any_of(generator, MOVES)} the {self.rooms[person]}."

    def take(self, generator: Generator, person: str, items: Sequence[str]) -> str:
        """A person takes one of the items."""
        item = _any_of(generator, items)
        self.holders[item] = person
        self.lying.pop(item, None)
        return f"{person} {_any_of(generator, TAKES)} the {item}{_any_of(generator, THERE)}."

    def drop(self, generator: Generator, person: str, items: Sequence[str]) -> str:
        """A person drops one of the items."""
        item = _any_of(generator, items)
        self.lying[item] = self.rooms[self.holders.pop(item)]
        return f"{person} {_any_of(generator, DROPS)} the {item}{_any_of(generator, THERE)}."

    def act(self, generator: Generator) -> str:
        """Someone does one of the things that are possible."""
        person = _any_of(generator, PERSONS)
        if person not in self.rooms:
            return self.move(generator, person)
        room = self.rooms[person]
        carried = [item for item, holder in self.holders.items() if holder == person]
        within_reach = [
            item
            for item in ITEMS
            if item not in self.holders and self.lying.get(item, room) == room
        ]
        actions = [lambda: self.move(generator, person)]
        if within_reach:
            actions.append(lambda: self.take(generator, person, within_reach))
        if carried:
            actions.append(lambda: self.drop(generator, person, carried))
        return _any_of(generator, actions)()

    def items(self) -> dict[str, str]:
        """The rooms of the items that were taken at some time."""
        carried = {item: self.rooms[holder] for item, holder in self.holders.items()}
        return carried | self.lying


def _story_of_persons(generator: Generator, number: int) -> Story:
    """So many moves, and the room of a person who has moved (bAbI's task 1)."""
    world = World()
    facts = [world.move(generator, _any_of(generator, PERSONS)) for _ in range(number)]
    person = _any_of(generator, [*world.rooms])
    return facts, f"Where is {person}?", world.rooms[person]


def _story_of_items(generator: Generator, number: int) -> Story:
    """So many facts or, if none takes an item, a few more, and the room of an item (bAbI's task 2)."""
    world = World()
    facts: list[str] = []
    while len(facts) < number or not world.items():
        facts.append(world.act(generator))
    rooms = world.items()
    item = _any_of(generator, [*rooms])
    return facts, f"Where is the {item}?", rooms[item]


def _any_of(generator: Generator, options: Sequence[Any]) -> Any:
    return options[int(generator.integers(len(options)))]


# --- the command


def parse_counts(text: str) -> dict[int, int]:
    """Numbers of prompts by length, written `512:16,2048:10`.

    Raises:
        UserError: if it is written otherwise.
    """
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*(,[1-9]\d*:[1-9]\d*)*", text):
        raise UserError(f"--counts {text!r} is not written as 512:16,2048:10: tokens:prompts.")
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(length): int(number) for length, number in pairs}


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="a model's folder")
    parser.add_argument("--text", nargs="+", required=True, help="held-out books, a file each")
    parser.add_argument(
        "--counts",
        type=parse_counts,
        default="512:16,2048:10,4096:6",
        help="prompts of a task, by length in tokens",
    )
    parser.add_argument("--seed", type=int, default=TEST_SEED)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    texts = ["".join(read_corpus(spec)) for spec in options.text]
    suites = Suites(load_tokenizer(options.tokenizer), texts, options.seed)
    lines = (f"{prompt.line()}\n" for prompt in suites.prompts(options.counts))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, "".join(lines).encode())


if __name__ == "__main__":
    main()
