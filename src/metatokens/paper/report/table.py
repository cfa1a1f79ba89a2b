"""From rows and columns of selections to a table: every table of the report, of the demo's page and of the documents.

A selection maps columns of a frame to values: `{"task": "parity", "length": 128}`. The figures of a cell are those that
have the fields of its row and of its column.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from metatokens.paper.frame import Inputs, select
from metatokens.paper.report.text import NOT_RUN, PERCENT, PLUS_MINUS, Form, escape, listed, number
from metatokens.paper.variants import COMPARED
from metatokens.tasks import TASKS

Fields = Mapping[str, Any]
Text = str | tuple[str, ...]
"""The text of a cell, in one line or several."""
Row = tuple[Text, ...]

SHORTCUT = "best shortcut"
POSITIONS = {"rope": "rotary positions", "learned": "learned positions", "none": "without positions"}
_FIGURE = re.compile(r"[+\u2212]?\d[^\u2192]*$|\u2013|$")  # a cell of a column of figures; settings have arrows
_PROMPTS = ("task", "condition", "length")  # whose shortcuts are measured
_READ = ("seed", "value", "low", "high", "n", "shortcut", "chance")  # columns
# The fields in which two figures of one model may differ, and the words for them in the label of a row.
_APART = {
    "position_embedding": "{}",
    "variant": "{}",
    "train_condition": "trained on {}",
    "train_length": "to {:,.0f}",
}
_ORDER = (*COMPARED, *TASKS, "paper", "landmark", "decoy", "long_prompt", "none", "", "no_pos", "no_embed", "neither")


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    header: Row
    rows: Sequence[Row]
    note: str = ""

    def markdown(self) -> str:
        """The table in Markdown, with its title and its note; columns of figures are set to the right."""
        columns = [*zip(*self.rows, strict=True)] or [()] * len(self.header)
        sides = ["---:" if all(map(_is_figure, column)) else "---" for column in columns[1:]]
        lines = [f"| {' | '.join(map(_cell, row))} |\n" for row in (self.header, *self.rows)]
        title = f"**{escape(self.title)}**\n\n" if self.title else ""
        note = f"\n{escape(self.note)}\n" if self.note else ""
        return "".join([title, lines[0], f"|{'|'.join(['---', *sides])}|\n", *lines[1:], note])


def _cell(text: Text) -> str:
    return "<br>".join(str(escape(line)) for line in ((text,) if isinstance(text, str) else text))


def _is_figure(text: Text) -> bool:
    return _FIGURE.match(text if isinstance(text, str) else text[0]) is not None


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
    def of(cls, found: pd.DataFrame) -> "Cell":
        """The cell of some figures; several of a seed, such as those of heads, are averaged."""
        rows = found[[*_READ]].to_numpy(float)
        rows = rows[np.isfinite(rows[:, 1])]
        if not len(rows):
            return cls()
        seeds = sorted(set(rows[:, 0]))
        means = {int(seed): rows[rows[:, 0] == seed, 1:4].mean(axis=0) for seed in seeds}
        runs = {seed: float(value) for seed, (value, _, _) in means.items()}
        _, low, high = means[int(seeds[0])]
        floors = (float(rows[0, 5]), float(rows[0, 6]))
        return cls(runs, (float(low), float(high)), frozenset(map(int, rows[:, 4])), floors)

    def estimate(self) -> tuple[float, float, float]:
        """The mean over runs and its 95 % interval: Student's t over runs; of one run, that over its prompts."""
        values = np.array([*self.runs.values()])
        if len(values) == 1:
            return (float(values[0]), *self.ends)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, spread = float(values.mean()), float(values.std(ddof=1))
        reach = float(stdtrit(len(values) - 1, 0.975)) * spread / math.sqrt(len(values))
        return mean, mean - reach, mean + reach

    def shown(self, form: Form, most: int = 0) -> str:
        """`92.7 ± 2.6`, or of one run `92.7 (90.1 to 94.6)`; in brackets the number of runs, where others have more."""
        if not self.runs:
            return NOT_RUN
        mean, low, high = self.estimate()
        text = form(mean)
        if len(self.runs) > 1 and not form.is_log:
            text += f" {PLUS_MINUS} {form(high - mean)}"
        elif math.isfinite(low) and math.isfinite(high):
            text += f" ({form(low)} to {form(high)})"
        return text + (f" [{len(self.runs)}]" if len(self.runs) < most else "")


def tabulate(
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
    fields = {label: [{**row, **column} for column in columns.values()] for label, row in rows.items()}
    cells = _cells(inputs, fields)
    cells = {label: line for label, line in cells.items() if whole or any(one.runs for one in line)}
    every = [one for line in cells.values() for one in line]
    most = max((len(one.runs) for one in every), default=0)
    header, body = [corner, *columns], list[list[Text]]()
    for label, line in cells.items():
        lines = [[one.shown(form, most), *below(where)] for one, where in zip(line, fields[label], strict=True)]
        if by_seed and most > 1:
            for own, one in zip(lines, line, strict=True):
                own += [f"runs {' '.join(map(form, one.runs.values()))}"] if one.runs else []
        body.append([label, *(own[0] if len(own) == 1 else (*own,) for own in lines)])
    prompts = [[tuple(one.get(key) for key in _PROMPTS) for one in fields[label]] for label in cells]
    for place, what in enumerate((SHORTCUT, form.chance)):
        floors = np.array([[one.floors[place] for one in line] for line in cells.values()])
        if form.chance and np.isfinite(floors).any():
            if all(len(set(line)) == 1 for line in prompts):
                header.append(what)
                for shown_line, own in zip(body, floors, strict=True):
                    shown_line.append(_floor(form, own))
            elif all(line == prompts[0] for line in prompts):
                body.append([what, *(_floor(form, own) for own in floors.T)])
    return Table(title, (*header,), [(*line,) for line in body], note(form, every))


def _cells(inputs: Inputs, fields: Mapping[str, Sequence[Fields]]) -> dict[str, list[Cell]]:
    """The cells, looked for among the figures that have what all of them have in common."""
    every = [{"metric": "exact_match", **one} for line in fields.values() for one in line] or [{}]
    common = {key: value for key, value in every[0].items() if all(key in one and one[key] == value for one in every)}
    part = replace(inputs, figures=select(inputs.figures, **common))
    return {label: [Cell.of(part.select(**one)) for one in line] for label, line in fields.items()}


def _floor(form: Form, found: np.ndarray) -> str:
    return form(float(np.nanmax(found))) if np.isfinite(found).any() else NOT_RUN


def note(form: Form, cells: Sequence[Cell]) -> str:
    """The note below a table: it explains the figure, its interval, the runs, and n."""
    runs = sorted({len(one.runs) for one in cells if one.runs})
    if not runs:
        return "Not run."
    if runs[-1] > 1:
        over = f"95 % interval over {runs[-1]} training runs (Student's t)"
        how = f"the geometric mean ({over})" if form.is_log else f"the mean {PLUS_MINUS} its {over}"
    else:
        how = "of one run (95 % interval over its prompts)"
    fewer = "; [k]: k runs" if len(runs) > 1 else ""
    fewer += ", and of one run the interval over its prompts" if fewer and runs[0] == 1 else ""
    n = [number(one) for one in sorted(frozenset[int]().union(*(one.n for one in cells)), reverse=True)]
    counts = listed(n, "or") if len(n) < 4 else f"{n[-1]} to {n[0]}"
    return f"{form.what}: {how}{fewer}. n = {counts} {form.counted} a run."


def models(inputs: Inputs, **where: Any) -> dict[str, Fields]:
    """A row for each model that has such figures, and for whatever else sets two figures of a model apart.

    Returns:
        The fields by label: `meta`, or `meta, learned positions, to 512`.
    """
    found = inputs.select(**where).dropna(subset=["value"])[["model", *_APART]].drop_duplicates()
    said = [column for column in _APART if found[column].nunique(dropna=False) > 1]
    rows = [{key: plain(value) for key, value in row.items()} for row in found.to_dict("records")]
    places = [*POSITIONS]
    rows.sort(key=lambda row: str(row["variant"]))
    rows.sort(key=lambda row: (*order(row["model"]), row["train_length"] or 0))
    rows.sort(key=lambda row: places.index(row["position_embedding"]) if row["position_embedding"] in places else 9)
    labels = (
        ", ".join([row["model"], *(_said(column, row[column]) for column in said if row[column])]) for row in rows
    )
    return {label: {**where, **row} for label, row in zip(labels, rows, strict=True)}


def plain(value: Any) -> Any:
    """A value of a frame as selections have it: NaN as None, a whole number as one."""
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


def _said(column: str, value: Any) -> str:
    return POSITIONS.get(value, str(value)) if column == "position_embedding" else _APART[column].format(value)


def order(name: str) -> tuple[int, str]:
    """The key that sorts models, tasks and conditions: those of the project first, in their order."""
    return _ORDER.index(name) if name in _ORDER else len(_ORDER), name
