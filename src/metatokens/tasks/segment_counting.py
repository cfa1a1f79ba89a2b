"""Segment counting: how often an item occurs in the part of a list that two meta-tokens bracket.

    prompt    Fruits: orange peach banana plum apple
              Tools: wrench _PAUSE_ hammer wrench level _PAUSE_ pliers
              Sports: boxing golf boxing tennis soccer
              Q: How many times does wrench appear between the pauses around Tools? _PAUSE_
    answer    1

The paper's example (appendix "Example Prompts") brackets a whole list; here the segment is always shorter.
"""

import re
from itertools import chain
from typing import NamedTuple

import numpy as np

from metatokens.recipe import Split
from metatokens.tasks.content import Content, split_of
from metatokens.tasks.inventory import INVENTORY, draw_lists, gap_before, line_ends, list_pieces
from metatokens.tasks.shortcuts import MARK, ParsedPrompt, Rule, Table

QUESTION = "Q: How many times does {item} appear between the pauses around {category}?"
LANDMARK_QUESTION = "Q: How many times does {item} appear in items {first} to {last} of {category}?"
QUESTIONS = [
    form.format(item=items[0], category=category, first=first, last=first + 1)
    for form in (QUESTION, LANDMARK_QUESTION)
    for first, (category, items) in enumerate(INVENTORY.items(), start=1)
]
CHANCE = None  # the number of possible counts varies
_MOST = 5  # occurrences in the segment, and outside it


def draw(generator: np.random.Generator, m: int, n: int, asked: int, split: Split) -> Content | None:
    """Draw m lists of n items, one of them of `asked`, a segment of that one, and an item of its category.

    The count in the segment is uniform, and so is that in the rest of the list, which is at least 1. So the most common
    count is seldom right, and the count in the whole list never. All lengths of a segment shorter than the list are
    equally likely. Decoys are bracketed segments in some of the other lists.

    Returns:
        None if the content is in another split.
    """
    names, lists, target = draw_lists(generator, m, n, asked)
    start, end = _draw_segment(generator, asked)
    item, count, lists[target] = _draw_target_list(generator, names[target], asked, range(start, end))
    others = [line for line in generator.permutation(m).tolist() if line != target]
    decoys: list[int] = []
    for line in others[: generator.integers(1, m + 1)]:
        decoys += [gap_before(lists, line, end_of_decoy) for end_of_decoy in _draw_segment(generator, n)]
    asked_for = {"item": item.strip(), "category": names[target], "first": start + 1, "last": end}
    items = chain.from_iterable(lists)
    if split_of(" ".join([*names, *items, *map(str, asked_for.values())])) != split:
        return None
    markers = (gap_before(lists, target, start), gap_before(lists, target, end))
    return Content(
        pieces=list_pieces(names, lists),
        markers=markers,
        decoyed=tuple(sorted([*markers, *decoys])) if decoys else (),
        landmarks=line_ends(lists),
        question=QUESTION.format(**asked_for),
        landmark_question=LANDMARK_QUESTION.format(**asked_for),
        answer=f" {count}",
    )


def _draw_target_list(
    generator: np.random.Generator, category: str, length: int, segment: range
) -> tuple[str, int, list[str]]:
    """The item that is asked for, its count in the segment, and the list, in which it also occurs elsewhere."""
    rest = [*range(segment.start), *range(segment.stop, length)]
    others = [f" {item}" for item in INVENTORY[category]]
    item = others.pop(generator.integers(len(others)))
    in_segment = int(generator.integers(min(_MOST, len(segment)) + 1))
    in_rest = int(generator.integers(min(1, len(rest)), min(_MOST, len(rest)) + 1))
    items = [others[i] for i in generator.integers(len(others), size=length)]
    for i in generator.permutation(segment)[:in_segment]:
        items[i] = item
    for i in generator.permutation(rest)[:in_rest]:
        items[i] = item
    return item, in_segment, items


def _draw_segment(generator: np.random.Generator, n: int) -> tuple[int, int]:
    """A segment shorter than the list, as (first item, one past the last)."""
    length = int(generator.integers(1, max(n, 2)))
    start = int(generator.integers(n - length + 1))
    return start, start + length


# --- shortcuts


class _AskedList(NamedTuple):
    """The item that a prompt asks about, and its list."""

    item: str
    before: list[str]  # items before the segment
    segment: list[str]
    after: list[str]

    @property
    def whole_count(self) -> int:
        """How often the item is in the whole list."""
        return (self.before + self.segment + self.after).count(self.item)


def _asked_list(prompt: ParsedPrompt) -> _AskedList:
    [(item, category)] = re.findall(r"How many times does (\w+) appear .* (\w+)\?", prompt.question)
    numbers = re.search(r"in items (\d+) to (\d+) of", prompt.question)
    if numbers:
        start, end = int(numbers[1]) - 1, int(numbers[2])
        items = prompt.line_of(category)
        return _AskedList(item, items[:start], items[start:end], items[end:])
    line = next(line for line in prompt.text.split("\n") if line.startswith(f"{category}:"))
    before, segment, after = line.removeprefix(f"{category}:").split(MARK)
    return _AskedList(item, before.split(), segment.split(), after.split())


def rules(condition: str) -> dict[str, Rule]:
    """Answers that count in another part of the list."""
    return {
        "1 if the item is in the segment, else 0": _presence,
        "the count in the list up to the segment's end": _count_up_to_end,
        "the count in the list from the segment's start on": _count_from_start,
        "the count in the whole list": lambda prompt: _asked_list(prompt).whole_count,
        "the count in the whole list, less one": lambda prompt: _asked_list(prompt).whole_count - 1,
    }


def _presence(prompt: ParsedPrompt) -> int:
    asked = _asked_list(prompt)
    return int(asked.item in asked.segment)


def _count_up_to_end(prompt: ParsedPrompt) -> int:
    asked = _asked_list(prompt)
    return (asked.before + asked.segment).count(asked.item)


def _count_from_start(prompt: ParsedPrompt) -> int:
    asked = _asked_list(prompt)
    return (asked.segment + asked.after).count(asked.item)


def _whole_count_and_segment_length(prompt: ParsedPrompt) -> tuple[int, int]:
    asked = _asked_list(prompt)
    return asked.whole_count, len(asked.segment)


TABLES: dict[str, Table] = {
    "a table of the whole list's count and the segment's length": _whole_count_and_segment_length
}
