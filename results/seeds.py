"""A mean over seeds, its interval, and its verdict: the rule of results/covered_text and results/more_text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import Any

import pandas as pd
from scipy.stats import t

FEWEST = 6  # seeds of a comparison
SMALLEST = 0.05  # of a proportion: the smallest effect of interest


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and its 95 % interval; NaN with fewer than two seeds."""

    value: float
    low: float
    high: float
    n: int
    p: dict[float, float]  # two-sided p-values, by the mean that is tested

    @classmethod
    def of(cls, values: Sequence[float], boundaries: Sequence[float] = ()) -> "Mean":
        """By Student's t."""
        n = len(values)
        if n < 2:
            return cls(sum(values) if n else nan, nan, nan, n, {})
        series = pd.Series(list(values))
        error = float(series.std()) / sqrt(n)
        reach = float(t.ppf(0.975, n - 1)) * error
        mean = float(series.mean())
        p = {}
        for boundary in boundaries:
            distance = abs(mean - boundary)
            p[boundary] = (
                (0.0 if distance else 1.0)
                if error == 0
                else float(2 * t.sf(distance / error, n - 1))
            )
        return cls(mean, mean - reach, mean + reach, n, p)

    @property
    def verdict(self) -> str:
        """The word of the rule in README.md."""
        if self.n < FEWEST:
            return "cannot be told"
        if self.low > -SMALLEST and self.high < SMALLEST:
            return "within 5 points"
        if self.low > 0:
            return "lead"
        return "no lead of 5 points" if self.high < SMALLEST else "cannot be told"

    @property
    def p_of_verdict(self) -> float:
        """The largest p-value over the boundaries that the interval excludes; 1 if there is none."""
        excluded = {
            "lead": [0.0],
            "no lead of 5 points": [SMALLEST],
            "within 5 points": [-SMALLEST, SMALLEST],
        }
        return max((self.p[boundary] for boundary in excluded.get(self.verdict, [])), default=1.0)

    def shown(self, *, signed: bool = False) -> str:
        """In points or per cent, with the interval."""
        if self.n == 0:
            return "-"
        mean = f"{100 * self.value:{'+' * signed}.1f}"
        if self.n < 2:
            return f"{mean} [{self.n}]"
        return f"{mean} ({100 * self.low:{'+' * signed}.1f} to {100 * self.high:{'+' * signed}.1f}) [{self.n}]"


def holm(effects: Mapping[Any, Mean]) -> set[Any]:
    """The effects whose verdict holds after Holm's correction for all of them."""
    ranked = sorted(effects, key=lambda name: effects[name].p_of_verdict)
    holding: set[Any] = set()
    for rank, name in enumerate(ranked):
        if effects[name].p_of_verdict > 0.05 / (len(ranked) - rank):
            break
        holding.add(name)
    return holding


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def header(*cells: str) -> list[str]:
    """The head of a Markdown table."""
    return [row(*cells), row("---", *["---:"] * (len(cells) - 1))]
