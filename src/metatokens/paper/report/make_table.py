"""From rows and columns of selections to a table: every table of the report, of the demo's page and of the documents.

A selection maps columns of a frame to values: `{"task": "parity", "length": 128}`. The figures of a cell are those that
have the fields of its row and of its column.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from metatokens.paper.frame import select
from metatokens.paper.report.text import (
    NOT_RUN,
    PERCENT,
    PLUS_MINUS,
    Form,
    escape,
    listed,
    number,
    order,
    words,
)
from metatokens.paper.rule import FEWEST_RUNS, Stratum, effect

Fields = Mapping[str, Any]
Selections = dict[str, Fields]
"""Rows or columns, by label."""
Text = str | tuple[str, ...]
"""The text of a cell, in one line or several."""
Row = tuple[Text, ...]

SHORTCUT = "best shortcut"
# A cell of a column of figures; settings have arrows.
_FIGURE = re.compile(r"[+\u2212]?\d[^\u2192]*$|\u2013|$")


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
    cells = ["<br>".join(str(escape(line)) for line in _lines_of(text)) for text in row]
    return f"| {' | '.join(cells)} |\n"


def _lines_of(text: Text) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


@dataclass(frozen=True)
class Cell:
    """One figure, run by run.

    Attributes:
        runs: by seed.
        ends: the 95 % interval over prompts, which is shown for a single run.
        n: how many prompts, rows or tokens: each number that a run has.
        floors: the scores of the best shortcut and of chance on the same prompts.
    """

    runs: Mapping[int, float] = field(default_factory=dict)
    ends: tuple[float, float] = (math.nan, math.nan)
    n: frozenset[int] = frozenset()
    floors: tuple[float, float] = (math.nan, math.nan)

    @classmethod
    def of(cls, figures: pd.DataFrame) -> "Cell":
        """The cell of some figures; several of a seed, such as those of heads, are averaged."""
        columns = ["seed", "value", "low", "high", "n", "shortcut", "chance"]
        measured = figures.reindex(columns=columns).dropna(subset=["value"])
        if measured.empty:
            return cls()
        by_seed = measured.groupby("seed")[["value", "low", "high"]].mean()
        return cls(
            runs=by_seed["value"].to_dict(),
            ends=tuple(by_seed[["low", "high"]].iloc[0]),
            n=frozenset(map(int, measured["n"].dropna())),
            floors=tuple(measured[["shortcut", "chance"]].iloc[0]),
        )

    def estimate(self) -> tuple[float, float, float]:
        """The mean over runs and its 95 % interval: Student's t over runs; of one run, that over its prompts.

        Two runs have no interval (NaN).
        """
        if len(self.runs) == 1:
            [value] = self.runs.values()
            return (value, *self.ends)
        if not self.runs:
            return math.nan, math.nan, math.nan
        mean = effect([Stratum(task="", samples=[self.runs])])
        return mean.value, mean.low, mean.high

    def shown(self, form: Form, runs_of_others: int = 0) -> str:
        """`92.7 ± 2.6`; of one run `92.7 (90.1 to 94.6)`, of two `92.7 (90.9, 94.5)`; the number of runs in brackets,
        where others have more.
        """
        if not self.runs:
            return NOT_RUN
        mean, low, high = self.estimate()
        text = form(mean)
        if len(self.runs) == 2:
            text += f" ({', '.join(map(form, self.runs.values()))})"
        elif len(self.runs) > 1:
            text += f" {PLUS_MINUS} {form(high - mean)}"
        elif math.isfinite(high - low):
            text += f" ({form(low)} to {form(high)})"
        if len(self.runs) != 2 and len(self.runs) < runs_of_others:
            text += f" [{len(self.runs)}]"
        return text


def labelled(figures: pd.DataFrame, keys: Sequence[str]) -> Selections:
    """The combinations of values in these columns, in order; the label says in what they differ."""
    combinations = figures[[*keys]].drop_duplicates()
    differing = [key for key in keys if combinations[key].nunique(dropna=False) > 1] or keys[:1]
    rows = combinations.astype(object).where(combinations.notna(), None).to_dict("records")
    by_label: Selections = {}
    for row in sorted(rows, key=lambda row: [order(value) for value in row.values()]):
        named = filter(None, (words(key, row[key]) for key in differing))
        label = ", ".join(named) or "plain"
        if label in by_label:  # values that read alike stay apart
            label += f" ({len(by_label) + 1})"
        by_label[label] = row
    return by_label


def make_table(
    figures: pd.DataFrame,
    rows: Mapping[str, Fields],
    columns: Mapping[str, Fields],
    *,
    title: str = "",
    corner: str = "",
    form: Form = PERCENT,
    below: Callable[[pd.DataFrame], Sequence[str]] = lambda of_cell: (),
    by_seed: bool = False,
) -> Table:
    """The table of the figures that have a row's and a column's fields: means, intervals, numbers of runs, and n.

    The scores of the best shortcut and of chance form further rows if they are the same in all cells of a column, and
    otherwise further columns if they are the same in all cells of a row. A row without a figure is left out.

    Args:
        figures: those to select from.
        rows, columns: by label.
        title, corner: of the table, and of its first column.
        form: how the figures read.
        below: the lines that are added below a figure, from the rows of its cell, such as the paper's figure.
        by_seed: whether each run's figure is added too.
    """
    selected = _selected(figures, rows, columns)
    cells = {label: list(map(Cell.of, of_row)) for label, of_row in selected.items()}
    all_cells = list(chain.from_iterable(cells.values()))
    runs = max((len(cell.runs) for cell in all_cells), default=0)

    header = [corner, *columns]
    body: list[list[Text]] = []
    for label, of_row in cells.items():
        texts: list[Text] = [label]
        for cell, of_cell in zip(of_row, selected[label], strict=True):
            lines = [cell.shown(form, runs), *(below(of_cell) if cell.runs else ())]
            if by_seed and len(cell.runs) > 2:
                lines.append(f"runs {' '.join(map(form, cell.runs.values()))}")
            texts.append(lines[0] if len(lines) == 1 else tuple(lines))
        body.append(texts)
    if form.chance and body:
        floors = np.array([[cell.floors for cell in of_row] for of_row in cells.values()])
        _add_floors(header, body, floors, form)
    return Table(title, tuple(header), list(map(tuple, body)), _note(form, all_cells))


def _selected(
    figures: pd.DataFrame, rows: Mapping[str, Fields], columns: Mapping[str, Fields]
) -> dict[str, list[pd.DataFrame]]:
    """The figures of each cell, in rows that have any."""
    selected = {}
    for label, row in rows.items():
        of_row = [select(figures, **{**row, **column}) for column in columns.values()]
        if any(of_cell["value"].notna().any() for of_cell in of_row):
            selected[label] = of_row
    return selected


def _add_floors(header: list[str], body: list[list[Text]], floors: np.ndarray, form: Form) -> None:
    """Add the scores of the best shortcut and of chance, an array (rows, columns, 2); see `make_table`."""
    is_of_column = _is_constant(floors, axis=0)
    if not (is_of_column or _is_constant(floors, axis=1)):
        return
    for kind, label in enumerate((SHORTCUT, form.chance)):
        scores = np.fmax.reduce(floors[..., kind], axis=0 if is_of_column else 1)
        if np.isnan(scores).all():
            continue
        texts = [NOT_RUN if np.isnan(score) else form(score) for score in scores]
        if is_of_column:
            body.append([label, *texts])
        else:
            header.append(label)
            for row, text in zip(body, texts, strict=True):
                row.append(text)


def _is_constant(floors: np.ndarray, axis: int) -> bool:
    """Whether the known floors along an axis are equal; an unknown one is NaN, which fmin and fmax pass over."""
    return not (np.fmin.reduce(floors, axis) < np.fmax.reduce(floors, axis)).any()


def _note(form: Form, cells: Sequence[Cell]) -> str:
    """The note below a table: it explains the figure, its interval, the runs, and n."""
    runs = {len(cell.runs) for cell in cells if cell.runs}
    if not runs:
        return "Not run."
    explained = []
    if max(runs) >= FEWEST_RUNS:
        explained.append(f"the mean and its 95 % interval over {max(runs)} runs (Student's t)")
    if 2 in runs:
        explained.append("of two runs the mean and both")
    if 1 in runs:
        explained.append("one run with its 95 % interval over prompts")
    if len(runs) > 1:
        explained.append("[k]: k runs")
    n = sorted(frozenset[int]().union(*(cell.n for cell in cells)))
    counts = f"{number(n[0])} to {number(n[-1])}"
    if len(n) < 4:
        counts = listed(list(map(number, reversed(n))), "or")
    return f"{form.what}: {'; '.join(explained)}. n = {counts} {form.counted} a run."
