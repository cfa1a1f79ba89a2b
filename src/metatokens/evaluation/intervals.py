"""The 95 % intervals of a measured proportion and of a measured mean."""

from scipy.stats import binomtest


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The Wilson 95 % score interval of a proportion, as (low, high).

    Raises:
        ValueError: if n is 0 or successes is outside [0, n].
    """
    interval = binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def normal_interval(mean: float, standard_error: float) -> tuple[float, float]:
    """The 95 % interval of a mean with this standard error, as (low, high), by the normal approximation."""
    return mean - 1.96 * standard_error, mean + 1.96 * standard_error
