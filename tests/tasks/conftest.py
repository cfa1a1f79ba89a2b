"""A small tokenizer and made-up documents that the tasks' tests share."""

import random
import string

import pytest

from metatokens.data.tokenizer import load_tokenizer
from metatokens.tasks import curriculum

# Every task in every condition that is for it.
CASES = [
    (task, condition)
    for task in curriculum.TASKS
    for condition in curriculum.CONDITIONS
    if task == "list_recall" or not condition.startswith("facts_")
]


@pytest.fixture(scope="session")
def documents():
    """Texts of 5 to 4,000 words: line breaks and apostrophes in all, bars and accents in some."""
    draw = random.Random(0)
    words = ["it's", "they'll", "co-op", "3.14", "1999", "snake_case"]
    for _ in range(150):
        words.append("".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 7))))
    accented = words + ["naïve", "Zürich", "世界", "…", "“so”"] * 5
    separators = [" "] * 12 + [", ", ". ", "\n", "\n\n", " -- ", "!  "]

    def text(length, words, separators):
        return "".join(draw.choice(words) + draw.choice(separators) for _ in range(length))

    return [
        text(4000, words, separators),
        text(3000, words, separators),
        text(2500, accented, separators),
        text(1000, words, [*separators, " | "]),
        text(40, accented, separators),
        "too short to be of use",
    ]


@pytest.fixture(scope="session")
def tokenizer(documents):
    """A byte-level BPE in which the tasks' words, like most others, are one token each."""
    return load_tokenizer("train:1400", corpus=documents, extra_texts=curriculum.task_texts())
