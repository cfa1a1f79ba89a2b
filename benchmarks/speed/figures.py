"""Timings as a table for the terminal, and as a figure."""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.box import SIMPLE_HEAD
from rich.table import Table

from metatokens.errors import UserError
from metatokens.paper.records import Timing

_COLOURS = ("#4d4d4d", "#d55e00", "#0072b2", "#00875f", "#a3478a")


_WIDE = 100  # characters, enough for all columns of the table
_COMPILED = ("first", "pays\nafter")  # columns of the benchmark `compile`
_LESS = ("a text\ntoken", "its\nlimit", "over\nproducts")  # columns that a narrow table lacks


def table(timings: Sequence[Timing], width: int) -> Table:
    """A row per comparison: times, ratios with their limits, and time over that of the matrix products.

    Args:
        timings: the timings of one benchmark.
        width: the terminal's width in characters; a narrow table has fewer columns.
    """
    first, lengths = timings[0], sorted({timing.length for timing in timings})
    size = f"batch {first.batch}, {' '.join(f'{length:,}' for length in lengths)} positions"
    machine = f"{first.device}, {first.threads} thread{'s' if first.threads > 1 else ''}"
    result = Table(
        title=f"{first.benchmark}: {first.shape}, {size}, {first.dtype}, {machine}, {first.n} rounds",
        caption="brackets: quartiles of the rounds; limit: what operations (decoding: bytes read) imply"
        + (
            "; pays after: so many units of work make up for a slower first one"
            if first.benchmark == "compile"
            else ""
        )
        + ("; a wider terminal shows more" if width < _WIDE else ""),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    firsts = {timing.model: timing.first for timing in timings}
    columns: dict[str, Callable[[Timing], str]] = {
        "model": _compared,
        "positions": lambda timing: f"{timing.length:,}",
        "seconds": lambda timing: f"{timing.seconds:.4g}",
        "ratio": lambda timing: (
            f"{timing.ratio:.3f} [{timing.ratio_low:.3f}, {timing.ratio_high:.3f}]"
        ),
        "first": lambda timing: "-" if timing.first is None else f"{timing.first:.4g}",
        "pays\nafter": lambda timing: _pays_after(timing, firsts[timing.against]),
        "limit": lambda timing: f"{timing.limit:.3f}",
        "a text\ntoken": lambda timing: f"{timing.ratio_per_text_token:.3f}",
        "its\nlimit": lambda timing: f"{timing.limit_per_text_token:.3f}",
        "text\ntokens/s": lambda timing: f"{timing.text_tokens / timing.seconds:,.0f}",
        "over\nproducts": lambda timing: f"{timing.over_products:.2f}",
        "MB": lambda timing: "-" if timing.memory is None else f"{timing.memory / 1e6:,.1f}",
    }
    dropped = [] if len(lengths) > 1 else ["positions"]
    dropped += [*_LESS] if width < _WIDE else []
    dropped += [] if first.benchmark == "compile" else [*_COMPILED]
    for heading in dropped:
        del columns[heading]
    for heading in columns:
        if heading == "model":
            result.add_column(heading, min_width=18)
        else:
            result.add_column(heading, justify="right", no_wrap=True)
    for timing in timings:
        result.add_row(*(cell(timing) for cell in columns.values()))
    return result


def _pays_after(timing: Timing, other_first: float | None) -> str:
    """Units of work after which the slower first one is made up for."""
    if timing.model == timing.against or timing.first is None or other_first is None:
        return "-"
    saved = timing.seconds / timing.ratio - timing.seconds
    return f"{max(0, math.ceil((timing.first - other_first) / saved)):,}" if saved > 0 else "never"


def draw(timings: Sequence[Timing], path: Path) -> None:
    """Draw a benchmark: time and memory against length if there are several lengths, otherwise ratios.

    Raises:
        UserError: if the file cannot be written.
    """
    figure = (
        _by_length(timings) if len({timing.length for timing in timings}) > 1 else _ratios(timings)
    )
    try:
        figure.savefig(path, format="png", dpi=160, metadata={"Software": None})
    except OSError as error:
        raise UserError(f"cannot write the figure to {path}: {error.strerror}.") from error


def _ratios(timings: Sequence[Timing]) -> Figure:
    """Each ratio with its quartiles, and a mark at its limit."""
    compared = [timing for timing in timings if timing.model != timing.against]
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(compared)), layout="constrained")
    axes = figure.add_subplot()
    for row, timing in enumerate(reversed(compared)):
        axes.plot(
            [timing.ratio_low, timing.ratio_high], [row, row], color=_COLOURS[1], linewidth=2.5
        )
        axes.plot(timing.ratio, row, "o", color=_COLOURS[1], label="measured" if row == 0 else None)
        axes.plot(
            timing.limit,
            row,
            "|",
            color=_COLOURS[0],
            markersize=16,
            label="limit" if row == 0 else None,
        )
    axes.axvline(1.0, color="#c8c5bf", linewidth=1, zorder=0)
    axes.set_yticks(range(len(compared)), map(_compared, reversed(compared)))
    axes.set_xlabel(f"{_unit_of_work(timings[0])}, as a ratio")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _by_length(timings: Sequence[Timing]) -> Figure:
    """Seconds, and memory if measured, against length. Quartiles are shaded, matrix products alone are dotted."""
    has_memory = all(timing.memory is not None for timing in timings)
    figure = Figure(figsize=(9 if has_memory else 5, 3.8), layout="constrained")
    panels = figure.subplots(1, 2 if has_memory else 1, squeeze=False)[0]
    lengths = sorted({timing.length for timing in timings})
    for model, colour in zip(
        dict.fromkeys(timing.model for timing in timings), cycle(_COLOURS), strict=False
    ):
        by_length = {timing.length: timing for timing in timings if timing.model == model}
        points = [by_length[length] for length in lengths if length in by_length]
        xs = [point.length for point in points]
        panels[0].fill_between(
            xs, [p.low for p in points], [p.high for p in points], color=colour, alpha=0.2
        )
        panels[0].plot(xs, [p.seconds for p in points], "o-", color=colour, label=model)
        panels[0].plot(xs, [p.seconds / p.over_products for p in points], ":", color=colour)
        if has_memory:
            panels[1].plot(xs, [(p.memory or 0) / 1e6 for p in points], "o-", color=colour)
    panels[0].plot([], [], ":", color=_COLOURS[0], label="its matrix products alone")
    for axes, quantity in zip(
        panels, (_unit_of_work(timings[0]), "MB in use besides the weights"), strict=False
    ):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.minorticks_off()
        axes.set_xlabel("positions")
        axes.set_ylabel(quantity)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _compared(timing: Timing) -> str:
    return timing.model if timing.model == timing.against else f"{timing.model} / {timing.against}"


def _unit_of_work(timing: Timing) -> str:
    kinds = {"answers": "a fine-tuning step", "prefill": "a first token", "decode": "decoding"}
    return f"seconds of {kinds.get(timing.benchmark, 'a training step')}"
