"""The figures: what is drawn is what was measured."""

from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metatokens.looking.style import PAGE, PHONE, png
from metatokens.paper.claims import ClaimResult, claims, judge
from metatokens.paper.frame import Inputs, load
from metatokens.paper.report import figures
from metatokens.paper.report.tables import Tables
from tests.paper.report.made_lines import LENGTHS, accuracy, grid, loss, skilled, write


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return load(grid(tmp_path_factory.mktemp("grid")))


@pytest.fixture(scope="module")
def told(inputs: Inputs) -> list[ClaimResult]:
    found = [judge(inputs, one) for one in claims()]
    return [one for one in found if not isnan(one.effect.low)]


def drawn(axes: Axes) -> dict[str, list[float]]:
    """The heights of the labelled lines of a panel."""
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): [float(value) for value in line.get_ydata()] for line in lines}


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left").replace("\n", " "): axes for axes in figure.axes if axes.get_title(loc="left")}


@pytest.mark.parametrize(
    ("name", "titles"),
    [("by_length", 2), ("learning", 1), ("losses", 1), ("sharpness", 4), ("similarity", 1), ("heat_map", 1),
     ("rate_distortion", 2)],
)  # fmt: skip
def test_every_figure_of_a_grid_is_drawn_for_both_widths(name: str, titles: int, inputs: Inputs) -> None:
    about: Any = Tables(inputs) if name == "by_length" else inputs
    for width in (PAGE, PHONE):
        figure = getattr(figures, name)(about, width)
        shown = panels(figure)
        assert (figure.get_figwidth(), len(shown)) == (width, titles)
        assert all(axes.lines or axes.images for axes in shown.values())
        columns = {round(axes.get_position().x0, 2) for axes in shown.values()}
        assert (len(columns) == 1) == (width == PHONE or titles == 1)


def test_what_was_not_measured_has_no_figure(tmp_path: Path) -> None:
    bare = load([write(tmp_path, results=[accuracy(0.5)])])
    for draw in (figures.learning, figures.losses, figures.sharpness, figures.similarity, figures.heat_map):
        assert draw(bare).axes == []
    assert figures.forest_plot([judge(bare, one) for one in claims()]).axes == []


def test_the_loss_on_each_task_is_that_of_its_shortest_prompts(tmp_path: Path) -> None:
    values = {("parity", 128): 1.0, ("parity", 512): 2.0, ("copying", 512): 3.0}
    curves = [loss(10, value, task=task, train_length=length) for (task, length), value in values.items()]
    shown = panels(figures.losses(load([write(tmp_path, results=[accuracy(0.5)], curves=curves)])))
    assert {title: drawn(axes) for title, axes in shown.items()} == {
        "Parity": {"meta": [1.0]},
        "Copying": {"meta": [3.0]},
    }


def test_accuracy_by_length_is_the_mean_of_the_runs_next_to_the_papers(inputs: Inputs) -> None:
    shown = drawn(panels(figures.by_length(Tables(inputs)))["List recall"])
    expected = [
        100 * np.mean([skilled("meta", "list_recall", one, 512) - seed / 50 for seed in range(3)]) for one in LENGTHS
    ]
    assert shown["meta"] == pytest.approx(expected)
    assert shown["the paper's meta"][:5] == [100.0, 100.0, 99.3, 58.9, 5.6]
    assert isnan(shown["the paper's meta"][5])
    assert shown["the paper's gpt2, learned positions"][:3] == [19.8, 9.5, 3.6]


@pytest.mark.parametrize("width", [PAGE, PHONE])
def test_the_forest_has_the_interval_of_every_claim(width: float, told: list[ClaimResult]) -> None:
    [axes] = figures.forest_plot(told, width).axes
    intervals = [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2]
    points = [float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    assert len(intervals) == len(points) == len(told) > 5
    for one, interval, point in zip(told, intervals, points, strict=True):
        scale = 100 if one.claim.unit == "points" else 5 / one.claim.smallest
        ends = (one.effect.low, one.effect.high, one.effect.value)
        assert [*interval, point] == pytest.approx([min(60, max(-60, scale * end)) for end in ends])
    arrows = sum(abs(end) > 60 for one in told for end in (
        (100 if one.claim.unit == "points" else 5 / one.claim.smallest) * np.array([one.effect.low, one.effect.high])
    ))  # fmt: skip
    texts = [text.get_text() for text in axes.texts]
    assert sum(text in ("\u25c2", "\u25b8") for text in texts) == arrows
    for one in told:
        assert any(text.replace("\n    ", " ").endswith(one.claim.text) for text in texts)
    assert {one.claim.question for one in told} <= {text.replace("\n", " ").replace("     ", " ") for text in texts}


def test_verdicts_differ_in_colour_and_in_shape() -> None:
    looks = [*figures.MARKERS.values(), figures.OPEN]
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == 4


def test_equal_figures_give_equal_bytes(told: list[ClaimResult]) -> None:
    first, second = (png(figures.forest_plot(told[:3])) for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")
