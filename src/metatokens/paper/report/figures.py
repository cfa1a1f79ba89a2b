"""The figures of the report, each drawn for a page and for a phone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from metatokens.looking.style import (
    FURTHER,
    GREY,
    INK,
    PAGE,
    PHONE,
    RULE,
    SIZE,
    STYLES,
    Panel,
    Style,
    band,
    by_step,
    line,
    palette,
    small_multiples,
)
from metatokens.paper.claims import ClaimResult
from metatokens.paper.frame import (
    Inputs,
    distortion_curves,
    distortions_at,
    learning_curves,
    select,
    trained_to,
)
from metatokens.paper.report.covered import Asked
from metatokens.paper.report.make_table import Cell, in_order, models, order
from metatokens.paper.report.overview import MARKS, effect_text, numbered
from metatokens.paper.report.paper_numbers import paper_table
from metatokens.paper.report.tables import ALONE, Tables
from metatokens.paper.report.text import PAPER_TABLES, PERCENT, ROWS, WORDS, name, number
from metatokens.records import SEPARATOR

MARKERS = {
    "supported": ("#0072b2", ">"),
    "contradicted": ("#d55e00", "<"),
    "equivalent": (INK, "s"),
}
OPEN = (GREY, "o")
LIMIT = 60.0  # points, where the forest plot ends
ROW = 0.19  # inches
PAPERS = {"meta": Style("#7d7a73", (1.5, 1.5), "x", 5.0), "gpt2": Style("#a39f97", (), "+", 6.0)}
_SHORT = 0.05  # of a proportion, in points: what claims in points have as their smallest effect of interest
# Figure 2, left and middle, by the title of a panel: a row of the table `sharpness`.
_SHARPNESS = {
    "Attention logit at a meta-token": "attention: logit at a meta-token",
    "Attention entropy": "attention: entropy",
    "The answer's output logit": "the answer's logit at its end",
    "Output entropy, at the end": "output entropy at its end",
}
_DISTORTIONS = {
    ("meta", "last meta-token"): STYLES["meta"],
    ("meta", "no position"): Style("#a3478a", (7, 2), "v", 5.0),
    ("meta", "text before it"): Style("#d55e00", (1, 1.2), "o", 5.0, "none"),
    ("gpt2", "last meta-token"): STYLES["gpt2"],
    ("gpt2", "text before it"): Style("#4d4d4d", (1, 1.2), "s", 4.5, "none"),
    ("twin", "last meta-token"): STYLES["twin"],
}
_DRAWN_RATES = (0, 0.5, 1, 2, 4, 7, 10, 15, 20, 40, 80)  # nats


# --- The forest plot of the claims


@dataclass(frozen=True)
class _ForestRow:
    """A question, or a claim with its interval; heights are in lines of text, downwards."""

    lines: list[str]
    result: ClaimResult | None
    top: float
    bottom: float


def forest_plot(results: Sequence[ClaimResult], width: float = PAGE) -> Figure:
    """The forest plot: effect, interval and verdict of each claim that has an interval, by question."""
    results = [result for result in results if math.isfinite(result.effect.low)]
    if not results:
        return Figure()
    is_wide = width > PHONE
    rows = _forest_rows(results, is_wide)
    bottom = rows[-1].bottom
    inches = ROW * bottom
    height = inches + 1.0
    left, right = (0.475, 0.735) if is_wide else (0.03, 0.97)
    figure = Figure((width, height), facecolor="white")
    axes = figure.add_axes((left, 0.55 / height, right - left, inches / height))
    axes.set(xlim=(-LIMIT, LIMIT), ylim=(bottom, 0))
    if is_wide:
        _draw_zone(axes, 0.0, bottom)
    text_x = (0.01 - left) / (right - left) if is_wide else -0.01
    for row in rows:
        weight = "normal" if row.result else "bold"
        _write(axes, text_x, row.top + 0.2, "\n    ".join(row.lines), va="top", fontweight=weight)
        if row.result is not None:
            _draw_claim(axes, row, row.result, is_wide)
    _scale_in_points(axes)
    figure.legend(
        handles=[
            _key(verdict, *look) for verdict, look in (MARKERS | {"inconclusive": OPEN}).items()
        ],
        loc="upper left",
        ncols=4 if is_wide else 2,
        frameon=False,
        fontsize=SIZE,
        labelcolor=INK,
        handletextpad=0.2,
        columnspacing=1.2,
    )
    return figure


def _forest_rows(results: Sequence[ClaimResult], is_wide: bool) -> list[_ForestRow]:
    """The rows from top to bottom. On a phone an interval is below its claim, elsewhere next to it."""
    rows: list[_ForestRow] = []
    for question in dict.fromkeys(result.claim.question for result in results):
        claims = [result for result in results if result.claim.question == question]
        for result in (None, *claims):
            text, margin = question, 0.5
            if result is not None:
                text, margin = (
                    f"{MARKS[result.verdict]} {numbered(result)}",
                    0.35 if is_wide else 2.3,
                )
            lines = wrap(text, width=58 if is_wide else 44, break_on_hyphens=False)
            top = rows[-1].bottom if rows else 0.0
            rows.append(_ForestRow(lines, result, top, top + (len(lines) + margin)))
    return rows


def _scale_in_points(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.set_yticks([])
    ticks = range(-60, 61, 20)
    axes.set_xticks(ticks, [number(tick, sign="+") if tick else "0" for tick in ticks])
    axes.tick_params(length=0, labelsize=SIZE, labelcolor=INK)
    axes.set_xlabel("difference that the claim predicts, in points", fontsize=SIZE, color=INK)


def _draw_claim(axes: Axes, row: _ForestRow, result: ClaimResult, is_wide: bool) -> None:
    """The interval, and the effect in words: right of it, or on a phone above it."""
    text_x, text_y = 1.05, (row.top + row.bottom) / 2
    interval_y = text_y
    if not is_wide:
        text_x, text_y = 0.05, row.top + len(row.lines) + 0.65
        interval_y = row.bottom - 0.5
        _draw_zone(axes, row.bottom - 1.0, row.bottom)
    _draw_effect(axes, result, interval_y)
    colour, _ = MARKERS.get(result.verdict, OPEN)
    _write(axes, text_x, text_y, effect_text(result), va="center", color=colour)


def _draw_zone(axes: Axes, top: float, bottom: float) -> None:
    """The differences that are smaller than the smallest effect of interest."""
    axes.fill_between(
        [-100 * _SHORT, 100 * _SHORT], top, bottom, color=RULE, alpha=0.7, linewidth=0
    )
    axes.vlines(0, top, bottom, color=GREY, linewidth=0.8)


def _write(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Text at x in widths of the axes, and at y in rows."""
    look = {"ha": "left", "fontsize": SIZE, "color": INK, "linespacing": 1.25, **look}
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), parse_math=False, **look)


def _key(verdict: str, colour: str, marker: str) -> Line2D:
    """A verdict's entry in the legend."""
    fill = "white" if verdict == "inconclusive" else colour
    look: dict[str, Any] = {"linestyle": "none", "markersize": 6, "markerfacecolor": fill}
    return Line2D([], [], color=colour, marker=marker, label=verdict, **look)


def _draw_effect(axes: Axes, result: ClaimResult, y: float) -> None:
    """The interval and the marker, cut off with an arrow where they leave the figure."""
    claim, effect = result.claim, result.effect
    colour, marker = MARKERS.get(result.verdict, OPEN)
    scale = 100.0 if claim.unit == "points" else 100 * _SHORT / claim.smallest
    ends = scale * effect.low, scale * effect.high
    width, size = (1.8, 7) if claim.primary else (1.2, 5.5)
    axes.plot(
        np.clip(ends, -LIMIT, LIMIT), [y, y], color=colour, linewidth=width, solid_capstyle="butt"
    )
    for end, arrow in zip(ends, "\u25c2\u25b8", strict=True):
        if abs(end) > LIMIT:
            axes.text(
                math.copysign(LIMIT, end),
                y,
                arrow,
                color=colour,
                ha="center",
                va="center",
                fontsize=SIZE,
            )
    look: dict[str, Any] = {
        "color": colour,
        "markerfacecolor": "white" if marker == "o" else colour,
    }
    axes.plot(
        np.clip(scale * effect.value, -LIMIT, LIMIT),
        y,
        marker,
        markersize=size,
        clip_on=False,
        **look,
    )


# --- Accuracy


def _scale_in_percent(axes: Axes, **labels: str) -> None:
    axes.set(ylim=(-4, 104), yticks=range(0, 101, 25), **labels)


def _draw_means(
    axes: Axes,
    label: str,
    cells: Mapping[float, Cell],
    style: Style,
    *,
    in_percent: bool = True,
    **look: Any,
) -> None:
    """A line through the means of cells, by x, with a band of their intervals."""
    estimates = np.array([cell.estimate() for cell in cells.values()]).reshape(-1, 3)
    middle, low, high = estimates.T
    if in_percent:
        middle = 100 * middle
        low, high = np.clip(100 * low, 0, 100), np.clip(100 * high, 0, 100)
    axes.plot(list(cells), middle, label=label, **line(style, **look))
    band(axes, list(cells), low, high, style)


def _cells_by(column: str, figures: pd.DataFrame) -> dict[Any, Cell]:
    return {value: Cell.of(rows) for value, rows in figures.groupby(column)}


def by_length(tables: Tables, width: float = PAGE) -> Figure:
    """Figure 1: accuracy by length of the models that were trained to the longest prompts; the paper's in grey."""
    panels = {name(task): partial(_draw_by_length, tables, task) for task in tables.tasks}
    return small_multiples(panels, [*STYLES], width, across=4 if len(panels) > 2 else 2)


def _draw_by_length(tables: Tables, task: str, axes: Axes) -> None:
    selection = {
        key: value
        for key, value in tables.tasks[task].items()
        if key not in ("length", "train_length")
    }
    accuracies = tables.inputs.select(**selection).dropna(subset=["value", "length"])
    train_length = accuracies["train_length"].max()
    accuracies = trained_to(accuracies, train_length)
    lengths = sorted(set(accuracies["length"]))
    for model, style in palette(in_order(accuracies["model"])).items():
        cells = _cells_by("length", accuracies[accuracies["model"] == model])
        _draw_means(axes, model, cells, style, markersize=style.size - 1.5)
    best = accuracies.groupby("length")["shortcut"].max()
    axes.plot(
        best.index,
        100 * best,
        label="best shortcut",
        color=INK,
        linewidth=0.9,
        linestyle=(0, (1, 2)),
    )
    if tables.inputs.preset and task in PAPER_TABLES["by_length"]:
        _draw_papers(axes, PAPER_TABLES["by_length"][task], train_length, lengths)
    if train_length in lengths:
        axes.axvline(train_length, color=RULE, linewidth=8, zorder=0, label="train length")
    axes.set_xscale("log", base=2)
    ticks = [number(length) if length < 1000 else f"{length / 1024:g}k" for length in lengths]
    axes.set_xticks(lengths, ticks)
    axes.set_xticks([], minor=True)
    _scale_in_percent(axes, xlabel="prompt length, tokens", ylabel="exactly right, %")


def _draw_papers(axes: Axes, table: int, train_length: float, lengths: Sequence[float]) -> None:
    """The figures of a table of the paper, at the same lengths."""
    labels = {
        ("meta", "rope"): "the paper's meta",
        ("gpt2", "learned"): "the paper's gpt2, learned positions",
    }
    for (model, positions), label in labels.items():
        setting = {"model": model, "position_embedding": positions, "train_length": train_length}
        values = np.array(
            [paper_table(table).at(**setting, length=length) for length in lengths], float
        )
        if not np.isnan(values).all():
            axes.plot(lengths, values, label=label, **line(PAPERS[model]))


def covered(by_task: Mapping[str, Sequence[Asked]], width: float = PAGE) -> Figure:
    """Each model's accuracy with the text in sight (light) and with the text covered (dark), next to the floors."""
    panels = {name(task): partial(_draw_covered, asked) for task, asked in by_task.items()}
    return small_multiples(panels, (), width)


def _draw_covered(asked: Sequence[Asked], axes: Axes) -> None:
    for position, answered in enumerate(asked):
        colour = STYLES.get(answered.model, FURTHER[0]).colour
        _draw_bar(
            axes,
            2 * position,
            answered.in_sight,
            f"{answered.model}, text in sight",
            color=colour,
            alpha=0.4,
        )
        _draw_bar(
            axes,
            2 * position + 1,
            answered.covered,
            f"{answered.model}, text covered",
            color=colour,
            alpha=1.0,
        )
    shortcut, guessing = asked[
        0
    ].in_sight.floors  # of the same prompts in all bars; a line at NaN is not drawn
    for floor, label, dashes in (
        (shortcut, "best shortcut", (1, 2)),
        (guessing, "guessing", (4, 2)),
    ):
        axes.axvline(
            100 * floor, color=GREY, linewidth=1.1, linestyle=(0, dashes), label=label, zorder=3
        )
    axes.set(xlim=(0, 101), ylim=(2 * len(asked) - 0.6, -1.0), yticks=[], xlabel="exactly right, %")
    axes.set_xticks(range(0, 101, 25))


def _draw_bar(axes: Axes, row: int, cell: Cell, label: str, **look: Any) -> None:
    middle, low, high = 100 * np.array(cell.estimate())
    axes.barh(row, middle, height=0.4, **look)
    axes.plot([low, high], [row, row], color=INK, linewidth=1.4, solid_capstyle="butt")
    text = f"{label}: {cell.shown(PERCENT)} %, n = {' or '.join(map(number, sorted(cell.n)))}"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    letters: dict[str, Any] = {
        "va": "bottom",
        "fontsize": SIZE,
        "color": INK,
        "parse_math": False,
        "zorder": 4,
    }
    axes.text(0, row - 0.25, text, bbox=box, **letters)


def held(inputs: Inputs, width: float = PAGE) -> Figure:
    """Facts recalled through landmarks alone, by the share of keys and values that is kept: a line for each model."""
    facts = [*WORDS["facts"]]
    accuracies = inputs.select(
        intervention=ALONE, condition=facts, train_condition=facts, variant=facts
    )
    styles = palette(in_order(accuracies["model"]))

    def draw(axes: Axes) -> None:
        for model, style in styles.items():
            by_condition = accuracies[accuracies["model"] == model].groupby("condition")
            cells = {100 * rows["kv_kept"].mean(): Cell.of(rows) for _, rows in by_condition}
            _draw_means(axes, model, dict(sorted(cells.items())), style)
        _scale_in_percent(axes, xlabel="keys and values kept, %", ylabel="exactly right, %")

    return small_multiples(
        {"Facts recalled through landmarks alone": draw} if styles else {}, styles, width
    )


# --- Training curves


def learning(inputs: Inputs, width: float = PAGE) -> Figure:
    """Accuracy by training step on each task: the mean over runs and its interval."""
    curves: dict[str, dict[str, list[pd.Series]]] = {}
    for (task, model, positions, _), points in learning_curves(inputs.curves).items():
        label = model if positions in ("rope", "") else f"{model}{SEPARATOR}{positions}"
        of_label = curves.setdefault(task, {}).setdefault(label, [])
        of_label.append(points.set_index("step")["exact_match"])
    styles = palette(in_order(chain.from_iterable(curves.values())))

    def draw(task: str, axes: Axes) -> None:
        for label in in_order(curves[task]):
            accuracies = pd.concat(
                curves[task][label], axis=1
            ).dropna()  # (steps that every run has, runs)
            cells = {step: Cell(dict(enumerate(runs))) for step, *runs in accuracies.itertuples()}
            _draw_means(axes, label, cells, styles[label], **_few_markers(cells))
        by_step(axes, "exactly right, %")
        axes.axhline(90, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), label="90 %")
        _scale_in_percent(axes)

    panels = {name(task): partial(draw, task) for task in in_order(curves)}
    return small_multiples(panels, styles, width)


def _few_markers(points: Any) -> dict[str, Any]:
    return {"markevery": max(1, len(points) // 5), "markersize": 4}


def losses(inputs: Inputs, width: float = PAGE) -> Figure:
    """The loss in pretraining, and in fine-tuning on each task, by step: the mean over runs."""
    points = select(inputs.curves, variant="").dropna(subset=["loss"])
    points = trained_to(points, points.groupby("task")["train_length"].transform("min"))
    styles = palette(in_order(points["model"]))

    def draw(task: str, axes: Axes) -> None:
        of_task = points[points["task"] == task]
        for model in in_order(of_task["model"]):
            means = of_task[of_task["model"] == model].groupby("step")["loss"].mean()
            smooth = means.rolling(5, min_periods=1).mean()
            axes.plot(
                smooth.index, smooth, label=model, **line(styles[model], **_few_markers(smooth))
            )
        if task and (of_task["loss"] > 0).any():
            axes.set_yscale("log", nonpositive="clip")
            axes.yaxis.set_major_formatter("{x:g}")
        by_step(axes, "loss, nats a token")

    tasks = sorted(set(points["task"]), key=lambda task: (task != "", order(task)))
    panels = {name(task) if task else "Pretraining": partial(draw, task) for task in tasks}
    return small_multiples(panels, styles, width, across=3)


# --- What happens inside


def sharpness(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 2, left and middle: what the meta-tokens' embeddings change, a point for each run."""
    panels: dict[str, Panel] = {}
    for title, row in _SHARPNESS.items():
        rows = models(inputs, **ROWS["sharpness"][row])
        cells = {label: Cell.of(inputs.select(**fields)) for label, fields in rows.items()}
        if cells:
            panels[title] = partial(_draw_changes, cells)
    return small_multiples(panels, (), width)


def _draw_changes(cells: Mapping[str, Cell], axes: Axes) -> None:
    for x, (label, cell) in enumerate(cells.items()):
        style = STYLES.get(label.partition(",")[0], STYLES["meta"])
        runs = [*cell.runs.values()]
        shift = np.linspace(-0.18, 0.18, len(runs)) if len(runs) > 1 else np.zeros(1)
        axes.plot(x + shift, runs, style.marker, color=style.colour, markersize=3.5, alpha=0.7)
        mean, low, high = cell.estimate()
        reach = [[mean - low], [high - mean]]
        axes.errorbar(x + 0.32, mean, reach, color=INK, marker="o", markersize=3.5, capsize=2)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xticks(range(len(cells)), [label.replace(", ", "\n") for label in cells])
    axes.set(xlim=(-0.5, len(cells) - 0.3), ylabel="change, nats")


def similarity(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 2, right: centred cosine with the text tokens before, by distance."""
    rows = models(inputs, metric="similarity_centred", marker="context")
    panels = {
        label: partial(_draw_similarity, inputs.select(**fields)) for label, fields in rows.items()
    }
    return small_multiples(panels, (), width, across=3)


def _draw_similarity(cosines: pd.DataFrame, axes: Axes) -> None:
    of_last_layer = cosines[cosines["layer"] == cosines["layer"].max()]
    looks = {
        "meta": ("meta-token", STYLES["meta"]),
        "text": ("text token (control)", STYLES["gpt2"]),
    }
    for subject, (label, style) in looks.items():
        cells = _cells_by("distance", of_last_layer[of_last_layer["subject"] == subject])
        if cells:
            _draw_means(axes, label, cells, style, in_percent=False, markersize=style.size - 2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(ylim=(-1.05, 1.05), xlabel="tokens before it", ylabel="cosine, centred")


def heat_map(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 3, left: the likeness of each state to the last meta-token's, in one prompt of the first run of meta."""
    cosines = inputs.select(
        metric="similarity_to_final_centred", model="meta", position_embedding="rope"
    )
    of_first_run = cosines[cosines["seed"] == cosines["seed"].min()]
    title = "Cosine with the final meta-token's state, centred: rope"
    panels = {title: partial(_draw_map, of_first_run)} if len(cosines) else {}
    return small_multiples(panels, (), width, across=1)


def _draw_map(cosines: pd.DataFrame, axes: Axes) -> None:
    values = cosines.pivot_table(index="layer", columns="position", values="value", dropna=False)
    look: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1, "interpolation": "nearest"}
    image = axes.imshow(values.to_numpy(), aspect="auto", origin="lower", **look)
    bar = axes.figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], pad=0.02)
    bar.ax.tick_params(length=0, labelsize=SIZE)
    bar.outline.set_visible(False)
    metas = sorted(cosines.loc[cosines["subject"] == "meta", "position"].unique())
    heights = [len(values) - 0.3] * len(metas)
    axes.plot(
        metas,
        heights,
        "v",
        markersize=5,
        clip_on=False,
        color=STYLES["meta"].colour,
        label="meta-token",
    )
    axes.grid(visible=False)
    axes.set(ylim=(-0.5, len(values) - 0.1), yticks=range(len(values)))
    axes.set(xlabel="position in the prompt", ylabel="blocks passed")


def rate_distortion(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 3, right: distortion by rate, the mean over runs and fits; linear to 20 nats, then logarithmic."""
    measured = select(inputs.figures, analysis="rate_distortion", position_embedding="rope")
    panels = {}
    for split, title in WORDS["splits"].items():
        of_split = select(measured, split=split)
        if len(of_split):
            panels[f"Scored {title}"] = partial(_draw_distortions, of_split)
    return small_multiples(panels, (), width)


def _draw_distortions(measured: pd.DataFrame, axes: Axes) -> None:
    for (model, state), style in _DISTORTIONS.items():
        fields = WORDS["states"][state]
        subjects = ["", fields["subject"]]  # an entropy of answers has no subject
        curves = distortion_curves(select(measured, model=model, **fields | {"subject": subjects}))
        if curves:
            means = np.mean(
                [distortions_at(curve, _DRAWN_RATES) for curve in curves.values()], axis=0
            )
            axes.plot(
                _DRAWN_RATES,
                means,
                label=f"{model}, {state}",
                **line(style, markersize=style.size - 1.5),
            )
    ticks = [0, 5, 10, 15, 20, 40, 80]
    axes.set_xscale("symlog", linthresh=20)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_xticks([], minor=True)
    axes.set(xlabel="rate, nats", ylabel="distortion, nats")
    axes.set_ylim(bottom=-0.25)
