"""The rule of the verdicts on numbers worked out by hand, and against other libraries."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp, ttest_ind
from statsmodels.formula.api import mixedlm, ols
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import CompareMeans

from metatokens.paper.rule import (
    Effect,
    Stratum,
    effect,
    holm,
    p_value,
    prompt_variance,
    verdict,
    verdict_everywhere,
)

# Variance 0.0004: of three runs a side the error is 0.01633, df 4, reach 0.04534.
SPREAD = np.array([-0.02, 0.0, 0.02])


def versus(gap, spread=SPREAD, task="parity"):
    """Three runs a side that differ by the gap on average."""
    return Stratum(task, (0.6 + gap + spread, -(0.6 + spread)))


def test_an_interval_by_hand():
    result = effect([versus(0.1)])

    assert result.value == pytest.approx(0.1)
    assert result.freedom == pytest.approx(4)
    assert result.low == pytest.approx(0.1 - 0.04534, abs=1e-5)
    assert result.high == pytest.approx(0.1 + 0.04534, abs=1e-5)


@pytest.mark.parametrize(
    ("gap", "kind", "smallest", "expected"),
    [
        (0.06, "gain", 0.05, "supported"),  # 0.015 to 0.105
        (0.04, "gain", 0.05, "inconclusive"),  # -0.005 to 0.085
        (0.004, "gain", 0.05, "equivalent"),  # -0.041 to 0.0493
        (-0.01, "gain", 0.05, "contradicted"),  # -0.055 to 0.035
        # It lies above 0 too: equivalent comes first.
        (
            0.06,
            "gain",
            0.2,
            "equivalent",
        ),
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


def test_one_run_on_a_side_tells_nothing_and_no_run_was_not_run():
    single_run = Stratum("copying", (np.array([0.9]), -(0.1 + SPREAD)))

    result = effect([versus(0.3), single_run])

    assert result.value == pytest.approx((0.3 + 0.8) / 2)
    assert np.isnan(result.low)
    assert verdict(result, "gain", 0.05) == "inconclusive"
    assert verdict(effect([]), "gain", 0.05) == "not run"


def test_one_task_is_welchs_t():
    a, b = np.array([0.9, 0.7, 0.95, 0.6]), np.array([0.5, 0.52, 0.49])

    result = effect([Stratum("parity", (a, -b))])

    welch = ttest_ind(a, b, equal_var=False)
    assert (result.low, result.high) == pytest.approx(tuple(welch.confidence_interval()))
    assert result.freedom == pytest.approx(CompareMeans.from_data(a, b).dof_satt())
    assert result.p(0.0) == pytest.approx(welch.pvalue)


def test_a_comparison_within_runs_is_students_t():
    differences = np.array([0.9, 0.7, 0.95, 0.6])

    result = effect([Stratum("parity", (differences,), constant=-0.5)])

    student = ttest_1samp(differences, 0.5)
    interval = student.confidence_interval()
    assert (result.low, result.high) == pytest.approx((interval.low - 0.5, interval.high - 0.5))
    assert result.p(0.0) == pytest.approx(student.pvalue)


def test_tasks_weigh_alike_whatever_their_spread_or_number_of_strata():
    strata = [
        versus(0.1, task="parity"),
        versus(0.3, 5 * SPREAD, "copying"),
        versus(0.5, SPREAD, "copying"),
    ]

    result = effect(strata)

    # Variances of the six means: 0.0004 / 3 or 25 times that, with weights 1/2 and twice 1/4, squared.
    terms = [weight**2 * 0.0004 / 3 for weight in (0.5, 0.5, 5 / 4, 5 / 4, 0.25, 0.25)]
    squares = sum(term**2 / 2 for term in terms)
    assert result.value == pytest.approx((0.1 + (0.3 + 0.5) / 2) / 2)
    assert result.error == pytest.approx(sum(terms) ** 0.5)
    assert result.freedom == pytest.approx(sum(terms) ** 2 / squares)


def test_strata_of_a_task_may_share_prompts_and_tasks_do_not():
    samples = versus(0.1).samples
    strata = [
        Stratum(task, samples, prompts=prompts)
        for task, prompts in (("a", 0.01), ("a", 0.04), ("b", 0.09))
    ]
    without_prompts = effect([replace(stratum, prompts=0.0) for stratum in strata])

    shared, other = (0.1 + 0.2) / 4, 0.3 / 2
    expected = without_prompts.error**2 + shared**2 + other**2
    assert effect(strata).error ** 2 == pytest.approx(expected)


def test_runs_that_agree_exactly_have_an_interval_of_the_prompts_alone():
    result = effect([Stratum("parity", (np.full(3, 0.9), np.full(3, -0.5)), prompts=0.01)])

    assert (result.low, result.high) == pytest.approx((0.4 - 0.196, 0.4 + 0.196), abs=1e-4)
    assert effect([Stratum("parity", (np.full(3, 0.9),))]).p(0.0) == 0
    assert effect([Stratum("parity", (np.full(3, 0.0),))]).p(0.0) == 1


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


def test_the_draw_of_prompts_is_that_of_a_mixed_model():
    generator = np.random.default_rng(5)
    scores = crossed(generator, 4, 25, generator.normal(0, 0.6, 25))

    parts = {"run": "0 + C(run)", "prompt": "0 + C(prompt)"}
    model = mixedlm("score ~ 1", as_table(scores), groups="all", vc_formula=parts).fit()

    variances = dict(zip(model.model.exog_vc.names, model.vcomp, strict=True))
    assert prompt_variance([scores]) == pytest.approx(variances["prompt"] / 25, rel=1e-3)


@pytest.mark.parametrize(
    ("gaps", "is_complete", "expected"),
    [
        ([0.2, 0.1, 0.06], True, "supported"),
        ([0.2, 0.1, 0.06], False, "inconclusive"),
        ([0.2, 0.1, 0.06, 0.04], True, "inconclusive"),
        # Among four, one at 98.75 %: t(4) = 4.31, so it reaches 0.0704 to either side.
        ([0.2, 0.1, 0.06, -0.02], True, "inconclusive"),
        ([0.2, 0.1, 0.06, -0.021], False, "contradicted"),
    ],
)
def test_all_cases(gaps, is_complete, expected):
    strata = [versus(gap, task=task) for gap, task in zip(gaps, "abcd", strict=False)]

    assert verdict_everywhere(strata, "gain", 0.05, is_complete=is_complete) == expected


def test_the_p_value_of_a_verdict_is_that_of_the_boundary_it_excludes():
    above, within, below = (effect([versus(gap)]) for gap in (0.1, 0.0, -0.1))

    assert p_value(above, "gain", 0.05) == above.p(0.0) < 0.05
    assert p_value(below, "gain", 0.05) == below.p(0.05) < 0.05
    assert p_value(within, "gain", 0.05) == max(within.p(0.05), within.p(-0.05)) < 0.05
    assert p_value(below, "match", 0.05) == below.p(-0.05)
    assert p_value(effect([versus(0.04)]), "gain", 0.05) == 1
    assert p_value(Effect(0.3), "gain", 0.05) == 1
    assert above.p(above.low) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "ps",
    [(0.01, 0.02, 0.03), (0.016, 0.02, 0.04), (0.02, 0.03, 0.001), (0.04, 1.0, 0.02)],
)
def test_holm(ps):
    rejected = holm({str(number): p for number, p in enumerate(ps)})

    expected, *_ = multipletests(ps, method="holm")
    expected_by_name = {
        str(number): bool(is_rejected) for number, is_rejected in enumerate(expected)
    }
    assert rejected == expected_by_name
