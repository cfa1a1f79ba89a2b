"""The figures of the report, each drawn for a page and for a phone."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from metatokens.looking.style import (
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
)  # fmt: skip
from metatokens.paper.claims import ClaimResult
from metatokens.paper.frame import Inputs, distortion_at, distortion_curves, learning_curves, select
from metatokens.paper.report.overview import MARKS, effect_text, numbered
from metatokens.paper.report.paper import paper_table
from metatokens.paper.report.table import Cell, models, order
from metatokens.paper.report.tables import ALONE, FACTS, LENGTH_TABLES, SPLITS, SUBJECTS, Tables
from metatokens.paper.report.text import name, number
from metatokens.records import SEPARATOR

MARKERS = {"supported": ("#0072b2", ">"), "contradicted": ("#d55e00", "<"), "equivalent": (INK, "s")}
OPEN = (GREY, "o")
LIMIT = 60.0  # points, where the forest ends
ROW = 0.19  # inches
PAPERS = {"meta": Style("#7d7a73", (1.5, 1.5), "x", 5.0), "gpt2": Style("#a39f97", (), "+", 6.0)}
_SHORT = 0.05  # of a proportion, in points: what claims in points have as their smallest effect of interest


def forest(judged: Sequence[ClaimResult], width: float = PAGE) -> Figure:
    """Effect, interval and verdict of each claim that has an interval, by question."""
    is_wide = width > PHONE
    letters = 58 if is_wide else 44
    judged = [one for one in judged if math.isfinite(one.effect.low)]
    if not judged:
        return Figure()
    rows: list[tuple[str, ClaimResult | None]] = []
    for question in dict.fromkeys(one.claim.question for one in judged):
        rows.append((question, None))
        rows += [(f"{MARKS[one.verdict]} {numbered(one)}", one) for one in judged if one.claim.question == question]
    lines = [wrap(text, letters, break_on_hyphens=False) for text, _ in rows]
    heights = [
        len(own) + (0.5 if one is None else 0.35 if is_wide else 2.3) for own, (_, one) in zip(lines, rows, strict=True)
    ]
    tops = np.cumsum([0.0, *heights])
    inches = ROW * tops[-1]
    figure = Figure((width, inches + 1.0), facecolor="white")
    left, right = (0.475, 0.735) if is_wide else (0.03, 0.97)
    axes = figure.add_axes((left, 0.55 / (inches + 1.0), right - left, inches / (inches + 1.0)))
    axes.set(xlim=(-LIMIT, LIMIT), ylim=(tops[-1], 0))
    bands = (
        [(0.0, float(tops[-1]))]
        if is_wide
        else [(end - 1.0, end) for end, (_, one) in zip(tops[1:], rows, strict=True) if one]
    )
    for band_top, bottom in bands:
        axes.fill_between([-100 * _SHORT, 100 * _SHORT], band_top, bottom, color=RULE, alpha=0.7, linewidth=0)
        axes.vlines(0, band_top, bottom, color=GREY, linewidth=0.8)
    for top, height, own, (_, one) in zip(tops[:-1], heights, lines, rows, strict=True):
        own = [own[0], *(f"    {rest}" for rest in own[1:])]
        look: dict[str, Any] = {
            "va": "top",
            "ha": "left",
            "fontsize": SIZE,
            "color": INK,
            "parse_math": False,
            "linespacing": 1.25,
        }
        across = (0.01 - left) / (right - left) if is_wide else -0.01
        transform = axes.get_yaxis_transform()
        axes.text(
            across,
            top + 0.2,
            "\n".join(own),
            transform=transform,
            **look,
            fontweight="bold" if one is None else "normal",
        )
        if one is not None:
            middle = top + (height / 2 if is_wide else height - 0.5)
            _draw_effect(axes, one, middle)
            x, y = (1.05, middle) if is_wide else (0.05, top + len(own) + 0.65)  # on a phone above the interval
            look |= {"va": "center", "color": MARKERS.get(one.verdict, OPEN)[0]}
            axes.text(x, y, effect_text(one), transform=transform, **look)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.set_yticks([])
    axes.set_xticks(range(-60, 61, 20), [number(one, sign="+") if one else "0" for one in range(-60, 61, 20)])
    axes.tick_params(length=0, labelsize=SIZE, labelcolor=INK)
    axes.set_xlabel("difference that the claim predicts, in points", fontsize=SIZE, color=INK)
    keys = [
        Line2D(
            [],
            [],
            color=colour,
            marker=marker,
            linestyle="none",
            markersize=6,
            markerfacecolor="white" if what == "inconclusive" else colour,
            label=what,
        )
        for what, (colour, marker) in (MARKERS | {"inconclusive": OPEN}).items()
    ]
    figure.legend(
        handles=keys,
        loc="upper left",
        ncols=4 if is_wide else 2,
        frameon=False,
        fontsize=SIZE,
        labelcolor=INK,
        handletextpad=0.2,
        columnspacing=1.2,
    )
    return figure


def _draw_effect(axes: Axes, one: ClaimResult, y: float) -> None:
    """The interval and the marker, cut off with an arrow where they leave the figure."""
    colour, marker = MARKERS.get(one.verdict, OPEN)
    scale = 100.0 if one.claim.unit == "points" else 100 * _SHORT / one.claim.smallest
    value, low, high = (scale * end for end in (one.effect.value, one.effect.low, one.effect.high))
    axes.plot(
        np.clip([low, high], -LIMIT, LIMIT),
        [y, y],
        color=colour,
        linewidth=1.8 if one.claim.primary else 1.2,
        solid_capstyle="butt",
    )
    for end, arrow in ((low, "\u25c2"), (high, "\u25b8")):
        if abs(end) > LIMIT:
            axes.text(math.copysign(LIMIT, end), y, arrow, color=colour, ha="center", va="center", fontsize=SIZE)
    fill = "white" if marker == "o" else colour
    axes.plot(
        np.clip(value, -LIMIT, LIMIT),
        y,
        marker,
        color=colour,
        markerfacecolor=fill,
        markersize=7 if one.claim.primary else 5.5,
        clip_on=False,
    )


def by_length(tables: Tables, width: float = PAGE) -> Figure:
    """Figure 1: accuracy by length of the models that were trained to the longest prompts; the paper's in grey."""
    panels = {name(task): partial(_draw_by_length, tables, task) for task in tables.tasks}
    return small_multiples(panels, [*STYLES], width, across=4 if len(panels) > 2 else 2)


def _draw_by_length(tables: Tables, task: str, axes: Axes) -> None:
    inputs, about = tables.inputs, tables.tasks[task]
    about = {key: value for key, value in about.items() if key not in ("length", "train_length")}
    found = inputs.select(**about).dropna(subset=["value", "length"])
    trained = found["train_length"].max()
    found = found[found["train_length"].isna() | (found["train_length"] == trained)]
    lengths = sorted(set(found["length"]))
    styles = palette(sorted(set(found["model"]), key=order))
    for model, style in styles.items():
        own = found[found["model"] == model]
        cells = {length: Cell.of(own[own["length"] == length]) for length in lengths if (own["length"] == length).any()}
        middle, low, high = 100 * np.array([cell.estimate() for cell in cells.values()]).T
        axes.plot([*cells], middle, label=model, **line(style, markersize=style.size - 1.5))
        band(axes, [*cells], np.clip(low, 0, 100), np.clip(high, 0, 100), style)
    best = found.groupby("length")["shortcut"].max()
    axes.plot(best.index, 100 * best, label="best shortcut", color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    if inputs.preset and task in LENGTH_TABLES:
        table = paper_table(LENGTH_TABLES[task])
        for model, style in PAPERS.items():
            positions = "rope" if model == "meta" else "learned"
            theirs = [
                table.at(model=model, position_embedding=positions, train_length=trained, length=one) for one in lengths
            ]
            if any(one is not None for one in theirs):
                label = f"the paper's {model}" + (", learned positions" if positions == "learned" else "")
                axes.plot(lengths, np.array(theirs, float), label=label, **line(style))
    if trained in lengths:
        axes.axvline(trained, color=RULE, linewidth=8, zorder=0, label="train length")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [number(one) if one < 1000 else f"{one / 1024:g}k" for one in lengths])
    axes.set_xticks([], minor=True)
    axes.set(ylim=(-4, 104), yticks=range(0, 101, 25), xlabel="prompt length, tokens", ylabel="exactly right, %")


def learning(inputs: Inputs, width: float = PAGE) -> Figure:
    """Accuracy by training step on each task: the mean over runs and its interval."""
    curves: dict[str, dict[str, list[pd.Series]]] = {}
    for (task, model, place, _), points in learning_curves(inputs.curves).items():
        label = model if place in ("rope", "") else f"{model}{SEPARATOR}{place}"
        curves.setdefault(task, {}).setdefault(label, []).append(points.set_index("step")["exact_match"])
    styles = palette(sorted({label for runs in curves.values() for label in runs}, key=order))

    def draw(task: str, axes: Axes) -> None:
        for label, runs in sorted(curves[task].items(), key=lambda one: order(one[0])):
            whole = pd.concat(runs, axis=1).dropna()
            steps = whole.index.to_numpy()
            ends = 100 * np.array([Cell(dict(enumerate(row))).estimate() for row in whole.to_numpy()]).reshape(-1, 3)
            axes.plot(
                steps, ends[:, 0], label=label, **line(styles[label], markevery=max(1, len(steps) // 5), markersize=4)
            )
            band(axes, steps, np.clip(ends[:, 1], 0, 100), np.clip(ends[:, 2], 0, 100), styles[label])
        by_step(axes, "exactly right, %")
        axes.axhline(90, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), label="90 %")
        axes.set(ylim=(-4, 104), yticks=range(0, 101, 25))

    panels = {name(task): partial(draw, task) for task in sorted(curves, key=order)}
    return small_multiples(panels, styles, width)


def losses(inputs: Inputs, width: float = PAGE) -> Figure:
    """The loss in pretraining, and in fine-tuning on each task, by step: the mean over runs."""
    found = select(inputs.curves, variant="").dropna(subset=["loss"])
    first = found.groupby("task")["train_length"].transform("min")
    found = found[found["train_length"].isna() | (found["train_length"] == first)]
    styles = palette(sorted(set(found["model"]), key=order))

    def draw(task: str, axes: Axes) -> None:
        own = found[found["task"] == task]
        for model in sorted(set(own["model"]), key=order):
            means = own[own["model"] == model].groupby("step")["loss"].mean().rolling(5, min_periods=1).mean()
            axes.plot(
                means.index, means, label=model, **line(styles[model], markevery=max(1, len(means) // 5), markersize=4)
            )
        if task and (own["loss"] > 0).any():
            axes.set_yscale("log", nonpositive="clip")
            axes.yaxis.set_major_formatter("{x:g}")
        by_step(axes, "loss, nats a token")

    panels = {
        name(task) if task else "Pretraining": partial(draw, task)
        for task in sorted(set(found["task"]), key=lambda one: (one != "", order(one)))
    }
    return small_multiples(panels, styles, width, across=3)


def sharpness(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 2, left and middle: what the meta-tokens' embeddings change, a point for each run."""
    measures: Mapping[str, Mapping[str, Any]] = {
        "Attention logit at a meta-token": {"metric": "attention_logit_change", "module": "attention", "layer": None},
        "Attention entropy": {"metric": "attention_entropy_change", "module": "attention", "layer": None},
        "The answer's output logit": {"metric": "output_answer_logit_change", "marker": "final"},
        "Output entropy, at the end": {"metric": "output_entropy_change", "marker": "final"},
    }

    def draw(rows: Mapping[str, Cell], axes: Axes) -> None:
        for place, (label, cell) in enumerate(rows.items()):
            style = STYLES.get(label.partition(",")[0], STYLES["meta"])
            runs = [*cell.runs.values()]
            shift = np.linspace(-0.18, 0.18, len(runs)) if len(runs) > 1 else [0.0]
            axes.plot(place + np.array(shift), runs, style.marker, color=style.colour, markersize=3.5, alpha=0.7)
            mean, low, high = cell.estimate()
            axes.errorbar(
                place + 0.32, mean, [[mean - low], [high - mean]], color=INK, marker="o", markersize=3.5, capsize=2
            )
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_xticks(range(len(rows)), [label.replace(", ", "\n") for label in rows])
        axes.set(xlim=(-0.5, len(rows) - 0.3), ylabel="change, nats")

    panels: dict[str, Panel] = {}
    for title, measure in measures.items():
        found = models(inputs, **measure)
        cells = {label: Cell.of(inputs.select(**row)) for label, row in found.items()}
        if cells:
            panels[title] = partial(draw, cells)
    return small_multiples(panels, (), width)


def similarity(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 2, right: centred cosine with the text tokens before, by distance."""
    looks = {"meta": ("meta-token", STYLES["meta"]), "text": ("text token (control)", STYLES["gpt2"])}
    about = {"metric": "similarity_centred", "marker": "context"}

    def draw(fields: Mapping[str, Any], axes: Axes) -> None:
        own = inputs.select(**fields)
        own = own[own["layer"] == own["layer"].max()]
        for subject, (label, style) in looks.items():
            rows = own[own["subject"] == subject]
            cells = {distance: Cell.of(found) for distance, found in rows.groupby("distance")}
            if cells:
                middle, low, high = np.array([cell.estimate() for cell in cells.values()]).T
                axes.plot([*cells], middle, label=label, **line(style, markersize=style.size - 2))
                band(axes, [*cells], low, high, style)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(ylim=(-1.05, 1.05), xlabel="tokens before it", ylabel="cosine, centred")

    panels = {label: partial(draw, row) for label, row in models(inputs, **about).items()}
    return small_multiples(panels, (), width, across=3)


def held(inputs: Inputs, width: float = PAGE) -> Figure:
    """Facts recalled through landmarks alone, by the share of keys and values that is kept: a line for each model."""
    found = inputs.select(intervention=ALONE, condition=[*FACTS], train_condition=[*FACTS], variant=[*FACTS])
    styles = palette(sorted(set(found["model"]), key=order))

    def draw(axes: Axes) -> None:
        for model, style in styles.items():
            facts = found[found["model"] == model].groupby("condition")
            points = sorted((own["kv_kept"].mean(), *Cell.of(own).estimate()) for _, own in facts)
            kept, middle, low, high = 100 * np.array(points).T
            axes.plot(kept, middle, label=model, **line(style))
            band(axes, kept, np.clip(low, 0, 100), np.clip(high, 0, 100), style)
        axes.set(ylim=(-4, 104), yticks=range(0, 101, 25), xlabel="keys and values kept, %", ylabel="exactly right, %")

    return small_multiples({"Facts recalled through landmarks alone": draw} if styles else {}, styles, width)


def heat_map(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 3, left: the likeness of each state to the last meta-token's, in one prompt of the first run of meta."""

    def draw(rows: pd.DataFrame, axes: Axes) -> None:
        values = rows.pivot_table(index="layer", columns="position", values="value", dropna=False)
        look: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1, "interpolation": "nearest"}
        image = axes.imshow(values.to_numpy(), aspect="auto", origin="lower", **look)
        bar = axes.figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], pad=0.02)
        bar.ax.tick_params(length=0, labelsize=SIZE)
        bar.outline.set_visible(False)
        metas = sorted(rows.loc[rows["subject"] == "meta", "position"].unique())
        colour, top = STYLES["meta"].colour, len(values) - 0.3
        axes.plot(metas, [top] * len(metas), "v", markersize=5, clip_on=False, color=colour, label="meta-token")
        axes.grid(visible=False)
        axes.set(ylim=(-0.5, len(values) - 0.1), yticks=range(len(values)))
        axes.set(xlabel="position in the prompt", ylabel="blocks passed")

    found = inputs.select(metric="similarity_to_final_centred", model="meta")
    panels = {}
    for position, own in sorted(found.groupby("position_embedding"), key=lambda one: one[0] != "rope"):
        panels[f"Cosine with the final meta-token's state, centred: {position}"] = partial(
            draw, own[own["seed"] == own["seed"].min()]
        )
    return small_multiples(panels, (), width, across=1)


def rate_distortion(inputs: Inputs, width: float = PAGE) -> Figure:
    """Figure 3, right: distortion by rate, the mean over runs and fits; linear to 20 nats, then logarithmic."""
    shown = {
        ("meta", "last meta-token"): STYLES["meta"], ("meta", "no position"): Style("#a3478a", (7, 2), "v", 5.0),
        ("meta", "text before it"): Style("#d55e00", (1, 1.2), "o", 5.0, "none"),
        ("gpt2", "last meta-token"): STYLES["gpt2"],
        ("gpt2", "text before it"): Style("#4d4d4d", (1, 1.2), "s", 4.5, "none"),
        ("twin", "last meta-token"): STYLES["twin"],
    }  # fmt: skip
    rates = np.array([0, 0.5, 1, 2, 4, 7, 10, 15, 20, 40, 80])

    def draw(split: str, axes: Axes) -> None:
        for (model, place), style in shown.items():
            subject, intervention = SUBJECTS[place]
            about = {"model": model, "intervention": intervention, "split": split, "subject": ["", subject]}
            curves = distortion_curves(select(measured, **about)).values()
            if curves:
                values = np.mean([[distortion_at(curve, rate) for rate in rates] for curve in curves], axis=0)
                axes.plot(rates, values, label=f"{model}, {place}", **line(style, markersize=style.size - 1.5))
        axes.set_xscale("symlog", linthresh=20)
        axes.set_xticks([0, 5, 10, 15, 20, 40, 80], ["0", "5", "10", "15", "20", "40", "80"])
        axes.set_xticks([], minor=True)
        axes.set(xlabel="rate, nats", ylabel="distortion, nats")
        axes.set_ylim(bottom=-0.25)

    measured = select(inputs.figures, analysis="rate_distortion", position_embedding="rope")
    panels = {
        f"Scored {title}": partial(draw, split) for split, title in SPLITS.items() if (measured["split"] == split).any()
    }
    return small_multiples(panels, (), width)
