"""The figures: what is drawn is what was measured."""

from math import isnan

import pytest

from metatokens.looking.style import png
from metatokens.paper.claims import claims, judge
from metatokens.paper.frame import load
from metatokens.paper.report import figures
from metatokens.paper.report.tables import Tables
from tests.paper.report.made_lines import GRID_LENGTHS, accuracy, covered, skilled, write

EDGE = 60  # points; what lies beyond is drawn at the edge


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
        ("similarity", 1),
        ("heat_map", 1),
        ("rate_distortion", 2),
    ],
)
def test_every_figure_of_a_grid_is_drawn(name, number_of_panels, grid_inputs):
    drawn = panels(getattr(figures, name)(Tables(grid_inputs)))

    assert len(drawn) == number_of_panels
    for axes in drawn.values():
        assert axes.lines or axes.images


@pytest.mark.parametrize(
    "name",
    ["learning", "similarity", "heat_map", "covered", "rate_distortion"],
)
def test_what_was_not_measured_has_no_figure(name, tmp_path):
    bare = Tables(load([write(tmp_path, results=[accuracy(0.5)])]))

    assert getattr(figures, name)(bare).axes == []


def test_accuracy_by_length_is_the_mean_of_the_runs_next_to_the_papers(grid_inputs):
    drawn = heights(panels(figures.by_length(Tables(grid_inputs)))["List recall"])

    mean_seed = (0 + 1 + 2) / 3  # each seed takes two points off
    expected = [
        100 * skilled("meta", "list_recall", length, 512) - 2 * mean_seed for length in GRID_LENGTHS
    ]
    assert drawn["meta"] == pytest.approx(expected)
    assert drawn["the paper's meta"] == pytest.approx([100.0, 99.3, 58.9])
    assert drawn["the paper's gpt2"][:2] == pytest.approx([19.8, 3.6])


def test_a_bar_is_the_accuracy_with_the_text_in_sight_or_covered(tmp_path):
    drawn = panels(figures.covered(Tables(load([covered(tmp_path)]))))

    [axes] = drawn.values()
    widths = [bar.get_width() for bar in axes.patches]
    texts = [text.get_text() for text in axes.texts]
    assert widths == pytest.approx([19.0, 0.4, 99.2, 99.8])
    assert texts[0].startswith("pause, text in sight: 19.0 (")
    assert texts[-1].startswith("meta, text covered: 99.8 (")


def test_the_figure_of_the_claims_has_the_interval_of_each(judged):
    expected_intervals, expected_points = [], []
    for result in judged:
        scale = 100 if result.claim.unit == "points" else 5 / result.claim.smallest
        low, high, value = (
            max(-EDGE, min(EDGE, scale * end))
            for end in (result.effect.low, result.effect.high, result.effect.value)
        )
        expected_intervals += [low, high]
        expected_points.append(value)
    assert len(judged) > 5

    [axes] = figures.claims(judged).axes

    intervals, points = [], []
    for line in axes.lines:
        ends = [float(end) for end in line.get_xdata()]
        if line.get_marker() == "None" and line.get_ydata()[0] > 1:
            intervals += ends
        elif line.get_marker() not in ("None", "|"):
            points += ends
    assert intervals == pytest.approx(expected_intervals)
    assert points == pytest.approx(expected_points)
    written = " | ".join(" ".join(text.get_text().split()) for text in axes.texts)
    for result in judged:
        assert result.claim.text in written
        assert result.claim.question in written


def test_equal_figures_give_equal_bytes(judged):
    first = png(figures.claims(judged[:3]))
    second = png(figures.claims(judged[:3]))

    assert first == second
    assert first.startswith(b"\x89PNG")
