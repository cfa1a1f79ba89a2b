"""Figures of lines: accuracy by prompt length, losses and accuracy while training."""

import math
from collections.abc import Callable, Mapping
from itertools import product
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from metatokens.report.derive import TRAINED, recall_curves
from metatokens.report.figures.style import (
    GREY,
    INK,
    PAGE,
    RULE,
    SHADE,
    SIZE,
    Style,
    in_percent,
    line,
    palette,
    small_multiples,
)
from metatokens.report.frame import LENGTHS, MODELS, TASKS, Fields, Inputs
from metatokens.report.labels import in_order, labelled, measured_conditions, rows
from metatokens.report.learning import LEARNED_LOSS, fine_tuning_losses
from metatokens.report.paper import paper_table
from metatokens.report.tables.accuracy import LENGTH_TABLES, RANDOM
from metatokens.report.tables.table import POSITIONS as NAMES
from metatokens.report.text import compact, name, tokens

STYLES = palette((*MODELS, "gpt-neo"))
PAPER = Style("#7d7a73", (1.5, 1.5), "x", 5.0)
_PAPERS = {
    "meta": PAPER,
    "gpt2": Style("#a39f97", (), "+", 6.0),
    "gpt-neo": Style("#a39f97", (5, 1.5), "1", 6.0),
}
_CONDITIONS = {"paper": "paper: marked", "none": "none: no markers", "decoy": "decoy: idle markers too"}
_ASIDE = 4.0  # points

Panel = Callable[[Axes], None]


def accuracy(inputs: Inputs, styles: Mapping[str, Style], width: float = PAGE) -> Figure:
    """Accuracy by prompt length, a panel for each task, in the condition that the models were trained on.

    Args:
        inputs: whose figures have labels.
        styles: a style for each label, from `palette`.
        width: `PAGE` or `PHONE`.
    """
    panels = {
        name(task): _accuracy_panel(inputs, styles, task, condition)
        for task, (condition, *_) in measured_conditions(inputs).items()
    }
    return small_multiples(panels, styles, width, across=2)


def marker_conditions(inputs: Inputs, styles: Mapping[str, Style], task: str, width: float = PAGE) -> Figure:
    """One task's accuracy by prompt length, a panel for each marker condition."""
    panels = {
        _CONDITIONS.get(condition, condition): _accuracy_panel(inputs, styles, task, condition)
        for condition in measured_conditions(inputs)[task]
    }
    return small_multiples(panels, styles, width, across=3)


def pretraining(
    curves: pd.DataFrame, styles: Mapping[str, Style], unigram: float | None, width: float = PAGE
) -> Figure:
    """Pretraining loss by step; the loss of a unigram model, of this perplexity, for comparison."""

    def draw(axes: Axes) -> None:
        _draw_losses(axes, curves[(curves["task"] == "") & curves["loss"].notna()], styles)
        if unigram:
            axes.axhline(math.log(unigram), color=GREY, linestyle=(0, (2, 2)), linewidth=1)
            axes.annotate(
                "unigram, held-out text", (1, math.log(unigram)), (-2, 3), xycoords=axes.get_yaxis_transform(),
                textcoords="offset points", ha="right", fontsize=SIZE - 1, color=GREY,
            )  # fmt: skip

    return small_multiples({"Pretraining": draw}, styles, width, across=1)


def fine_tuning(curves: pd.DataFrame, styles: Mapping[str, Style], width: float = PAGE) -> Figure:
    """Answer loss by fine-tuning step, a panel for each task, on a logarithmic scale."""
    losses = fine_tuning_losses(curves)

    def panel(task: str) -> Panel:
        def draw(axes: Axes) -> None:
            own = losses[losses["task"] == task]
            finite = [loss for loss in own["loss"] if math.isfinite(loss)]
            least = max(min([LEARNED_LOSS / 2, *finite]), LEARNED_LOSS / 100)
            axes.set_yscale("log", nonpositive="clip")
            axes.set_ylim(least, 1.5 * max([LEARNED_LOSS, *finite]))
            axes.axhline(LEARNED_LOSS, color=GREY, linestyle=(0, (2, 2)), linewidth=1)
            _draw_losses(axes, own, styles)
            axes.yaxis.set_major_formatter("{x:g}")

        return draw

    return small_multiples({name(task): panel(task) for task in in_order(losses["task"])}, styles, width, across=2)


def beside_the_paper(inputs: Inputs, width: float = PAGE) -> Figure:
    """The four tasks with rope, trained to the longest length: ours and the paper's curves."""
    panels = {name(task): _length_panel(inputs, task, "rope", TRAINED[-1]) for task in TASKS}
    return small_multiples(panels, STYLES, width, across=4)


def lengths(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 1: accuracy by prompt length, a panel for each task, kind of positions and train length."""
    panels = {
        f"{name(task)}, {position}, {trained}": _length_panel(inputs, task, position, trained)
        for task, position, trained in product(TASKS, ("rope", "learned"), TRAINED)
    }
    return small_multiples(panels, STYLES, width, across=3)


def _length_panel(inputs: Inputs, task: str, position: str, trained: int) -> Panel:
    """Ours, and the paper's models with the same positions; its GPT-Neo has no train length."""

    def draw(axes: Axes) -> None:
        where = {"task": task, "position_embedding": position, "train_length": trained}
        for model in STYLES:
            _draw_accuracy(axes, inputs, model, where | {"model": model})
        table = paper_table(LENGTH_TABLES[task])
        for model, style in _PAPERS.items():
            about: Fields = {"model": model, "position_embedding": position}
            about |= {} if model == "gpt-neo" else {"train_length": trained}
            values = [table.value(**about, length=length) for length in LENGTHS]
            if any(value is not None for value in values):
                drawn = [math.nan if value is None else value for value in values]
                axes.plot(LENGTHS, drawn, label=f"paper's {model}", **line(style))
        if inputs.values("task", metric="exact_match", task=task):
            guesses = [100 * inputs.guessing(task, length) for length in LENGTHS]
            axes.plot(LENGTHS, guesses, label="guessing", color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
        _length_axis(axes, trained)

    return draw


def random_positions(inputs: Inputs, width: float = PAGE) -> Figure:
    """Accuracy by length of models trained to 128 tokens: positions drawn at random, and plain ones, of meta."""

    def panel(task: str, variant: str) -> Panel:
        def draw(axes: Axes) -> None:
            about = {"task": task, "train_length": 128, "position_embedding": "rope"}
            for model in ("gpt2", "twin", "meta"):
                _draw_accuracy(axes, inputs, model, about | {"model": model, "variant": variant})
            control = "one-length" if task == "list_recall" else ""  # of as many steps, where there is one
            plain = about | {"model": "meta", "variant": control}
            _draw_accuracy(axes, inputs, "meta, plain positions", plain, style=PAPER)
            axes.axhline(95, color=PAPER.colour, linewidth=0.8, label="95 %")
            _length_axis(axes, 128)

        return draw

    panels = {
        f"{name(task)}, {title.lower()}": panel(task, variant)
        for task, (variant, title) in product(TASKS, RANDOM.items())
        if inputs.values("task", variant=variant)
    }
    return small_multiples(panels, STYLES, width, across=2)


def learning(inputs: Inputs, width: float = PAGE) -> Figure:
    """List recall by text tokens seen in fine-tuning, a line for each seed."""
    curves = recall_curves(inputs.curves)

    def panel(position: str) -> Panel:
        def draw(axes: Axes) -> None:
            named: set[str] = set()
            for (model, its, _), points in curves.items():
                if its == position:
                    style = STYLES[model]
                    axes.plot(
                        points["text_tokens"],
                        100 * points["exact_match"],
                        label=None if model in named else model,
                        markevery=max(1, len(points) // 6),
                        **line(style) | {"linewidth": 1.2, "markersize": style.size - 1.5},
                    )
                    named.add(model)
            axes.axhline(90, color=PAPER.colour, linewidth=0.8, label="90 %")
            axes.set_ylim(-4, 104)
            axes.xaxis.set_major_formatter(lambda value, _: compact(value) if value else "0")
            axes.set_xlabel("text tokens seen in fine-tuning")
            axes.set_ylabel("exactly right, %")

        return draw

    positions = [its for its in NAMES if any(position == its for _, position, _ in curves)]
    return small_multiples({f"List recall, {NAMES[its]}": panel(its) for its in positions}, STYLES, width, across=2)


def _accuracy_panel(inputs: Inputs, styles: Mapping[str, Style], task: str, condition: str) -> Panel:
    where = {"metric": "exact_match", "task": task, "condition": condition}
    named = rows(inputs, **where)
    ends = inputs.values("length", **where)
    trained = inputs.values("train_length", metric="exact_match")

    def draw(axes: Axes) -> None:
        for length in {*trained} & {*ends}:
            axes.axvline(length, color=SHADE, linewidth=16, zorder=0)
        guesses = in_percent(inputs.guessing(task, length) for length in ends)
        # Results that name no length leave the panel empty.
        reach = [*(0.93 * end for end in ends[:1]), *ends, *(1.07 * end for end in ends[-1:])]
        axes.fill_between(reach, guesses[:1] + guesses + guesses[-1:], color=RULE, label="guessing", zorder=0.5)
        for place, (label, fields) in enumerate(named):
            cells = inputs.cells([{**fields, "length": length} for length in ends])
            pooled = [cell and cell.pooled() for cell in cells]
            # Models often coincide, at 100 % above all: a few points to the side keep each marker in sight.
            shift = _ASIDE * (place - (len(named) - 1) / 2) / 72
            beside = axes.transData + ScaledTranslation(shift, 0, axes.figure.dpi_scale_trans)
            middle, lows, highs = (in_percent(one[end] if one else None for one in pooled) for end in range(3))
            colour = styles[label].colour
            axes.plot(ends, middle, label=label, transform=beside, **line(styles[label]))
            axes.fill_between(ends, lows, highs, transform=beside, color=colour, alpha=0.13, linewidth=0)
            axes.vlines(ends, lows, highs, transform=beside, color=colour, linewidth=1)
        names = [f"{tokens(length)}\ntrain" if length in trained else tokens(length) for length in ends]
        _percent_by_length(axes, ends, names)
        axes.margins(x=0.07)

    return draw


def _draw_accuracy(axes: Axes, inputs: Inputs, label: str, fields: Fields, style: Style | None = None) -> None:
    """The mean of the seeds by length, and the range of their intervals."""
    cells = inputs.cells([{**fields, "length": length} for length in LENGTHS])
    run = {length: cell.seeds.values() for length, cell in zip(LENGTHS, cells, strict=True) if cell and cell.seeds}
    style = style or STYLES[label]
    means = [fmean(in_percent(one.value for one in seeds)) for seeds in run.values()]
    lows = [min(in_percent(one.low for one in seeds)) for seeds in run.values()]
    highs = [max(in_percent(one.high for one in seeds)) for seeds in run.values()]
    if run:
        axes.plot(list(run), means, label=label, **line(style) | {"markersize": style.size - 1.5})
        axes.fill_between(list(run), lows, highs, color=style.colour, alpha=0.13, linewidth=0)


def _length_axis(axes: Axes, trained: int) -> None:
    axes.axvline(trained, color=RULE, linewidth=10, zorder=0, label="train length")
    names = [tokens(length) if length < 1000 else f"{length // 1024}k" for length in LENGTHS]
    _percent_by_length(axes, LENGTHS, names)
    axes.set_xlim(LENGTHS[0] / 1.2, LENGTHS[-1] * 1.2)


def _percent_by_length(axes: Axes, ends: Any, names: list[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ends, names)
    axes.set_xticks([], minor=True)
    axes.set_ylim(-4, 104)
    axes.set_yticks(range(0, 101, 25))
    axes.set_xlabel("prompt length, tokens")
    axes.set_ylabel("exactly right, %")


def _draw_losses(axes: Axes, curves: pd.DataFrame, styles: Mapping[str, Style]) -> None:
    """The loss by step of each label and seed; a label is drawn in the order of the styles."""
    labels = curves if "label" in curves else labelled(curves)
    order = {label: place for place, label in enumerate(styles)}
    runs = sorted(labels.groupby(["label", "seed"]), key=lambda run: (order[run[0][0]], run[0][1]))
    for place, ((label, _), points) in enumerate(runs):
        points = points.drop_duplicates("step", keep="last").sort_values("step")
        # Curves often coincide: markers at different steps keep each of them in sight.
        gap = max(1, len(points) // 5)
        markers = (gap * place // len(runs), gap)
        axes.plot(points["step"], points["loss"], markevery=markers, label=label, **line(styles[label]))
    axes.set_xlabel("training step")
    axes.set_ylabel("loss, nats a token")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.02)
