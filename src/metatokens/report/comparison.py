"""Tables that set the paper's accuracies beside those of a grid.

A cell has lines: our figure with its 95 % interval, the paper's, and each seed's, rounded, where there are several.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from metatokens.report.estimates import difference
from metatokens.report.grid import Cell, Grid
from metatokens.report.paper import PaperTable, paper_table, printed
from metatokens.report.recall_claims import ABLATION_TABLES, LENGTH_TABLES, LENGTHS, TRAINED, YARN, reaches
from metatokens.report.tables import Row, Table
from metatokens.report.wording import (
    EN_DASH,
    NOT_RUN,
    NOT_YET,
    count,
    name,
    percent,
    points,
    signed,
    tokens,
    with_interval,
)

SCALE = {512: 2048, 1024: 4096, 2048: 8192, 4096: 16384}  # YaRN's lengths here, and the paper's four times as long
SCALES = ("0.1", "0.5", "1", "2")
_POSITIONS = {"learned": "learned", "rope": "rope", "none": "no positions"}
NOISE = (
    "Noise S: each position gets one draw from a Gaussian of standard deviation S, for all layers, heads and both "
    "attentions. Learned positions: added to every entry of p_t, S in standard deviations of the table's entries. "
    "Rope: added to the position t before the angle is taken, S in positions. \u201c:meta\u201d: at the meta-tokens "
    "alone; \u201c:raw\u201d: of learned positions, S in the table's own units. So the two kinds of positions are not "
    "disturbed by the same amount, in the paper no more than here. Each of 5 draws of the noise is measured on "
    "another fifth of the prompts."
)


def lengths(grid: Grid, task: str) -> Table:
    """Tables 7 to 10: a row for each of the paper's, a column for each length."""
    paper = paper_table(LENGTH_TABLES[task])
    columns = [column["length"] for column in paper.columns]
    rows = []
    for row in paper.rows:
        fields: dict[str, Any] = {"train_length": TRAINED[-1]} | row.fields
        cells = [
            shown(grid.accuracy(task=task, **fields | {"length": length}), value)
            for length, value in zip(columns, row.values, strict=True)
        ]
        rows.append((_label(fields), *cells))
    return Table(
        f"{name(task)} (Table {paper.table}): answers exactly right, %",
        ("model, positions, train length", *map(tokens, columns)),
        tuple(rows),
        _guessing(grid, task, columns),
        note=_notes(paper),
    )


def all_lengths(
    grid: Grid, task: str, condition: str = "paper", *, note: str = "", metric: str = "exact_match"
) -> Table:
    """Every model, kind of positions and train length that was measured on a task."""
    where: dict[str, Any] = {"task": task, "condition": condition, "metric": metric, "intervention": None, "note": note}
    trained_on = "none" if note == "unmarked" else "paper"
    columns = grid.values("length", **where, train_condition=trained_on)
    rows = []
    for position, model in product(_POSITIONS, ("gpt2", "pause", "twin", "meta", "gpt-neo")):
        for trained in grid.values("train_length", **where, model=model, position_embedding=position):
            fields: dict[str, Any] = {"model": model, "position_embedding": position, "train_length": trained}
            about = where | fields | {"train_condition": trained_on}
            rows.append((_label(fields), *(shown(grid.accuracy(**about, length=length)) for length in columns)))
    extra = f", condition {condition}" if condition != "paper" else ""
    unit = "answers exactly right" if metric == "exact_match" else "answer tokens right"
    header = ("model, positions, train length", *map(tokens, columns))
    footer = _guessing(grid, task, columns) if metric == "exact_match" else ()
    return Table(f"{name(task)}{extra}: {unit}, %", header, tuple(rows), footer)


def ablations(grid: Grid, task: str) -> Table:
    """Tables 11 to 14: full, no position, no embedding, neither at the meta-tokens, tested at the train length."""
    paper = paper_table(ABLATION_TABLES[task])
    rows = []
    for row in sorted(paper.rows, key=lambda row: str(row.fields["position_embedding"]), reverse=True):
        cells = [
            shown(grid.accuracy(**fields, length=fields["train_length"]), value) for fields, value in paper.cells(row)
        ]
        rows.append((_label({"model": "meta"} | row.fields), *cells))
    return Table(
        f"{name(task)} (Table {paper.table}): tested at the train length, %",
        ("model, positions, train length", "full", "no position", "no embedding", "neither"),
        tuple(rows),
        note=_notes(paper),
    )


def zeroed_positions(grid: Grid) -> Table:
    """Tables 2 and 17: list recall by length, full and without positions at the meta-tokens."""
    paper, fewer = paper_table(17), paper_table(2)
    rows = []
    for position, trained, length in product(("rope", "learned"), TRAINED, LENGTHS[:5]):
        if not reaches(position, length):
            continue
        where: dict[str, Any] = {"position_embedding": position, "train_length": trained, "length": length}
        full, zeroed = (
            grid.accuracy(model="meta", task="list_recall", **where, intervention=intervention)
            for intervention in (None, "no_pos")
        )
        theirs = [
            paper.value(**cell, **where) if paper.value(**cell, **where) is not None else fewer.value(**cell, **where)
            for cell in fewer.columns
        ]
        rows.append(
            (
                f"{position}, {tokens(trained)} \u2192 {tokens(length)}",
                shown(full, theirs[0]),
                shown(zeroed, theirs[1]),
                f"{change(zeroed, full)}\npaper {printed(None) if theirs[2] is None else signed(theirs[2] / 100)}",
            )
        )
    return Table(
        "List recall, no position at the meta-tokens (Tables 2, 17), %",
        ("positions, train \u2192 test length", "full", "no position", "difference, points"),
        tuple(rows),
        note=" ".join((*paper.notes, *fewer.notes)),
    )


def noise(grid: Grid, task: str, length: int, kind: str = "") -> Table:
    """Tables 15 and 16: Gaussian noise on the positions; `kind` is one of the further forms, such as `:meta`."""
    paper = paper_table({"list_recall": 15, "copying": 16}[task])
    rows = []
    for row in paper.rows if not kind else ():
        cells = [shown(grid.accuracy(**fields, length=length), value) for fields, value in paper.cells(row)]
        rows.append((_label(row.fields), *cells))
    ours = [("gpt2", "rope")] if not kind else product(("gpt2", "meta"), ("rope", "learned"))
    for (model, position), trained in product(ours, TRAINED):
        fields: dict[str, Any] = {"model": model, "position_embedding": position, "train_length": trained}
        where = fields | {"task": task, "length": length}
        changed = [None, *(f"noise:{scale}{kind}" for scale in SCALES)]
        if not kind or any(grid.accuracy(**where, intervention=one) for one in changed[1:]):
            rows.append((_label(fields), *(shown(grid.accuracy(**where, intervention=one)) for one in changed)))
    source = f" (Table {paper.table})" if not kind else f", {kind.lstrip(':').replace(':', ', ')}"
    return Table(
        f"{name(task)}, noise on positions{source}: tested at {tokens(length)} tokens, %",
        ("model, positions, train length", "no noise", *(f"noise {scale}" for scale in SCALES)),
        tuple(rows),
        note=_notes(paper) if not kind else "",
    )


def yarn(grid: Grid, task: str) -> Table:
    """Table 1 at a quarter of its lengths: token accuracy by extended window and train length."""
    paper = paper_table(1)
    columns = (256, *SCALE)
    rows = []
    models = ["meta", *(model for model in ("twin", "pause", "gpt2") if grid.values("task", model=model, note="yarn4"))]
    for model, (note, trained) in product(models, ((note, one) for note, ends in YARN.items() for one in ends)):
        window = YARN[note][-1]
        theirs: dict[str, Any] = {"task": task, "window": 4 * window, "train_length": 4 * trained}
        where: dict[str, Any] = {"model": model, "position_embedding": "rope", "task": task, "train_length": trained}
        cells = []
        for length in columns:
            value = paper.value(**theirs, length=SCALE.get(length, 0))
            is_printed = model == "meta" and length in SCALE
            cell = grid.accuracy(note, **where, length=length, metric="token_accuracy")
            cells.append(shown(cell, value) if is_printed else shown(cell))
        of_paper = f"\npaper's {4 * window // 1024}k / {4 * trained // 1024}k" if model == "meta" else ""
        rows.append((f"{model}, window {tokens(window)}, trained to {tokens(trained)}{of_paper}", *cells))
    return Table(
        f"{name(task)} with YaRN (Table 1): answer tokens right, %",
        ("model", *(tokens(one) + (f" (paper's {SCALE[one] // 1024}k)" if one in SCALE else "") for one in columns)),
        tuple(rows),
        note=_notes(paper),
    )


def papers_yarn() -> Table:
    """The paper's Table 1 as printed."""
    paper = paper_table(1)
    return Table(
        "The paper's Table 1: token accuracy, %",
        ("window / train length", *(f"{(column['length'] or 0) // 1024}k" for column in paper.columns)),
        tuple((f"{name(str(row.fields['task']))}, {row.printed}", *map(printed, row.values)) for row in paper.rows),
    )


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


def _label(fields: dict[str, Any]) -> str:
    train = fields.get("train_length")
    position = _POSITIONS.get(str(fields.get("position_embedding")), "")
    return ", ".join(filter(None, [str(fields["model"]), position, tokens(train) if train else ""]))


def _guessing(grid: Grid, task: str, columns: Sequence[Any]) -> tuple[Row, ...]:
    ns: list[set[int]] = [
        {one.n for cell in grid.cells(task=task, length=length, intervention=None) for one in cell.seeds.values()}
        for length in columns
    ]
    counts = (EN_DASH.join(map(count, sorted({min(n), max(n)}))) if n else NOT_YET for n in ns)
    return (
        (
            "guessing",
            *(percent(grid.floor(task, where)) if n else NOT_YET for where, n in zip(columns, ns, strict=True)),
        ),
        ("n (prompts a seed)", *counts),
    )


def _notes(paper: PaperTable) -> str:
    return "The paper's numbers: " + " ".join(paper.notes) if paper.notes else ""
