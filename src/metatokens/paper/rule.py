"""The rule that gives a claim its verdict; docs/paper_map.md, "Verdicts", has the reason for each choice.

1. A claim is one number: the difference that it predicts, averaged over the settings that it names, each task weighted
   alike. `claims.py` chooses the settings. One is left out where both sides guess (means at most 5 points above
   guessing) or, for a gain, both exceed 98 %.
2. Its 95 % interval takes each seed as one observation: a side's scores are averaged over tasks first, then compared by
   Welch's t. The draw of the test prompts is added. A side with fewer than three runs has no interval.
3. The first verdict that fits is given. **Within 5 points**: the interval lies within 5 points of 0. **Supported**: it
   lies above 0. **Reversed**: it lies below 0. **No lead of 5 points**: it lies below 5. **Inconclusive**: all else.
4. A claim that nothing is lost is **supported** if the interval lies above -5 points, and **contradicted** if it lies
   below. For a claim that a bound is kept, it is the bound that counts.
5. A claim about every task is supported if all were run and each interval supports it. It shows **no lead of 5 points**
   or is **contradicted** if one interval rules it out, at a level corrected for their number.

The rule was written before the experiment ran. Two things were decided afterwards: that seeds are the observations, and
the words of the verdicts.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt
from statistics import fmean
from typing import Literal

import numpy as np
from scipy.special import stdtrit  # Student's t: ten times as fast as that of scipy.stats

Verdict = Literal[
    "supported", "within", "reversed", "no lead", "contradicted", "inconclusive", "not measured"
]
Kind = Literal["gain", "match", "above"]
Array = np.ndarray

LEVEL = 0.95  # of the intervals
FEWEST_RUNS = 3  # of a side that has an interval


@dataclass(frozen=True)
class Stratum:
    """One task's part of a claim: what each training run scored.

    Args:
        task: strata of one task share its weight.
        samples: for each side that was trained on its own, the scores of its runs by seed; those of the side that the
            claim subtracts are negative. All strata of a claim have the sides in the same order. A comparison within
            the same runs is one sample, of the runs' differences.
        constant: what else the difference holds: a bound that the claim names, or a measured time.
        prompts: the variance of the difference from the draw of the test prompts.
    """

    task: str
    samples: Sequence[Mapping[int, float]]
    constant: float = 0.0
    prompts: float = 0.0

    @property
    def value(self) -> float:
        """The difference that the claim predicts."""
        return self.constant + sum(fmean(sample.values()) for sample in self.samples)


@dataclass(frozen=True)
class Effect:
    """A difference and its interval.

    If a side has fewer than three runs, only `value` is a number; if there are no runs, all fields are NaN.
    """

    value: float = nan
    low: float = nan
    high: float = nan


def prompt_variance(answers: Sequence[Array]) -> float:
    """The variance that the draw of the prompts adds to a difference of means, beyond the variance between runs.

    Runs and prompts are crossed random effects. Let d_j be the difference at prompt j, averaged over the runs of each
    side: var(d) = s2_prompts + sum(s2_residual / k) over the sides with k runs. The variance between runs already
    holds s2_residual / (k n), so s2_prompts / n is what is left to add. s2_residual is the mean square of a two-way
    analysis of variance of one side.

    Args:
        answers: for each side an array (runs, prompts) of what a run has at a prompt, negative on the side that is
            subtracted. Every side has the same prompts.

    Returns:
        NaN for a single prompt, whose draw shows no variance.
    """
    prompts = answers[0].shape[1]
    if prompts < 2:
        return nan
    added = float(np.var(sum(side.mean(axis=0) for side in answers), ddof=1))
    for side in answers:
        runs = len(side)
        residual = side - side.mean(axis=0) - side.mean(axis=1, keepdims=True) + side.mean()
        added -= float((residual**2).sum()) / max(runs - 1, 1) / (prompts - 1) / runs
    return added / prompts


def effect(strata: Sequence[Stratum], level: float = LEVEL) -> Effect:
    """The mean over tasks, with its interval; see `Effect` for sides without enough runs."""
    if not strata:
        return Effect()
    strata_by_task = Counter(stratum.task for stratum in strata)
    weights = [1 / len(strata_by_task) / strata_by_task[stratum.task] for stratum in strata]
    value = sum(weight * stratum.value for weight, stratum in zip(weights, strata, strict=True))
    if any(len(sample) < FEWEST_RUNS for stratum in strata for sample in stratum.samples):
        return Effect(value)
    of_runs, spread = 0.0, 0.0
    for samples in zip(*(stratum.samples for stratum in strata), strict=True):
        of_side, freedom = _variance_of_side(samples, weights)
        of_runs += of_side
        spread += of_side**2 / freedom
    # The degrees of freedom are of the runs alone, so that the prompts never narrow the interval.
    freedom_of_runs = of_runs**2 / spread if spread else inf
    error = sqrt(of_runs + _variance_of_prompts(strata, weights))
    reach = float(stdtrit(freedom_of_runs, (1 + level) / 2)) * error
    return Effect(value, value - reach, value + reach)


def _variance_of_side(
    samples: Sequence[Mapping[int, float]], weights: Sequence[float]
) -> tuple[float, int]:
    """The variance of a side's part of the mean, and its degrees of freedom; a sample for each stratum."""
    deviations: defaultdict[int, float] = defaultdict(
        float
    )  # the tasks of a seed are not independent
    for weight, sample in zip(weights, samples, strict=True):
        mean = fmean(sample.values())
        for seed, score in sample.items():
            deviations[seed] += weight * (score - mean) / len(sample)
    freedom = len(deviations) - 1
    squares = sum(deviation**2 for deviation in deviations.values())
    return squares * len(deviations) / freedom, freedom


def _variance_of_prompts(strata: Sequence[Stratum], weights: Sequence[float]) -> float:
    """What the draw of the prompts adds. Strata of a task may share prompts, so they count as wholly dependent."""
    errors: defaultdict[str, float] = defaultdict(float)
    for weight, stratum in zip(weights, strata, strict=True):
        errors[stratum.task] += weight * sqrt(stratum.prompts)
    return sum(error**2 for error in errors.values())


def corrected(tests: int) -> float:
    """The level at which each of several intervals holds, so that all hold at once in 95 % (Bonferroni)."""
    return 1 - (1 - LEVEL) / tests


def boundaries(kind: Kind, smallest: float) -> tuple[float, float]:
    """The bounds: an interval above the first supports a claim, one below the second rules it out.

    Args:
        kind: gain, the difference is positive; match, nothing is lost; above, a bound is kept.
        smallest: the smallest effect of interest: a smaller gain is none, and a smaller loss is none.
    """
    return {"gain": (0.0, smallest), "match": (-smallest, -smallest), "above": (0.0, 0.0)}[kind]


def verdict(measured: Effect, kind: Kind, smallest: float) -> Verdict:
    """The verdict on a claim whose effect has this interval; see `boundaries` for the arguments."""
    supports, rules_out = boundaries(kind, smallest)
    if np.isnan(measured.value):
        return "not measured"
    if kind == "gain" and -smallest < measured.low and measured.high < smallest:
        return "within"
    if measured.low > supports:
        return "supported"
    if measured.high < rules_out:
        if kind != "gain":
            return "contradicted"
        return "reversed" if measured.high < 0 else "no lead"
    return "inconclusive"


def verdict_everywhere(
    strata: Sequence[Stratum], kind: Kind, smallest: float, *, is_complete: bool
) -> Verdict:
    """The verdict on a claim about all cases, each a stratum; see `boundaries` for the arguments.

    It is supported if all strata were run (`is_complete`) and the interval of each supports it, which needs no
    correction. It is ruled out if the interval of one stratum rules it out, at a level corrected for the number of
    strata (Bonferroni).
    """
    supports, rules_out = boundaries(kind, smallest)
    level = corrected(len(strata))
    if any(effect([stratum], level).high < rules_out for stratum in strata):
        return "no lead" if kind == "gain" else "contradicted"
    if is_complete and all(effect([stratum]).low > supports for stratum in strata):
        return "supported"
    return "inconclusive"
