"""Segment counting: how often does an item occur in the part of a list that two meta-tokens bracket?

One example of phase 1 (paper, appendix "Example Prompts"); the completion is " 1":

    Fruits: orange peach banana plum
    Tools: _PAUSE_ hammer wrench level pliers _PAUSE_
    Sports: boxing baseball boxing golf
    Q: How many times does wrench appear between the pauses around Tools? _PAUSE_
"""

import numpy as np

from metatokens.records import Split
from metatokens.tasks.content import Content, split_of
from metatokens.tasks.inventory import INVENTORY, draw_lists, gap_before, line_ends, list_pieces

QUESTION = "Q: How many times does {item} appear between the pauses around {category}?"
LANDMARK_QUESTION = "Q: How many times does {item} appear in items {first} to {last} of {category}?"
QUESTIONS = [
    form.format(item=items[0], category=category, first=place, last=place + 1)
    for form in (QUESTION, LANDMARK_QUESTION)
    for place, (category, items) in enumerate(INVENTORY.items(), start=1)
]
CHANCE = None  # the number of possible counts varies
_MOST = 5  # occurrences in the segment, and as many outside it


def draw(generator: np.random.Generator, m: int, n: int, asked: int, split: Split) -> Content | None:
    """Draw m lists of n items, one of them of `asked`, a segment of that one, and an item of its category.

    How often the item occurs is uniform in the segment, and in the rest of the list, where it stands at least once: so
    the commonest count is seldom right, and the whole list's never. Segments of all lengths but the list's own are
    equally likely. Decoys: a bracketed segment in each of some of the other lists. None in another split.
    """
    names, lists, target = draw_lists(generator, m, n, asked)
    start, end = _draw_segment(generator, asked)
    segment, rest = range(start, end), [*range(start), *range(end, asked)]
    items = [f" {item}" for item in INVENTORY[names[target]]]
    item = items.pop(generator.integers(len(items)))
    count = int(generator.integers(min(_MOST, len(segment)) + 1))
    outside = int(generator.integers(min(1, len(rest)), min(_MOST, len(rest)) + 1))
    row = [items[i] for i in generator.integers(len(items), size=asked)]
    for places, times in ((segment, count), (rest, outside)):
        for place in generator.permutation(places)[:times].tolist():
            row[place] = item
    lists[target] = row
    others = [line for line in generator.permutation(m).tolist() if line != target][: generator.integers(1, m + 1)]
    decoys = [gap_before(lists, line, item) for line in others for item in _draw_segment(generator, n)]
    markers = tuple(gap_before(lists, target, item) for item in (start, end))
    about = {"item": item.strip(), "category": names[target], "first": start + 1, "last": end}
    if split_of(" ".join([*names, *(item for row in lists for item in row), *map(str, about.values())])) != split:
        return None
    return Content(
        pieces=list_pieces(names, lists),
        markers=markers,
        decoyed=tuple(sorted([*markers, *decoys])) if decoys else (),
        landmarks=line_ends(lists),
        question=QUESTION.format(**about),
        landmark_question=LANDMARK_QUESTION.format(**about),
        answer=f" {count}",
    )


def _draw_segment(generator: np.random.Generator, n: int) -> tuple[int, int]:
    """A segment of a list, shorter than it, as (first item, one past the last)."""
    length = int(generator.integers(1, max(n, 2)))
    start = int(generator.integers(n - length + 1))
    return start, start + length
