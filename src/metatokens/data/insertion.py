"""Insert meta-tokens into a block of text, and make its labels (paper, section 3).

A block of n = 8 positions with k = 0.25, where a to f are text tokens and M is the meta-token:

    text         a     b     c     d     e     f
    input_ids    M     a     b     c     M     d     e     f
    labels      -100  -100   b     c    -100   d     e     f

Labels are not shifted: as in every causal model of transformers, the loss compares the logits at position i with the
label at i + 1. So the model predicts d at the meta-token before it, and no meta-token is ever a target. The first text
token is no target either, even after a meta-token, so that models with and without inserted meta-tokens are scored on
the same text tokens.

The placements of this file are those of the paper. `landmarks.py` has the rules that follow the text, such as a
meta-token after each line.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from metatokens.errors import UserError

Ids = npt.NDArray[np.int64]

MAX_FRACTION = 0.5
IGNORED_LABEL = -100  # which the cross-entropies of torch and transformers leave out


def _uniform(block_size: int, count: int, generator: Generator) -> list[int]:
    """Draw positions without replacement, each set of them equally likely (the paper)."""
    return generator.choice(block_size, size=count, replace=False).tolist()


def _periodic(block_size: int, count: int, generator: Generator) -> list[int]:
    """Take the last position of each of `count` equal stretches of the block."""
    return [stretch * block_size // count - 1 for stretch in range(1, count + 1)]


def _none(block_size: int, count: int, generator: Generator) -> list[int]:
    return []


PLACEMENTS: dict[str, Callable[[int, int, Generator], list[int]]] = {
    "uniform": _uniform,
    "periodic": _periodic,
    "none": _none,
}
"""By name, the functions (block_size, count, generator) that choose the positions of a block's meta-tokens."""


def meta_token_count(block_size: int, fraction: float, placement: str = "uniform") -> int:
    """The number of meta-tokens in a block: M = floor(k n), or 0 with placement `none`.

    The product is taken in decimal, where 0.29 * 100 is 29; in binary it is 28.999..., which gives 28.

    Args:
        block_size: n, the block's length in tokens, meta-tokens included.
        fraction: k, the share of the positions that hold meta-tokens.
        placement: see `insert_meta_tokens`.

    Raises:
        UserError: if the fraction is outside [0, 0.5], or the placement is unknown.
    """
    if not 0 <= fraction <= MAX_FRACTION:
        raise UserError(
            f"the fraction of meta-tokens is {fraction}, but must lie in [0, {MAX_FRACTION}]."
        )
    if placement not in PLACEMENTS:
        raise UserError(f"unknown placement {placement!r}: choose from {', '.join(PLACEMENTS)}.")
    return 0 if placement == "none" else math.floor(Fraction(str(fraction)) * block_size)


def insert_meta_tokens(
    input_ids: npt.ArrayLike,
    *,
    meta_token_id: int,
    block_size: int,
    fraction: float = 0.1,
    placement: str = "uniform",
    generator: Generator,
) -> tuple[Ids, Ids]:
    """Spread M meta-tokens over a block of n positions that is otherwise text (paper, section 3).

    Args:
        input_ids: the n - M text ids, in order.
        meta_token_id: the id to insert.
        block_size: n, the length of the result.
        fraction: k, in [0, 0.5]; M = floor(k n).
        placement: `uniform` draws M of the positions without replacement, each set of positions equally likely (the
            paper); `periodic` puts one at the end of each of M equal stretches of the block; `none` inserts none.
        generator: the source of randomness; only `uniform` uses it.

    Returns:
        `input_ids` and `labels`, each of shape (block_size,). A position's label is its own id, or -100 at a meta-token
        and at the first text token.

    Raises:
        UserError: if the fraction is outside [0, 0.5], or the placement is unknown.
        ValueError: if there are not n - M ids, or one of them is the meta-token's.
    """
    count = meta_token_count(block_size, fraction, placement)
    text = np.asarray(input_ids, dtype=np.int64)
    if text.shape != (block_size - count,):
        raise ValueError(
            f"{block_size} positions with {count} meta-tokens take {block_size - count} text ids, "
            f"but the ids have shape {text.shape}."
        )
    if (text == meta_token_id).any():
        raise ValueError(f"the text already holds the meta-token's id {meta_token_id}.")
    is_meta = np.zeros(block_size, dtype=bool)
    is_meta[PLACEMENTS[placement](block_size, count, generator)] = True
    block = np.full(block_size, meta_token_id, dtype=np.int64)
    block[~is_meta] = text
    return block, labels_of(block, meta_token_id)


def labels_of(block: Ids, meta_token_id: int) -> Ids:
    """The labels of a block, (positions,): its ids, but -100 at each meta-token and at the first text token."""
    is_meta = block == meta_token_id
    labels = np.where(is_meta, IGNORED_LABEL, block)
    labels[np.argmin(is_meta)] = IGNORED_LABEL  # the first position that is text
    return labels
