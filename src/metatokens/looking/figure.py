"""The findings of `look` as a figure for a paper."""

from collections.abc import Sequence
from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator

from metatokens.looking.page import Look, title_of
from metatokens.looking.style import STYLES, line, png, rows_of_panels

_PANEL = 2.3  # inches
_TICKS = 40  # tokens that have room along a panel
_COLUMNS = 8  # panels in a row


def draw(looks: Sequence[Look]) -> bytes:
    """A PNG of attention weights (mean over heads) and of the entropy of their rows: a panel a layer, eight in a row.

    Several models, on the same prompt, are drawn below each other.
    """
    rows = [
        [
            (f"{look.name + ', ' if len(looks) > 1 else ''}{title_of(look, module)}, layer {layer}",
             partial(draw_panel, look, module, layer))
            for layer in layers[start : start + _COLUMNS]
        ]
        for draw_panel in (_draw_weights, _draw_entropy)
        for look in looks
        for module, layers in look.modules.items()
        for start in range(0, len(layers), _COLUMNS)
    ]  # fmt: skip
    return png(rows_of_panels(rows, (), _PANEL * max(map(len, rows))))


def _draw_weights(look: Look, module: str, layer: int, axes: Axes) -> None:
    weights = look.attention(module, layer).mean(dim=0).cpu()
    if (forgotten := look.forgotten(module, layer)) is not None:  # grey
        weights = weights.masked_fill(forgotten.cpu(), torch.nan)
        axes.set_facecolor("#d9d6d0")
    axes.imshow(weights.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect="auto", interpolation="nearest")
    axes.grid(False)
    positions = look.positions(module, layer).tolist()
    marked = [row for row, position in enumerate(positions) if look.is_meta[position]]
    if len(positions) > len(marked) and len(marked) <= _TICKS:  # in meta-attention every row is a meta-token
        axes.set_xticks(marked, ["▲"] * len(marked))
        axes.set_yticks(marked, ["▶"] * len(marked))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set(xlabel="key", ylabel="query")


def _draw_entropy(look: Look, module: str, layer: int, axes: Axes) -> None:
    positions = look.positions(module, layer).cpu()
    marker = {"marker": "." if len(positions) <= _TICKS else None, "markersize": 3, "linewidth": 1}
    kept = look.entropy(module, layer).mean(dim=0).cpu()
    axes.plot(positions, kept, label="as it is", **line(STYLES["meta"], **marker))
    if look.zeroed is not None:
        zeroed = look.entropy(module, layer, zeroed=True).mean(dim=0).cpu()
        axes.plot(positions, zeroed, label="embedding of meta-tokens zero", **line(STYLES["twin"], **marker))
    axes.set(xlabel="position", ylabel="entropy, nats")
