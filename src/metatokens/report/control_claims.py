"""What the paper has no control for, or does not try: comparisons of accuracies."""

from itertools import product
from typing import Any

from metatokens.report.grid import Cell, Grid
from metatokens.report.recall_claims import TASKS, at, matches, pairs, quote
from metatokens.report.verdicts import Claim, Comparison, above, between
from metatokens.report.wording import name, percent, tokens


def controls(grid: Grid) -> list[Claim]:
    """Parameters or mask, with and without markers, placement and number of meta-tokens, random positions."""
    return [*_parameters_or_mask(grid), *_markers(grid), *_placement(grid), *_random_positions(grid)]


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
        comparisons = pairs(grid, {"model": "meta"} | fields, {"model": "gpt2"} | fields, at(1, 2, positions=("rope",)))
        found.append(Claim(text, "control", "markers", comparisons, decisive=quote(comparisons, 512)))
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


def _random_positions(grid: Grid) -> list[Claim]:
    def cell(model: str, task: str, length: int, note: str = "random-positions") -> Cell | None:
        where = {"model": model, "position_embedding": "rope", "task": task}
        return grid.accuracy(note, **where, train_length=128, length=length)

    found = []
    for model in ("meta", "twin", "gpt2"):
        cells = {task: cell(model, task, 2048) for task in TASKS}
        text = f"Random positions: {model} holds 95 % at 16 times the length"
        pooled = {task: one.pooled() for task, one in cells.items() if one}
        ours = [f"{name(task).lower()} {percent(one.value)}" for task, one in pooled.items() if one]
        found.append(
            Claim(
                text,
                "beyond the paper",
                "random-positions",
                tuple(above(f"{name(task)}, {model}, 128 \u2192 2,048", one, 0.95) for task, one in cells.items()),
                negligible=0.0,
                is_universal=True,
                decisive=", ".join(ours),
            )
        )
    better = tuple(
        between(
            f"{name(task)}, 128 \u2192 {tokens(length)}",
            cell("meta", task, length),
            cell("meta", task, length, note=""),
            floor=grid.floor(task, length),
        )
        for task, length in product(TASKS, (512, 1024, 2048))
    )
    text = "Random positions: better than plain at 4 to 16 times"
    return [*found, Claim(text, "beyond the paper", "random-positions", better)]
