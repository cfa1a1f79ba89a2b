"""What the paper has no control for, or does not try: comparisons of accuracies."""

from itertools import chain, product
from typing import Any

from metatokens.report.cells import common, one_seed
from metatokens.report.grid import Cell, Grid
from metatokens.report.recall_claims import TASKS, at, matches, pairs, quote, with_seed
from metatokens.report.verdicts import Claim, Comparison, above, between
from metatokens.report.wording import name, percent, tokens

# By note: positions drawn from all of 0 to 2,303, and, each sequence, from a range of its own within that.
RANDOM = {"random-positions": "Random positions", "random-ranges": "Random ranges"}
MARKED_END = 512  # the longest bin in which models trained with markers are tested without them, or among decoys


def controls(grid: Grid) -> list[Claim]:
    """Parameters or mask, with and without markers, placement and number of meta-tokens, random positions."""
    return [
        *_parameters_or_mask(grid),
        *_markers(grid),
        *_placement(grid),
        *chain.from_iterable(_random_positions(grid, note, title) for note, title in RANDOM.items()),
    ]


def _parameters_or_mask(grid: Grid) -> list[Claim]:
    compared = {
        ("meta", "twin"): "The mask, not the parameters: meta beats twin",
        ("twin", "gpt2"): "Parameters and tokens help: twin beats gpt2",
        ("meta", "pause"): "Meta-attention helps: meta beats pause",
        ("pause", "gpt2"): "Meta-tokens alone help: pause beats gpt2",
    }
    found = []
    for (a, b), text in compared.items():
        comparisons = pairs(grid, {"model": a}, {"model": b}, at(1, 2, 4, positions=("rope",)))
        found.append(Claim(text, "control", "controls", comparisons, decisive=quote(comparisons)))
    return found


def _markers(grid: Grid) -> list[Claim]:
    found = []
    texts = {"none": "Without markers meta still beats gpt2", "decoy": "Among decoys meta still beats gpt2"}
    for condition, text in texts.items():
        fields = {"condition": condition}
        settings = at(1, 2, positions=("rope",), longest=MARKED_END)
        comparisons = pairs(grid, {"model": "meta"} | fields, {"model": "gpt2"} | fields, settings)
        of_meta = _by_condition(grid) if condition == "none" else ""
        decisive = "; ".join(filter(None, [of_meta, quote(comparisons, MARKED_END)]))
        found.append(Claim(text, "control", "markers", comparisons, decisive=decisive))
    unmarked: dict[str, Any] = {"note": "unmarked", "train_condition": "none", "condition": "none"}
    for other in ("gpt2", "twin"):
        comparisons = pairs(
            grid,
            {"model": "meta"} | unmarked,
            {"model": other} | unmarked,
            at(1, 2, 4, tasks=("list_recall",), positions=("rope",)),
        )
        text = f"Trained without markers, meta beats {other}"
        found.append(Claim(text, "control", "markers", comparisons, decisive=quote(comparisons, 512)))
    return found


def _by_condition(grid: Grid) -> str:
    """meta's list recall at 512 tokens with markers, without them, and among decoys."""
    where: dict[str, Any] = {"model": "meta", "position_embedding": "rope", "task": "list_recall"}
    where |= {"train_length": MARKED_END, "length": MARKED_END}
    texts = {"paper": "with markers", "none": "without", "decoy": "among decoys"}
    cells = common(*(grid.accuracy(**where, condition=condition) for condition in texts))
    figures = [
        f"{percent(pooled.value)} {text}"
        for text, cell in zip(texts.values(), cells, strict=True)
        if cell and (pooled := cell.pooled())
    ]
    return f"meta: {', '.join(figures)}{one_seed(cells)}" if figures else ""


def _placement(grid: Grid) -> list[Claim]:
    def compared(note: str, *, is_match: bool) -> tuple[Comparison, ...]:
        plain, other = {"model": "meta"}, {"model": "meta", "note": note}
        settings = at(1, 2, 4, tasks=("list_recall",), positions=("rope",))
        first, second = (other, plain) if is_match else (plain, other)
        return pairs(grid, first, second, settings, is_match=is_match)

    return [
        Claim(
            "Meta-tokens in pretraining help: k = 0.1 beats k = 0",
            "control",
            "placement",
            compared("k=0", is_match=False),
        ),
        matches(
            "Placed periodically they do as well (5 points)",
            "control",
            "placement",
            compared("periodic", is_match=True),
        ),
        matches(
            "k = 0.05 and 0.2 do as well as 0.1 (5 points)",
            "control",
            "placement",
            (*compared("k=0.05", is_match=True), *compared("k=0.2", is_match=True)),
        ),
    ]


def _random_positions(grid: Grid, note: str, title: str) -> list[Claim]:
    """What positions drawn at random bring, in the runs of a note."""

    def cell(model: str, task: str, length: int, note: str = note) -> Cell | None:
        where = {"model": model, "position_embedding": "rope", "task": task}
        return grid.accuracy(note, **where, train_length=128, length=length)

    found = []
    models = ("meta", "twin", "gpt2")
    for model in models:
        cells = {task: cell(model, task, 2048) for task in TASKS}
        text = f"{title}: {model} holds 95 % at 16 times the length"
        pooled = {task: one.pooled() for task, one in cells.items() if one}
        ours = [f"{name(task).lower()} {percent(one.value)}" for task, one in pooled.items() if one]
        found.append(
            Claim(
                text,
                "beyond the paper",
                "random-positions",
                tuple(
                    with_seed(above(f"{name(task)}, {model}, 128 \u2192 2,048", one, 0.95), one)
                    for task, one in cells.items()
                ),
                negligible=0.0,
                is_universal=True,
                decisive=", ".join(ours) + one_seed(cells.values()),
            )
        )
    # Plain positions trained as long at that length alone: in the grid itself they have fewer steps there.
    better = []
    for model, length in product(models, (512, 1024, 2048)):
        drawn, plain = cell(model, "list_recall", length), cell(model, "list_recall", length, "one-length")
        label = f"List recall, {model}, 128 \u2192 {tokens(length)}"
        gap = between(label, drawn, plain, floor=grid.floor("list_recall", length))
        better.append(with_seed(gap, drawn, plain))
    text = f"{title}: better than plain at 4 to 16 times, trained alike"
    short = {model: cell(model, "list_recall", 128) for model in models}
    at_128 = ", ".join(f"{model} {percent(of.value)}" for model, one in short.items() if one and (of := one.pooled()))
    decisive = f"at 128 itself: {at_128}" if at_128 else ""
    return [*found, Claim(text, "beyond the paper", "random-positions", tuple(better), decisive=decisive)]
