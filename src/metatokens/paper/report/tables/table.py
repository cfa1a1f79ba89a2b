"""A table, and how figures stand in it: the seeds they are of, the paper's beside them, floor and n."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from metatokens.evaluation.intervals import newcombe
from metatokens.paper.report.frame import Cell, Fields, Inputs, one_seed, shared
from metatokens.paper.report.text import EN_DASH, NOT_RUN, NOT_YET, count, percent, points, tokens, with_interval
from metatokens.paper.report.words import Words

POSITIONS = {"rope": "rope", "learned": "learned", "none": "no positions"}
_MEASURED = ("floor", "n (prompts a seed)")

Row = tuple[str, ...]


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


def worded(words: Words, header: Iterable[str], rows: Iterable[Row], footer: Iterable[Row] = ()) -> Table:
    """A table with its words in `words.md`; the header is that of the second column and the further ones."""
    return Table(words.title, (words.corner, *header), tuple(rows), tuple(footer), words.text)


def crosstab(
    inputs: Inputs,
    words: Words,
    rows: Sequence[tuple[str, Fields]],
    columns: Mapping[str, Fields],
    *,
    below: Sequence[Sequence[str]] = (),
    gaps: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    shared_by: int = 0,
) -> Table:
    """A table of accuracies: the fields of a cell are those of its row and of its column.

    Floor and n are columns where rows differ in task or length, and rows below otherwise. In a grid, where seeds
    are few, each model says with its row, or its column, that its figures are of one alone.

    Args:
        inputs: what was read.
        words: its title, the header of its first column, and the note below it.
        rows: the label and the fields of each.
        columns: their headers and fields.
        below: what stands under each figure and difference, such as the paper's.
        gaps: headers of further columns, each with the two columns whose difference it shows.
        shared_by: how many rows each are shown by the seeds that all their cells have; 0 for all seeds of each cell.
    """
    settings = [[{**row, **column} for column in columns.values()] for _, row in rows]
    found = inputs.cells(list(chain.from_iterable(settings)))
    if shared_by:
        found = [cell for block in _batches(found, shared_by * len(columns)) for cell in shared(block)]
    cells = _batches(found, len(columns)) or [[] for _ in rows]
    by_column = list(zip(*cells, strict=True)) or [()] * len(columns)
    is_measured_by_row = len({(fields.get("task"), fields.get("length")) for _, fields in rows}) > 1
    is_model_by_column = any("model" in fields for fields in columns.values())
    lines = []
    for number, ((label, fields), own) in enumerate(zip(rows, cells, strict=True)):
        model, *under = label.split("\n")
        model += one_seed(own) if inputs.preset and not is_model_by_column else ""
        theirs = below[number] if below else [""] * (len(columns) + len(gaps))
        line = ["\n".join([model, *under]), *map(shown, own, theirs)]
        cell = dict(zip(columns, own, strict=True))
        for (a, b), text in zip(gaps.values(), theirs[len(columns) :], strict=True):
            line.append("\n".join(filter(None, [change(cell[a], cell[b]), text])))
        lines.append((*line, *(_measured(inputs, fields, own) if is_measured_by_row else ())))
    seeds = [one_seed(own) if inputs.preset and is_model_by_column else "" for own in by_column]
    header, footer = [*map("".join, zip(columns, seeds, strict=True)), *gaps], []
    if is_measured_by_row:
        header += _MEASURED
    else:
        first = settings[0] if rows else [{}] * len(columns)
        measured = [_measured(inputs, where, own) for where, own in zip(first, by_column, strict=True)]
        footer = [(text, *(one[place] for one in measured)) for place, text in enumerate(_MEASURED)]
        if any(fields.get("metric") == "token_accuracy" for _, fields in rows):  # the floor is known of answers alone
            footer = [("n (tokens a seed)", *footer[1][1:])]
    return worded(words, header, lines, footer)


def label(fields: Fields) -> str:
    """`meta, rope, 512`: the model, its positions and train length."""
    train = fields.get("train_length")
    position = POSITIONS.get(str(fields.get("position_embedding")), "")
    return ", ".join(filter(None, [str(fields["model"]), position, tokens(train) if train else ""]))


def shown(cell: Cell | None, below: str = "") -> str:
    """Our figure, what stands below it, and each seed's where there are several."""
    pooled = cell.pooled() if cell else None
    lines = [NOT_YET if cell is None else NOT_RUN if pooled is None else with_interval(pooled), below]
    if cell and len(cell.seeds) > 1:
        lines.append("seeds " + " ".join(f"{100 * value:.0f}" for value in cell.values()))
    return "\n".join(filter(None, lines))


def change(a: Cell | None, b: Cell | None) -> str:
    """a - b with its interval, of the seeds that both have."""
    if not a or not b or not (seeds := sorted(a.seeds.keys() & b.seeds.keys())):
        return NOT_YET
    return points(newcombe(a.of(seeds).pooled(), b.of(seeds).pooled()))


def counts(cells: Iterable[Cell | None]) -> str:
    """The n of each seed's figure, a range where they differ; an ellipsis where there is none."""
    ns = {one.n for cell in cells if cell for one in cell.seeds.values()}
    return span(map(count, sorted({min(ns), max(ns)}))) if ns else NOT_YET


def span(ends: Iterable[str]) -> str:
    """`500–1,024`, or the one there is."""
    return EN_DASH.join(ends)


def _measured(inputs: Inputs, where: Fields, cells: Iterable[Cell | None]) -> Row:
    """What is scored without doing the task, and the prompts of each seed's figure: see `_MEASURED`."""
    n = counts(cells)
    return NOT_YET if n == NOT_YET else percent(
        inputs.floor(where["task"], where["length"], where.get("condition", "paper"))
    ), n


def _batches(cells: Sequence[Cell | None], size: int) -> list[Sequence[Cell | None]]:
    return [cells[start : start + size] for start in range(0, len(cells), size or 1)]
