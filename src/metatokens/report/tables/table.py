"""A table, and how figures stand in it: the seeds they are of, the paper's beside them, guessing and n."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from metatokens.report.frame import Cell, Fields, Inputs, one_seed, shared
from metatokens.report.intervals import Estimate, newcombe
from metatokens.report.text import EN_DASH, NOT_RUN, NOT_YET, count, percent, points, tokens, with_interval
from metatokens.report.words import table_words

POSITIONS = {"rope": "rope", "learned": "learned", "none": "no positions"}
MEASURE = ("guessing", "n (prompts a seed)")

Row = tuple[str, ...]
Cells = Sequence[Cell | None]


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


def crosstab(
    inputs: Inputs,
    key: str,
    rows: Sequence[tuple[str, Fields]],
    columns: Mapping[str, Fields],
    values: Mapping[str, object] | None = None,
    *,
    below: Sequence[Sequence[str]] = (),
    shared_by: int = 0,
    extra: Mapping[str, Callable[[int, Cells], str]] | None = None,
    is_measured_by_row: bool = False,
    seed_is_said: Literal["by row", "by column", "nowhere"] = "by row",
) -> Table:
    """A table of accuracies: the fields of a cell are those of its row and of its column.

    Args:
        inputs: what was read.
        key: of its words in `words.md`, which `values` complete.
        rows: the label and the fields of each.
        columns: their headers and fields.
        values: see `key`.
        below: what stands under each figure, such as the paper's.
        shared_by: how many rows each are shown by the seeds that all their cells have; 0 for all seeds of each cell.
        extra: headers of further columns, each with what it shows of the row of that number and its cells.
        is_measured_by_row: whether guessing and n are columns, of each row, and not rows below.
        seed_is_said: where it stands that all figures are of one seed.
    """
    settings = [[{**row, **column} for column in columns.values()] for _, row in rows]
    found = iter(inputs.cells(list(chain.from_iterable(settings))))
    cells: list[Cells] = [list(islice(found, len(columns))) for _ in rows]
    for start in range(0, len(rows), shared_by) if shared_by else ():
        block = iter(shared(list(chain.from_iterable(cells[start : start + shared_by]))))
        cells[start : start + shared_by] = [list(islice(block, len(columns))) for _ in cells[start : start + shared_by]]
    lines = []
    for number, ((text, _), own) in enumerate(zip(rows, cells, strict=True)):
        first, *under = text.split("\n")
        first += one_seed(own) if seed_is_said == "by row" else ""
        line = ["\n".join([first, *under]), *map(shown, own, below[number] if below else [""] * len(own))]
        line += [show(number, own) for show in (extra or {}).values()]
        lines.append((*line, *(measure(inputs, settings[number][0], own) if is_measured_by_row else ())))
    by_column: list[Cells] = list(zip(*cells, strict=True)) if rows else [()] * len(columns)
    seeds = [one_seed(own) if seed_is_said == "by column" else "" for own in by_column]
    words = table_words(key).of(**values or {})
    headers = [text + seed for text, seed in zip(columns, seeds, strict=True)]
    header = (words.corner, *headers, *(extra or ()), *(MEASURE if is_measured_by_row else ()))
    footer: tuple[Row, ...] = ()
    if not is_measured_by_row:
        first_row = settings[0] if rows else [{} for _ in columns]
        measures = [measure(inputs, where, own) for where, own in zip(first_row, by_column, strict=True)]
        footer = tuple((text, *(one[place] for one in measures)) for place, text in enumerate(MEASURE))
    estimates = tuple(tuple(cell.pooled() if cell else None for cell in own) for own in cells)
    return Table(words.title, header, tuple(lines), footer, words.text, estimates=estimates)


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
        lines.append("seeds " + " ".join(f"{100 * (one.value or 0.0):.0f}" for one in cell.seeds.values()))
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


def measure(inputs: Inputs, where: Fields, cells: Iterable[Cell | None]) -> Row:
    """What guessing scores, and the prompts of each seed's figure: see `MEASURE`."""
    n = counts(cells)
    return NOT_YET if n == NOT_YET else percent(inputs.guessing(where["task"], where["length"])), n
