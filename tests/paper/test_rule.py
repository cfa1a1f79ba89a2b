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
    Kind,
    Stratum,
    Verdict,
    effect,
    holm,
    p_value,
    prompt_variance,
    verdict,
    verdict_everywhere,
)

SPREAD = np.array([-0.02, 0.0, 0.02])  # variance 0.0004: of three runs a side the error is 0.01633, df 4, reach 0.04534


def _versus(gap: float, spread: np.ndarray = SPREAD, task: str = "parity") -> Stratum:
    return Stratum(task, (0.6 + gap + spread, -(0.6 + spread)))


def test_an_interval_by_hand() -> None:
    found = effect([_versus(0.1)])
    assert found.value == pytest.approx(0.1)
    assert found.freedom == pytest.approx(4)
    assert (found.low, found.high) == pytest.approx((0.1 - 0.04534, 0.1 + 0.04534), abs=1e-5)


@pytest.mark.parametrize(
    ("gap", "kind", "smallest", "expected"),
    [
        (0.06, "gain", 0.05, "supported"),  # 0.015 to 0.105
        (0.04, "gain", 0.05, "inconclusive"),  # -0.005 to 0.085
        (0.0, "gain", 0.05, "equivalent"),  # within 0.045
        (0.004, "gain", 0.05, "equivalent"),  # -0.041 to 0.0493
        (-0.01, "gain", 0.05, "contradicted"),  # -0.055 to 0.035
        (-0.2, "gain", 0.05, "contradicted"),
        (0.06, "gain", 0.2, "equivalent"),  # it lies above 0 too: equivalent comes first
        (0.0, "match", 0.05, "supported"),  # above -0.05
        (-0.01, "match", 0.05, "inconclusive"),  # from -0.055 on
        (-0.1, "match", 0.05, "contradicted"),  # up to -0.055
        (0.0, "match", 0.02, "inconclusive"),
        (0.05, "above", 0.05, "supported"),
        (0.04, "above", 0.05, "inconclusive"),
        (-0.05, "above", 0.05, "contradicted"),
    ],
)
def test_each_verdict_by_hand(gap: float, kind: Kind, smallest: float, expected: Verdict) -> None:
    assert verdict(effect([_versus(gap)]), kind, smallest) == expected


def test_one_run_on_a_side_tells_nothing_and_no_run_was_not_run() -> None:
    one = effect([_versus(0.3), Stratum("copying", (np.array([0.9]), -(0.1 + SPREAD)))])
    assert one.value == pytest.approx((0.3 + 0.8) / 2)
    assert np.isnan(one.low)
    assert verdict(one, "gain", 0.05) == "inconclusive"
    assert verdict(effect([]), "gain", 0.05) == "not run"


def test_one_task_is_welchs_t_and_a_comparison_within_runs_is_students() -> None:
    a, b = np.array([0.9, 0.7, 0.95, 0.6]), np.array([0.5, 0.52, 0.49])
    found = effect([Stratum("parity", (a, -b))])
    welch = ttest_ind(a, b, equal_var=False)
    assert (found.low, found.high) == pytest.approx(tuple(welch.confidence_interval()))
    assert found.freedom == pytest.approx(CompareMeans.from_data(a, b).dof_satt())
    assert found.p(0.0) == pytest.approx(welch.pvalue)

    within = effect([Stratum("parity", (a,), constant=-0.5)])
    student = ttest_1samp(a, 0.5)
    interval = student.confidence_interval()
    assert (within.low, within.high) == pytest.approx((interval.low - 0.5, interval.high - 0.5))
    assert within.p(0.0) == pytest.approx(student.pvalue)


def test_tasks_weigh_alike_whatever_their_spread_or_number_of_strata() -> None:
    strata = [_versus(0.1, task="parity"), _versus(0.3, 5 * SPREAD, "copying"), _versus(0.5, SPREAD, "copying")]
    found = effect(strata)
    assert found.value == pytest.approx((0.1 + (0.3 + 0.5) / 2) / 2)
    # Variances of the six means: 0.0004 / 3 or 25 times that, with weights 1/2 and twice 1/4, squared.
    terms = [weight**2 * 0.0004 / 3 for weight in (0.5, 0.5, 5 / 4, 5 / 4, 0.25, 0.25)]
    assert found.error == pytest.approx(sum(terms) ** 0.5)
    assert found.freedom == pytest.approx(sum(terms) ** 2 / sum(one**2 / 2 for one in terms))


def test_prompts_widen_the_interval_and_leave_its_degrees_of_freedom() -> None:
    without, with_prompts = effect([_versus(0.1)]), effect([Stratum("parity", _versus(0.1).samples, prompts=0.0003)])
    assert with_prompts.error**2 == pytest.approx(without.error**2 + 0.0003)
    assert with_prompts.freedom == without.freedom


def test_strata_of_a_task_may_share_prompts_and_tasks_do_not() -> None:
    alone = _versus(0.1).samples
    strata = [Stratum(task, alone, prompts=prompts) for task, prompts in (("a", 0.01), ("a", 0.04), ("b", 0.09))]
    runs = effect([replace(one, prompts=0.0) for one in strata]).error
    shared, other = (0.1 + 0.2) / 4, 0.3 / 2
    assert effect(strata).error ** 2 == pytest.approx(runs**2 + shared**2 + other**2)


def test_runs_that_agree_exactly_have_an_interval_of_the_prompts_alone() -> None:
    found = effect([Stratum("parity", (np.full(3, 0.9), np.full(3, -0.5)), prompts=0.01)])
    assert (found.low, found.high) == pytest.approx((0.4 - 0.196, 0.4 + 0.196), abs=1e-4)
    assert effect([Stratum("parity", (np.full(3, 0.9),))]).p(0.0) == 0
    assert effect([Stratum("parity", (np.full(3, 0.0),))]).p(0.0) == 1


def _crossed(rng: np.random.Generator, runs: int, prompts: int, by_prompt: np.ndarray) -> np.ndarray:
    """Scores of runs at prompts: variance 0.09 between runs, 0.25 of the residual."""
    return rng.normal(0, 0.3, (runs, 1)) + by_prompt + rng.normal(0, 0.5, (runs, prompts))


def _table(scores: np.ndarray) -> pd.DataFrame:
    runs, prompts = np.indices(scores.shape).reshape(2, -1)
    return pd.DataFrame({"run": runs, "prompt": prompts, "score": scores.ravel(), "all": 0})


def test_the_draw_of_prompts_is_that_of_a_two_way_analysis_of_variance() -> None:
    rng = np.random.default_rng(4)
    scores = _crossed(rng, 5, 40, rng.normal(0, 0.6, 40))
    squares = anova_lm(ols("score ~ C(run) + C(prompt)", _table(scores)).fit())["mean_sq"]
    expected = (squares["C(prompt)"] - squares["Residual"]) / 5
    assert prompt_variance([scores]) == pytest.approx(expected / 40)
    assert prompt_variance([-scores]) == pytest.approx(expected / 40)


def test_the_draw_of_prompts_is_that_of_a_mixed_model() -> None:
    rng = np.random.default_rng(5)
    scores = _crossed(rng, 4, 25, rng.normal(0, 0.6, 25))
    parts = {"run": "0 + C(run)", "prompt": "0 + C(prompt)"}
    model = mixedlm("score ~ 1", _table(scores), groups="all", vc_formula=parts).fit()
    by_name = dict(zip(model.model.exog_vc.names, model.vcomp, strict=True))
    assert prompt_variance([scores]) == pytest.approx(by_name["prompt"] / 25, rel=1e-3)


def test_the_draw_of_prompts_with_two_sides_has_the_variance_that_was_put_in() -> None:
    """Half of the difficulty is shared by the sides and cancels; what differs has variance 2 * 0.16."""
    rng = np.random.default_rng(6)
    found = []
    for _ in range(3000):
        shared, own = rng.normal(0, 0.8, 30), rng.normal(0, 0.4, (2, 30))
        found.append(prompt_variance([_crossed(rng, 3, 30, shared + own[0]), -_crossed(rng, 5, 30, shared + own[1])]))
    assert np.mean(found) == pytest.approx(2 * 0.16 / 30, rel=0.05)


def test_all_cases() -> None:
    strata = [_versus(gap, task=task) for gap, task in ((0.2, "a"), (0.1, "b"), (0.06, "c"))]
    assert verdict_everywhere(strata, "gain", 0.05, is_complete=True) == "supported"
    assert verdict_everywhere(strata, "gain", 0.05, is_complete=False) == "inconclusive"
    assert verdict_everywhere([*strata, _versus(0.04, task="d")], "gain", 0.05, is_complete=True) == "inconclusive"
    # Among four, one at 98.75 %: t(4) = 4.31, so it reaches 0.0704 to either side.
    assert verdict_everywhere([*strata, _versus(-0.02, task="d")], "gain", 0.05, is_complete=True) == "inconclusive"
    assert verdict_everywhere([*strata, _versus(-0.021, task="d")], "gain", 0.05, is_complete=False) == "contradicted"


def test_the_p_value_of_a_verdict_is_that_of_the_boundary_it_excludes() -> None:
    above, within, below = (effect([_versus(gap)]) for gap in (0.1, 0.0, -0.1))
    assert p_value(above, "gain", 0.05) == above.p(0.0) < 0.05
    assert p_value(below, "gain", 0.05) == below.p(0.05) < 0.05
    assert p_value(within, "gain", 0.05) == max(within.p(0.05), within.p(-0.05)) < 0.05
    assert p_value(below, "match", 0.05) == below.p(-0.05)
    assert p_value(effect([_versus(0.04)]), "gain", 0.05) == 1
    assert p_value(Effect(0.3), "gain", 0.05) == 1
    edge = effect([_versus(0.1)])
    assert Effect(0.1, 0.0, 0.2, edge.error, edge.freedom).p(edge.low) == pytest.approx(0.05)


@pytest.mark.parametrize("ps", [(0.01, 0.02, 0.03), (0.016, 0.02, 0.04), (0.02, 0.03, 0.001), (0.04, 1.0, 0.02)])
def test_holm(ps: tuple[float, ...]) -> None:
    expected, *_ = multipletests(ps, method="holm")
    found = holm({str(place): p for place, p in enumerate(ps)})
    assert [found[str(place)] for place in range(len(ps))] == expected.tolist()
