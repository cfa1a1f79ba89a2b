"""From training curves to the step at which a task was learned."""

from dataclasses import dataclass, replace

import pandas as pd

from metatokens.report.labels import labelled, labels_in_order, tasks_in_order

LEARNED_LOSS = 0.1  # nats: a task is learned when its answer loss stays under this
BUDGET = 1.5  # a comparison trains every model this many times the steps of the slowest that learns


@dataclass(frozen=True)
class Learning:
    """How one fine-tuning run went."""

    label: str
    task: str
    train_length: int | None
    seed: int
    learned: int | None
    """The first logged step from which the loss stays under the threshold, if there is one."""
    steps: int
    """Steps trained."""
    place: int
    """Of the label, among all of them."""
    budget: float | None = None
    """Steps trained, divided by those that the slowest learner of the task needed; None where no model learned it."""


def fine_tuning_losses(curves: pd.DataFrame) -> pd.DataFrame:
    """The points that have a task and a loss, by step; of a step that a resumed run logged twice, the later."""
    points = labelled(curves[(curves["task"] != "") & curves["loss"].notna()])
    return points.drop_duplicates(["task", "train_length", "label", "seed", "step"], keep="last").sort_values("step")


def learning(curves: pd.DataFrame) -> list[Learning]:
    """Every fine-tuning run in the curves, by task and model."""
    points = fine_tuning_losses(curves)
    order = {label: place for place, label in enumerate(labels_in_order(points))}
    runs = []
    for (task, length, label, seed), own in points.groupby(["task", "train_length", "label", "seed"], dropna=False):
        train_length = None if length != length else int(length)
        steps = int(own["step"].max())
        runs.append(Learning(label, task, train_length, int(seed), _learned(own), steps, order[label]))
    tasks = tasks_in_order(run.task for run in runs)
    runs.sort(key=lambda run: (tasks.index(run.task), run.train_length or 0, run.place, run.seed))
    slowest: dict[tuple[str, int | None], int] = {}
    for run in runs:
        slowest[run.task, run.train_length] = max(slowest.get((run.task, run.train_length), 0), run.learned or 0)
    needed = [slowest[run.task, run.train_length] for run in runs]
    return [replace(run, budget=run.steps / most if most else None) for run, most in zip(runs, needed, strict=True)]


def _learned(points: pd.DataFrame) -> int | None:
    # "Under" is asked of every later loss, so that one that is not a number counts as not learned.
    under = (points["loss"] < LEARNED_LOSS).to_numpy()[::-1]
    last = int(under.argmin()) if not under.all() else len(under)
    return int(points["step"].iloc[len(points) - last]) if last else None
