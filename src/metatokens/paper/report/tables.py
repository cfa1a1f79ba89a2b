"""The tables of the report, by the names and the rules of `content.yaml`; without data a table has no rows."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict

from metatokens.paper.frame import Inputs
from metatokens.paper.report.make_table import Fields, Table, labelled, make_table
from metatokens.paper.report.paper_numbers import paper_table
from metatokens.paper.report.text import CONTENT, FORMS, PERCENT, ordered, words


class Layout(BaseModel):
    """What `content.yaml`, which explains the fields, says of a table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    where: dict[str, Any] = {}
    form: str = "percent"
    papers: tuple[int, ...] = ()
    each: tuple[str, ...] | None = None
    of_main: bool = False
    at_train_length: bool = False
    shows_kept: bool = False


LAYOUTS = {name: Layout(**fields) for name, fields in CONTENT["tables"].items()}


@dataclass(frozen=True)
class Tables:
    """The tables of a run; `by_seed` adds the figure of each run to its cell."""

    inputs: Inputs
    by_seed: bool = False

    @cached_property
    def tasks(self) -> dict[str, Fields]:
        """The tasks, each with the fields of its main figures: how the models were trained, on prompts of that kind."""
        accuracies = self.inputs.measured(condition="*", train_condition="*")
        return {
            task: _main_fields(accuracies[accuracies["task"] == task])
            for task in ordered(accuracies["task"])
        }

    def main_figures(self, **changes: Any) -> pd.DataFrame:
        """The main figures of all tasks, or those that differ from them in some fields."""
        of_tasks = [self.inputs.measured(**{**main, **changes}) for main in self.tasks.values()]
        return pd.concat([self.inputs.figures[:0], *of_tasks])

    def of(self, table: str) -> list[Table]:
        """The tables of that name that have rows."""
        layout = LAYOUTS[table]
        if layout.of_main:
            tables = [self._table(layout, self.main_figures())]
        elif layout.each is None:
            tables = [self._table(layout, self._measured(layout))]
        else:
            tables = []
            for task, main in self.tasks.items():
                of_task = {key: main[key] for key in layout.each}
                figures = self._measured(layout, task=task, **of_task)
                tables.append(self._table(layout, figures, words("task", task)))
        tables = [made for made in tables if made.rows]
        # Tables of one name share a note where it is the same.
        for number, (above, following) in enumerate(pairwise(tables)):
            if above.note == following.note:
                tables[number] = replace(above, note="")
        return tables

    def _measured(self, layout: Layout, **of_task: Any) -> pd.DataFrame:
        where = {**of_task, **layout.where}
        if where.get("layer") == "last":
            where["layer"] = self.inputs.figures["layer"].max()
        figures = self.inputs.measured(**where)
        if layout.at_train_length:
            figures = figures[figures["length"] == figures["train_length"]]
        return figures

    def _table(self, layout: Layout, figures: pd.DataFrame, title: str = "") -> Table:
        scale = self.inputs.scale if layout.papers == (1,) else 1

        def below(of_cell: pd.DataFrame) -> list[str]:
            fields = of_cell.iloc[0].to_dict()
            if layout.shows_kept and fields["kv_kept"] > 0:
                return [f"KV {PERCENT(of_cell['kv_kept'].mean())} %"]
            fields |= {key: scale * fields[key] for key in ("train_length", "length")}
            values = [paper_table(number).at(**fields) for number in layout.papers]
            return [f"paper {value:.1f}" for value in values if value is not None][:1]

        return make_table(
            figures,
            labelled(figures, layout.rows),
            labelled(figures, layout.columns),
            title=title,
            form=FORMS[layout.form],
            below=below,
            by_seed=self.by_seed,
        )


def _main_fields(accuracies: pd.DataFrame) -> Fields:
    """The fields of a task's main figures: trained on the paper's prompts, rotary positions, where there are such."""
    fields: dict[str, Any] = {
        "metric": "exact_match",
        "variant": "",
        "task": accuracies["task"].iloc[0],
    }
    preferred = {"train_condition": "paper", "position_embedding": "rope", "condition": "paper"}
    for column, value in preferred.items():
        values = ordered(accuracies[column])
        fields[column] = value if value in values else values[0]
        accuracies = accuracies[accuracies[column] == fields[column]]
    lengths, train_lengths = accuracies["length"], accuracies["train_length"].dropna()
    train_length = None if train_lengths.empty else train_lengths.min()
    length = train_length if (lengths == train_length).any() else lengths.min()
    return {**fields, "train_length": train_length, "length": length}
