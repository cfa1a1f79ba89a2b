"""The style of every figure: small multiples in which a model looks the same everywhere.

Figures use matplotlib's object-oriented interface. An inch is 96 pixels of a page, drawn at twice the density.
"""

import io
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from textwrap import fill
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from metatokens.records import SEPARATOR

WIDTH = 8.6  # of a figure, in inches
_PANEL_HEIGHT, _LEGEND_HEIGHT = 2.5, 0.5
INK, GREY, RULE = "#22211f", "#66635e", "#e2e0db"
SIZE = 9.0  # points
_LETTERS = 120.0  # of one point, in an inch

Panel = Callable[[Axes], None]


def page_templates(package: str, **options: Any) -> Environment:
    """The templates in a package, which escape values, and refuse names that they do not get."""
    return Environment(
        loader=PackageLoader(package, "."),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


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
# The variants of one model, such as its position embeddings.
_FILLS = (
    "full",
    "none",
    "left",
    "bottom",
)


def palette(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label; the four models of the project always look the same."""
    further = cycle(FURTHER)
    style_of_model = dict(STYLES)
    fills_of_model: defaultdict[str, Iterator[str]] = defaultdict(lambda: cycle(_FILLS))
    styles = {}
    for label in dict.fromkeys(labels):
        model, _, _ = label.partition(SEPARATOR)
        if model not in style_of_model:
            style_of_model[model] = next(further)
        styles[label] = replace(style_of_model[model], fill=next(fills_of_model[model]))
    return styles


def png(figure: Figure) -> bytes:
    """The figure as a PNG file of 96 colours, a quarter of the full size; the same figure gives the same bytes."""
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=192)
    Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(
        packed, format="png", optimize=True
    )
    return packed.getvalue()


def small_multiples(panels: Mapping[str, Panel], order: Collection[str], across: int = 2) -> Figure:
    """A figure of panels, by title, with `across` of them in a row.

    One legend stands above them all, with its labels in that order.
    """
    if not panels:
        return Figure()
    columns = min(across, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    title_size = SIZE + (1.5 if columns < 3 else 0)
    title_letters = int((WIDTH / columns - 0.3) * _LETTERS / title_size)
    handle_of: dict[str, Any] = {}
    for axes, (title, draw) in zip(grid, panels.items(), strict=False):
        folded = fill(_on_a_line(title), title_letters)
        axes.set_title(
            folded, loc="left", parse_math=False, fontsize=title_size, fontweight="bold", color=INK
        )
        _draw_panel(axes, draw)
        handles, labels = axes.get_legend_handles_labels()
        handle_of |= dict(zip(labels, handles, strict=True))
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    _label_axes_once(list(grid[: len(panels)]), columns)
    ordered = sorted(handle_of, key=lambda label: [*order, label].index(label))
    legend_height = _add_legend(figure, {label: handle_of[label] for label in ordered})
    figure.set_size_inches(WIDTH, rows * _PANEL_HEIGHT + legend_height)
    return figure


def _draw_panel(axes: Axes, draw: Panel) -> None:
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    draw(axes)
    axes.tick_params(which="both", length=0, labelsize=SIZE, labelcolor=INK)


def _label_axes_once(grid: Sequence[Axes], columns: int) -> None:
    """Leave equal labels out of all panels but the lowest of a column, and the first of a row."""
    x_labels = [axes.get_xlabel() for axes in grid]
    y_labels = [axes.get_ylabel() for axes in grid]
    for index, axes in enumerate(grid):
        label_below = x_labels[index + columns] if index + columns < len(grid) else None
        label_to_the_left = y_labels[index - 1] if index % columns else None
        x_label = "" if x_labels[index] == label_below else x_labels[index]
        y_label = "" if y_labels[index] == label_to_the_left else y_labels[index]
        axes.set_xlabel(x_label, fontsize=SIZE, color=INK)
        axes.set_ylabel(y_label, fontsize=SIZE, color=INK)


def _add_legend(figure: Figure, handle_of: Mapping[str, Any]) -> float:
    """Put a legend above the panels; returns its height in inches."""
    names = [_on_a_line(label) for label in handle_of]
    columns = _legend_columns(names)
    legend = figure.legend(
        list(handle_of.values()),
        names,
        loc="outside upper left",
        frameon=False,
        fontsize=SIZE,
        ncols=columns,
        handlelength=3.2,
        labelcolor=INK,
        columnspacing=1.6,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return max(_LEGEND_HEIGHT, 0.2 * math.ceil(len(names) / columns) + 0.1)


def _legend_columns(names: Sequence[str]) -> int:
    """How many columns of a legend fit; they are filled one after the other."""
    for columns in range(6, 1, -1):
        longest_names = [
            max(map(len, column), default=0) for column in np.array_split(names, columns)
        ]
        letters_width = sum(longest_names) * SIZE / _LETTERS
        if 0.68 * columns + letters_width <= WIDTH:
            return columns
    return 1


def _on_a_line(text: str) -> str:
    """A name as one short line of characters that a font can show."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[
        :60
    ]


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
