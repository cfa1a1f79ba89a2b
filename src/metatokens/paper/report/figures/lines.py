"""Figures of lines: accuracy by prompt length, losses and accuracy while training."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from metatokens.looking.style import (
    GREY,
    INK,
    PAGE,
    RULE,
    SHADE,
    SIZE,
    Style,
    band,
    by_step,
    in_percent,
    line,
    palette,
    small_multiples,
)
from metatokens.paper.report.derive import TRAINED, learning_curves
from metatokens.paper.report.frame import LENGTHS, MODELS, TASKS, Fields, Inputs
from metatokens.paper.report.labels import in_order, labelled, measured_conditions, rows
from metatokens.paper.report.learning import LEARNED_LOSS, fine_tuning_losses
from metatokens.paper.report.paper import paper_table
from metatokens.paper.report.tables.accuracy import JUMPS, LENGTH_TABLES
from metatokens.paper.report.tables.table import POSITIONS
from metatokens.paper.report.text import compact, name, tokens

STYLES = palette((*MODELS, "gpt-neo"))
PAPER = Style("#7d7a73", (1.5, 1.5), "x", 5.0)
_PAPERS = {"meta": PAPER, "gpt2": Style("#a39f97", (), "+", 6.0), "gpt-neo": Style("#a39f97", (5, 1.5), "1", 6.0)}
_CONDITIONS = {
    "paper": "paper: the answer is marked",
    "landmark": "landmark: each line is marked",
    "none": "none: no markers",
    "decoy": "decoy: idle markers too",
}
_BOUND: dict[str, Any] = {"color": GREY, "linestyle": (0, (2, 2)), "linewidth": 1}
_ASIDE = 4.0  # points


def accuracy(inputs: Inputs, styles: Mapping[str, Style], width: float = PAGE) -> Figure:
    """Accuracy by prompt length, a panel for each task, in the condition that the models were trained on."""
    panels = {
        name(task): partial(_draw_accuracies, inputs, styles, task, condition)
        for task, (condition, *_) in measured_conditions(inputs).items()
    }
    return small_multiples(panels, styles, width)


def marker_conditions(inputs: Inputs, styles: Mapping[str, Style], task: str, width: float = PAGE) -> Figure:
    """One task's accuracy by prompt length, a panel for each marker condition."""
    panels = {
        _CONDITIONS.get(condition, condition): partial(_draw_accuracies, inputs, styles, task, condition)
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
            axes.axhline(math.log(unigram), **_BOUND)
            axes.annotate(
                "unigram, held-out text", (1, math.log(unigram)), (-2, 3), xycoords=axes.get_yaxis_transform(),
                textcoords="offset points", ha="right", fontsize=SIZE - 1, color=GREY,
            )  # fmt: skip

    return small_multiples({"Pretraining": draw}, styles, width)


def fine_tuning(curves: pd.DataFrame, styles: Mapping[str, Style], width: float = PAGE) -> Figure:
    """Answer loss by fine-tuning step, a panel for each task, on a logarithmic scale."""
    losses = fine_tuning_losses(curves)

    def draw(task: str, axes: Axes) -> None:
        own = losses[losses["task"] == task]
        finite = [loss for loss in own["loss"] if math.isfinite(loss)]
        least = max(min([LEARNED_LOSS / 2, *finite]), LEARNED_LOSS / 100)
        axes.set_yscale("log", nonpositive="clip")
        axes.set_ylim(least, 1.5 * max([LEARNED_LOSS, *finite]))
        axes.axhline(LEARNED_LOSS, **_BOUND)
        _draw_losses(axes, own, styles)
        axes.yaxis.set_major_formatter("{x:g}")

    return small_multiples({name(task): partial(draw, task) for task in in_order(losses["task"])}, styles, width)


def beside_the_paper(inputs: Inputs, width: float = PAGE) -> Figure:
    """The four tasks with rope, trained to the longest length: ours and the paper's curves."""
    panels = {name(task): partial(_draw_beside_papers, inputs, task, "rope", TRAINED[-1]) for task in TASKS}
    return small_multiples(panels, STYLES, width, across=4)


def lengths(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 1: accuracy by prompt length, a panel for each task, kind of positions and train length."""
    panels = {
        f"{name(task)}, {position}, {trained}": partial(_draw_beside_papers, inputs, task, position, trained)
        for task, position, trained in product(TASKS, ("rope", "learned"), TRAINED)
    }
    return small_multiples(panels, STYLES, width, across=3)


def jumps(inputs: Inputs, width: float = PAGE) -> Figure:
    """Accuracy by prompt length, the question as at 128 tokens, of models trained there: with jumps, and plain."""

    def draw(task: str, variant: str, axes: Axes) -> None:
        about = {"task": task, "train_length": 128, "position_embedding": "rope", "condition": "long_prompt"}
        for model in ("gpt2", "twin", "meta"):
            _draw_ours(axes, inputs, model, STYLES[model], about | {"model": model, "variant": variant})
        axes.axhline(95, color=PAPER.colour, linewidth=0.8, label="95 %")
        _length_axis(axes, 128)

    panels = {
        f"{name(task)}, {text}": partial(draw, task, variant)
        for task, (variant, text) in product(TASKS, JUMPS.items())
        if inputs.values("task", variant=variant, task=task, condition="long_prompt")
    }
    return small_multiples(panels, STYLES, width)


def learning(inputs: Inputs, width: float = PAGE) -> Figure:
    """List recall by text tokens seen in fine-tuning, a line for each seed."""
    curves = learning_curves(inputs.curves)

    def draw(position: str, axes: Axes) -> None:
        for (model, its, _), points in curves.items():
            if its == position:
                style = replace(STYLES[model], size=STYLES[model].size - 1.5)
                look = line(style, linewidth=1.2, markevery=max(1, len(points) // 6))
                axes.plot(points["text_tokens"], in_percent(points["exact_match"]), label=model, **look)
        axes.axhline(90, color=PAPER.colour, linewidth=0.8, label="90 %")
        axes.xaxis.set_major_formatter(lambda value, _: compact(value) if value else "0")
        axes.set(ylim=(-4, 104), xlabel="text tokens seen in fine-tuning", ylabel="exactly right, %")

    drawn = {position for _, position, _ in curves}
    panels = {f"List recall, {text}": partial(draw, its) for its, text in POSITIONS.items() if its in drawn}
    return small_multiples(panels, STYLES, width)


def _draw_beside_papers(inputs: Inputs, task: str, position: str, trained: int, axes: Axes) -> None:
    """Ours, and the paper's models with the same positions; its GPT-Neo has no train length."""
    where = {"task": task, "position_embedding": position, "train_length": trained}
    for model, style in STYLES.items():
        _draw_ours(axes, inputs, model, style, where | {"model": model})
    table = paper_table(LENGTH_TABLES[task])
    for model, style in _PAPERS.items():
        about: Fields = {"model": model, "position_embedding": position}
        about |= {} if model == "gpt-neo" else {"train_length": trained}
        values = [table.value(**about, length=length) for length in LENGTHS]
        if any(value is not None for value in values):
            axes.plot(LENGTHS, np.array(values, float), label=f"paper's {model}", **line(style))
    if inputs.values("task", metric="exact_match", task=task):
        floors = in_percent(inputs.floor(task, length) for length in LENGTHS)
        axes.plot(LENGTHS, floors, label="floor", color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
    _length_axis(axes, trained)


def _draw_ours(axes: Axes, inputs: Inputs, label: str, style: Style, fields: Fields) -> None:
    """The mean of the seeds by length, and the range of their intervals."""
    cells = inputs.cells([{**fields, "length": length} for length in LENGTHS])
    run = {length: cell.seeds.values() for length, cell in zip(LENGTHS, cells, strict=True) if cell and cell.seeds}
    if run:
        means = [fmean(in_percent(one.value for one in seeds)) for seeds in run.values()]
        lows = [min(in_percent(one.low for one in seeds)) for seeds in run.values()]
        highs = [max(in_percent(one.high for one in seeds)) for seeds in run.values()]
        axes.plot(list(run), means, label=label, **line(style, markersize=style.size - 1.5))
        band(axes, list(run), lows, highs, style)


def _length_axis(axes: Axes, trained: int) -> None:
    axes.axvline(trained, color=RULE, linewidth=10, zorder=0, label="train length")
    names = [tokens(length) if length < 1000 else f"{length // 1024}k" for length in LENGTHS]
    _percent_by_length(axes, LENGTHS, names)
    axes.set_xlim(LENGTHS[0] / 1.2, LENGTHS[-1] * 1.2)


def _draw_accuracies(inputs: Inputs, styles: Mapping[str, Style], task: str, condition: str, axes: Axes) -> None:
    """The mean of the seeds by length, and that of their intervals."""
    where = {"metric": "exact_match", "task": task, "condition": condition}
    named = rows(inputs, **where)
    ends = inputs.values("length", **where)
    trained = inputs.values("train_length", metric="exact_match")
    for length in {*trained} & {*ends}:
        axes.axvline(length, color=SHADE, linewidth=16, zorder=0)
    floors = in_percent(inputs.floor(task, length, condition) for length in ends)
    # Results that name no length leave the panel empty.
    reach = [*(0.93 * end for end in ends[:1]), *ends, *(1.07 * end for end in ends[-1:])]
    axes.fill_between(reach, floors[:1] + floors + floors[-1:], color=RULE, label="floor", zorder=0.5)
    for place, (label, fields) in enumerate(named):
        cells = inputs.cells([{**fields, "length": length} for length in ends])
        pooled = [cell and cell.pooled() for cell in cells]
        # Models often coincide, at 100 % above all: a few points to the side keep each marker in sight.
        shift = _ASIDE * (place - (len(named) - 1) / 2) / 72
        beside = axes.transData + ScaledTranslation(shift, 0, axes.figure.dpi_scale_trans)
        middle, lows, highs = (in_percent(one[end] if one else None for one in pooled) for end in range(3))
        axes.plot(ends, middle, label=label, transform=beside, **line(styles[label]))
        band(axes, ends, lows, highs, styles[label], transform=beside)
        axes.vlines(ends, lows, highs, transform=beside, color=styles[label].colour, linewidth=1)
    names = [f"{tokens(length)}\ntrain" if length in trained else tokens(length) for length in ends]
    _percent_by_length(axes, ends, names)
    axes.margins(x=0.07)


def _percent_by_length(axes: Axes, ends: Any, names: list[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ends, names)
    axes.set_xticks([], minor=True)
    axes.set(ylim=(-4, 104), yticks=range(0, 101, 25), xlabel="prompt length, tokens", ylabel="exactly right, %")


def _draw_losses(axes: Axes, curves: pd.DataFrame, styles: Mapping[str, Style]) -> None:
    """The loss by step of each label and seed; a label is drawn in the order of the styles."""
    labels = curves if "label" in curves else labelled(curves)
    order = {label: place for place, label in enumerate(styles)}
    runs = sorted(labels.groupby(["label", "seed"]), key=lambda run: (order[run[0][0]], run[0][1]))
    for place, ((label, _), points) in enumerate(runs):
        points = points.drop_duplicates("step", keep="last").sort_values("step")
        # Curves often coincide: markers at different steps keep each of them in sight.
        gap = max(1, len(points) // 5)
        look = line(styles[label], markevery=(gap * place // len(runs), gap))
        axes.plot(points["step"], points["loss"], label=label, **look)
    by_step(axes, "loss, nats a token")
