"""Names for the rows of a table and the lines of a figure: the model, and whatever else sets its figures apart."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from metatokens.report.frame import MODELS, TASKS, Fields, Inputs

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
_CELL = ["model", "position_embedding", "task", "condition", "train_condition", "train_length", "length"]
_CELL += ["intervention", "noise_seed", "text", "metric", "seed"]


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


def rows(inputs: Inputs, **where: Any) -> list[tuple[str, Fields]]:
    """The label and the fields of each model and variant that was measured.

    Args:
        inputs: whose figures have labels.
        **where: values that other fields must have, which are of the fields of each row too.
    """
    columns = ["model", *_VARIANTS]
    found = inputs.select(**where)[["label", *columns]].drop_duplicates().to_dict("records")
    found.sort(key=lambda row: _models_in_order(row["label"]))
    return [(row.pop("label"), {**row, **where}) for row in found]


def measured_tasks(inputs: Inputs) -> list[str]:
    """The tasks of which there is an accuracy."""
    return tasks_in_order(inputs.select(metric="exact_match")["task"])


def measured_conditions(inputs: Inputs, task: str) -> list[str]:
    """The marker conditions in which a task was measured, the one that models are trained on first."""
    found = set(inputs.select(metric="exact_match", task=task)["condition"])
    return sorted(found, key=lambda condition: _position(condition, _CONDITIONS))


def _sets_apart(column: str, measured: pd.DataFrame) -> bool:
    if column == "intervention":  # An intervened model is never the model itself.
        return True
    if column == "recipe":  # Recipes differ from stage to stage: named only where two of them fill one cell.
        if "metric" not in measured:
            return False
        return bool((measured.groupby(_CELL, dropna=False)["recipe"].nunique() > 1).any())
    return len(set(measured[column].dropna()) - {""}) > 1


def _models_in_order(label: str) -> tuple[int, str]:
    return _position(model_of(label), MODELS)[0], label


def _position(value: str, known: Sequence[str]) -> tuple[int, str]:
    return (known.index(value) if value in known else len(known)), value
