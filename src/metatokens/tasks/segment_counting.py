"""Segment counting: how often does an item occur in the part of a list that two meta-tokens bracket?

One example of phase 1 (paper, appendix "Example Prompts"); the completion is " 1":

    Fruits: orange peach banana plum
    Tools: _PAUSE_ hammer wrench level pliers _PAUSE_
    Sports: boxing baseball boxing golf
    Q: How many times does wrench appear between the pauses around Tools? _PAUSE_
"""

import numpy as np

from metatokens.tasks.example import Content, split_of
from metatokens.tasks.inventory import INVENTORY, draw_lists, line_ends, list_pieces

QUESTION = "Q: How many times does {item} appear between the pauses around {category}?"
LANDMARK_QUESTION = "Q: How many times does {item} appear in items {first} to {last} of {category}?"
QUESTIONS = [
    form.format(item=items[0], category=category, first=place, last=place + 1)
    for form in (QUESTION, LANDMARK_QUESTION)
    for place, (category, items) in enumerate(INVENTORY.items(), start=1)
]
CHANCE = None  # the number of possible counts varies
_MOST = 5  # occurrences in the segment, and as many outside it


def draw(generator: np.random.Generator, m: int, n: int) -> Content:
    """Draw m lists of n items, a segment of one of them, and an item of its category, which may occur or not.

    How often it occurs is uniform in the segment, and in the rest of the list too, so that neither the commonest
    count nor the whole list's is often right. Segments of all lengths but the list's own are equally likely. Decoys:
    a bracketed segment in each of some of the other lists.
    """
    names, lists = draw_lists(generator, m, n)
    target = int(generator.integers(m))
    start, end = _draw_segment(generator, n)
    segment, rest = range(start, end), [*range(start), *range(end, n)]
    items = [f" {item}" for item in INVENTORY[names[target]]]
    item = items.pop(generator.integers(len(items)))
    count, outside = (int(generator.integers(min(_MOST, len(places)) + 1)) for places in (segment, rest))
    row = [items[i] for i in generator.integers(len(items), size=n)]
    for places, times in ((segment, count), (rest, outside)):
        for place in generator.permutation(places)[:times].tolist():
            row[place] = item
    lists[target] = row
    others = [line for line in generator.permutation(m).tolist() if line != target][: generator.integers(1, m + 1)]
    decoys = [gap for line in others for gap in _gaps(line, _draw_segment(generator, n), n)]
    about = {"item": item.strip(), "category": names[target], "first": start + 1, "last": end}
    return Content(
        pieces=list_pieces(names, lists),
        markers=_gaps(target, (start, end), n),
        decoyed=tuple(sorted([*_gaps(target, (start, end), n), *decoys])) if decoys else (),
        landmarks=line_ends(m, n),
        question=QUESTION.format(**about),
        landmark_question=LANDMARK_QUESTION.format(**about),
        answer=f" {count}",
        split=split_of(" ".join([*names, *(item for row in lists for item in row), *map(str, about.values())])),
    )


def _draw_segment(generator: np.random.Generator, n: int) -> tuple[int, int]:
    """A segment of a list, shorter than it, as (first item, one past the last)."""
    length = int(generator.integers(1, max(n, 2)))
    start = int(generator.integers(n - length + 1))
    return start, start + length


def _gaps(line: int, segment: tuple[int, int], n: int) -> tuple[int, int]:
    first_item = line * (n + 1) + 1
    return first_item + segment[0], first_item + segment[1]
