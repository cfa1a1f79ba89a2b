"""From result records to comparable figures: one estimate a cell, and the difference of two."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from metatokens.records import Measurement, Metric, Result
from metatokens.report.inputs import OUTCOME_FIELDS, CurvePoint

MODELS = ("gpt2", "pause", "twin", "meta")  # each differs in one thing from the one before it
SEPARATOR = " · "
_TASKS = ("list_recall", "segment_counting", "parity", "copying")
_CONDITIONS = ("paper", "none", "decoy")

# What can set two results of one model apart, and how a label says it.
_VARIANT_FIELDS = {
    "position_embedding": "{}",
    "train_condition": "trained on {}",
    "train_length": "trained at {}",
    "intervention": "{}",
    "recipe": "{}",
}


@dataclass(frozen=True)
class Estimate:
    """One measured figure with its 95 % interval; `value` is None where the model cannot be run."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    chance: float | None


@dataclass(frozen=True)
class Difference:
    """The difference of two proportions with its 95 % interval."""

    value: float
    low: float
    high: float


class Labels:
    """Names the lines of a figure and the rows of a table: the model, and whatever else sets its results apart."""

    def __init__(self, records: Iterable[Result | CurvePoint]):
        records = [record for record in records if getattr(record, "metric", None) != "majority_rate"]
        self._fields = [name for name in _VARIANT_FIELDS if _sets_apart(name, records)]
        self.all = sorted({self(record) for record in records}, key=_models_in_order)

    def __call__(self, record: Result | CurvePoint) -> str:
        """The label of one record."""
        values = [(_VARIANT_FIELDS[name], getattr(record, name, None)) for name in self._fields]
        return SEPARATOR.join([record.model, *(form.format(value) for form, value in values if value is not None)])


def model_of(label: str) -> str:
    """The model that a label starts with."""
    return label.split(SEPARATOR)[0]


def variant_of(label: str) -> str:
    """What a label says beside the model; empty where the model says all."""
    return label.removeprefix(model_of(label)).removeprefix(SEPARATOR)


def select(results: Iterable[Result], **where: Any) -> list[Result]:
    """The results whose fields have the given values."""
    return [result for result in results if all(getattr(result, name) == value for name, value in where.items())]


def tasks_in_order(tasks: Iterable[str | None]) -> list[str | None]:
    """Tasks without repetition, the paper's four first."""
    return sorted(set(tasks), key=lambda task: _position(task, _TASKS))


def measured_tasks(results: Iterable[Result]) -> list[str | None]:
    """The tasks of which there is an accuracy."""
    return tasks_in_order(result.task for result in select(results, metric="exact_match"))


def measured_conditions(results: Iterable[Result], task: str | None) -> list[str | None]:
    """The marker conditions in which a task was measured, the one that models are trained on first."""
    found = {result.condition for result in select(results, metric="exact_match", task=task)}
    return sorted(found, key=lambda condition: _position(condition, _CONDITIONS))


def pivot(results: Sequence[Result], column: str, *, metric: Metric, **where: Any) -> dict[str, dict[Any, Estimate]]:
    """One estimate for each label and each value of `column`, both in order.

    Args:
        results: all results of the report, so that labels are the same in every table and figure.
        column: the field that makes the columns, such as `length`.
        metric: the metric shown.
        **where: values that other fields must have.
    """
    labels = Labels(results)
    cells: dict[tuple[str, Any], list[Result]] = defaultdict(list)
    for result in select(results, metric=metric, **where):
        cells[labels(result), getattr(result, column)].append(result)
    table: dict[str, dict[Any, Estimate]] = {}
    for label, value in sorted(cells, key=lambda cell: (_models_in_order(cell[0]), cell[1] is None, cell[1])):
        table.setdefault(label, {})[value] = _pool(cells[label, value])
    return table


def mean(ones: "Iterable[Estimate | Measurement]") -> Estimate | None:
    """The mean of several figures of the same prompts, such as those of seeds, or of heads; None where there is none.

    They are taken as wholly dependent: the half-widths of their intervals are averaged. How far the prompts move them
    together cannot be told from the lines, and independent ones would have a narrower interval.
    """
    run = [(one.value, one.low, one.high, one.n) for one in ones if one.value is not None]
    if not run:
        return None
    values, lows, highs, ns = zip(*run, strict=True)
    low, high = (None if None in ends else fmean(ends) for ends in (lows, highs))
    return Estimate(fmean(values), low, high, sum(ns), None)


def difference(a: Estimate, b: Estimate) -> Difference | None:
    """a - b with Newcombe's hybrid score interval, made from the Wilson intervals of the two proportions.

    Source: R. G. Newcombe, Statistics in Medicine 17 (1998), method 10. It takes the two samples as independent; on a
    test set that the models share it is usually the wider one. None where a figure or an interval is missing.
    """
    if a.value is None or a.low is None or a.high is None or b.value is None or b.low is None or b.high is None:
        return None
    gap = a.value - b.value
    down = math.hypot(a.value - a.low, b.high - b.value)
    up = math.hypot(a.high - a.value, b.value - b.low)
    return Difference(gap, gap - down, gap + up)


def _pool(results: Sequence[Result]) -> Estimate:
    """The mean of one cell's results, which differ by seed."""
    chance = next((result.chance for result in results if result.chance is not None), None)
    found = mean(Estimate(one.value, one.low, one.high, one.n, chance) for one in results)
    return replace(found, chance=chance) if found else Estimate(None, None, None, 0, chance)


def _sets_apart(name: str, records: Sequence[Result | CurvePoint]) -> bool:
    if name == "intervention":  # An intervened model is never the model itself.
        return True
    if name == "recipe":  # Recipes differ from stage to stage: named only where two of them fill one cell.
        recipes = defaultdict(set)
        for record in records:
            if isinstance(record, Result):
                recipes[record.model_dump_json(exclude=OUTCOME_FIELDS | {"recipe"})].add(record.recipe)
        return any(len(names) > 1 for names in recipes.values())
    return len({getattr(record, name, None) for record in records} - {None}) > 1


def _models_in_order(label: str) -> tuple[int, str]:
    return _position(model_of(label), MODELS)[0], label


def _position(value: str | None, known: Sequence[str]) -> tuple[int, str]:
    return (known.index(value) if value in known else len(known)), str(value)
