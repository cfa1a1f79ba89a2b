"""From training curves to the step at which a task was learned."""

import math

import pandas as pd

from metatokens.paper.report.labels import in_order, labelled
from metatokens.paper.report.text import name

LEARNED_LOSS = 0.1  # nats: a task is learned when its answer loss stays under this
BUDGET = 1.5  # a comparison trains every model this many times the steps of the slowest that learns
_RUN = ["task", "train_length", "label", "seed"]


def fine_tuning_losses(curves: pd.DataFrame) -> pd.DataFrame:
    """The points that have a task and a loss, by step; of a step that a resumed run logged twice, the later."""
    points = labelled(curves[(curves["task"] != "") & curves["loss"].notna()])
    return points.drop_duplicates([*_RUN, "step"], keep="last").sort_values("step")


def learning(curves: pd.DataFrame) -> pd.DataFrame:
    """How each fine-tuning run went: a row for each task, train length, label and seed, in this order.

    Further columns are `place`, the task and train length as a reader sees them; `learned`, the first logged step from
    which the loss stays under the threshold, NaN where there is none; `steps`, trained; and `budget`, these divided by
    those that the slowest learner of the task needed, NaN where no model learned it.
    """
    points = fine_tuning_losses(curves)
    for column in ("task", "label"):
        points[column] = pd.Categorical(points[column], in_order(points[column]))
    backwards = points.assign(is_under=points["loss"] < LEARNED_LOSS)[::-1].groupby(_RUN, observed=True, dropna=False)
    points["learned"] = points["step"].where(backwards["is_under"].cummin())
    runs = points.groupby(_RUN, observed=True, dropna=False, as_index=False)
    found = runs.agg(learned=("learned", "min"), steps=("step", "max"))
    trained = found["train_length"].map(lambda length: "" if math.isnan(length) else f" at {length:,.0f} tokens")
    found["place"] = found["task"].map(name).astype(object) + trained
    return found.assign(budget=found["steps"] / found.groupby("place")["learned"].transform("max"))
