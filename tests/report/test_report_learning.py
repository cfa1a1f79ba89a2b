"""When a task counts as learned, and whether the others were trained long enough."""

import math
from collections.abc import Sequence

import pytest

from metatokens.report.findings import budget
from metatokens.report.inputs import CurvePoint
from metatokens.report.learning import learning
from metatokens.report.tables import learning_steps


def curve(model: str, losses: Sequence[float], task: str | None = "parity", seed: int = 0) -> list[CurvePoint]:
    """One loss every 10 steps."""
    return [
        CurvePoint(model=model, task=task, train_length=128, seed=seed, step=10 * (i + 1), loss=loss)
        for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.0, 0.5, 0.09, 0.05], 30),
        ([2.0, 0.05, 0.5, 0.09, 0.05], 40),  # a dip is not yet learned
        ([0.05, 0.05], 10),
        ([2.0, 0.1, 0.1], None),  # under, not at
        ([0.05, 0.05, 0.2], None),
        ([0.05, math.nan], None),
        ([math.nan, 0.05], 20),
    ],
)
def test_learned_means_that_the_loss_stays_under_the_threshold(losses: list[float], step: int | None) -> None:
    [run] = learning(curve("meta", losses))
    assert (run.learned and run.learned.step) == step
    assert run.steps == 10 * len(losses)


def test_a_step_logged_twice_counts_once_and_order_does_not_matter() -> None:
    points = curve("meta", [2.0, 2.0, 0.05])
    resumed = CurvePoint(model="meta", task="parity", train_length=128, seed=0, step=20, loss=0.05)
    [run] = learning([points[2], points[0], points[1], resumed])
    assert run.learned is not None
    assert run.learned.step == 20


def test_the_budget_is_measured_against_the_slowest_learner() -> None:
    points = curve("meta", [0.05] * 12) + curve("twin", [2.0] * 7 + [0.05] * 5) + curve("gpt2", [2.0] * 9)
    budgets = {run.label: run.budget for run in learning(points)}
    assert budgets == {"gpt2": 90 / 80, "twin": 120 / 80, "meta": 120 / 80}
    assert "A model had less than 1.5 times the slowest learner's steps: Parity at 128 tokens (1.12)" in budget(points)
    assert learning_steps(points).footer == (
        ("steps trained", "90\u2013120"),
        ("\u00f7 slowest learner", "1.12\u20131.50"),
    )


def test_the_budget_sentence_names_each_answer() -> None:
    enough = curve("meta", [2.0, 0.05, 0.05], "parity")
    never = curve("meta", [2.0, 2.0], "copying")
    assert budget(enough + never) == (
        "Every model had 1.5 times the slowest learner's steps or more: Parity at 128 tokens. "
        "Learned by no model in the steps given: Copying at 128 tokens."
    )


def test_steps_table_by_model_and_task() -> None:
    points = curve("gpt2", [2.0] * 4) + curve("meta", [2.0, 0.05, 0.05, 0.05]) + curve("meta", [1.0], "list_recall")
    table = learning_steps([*points, *curve("meta", [3.0], None)])
    assert table.header == ("model", "List recall", "Parity")
    assert table.rows == (("gpt2", "", "not reached"), ("meta", "not reached", "20"))
    assert table.footer == (("steps trained", "10", "40"), ("\u00f7 slowest learner", "-", "2.00"))


def test_seeds_have_rows_of_their_own() -> None:
    table = learning_steps(curve("meta", [0.05]) + curve("meta", [2.0], seed=1))
    assert [row[:2] for row in table.rows] == [("meta, seed 0", "10"), ("meta, seed 1", "not reached")]
