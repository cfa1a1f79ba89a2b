"""Tables of what is taken away, or disturbed, at inference: position and embedding of meta-tokens, noise on positions.

The figures of a row, and those that are to be compared, are of the same seeds.
"""

from itertools import product
from typing import Any

from metatokens.report.cells import (
    MEASURE,
    aligned,
    change,
    common,
    footer,
    label,
    measure,
    notes,
    one_seed,
    shown,
)
from metatokens.report.estimates import MODELS, Difference, difference
from metatokens.report.grid import Cell, Grid
from metatokens.report.paper import paper_table, printed
from metatokens.report.recall_claims import ABLATION_TABLES, LENGTHS, TRAINED, reaches
from metatokens.report.tables import Table
from metatokens.report.verdicts import SMALL
from metatokens.report.wording import name, signed, tokens

SCALES = ("0.1", "0.5", "1", "2")
INTERVENTIONS = {None: "full", "no_pos": "no position", "no_embed": "no embedding", "neither": "neither"}
_KINDS = {"": "", ":meta": "at the meta-tokens alone", ":raw": "in raw units"}
_KINDS[":meta:raw"] = f"{_KINDS[':meta']}, {_KINDS[':raw']}"
NOISE_KINDS = tuple(_KINDS)


def ablations(grid: Grid, task: str) -> Table:
    """Tables 11 to 14: full, no position, no embedding, neither at the meta-tokens, tested at the train length."""
    paper = paper_table(ABLATION_TABLES[task])
    rows = []
    for row in sorted(paper.rows, key=lambda row: str(row.fields["position_embedding"]), reverse=True):
        length = row.fields["train_length"]
        theirs = paper.cells(row)
        cells = common(*(grid.accuracy(**fields, length=length) for fields, _ in theirs))
        figures = (shown(cell, value) for cell, (_, value) in zip(cells, theirs, strict=True))
        about = label({"model": "meta"} | row.fields, cells)
        rows.append((about, *figures, *measure(grid, task, length, cells)))
    return Table(
        f"{name(task)} (Table {paper.table}): tested at the train length, %; the paper's not always, see below",
        ("model, positions, train length", *INTERVENTIONS.values(), *MEASURE),
        tuple(rows),
        note=notes(paper),
    )


def by_length(grid: Grid, task: str, trained: int) -> Table:
    """Every model that was measured, full and with each thing taken away from its meta-tokens, by length."""
    where: dict[str, Any] = {"task": task, "train_length": trained}
    zeroed = {"condition": "paper", "metric": "exact_match", "intervention": "no_pos"}
    columns = grid.values("length", **where, **zeroed, note="")
    rows, shown_cells = [], []
    for position, model in product(("rope", "learned"), MODELS):
        about: dict[str, Any] = {"model": model, "position_embedding": position} | where
        if not grid.values("length", **about, **zeroed, note=grid.note(task, position)):
            continue
        block = [[grid.accuracy(**about, length=one, intervention=what) for one in columns] for what in INTERVENTIONS]
        for text, cells in zip(INTERVENTIONS.values(), aligned(block), strict=True):
            shown_cells.append(cells)
            rows.append((f"{model}, {position}, {text}{one_seed(cells)}", *map(shown, cells)))
    return Table(
        f"{name(task)} of models trained to {tokens(trained)}, by length: answers exactly right, %",
        ("model, positions, at the meta-tokens", *map(tokens, columns)),
        tuple(rows),
        footer(grid, task, columns, shown_cells),
    )


def whose_loss(grid: Grid) -> str:
    """Whether what list recall loses without positions is meta's alone: with rope, at the train length."""
    gaps: dict[str, dict[int, Difference]] = {}
    labels: dict[str, str] = {}
    for model, trained in product(MODELS, TRAINED):
        where: dict[str, Any] = {"model": model, "position_embedding": "rope", "task": "list_recall"}
        where |= {"train_length": trained, "length": trained}
        cells = common(*(grid.accuracy(**where, intervention=one) for one in (None, "no_pos")))
        full, zeroed = (cell and cell.pooled() for cell in cells)
        if full and zeroed and (gap := difference(zeroed, full)):
            gaps.setdefault(model, {})[trained] = gap
            labels[model] = model + one_seed(cells)
    lengths = sorted(set(TRAINED).intersection(*gaps.values()))
    if "meta" not in gaps or len(gaps) == 1 or not lengths:
        return "Whether other models lose as much without positions has not been measured yet."
    figures = {labels[model]: " / ".join(signed(own[one].value) for one in lengths) for model, own in gaps.items()}
    changes = "; ".join(f"{model} {each}" for model, each in figures.items())
    losing = [model for model, own in gaps.items() if all(own[one].high < -SMALL for one in lengths)]
    others = ", ".join(model for model in losing if model != "meta")
    if "meta" not in losing:
        said = f"meta does not lose more than 5 points at each{f', while others do: {others}' if others else ''}"
    elif others:
        said = f"meta loses more than 5 points at each, and others do too ({others}): the loss is not meta's alone"
    else:
        said = "only meta loses more than 5 points at each: the loss is meta's alone"
    return (
        f"List recall with rope, trained and tested at {' / '.join(map(tokens, lengths))} tokens, no position less "
        f"full, points: {changes}. So {said}."
    )


def zeroed_positions(grid: Grid) -> Table:
    """Tables 2 and 17: list recall by length, full and without positions at the meta-tokens."""
    paper, fewer = paper_table(17), paper_table(2)
    rows = []
    for position, trained, length in product(("rope", "learned"), TRAINED, LENGTHS[:5]):
        if not reaches(position, length):
            continue
        where: dict[str, Any] = {"position_embedding": position, "train_length": trained, "length": length}
        full, zeroed = cells = common(
            *(
                grid.accuracy(model="meta", task="list_recall", **where, intervention=intervention)
                for intervention in (None, "no_pos")
            )
        )
        theirs = [
            paper.value(**cell, **where) if paper.value(**cell, **where) is not None else fewer.value(**cell, **where)
            for cell in fewer.columns
        ]
        rows.append(
            (
                f"{position}, {tokens(trained)} \u2192 {tokens(length)}{one_seed(cells)}",
                shown(full, theirs[0]),
                shown(zeroed, theirs[1]),
                f"{change(zeroed, full)}\npaper {printed(None) if theirs[2] is None else signed(theirs[2] / 100)}",
                *measure(grid, "list_recall", length, cells),
            )
        )
    return Table(
        "List recall, no position at the meta-tokens (Tables 2, 17), %",
        ("positions, train \u2192 test length", "full", "no position", "difference, points", *MEASURE),
        tuple(rows),
        note=" ".join(
            (
                *paper.notes,
                *fewer.notes,
                "The paper's small, medium, hard and extra-hard are read as 128, 256, 512 and 1,024.",
            )
        ),
    )


def noise(grid: Grid, task: str, length: int, kind: str = "") -> Table:
    """Tables 15 and 16: Gaussian noise on the positions; `kind` is one of the further forms, such as `:meta`."""
    paper = paper_table({"list_recall": 15, "copying": 16}[task])
    changed = [None, *(f"noise:{scale}{kind}" for scale in SCALES)]
    rows, measured = [], []

    def add(fields: dict[str, Any], theirs: list[Any]) -> None:
        where = fields | {"task": task, "length": length}
        cells: list[Cell | None] = common(*(grid.accuracy(**where | {"intervention": one}) for one in changed))
        if not kind or any(cells[1:]):
            measured.append(cells)
            rows.append((label(fields, cells), *map(shown, cells, theirs)))

    for row in paper.rows if not kind else ():
        add(row.fields, list(row.values))
    ours = [("gpt2", "rope")] if not kind else product(("gpt2", "meta"), ("rope", "learned"))
    for (model, position), trained in product(ours, TRAINED):
        add({"model": model, "position_embedding": position, "train_length": trained}, [""] * len(changed))
    source = f"(Table {paper.table})" if not kind else _KINDS[kind]
    return Table(
        f"{name(task)}, noise on positions {source}: tested at {tokens(length)} tokens, %",
        ("model, positions, train length", "no noise", *(f"noise {scale}" for scale in SCALES)),
        tuple(rows),
        footer(grid, task, [length] * len(changed), measured),
        note=f"{noise_of(kind)} {'' if kind else notes(paper)}".strip(),
    )


def noise_of(kind: str) -> str:
    """What noise S is: where, and in which unit."""
    where = "of the meta-tokens alone" if "meta" in kind else "of every token"
    added = (
        "Learned positions: S in the table's own units; rope: S in radians, a draw for each frequency's angle."
        if "raw" in kind
        else "Learned positions: S in standard deviations of the table's entries, added to every entry of p_t; rope: S "
        "in positions, added to t before the angles are taken."
    )
    return (
        f"Noise S: the position {where} gets one draw from a Gaussian of standard deviation S, for all layers, heads "
        f"and both attentions; each of 5 draws on another fifth of the prompts. {added}"
    )
