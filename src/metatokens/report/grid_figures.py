"""The figures of a grid: accuracy by length beside the paper's, and how fast recall is learned."""

import math
from collections.abc import Callable
from itertools import product
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metatokens.report.cells import POSITIONS as NAMES
from metatokens.report.control_claims import RANDOM
from metatokens.report.figures import Style, line, palette, small_multiples
from metatokens.report.grid import Grid
from metatokens.report.paper import paper_table
from metatokens.report.recall_claims import LENGTH_TABLES, LENGTHS, POSITIONS, TASKS, TRAINED
from metatokens.report.wording import compact, name, tokens

STYLES = palette(("gpt2", "pause", "twin", "meta", "gpt-neo"))
PAPER = Style("#7d7a73", (1.5, 1.5), "x", 5.0)
_PAPERS = {
    "meta": PAPER,
    "gpt2": Style("#a39f97", (), "+", 6.0),
    "gpt-neo": Style("#a39f97", (5, 1.5), "1", 6.0),
}

Panel = Callable[[Axes], None]


def lengths(grid: Grid, width: float) -> Figure:
    """Figure 1: accuracy by prompt length, a panel for each task, kind of positions and train length.

    Beside ours stand the paper's models with the same positions; its GPT-Neo has no train length.
    """

    def panel(task: str, position: str, trained: int) -> Panel:
        def draw(axes: Axes) -> None:
            where: dict[str, Any] = {"task": task, "position_embedding": position, "train_length": trained}
            for model in ("gpt2", "pause", "twin", "meta", "gpt-neo"):
                _accuracy(axes, grid, model, where | {"model": model})
            table = paper_table(LENGTH_TABLES[task])
            for model, style in _PAPERS.items():
                about: dict[str, Any] = {"model": model, "position_embedding": position}
                about |= {} if model == "gpt-neo" else {"train_length": trained}
                values = [table.value(**about, length=length) for length in LENGTHS]
                if any(value is not None for value in values):
                    drawn = [math.nan if value is None else value for value in values]
                    axes.plot(LENGTHS, drawn, label=f"paper's {model}", **line(style))
            if grid.values("task", task=task):
                guesses = [100 * grid.floor(task, length) for length in LENGTHS]
                axes.plot(LENGTHS, guesses, label="guessing", color="#22211f", linewidth=0.8, linestyle=(0, (1, 3)))
            _length_axis(axes, trained)

        return draw

    panels = {
        f"{name(task)}, {position}, {trained}": panel(task, position, trained)
        for task, position, trained in product(TASKS, POSITIONS, TRAINED)
    }
    return small_multiples(panels, STYLES, width, across=3)


def random_positions(grid: Grid, width: float) -> Figure:
    """Accuracy by length of models trained to 128 tokens: positions drawn at random, and plain ones, of meta."""

    def panel(task: str, note: str) -> Panel:
        def draw(axes: Axes) -> None:
            about = {"task": task, "train_length": 128, "position_embedding": "rope"}
            for model in ("gpt2", "twin", "meta"):
                _accuracy(axes, grid, model, about | {"model": model, "note": note})
            control = "one-length" if task == "list_recall" else ""  # of as many steps, where there is one
            _accuracy(axes, grid, "meta, plain positions", about | {"model": "meta", "note": control}, style=PAPER)
            axes.axhline(95, color=PAPER.colour, linewidth=0.8, label="95 %")
            _length_axis(axes, 128)

        return draw

    panels = {
        f"{name(task)}, {title.lower()}": panel(task, note) for task, (note, title) in product(TASKS, RANDOM.items())
    }
    return small_multiples(panels, STYLES, width, across=2)


def learning(grid: Grid, width: float) -> Figure:
    """List recall by text tokens seen in fine-tuning, a line for each seed."""
    curves = grid.recall()

    def panel(position: str) -> Panel:
        def draw(axes: Axes) -> None:
            for (model, its), seeds in curves.items():
                for number, points in enumerate(seeds.values() if its == position else ()):
                    style = STYLES[model]
                    axes.plot(
                        [point.text_tokens for point in points],
                        [100 * point.exact_match for point in points],
                        label=model if number == 0 else None,
                        markevery=max(1, len(points) // 6),
                        **line(style) | {"linewidth": 1.2, "markersize": style.size - 1.5},
                    )
            axes.axhline(90, color=PAPER.colour, linewidth=0.8, label="90 %")
            axes.set_ylim(-4, 104)
            axes.xaxis.set_major_formatter(lambda value, _: compact(value) if value else "0")
            axes.set_xlabel("text tokens seen in fine-tuning")
            axes.set_ylabel("exactly right, %")

        return draw

    positions = [its for its in NAMES if any(position == its for _, position in curves)]
    panels = {f"List recall, {NAMES[its]}": panel(its) for its in positions}
    return small_multiples(panels, STYLES, width, across=2)


def _accuracy(axes: Axes, grid: Grid, label: str, fields: dict[str, Any], style: Style | None = None) -> None:
    """The mean of the seeds by length, and the range of their intervals."""
    cells = {length: grid.accuracy(**fields, length=length) for length in LENGTHS}
    run = {length: cell for length, cell in cells.items() if cell and cell.seeds}
    style = style or STYLES[label]
    means = [fmean(100 * or_nan(one.value) for one in cell.seeds.values()) for cell in run.values()]
    lows = [min(100 * or_nan(one.low) for one in cell.seeds.values()) for cell in run.values()]
    highs = [max(100 * or_nan(one.high) for one in cell.seeds.values()) for cell in run.values()]
    if run:
        axes.plot(list(run), means, label=label, **line(style) | {"markersize": style.size - 1.5})
        axes.fill_between(list(run), lows, highs, color=style.colour, alpha=0.13, linewidth=0)


def _length_axis(axes: Axes, trained: int) -> None:
    axes.axvline(trained, color="#e2e0db", linewidth=10, zorder=0, label="train length")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [tokens(length) if length < 1000 else f"{length // 1024}k" for length in LENGTHS])
    axes.set_xticks([], minor=True)
    axes.set_xlim(LENGTHS[0] / 1.2, LENGTHS[-1] * 1.2)
    axes.set_ylim(-4, 104)
    axes.set_yticks(range(0, 101, 25))
    axes.set_xlabel("prompt length, tokens")
    axes.set_ylabel("exactly right, %")


def or_nan(value: float | None) -> float:
    """What matplotlib leaves a gap for, where there is no figure."""
    return math.nan if value is None else value
