"""Shortcuts: rules that answer prompts without doing the task. Only a model that beats them has learned the task.

A shortcut reads the prompt's text, as a model does. A rule computes the answer from it. A table computes a key from it
and gives the most common answer among the training prompts with that key, or among all of them if the key is new.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from metatokens.records import split_at
from metatokens.tasks.example import Example

_MARK = "\x00"  # replaces a meta-token in a text that is cut into words


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt, cut up for rules to read."""

    segments: tuple[str, ...]
    """The text between the meta-tokens."""

    @cached_property
    def text(self) -> str:
        """The context, with a mark for each meta-token."""
        return f" {_MARK}".join(self.segments[:-1]).rpartition("\nQ: ")[0]

    @cached_property
    def question(self) -> str:
        """The question, without what introduces it."""
        return self.segments[-2].rpartition("\nQ: ")[2]

    @cached_property
    def lines(self) -> list[list[str]]:
        """The words of each line of the context, without marks."""
        return [line.replace(_MARK, "").split() for line in self.text.split("\n")]

    def line_of(self, category: str) -> list[str]:
        """The items of a category's list."""
        return next((line[1:] for line in self.lines if line and line[0] == f"{category}:"), [])

    def before_mark(self, number: int) -> list[str]:
        """The words of the context before the meta-token of that index; negative indices count from the end."""
        parts = self.text.split(_MARK)[:-1]
        end = len(parts) + number if number < 0 else number
        return "".join(parts[: end + 1]).split() if 0 <= end < len(parts) else []

    @cached_property
    def between_marks(self) -> str:
        """The text between the first two meta-tokens of the context."""
        parts = self.text.split(_MARK)
        return parts[1].strip() if len(parts) > 2 else ""


Rule = Callable[[ParsedPrompt], str | None]
Table = Callable[[ParsedPrompt], Hashable]


def _constant(prompt: ParsedPrompt) -> Hashable:
    return None


# --- list recall


def _asked_number(prompt: ParsedPrompt) -> tuple[int, str]:
    """The number of the item asked for, from 1, and the category."""
    asked = re.match(r"What is item (\d+) of (\w+)", prompt.question)
    assert asked
    return int(asked[1]), asked[2]


def _word_before_mark(number: int, prompt: ParsedPrompt) -> str | None:
    words = prompt.before_mark(number)
    return words[-1] if words else None


def _word_of_line(line: int, prompt: ParsedPrompt) -> str:
    number, _ = _asked_number(prompt)
    return prompt.lines[line][number]  # no list is shorter than the target list


def _most_common_of_list(prompt: ParsedPrompt) -> str | None:
    _, category = _asked_number(prompt)
    items = prompt.line_of(category)
    return Counter(items).most_common(1)[0][0] if items else None


# --- segment counting


def _asked_item(prompt: ParsedPrompt) -> tuple[str, str]:
    asked = re.match(r"How many times does (\w+) appear .* (\w+)\?", prompt.question)
    assert asked
    return asked[1], asked[2]


def _segment(prompt: ParsedPrompt) -> tuple[list[str], list[str], list[str]]:
    """The items of the segment, and those of the list before and after it."""
    _, category = _asked_item(prompt)
    numbers = re.search(r"in items (\d+) to (\d+) of", prompt.question)
    if numbers:
        start, end = int(numbers[1]) - 1, int(numbers[2])
        items = prompt.line_of(category)
        return items[start:end], items[:start], items[end:]
    line = next(line for line in prompt.text.split("\n") if line.startswith(f"{category}:"))
    before, within, after = (part.split() for part in line.split(_MARK))
    return within, before[1:], after


def _presence(prompt: ParsedPrompt) -> str:
    return str(int(_asked_item(prompt)[0] in _segment(prompt)[0]))


def _up_to_segment(prompt: ParsedPrompt) -> str:
    within, before, _ = _segment(prompt)
    return str((before + within).count(_asked_item(prompt)[0]))


def _from_segment_on(prompt: ParsedPrompt) -> str:
    within, _, after = _segment(prompt)
    return str((within + after).count(_asked_item(prompt)[0]))


def _in_whole_list(prompt: ParsedPrompt) -> int:
    item, category = _asked_item(prompt)
    return prompt.line_of(category).count(item)


def _whole_list_and_segments_length(prompt: ParsedPrompt) -> Hashable:
    return _in_whole_list(prompt), len(_segment(prompt)[0])


# --- parity


def _bits(prompt: ParsedPrompt) -> list[str]:
    return prompt.lines[0][1:]


def _xor(bits: Sequence[str]) -> str:
    return str(bits.count("1") % 2)


def _bits_before_first_mark(prompt: ParsedPrompt) -> tuple[str, ...]:
    return tuple(prompt.before_mark(0)[1:])


def _marked_bits(prompt: ParsedPrompt) -> tuple[str, ...]:
    count = re.search(r"the first (\d+) bits", prompt.question)
    if not count:
        return _bits_before_first_mark(prompt)
    return tuple(_bits(prompt)[: int(count[1])])


_RULES: Mapping[str, Mapping[str, Rule]] = {
    "list_recall": {
        "the word before the last marker": partial(_word_before_mark, -1),
        "the word before the last marker but one": partial(_word_before_mark, -2),
        "the word of that number in the last line": partial(_word_of_line, -1),
        "the word of that number in the first line": partial(_word_of_line, 0),
        "the commonest word of the list asked for": _most_common_of_list,
    },
    "segment_counting": {
        "1 if the item is in the segment, else 0": _presence,
        "the count in the list up to the segment's end": _up_to_segment,
        "the count in the list from the segment's start on": _from_segment_on,
        "the count in the whole list": lambda prompt: str(_in_whole_list(prompt)),
        "the count in the whole list, less one": lambda prompt: str(_in_whole_list(prompt) - 1),
    },
    "parity": {
        "the last bit that is asked about": lambda prompt: _marked_bits(prompt)[-1],
        "the opposite of the last bit that is asked about": lambda prompt: _xor([_marked_bits(prompt)[-1], "1"]),
        "the XOR of all bits": lambda prompt: _xor(_bits(prompt)),
    },
    "copying": {},
}
_TABLES: Mapping[str, Mapping[str, Table]] = {
    "list_recall": {"the commonest answer": _constant},
    "segment_counting": {
        "the commonest answer": _constant,
        "a table of the whole list's count and the segment's length": _whole_list_and_segments_length,
    },
    "parity": {"the commonest answer": _constant, "a table of the bits that are asked about": _marked_bits},
    "copying": {"the commonest answer": _constant},
}
# In condition `landmark`, whose markers do not depend on the question; in others these rules do the task itself.
_LANDMARK_RULES: Mapping[str, Mapping[str, Rule]] = {
    "parity": {"the XOR of the bits before the first marker": lambda prompt: _xor(_bits_before_first_mark(prompt))},
    "copying": {"the text between the first two markers": lambda prompt: prompt.between_marks},
}


def answers(task: str, condition: str, train: Sequence[Example], test: Sequence[Example]) -> dict[str, list[bool]]:
    """For each shortcut, by name, whether it answers each test prompt correctly.

    Args:
        task: one of the four tasks.
        condition: the prompts' condition.
        train: prompts that tables are made from.
        test: prompts to answer.
    """
    rules = dict(_RULES[task])
    if condition == "landmark":
        rules |= _LANDMARK_RULES.get(task, {})
    if condition.startswith("facts_"):
        del rules["the commonest word of the list asked for"]  # a list has one word: this does the task itself
    answered = _with_answers(train)
    for name, key in _TABLES[task].items():
        rules[name] = _looked_up(key, answered)
    asked = _with_answers(test)
    return {name: [rule(prompt) == answer for prompt, answer in asked] for name, rule in rules.items()}


def _with_answers(examples: Sequence[Example]) -> list[tuple[ParsedPrompt, str]]:
    answered: list[tuple[ParsedPrompt, str]] = []
    for example in examples:
        segments = split_at(example.prompt, example.markers)
        answered.append((ParsedPrompt(tuple(segments)), example.completion.strip()))
    return answered


def _looked_up(key: Table, answered: Sequence[tuple[ParsedPrompt, str]]) -> Rule:
    """The rule that looks a prompt's key up among prompts with known answers."""
    counts: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for prompt, answer in answered:
        counts[key(prompt)][answer] += 1
    best = {value: _most_common(answers_of_key) for value, answers_of_key in counts.items()}
    guess = _most_common(Counter(answer for _, answer in answered))
    return lambda prompt: best.get(key(prompt), guess)


def _most_common(counts: Counter[str]) -> str:
    return min(counts, key=lambda answer: (-counts[answer], answer))
