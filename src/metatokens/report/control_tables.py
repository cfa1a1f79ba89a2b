"""Tables of what the paper has no control for, or does not try: accuracies of a grid."""

from itertools import product
from typing import Any

from metatokens.report.comparison import change, shown
from metatokens.report.grid import Grid
from metatokens.report.recall_claims import LENGTHS, TASKS, TRAINED
from metatokens.report.tables import Table
from metatokens.report.wording import MINUS, NOT_YET, name, percent, tokens


def random_positions(grid: Grid) -> Table:
    """Trained to 128 tokens with positions drawn at random, by task and length; plain positions in the second line."""
    rows = []
    for task, model in product(TASKS, ("gpt2", "twin", "meta")):
        where: dict[str, Any] = {"model": model, "position_embedding": "rope", "task": task, "train_length": 128}
        cells = []
        for length in LENGTHS:
            plain = grid.accuracy(**where, length=length)
            pooled = plain.pooled() if plain else None
            drawn = shown(grid.accuracy("random-positions", **where, length=length))
            cells.append(f"{drawn}\nplain {percent(pooled.value) if pooled else NOT_YET}")
        rows.append((f"{name(task)}, {model}", *cells))
    header = ("task, model", *(f"{tokens(one)} ({one // 128}\u00d7)" for one in LENGTHS))
    return Table("Positions drawn at random in training (rope, trained to 128 tokens), %", header, tuple(rows))


def placement(grid: Grid) -> Table:
    """Where meta-tokens are put in pretraining and how many: list recall by length, and perplexity of the text."""
    notes = {"": "uniform, k = 0.1 (paper)", "periodic": "periodic, k = 0.1", "k=0": "none"}
    notes |= {f"k={k}": f"uniform, k = {k}" for k in ("0.05", "0.2")}
    columns = LENGTHS[:5]
    rows = []
    for (note, text), trained in product(notes.items(), TRAINED):
        where: dict[str, Any] = {"model": "meta", "position_embedding": "rope", "task": "list_recall"}
        cells = (shown(grid.accuracy(note, **where, train_length=trained, length=length)) for length in columns)
        rows.append((f"{text}, trained to {tokens(trained)}", *cells))
    return Table(
        "List recall of meta with rope, by its pretraining, %", ("meta-tokens", *map(tokens, columns)), tuple(rows)
    )


def controls(grid: Grid) -> Table:
    """All four models with rope at 1, 2 and 4 times the train length, a row for each task and train length."""
    rows = []
    for task, trained, ratio in product(TASKS, TRAINED, (1, 2, 4)):
        where: dict[str, Any] = {"position_embedding": "rope", "task": task, "train_length": trained}
        cells = {
            model: grid.accuracy(**where, model=model, length=trained * ratio)
            for model in ("gpt2", "pause", "twin", "meta")
        }
        label = f"{name(task)}, {tokens(trained)} \u2192 {tokens(trained * ratio)}"
        rows.append((label, *map(shown, cells.values()), change(cells["meta"], cells["twin"])))
    header = ("task, train \u2192 test length", "gpt2", "pause", "twin", "meta", f"meta {MINUS} twin")
    return Table("What each addition brings (rope), %", header, tuple(rows))
