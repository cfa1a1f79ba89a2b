"""Result records to tables of strings, which the page and its Markdown both print."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from metatokens.records import Metric, ModelInfo, Result, Stage
from metatokens.report.estimates import (
    Estimate,
    Labels,
    difference,
    measured_conditions,
    measured_tasks,
    pivot,
    select,
    tasks_in_order,
)
from metatokens.report.gains import commonest_answer, gains, key_lengths, train_lengths
from metatokens.report.inputs import CurvePoint
from metatokens.report.learning import BUDGET, LEARNED_LOSS, Learning, learning
from metatokens.report.wording import (
    DIVIDED,
    EN_DASH,
    MINUS,
    NOT_RUN,
    count,
    duration,
    name,
    percent,
    points,
    tokens,
    with_interval,
)

Row = tuple[str, ...]
Cell = TypeVar("Cell")


@dataclass(frozen=True)
class Table:
    """A table of strings."""

    title: str
    header: Row
    rows: tuple[Row, ...]
    footer: tuple[Row, ...] = ()
    """Rows that say what to compare the others with: chance, n."""
    note: str = ""
    text_columns: int = 1
    """How many columns, from the left, hold words; the others hold figures."""
    estimates: tuple[tuple[Estimate | None, ...], ...] = ()
    """The estimates behind the figure columns of `rows`, where they are to be drawn too."""


def accuracy(
    results: Sequence[Result],
    task: str | None,
    condition: str | None,
    *,
    metric: Metric = "exact_match",
    lengths: Mapping[int | None, str] | None = None,
) -> Table:
    """One task's accuracy: a row for each model, a column for each length; chance, commonest answer and n below.

    Args:
        results: all results of the report.
        task: the task.
        condition: the marker condition.
        metric: `exact_match` or `token_accuracy`.
        lengths: the lengths shown and their names; all that were measured, by default.
    """
    cells = pivot(results, "length", metric=metric, task=task, condition=condition)
    if lengths is None:
        trained = train_lengths(select(results, metric=metric, task=task))
        lengths = {
            length: f"{tokens(length)} (train)" if length in trained else tokens(length) for length in columns(cells)
        }
    chance = _footer("chance", cells, lengths, lambda cell: cell.chance, percent)
    footer = [chance] if set(chance[1:]) != {NOT_RUN} else []
    commonest = commonest_answer(results, task) if metric == "exact_match" else {}
    if commonest:
        footer.append(("commonest answer", *(percent(commonest.get(length)) for length in lengths)))
    unit, counted = "answers exactly right", "n (prompts)"
    if metric == "token_accuracy":
        unit, counted = "answer tokens right", "n (tokens)"
    if len(measured_conditions(results, task)) > 1:
        unit = f"{unit} in condition {condition}"
    footer.append(_footer(counted, cells, lengths, lambda cell: cell.n or None, count))
    return Table(
        f"{name(task)}: {unit}, %",
        ("model", *lengths.values()),
        tuple((label, *(with_interval(row.get(length)) for length in lengths)) for label, row in cells.items()),
        tuple(footer),
        note="-: the length lies beyond what the model can be run at." if _some_not_run(cells) else "",
        estimates=tuple(tuple(row.get(length) for length in lengths) for row in cells.values()),
    )


def differences(results: Sequence[Result]) -> Table:
    """Every comparison of two models: a row for each task, length and pair."""
    rows = [
        (name(task), gain.place, f"{a} {MINUS} {b}", points(difference(gain.cells[a], gain.cells[b])))
        for task in measured_tasks(results)
        for gain in gains(results, task)
        for a, b in gain.pairs()
    ]
    header = ("task", "length", "difference", "points (95 % interval)")
    return Table("Differences between models", header, tuple(rows), text_columns=3)


def marker_conditions(results: Sequence[Result], task: str | None) -> Table:
    """One task at the train length: a row for each model, its score in each condition and what that changes."""
    length, place = next(iter(key_lengths(results, task).items()))
    trained, *others = measured_conditions(results, task)
    base, *cells = (
        pivot(results, "length", metric="exact_match", task=task, condition=condition)
        for condition in (trained, *others)
    )
    rows = []
    for label, row in base.items():
        before = row.get(length)
        figures = [with_interval(before)]
        for other in cells:
            after = other.get(label, {}).get(length)
            figures += [with_interval(after), points(difference(after, before)) if before and after else ""]
        rows.append((label, *figures))
    header = ["model", str(trained), *(text for other in others for text in (str(other), f"{other} {MINUS} {trained}"))]
    return Table(f"{name(task)} at {place}, by condition, %", tuple(header), tuple(rows))


def majority_rates(results: Sequence[Result]) -> Table:
    """The rate of the commonest answer: a row for each task, a column for each length."""
    tasks = tasks_in_order(result.task for result in select(results, metric="majority_rate"))
    rates = {task: commonest_answer(results, task) for task in tasks}
    lengths = columns(rates)
    rows = tuple((name(task), *(percent(row.get(length)) for length in lengths)) for task, row in rates.items())
    return Table("Rate of the commonest answer, %", ("task", *map(tokens, lengths)), rows)


def perplexity(results: Sequence[Result]) -> Table:
    """Held-out perplexity: a row for each model, a column for each placement; the unigram perplexity and n below."""
    cells = pivot(results, "condition", metric="perplexity")
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


def learning_steps(curves: Sequence[CurvePoint]) -> Table:
    """Steps until the answer loss stays under the threshold: a row for each model, a column for each task."""
    runs = learning(curves)
    seeds = {run.seed for run in runs}
    lengths = {run.train_length for run in runs}
    columns = {
        (run.task, run.train_length): name(run.task) + (f" at {tokens(run.train_length)}" if len(lengths) > 1 else "")
        for run in runs
    }
    rows: dict[str, dict[tuple[str, int | None], Learning]] = {}
    order = Labels(curves).all
    for run in sorted(runs, key=lambda run: (order.index(run.label), run.seed)):
        row = run.label if len(seeds) == 1 else f"{run.label}, seed {run.seed}"
        rows.setdefault(row, {})[run.task, run.train_length] = run
    return Table(
        f"Steps until the answer loss stays under {LEARNED_LOSS}",
        ("model", *columns.values()),
        tuple((row, *(_steps(found.get(column)) for column in columns)) for row, found in rows.items()),
        (
            _footer("steps trained", rows, columns, lambda run: run.steps, count),
            _footer(f"{DIVIDED} slowest learner", rows, columns, lambda run: run.budget, lambda ratio: f"{ratio:.2f}"),
        ),
        note=f"Last row: steps trained over those that the slowest learner of the task needed; {BUDGET} is asked for.",
    )


def models(infos: Mapping[str, ModelInfo]) -> Table:
    """The models of a run: parameters and description."""
    rows = tuple(
        (model, info.description, NOT_RUN if info.parameters is None else count(info.parameters))
        for model, info in infos.items()
    )
    return Table("Models", ("model", "what it is", "parameters"), rows, text_columns=2)


def settings(title: str, values: Mapping[str, Any]) -> Table:
    """Nested settings as dotted keys and values."""
    return Table(title, ("setting", "value"), tuple(_flat(values)), text_columns=2)


def stages(times: Sequence[Stage]) -> Table:
    """The stages of a run and the time that each took."""
    rows = ((stage.name, duration(stage.seconds), duration(stage.cost)) for stage in times)
    return Table("Time of each stage", ("stage", "by the clock", "of one core"), tuple(rows))


def columns(cells: Mapping[Any, Mapping[Any, object]]) -> list[Any]:
    """The columns of a pivot table, in order."""
    found = {column for row in cells.values() for column in row}
    return sorted(found, key=lambda column: (column is None, column))


def _footer(
    title: str,
    cells: Mapping[str, Mapping[Any, Cell]],
    chosen: Iterable[Any],
    figure: Callable[[Cell], Any],
    form: Callable[[Any], str],
) -> Row:
    """One figure a column; a range where it differs from row to row."""
    row = [title]
    for column in chosen:
        found = {figure(cells[label][column]) for label in cells if column in cells[label]} - {None}
        row.append(EN_DASH.join(form(value) for value in sorted({min(found), max(found)})) if found else NOT_RUN)
    return tuple(row)


def _some_not_run(cells: Mapping[str, Mapping[Any, Estimate]]) -> bool:
    return any(cell.value is None for row in cells.values() for cell in row.values())


def _steps(run: Learning | None) -> str:
    if run is None:
        return ""
    if run.learned is None:
        return "not reached"
    return count(run.learned.step)


def _perplexity(cell: Estimate | None) -> str:
    if cell is None:
        return ""
    if cell.value is None or cell.low is None or cell.high is None:
        return NOT_RUN if cell.value is None else f"{cell.value:,.1f}"
    return f"{cell.value:,.1f} ({cell.low:,.1f}{EN_DASH}{cell.high:,.1f})"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[Row]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _setting(value)


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_setting, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return count(value)
    return NOT_RUN if value is None else str(value)
