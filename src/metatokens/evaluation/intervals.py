"""How far a measured proportion may be from the true one."""

from scipy.stats import binomtest


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The Wilson 95 % score interval of a proportion, as (low, high).

    Raises:
        ValueError: if n is 0 or successes is outside [0, n].
    """
    interval = binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)
