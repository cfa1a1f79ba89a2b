"""From training curves to the step at which a task was learned."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from metatokens.report.estimates import Labels, tasks_in_order
from metatokens.report.inputs import CurvePoint

LEARNED_LOSS = 0.1  # nats: a task is learned when its answer loss stays under this
BUDGET = 1.5  # a comparison trains every model this many times the steps of the slowest that learns


@dataclass(frozen=True)
class Learning:
    """How one fine-tuning run went."""

    label: str
    task: str
    train_length: int | None
    seed: int
    learned: CurvePoint | None
    """The first logged step from which the loss stays under the threshold, if there is one."""
    steps: int
    """Steps trained."""
    budget: float | None
    """Steps trained, divided by those that the slowest learner of the task needed; None where no model learned it."""


def learning(curves: Sequence[CurvePoint]) -> list[Learning]:
    """Every fine-tuning run in the curves, by task and model."""
    labels = Labels(curves)
    runs: dict[tuple[str, int | None, str, int], dict[int, CurvePoint]] = defaultdict(dict)
    for point in curves:
        if point.task is not None:
            # A resumed run may have logged a step twice; the later record counts.
            runs[point.task, point.train_length, labels(point), point.seed][point.step] = point
    learned = {run: _learned(points) for run, points in runs.items()}
    slowest: dict[tuple[str, int | None], int] = defaultdict(int)
    for (task, length, _, _), reached in learned.items():
        slowest[task, length] = max(slowest[task, length], reached.step if reached else 0)
    outcomes = []
    for run, points in runs.items():
        task, length, label, seed = run
        steps, needed = max(points), slowest[task, length]
        budget = steps / needed if needed else None
        outcomes.append(Learning(label, task, length, seed, learned[run], steps, budget))
    order = tasks_in_order(run.task for run in outcomes)
    return sorted(
        outcomes, key=lambda run: (order.index(run.task), run.train_length or 0, labels.all.index(run.label), run.seed)
    )


def _learned(points: dict[int, CurvePoint]) -> CurvePoint | None:
    # "Under" is asked of every later loss, so that one that is not a number counts as not learned.
    tail = list(takewhile(lambda step: points[step].loss < LEARNED_LOSS, sorted(points, reverse=True)))
    return points[tail[-1]] if tail else None
