"""The paper's numbers, typed once in `paper_numbers.json`, by the fields of the results that they are compared with."""

import json
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

from pydantic import BaseModel

Fields = dict[str, Any]  # of a result: text, whole numbers, null


class PaperRow(BaseModel):
    """One printed row."""

    printed: str
    fields: Fields
    values: tuple[float | None, ...]


class PaperTable(BaseModel):
    """One printed table: the fields of a cell are those of the table, of its row and of its column."""

    table: int
    label: str
    title: str
    fields: Fields
    columns: tuple[Fields, ...]
    rows: tuple[PaperRow, ...]
    notes: tuple[str, ...]

    def at(self, **fields: Any) -> float | None:
        """The number of the first cell whose fields are among those given; None where there is none, or a dash.

        Fields that are not given may have any value. An accuracy is in percent.
        """
        for row, (number, column) in product(self.rows, enumerate(self.columns)):
            cell = self.fields | row.fields | column
            if all(fields.get(name, value) == value for name, value in cell.items()):
                return row.values[number]
        return None


@cache
def paper_table(number: int) -> PaperTable:
    """The paper's table of that number."""
    text = (
        files("metatokens.paper.report").joinpath("paper_numbers.json").read_text(encoding="utf-8")
    )
    return next(
        PaperTable.model_validate(table)
        for table in json.loads(text)["tables"]
        if table["table"] == number
    )
