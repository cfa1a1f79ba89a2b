"""Meta-token insertion: where they go in a block, and what the loss asks for (paper, section 3).

With meta-tokens `M` and text `a b c d e f`, a block of n = 8 and k = 0.25 may read

    input_ids    M     a    b    c    M     d    e    f
    labels      -100  -100  b    c   -100   d    e    f

Labels are not shifted: the model compares the logits at position i with the label at i + 1, as every
Hugging Face causal model does. So `d` is predicted at the meta-token before it, and no meta-token is
ever a target. The block's first text token is none either, whether or not a meta-token stands before
it: models with and without inserted meta-tokens are scored on the same text tokens.
"""

import math
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from metatokens.errors import UserError

Placement = Literal["uniform", "periodic", "none"]
MAX_FRACTION = 0.5
IGNORED_LABEL = -100  # what the cross-entropies of torch and transformers leave out


def meta_token_count(block_size: int, fraction: float, placement: str = "uniform") -> int:
    """The number of meta-tokens in a block: M = floor(k * n), or 0 with placement `none`.

    The product is taken in decimal, where 0.29 * 100 is 29; in binary it is 28.999... and gives 28.

    Args:
        block_size: n, the block's length in tokens, meta-tokens included.
        fraction: k, the share of the block that is meta-tokens.
        placement: see `insert_meta_tokens`.

    Raises:
        UserError: if the fraction is outside [0, 0.5], or the placement is unknown.
    """
    if not 0 <= fraction <= MAX_FRACTION:
        raise UserError(f"the fraction of meta-tokens is {fraction}, but must lie in [0, {MAX_FRACTION}].")
    if placement not in get_args(Placement):
        raise UserError(f"unknown placement {placement!r}: choose from {', '.join(get_args(Placement))}.")
    return 0 if placement == "none" else math.floor(Fraction(str(fraction)) * block_size)


def insert_meta_tokens(
    input_ids: npt.ArrayLike,
    *,
    meta_token_id: int,
    block_size: int,
    fraction: float = 0.1,
    placement: Placement = "uniform",
    generator: np.random.Generator,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Spread M meta-tokens over a block of n positions that is otherwise text (paper, section 3).

    Args:
        input_ids: the n - M text ids, in order.
        meta_token_id: the id to insert.
        block_size: n, the length of the result.
        fraction: k, in [0, 0.5]; M = floor(k * n).
        placement: `uniform` draws M of the block's positions without replacement, each set of
            positions equally likely (the paper); `periodic` puts one at the end of each of M equal
            stretches of the block; `none` inserts none (M = 0).
        generator: the source of randomness, read by `uniform` alone.

    Returns:
        `input_ids` and `labels`, each of shape (block_size,). A position's label is its own id, or -100
        at a meta-token and at the first text token.

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
    if placement == "uniform":
        is_meta[generator.choice(block_size, size=count, replace=False)] = True
    elif placement == "periodic":
        is_meta[[stretch * block_size // count - 1 for stretch in range(1, count + 1)]] = True

    block = np.full(block_size, meta_token_id, dtype=np.int64)
    block[~is_meta] = text
    return block, labels_of(block, meta_token_id)


def labels_of(block: npt.NDArray[np.int64], meta_token_id: int) -> npt.NDArray[np.int64]:
    """The labels of a block, (positions,): its ids, but -100 at each meta-token and at the first text token."""
    is_meta = block == meta_token_id
    labels = np.where(is_meta, IGNORED_LABEL, block)
    labels[np.argmin(is_meta)] = IGNORED_LABEL  # the first position that is text
    return labels
