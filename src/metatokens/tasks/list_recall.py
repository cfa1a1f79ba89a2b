"""List recall: which item stands at a given place of the list that is repeated with a meta-token in it?

One example of phase 1 (paper, appendix "Example Prompts"); the completion is " lawyer":

    Fruits: orange peach banana plum
    Professions: teacher nurse lawyer architect
    Professions: teacher nurse lawyer _PAUSE_ architect
    Q: What is item 3 of Professions? _PAUSE_

The appendix's recipe asks for the item after the meta-token, its example for the one before. This follows the
example: the question is positional, and the meta-token stands right after the item asked for.
"""

import numpy as np

from metatokens.tasks.example import Content
from metatokens.tasks.inventory import INVENTORY, draw_lists, line_ends, list_pieces

QUESTION = "Q: What is item {place} of {category}?"
QUESTIONS = [QUESTION.format(place=place, category=category) for place, category in enumerate(INVENTORY, start=1)]
CHANCE = 0.1  # a category has ten items


def draw(generator: np.random.Generator, m: int, n: int) -> Content:
    """Draw m lists of n items, then the target list once more with the meta-token after the item asked for.

    Decoys: one meta-token at a random place in each of some lines of other categories, and one more in the repeated
    line. Without markers that know the answer nothing is repeated.
    """
    names, lists = draw_lists(generator, m, n)
    target = int(generator.integers(m))
    asked = int(generator.integers(n))
    decoyed = [line for line in generator.permutation(m).tolist() if line != target][: generator.integers(1, m + 1)]
    places = [*zip(decoyed, generator.integers(n, size=len(decoyed)).tolist(), strict=True)]
    if n > 1:
        places.append((m, (asked + int(generator.integers(1, n))) % n))
    return Content(
        pieces=list_pieces(names, lists),
        repeated=[f"\n{names[target]}:", *lists[target]],
        markers=(_gap_after(m, asked, n),),
        decoys=tuple(_gap_after(line, item, n) for line, item in places),
        landmarks=line_ends(m, n),
        question=QUESTION.format(place=asked + 1, category=names[target]),
        landmark_question=QUESTION.format(place=asked + 1, category=names[target]),
        answer=lists[target][asked],
        key=" ".join([*names, *(item for row in lists for item in row), str(target), str(asked)]),
    )


def _gap_after(line: int, item: int, n: int) -> int:
    # Beyond the lines before, this line's heading, and its items up to this one.
    return line * (n + 1) + 1 + item + 1
