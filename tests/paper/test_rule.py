"""The rule of the verdicts on numbers worked out by hand, and against other libraries."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp, ttest_ind
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm

from metatokens.paper.rule import (
    Stratum,
    corrected,
    effect,
    prompt_variance,
    verdict,
    verdict_everywhere,
)

# Variance 0.0004: of three runs a side the error is 0.01633, df 4, reach 0.04534.
SPREAD = np.array([-0.02, 0.0, 0.02])


def by_seed(*scores):
    """The scores of runs whose seeds count from 0."""
    return dict(enumerate(scores))


def versus(gap, spread=SPREAD, task="parity"):
    """Three runs a side that differ by the gap on average."""
    return Stratum(task, (by_seed(*(0.6 + gap + spread)), by_seed(*-(0.6 + spread))))


def test_an_interval_by_hand():
    result = effect([versus(0.1)])

    assert result.value == pytest.approx(0.1)
    assert result.low == pytest.approx(0.1 - 0.04534, abs=1e-5)
    assert result.high == pytest.approx(0.1 + 0.04534, abs=1e-5)


@pytest.mark.parametrize(
    ("gap", "kind", "smallest", "expected"),
    [
        (0.06, "gain", 0.05, "supported"),  # 0.015 to 0.105
        (0.04, "gain", 0.05, "inconclusive"),  # -0.005 to 0.085
        (0.004, "gain", 0.05, "within"),  # -0.041 to 0.0493
        (-0.01, "gain", 0.05, "no lead"),  # -0.055 to 0.035
        (-0.04, "gain", 0.05, "no lead"),  # -0.085 to 0.005
        (-0.05, "gain", 0.05, "reversed"),  # -0.095 to -0.0047
        (0.06, "gain", 0.2, "within"),  # It lies above 0 too: within comes first.
        (0.0, "match", 0.05, "supported"),  # above -0.05
        (-0.01, "match", 0.05, "inconclusive"),  # from -0.055 on
        (-0.1, "match", 0.05, "contradicted"),  # up to -0.055
        (0.05, "above", 0.05, "supported"),
        (0.04, "above", 0.05, "inconclusive"),
        (-0.05, "above", 0.05, "contradicted"),
    ],
)
def test_each_verdict_by_hand(gap, kind, smallest, expected):
    assert verdict(effect([versus(gap)]), kind, smallest) == expected


def test_two_runs_on_a_side_tell_nothing_and_no_run_is_not_measured():
    two_runs = Stratum("copying", (by_seed(0.8, 1.0), by_seed(*-(0.1 + SPREAD))))

    result = effect([versus(0.3), two_runs])

    assert result.value == pytest.approx((0.3 + 0.8) / 2)
    assert np.isnan(result.low)
    assert verdict(result, "gain", 0.05) == "inconclusive"
    assert verdict(effect([]), "gain", 0.05) == "not measured"


def test_one_task_is_welchs_t():
    a, b = np.array([0.9, 0.7, 0.95, 0.6]), np.array([0.5, 0.52, 0.49])

    result = effect([Stratum("parity", (by_seed(*a), by_seed(*-b)))])

    welch = ttest_ind(a, b, equal_var=False)
    assert (result.low, result.high) == pytest.approx(tuple(welch.confidence_interval()))


def test_a_comparison_within_runs_is_students_t():
    differences = np.array([0.9, 0.7, 0.95, 0.6])

    result = effect([Stratum("parity", (by_seed(*differences),), constant=-0.5)])

    student = ttest_1samp(differences, 0.5)
    interval = student.confidence_interval()
    assert (result.low, result.high) == pytest.approx((interval.low - 0.5, interval.high - 0.5))


def test_seeds_are_the_observations_of_all_tasks_together():
    """The mean over tasks of each seed comes first; a task weighs alike whatever its spread or number of strata."""
    generator = np.random.default_rng(3)
    scores = generator.normal(0.5, 0.1, (2, 3, 6))  # (sides, strata, seeds)
    tasks = ("parity", "copying", "copying")
    strata = [
        Stratum(task, (by_seed(*scores[0, stratum]), by_seed(*-scores[1, stratum])))
        for stratum, task in enumerate(tasks)
    ]

    result = effect(strata)

    of_seeds = np.einsum("s,ast->at", [1 / 2, 1 / 4, 1 / 4], scores)
    welch = ttest_ind(*of_seeds, equal_var=False)
    assert result.value == pytest.approx(of_seeds[0].mean() - of_seeds[1].mean())
    assert (result.low, result.high) == pytest.approx(tuple(welch.confidence_interval()))


def test_tasks_with_seeds_of_their_own_are_independent():
    copying = versus(0.3, task="copying")
    other_seeds = [
        {seed + 10: score for seed, score in sample.items()} for sample in copying.samples
    ]

    alike = effect([versus(0.1), copying])
    independent = effect([versus(0.1), replace(copying, samples=tuple(other_seeds))])

    # A side's variance is that of one task, 0.0004 / 3; or half of it, of which n - 1 is 5 rather than 2.
    assert alike.high - alike.value == pytest.approx(0.04534, abs=1e-5)
    halved = 0.04534 * (1 / 2 * 6 / 5 * 2 / 3) ** 0.5
    assert independent.high - independent.value == pytest.approx(halved * 2.228 / 2.776, rel=1e-3)


def test_strata_of_a_task_may_share_prompts_and_tasks_do_not():
    """Runs that agree leave the interval to the prompts."""
    samples = (by_seed(0.9, 0.9, 0.9), by_seed(-0.5, -0.5, -0.5))
    strata = [
        Stratum(task, samples, prompts=prompts)
        for task, prompts in (("a", 0.01), ("a", 0.04), ("b", 0.09))
    ]

    result = effect(strata)

    shared, other = (0.1 + 0.2) / 4, 0.3 / 2
    error = (shared**2 + other**2) ** 0.5
    assert result.high - result.value == pytest.approx(1.96 * error, rel=1e-4)


def test_runs_that_agree_exactly_have_an_interval_of_the_prompts_alone():
    always_right, half_right = by_seed(0.9, 0.9, 0.9), by_seed(-0.5, -0.5, -0.5)

    result = effect([Stratum("parity", (always_right, half_right), prompts=0.01)])

    assert (result.low, result.high) == pytest.approx((0.4 - 0.196, 0.4 + 0.196), abs=1e-4)


def crossed(generator, runs, prompts, difficulty):
    """Scores of runs at prompts: variance 0.09 between runs, 0.25 of the residual."""
    luck = generator.normal(0, 0.3, (runs, 1))
    return luck + difficulty + generator.normal(0, 0.5, (runs, prompts))


def as_table(scores):
    runs, prompts = np.indices(scores.shape).reshape(2, -1)
    return pd.DataFrame({"run": runs, "prompt": prompts, "score": scores.ravel(), "all": 0})


def test_the_draw_of_prompts_is_that_of_a_two_way_analysis_of_variance():
    generator = np.random.default_rng(4)
    scores = crossed(generator, 5, 40, generator.normal(0, 0.6, 40))

    squares = anova_lm(ols("score ~ C(run) + C(prompt)", as_table(scores)).fit())["mean_sq"]

    expected = (squares["C(prompt)"] - squares["Residual"]) / 5 / 40
    assert prompt_variance([scores]) == pytest.approx(expected)
    assert prompt_variance([-scores]) == pytest.approx(expected)


def test_a_single_prompt_shows_nothing_of_the_draw():
    assert np.isnan(prompt_variance([np.ones((3, 1))]))


@pytest.mark.parametrize(
    ("gaps", "is_complete", "expected"),
    [
        ([0.2, 0.1, 0.06], True, "supported"),
        ([0.2, 0.1, 0.06], False, "inconclusive"),
        ([0.2, 0.1, 0.06, 0.04], True, "inconclusive"),
        # Among four, one at 98.75 %: t(4) = 4.31, so it reaches 0.0704 to either side.
        ([0.2, 0.1, 0.06, -0.02], True, "inconclusive"),
        ([0.2, 0.1, 0.06, -0.021], False, "no lead"),
        ([0.2, 0.1, 0.06, -0.1], False, "no lead"),  # in one of four; the others are not reversed
    ],
)
def test_all_cases(gaps, is_complete, expected):
    strata = [versus(gap, task=task) for gap, task in zip(gaps, "abcd", strict=False)]

    assert verdict_everywhere(strata, "gain", 0.05, is_complete=is_complete) == expected


def test_a_corrected_level_shares_the_errors_among_the_tests():
    assert corrected(1) == pytest.approx(0.95)
    assert corrected(4) == pytest.approx(0.9875)
