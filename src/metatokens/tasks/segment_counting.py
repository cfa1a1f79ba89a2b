"""Segment counting: how often an item occurs in the part of a list that two meta-tokens bracket.

    prompt    Fruits: orange peach banana plum apple
              Tools: wrench _PAUSE_ hammer wrench level _PAUSE_ pliers
              Sports: boxing golf boxing tennis soccer
              Q: How many times does wrench appear between the pauses around Tools? _PAUSE_
    answer    1

The paper's example (appendix "Example Prompts") brackets a whole list; here the segment is always shorter.
"""

import re

from numpy.random import Generator

from metatokens.recipe import Split
from metatokens.tasks.content import Content, split_of
from metatokens.tasks.inventory import INVENTORY, draw_lists
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


def draw(generator: Generator, m: int, n: int, asked: int, split: Split) -> Content | None:
    """Draw m lists of n items, one of them of `asked`, a segment of that one, and an item of its category.

    The count in the segment is uniform up to 5 or the segment's length. So is that in the rest of the list, which is at
    least 1. So the most common count is seldom right, and the count in the whole list never. All lengths of a segment
    shorter than the list are equally likely. Decoys are bracketed segments in some of the other lists.

    Returns:
        None if the content is in another split.
    """
    lists = draw_lists(generator, m, n, asked)
    segment = _draw_segment(generator, asked)
    item, count, lists.items[lists.target] = _draw_target_list(
        generator, lists.category, asked, segment
    )
    decoys: list[int] = []
    for line in lists.others(generator)[: generator.integers(1, m + 1)]:
        decoy = _draw_segment(generator, n)
        decoys += [lists.gap_before(line, decoy.start), lists.gap_before(line, decoy.stop)]
    asked_for = {
        "item": item.strip(),
        "category": lists.category,
        "first": segment.start + 1,
        "last": segment.stop,
    }
    if split_of(" ".join([lists.key, *map(str, asked_for.values())])) != split:
        return None
    markers = (
        lists.gap_before(lists.target, segment.start),
        lists.gap_before(lists.target, segment.stop),
    )
    return Content(
        pieces=lists.pieces(),
        markers=markers,
        decoyed=tuple(sorted([*markers, *decoys])) if decoys else (),
        landmarks=lists.line_ends(),
        question=QUESTION.format(**asked_for),
        landmark_question=LANDMARK_QUESTION.format(**asked_for),
        answer=f" {count}",
    )


def _draw_target_list(
    generator: Generator, category: str, length: int, segment: range
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


def _draw_segment(generator: Generator, n: int) -> range:
    """The numbers of the items of a segment shorter than a list of n."""
    length = int(generator.integers(1, max(n, 2)))
    start = int(generator.integers(n - length + 1))
    return range(start, start + length)


# --- shortcuts


def _counts(prompt: ParsedPrompt) -> list[int]:
    """How often the item asked for is before, in and after the segment of its list, and the segment's length."""
    [(item, category)] = re.findall(r"How many times does (\w+) appear .* (\w+)\?", prompt.question)
    numbers = re.search(r"in items (\d+) to (\d+) of", prompt.question)
    if numbers:
        start, end = int(numbers[1]) - 1, int(numbers[2])
        items = prompt.line_of(category)
        parts = [items[:start], items[start:end], items[end:]]
    else:
        line = next(line for line in prompt.text.split("\n") if line.startswith(f"{category}:"))
        parts = [part.split() for part in line.split(MARK)]
    return [*(part.count(item) for part in parts), len(parts[1])]


def _in_list(prompt: ParsedPrompt) -> int:
    return sum(_counts(prompt)[:3])


def rules(condition: str) -> dict[str, Rule]:
    """Answers that count in another part of the list."""
    return {
        "1 if the item is in the segment, else 0": lambda prompt: min(_counts(prompt)[1], 1),
        "the count in the list up to the segment's end": lambda prompt: sum(_counts(prompt)[:2]),
        "the count in the list from the segment's start on": lambda prompt: sum(
            _counts(prompt)[1:3]
        ),
        "the count in the whole list": _in_list,
        "the count in the whole list, less one": lambda prompt: _in_list(prompt) - 1,
    }


TABLES: dict[str, Table] = {
    "a table of the whole list's count and the segment's length": lambda prompt: (
        _in_list(prompt),
        _counts(prompt)[3],
    )
}
