"""Tables that set the paper's accuracies by length beside those of a grid: Tables 7 to 10, and Table 1.

A cell has lines: our figure with its 95 % interval, the paper's, and each seed's, rounded, where there are several.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from metatokens.report.cells import POSITIONS, footer, label, notes, one_seed, recipe, shown
from metatokens.report.estimates import MODELS
from metatokens.report.grid import LONGER, Cell, Grid
from metatokens.report.paper import paper_table, printed
from metatokens.report.recall_claims import LENGTH_TABLES, STRONG, TRAINED, YARN, YARN_LENGTHS
from metatokens.report.tables import Table
from metatokens.report.wording import count, name, percent, tokens

Cells = list[Cell | None]


def lengths(grid: Grid, task: str) -> Table:
    """Tables 7 to 10: a row for each of the paper's, a column for each length."""
    paper = paper_table(LENGTH_TABLES[task])
    columns = [column["length"] for column in paper.columns]
    rows, measured = [], []
    for row in paper.rows:
        fields: dict[str, Any] = {"train_length": TRAINED[-1]} | row.fields
        cells = [grid.accuracy(task=task, **fields | {"length": length}) for length in columns]
        measured.append(cells)
        rows.append((label(fields, cells), *map(shown, cells, row.values)))
    return Table(
        f"{name(task)} (Table {paper.table}): answers exactly right, %",
        ("model, positions, train length", *map(tokens, columns)),
        tuple(rows),
        footer(grid, task, columns, measured),
        note=f"{notes(paper)} {untrained(grid)}".strip(),
    )


def all_lengths(
    grid: Grid, task: str, condition: str = "paper", *, note: str = "", metric: str = "exact_match"
) -> Table:
    """Every model, kind of positions and train length that was measured on a task."""
    where: dict[str, Any] = {"task": task, "condition": condition, "metric": metric, "intervention": None, "note": note}
    trained_on = "none" if note == "unmarked" else "paper"
    columns = grid.values("length", **where, train_condition=trained_on)
    rows, measured, exact = [], list[Cells](), list[Cells]()
    for position, model in product(POSITIONS, (*MODELS, "gpt-neo")):
        for trained in grid.values("train_length", **where, model=model, position_embedding=position):
            fields: dict[str, Any] = {"model": model, "position_embedding": position, "train_length": trained}
            about = where | fields | {"train_condition": trained_on}
            cells = [grid.accuracy(**about, length=length) for length in columns]
            measured.append(cells)
            exact.append([grid.accuracy(**about | {"metric": "exact_match"}, length=length) for length in columns])
            rows.append((label(fields, cells), *map(shown, cells)))
    extra = f", condition {condition}" if condition != "paper" else ""
    extra += ", trained longer" if note == LONGER else ""
    unit = "answers exactly right" if metric == "exact_match" else "answer tokens right"
    guessing, n = footer(grid, task, columns, measured)
    is_exact, has_learned = metric == "exact_match", bool(grid.values("task", **where, position_embedding="learned"))
    return Table(
        f"{name(task)}{extra}: {unit}, %",
        ("model, positions, train length", *map(tokens, columns)),
        tuple(rows),
        (guessing, n) if is_exact else (("n (tokens a seed)", *n[1:]),),
        note=token_note(exact, measured) if not is_exact else untrained(grid) if has_learned else "",
    )


def longer(grid: Grid, task: str = "list_recall") -> str:
    """Which models of a task were trained longer than the others; empty where none was."""
    names = {"learned": "learned positions", "none": "no positions"}
    positions = [text for position, text in names.items() if grid.note(task, position) == LONGER]
    if not positions:
        return ""
    said = ""
    for model, position in product(MODELS, names):
        plain, own = (recipe(grid, f"finetune-{model}-{position}{note}-{task}") for note in ("", f"-{LONGER}"))
        if plain and own:
            before, now = (count(settings["task"]["train_steps"][0]) for settings in (plain, own))
            said = f", for {now} steps at {tokens(TRAINED[0])} tokens in place of {before}"
    return (
        f"{name(task)} with {' or '.join(positions)} is of models trained longer{said}; those trained as long as "
        "rope's are in the tables of every model."
    )


def untrained(grid: Grid) -> str:
    """Which of a learned table's rows nobody trained; how long the blocks were, as far as run.json says."""
    blocks = {
        model: tokens(settings["data"]["block_size"])
        for model in (*MODELS, "gpt-neo")
        if (settings := recipe(grid, f"pretrain-{model}-learned"))
    }
    said = f" ({', '.join(f'{model}: {size} tokens' for model, size in blocks.items())})" if blocks else ""
    return (
        f"Learned positions beyond the blocks of pretraining{said} are untrained: fine-tuning goes to "
        f"{tokens(TRAINED[-1])} tokens."
    )


def token_note(exact: Iterable[Cells], by_token: Iterable[Cells]) -> str:
    """Why token accuracy misleads, and how much of it the end of text is: each answer has one."""
    pairs = [pair for rows in zip(exact, by_token, strict=True) for pair in zip(*rows, strict=True)]
    ns = [(sum(one.n for one in a.seeds.values()), sum(one.n for one in b.seeds.values())) for a, b in pairs if a and b]
    answers, of_tokens = map(sum, zip(*ns, strict=True)) if ns else (0, 0)
    share = f", {percent(answers / of_tokens)} % of the answer tokens here" if of_tokens else ""
    return (
        f"Token accuracy counts the end of text that closes every answer{share}: a model that knows nothing else "
        "scores as much without one answer right. Exact match asks for the whole answer, its end included."
    )


def yarn(grid: Grid, task: str) -> Table:
    """Table 1 by extended window and train length: exact match, tokens and the paper's, at its lengths or a quarter."""
    paper = paper_table(1)
    columns = [length // grid.scale for length in YARN_LENGTHS]
    rows, exact, by_token = [], list[Cells](), list[Cells]()
    for note, window, trained in yarn_models(grid):
        theirs: dict[str, Any] = {"task": task, "window": grid.scale * window, "train_length": grid.scale * trained}
        where: dict[str, Any] = {"model": "meta", "position_embedding": "rope", "task": task, "train_length": trained}
        answers, of_tokens = (
            [grid.accuracy(note, **where, length=length, metric=metric) for length in columns]
            for metric in ("exact_match", "token_accuracy")
        )
        exact.append(answers)
        by_token.append(of_tokens)
        figures = []
        for length, answer, token in zip(columns, answers, of_tokens, strict=True):
            pooled = token.pooled() if token else None
            below = [f"tokens {percent(pooled.value)}"] if pooled else []
            if length != columns[0]:
                below.append(f"paper {printed(paper.value(**theirs, length=grid.scale * length))}")
            figures.append("\n".join(filter(None, [shown(answer), ", ".join(below)])))
        of_paper = f"paper's {grid.scale * window // 1024}k / {grid.scale * trained // 1024}k"
        about = f"meta, window {tokens(window)}, trained to {tokens(trained)}{one_seed(answers)}"
        rows.append((f"{about}\n{of_paper}", *figures))
    return Table(
        f"{name(task)} with YaRN (Table 1): answers exactly right, %; below, answer tokens right",
        ("model", tokens(columns[0]), *(f"{tokens(one)} (paper's {grid.scale * one // 1024}k)" for one in columns[1:])),
        tuple(rows),
        footer(grid, task, columns, exact),
        note="The paper's number is a token accuracy; which tokens it counts is not said. Ours is exact match, with "
        f"token accuracy below it. {token_note(exact, by_token)} {notes(paper)}".strip(),
    )


def yarn_models(grid: Grid) -> list[tuple[str, int, int]]:
    """The note, the window and the train length of each of Table 1's models."""
    return [(note, ends[-1] // grid.scale, trained // grid.scale) for note, ends in YARN.items() for trained in ends]


def unlearned_yarn(grid: Grid) -> str:
    """Which of the extended models have not learned list recall at their own train length."""
    where: dict[str, Any] = {"model": "meta", "position_embedding": "rope", "task": "list_recall"}
    return _unlearned(
        {
            f"window {tokens(window)}, trained to {tokens(trained)}": grid.accuracy(
                note, **where, train_length=trained, length=trained
            )
            for note, window, trained in yarn_models(grid)
        }
    )


def unlearned(grid: Grid) -> str:
    """Which models have not learned list recall at their own train length."""
    found: dict[str, Cell | None] = {}
    for position, model, trained in product(POSITIONS, (*MODELS, "gpt-neo"), TRAINED):
        fields: dict[str, Any] = {"model": model, "position_embedding": position, "train_length": trained}
        found[label(fields)] = grid.accuracy(**fields, task="list_recall", length=trained)
    return _unlearned(found)


def _unlearned(models: Mapping[str, Cell | None]) -> str:
    below = [
        f"{model} ({percent(pooled.value)})"
        for model, cell in models.items()
        if cell and (pooled := cell.pooled()) and pooled.value is not None and pooled.value < STRONG
    ]
    if not below:
        return ""
    return (
        f"Below {100 * STRONG:g}\u00a0% of list recall at their own train length, so that what they lose beyond it "
        f"tells little: {'; '.join(below)}."
    )


def neo(grid: Grid) -> str:
    """What GPT-Neo is."""
    if grid.name == "paper":
        return "GPT-Neo is the published model of 125 million parameters, fine-tuned."
    return "GPT-Neo here is transformers' model at this size from random weights, on the same text."


def papers_yarn() -> Table:
    """The paper's Table 1 as printed."""
    paper = paper_table(1)
    return Table(
        "The paper's Table 1: token accuracy, %",
        ("window / train length", *(f"{(column['length'] or 0) // 1024}k" for column in paper.columns)),
        tuple((f"{name(str(row.fields['task']))}, {row.printed}", *map(printed, row.values)) for row in paper.rows),
    )
