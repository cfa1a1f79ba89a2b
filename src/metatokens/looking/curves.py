"""The curves of finished and unfinished runs in one figure."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError

from metatokens.errors import UserError
from metatokens.looking.style import (
    FURTHER,
    PAGE,
    STYLES,
    Panel,
    Style,
    by_step,
    line,
    small_multiples,
)


class Point(BaseModel):
    """A step of a run's curve. Each line of the file has some of these figures."""

    step: int
    loss: float | None = None
    eval_loss: float | None = None
    exact_match: float | None = Field(
        None, validation_alias=AliasChoices("exact_match", "eval_exact_match")
    )


Curves = Mapping[str, Sequence[Point]]


def read_curves(runs: Sequence[Path]) -> Curves:
    """The curves of runs, by folder. A fine-tuning run has one for each phase.

    The curve of an unfinished run is read from its newest checkpoint.

    Raises:
        UserError: if a folder has no curve, or a damaged one.
    """
    curves: dict[str, Sequence[Point]] = {}
    for run in runs:
        files = {folder: _curve_file(folder) for folder in (run, *_phases(run))}
        of_run = {str(folder): _read(file) for folder, file in files.items() if file is not None}
        if not of_run:
            raise UserError(
                f"there is no curve in {run}; give the folder of a run of pretrain, extend or finetune that has saved "
                "at least one checkpoint."
            )
        curves |= of_run
    return curves


def _phases(run: Path) -> list[Path]:
    """The folders of a run's phases, in the order of training: 64 before 128."""
    folders = [path for path in run.glob("*") if path.is_dir() and path.name != "checkpoints"]
    return sorted(folders, key=lambda path: (len(path.name), path.name))


def _curve_file(folder: Path) -> Path | None:
    finished = folder / "curve.jsonl"
    if finished.is_file():
        return finished
    steps = {
        state: state.parent.name.removeprefix("checkpoint-")
        for state in folder.glob("checkpoints/checkpoint-*/trainer_state.json")
    }
    states = [state for state, step in steps.items() if step.isdecimal()]
    return max(states, key=lambda state: int(steps[state]), default=None)


def _read(file: Path) -> list[Point]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            entries = json.loads(text)["log_history"]
        else:
            entries = [json.loads(entry) for entry in text.splitlines()]
        return TypeAdapter(list[Point]).validate_python(entries)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, ValidationError) as error:
        raise UserError(f"{file} is not the curve of a run.") from error


def draw_curves(curves: Curves) -> Figure:
    """Loss, held-out loss (with markers) and, if a curve has it, exact match, by training step."""
    styles = dict(zip(curves, cycle([*reversed(STYLES.values()), *FURTHER])))
    panels: dict[str, Panel] = {"Loss": partial(_draw_losses, curves, styles)}
    if any(_values(points, "exact_match") for points in curves.values()):
        panels["Exact match"] = partial(_draw_exact_match, curves, styles)
    order = []
    for name in curves:
        order += [name, _held_out(name)]
    return small_multiples(panels, order, PAGE)


def _held_out(name: str) -> str:
    return f"{name}, held out"


def _values(points: Sequence[Point], figure: str) -> dict[int, float]:
    """A figure by step."""
    values = {}
    for point in points:
        value = getattr(point, figure)
        if value is not None:
            values[point.step] = value
    return dict(sorted(values.items()))


def _draw_losses(curves: Curves, styles: Mapping[str, Style], axes: Axes) -> None:
    for name, points in curves.items():
        held_out = _values(points, "eval_loss")
        alpha = 0.55 if held_out else 1.0
        _plot(
            axes,
            _values(points, "loss"),
            color=styles[name].colour,
            lw=1.6,
            alpha=alpha,
            label=name,
        )
        _plot_marked(axes, held_out, styles[name], label=_held_out(name))
    by_step(axes, "loss, nats a token")


def _draw_exact_match(curves: Curves, styles: Mapping[str, Style], axes: Axes) -> None:
    for name, points in curves.items():
        percent = {step: 100 * value for step, value in _values(points, "exact_match").items()}
        _plot_marked(axes, percent, styles[name])
    by_step(axes, "exactly right, %")
    axes.set(ylim=(-4, 104), yticks=range(0, 101, 25))


def _plot_marked(axes: Axes, values: Mapping[int, float], style: Style, **settings: Any) -> None:
    """Draw a line with markers at about a dozen steps, if there are values."""
    if values:
        every = max(1, len(values) // 12)
        _plot(
            axes, values, **line(style, markevery=every, markersize=0.75 * style.size), **settings
        )


def _plot(axes: Axes, values: Mapping[int, float], **settings: Any) -> None:
    axes.plot(list(values), list(values.values()), **settings)
