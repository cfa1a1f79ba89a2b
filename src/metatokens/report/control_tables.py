"""Tables of what the paper has no control for, or does not try: accuracies of a grid."""

from itertools import product
from typing import Any

from metatokens.data.insertion import meta_token_count
from metatokens.report.cells import MEASURE, aligned, change, common, footer, measure, one_seed, recipe, shown
from metatokens.report.control_claims import RANDOM
from metatokens.report.estimates import MODELS
from metatokens.report.grid import Cell, Grid
from metatokens.report.recall_claims import LENGTHS, TASKS, TRAINED
from metatokens.report.tables import Table
from metatokens.report.wording import MINUS, compact, count, name, percent, tokens

PLACEMENTS = {"": "uniform, k = 0.1 (paper)", "periodic": "periodic, k = 0.1", "k=0": "none"}
PLACEMENTS |= {f"k={k}": f"uniform, k = {k}" for k in ("0.05", "0.2")}


def random_positions(grid: Grid, task: str) -> Table:
    """Trained to 128 tokens with positions drawn at random, and with plain ones: as long, and as in the grid."""
    rows, measured = [], []
    notes = {note: title.lower() for note, title in RANDOM.items()}
    notes |= {"one-length": "plain, at 128 alone", "": "plain, first phase"}
    for model in ("gpt2", "twin", "meta"):
        where: dict[str, Any] = {"model": model, "position_embedding": "rope", "task": task, "train_length": 128}
        block = aligned([[grid.accuracy(note, **where, length=one) for one in LENGTHS] for note in notes])
        for (note, text), cells in zip(notes.items(), block, strict=True):
            if note != "one-length" or any(cells) or task == "list_recall":
                measured.append(cells)
                steps = _steps(grid, model, task, note)
                rows.append((f"{model}, {text}{steps}{one_seed(cells)}", *map(shown, cells)))
    return Table(
        f"{name(task)}, trained to 128 tokens (rope): answers exactly right, %",
        ("model, positions in training", *(f"{tokens(one)} ({one // 128}\u00d7)" for one in LENGTHS)),
        tuple(rows),
        footer(grid, task, LENGTHS, measured),
    )


def _steps(grid: Grid, model: str, task: str, note: str) -> str:
    """`, 8,000 steps`: those at 128 tokens, where the run's settings are at hand."""
    settings = recipe(grid, f"finetune-{model}{'-' if note else ''}{note}-{task}")
    return f", {count(settings['task']['train_steps'][0])} steps" if settings else ""


def placement(grid: Grid) -> Table:
    """Where meta-tokens are put in pretraining and how many: list recall by length."""
    columns = LENGTHS[:5]
    rows, measured = [], []
    for trained in TRAINED:
        where: dict[str, Any] = {"model": "meta", "position_embedding": "rope", "task": "list_recall"}
        where["train_length"] = trained
        block = aligned([[grid.accuracy(note, **where, length=one) for one in columns] for note in PLACEMENTS])
        for text, cells in zip(PLACEMENTS.values(), block, strict=True):
            measured.append(cells)
            rows.append((f"{text}, trained to {tokens(trained)}{one_seed(cells)}", *map(shown, cells)))
    return Table(
        "List recall of meta with rope, by its pretraining, %",
        ("meta-tokens", *map(tokens, columns)),
        tuple(rows),
        footer(grid, "list_recall", columns, measured),
    )


def seed_spread(grid: Grid) -> str:
    """How far the seeds of the paper's placement differ, beside which the others, of one seed, are to be seen."""
    where: dict[str, Any] = {"model": "meta", "position_embedding": "rope", "task": "list_recall"}
    cell = grid.accuracy(**where, train_length=TRAINED[-1], length=2 * TRAINED[-1])
    if not cell or len(cell.seeds) < 2:
        return ""
    own = " / ".join(percent(one.value) for one in cell.seeds.values())
    return (
        f"The rows are of one seed. How much that says: trained to {tokens(TRAINED[-1])} and tested at "
        f"{tokens(2 * TRAINED[-1])} tokens, the seeds of meta with the paper's placement have {own} %."
    )


def text_read(grid: Grid) -> str:
    """How much text each row of `placement` read in pretraining, as far as run.json has their settings."""
    read, said = set(), []
    for note, text in PLACEMENTS.items():
        if settings := recipe(grid, f"pretrain-meta{'-' if note else ''}{note}"):
            data, training = settings["data"], settings["training"]
            size = data["block_size"]
            own = size - meta_token_count(size, data["fraction"], data["placement"])
            blocks = training["max_steps"] * training["per_device_train_batch_size"]
            total = own * blocks * training["gradient_accumulation_steps"]
            read.add(total)
            said.append(f"{text}: {compact(total)} ({tokens(own)} of a block's {tokens(size)})")
    if len(said) < 2:
        return ""
    same = "All read the same text" if len(read) == 1 else "The rows differ in the text read"
    return f"{same}, tokens in pretraining: {'; '.join(said)}."


def markers(grid: Grid) -> Table:
    """Each model and task with the markers that it was trained with, without them, and among decoys."""
    length = TRAINED[-1]
    rows = []
    for task, model in product(TASKS, MODELS):
        where: dict[str, Any] = {"model": model, "position_embedding": "rope", "task": task}
        cells = common(
            *(
                grid.accuracy(**where, train_length=length, length=length, condition=condition)
                for condition in ("paper", "none", "decoy")
            )
        )
        rows.append(
            (f"{name(task)}, {model}{one_seed(cells)}", *map(shown, cells), *measure(grid, task, length, cells))
        )
    title = f"By condition, rope, trained and tested at {tokens(length)} tokens: answers exactly right, %"
    return Table(title, ("task, model", "paper", "none", "decoy", *MEASURE), tuple(rows))


def controls(grid: Grid) -> Table:
    """All four models with rope at 1, 2 and 4 times the train length, a row for each task and train length."""
    rows, measured = [], list[list[Cell | None]]()
    for task, trained, ratio in product(TASKS, TRAINED, (1, 2, 4)):
        where: dict[str, Any] = {"position_embedding": "rope", "task": task, "train_length": trained}
        cells = [grid.accuracy(**where, model=model, length=trained * ratio) for model in MODELS]
        measured.append(cells)
        by_model = dict(zip(MODELS, cells, strict=True))
        text = f"{name(task)}, {tokens(trained)} \u2192 {tokens(trained * ratio)}"
        gap = change(by_model["meta"], by_model["twin"])
        rows.append((text, *map(shown, cells), gap, *measure(grid, task, trained * ratio, cells)))
    models = (model + one_seed(column) for model, column in zip(MODELS, zip(*measured, strict=True), strict=True))
    header = ("task, train \u2192 test length", *models, f"meta {MINUS} twin", *MEASURE)
    return Table("What each addition brings (rope), %", header, tuple(rows))
