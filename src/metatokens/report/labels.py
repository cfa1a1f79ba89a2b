"""Names for the rows of a table and the lines of a figure: the model, and whatever else sets its figures apart."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from metatokens.report.derive import select
from metatokens.report.frame import MODELS, TASKS, Cell, cell_of

SEPARATOR = " · "
_CONDITIONS = ("paper", "none", "decoy")

# What can set two figures of one model apart, and how a label says it.
_VARIANTS = {
    "position_embedding": "{}",
    "train_condition": "trained on {}",
    "train_length": "trained at {:.0f}",
    "intervention": "{}",
    "recipe": "{}",
}
_NOT_THE_RECIPE = ["model", "position_embedding", "task", "condition", "train_condition", "train_length", "length"]
_NOT_THE_RECIPE += ["intervention", "noise_seed", "text", "metric", "seed"]


def labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """Figures or curves with a column `label`."""
    measured = frame[frame["metric"] != "majority_rate"] if "metric" in frame else frame
    labels = frame["model"]
    for column, form in _VARIANTS.items():
        if column in frame and _sets_apart(column, measured):
            is_said = frame[column].notna() & (frame[column] != "")
            labels = labels.where(~is_said, labels + SEPARATOR + frame[column].map(form.format))
    return frame.assign(label=labels)


def labels_in_order(frame: pd.DataFrame) -> list[str]:
    """Every label of a frame once, the four models first."""
    measured = frame[frame["metric"] != "majority_rate"] if "metric" in frame else frame
    return sorted(set(measured["label"]), key=_models_in_order)


def model_of(label: str) -> str:
    """The model that a label starts with."""
    return label.split(SEPARATOR)[0]


def variant_of(label: str) -> str:
    """What a label says beside the model; empty where the model says all."""
    return label.removeprefix(model_of(label)).removeprefix(SEPARATOR)


def tasks_in_order(tasks: Iterable[str]) -> list[str]:
    """Tasks without repetition, the paper's four first."""
    return sorted(set(tasks), key=lambda task: _position(task, TASKS))


def measured_tasks(figures: pd.DataFrame) -> list[str]:
    """The tasks of which there is an accuracy."""
    return tasks_in_order(select(figures, metric="exact_match")["task"])


def measured_conditions(figures: pd.DataFrame, task: str) -> list[str]:
    """The marker conditions in which a task was measured, the one that models are trained on first."""
    found = set(select(figures, metric="exact_match", task=task)["condition"])
    return sorted(found, key=lambda condition: _position(condition, _CONDITIONS))


def pivot(figures: pd.DataFrame, column: str, **where: Any) -> dict[str, dict[Any, Cell]]:
    """One figure for each label and each value of `column`, both in order.

    Args:
        figures: with labels.
        column: the field that makes the columns, such as `length`.
        **where: values that other fields must have.
    """
    found = dict(tuple(select(figures, **where).groupby(["label", column], dropna=False)))
    table: dict[str, dict[Any, Cell]] = {}
    for label, value in sorted(found, key=lambda key: (_models_in_order(key[0]), key[1] != key[1], key[1])):
        whole = None if value != value else int(value) if isinstance(value, float) else value
        table.setdefault(label, {})[whole] = cell_of(found[label, value])
    return table


def _sets_apart(column: str, measured: pd.DataFrame) -> bool:
    if column == "intervention":  # An intervened model is never the model itself.
        return True
    if column == "recipe":  # Recipes differ from stage to stage: named only where two of them fill one cell.
        if "metric" not in measured:
            return False
        return bool((measured.groupby(_NOT_THE_RECIPE, dropna=False)["recipe"].nunique() > 1).any())
    return len(set(measured[column].dropna()) - {""}) > 1


def _models_in_order(label: str) -> tuple[int, str]:
    return _position(model_of(label), MODELS)[0], label


def _position(value: str, known: Sequence[str]) -> tuple[int, str]:
    return (known.index(value) if value in known else len(known)), value
