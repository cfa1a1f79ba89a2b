"""Shortcuts: what answers prompts without doing the task. Only a model that beats them has learned the task.

A shortcut reads the prompt's text, as a model does. A rule computes the answer from it. A table computes a key from it
and gives the most common answer among the training prompts with that key, or among all of them if the key is new. Each
task's module has those of the task; a table without a key is one of every task.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import multimode

from metatokens.records import split_at
from metatokens.tasks import module_of
from metatokens.tasks.content import OPENING
from metatokens.tasks.example import Example

MARK = "\x00"  # stands for a meta-token in a prompt's text


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt, cut up for rules to read."""

    segments: Sequence[str]
    """The text between the meta-tokens."""

    @cached_property
    def text(self) -> str:
        """The context, with a mark for each meta-token."""
        return f" {MARK}".join(self.segments[:-1]).rpartition(f"{OPENING} ")[0]

    @cached_property
    def question(self) -> str:
        """The question, without what introduces it."""
        return self.segments[-2].rpartition(f"{OPENING} ")[2]

    @cached_property
    def lines(self) -> list[list[str]]:
        """The words of each line of the context, without marks."""
        return [words_of(line) for line in self.text.split("\n")]

    def line_of(self, category: str) -> list[str]:
        """The items of a category's list."""
        return next(line[1:] for line in self.lines if line[:1] == [f"{category}:"])


Rule = Callable[[ParsedPrompt], object]
Table = Callable[[ParsedPrompt], Hashable]


def words_of(text: str) -> list[str]:
    """The words of a part of a context, without marks."""
    return text.replace(MARK, "").split()


def answers(
    task: str, condition: str, train: Sequence[Example], test: Sequence[Example]
) -> dict[str, list[bool]]:
    """For each shortcut, by name, whether it answers each test prompt correctly.

    Args:
        task: one of the four tasks.
        condition: the prompts' condition.
        train: prompts that tables are made from.
        test: prompts to answer.
    """
    module = module_of(task)
    rules: dict[str, Rule] = module.rules(condition)
    tables: dict[str, Table] = {"the commonest answer": lambda prompt: None, **module.TABLES}
    answered = _with_answers(train)
    for name, key in tables.items():
        rules[name] = _looked_up(key, answered)
    asked = _with_answers(test)
    are_right = {}
    for name, rule in rules.items():
        are_right[name] = [str(rule(prompt)) == answer for prompt, answer in asked]
    return are_right


def _with_answers(examples: Sequence[Example]) -> list[tuple[ParsedPrompt, str]]:
    return [
        (ParsedPrompt(split_at(example.prompt, example.markers)), example.completion.strip())
        for example in examples
    ]


def _looked_up(key: Table, answered: Sequence[tuple[ParsedPrompt, str]]) -> Rule:
    """The rule that looks a prompt's key up among prompts with known answers.

    If several answers are the commonest, it gives the first of these in the alphabet.
    """
    answers_by_key: dict[Hashable, list[str]] = defaultdict(list)
    for prompt, answer in answered:
        answers_by_key[key(prompt)].append(answer)
    usual = min(multimode(answer for _, answer in answered))
    usual_by_key = {value: min(multimode(known)) for value, known in answers_by_key.items()}
    return lambda prompt: usual_by_key.get(key(prompt), usual)
