"""The 20 categories of 10 items each that the list tasks draw from (paper, appendix "List Recall").

Eight categories and some of their items are the paper's. The others are common words, most of them one token of the
GPT-2 vocabulary. An item belongs to one category only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from numpy.random import Generator

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


@dataclass
class Lists:
    """Lists of items, and the number of the target list, which the question is about."""

    names: list[str]
    items: list[list[str]]
    """The items of each list, each with a space before it."""
    target: int

    @property
    def category(self) -> str:
        """The name of the target list."""
        return self.names[self.target]

    @property
    def key(self) -> str:
        """All names, then all items."""
        return " ".join([*self.names, *chain.from_iterable(self.items)])

    def others(self, generator: Generator) -> list[int]:
        """The numbers of all lists except for the target list, in random order."""
        order = generator.permutation(len(self.names)).tolist()
        order.remove(self.target)
        return order

    def repeating(self, numbers: Sequence[int]) -> "Lists":
        """These lists, and some of them once more."""
        names = [self.names[number] for number in numbers]
        items = [self.items[number] for number in numbers]
        return Lists(self.names + names, self.items + items, self.target)

    def pieces(self, first: int = 0) -> list[str]:
        """The lists from number `first` on as text pieces, one line each: its heading, then its items."""
        pieces: list[str] = []
        for number in range(first, len(self.names)):
            heading = f"{self.names[number]}:"
            pieces += [f"\n{heading}" if number else heading, *self.items[number]]
        return pieces

    def gap_before(self, number: int, item: int) -> int:
        """The gap before an item of a list, both counted from 0, in the pieces of all lists."""
        line_starts = (0, *self.line_ends())
        return line_starts[number] + 1 + item

    def line_ends(self) -> tuple[int, ...]:
        """The gaps after each line."""
        return tuple(accumulate(1 + len(items) for items in self.items))


def draw_lists(generator: Generator, m: int, n: int, asked: int) -> Lists:
    """Draw m distinct categories and, for each, n of its ten items with replacement; for the target, only `asked`."""
    categories = generator.permutation(len(INVENTORY))[:m].tolist()
    choices = generator.integers(10, size=(m, n)).tolist()
    names = [_NAMES[category] for category in categories]
    items: list[list[str]] = []
    for name, row in zip(names, choices, strict=True):
        items.append([f" {INVENTORY[name][choice]}" for choice in row])
    target = int(generator.integers(m))
    items[target] = items[target][:asked]
    return Lists(names, items, target)
