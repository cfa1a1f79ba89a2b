"""How far apart two results may be that differ in rounding alone: bounds from number formats and sizes.

Processors add in other orders, and with other widths, and so round other numbers. No bound here depends on that.
"""

import math

import torch

HALF = (torch.bfloat16, torch.float16)


def rounding_error(dtype: torch.dtype, roundings: int, magnitude: float = 1.0) -> float:
    """The difference to expect, as a root mean square, between two numbers that are each rounded `roundings` times.

    A rounding shifts a number by up to half of the format's `eps`, all shifts being as likely, so by eps / sqrt(12) as
    a root mean square. Shifts that do not depend on each other add up as the steps of a random walk do, whose length
    grows with the square root of their number, here of the roundings of both numbers (N. J. Higham and T. Mary, A new
    approach to probabilistic rounding error analysis, SIAM Journal on Scientific Computing 41, 2019).
    """
    return math.sqrt(2 * roundings / 12) * torch.finfo(dtype).eps * magnitude


def rounding_bound(dtype: torch.dtype, roundings: int, magnitude: float = 1.0) -> float:
    """The largest difference by rounding: six times the expected one, which one number in 5 * 10^8 exceeds."""
    return 6 * rounding_error(dtype, roundings, magnitude)


def decoder_roundings(dtype: torch.dtype, blocks: int, width: int, length: int) -> int:
    """How many roundings, one behind the other, a logit of a small decoder goes through.

    A sum of n products has n roundings. In a block with a second attention and a feed-forward layer four times as wide,
    the sums of a path have 14 times `width` terms at most, and two attentions sum over `length` keys. In half precision
    sums are accumulated in float32, and what each of about 20 operations of a block returns is rounded.
    """
    if dtype in HALF:
        return 20 * blocks
    return blocks * (14 * width + 2 * length) + width


# For what the small models of the tests compute in float32, or from a loss in float32, as a share of the largest.
ROUNDED = rounding_bound(
    torch.float32, decoder_roundings(torch.float32, blocks=3, width=32, length=64)
)
# For a perplexity, the exponential of a loss below 8.
ROUNDED_PERPLEXITY = 8 * ROUNDED

# The same in float64, for numbers below 500.
ROUNDED_DOUBLE = rounding_bound(
    torch.float64, decoder_roundings(torch.float64, blocks=3, width=32, length=64), 500
)
