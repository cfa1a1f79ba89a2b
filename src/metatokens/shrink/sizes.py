"""How long the window, the texts of the training and those of the tests are, by what a cache may keep."""

import math
from dataclasses import dataclass

from metatokens.errors import UserError
from metatokens.model.configuration import TEXT_SINKS
from metatokens.recipe import CacheSettings, ShrinkRecipe

SHORTEST_WINDOW = 8  # positions of a window
ROOM_FOR_QUESTION = 64  # tokens of a tested length that are for a question and its answer
MARGIN_BEHIND_WINDOW = 8  # tokens at least between a window and what has to be found


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, and a number of heads.

    SmolLM2-135M has 90 heads and reads 8,192 tokens. An eighth of 4,096 tokens are 9 full heads and a window of 109
    tokens in the other 81, besides 4 sinks: (9 + 81 * 113 / 4,096) / 90 = 1/8.

    Attributes:
        length: of the text whose cache keeps the share that the recipe asks for.
        number_of_full_heads: how many heads keep everything.
        window: the last tokens that each other head keeps.
        window_alone: the window that keeps the same share without full heads.
        distance: the fewest tokens from what has to be found to the end of its text; more than the window.
        shortest: tokens of the shortest text of the training and of the tests: a third of it is outside the window.
        longest: tokens of the longest text of the training.
        tested_texts: how many texts are tested, by their length.
    """

    length: int
    number_of_full_heads: int
    window: int
    window_alone: int
    distance: int
    shortest: int
    longest: int
    tested_texts: dict[int, int]

    @classmethod
    def of(cls, recipe: ShrinkRecipe, heads: int, limit: int, landmarks: float = 0.0) -> "Sizes":
        """The sizes for a model.

        Args:
            recipe: the settings.
            heads: how many key-value heads the model has.
            limit: how many tokens it reads at most.
            landmarks: how many there are for each token of text. All heads keep them.

        Raises:
            UserError: if the cache has no room for a window, or the window is too long for the texts.
        """
        length = min(recipe.cache.length, limit)
        number_of_full_heads = _number_of_full_heads(recipe.cache, heads, landmarks)
        if number_of_full_heads >= heads:
            raise UserError(
                f"{number_of_full_heads} heads are to be full, and the model has {heads}: one has to forget at "
                "least."
            )
        keep = recipe.cache.keep
        window = recipe.cache.window
        if window is None:
            window = _window(keep, number_of_full_heads, heads, length, landmarks)
        else:
            full_share = number_of_full_heads / heads
            keep = full_share + (1 - full_share) * (window + TEXT_SINKS) / length + landmarks
        distance = window + MARGIN_BEHIND_WINDOW
        shortest = 3 * distance // 2
        longest = min(max(recipe.mixture.longest, 2 * distance), limit // 2)
        if longest < shortest:
            raise UserError(
                f"a window of {window:,} positions reaches over most of the {longest:,} tokens that a text of the "
                "training may have, half of the model's limit: keep less."
            )
        shortest_tested = shortest + ROOM_FOR_QUESTION
        tested_texts = {
            tested: count
            for tested, count in recipe.tests.texts.items()
            # A text may have twice as many landmarks as the mean.
            if tested >= shortest_tested and tested * (1 + 2 * landmarks) <= limit
        }
        if not tested_texts:
            raise UserError(
                f"no length of tests.texts is between {shortest_tested:,} and {limit:,} tokens: a window of "
                f"{window:,} forgets too little of a shorter text, and the model reads no longer one."
            )
        return cls(
            length=length,
            number_of_full_heads=number_of_full_heads,
            window=window,
            window_alone=_window(keep, 0, heads, length, landmarks),
            distance=distance,
            shortest=shortest,
            longest=longest,
            tested_texts=tested_texts,
        )

    @property
    def training_lengths(self) -> list[int]:
        """Tokens of the training's texts with look-ups: `longest`, then each a half of the one before."""
        doublings = int(math.log2(self.longest / self.shortest))
        return [self.longest // 2**halvings for halvings in range(doublings + 1)]

    @property
    def distance_by_length(self) -> dict[int, int]:
        """As `distance`, for tests of a length: the control with a window alone does not reach so far in a long one."""
        return {
            length: max(self.distance, min(self.window_alone + MARGIN_BEHIND_WINDOW, length // 2))
            for length in self.tested_texts
        }


def _number_of_full_heads(cache: CacheSettings, heads: int, landmarks: float) -> int:
    if cache.full_heads is not None:
        return len(cache.full_heads)
    if cache.number_of_full_heads is not None:
        return cache.number_of_full_heads
    # Full heads look things up. The window predicts prose, and gets a fifth at least of what landmarks leave, unless a
    # single full head takes more.
    return max(1, int(heads * (cache.keep - landmarks) * 4 // 5))


def _window(
    keep: float, number_of_full_heads: int, heads: int, length: int, landmarks: float
) -> int:
    """The window with which the share is kept of a text of the length, next to full heads and landmarks."""
    full_share = number_of_full_heads / heads
    rest = keep - full_share - landmarks
    window = int(rest / (1 - full_share) * length) - TEXT_SINKS if rest > 0 else 0
    if window < SHORTEST_WINDOW:
        besides = f", and landmarks take {landmarks:.1%}" if landmarks else ""
        raise UserError(
            f"a cache that keeps {keep:.3g} of {length:,} tokens has no room for a window if {number_of_full_heads} "
            f"of {heads} heads are full{besides}: keep more, or fewer full heads."
        )
    return window
