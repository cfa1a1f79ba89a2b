"""The figures: what is drawn is what was measured."""

from math import isnan
from typing import Any

import pytest

from metatokens.looking.style import PAGE, PHONE, png
from metatokens.paper.claims import claims, judge
from metatokens.paper.frame import load
from metatokens.paper.report import figures
from metatokens.paper.report.tables import Tables
from tests.paper.report.made_lines import GRID_LENGTHS, accuracy, loss, skilled, write

EDGE = 60  # points; what lies beyond is drawn as an arrow at the edge
ARROWS = ("\u25c2", "\u25b8")


@pytest.fixture(scope="module")
def judged(grid_inputs):
    """The paper's claims that have an interval on the grid."""
    results = [judge(grid_inputs, claim) for claim in claims() if claim.number]
    return [result for result in results if not isnan(result.effect.low)]


def heights(axes):
    """The heights of the labelled lines of a panel."""
    by_label = {}
    for line in axes.lines:
        label = str(line.get_label())
        if not label.startswith("_"):
            by_label[label] = [float(height) for height in line.get_ydata()]
    return by_label


def panels(figure):
    titles = [axes.get_title(loc="left").replace("\n", " ") for axes in figure.axes]
    return {title: axes for title, axes in zip(titles, figure.axes, strict=True) if title}


@pytest.mark.parametrize(
    ("name", "number_of_panels"),
    [
        ("by_length", 2),
        ("learning", 1),
        ("losses", 1),
        ("sharpness", 4),
        ("similarity", 1),
        ("heat_map", 1),
        ("rate_distortion", 2),
    ],
)
def test_every_figure_of_a_grid_is_drawn_for_both_widths(name, number_of_panels, grid_inputs):
    measured: Any = Tables(grid_inputs) if name == "by_length" else grid_inputs
    draw = getattr(figures, name)
    for width in (PAGE, PHONE):
        figure = draw(measured, width)
        drawn = panels(figure)
        left_edges = {round(axes.get_position().x0, 2) for axes in drawn.values()}

        assert figure.get_figwidth() == width
        assert len(drawn) == number_of_panels
        for axes in drawn.values():
            assert axes.lines or axes.images
        is_one_column = width == PHONE or number_of_panels == 1
        assert (len(left_edges) == 1) == is_one_column


def test_what_was_not_measured_has_no_figure(tmp_path):
    bare = load([write(tmp_path, results=[accuracy(0.5)])])
    not_run = [judge(bare, claim) for claim in claims() if claim.primary]

    for draw in (
        figures.learning,
        figures.losses,
        figures.sharpness,
        figures.similarity,
        figures.heat_map,
    ):
        assert draw(bare).axes == []
    assert figures.held(bare).axes == []
    assert figures.forest_plot(not_run).axes == []


def test_the_loss_on_each_task_is_that_of_its_shortest_prompts(tmp_path):
    curves = [
        loss(10, 1.0, task="parity", train_length=128),
        loss(10, 2.0, task="parity", train_length=512),
        loss(10, 3.0, task="copying", train_length=512),
    ]
    inputs = load([write(tmp_path, results=[accuracy(0.5)], curves=curves)])

    drawn = panels(figures.losses(inputs))

    assert drawn.keys() == {"Parity", "Copying"}
    assert heights(drawn["Parity"]) == {"meta": [1.0]}
    assert heights(drawn["Copying"]) == {"meta": [3.0]}


def test_accuracy_by_length_is_the_mean_of_the_runs_next_to_the_papers(grid_inputs):
    drawn = heights(panels(figures.by_length(Tables(grid_inputs)))["List recall"])

    mean_seed = (0 + 1 + 2) / 3  # each seed takes two points off
    expected = [
        100 * skilled("meta", "list_recall", length, 512) - 2 * mean_seed for length in GRID_LENGTHS
    ]
    assert drawn["meta"] == pytest.approx(expected)
    assert drawn["the paper's meta"] == [100.0, 99.3, 58.9]
    assert drawn["the paper's gpt2, learned positions"][:2] == [19.8, 3.6]


@pytest.mark.parametrize("width", [PAGE, PHONE])
def test_the_forest_has_the_interval_of_every_claim(width, judged):
    expected_intervals, expected_points, expected_arrows = [], [], 0
    for result in judged:
        scale = 100 if result.claim.unit == "points" else 5 / result.claim.smallest
        low, high, value = (
            scale * end for end in (result.effect.low, result.effect.high, result.effect.value)
        )
        expected_intervals.append([max(-EDGE, min(EDGE, low)), max(-EDGE, min(EDGE, high))])
        expected_points.append(max(-EDGE, min(EDGE, value)))
        expected_arrows += (abs(low) > EDGE) + (abs(high) > EDGE)
    assert len(judged) > 5

    [axes] = figures.forest_plot(judged, width).axes

    drawn = [list(line.get_xdata()) for line in axes.lines]
    intervals = [ends for ends in drawn if len(ends) == 2]
    points = [ends[0] for ends in drawn if len(ends) == 1]
    approximate = [pytest.approx(ends) for ends in expected_intervals]
    assert intervals == approximate
    assert points == pytest.approx(expected_points)
    texts = [text.get_text() for text in axes.texts]
    arrows = sum(text in ARROWS for text in texts)
    assert arrows == expected_arrows
    written = " | ".join(" ".join(text.split()) for text in texts)
    for result in judged:
        assert result.claim.text in written
        assert result.claim.question in written


def test_verdicts_differ_in_colour_and_in_shape():
    looks = [*figures.MARKERS.values(), figures.OPEN]
    colours = {colour for colour, _ in looks}
    markers = {marker for _, marker in looks}

    assert len(colours) == len(markers) == len(looks) == 4


def test_equal_figures_give_equal_bytes(judged):
    first = png(figures.forest_plot(judged[:3]))
    second = png(figures.forest_plot(judged[:3]))

    assert first == second
    assert first.startswith(b"\x89PNG")
