"""The style of every figure: small multiples in which a model looks the same everywhere.

Figures use matplotlib's object-oriented interface. An inch is 96 pixels of a page, drawn at twice the density. On a
phone the panels form one column, so that letters keep their size.
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
from matplotlib.ticker import MaxNLocator
from PIL import Image

from metatokens.records import SEPARATOR

PHONE, PAGE = 3.5, 8.6  # inches
_PANEL_HEIGHT, _LEGEND_HEIGHT = 2.5, 0.5
INK, GREY, RULE = "#22211f", "#66635e", "#e2e0db"
SIZE = 9.0  # points
_LETTERS = 120.0  # in an inch, times the size in points

Panel = Callable[[Axes], None]


def readable(token: str) -> str:
    """A token in which line breaks and tabs, and spaces without other characters, are visible."""
    visible = token.replace("\n", "⏎").replace("\t", "⇥")
    return visible if token.strip() else visible.replace(" ", "␣")


@dataclass(frozen=True)
class Style:
    """How a model's line looks. Colour-blind readers can tell the colours apart; dashes and markers differ too."""

    colour: str
    dashes: tuple[float, ...]
    marker: str
    size: float
    fill: str = "full"


STYLES = {
    "gpt2": Style("#4d4d4d", (1, 1.2), "s", 5.5),
    "pause": Style("#00875f", (5, 1.5, 1, 1.5), "^", 6.5),
    "twin": Style("#0072b2", (4, 1.8), "D", 5.2),
    "meta": Style("#d55e00", (), "o", 6.0),
}
FURTHER = (
    Style("#a3478a", (7, 2), "v", 6.5),
    Style("#a07000", (2, 1), "P", 6.5),
    Style("#2f97d0", (6, 1, 1, 1, 1, 1), "X", 6.5),
)
_FILLS = ("full", "none", "left", "bottom")  # the variants of one model, such as its position embeddings


def palette(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label; the four models of the project always look the same."""
    further = cycle(FURTHER)
    of_model = dict(STYLES)
    variants: dict[str, int] = {}
    styles = {}
    for label in dict.fromkeys(labels):
        model = label.split(SEPARATOR)[0]
        if model not in of_model:
            of_model[model] = next(further)
        variant = variants[model] = variants.get(model, -1) + 1
        styles[label] = replace(of_model[model], fill=_FILLS[variant % len(_FILLS)])
    return styles


def png(figure: Figure) -> bytes:
    """The figure as a PNG file of 96 colours, a quarter of the full size; the same figure gives the same bytes."""
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=192)
    Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(packed, format="png", optimize=True)
    return packed.getvalue()


def small_multiples(panels: Mapping[str, Panel], order: Iterable[str], width: float, across: int = 2) -> Figure:
    """A figure of panels, by title, with `across` panels in a row; on a phone one."""
    if not panels:
        return Figure()
    across = min(across, len(panels)) if width > PHONE else 1
    titled = list(panels.items())
    return rows_of_panels([titled[first : first + across] for first in range(0, len(titled), across)], order, width)


def rows_of_panels(rows: Sequence[Sequence[tuple[str, Panel]]], order: Iterable[str], width: float) -> Figure:
    """A figure of rows of panels, each with its title, and one legend for all, whose labels are in that order."""
    down, across = len(rows), max(map(len, rows))
    figure = Figure((width, down * _PANEL_HEIGHT + _LEGEND_HEIGHT), layout="constrained", facecolor="white")
    grid = figure.subplots(down, across, squeeze=False)
    size = SIZE + (1.5 if across < 3 else 0)
    drawn: dict[str, Any] = {}
    for row, line_of_axes in zip(rows, grid, strict=True):
        for axes in line_of_axes[len(row) :]:
            axes.set_visible(False)
        for axes, (title, draw) in zip(line_of_axes, row, strict=False):
            title = fill(_on_a_line(title), int((width / across - 0.3) * _LETTERS / size))
            axes.set_title(title, loc="left", parse_math=False, fontsize=size, fontweight="bold", color=INK)
            axes.grid(axis="y", color=RULE, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.spines["bottom"].set_color(GREY)
            draw(axes)
            axes.tick_params(which="both", length=0, labelsize=SIZE, labelcolor=INK)
            handles, labels = axes.get_legend_handles_labels()
            drawn |= dict(zip(labels, handles, strict=True))
    for y, row in enumerate(rows):  # equal labels of axes appear once, below a column and left of a row
        for x in reversed(range(len(row))):
            below = grid[y + 1, x].get_xlabel() if y + 1 < down and x < len(rows[y + 1]) else None
            left = grid[y, x - 1].get_ylabel() if x else None
            across_text, up_text = grid[y, x].get_xlabel(), grid[y, x].get_ylabel()
            grid[y, x].set_xlabel("" if across_text == below else across_text, fontsize=SIZE, color=INK)
            grid[y, x].set_ylabel("" if up_text == left else up_text, fontsize=SIZE, color=INK)
    labels = sorted(drawn, key=lambda label: [*order, label].index(label))
    names = list(map(_on_a_line, labels))
    ncols = _legend_columns(names, width)
    figure.set_figheight(down * _PANEL_HEIGHT + max(_LEGEND_HEIGHT, 0.2 * math.ceil(len(labels) / ncols) + 0.1))
    legend = figure.legend(
        [drawn[label] for label in labels], names, loc="outside upper left", frameon=False,
        fontsize=SIZE, ncols=ncols, handlelength=3.2, labelcolor=INK, columnspacing=1.6,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _legend_columns(names: Sequence[str], width: float) -> int:
    """How many columns of a legend fit into a width, in inches; they are filled one after the other."""
    for ncols in range(6, 1, -1):
        longest = [max(map(len, column), default=0) for column in np.array_split(names, ncols)]
        if sum(0.68 + length * SIZE / _LETTERS for length in longest) <= width:
            return ncols
    return 1


def _on_a_line(text: str) -> str:
    """A name as one short line of characters that a font can show."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:60]


def by_step(axes: Axes, what: str) -> None:
    """Label the axes: training steps to the right, `what` upwards."""
    axes.set(xlabel="training step", ylabel=what)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.02)


def line(style: Style, **changes: Any) -> dict[str, Any]:
    """A style as matplotlib's line properties, with changes."""
    return {
        "color": style.colour,
        "linestyle": (0, style.dashes) if style.dashes else "solid",
        "linewidth": 1.6,
        "marker": style.marker,
        "markersize": style.size,
        "fillstyle": style.fill,
        "markerfacecoloralt": "white",
    } | changes


def band(axes: Axes, x: Any, low: Any, high: Any, style: Style) -> None:
    """Intervals, behind the line of a style."""
    axes.fill_between(x, low, high, color=style.colour, alpha=0.13, linewidth=0)
