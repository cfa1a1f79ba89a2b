"""The figures of the report: curves, bars, the claims with their intervals, and a map of similarities.

A function draws one figure from what was measured; without data it has no axes.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metatokens.looking.style import (
    FURTHER,
    GREY,
    INK,
    RULE,
    SIZE,
    STYLES,
    WIDTH,
    Style,
    band,
    line,
    palette,
    small_multiples,
)
from metatokens.paper.claims import ClaimResult
from metatokens.paper.frame import distortions, learning_curves, select, trained_to
from metatokens.paper.report.make_table import Cell
from metatokens.paper.report.paper_numbers import paper_table
from metatokens.paper.report.tables import Tables
from metatokens.paper.report.text import FORMS, PERCENT, Form, listed, number, ordered, words
from metatokens.records import ALONE

LOOKS = {
    "supported": ("#0072b2", ">"),
    "reversed": ("#d55e00", "D"),
    "no lead": ("#d55e00", "<"),
    "contradicted": ("#d55e00", "X"),
    "within": (INK, "s"),
    "inconclusive": (GREY, "o"),
}
LIMIT = 60.0  # points, where the plot of the claims ends
ROW = 0.19  # inches a line of text
_SHORT = 0.05  # of a proportion: what claims in points have as their smallest effect of interest
_EXACT = {"low": math.nan, "high": math.nan}  # the ends of a figure without an interval
_DRAWN_RATES = (0, 0.5, 1, 2, 4, 7, 10, 15, 20)  # nats
_PAPERS_TABLES = {"list_recall": 7, "segment_counting": 8, "parity": 9, "copying": 10}
_FLOORS = {
    "best shortcut": Style(INK, (1, 2), "", 0),
    "the paper's meta": Style("#7d7a73", (1.5, 1.5), "x", 5.0),
    "the paper's gpt2": Style("#a39f97", (), "+", 6.0),
}


# --- Curves


def curves(
    figures: pd.DataFrame,
    x: str,
    *,
    panel: str = "task",
    line_of: str = "model",
    form: Form = PERCENT,
    across: int = 2,
    is_log: bool = False,
    **axes: Any,
) -> Figure:
    """A line for each value of a column, through the means of figures by x, with bands of their intervals.

    Args:
        figures: rows with `value` and `seed`.
        x, panel, line_of: the columns that decide the point, the panel and the line.
        form: how the figures read; those in percent share an axis from 0 to 100.
        across: panels in a row.
        is_log: whether x is drawn by its logarithm.
        axes: properties of the axes of each panel.
    """
    styles = palette(ordered(set(figures[line_of]) - _FLOORS.keys())) | _FLOORS

    def draw(of_panel: pd.DataFrame, area: Axes) -> None:
        for label in ordered(of_panel[line_of]):
            of_line = of_panel[of_panel[line_of] == label]
            cells = {at: Cell.of(rows) for at, rows in of_line.groupby(x)}
            middle, low, high = (
                form.scale * np.array([cell.estimate() for cell in cells.values()]).T
            )
            style = styles[label]
            every = max(1, len(cells) // 5)
            look = line(style, markevery=every, markersize=max(style.size - 1.5, 0))
            area.plot([*cells], middle, label=label, **look)
            band(area, [*cells], low, high, style)
        if form == PERCENT:
            area.set(ylim=(-4, 104), yticks=range(0, 101, 25))
        area.set(**{"ylabel": form.what, **axes})
        if is_log:
            area.set_xscale("log", base=2)
            area.xaxis.set_major_formatter("{x:g}")

    panels = {
        words(panel, value): partial(draw, figures[figures[panel] == value])
        for value in ordered(figures[panel])
    }
    return small_multiples(panels, [*styles], across)


def by_length(tables: Tables) -> Figure:
    """Figure 1: accuracy by length of the models that were trained to the longest prompts; the paper's in grey."""
    ours = tables.main_figures(train_length="*", length="*").dropna(subset=["length"])
    ours = trained_to(ours, ours.groupby("task")["train_length"].transform("max"))
    shortcuts = ours.drop_duplicates(["task", "length"]).dropna(subset=["shortcut"])
    shortcuts = shortcuts.assign(model="best shortcut", value=shortcuts["shortcut"], **_EXACT)
    drawn = [ours, shortcuts]
    if tables.inputs.is_grid:
        drawn += [_papers(ours, "meta", "rope"), _papers(ours, "gpt2", "learned")]
    across = 4 if len(tables.tasks) > 2 else 2
    return curves(
        pd.concat(drawn), "length", across=across, is_log=True, xlabel="prompt length, tokens"
    )


def _papers(ours: pd.DataFrame, model: str, positions: str) -> pd.DataFrame:
    """The paper's figures of the same tasks and lengths, as rows of a model of its own."""
    rows = ours[ours["task"].isin([*_PAPERS_TABLES])].drop_duplicates(["task", "length"])
    fields = rows.assign(model=model, position_embedding=positions).to_dict("records")
    values = [paper_table(_PAPERS_TABLES[row["task"]]).at(**row) for row in fields]
    percent = np.array(values, dtype=float)
    rows = rows.assign(model=f"the paper's {model}", value=percent / 100, **_EXACT)
    return rows.dropna(subset=["value"])


def learning(tables: Tables) -> Figure:
    """Accuracy by training step on each task."""
    points = _rotary(learning_curves(tables.inputs.curves))
    return curves(points, "step", xlabel="training step")


def _rotary(figures: pd.DataFrame) -> pd.DataFrame:
    """The figures of models with rotary positions, where there are such; a line would average over positions."""
    rotary = select(figures, position_embedding="rope")
    return figures if rotary.empty else rotary


def similarity(tables: Tables) -> Figure:
    """Figure 2, right: centred cosine with the text tokens before, by distance."""
    cosines = _rotary(tables.inputs.measured(metric="similarity_centred", marker="context"))
    cosines = cosines[cosines["layer"] == cosines["layer"].max()]
    return curves(
        cosines.assign(subject=[words("subject", subject) for subject in cosines["subject"]]),
        "distance",
        panel="model",
        line_of="subject",
        form=FORMS["cosine"],
        is_log=True,
        xlabel="tokens before it",
    )


def rate_distortion(tables: Tables) -> Figure:
    """Figure 3, right: distortion by rate, the mean of a run's fits."""
    where: dict[str, Any] = {"position_embedding": "rope", "intervention": ""}
    measured = select(tables.inputs.figures, split=["held_out", "fit"], **where)
    columns = ["split", "model", "subject", "seed", "rate", "value"]
    drawn = pd.DataFrame(distortions(measured, _DRAWN_RATES), columns=columns)
    subjects = [words("subject", subject) for subject in drawn["subject"]]
    drawn = drawn.assign(line=drawn["model"] + ", " + subjects)
    form = FORMS["distortion"]
    return curves(drawn, "rate", panel="split", line_of="line", form=form, xlabel="rate, nats")


# --- Bars


def covered(tables: Tables) -> Figure:
    """Each model's accuracy with the text in sight (light) and with the text covered (dark), with their intervals."""
    hidden, in_sight = tables.main_figures(intervention=ALONE), tables.main_figures()

    def draw(task: str, axes: Axes) -> None:
        models = ordered(select(hidden, task=task)["model"])
        asked = ((in_sight, "text in sight", 0.4), (hidden, "text covered", 0.9))
        for row, (model, (figures, sight, opacity)) in enumerate(product(models, asked)):
            cell = Cell.of(select(figures, task=task, model=model))
            middle, *ends = 100 * np.array(cell.estimate())
            colour = STYLES.get(model, FURTHER[0]).colour
            axes.barh(row, middle, height=0.4, color=colour, alpha=opacity)
            axes.plot(ends, [row, row], color=INK, linewidth=1.4, solid_capstyle="butt")
            n = listed([*map(number, sorted(cell.n))], "or")
            _write(axes, 0.02, row - 0.35, f"{model}, {sight}: {cell.shown(PERCENT)} %, n = {n}")
        axes.set(ylim=(2 * len(models) - 0.6, -1.0), yticks=[], xlabel=PERCENT.what)

    panels = {words("task", task): partial(draw, task) for task in ordered(hidden["task"])}
    return small_multiples(panels, ())


def _write(axes: Axes, x: float, y: float, text: str, weight: str = "normal") -> None:
    """Text at x in widths of the axes, and at y in their units."""
    look: dict[str, Any] = {"fontsize": SIZE, "color": INK, "va": "center", "fontweight": weight}
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), parse_math=False, **look)


# --- The claims, and a map


def claims(results: Sequence[ClaimResult]) -> Figure:
    """The effect and the interval of each claim that has one, by question; small strokes are the tasks."""
    rows = _with_questions(results)
    if not rows:
        return Figure()
    folded = [wrap(text, width=62, break_on_hyphens=False) for text, _ in rows]
    bottoms = np.cumsum([len(lines) + 0.4 for lines in folded])
    height = ROW * bottoms[-1]
    figure = Figure((WIDTH, height + 1.0), facecolor="white")
    axes = figure.add_axes((0.51, 0.55 / (height + 1), 0.47, height / (height + 1)))
    axes.set(xlim=(-LIMIT, LIMIT), ylim=(bottoms[-1], 0), yticks=[])
    axes.axvspan(-100 * _SHORT, 100 * _SHORT, color=RULE, alpha=0.7, linewidth=0)
    axes.axvline(0, color=GREY, linewidth=0.8)
    for (_, measured), lines, bottom in zip(rows, folded, bottoms, strict=True):
        y = bottom - len(lines) / 2 - 0.2
        _write(axes, -1.07, y, "\n".join(lines), "normal" if measured else "bold")
        if measured:
            _draw_claim(axes, measured, y)
    for verdict, (colour, marker) in LOOKS.items():
        axes.plot([], [], marker, color=colour, label=verdict)
    figure.legend(loc="upper left", ncols=len(LOOKS), frameon=False, fontsize=SIZE, labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=SIZE, labelcolor=INK)
    axes.set_xlabel("difference that the claim predicts, in points", fontsize=SIZE, color=INK)
    return figure


def _with_questions(results: Sequence[ClaimResult]) -> list[tuple[str, ClaimResult | None]]:
    """The claims that have an interval, with their texts, each question before its claims."""
    rows: list[tuple[str, ClaimResult | None]] = []
    for result in results:
        claim = result.claim
        if math.isfinite(result.effect.low):
            if (claim.question, None) not in rows:
                rows.append((claim.question, None))
            rows.append((claim.title, result))
    return rows


def _draw_claim(axes: Axes, result: ClaimResult, y: float) -> None:
    """The interval, the effect, and the effects of tasks; what leaves the figure is drawn at its edge."""
    colour, marker = LOOKS[result.verdict]
    claim, effect = result.claim, result.effect
    scale = 100.0 if claim.unit == "points" else 100 * _SHORT / claim.smallest

    def shown(values: Sequence[float]) -> np.ndarray:
        return np.clip(scale * np.array(values), -LIMIT, LIMIT)

    width, size = (2.2, 7) if claim.primary else (1.2, 5)
    axes.plot(shown([effect.low, effect.high]), [y, y], color=colour, linewidth=width)
    tasks = [of_task.value for of_task in result.tasks.values()]
    if len(tasks) > 1:
        axes.plot(shown(tasks), [y] * len(tasks), "|", color=colour, markersize=8)
    axes.plot(shown([effect.value]), [y], marker, color=colour, markersize=size, clip_on=False)


def heat_map(tables: Tables) -> Figure:
    """Figure 3, left: the likeness of each state to the last meta-token's, in one prompt of the first run of meta."""
    cosines = tables.inputs.measured(
        metric="similarity_to_final_centred", model="meta", position_embedding="rope"
    )
    cosines = cosines[cosines["seed"] == cosines["seed"].min()]

    def draw(axes: Axes) -> None:
        values = cosines.pivot_table(index="layer", columns="position", values="value")
        look: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1, "aspect": "auto"}
        image = axes.imshow(values.to_numpy(), origin="lower", **look)
        axes.figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], pad=0.02)
        metas = sorted(set(cosines.loc[cosines["subject"] == "meta", "position"]))
        axes.plot(metas, [len(values) - 0.3] * len(metas), "v", clip_on=False, label="meta-token")
        axes.grid(visible=False)
        axes.set(xlabel="position in the prompt", ylabel="blocks passed", yticks=range(len(values)))

    title = "Cosine with the final meta-token's state, centred"
    return small_multiples({title: draw} if len(cosines) else {}, (), across=1)
