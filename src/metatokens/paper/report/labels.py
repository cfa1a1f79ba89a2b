"""Names for the rows of a table and the lines of a figure: the model, and whatever else sets its figures apart."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from metatokens.looking.style import SEPARATOR, model_of
from metatokens.paper.report.frame import MODELS, TASKS, Fields, Inputs

_FIRST = (*MODELS, *TASKS, "paper", "landmark", "none", "decoy")  # of all names, in the order in which they are shown

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
    labels = frame["model"]
    for column, form in _VARIANTS.items():
        if column in frame and _sets_apart(column, of_models(frame)):
            is_said = frame[column].notna() & (frame[column] != "")
            labels = labels.where(~is_said, labels + SEPARATOR + frame[column].map(form.format))
    return frame.assign(label=labels)


def of_models(frame: pd.DataFrame) -> pd.DataFrame:
    """Without what short cuts score, which are no models."""
    return frame[~frame["metric"].isin(["shortcut", "majority_rate"])] if "metric" in frame else frame


def in_order(names: Iterable[str]) -> list[str]:
    """Labels, tasks or conditions without repetition: the four models, and the paper's tasks and conditions, first."""
    return sorted(set(names), key=_order)


def measured_conditions(inputs: Inputs) -> dict[str, list[str]]:
    """The marker conditions in which accuracy was measured, by task; the one that models are trained on first."""
    found = inputs.select(metric="exact_match").groupby("task")["condition"].unique()
    return {task: in_order(found[task]) for task in in_order(found.index)}


def rows(inputs: Inputs, **where: Any) -> list[tuple[str, Fields]]:
    """The label and the fields of each model and variant that was measured.

    Args:
        inputs: whose figures have labels.
        **where: values that other fields must have, which are of the fields of each row too.
    """
    found = inputs.select(**where)[["label", "model", *_VARIANTS]].drop_duplicates().to_dict("records")
    found.sort(key=lambda row: _order(row["label"]))
    return [(row.pop("label"), row | where) for row in found]


def _sets_apart(column: str, measured: pd.DataFrame) -> bool:
    if column == "intervention":  # An intervened model is never the model itself.
        return True
    if column == "recipe":  # Recipes differ from stage to stage: named only where two of them fill one cell.
        return "metric" in measured and any(measured.groupby(_CELL, dropna=False)["recipe"].nunique() > 1)
    return len(set(measured[column].dropna()) - {""}) > 1


def _order(name: str) -> tuple[int, str]:
    known = model_of(name)
    return _FIRST.index(known) if known in _FIRST else len(_FIRST), name
