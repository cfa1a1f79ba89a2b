"""The 20 categories of 10 items each that the list tasks draw from (paper, appendix "List Recall").

Eight categories and some of their items are the paper's. The others are common words, most of them one token of the
GPT-2 vocabulary. An item belongs to one category only.
"""

from itertools import accumulate

import numpy as np

INVENTORY: dict[str, tuple[str, ...]] = {
    category: tuple(items.split())
    for category, items in {
        "Fruits": "orange peach banana plum apple grape lemon mango cherry pear",
        "Tools": "hammer wrench level pliers saw drill axe ladder shovel screw",
        "Sports": "boxing baseball golf tennis soccer hockey rugby basketball swimming wrestling",
        "Spices": "turmeric cardamom cumin cinnamon pepper ginger salt vanilla mustard mint",
        "Animals": "cat tiger wolf fox dog horse bear lion rabbit elephant",
        "Professions": "teacher nurse lawyer architect doctor engineer farmer judge baker pilot",
        "Vegetables": "onion cucumber broccoli carrot potato tomato lettuce spinach cabbage corn",
        "Instruments": "piano clarinet violin guitar flute trumpet drum harp organ bass",
        "Colors": "red blue green yellow purple pink brown black white gray",
        "Metals": "iron gold silver copper steel lead tin zinc nickel aluminum",
        "Clothes": "shirt hat coat dress shoe scarf belt jacket sweater glove",
        "Furniture": "table chair bed desk sofa shelf lamp couch bench cabinet",
        "Vehicles": "car bus truck train bicycle boat ship tractor van taxi",
        "Drinks": "water coffee tea milk juice wine beer soda whiskey vodka",
        "Flowers": "rose lily tulip daisy orchid iris violet lotus sunflower poppy",
        "Trees": "oak pine maple cedar willow birch elm palm ash spruce",
        "Birds": "eagle owl crow hawk duck goose swan robin sparrow parrot",
        "Insects": "ant bee fly moth beetle wasp mosquito butterfly cricket flea",
        "Fabrics": "cotton wool silk linen leather velvet denim nylon lace canvas",
        "Shapes": "circle square triangle cube sphere cone oval star rectangle cylinder",
    }.items()
}

_NAMES = tuple(INVENTORY)
_WORDS = tuple(tuple(f" {item}" for item in items) for items in INVENTORY.values())


def draw_lists(generator: np.random.Generator, m: int, n: int, asked: int) -> tuple[list[str], list[list[str]], int]:
    """Draw m distinct categories and, for each, n of its ten items with replacement; for the target, only `asked`.

    Returns:
        The m category names; the m lists of items, each item with a space before it; and the target's number.
    """
    categories = generator.permutation(len(_NAMES))[:m].tolist()
    choices = generator.integers(10, size=(m, n)).tolist()
    lists = [[_WORDS[category][i] for i in row] for category, row in zip(categories, choices, strict=True)]
    target = int(generator.integers(m))
    lists[target] = lists[target][:asked]
    return [_NAMES[category] for category in categories], lists, target


def list_pieces(names: list[str], lists: list[list[str]]) -> list[str]:
    """The lists as text pieces, one line each: its heading, then its items."""
    pieces: list[str] = []
    for name, items in zip(names, lists, strict=True):
        pieces.append(f"\n{name}:" if pieces else f"{name}:")
        pieces += items
    return pieces


def gap_before(lists: list[list[str]], line: int, item: int) -> int:
    """The gap before an item of a line of `list_pieces`, both counted from 0."""
    return sum(1 + len(row) for row in lists[:line]) + 1 + item


def line_ends(lists: list[list[str]]) -> tuple[int, ...]:
    """The gaps after each line of `list_pieces`."""
    return tuple(accumulate(1 + len(row) for row in lists))
