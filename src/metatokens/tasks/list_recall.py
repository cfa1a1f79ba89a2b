"""List recall: the item at a given place of a list, which is repeated with a meta-token in it.

    prompt    Fruits: orange peach banana plum
              Professions: teacher nurse lawyer architect
              Tools: hammer wrench level pliers
              Professions: teacher nurse lawyer _PAUSE_ architect
              Q: What is item 3 of Professions? _PAUSE_
    answer    lawyer

The paper's recipe asks for the item after the meta-token, but its example (appendix "Example Prompts") for the item
before it. This module follows the example: the question gives a place, and the meta-token follows the item there.
"""

import re
from collections import Counter
from functools import partial

from numpy.random import Generator

from metatokens.recipe import Split
from metatokens.tasks.content import Content, split_of
from metatokens.tasks.inventory import INVENTORY, draw_lists
from metatokens.tasks.shortcuts import MARK, ParsedPrompt, Rule, Table, words_of

QUESTION = "Q: What is item {place} of {category}?"
QUESTIONS = [
    QUESTION.format(place=item, category=category)
    for item, category in enumerate(INVENTORY, start=1)
]
CHANCE = 0.1  # a category has ten items


def draw(generator: Generator, m: int, n: int, asked: int, split: Split) -> Content | None:
    """Draw m lists, the target of `asked` items and the others of n; repeat the target with a meta-token in it.

    In condition `decoy` another list is repeated too, before or after the target list. Some lists of other categories
    and both repeated lists then get a further meta-token each, at a random place. In the conditions `landmark` and
    `facts_K` nothing is repeated.

    Returns:
        None if the content is in another split.
    """
    lists = draw_lists(generator, m, n, asked)
    asked_item = int(generator.integers(asked))
    others = lists.others(generator)
    repeated = generator.permutation([lists.target, *others[:1]]).tolist()
    with_decoy = lists.repeating(repeated)
    decoyed = {with_decoy.gap_before(m + repeated.index(lists.target), asked_item + 1)}
    count = int(generator.integers(1, m + 1))
    repeated_lines = range(m, len(with_decoy.items))
    for line in [*others[:count], *repeated_lines]:
        item = int(generator.integers(len(with_decoy.items[line])))
        decoyed.add(with_decoy.gap_before(line, item + 1))
    if split_of(f"{lists.key} {lists.target} {asked_item}") != split:
        return None
    question = QUESTION.format(place=asked_item + 1, category=lists.category)
    with_target = lists.repeating([lists.target])
    return Content(
        pieces=lists.pieces(),
        repeated=with_target.pieces(m),
        markers=(with_target.gap_before(m, asked_item + 1),),
        decoyed=tuple(sorted(decoyed)),
        decoy_repeated=with_decoy.pieces(m),
        landmarks=lists.line_ends(),
        question=question,
        landmark_question=question,
        answer=lists.items[lists.target][asked_item],
    )


# --- shortcuts

TABLES: dict[str, Table] = {}


def rules(condition: str) -> dict[str, Rule]:
    """Answers by rules that do not find the list and the place that the question names."""
    named: dict[str, Rule] = {
        "the word before the last marker": partial(_word_before_mark, 1),
        "the word before the last marker but one": partial(_word_before_mark, 2),
        "the word of that number in the last line": partial(_word_of_line, -1),
        "the word of that number in the first line": partial(_word_of_line, 0),
    }
    # Whose lists have one item, so that this would do the task.
    if not condition.startswith("facts_"):
        named["the commonest word of the list asked for"] = _commonest_of_list
    return named


def _word_before_mark(from_end: int, prompt: ParsedPrompt) -> str | None:
    before, *after = prompt.text.rsplit(MARK, from_end)
    words = words_of(before)
    return words[-1] if words and len(after) == from_end else None


def _word_of_line(line: int, prompt: ParsedPrompt) -> str:
    number, _ = _asked(prompt)
    # Word 0 is the list's heading, so item 1 is word 1; no list is shorter than the target list.
    return prompt.lines[line][int(number)]


def _commonest_of_list(prompt: ParsedPrompt) -> str:
    _, category = _asked(prompt)
    [(item, _)] = Counter(prompt.line_of(category)).most_common(1)
    return item


def _asked(prompt: ParsedPrompt) -> tuple[str, str]:
    """The number of the item that is asked for, from 1, and the category."""
    [asked] = re.findall(r"What is item (\d+) of (\w+)", prompt.question)
    return asked
