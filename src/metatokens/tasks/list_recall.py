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

from metatokens.records import Split
from metatokens.tasks.content import Content, split_of
from metatokens.tasks.inventory import INVENTORY, draw_lists, gap_before, line_ends, list_pieces

QUESTION = "Q: What is item {place} of {category}?"
QUESTIONS = [QUESTION.format(place=place, category=category) for place, category in enumerate(INVENTORY, start=1)]
CHANCE = 0.1  # a category has ten items


def draw(generator: np.random.Generator, m: int, n: int, asked: int, split: Split) -> Content | None:
    """Draw m lists of n items, but `asked` in the target list, then that one again with a meta-token after one of them.

    Among decoys another list is repeated too, before it or after it; there is a meta-token at a random place in each of
    some lines of other categories, in that list, and one more in the target list. Without markers that know the answer
    nothing is repeated. None in another split.
    """
    names, lists, target = draw_lists(generator, m, n, asked)
    place = int(generator.integers(asked))
    others = [line for line in generator.permutation(m).tolist() if line != target]
    again = generator.permutation([target, *others[:1]]).tolist()
    at = m + again.index(target)  # the line of the target list's repetition among decoys
    decoyed = [*others[: generator.integers(1, m + 1)], *(m + line for line in range(len(again)))]
    shown = [*lists, *(lists[line] for line in again)]
    marked = [(line, int(generator.integers(len(shown[line])))) for line in decoyed]
    question = QUESTION.format(place=place + 1, category=names[target])
    if split_of(" ".join([*names, *(item for row in lists for item in row), str(target), str(place)])) != split:
        return None
    return Content(
        pieces=list_pieces(names, lists),
        repeated=_repeated(names, lists, [target]),
        markers=(gap_before(lists, m, place + 1),),
        decoyed=tuple(sorted({gap_before(shown, line, item + 1) for line, item in [*marked, (at, place)]})),
        decoy_repeated=_repeated(names, lists, again),
        landmarks=line_ends(lists),
        question=question,
        landmark_question=question,
        answer=lists[target][place],
    )


def _repeated(names: list[str], lists: list[list[str]], lines: list[int]) -> list[str]:
    return [piece for line in lines for piece in (f"\n{names[line]}:", *lists[line])]
