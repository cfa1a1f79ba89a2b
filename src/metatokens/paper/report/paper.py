"""The paper's numbers, typed once in `paper_numbers.json`, by the fields of the results that they are compared with."""

from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

Fields = dict[str, Any]  # of a result: text, whole numbers, null


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PaperRow(_Strict):
    """One printed row."""

    printed: str
    fields: Fields
    values: tuple[float | None, ...]


class PaperTable(_Strict):
    """One printed table: the fields of a cell are those of the table, of its row and of its column."""

    table: int
    label: str
    title: str
    fields: Fields
    columns: tuple[Fields, ...]
    rows: tuple[PaperRow, ...]
    notes: tuple[str, ...]

    @model_validator(mode="after")
    def _rows_are_full(self) -> "PaperTable":
        for row in self.rows:
            if len(row.values) != len(self.columns):
                raise ValueError(f"table {self.table}, {row.printed}: {len(self.columns)} values are needed")
        return self

    def at(self, **fields: Any) -> float | None:
        """The number of the first cell whose fields are among those given; None where there is none, or a dash.

        Fields that are not given may have any value. An accuracy is in percent.
        """
        for row in self.rows:
            for column, value in zip(self.columns, row.values, strict=True):
                cell = self.fields | row.fields | column
                if all(fields.get(name, wanted) == wanted for name, wanted in cell.items()):
                    return value
        return None


class PaperFigure(_Strict):
    """The paper's words on a figure, which prints no numbers."""

    figure: int
    title: str
    statement: str
    notes: tuple[str, ...]


class Paper(_Strict):
    """The file."""

    about: str
    tables: tuple[PaperTable, ...]
    figures: tuple[PaperFigure, ...]


@cache
def _paper() -> Paper:
    source = files("metatokens.paper.report").joinpath("paper_numbers.json")
    return Paper.model_validate_json(source.read_text(encoding="utf-8"))


def paper_table(number: int) -> PaperTable:
    """The paper's table of that number."""
    return next(one for one in _paper().tables if one.table == number)


def paper_figure(number: int) -> PaperFigure:
    """The paper's words on its figure of that number."""
    return next(one for one in _paper().figures if one.figure == number)


def first_token_ratio() -> float:
    """The paper's time to the first token with meta-tokens, divided by the time without them (Table 3)."""
    times = [paper_table(3).at(metric="first_token_ms", model=model) or 1.0 for model in ("meta", "gpt2")]
    return times[0] / times[1]
