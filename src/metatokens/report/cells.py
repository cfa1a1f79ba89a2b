"""How the figures of a grid stand in a table: which seeds they are of, the paper's beside them, guessing and n."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

from metatokens.report.estimates import difference
from metatokens.report.grid import Cell, Grid
from metatokens.report.paper import PaperTable, printed
from metatokens.report.tables import Row
from metatokens.report.wording import EN_DASH, NOT_RUN, NOT_YET, count, percent, points, tokens, with_interval

POSITIONS = {"rope": "rope", "learned": "learned", "none": "no positions"}
MEASURE = ("guessing", "n (prompts a seed)")


def shown(cell: Cell | None, paper: float | str | None = "") -> str:
    """Our figure, the paper's below it where there may be one, and each seed's where there are several."""
    pooled = cell.pooled() if cell else None
    lines = [NOT_YET if cell is None else NOT_RUN if pooled is None else with_interval(pooled)]
    if not isinstance(paper, str):
        lines.append(f"paper {printed(paper)}")
    if cell and len(cell.seeds) > 1:
        lines.append("seeds " + " ".join(f"{100 * (one.value or 0.0):.0f}" for one in cell.seeds.values()))
    return "\n".join(lines)


def change(a: Cell | None, b: Cell | None) -> str:
    """a - b with its interval, of the seeds that both have."""
    if not a or not b or not (seeds := a.seeds.keys() & b.seeds.keys()):
        return NOT_YET
    first, second = a.pooled(sorted(seeds)), b.pooled(sorted(seeds))
    return points(difference(first, second)) if first and second else NOT_RUN


def common(*cells: Cell | None) -> list[Cell | None]:
    """The cells by the seeds that all of those with a figure have; as they are where there is no such seed."""
    seeds = [cell.seeds.keys() for cell in cells if cell and cell.seeds]
    shared = set(seeds[0]).intersection(*seeds) if seeds else set()
    if not shared:
        return list(cells)
    return [cell and Cell({seed: one for seed, one in cell.seeds.items() if seed in shared}) for cell in cells]


def aligned(rows: Sequence[Sequence[Cell | None]]) -> list[list[Cell | None]]:
    """`common` of all the cells of rows that are to be compared with one another."""
    cells = iter(common(*chain.from_iterable(rows)))
    return [list(islice(cells, len(row))) for row in rows]


def one_seed(cells: Iterable[Cell | None]) -> str:
    """` (seed 0)` where every figure is of that seed alone; of several seeds each cell shows every one."""
    found = {tuple(cell.seeds) for cell in cells if cell and cell.seeds}
    [seeds] = found if len(found) == 1 else [()]
    return f" (seed {seeds[0]})" if len(seeds) == 1 else ""


def label(fields: dict[str, Any], cells: Iterable[Cell | None] = ()) -> str:
    """`meta, rope, 512 (seed 0)`: the model, its positions and train length, and the seed where there is one."""
    train = fields.get("train_length")
    position = POSITIONS.get(str(fields.get("position_embedding")), "")
    return ", ".join(filter(None, [str(fields["model"]), position, tokens(train) if train else ""])) + one_seed(cells)


def counts(cells: Iterable[Cell | None]) -> str:
    """The n of each seed's figure, a range where they differ; an ellipsis where there is none."""
    ns = {one.n for cell in cells if cell for one in cell.seeds.values()}
    return EN_DASH.join(map(count, sorted({min(ns), max(ns)}))) if ns else NOT_YET


def measure(grid: Grid, task: str, length: int, cells: Iterable[Cell | None]) -> Row:
    """What guessing scores, and the prompts of each seed's figure: see `MEASURE`."""
    n = counts(cells)
    return NOT_YET if n == NOT_YET else percent(grid.floor(task, length)), n


def footer(grid: Grid, task: str, lengths: Sequence[int], rows: Sequence[Sequence[Cell | None]]) -> tuple[Row, ...]:
    """`measure` of each column, as two rows."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in lengths)
    found = [measure(grid, task, length, column) for length, column in zip(lengths, columns, strict=True)]
    return tuple((title, *(one[place] for one in found)) for place, title in enumerate(MEASURE))


def notes(paper: PaperTable) -> str:
    """What there is to say of the paper's numbers."""
    return "The paper's numbers: " + " ".join(paper.notes) if paper.notes else ""


def recipe(grid: Grid, stage: str) -> dict[str, Any]:
    """The settings of a stage; empty where no run.json has them."""
    return next((run.recipes[stage] for run in grid.inputs.runs if stage in run.recipes), {})
