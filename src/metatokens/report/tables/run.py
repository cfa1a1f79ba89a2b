"""Tables of any run's results: a row for each model, and for whatever else sets its figures apart."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pandas as pd

from metatokens.report.derive import select
from metatokens.report.frame import Cell
from metatokens.report.gains import commonest_answer, differences_of, key_lengths, train_lengths
from metatokens.report.intervals import newcombe
from metatokens.report.labels import (
    labels_in_order,
    measured_conditions,
    measured_tasks,
    pivot,
    tasks_in_order,
)
from metatokens.report.learning import BUDGET, LEARNED_LOSS, Learning, fine_tuning_losses, learning
from metatokens.report.tables.table import Row, Table, span
from metatokens.report.text import DIVIDED, MINUS, NOT_RUN, count, name, percent, points, tokens, with_interval

One = TypeVar("One")


def accuracy(
    figures: pd.DataFrame,
    task: str,
    condition: str,
    *,
    metric: str = "exact_match",
    lengths: Mapping[int | None, str] | None = None,
) -> Table:
    """One task's accuracy: a row for each model, a column for each length; chance, commonest answer and n below.

    Args:
        figures: with labels.
        task, condition: which, and how it was marked.
        metric: `exact_match` or `token_accuracy`.
        lengths: the lengths shown and their names; all that were measured, by default.
    """
    cells = pivot(figures, "length", metric=metric, task=task, condition=condition)
    if lengths is None:
        trained = train_lengths(select(figures, metric=metric, task=task))
        lengths = {
            length: f"{tokens(length)} (train)" if length in trained else tokens(length) for length in columns(cells)
        }
    chance = _footer("chance", cells, lengths, lambda cell: cell.chance, percent)
    footer = [chance] if set(chance[1:]) != {NOT_RUN} else []
    commonest = commonest_answer(figures, task) if metric == "exact_match" else {}
    if commonest:
        footer.append(("commonest answer", *(percent(commonest.get(length)) for length in lengths)))
    unit, counted = "answers exactly right", "n (prompts)"
    if metric == "token_accuracy":
        unit, counted = "answer tokens right", "n (tokens)"
    if len(measured_conditions(figures, task)) > 1:
        unit = f"{unit} in condition {condition}"
    footer.append(_footer(counted, cells, lengths, lambda cell: cell.n or None, count))
    estimates = [[(cell := row.get(length)) and cell.pooled() for length in lengths] for row in cells.values()]
    return Table(
        f"{name(task)}: {unit}, %",
        ("model", *lengths.values()),
        tuple((label, *(_interval(row.get(length)) for length in lengths)) for label, row in cells.items()),
        tuple(footer),
        note="-: the length lies beyond what the model can be run at." if _some_not_run(cells) else "",
        estimates=tuple(map(tuple, estimates)),
    )


def differences(figures: pd.DataFrame) -> Table:
    """Every comparison of two models: a row for each task, length and pair."""
    rows = [
        (name(task), place, f"{a} {MINUS} {b}", points(one.gap))
        for task in measured_tasks(figures)
        for place, a, b, one in differences_of(figures, task)
    ]
    header = ("task", "length", "difference", "points (95 % interval)")
    return Table("Differences between models", header, tuple(rows), text_columns=3)


def marker_conditions(figures: pd.DataFrame, task: str) -> Table:
    """One task at the train length: a row for each model, its score in each condition and what that changes."""
    length, place = next(iter(key_lengths(figures, task).items()))
    trained, *others = measured_conditions(figures, task)
    base, *cells = (
        pivot(figures, "length", metric="exact_match", task=task, condition=condition)
        for condition in (trained, *others)
    )
    rows = []
    for label, row in base.items():
        before = row.get(length)
        shown = [_interval(before)]
        for other in cells:
            after = other.get(label, {}).get(length)
            gap = points(newcombe(after.pooled(), before.pooled())) if before and after else ""
            shown += [_interval(after), gap]
        rows.append((label, *shown))
    header = ["model", trained, *(text for other in others for text in (other, f"{other} {MINUS} {trained}"))]
    return Table(f"{name(task)} at {place}, by condition, %", tuple(header), tuple(rows))


def majority_rates(figures: pd.DataFrame) -> Table:
    """The rate of the commonest answer: a row for each task, a column for each length."""
    tasks = tasks_in_order(select(figures, metric="majority_rate")["task"])
    rates = {task: commonest_answer(figures, task) for task in tasks}
    lengths = columns(rates)
    rows = tuple((name(task), *(percent(row.get(length)) for length in lengths)) for task, row in rates.items())
    return Table("Rate of the commonest answer, %", ("task", *map(tokens, lengths)), rows)


def perplexity(figures: pd.DataFrame) -> Table:
    """Held-out perplexity: a row for each model, a column for each placement; the unigram perplexity and n below."""
    cells = pivot(figures, "condition", metric="perplexity")
    placements = {
        placement: "text alone" if placement == "none" else f"with meta-tokens ({placement})"
        for placement in sorted(columns(cells), key=lambda placement: placement != "none")
    }
    return Table(
        "Perplexity of held-out text",
        ("model", *placements.values()),
        tuple((label, *(_perplexity(row.get(placement)) for placement in placements)) for label, row in cells.items()),
        (
            _footer("unigram", cells, placements, lambda cell: cell.chance, lambda value: f"{value:,.1f}"),
            _footer("n (tokens)", cells, placements, lambda cell: cell.n or None, count),
        ),
        note="In brackets: 95\u00a0% intervals over blocks of text.",
    )


def learning_steps(curves: pd.DataFrame) -> Table:
    """Steps until the answer loss stays under the threshold: a row for each model, a column for each task."""
    runs = learning(curves)
    seeds = {run.seed for run in runs}
    lengths = {run.train_length for run in runs}
    tasks = {
        (run.task, run.train_length): name(run.task) + (f" at {tokens(run.train_length)}" if len(lengths) > 1 else "")
        for run in runs
    }
    rows: dict[str, dict[tuple[str, int | None], Learning]] = {}
    order = labels_in_order(fine_tuning_losses(curves))
    for run in sorted(runs, key=lambda run: (order.index(run.label), run.seed)):
        row = run.label if len(seeds) == 1 else f"{run.label}, seed {run.seed}"
        rows.setdefault(row, {})[run.task, run.train_length] = run
    return Table(
        f"Steps until the answer loss stays under {LEARNED_LOSS}",
        ("model", *tasks.values()),
        tuple((row, *(_steps(found.get(task)) for task in tasks)) for row, found in rows.items()),
        (
            _footer("steps trained", rows, tasks, lambda run: run.steps, count),
            _footer(f"{DIVIDED} slowest learner", rows, tasks, lambda run: run.budget, lambda ratio: f"{ratio:.2f}"),
        ),
        note=f"Last row: steps trained over those that the slowest learner of the task needed; {BUDGET} is asked for.",
    )


def columns(cells: Mapping[Any, Mapping[Any, object]]) -> list[Any]:
    """The columns of a pivot table, in order."""
    found = {column for row in cells.values() for column in row}
    return sorted(found, key=lambda column: (column is None, column))


def _footer(
    title: str,
    cells: Mapping[str, Mapping[Any, One]],
    chosen: Iterable[Any],
    figure: Callable[[One], Any],
    form: Callable[[Any], str],
) -> Row:
    """One figure a column; a range where it differs from row to row."""
    row = [title]
    for column in chosen:
        found = {figure(cells[label][column]) for label in cells if column in cells[label]} - {None}
        row.append(span(form(value) for value in sorted({min(found), max(found)})) if found else NOT_RUN)
    return tuple(row)


def _some_not_run(cells: Mapping[str, Mapping[Any, Cell]]) -> bool:
    return any(not cell.seeds for row in cells.values() for cell in row.values())


def _interval(cell: Cell | None) -> str:
    return "" if cell is None else with_interval(cell.pooled()) or NOT_RUN


def _steps(run: Learning | None) -> str:
    return "" if run is None else "not reached" if run.learned is None else count(run.learned)


def _perplexity(cell: Cell | None) -> str:
    pooled = cell.pooled() if cell else None
    if pooled is None or pooled.value is None:
        return NOT_RUN if cell else ""
    ends = "" if pooled.low is None or pooled.high is None else f" ({span(f'{end:,.1f}' for end in pooled[1:3])})"
    return f"{pooled.value:,.1f}{ends}"
