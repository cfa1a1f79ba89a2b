"""The 95 % intervals of a measured proportion, also of answers in groups, and of a measured mean."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest, sem, t


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The Wilson 95 % score interval of a proportion, as (low, high).

    Raises:
        ValueError: if n is 0 or successes is outside [0, n].
    """
    interval = binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def share_fields(successes: int, n: int) -> dict[str, Any]:
    """The fields of a result that a proportion has: `value`, `n`, and its interval, `low` and `high` (Wilson's)."""
    low, high = wilson_interval(successes, n)
    return {"value": successes / n, "n": n, "low": low, "high": high}


def normal_interval(mean: float, standard_error: float) -> tuple[float, float]:
    """The 95 % interval of a mean with this standard error, as (low, high), by the normal approximation."""
    return mean - 1.96 * standard_error, mean + 1.96 * standard_error


def student_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """The mean of independent values, at least two, and its 95 % interval by Student's t, as (mean, low, high)."""
    mean = float(np.mean(values))
    half_width = float(t.ppf(0.975, len(values) - 1) * sem(values))
    return mean, mean - half_width, mean + half_width


def clustered_interval(clusters: Sequence[Sequence[bool] | np.ndarray]) -> tuple[float, float]:
    """The 95 % interval of a share of answers that come in clusters, such as those about one text, as (low, high).

    It is the wider of two: Wilson's, as if each answer were independent, and Student's over the clusters.
    """
    answers = np.concatenate(clusters)
    low, high = wilson_interval(int(answers.sum()), len(answers))
    if len(clusters) < 2:
        return low, high
    mean = float(answers.mean())
    half_width = float(t.ppf(0.975, len(clusters) - 1)) * error_of_ratio(clusters, mean)
    return min(low, max(0.0, mean - half_width)), max(high, min(1.0, mean + half_width))


def error_of_ratio(clusters: Sequence[Sequence[float] | np.ndarray], mean: float) -> float:
    """The standard error of a mean over values in clusters, which is the ratio of their sums to their counts."""
    deviations = np.array(
        [np.sum(cluster, dtype=np.float64) - mean * len(cluster) for cluster in clusters]
    )
    n = len(clusters)
    return math.sqrt((deviations**2).sum() * n / (n - 1)) / sum(map(len, clusters))
