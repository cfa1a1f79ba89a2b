"""What a model did with one prompt, as a figure for a paper."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from metatokens.looking.page import Look, title_of

_PANEL = 2.1  # inches
_TICKS = 40  # tokens that have room along a panel
_COLUMNS = 8  # panels side by side


def draw(looks: Sequence[Look]) -> bytes:
    """A PNG of attention weights, the heads' mean, and of the rows' entropy: a panel for each layer, eight in a row.

    Args:
        looks: of one model, or of several on the same prompt, below each other.
    """
    rows = [
        (look, module, kind, layers[start : start + _COLUMNS])
        for kind in ("weights", "entropy")
        for look in looks
        for module, layers in look.modules.items()
        for start in range(0, len(layers), _COLUMNS)
    ]
    columns = max(len(layers) for *_, layers in rows)
    figure = Figure((_PANEL * columns + 0.6, _PANEL * len(rows)), layout="constrained", facecolor="white")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for (look, module, kind, layers), panels in zip(rows, grid, strict=True):
        for axes, layer in zip(panels, layers, strict=False):
            (_draw_weights if kind == "weights" else _draw_entropy)(axes, look, module, layer)
            name = f"{look.name}, " if len(looks) > 1 else ""
            axes.set_title(f"{name}{title_of(look, module)}, layer {layer}", fontsize=7, parse_math=False)
            axes.tick_params(labelsize=6)
        for axes in panels[len(layers) :]:
            axes.set_visible(False)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=200)
    return written.getvalue()


def _draw_weights(axes: Axes, look: Look, module: str, layer: int) -> None:
    weights = look.attention(module, layer).mean(dim=0).cpu().numpy()
    axes.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect="auto", interpolation="nearest")
    positions = look.positions(module, layer).tolist()
    marked = [row for row, position in enumerate(positions) if look.is_meta[position]]
    if len(positions) > len(marked) and len(marked) <= _TICKS:  # in meta-attention every row is a meta-token
        axes.set_xticks(marked, ["▲"] * len(marked))
        axes.set_yticks(marked, ["▶"] * len(marked))
        axes.tick_params(length=0)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("key", fontsize=6)
    axes.set_ylabel("query", fontsize=6)


def _draw_entropy(axes: Axes, look: Look, module: str, layer: int) -> None:
    positions = look.positions(module, layer).cpu()
    style: dict[str, Any] = {"linewidth": 0.9, "marker": "." if len(positions) <= _TICKS else None, "markersize": 3}
    kept = look.entropy(module, layer).mean(dim=0).cpu()
    axes.plot(positions, kept, color="#d55e00", label="as it is", **style)
    if look.zeroed is not None:
        zeroed = look.entropy(module, layer, zeroed=True).mean(dim=0).cpu()
        axes.plot(positions, zeroed, "--", color="#0072b2", label="embedding of meta-tokens zero", **style)
    axes.set_xlabel("position", fontsize=6)
    axes.set_ylabel("entropy, nats", fontsize=6)
    axes.legend(fontsize=5, frameon=False)
