"""The report's figures: small multiples in which a model looks the same everywhere.

Everything is drawn with matplotlib's object-oriented interface. An inch is 96 pixels of a page, drawn at twice the
density, so that letters keep their size on a phone: there the panels stand in one column.
"""

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from metatokens.records import Result
from metatokens.report.estimates import (
    Estimate,
    Labels,
    measured_conditions,
    measured_tasks,
    model_of,
    pivot,
    tasks_in_order,
)
from metatokens.report.gains import commonest_answer, train_lengths
from metatokens.report.inputs import CurvePoint
from metatokens.report.learning import LEARNED_LOSS
from metatokens.report.tables import columns
from metatokens.report.wording import name, tokens

PHONE, PAGE = 3.5, 8.6  # inches
_PANEL_HEIGHT, _LEGEND_HEIGHT = 2.5, 0.5
_INK, _GREY, _RULE, _SHADE = "#22211f", "#66635e", "#e2e0db", "#f4f2ed"
_ASIDE = 4.0  # points
_SIZE = 9.0  # points
_LETTERS = 120.0  # of a point's size, in an inch


@dataclass(frozen=True)
class Style:
    """How a model's line looks. The colours are told apart by the colour-blind; dashes and markers differ as well."""

    colour: str
    dashes: tuple[float, ...]
    marker: str
    size: float
    fill: str = "full"


_STYLES = {
    "gpt2": Style("#4d4d4d", (1, 1.2), "s", 5.5),
    "pause": Style("#00875f", (5, 1.5, 1, 1.5), "^", 6.5),
    "twin": Style("#0072b2", (4, 1.8), "D", 5.2),
    "meta": Style("#d55e00", (), "o", 6.0),
}
_FURTHER_STYLES = (
    Style("#a3478a", (7, 2), "v", 6.5),
    Style("#a07000", (2, 1), "P", 6.5),
    Style("#2f97d0", (6, 1, 1, 1, 1, 1), "X", 6.5),
)
_CONDITIONS = {"paper": "paper: marked", "none": "none: no markers", "decoy": "decoy: idle markers too"}
_NOT_MEASURED = Estimate(None, None, None, 0, None)
_FILLS = ("full", "none", "left", "bottom")  # the variants of one model, such as its position embeddings


def palette(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label; the four models of the project always look the same."""
    further = cycle(_FURTHER_STYLES)
    of_model = dict(_STYLES)
    variants: dict[str, int] = {}
    styles = {}
    for label in dict.fromkeys(labels):
        model = model_of(label)
        if model not in of_model:
            of_model[model] = next(further)
        variant = variants[model] = variants.get(model, -1) + 1
        styles[label] = replace(of_model[model], fill=_FILLS[variant % len(_FILLS)])
    return styles


def run_styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each of some runs, whatever their names."""
    return dict(zip(labels, cycle([*reversed(_STYLES.values()), *_FURTHER_STYLES])))


def swatch(style: Style) -> dict[str, str]:
    """A style as the attributes of an SVG line and of the polygon of its marker, around the origin, y downwards."""
    marker = MarkerStyle(style.marker)
    outline = np.asarray(marker.get_path().transformed(marker.get_transform()).to_polygons()[0])
    return {
        "colour": style.colour,
        "dashes": " ".join(f"{1.8 * length:g}" for length in style.dashes),
        "points": " ".join(f"{style.size * x:.2f},{-style.size * y:.2f}" for x, y in outline),
        "fill": style.colour if style.fill == "full" else "#fff",
    }


def png(figure: Figure) -> bytes:
    """The figure as a PNG file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=192, metadata={"Software": None})
    return buffer.getvalue()


def headline(results: Sequence[Result], styles: Mapping[str, Style], width: float = PAGE) -> Figure:
    """Accuracy by prompt length, a panel for each task, in the condition that the models were trained on.

    Args:
        results: all results of the report.
        styles: a style for each label, from `palette`.
        width: `PAGE` or `PHONE`.
    """
    panels = {
        name(task): _accuracy_panel(results, styles, task, measured_conditions(results, task)[0])
        for task in measured_tasks(results)
    }
    return small_multiples(panels, styles, width, across=2)


def marker_conditions(
    results: Sequence[Result], styles: Mapping[str, Style], task: str | None, width: float = PAGE
) -> Figure:
    """One task's accuracy by prompt length, a panel for each marker condition."""
    panels = {
        _CONDITIONS.get(str(condition), str(condition)): _accuracy_panel(results, styles, task, condition)
        for condition in measured_conditions(results, task)
    }
    return small_multiples(panels, styles, width, across=3)


def pretraining(
    curves: Sequence[CurvePoint], styles: Mapping[str, Style], unigram: float | None, width: float = PAGE
) -> Figure:
    """Pretraining loss by step.

    Args:
        curves: all training curves.
        styles: a style for each label, from `palette`.
        unigram: the perplexity of a unigram model, drawn as a loss for comparison; None where it was not measured.
        width: `PAGE` or `PHONE`.
    """

    def draw(axes: Axes) -> None:
        _draw_curves(axes, curves, styles, None)
        if unigram:
            axes.axhline(math.log(unigram), color=_GREY, linestyle=(0, (2, 2)), linewidth=1)
            axes.annotate(
                "unigram, held-out text", (1, math.log(unigram)), (-2, 3), xycoords=axes.get_yaxis_transform(),
                textcoords="offset points", ha="right", fontsize=_SIZE - 1, color=_GREY,
            )  # fmt: skip

    return small_multiples({"Pretraining": draw}, styles, width, across=1)


def fine_tuning(curves: Sequence[CurvePoint], styles: Mapping[str, Style], width: float = PAGE) -> Figure:
    """Answer loss by fine-tuning step, a panel for each task, on a logarithmic scale."""

    def panel(task: str | None) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            finite = [point.loss for point in curves if point.task == task and math.isfinite(point.loss)]
            floor = max(min([LEARNED_LOSS / 2, *finite]), LEARNED_LOSS / 100)
            axes.set_yscale("log", nonpositive="clip")
            axes.set_ylim(floor, 1.5 * max([LEARNED_LOSS, *finite]))
            axes.axhline(LEARNED_LOSS, color=_GREY, linestyle=(0, (2, 2)), linewidth=1)
            _draw_curves(axes, curves, styles, task)
            axes.yaxis.set_major_formatter("{x:g}")

        return draw

    tasks = tasks_in_order(point.task for point in curves if point.task is not None)
    return small_multiples({name(task): panel(task) for task in tasks}, styles, width, across=2)


def small_multiples(
    panels: Mapping[str, Callable[[Axes], None]], styles: Mapping[str, Style], width: float, across: int
) -> Figure:
    """A figure of panels, by title, with one legend for all; on a phone they stand in one column."""
    across = min(across, len(panels)) if width > PHONE else 1
    down = math.ceil(len(panels) / across)
    figure = Figure((width, down * _PANEL_HEIGHT + _LEGEND_HEIGHT), layout="constrained", facecolor="white")
    grid = figure.subplots(down, across, squeeze=False)
    drawn: dict[str, Any] = {}
    shown = grid.flat[: len(panels)]
    for axes, (title, draw) in zip(shown, panels.items(), strict=True):
        size = _SIZE + (1.5 if across < 3 else 0)
        title = fill(_on_a_line(title), int((width / across - 0.3) * _LETTERS / size))
        axes.set_title(title, loc="left", parse_math=False, fontsize=size, fontweight="bold", color=_INK)
        axes.grid(axis="y", color=_RULE, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_GREY)
        draw(axes)
        axes.tick_params(which="both", length=0, labelsize=_SIZE, labelcolor=_INK)
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    below, beside = ([getattr(axes, f"get_{axis}label")() for axes in shown] for axis in "xy")
    for place, axes in enumerate(shown):  # what an axis is of is said once, below a column and left of a row
        is_said = place + across < len(panels) and below[place] == below[place + across]
        axes.set_xlabel("" if is_said else below[place], fontsize=_SIZE, color=_INK)
        is_said = place % across > 0 and beside[place] == beside[place - 1]
        axes.set_ylabel("" if is_said else beside[place], fontsize=_SIZE, color=_INK)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    labels = sorted(drawn, key=lambda label: [*styles, label].index(label))
    names = list(map(_on_a_line, labels))
    ncols = _legend_columns(names, width)
    figure.set_figheight(down * _PANEL_HEIGHT + max(_LEGEND_HEIGHT, 0.2 * math.ceil(len(labels) / ncols) + 0.1))
    legend = figure.legend(
        [drawn[label] for label in labels], names, loc="outside upper left", frameon=False,
        fontsize=_SIZE, ncols=ncols, handlelength=3.2, labelcolor=_INK, columnspacing=1.6,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _legend_columns(names: Sequence[str], width: float) -> int:
    """How many columns of a legend have room in a width, in inches; they are filled one after the other."""
    for ncols in range(6, 1, -1):
        longest = [max(map(len, column), default=0) for column in np.array_split(names, ncols)]
        if sum(0.68 + length * _SIZE / _LETTERS for length in longest) <= width:
            return ncols
    return 1


def _accuracy_panel(
    results: Sequence[Result], styles: Mapping[str, Style], task: str | None, condition: str | None
) -> Callable[[Axes], None]:
    cells = pivot(results, "length", metric="exact_match", task=task, condition=condition)
    lengths = [length for length in columns(cells) if length is not None]
    trained = train_lengths(results)

    def draw(axes: Axes) -> None:
        for length in trained & set(lengths):
            axes.axvline(length, color=_SHADE, linewidth=16, zorder=0)
        chance = {length: row[length].chance for row in cells.values() for length in lengths if length in row}
        if any(rate is not None for rate in chance.values()):
            rates = _percent(chance[length] for length in lengths)
            reach = [0.93 * lengths[0], *lengths, 1.07 * lengths[-1]]
            axes.fill_between(reach, [rates[0], *rates, rates[-1]], color=_RULE, label="chance", zorder=0.5)
        commonest = commonest_answer(results, task)
        if commonest:
            rates = _percent(commonest.get(length) for length in lengths)
            axes.plot(lengths, rates, label="commonest answer", color=_GREY, linestyle=":", linewidth=1.2)
        for place, (label, row) in enumerate(cells.items()):
            row_cells = [row.get(length, _NOT_MEASURED) for length in lengths]
            # Models often coincide, at 100 % above all: a few points to the side keep each marker in sight.
            shift = _ASIDE * (place - (len(cells) - 1) / 2) / 72
            beside = axes.transData + ScaledTranslation(shift, 0, axes.figure.dpi_scale_trans)
            colour, accuracy = styles[label].colour, _percent(cell.value for cell in row_cells)
            lows, highs = _percent(cell.low for cell in row_cells), _percent(cell.high for cell in row_cells)
            axes.plot(lengths, accuracy, label=label, transform=beside, **line(styles[label]))
            axes.fill_between(lengths, lows, highs, transform=beside, color=colour, alpha=0.13, linewidth=0)
            axes.vlines(lengths, lows, highs, transform=beside, color=colour, linewidth=1)
        axes.set_xscale("log", base=2)
        names = [f"{tokens(length)}\ntrain" if length in trained else tokens(length) for length in lengths]
        axes.set_xticks(lengths, names)
        axes.set_xticks([], minor=True)
        axes.margins(x=0.07)
        axes.set_ylim(-4, 104)
        axes.set_yticks(range(0, 101, 25))
        axes.set_ylabel("exactly right, %")
        axes.set_xlabel("prompt length, tokens")

    return draw


def _draw_curves(axes: Axes, curves: Sequence[CurvePoint], styles: Mapping[str, Style], task: str | None) -> None:
    labels = Labels(curves)
    runs: dict[tuple[str, int], dict[int, float]] = {}
    for point in curves:
        if point.task == task:
            runs.setdefault((labels(point), point.seed), {})[point.step] = point.loss
    ordered = sorted(runs.items(), key=lambda run: (labels.all.index(run[0][0]), run[0][1]))
    for place, ((label, _), losses) in enumerate(ordered):
        steps = sorted(losses)
        # Curves often coincide: markers at different steps keep each of them in sight.
        gap = max(1, len(steps) // 5)
        markers = (gap * place // len(ordered), gap)
        axes.plot(steps, [losses[step] for step in steps], markevery=markers, label=label, **line(styles[label]))
    axes.set_xlabel("training step")
    axes.set_ylabel("loss, nats a token")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.02)


def _on_a_line(text: str) -> str:
    """A name as a picture has room for it; without what a font cannot show."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:60]


def _percent(proportions: Iterable[float | None]) -> list[float]:
    """Proportions in percent; one that is missing leaves a gap in the line."""
    return [math.nan if value is None else 100 * value for value in proportions]


def line(style: Style) -> dict[str, Any]:
    """A style as matplotlib's line properties."""
    return {
        "color": style.colour,
        "linestyle": (0, style.dashes) if style.dashes else "solid",
        "linewidth": 1.6,
        "marker": style.marker,
        "markersize": style.size,
        "fillstyle": style.fill,
        "markerfacecoloralt": "white",
    }
