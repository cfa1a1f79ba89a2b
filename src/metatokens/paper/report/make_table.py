"""From rows and columns of selections to a table: every table of the report, of the demo's page and of the documents.

A selection maps columns of a frame to values: `{"task": "parity", "length": 128}`. The figures of a cell are those that
have the fields of its row and of its column.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from metatokens.paper.frame import Inputs, select
from metatokens.paper.report.text import (
    NOT_RUN,
    PERCENT,
    PLUS_MINUS,
    WORDS,
    Form,
    escape,
    listed,
    number,
)
from metatokens.paper.variants import COMPARED
from metatokens.tasks import TASKS

Fields = Mapping[str, Any]
Selections = dict[str, Fields]
"""Rows or columns, by label."""
Text = str | tuple[str, ...]
"""The text of a cell, in one line or several."""
Row = tuple[Text, ...]

SHORTCUT = "best shortcut"
POSITIONS: dict[str, str] = WORDS["positions"]
# A cell of a column of figures; settings have arrows.
_FIGURE = re.compile(r"[+\u2212]?\d[^\u2192]*$|\u2013|$")
_PROMPTS = ("task", "condition", "length")  # whose shortcuts are measured
# The fields in which two figures of one model may differ, and the words for them in the label of a row.
_APART = {
    "position_embedding": "{}",
    "variant": "{}",
    "train_condition": "trained on {}",
    "train_length": "to {:,.0f}",
}
_ORDER = (
    *COMPARED,
    *TASKS,
    "paper",
    "landmark",
    "decoy",
    "long_prompt",
    "none",
    "",
    "no_pos",
    "no_embed",
    "neither",
)


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    header: Row
    rows: Sequence[Row]
    note: str = ""

    def markdown(self) -> str:
        """The table in Markdown, with its title and its note; columns of figures are set to the right."""
        alignments = ["---"]
        for column in range(1, len(self.header)):
            first_lines = [_lines_of(row[column])[0] for row in self.rows]
            is_of_figures = all(map(_FIGURE.match, first_lines))
            alignments.append("---:" if is_of_figures else "---")
        header, *rows = map(_markdown_row, [self.header, *self.rows])
        text = "".join([header, f"|{'|'.join(alignments)}|\n", *rows])
        if self.title:
            text = f"**{escape(self.title)}**\n\n{text}"
        if self.note:
            text += f"\n{escape(self.note)}\n"
        return text


def _markdown_row(row: Row) -> str:
    return f"| {' | '.join(map(_markdown_cell, row))} |\n"


def _markdown_cell(text: Text) -> str:
    return "<br>".join(str(escape(line)) for line in _lines_of(text))


def _lines_of(text: Text) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


@dataclass(frozen=True)
class Cell:
    """One figure, run by run."""

    runs: Mapping[int, float] = field(default_factory=dict)
    """By seed."""
    ends: tuple[float, float] = (math.nan, math.nan)
    """The 95 % interval over prompts, which is shown for a single run."""
    n: frozenset[int] = frozenset()
    """How many prompts, rows or tokens: each number that a run has."""
    floors: tuple[float, float] = (math.nan, math.nan)
    """The scores of the best shortcut and of chance on the same prompts."""

    @classmethod
    def of(cls, figures: pd.DataFrame) -> "Cell":
        """The cell of some figures; several of a seed, such as those of heads, are averaged."""
        measured = figures[np.isfinite(figures["value"])]
        if measured.empty:
            return cls()
        seeds = measured["seed"].to_numpy(int)
        values = measured[["value", "low", "high"]].to_numpy(float)
        means = {
            int(seed): values[seeds == seed].mean(axis=0).tolist() for seed in np.unique(seeds)
        }
        _, low, high = next(iter(means.values()))
        shortcut, chance = measured[["shortcut", "chance"]].iloc[0].tolist()
        return cls(
            runs={seed: mean for seed, (mean, _, _) in means.items()},
            ends=(low, high),
            n=frozenset(map(int, measured["n"])),
            floors=(shortcut, chance),
        )

    def estimate(self) -> tuple[float, float, float]:
        """The mean over runs and its 95 % interval: Student's t over runs; of one run, that over its prompts."""
        values = np.array([*self.runs.values()])
        if len(values) == 1:
            return (float(values[0]), *self.ends)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, spread = float(values.mean()), float(values.std(ddof=1))
        quantile = float(stdtrit(len(values) - 1, 0.975))
        reach = quantile * spread / math.sqrt(len(values))
        return mean, mean - reach, mean + reach

    def shown(self, form: Form, runs_of_others: int = 0) -> str:
        """`92.7 ± 2.6`, or of one run `92.7 (90.1 to 94.6)`; in brackets the number of runs, where others have more."""
        if not self.runs:
            return NOT_RUN
        mean, low, high = self.estimate()
        text = form(mean)
        if len(self.runs) > 1 and not form.is_log:
            text += f" {PLUS_MINUS} {form(high - mean)}"
        elif math.isfinite(high - low):
            text += f" ({form(low)} to {form(high)})"
        if len(self.runs) < runs_of_others:
            text += f" [{len(self.runs)}]"
        return text


@dataclass(frozen=True)
class _MeasuredRow:
    """A row of a table: for each column what it selects, and the figure of that."""

    label: str
    selections: Sequence[Fields]
    cells: Sequence[Cell]

    @property
    def prompts(self) -> list[tuple[Any, ...]]:
        """For each column what decides the scores of the shortcuts."""
        return [tuple(selection.get(key) for key in _PROMPTS) for selection in self.selections]


def make_table(
    inputs: Inputs,
    title: str,
    corner: str,
    rows: Mapping[str, Fields],
    columns: Mapping[str, Fields],
    *,
    form: Form = PERCENT,
    below: Callable[[Fields], Sequence[str]] = lambda fields: (),
    by_seed: bool = False,
    whole: bool = False,
) -> Table:
    """The table of the figures that have a row's and a column's fields: means, intervals, numbers of runs, and n.

    The scores of the best shortcut and of chance form a further column if all cells of a row have the same prompts, and
    a further row if all cells of a column do.

    Args:
        inputs: the figures.
        title, corner: of the table, and of its first column.
        rows, columns: by label.
        form: how the figures read.
        below: the lines that are added below a figure, from the fields of its cell, such as the paper's figure.
        by_seed: whether each run's figure is added too.
        whole: whether rows without a figure are kept.
    """
    measured = _measured_rows(inputs, rows, columns)
    if not whole:
        measured = [row for row in measured if any(cell.runs for cell in row.cells)]
    cells = list(chain.from_iterable(row.cells for row in measured))
    runs = max((len(cell.runs) for cell in cells), default=0)

    def text(cell: Cell, selection: Fields) -> Text:
        lines = [cell.shown(form, runs), *below(selection)]
        if by_seed and runs > 1 and cell.runs:
            lines.append(f"runs {' '.join(map(form, cell.runs.values()))}")
        return lines[0] if len(lines) == 1 else tuple(lines)

    header = [corner, *columns]
    body: list[list[Text]] = [
        [row.label, *map(text, row.cells, row.selections)] for row in measured
    ]
    if form.chance and measured:
        _add_floors(header, body, measured, form)
    return Table(title, tuple(header), list(map(tuple, body)), _note(form, cells))


def _measured_rows(
    inputs: Inputs, rows: Mapping[str, Fields], columns: Mapping[str, Fields]
) -> list[_MeasuredRow]:
    """The rows; their figures are looked for among those that have what all selections have in common."""
    selections = {
        label: [{**row, **column} for column in columns.values()] for label, row in rows.items()
    }
    common = _common_fields(
        [{"metric": "exact_match", **cell} for cell in chain.from_iterable(selections.values())]
    )
    candidates = replace(inputs, figures=select(inputs.figures, **common))
    measured = []
    for label, of_row in selections.items():
        cells = [Cell.of(candidates.select(**selection)) for selection in of_row]
        measured.append(_MeasuredRow(label, of_row, cells))
    return measured


def _common_fields(selections: Sequence[Fields]) -> Fields:
    if not selections:
        return {}
    first, *others = selections
    common = {}
    for key, value in first.items():
        if all(key in selection and selection[key] == value for selection in others):
            common[key] = value
    return common


def _add_floors(
    header: list[str], body: list[list[Text]], rows: Sequence[_MeasuredRow], form: Form
) -> None:
    """Add the scores of the best shortcut and of chance: columns if all cells of a row have the same prompts, or rows
    if all cells of a column do.
    """
    is_of_row = all(len(set(row.prompts)) == 1 for row in rows)
    is_of_column = all(row.prompts == rows[0].prompts for row in rows)
    floors = np.array([[cell.floors for cell in row.cells] for row in rows])  # (rows, columns, 2)
    for name, scores in zip((SHORTCUT, form.chance), np.moveaxis(floors, -1, 0), strict=True):
        if not np.isfinite(scores).any():
            continue
        if is_of_row:
            header.append(name)
            for texts, scores_of_row in zip(body, scores, strict=True):
                texts.append(_floor(form, scores_of_row))
        elif is_of_column:
            body.append([name, *(_floor(form, scores_of_column) for scores_of_column in scores.T)])


def _floor(form: Form, scores: np.ndarray) -> str:
    if not np.isfinite(scores).any():
        return NOT_RUN
    return form(float(np.nanmax(scores)))


def _note(form: Form, cells: Sequence[Cell]) -> str:
    """The note below a table: it explains the figure, its interval, the runs, and n."""
    runs = sorted({len(cell.runs) for cell in cells if cell.runs})
    if not runs:
        return "Not run."
    interval = f"95 % interval over {runs[-1]} training runs (Student's t)"
    if runs[-1] == 1:
        figure = "of one run (95 % interval over its prompts)"
    elif form.is_log:
        figure = f"the geometric mean ({interval})"
    else:
        figure = f"the mean {PLUS_MINUS} its {interval}"
    if len(runs) > 1:
        figure += "; [k]: k runs"
        if runs[0] == 1:
            figure += ", and of one run the interval over its prompts"
    n = sorted(frozenset[int]().union(*(cell.n for cell in cells)))
    counts = f"{number(n[0])} to {number(n[-1])}"
    if len(n) < 4:
        counts = listed(list(map(number, reversed(n))), "or")
    return f"{form.what}: {figure}. n = {counts} {form.counted} a run."


def models(inputs: Inputs, **where: Any) -> Selections:
    """A row for each model that has such figures, and for whatever else sets two figures of a model apart.

    Returns:
        The fields by label: `meta`, or `meta, learned positions, to 512`.
    """
    settings = inputs.measured(**where)[["model", *_APART]].drop_duplicates()
    differing = [column for column in _APART if settings[column].nunique(dropna=False) > 1]
    by_label: Selections = {}
    for row in sorted(plain_rows(settings), key=_order_of_model):
        words = [_words(column, row[column]) for column in differing if row[column]]
        by_label[", ".join([row["model"], *words])] = {**where, **row}
    return by_label


def _order_of_model(row: Fields) -> tuple[Any, ...]:
    position = _index(row["position_embedding"], [*POSITIONS])
    return position, *order(row["model"]), row["train_length"] or 0, row["variant"]


def _words(column: str, value: Any) -> str:
    if column == "position_embedding":
        return POSITIONS.get(value, value)
    return _APART[column].format(value)


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame, with values as selections have them."""
    return [{key: plain(value) for key, value in row.items()} for row in frame.to_dict("records")]


def plain(value: Any) -> Any:
    """A value of a frame as selections have it: NaN as None, a whole number as one."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else value


def in_order(names: Iterable[str]) -> list[str]:
    """Models, tasks or conditions, each once: those of the project first, in their order."""
    return sorted(set(names), key=order)


def order(name: str) -> tuple[int, str]:
    """The key by which `in_order` sorts."""
    return _index(name, _ORDER), name


def _index(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)
