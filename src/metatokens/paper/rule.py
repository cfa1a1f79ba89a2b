"""The rule that gives a claim its verdict. It was written, with the claims, before the experiment ran.

1. A claim is one number: the difference that it predicts, averaged over the settings that it names, each task weighted
   alike. A setting is left out where both sides guess (means at most 5 points above guessing) or, for a gain, both
   exceed 98 %.
2. Its 95 % interval takes each training run as one observation (Welch's t for each task, degrees of freedom by
   Satterthwaite) and adds the draw of the test prompts.
3. The claim is **supported** if the interval lies above 0; **contradicted** if it lies below the smallest effect of
   interest (5 points); **equivalent** if it lies within that effect on both sides (this verdict comes first where two
   fit); otherwise **inconclusive**.

docs/paper_map.md, "Verdicts", has the variants and the reason for each choice.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t: ten times as fast as those of scipy.stats

Verdict = Literal["supported", "contradicted", "equivalent", "inconclusive", "not run"]
Kind = Literal["gain", "match", "above"]
Array = np.ndarray

LEVEL = 0.95  # of the intervals


@dataclass(frozen=True)
class Stratum:
    """One task's part of a claim: what each training run scored.

    Args:
        task: strata of one task share its weight.
        samples: for each side that was trained on its own, the scores of its runs; those of the side that the claim
            subtracts are negative. A comparison within the same runs is one sample, of the runs' differences.
        constant: what else the difference holds: a bound that the claim names, or a measured time.
        prompts: the variance of the difference from the draw of the test prompts.
    """

    task: str
    samples: tuple[Array, ...]
    constant: float = 0.0
    prompts: float = 0.0

    @property
    def value(self) -> float:
        """The difference that the claim predicts."""
        return self.constant + sum(float(np.mean(sample)) for sample in self.samples)


@dataclass(frozen=True)
class Effect:
    """A difference, its interval, its standard error and its degrees of freedom.

    If a side has one run, only `value` is a number; if there are no runs, all fields are NaN.
    """

    value: float = nan
    low: float = nan
    high: float = nan
    error: float = nan
    freedom: float = nan

    def p(self, boundary: float) -> float:
        """The two-sided p-value of the difference being at the boundary; NaN without an interval."""
        distance = abs(self.value - boundary)
        if self.error == 0.0:
            return 0.0 if distance else 1.0
        return float(2 * stdtr(self.freedom, -distance / self.error))


def prompt_variance(answers: Sequence[Array]) -> float:
    """The variance that the draw of the prompts adds to a difference of means, beyond the variance between runs.

    Runs and prompts are crossed random effects. Let d_j be the difference at prompt j, averaged over the runs of each
    side: var(d) = s2_prompts + sum(s2_residual / k) over the sides with k runs. The variance between runs already
    holds s2_residual / (k n), so s2_prompts / n is what is left to add. s2_residual is the mean square of a two-way
    analysis of variance of one side.

    Args:
        answers: for each side an array (runs, prompts) of what a run has at a prompt, negative on the side that is
            subtracted. Every side has the same prompts.
    """
    added = float(np.var(sum(side.mean(axis=0) for side in answers), ddof=1))
    for side in answers:
        runs, n = side.shape
        residual = side - side.mean(axis=0) - side.mean(axis=1, keepdims=True) + side.mean()
        added -= float((residual**2).sum()) / max(runs - 1, 1) / (n - 1) / runs
    return added / n


def effect(strata: Sequence[Stratum], level: float = LEVEL) -> Effect:
    """The mean over tasks, with its interval; see `Effect` for sides without enough runs."""
    if not strata:
        return Effect()
    strata_by_task = Counter(stratum.task for stratum in strata)
    weights = [1 / len(strata_by_task) / strata_by_task[stratum.task] for stratum in strata]
    value = sum(weight * stratum.value for weight, stratum in zip(weights, strata, strict=True))
    variances: list[float] = []  # of the means over runs, one for each sample
    spread = 0.0
    prompt_errors = dict.fromkeys(strata_by_task, 0.0)
    for weight, stratum in zip(weights, strata, strict=True):
        # Strata of a task may share prompts: they count as wholly dependent.
        prompt_errors[stratum.task] += weight * sqrt(stratum.prompts)
        for sample in stratum.samples:
            if len(sample) < 2:
                return Effect(value)
            variances.append(weight**2 * float(np.var(sample, ddof=1)) / len(sample))
            spread += variances[-1] ** 2 / (len(sample) - 1)
    # The degrees of freedom are of the runs alone, so that the prompts never narrow the interval.
    freedom = sum(variances) ** 2 / spread if spread else inf
    error = sqrt(sum(variances) + sum(task_error**2 for task_error in prompt_errors.values()))
    reach = float(stdtrit(freedom, (1 + level) / 2)) * error
    return Effect(value, value - reach, value + reach, error, freedom)


def boundaries(kind: Kind, smallest: float) -> tuple[float, float]:
    """The bounds: an interval above the first supports a claim, one below the second contradicts it.

    Args:
        kind: gain, the difference is positive; match, nothing is lost; above, a bound is kept.
        smallest: the smallest effect of interest: a smaller gain is none, and a smaller loss is none.
    """
    return {"gain": (0.0, smallest), "match": (-smallest, -smallest), "above": (0.0, 0.0)}[kind]


def verdict(measured: Effect, kind: Kind, smallest: float) -> Verdict:
    """The verdict on a claim whose effect has this interval; see `boundaries` for the arguments."""
    supports, contradicts = boundaries(kind, smallest)
    if np.isnan(measured.value):
        return "not run"
    if kind == "gain" and -smallest < measured.low and measured.high < smallest:
        return "equivalent"
    if measured.low > supports:
        return "supported"
    if measured.high < contradicts:
        return "contradicted"
    return "inconclusive"


def verdict_everywhere(
    strata: Sequence[Stratum], kind: Kind, smallest: float, *, is_complete: bool
) -> Verdict:
    """The verdict on a claim about all cases, each a stratum; see `boundaries` for the arguments.

    It is supported if all strata were run (`is_complete`) and the interval of each supports it, which needs no
    correction. It is contradicted if the interval of one stratum contradicts it, at a level corrected for the number of
    strata (Bonferroni).
    """
    supports, contradicts = boundaries(kind, smallest)
    corrected_level = 1 - (1 - LEVEL) / len(strata)
    if any(effect([stratum], corrected_level).high < contradicts for stratum in strata):
        return "contradicted"
    if is_complete and all(effect([stratum]).low > supports for stratum in strata):
        return "supported"
    return "inconclusive"


def p_value(measured: Effect, kind: Kind, smallest: float) -> float:
    """The p-value of the verdict: the largest over the boundaries that the interval excludes; 1 if there is none."""
    supports, contradicts = boundaries(kind, smallest)
    excluded_by = {
        "supported": [supports],
        "contradicted": [contradicts],
        "equivalent": [-smallest, smallest],
    }
    excluded = excluded_by.get(verdict(measured, kind, smallest), [])
    return max(map(measured.p, excluded), default=1.0)


def holm(ps: Mapping[str, float]) -> dict[str, bool]:
    """Which of several verdicts hold after Holm's correction for their number, at 5 % in all."""
    holds = {}
    all_hold = True
    for rank, (name, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        all_hold = all_hold and p <= (1 - LEVEL) / (len(ps) - rank)
        holds[name] = all_hold
    return holds
