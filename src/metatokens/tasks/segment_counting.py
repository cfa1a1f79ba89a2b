"""Segment counting: how often does an item occur in the part of a list that two meta-tokens bracket?

One example of phase 1 (paper, appendix "Example Prompts"); the completion is " 1":

    Fruits: orange peach banana plum
    Tools: _PAUSE_ hammer wrench level pliers _PAUSE_
    Sports: boxing baseball boxing golf
    Q: How many times does wrench appear between the pauses around Tools? _PAUSE_
"""

from collections import defaultdict

import numpy as np

from metatokens.tasks.example import Content
from metatokens.tasks.inventory import INVENTORY, draw_lists, list_pieces

QUESTION = "Q: How many times does {item} appear between the pauses around {category}?"
QUESTIONS = [QUESTION.format(item=items[0], category=category) for category, items in INVENTORY.items()]
CHANCE = None  # the number of possible counts varies


def draw(generator: np.random.Generator, m: int, n: int) -> Content:
    """Draw m lists of n items, a segment of one of them, and an item of its category, which may occur or not.

    The counts that the category's items have are equally likely, so that a frequent one cannot stand in for
    counting. Decoys: a bracketed segment in each of some of the other lists.
    """
    names, lists = draw_lists(generator, m, n)
    target = int(generator.integers(m))
    start, end = _draw_segment(generator, n)
    segment = lists[target][start:end]
    items_by_count: dict[int, list[str]] = defaultdict(list)
    for item in INVENTORY[names[target]]:
        items_by_count[segment.count(f" {item}")].append(item)
    count = sorted(items_by_count)[generator.integers(len(items_by_count))]
    items = items_by_count[count]
    item = items[generator.integers(len(items))]
    others = [line for line in generator.permutation(m).tolist() if line != target]
    decoyed = others[: generator.integers(1, m)]
    return Content(
        pieces=list_pieces(names, lists),
        markers=_gaps(target, (start, end), n),
        decoys=tuple(gap for line in decoyed for gap in _gaps(line, _draw_segment(generator, n), n)),
        question=QUESTION.format(item=item, category=names[target]),
        answer=f" {count}",
    )


def _draw_segment(generator: np.random.Generator, n: int) -> tuple[int, int]:
    """Any of the n * (n + 1) / 2 segments of a list, as (first item, one past the last)."""
    start, end = sorted(generator.permutation(n + 1)[:2].tolist())
    return start, end


def _gaps(line: int, segment: tuple[int, int], n: int) -> tuple[int, int]:
    first_item = line * (n + 1) + 1
    return first_item + segment[0], first_item + segment[1]
