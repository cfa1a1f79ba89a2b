"""The figures: what is drawn is what was measured."""

from math import isnan
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metatokens.looking.style import PAGE, PHONE, palette, png, swatch
from metatokens.paper.report.figures import inside, lines
from metatokens.paper.report.frame import Inputs, load
from metatokens.paper.report.labels import labelled
from tests.paper.report.made_lines import LENGTHS, MODELS, accuracy, demo, grid, loss, skilled, write


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return load(grid(tmp_path_factory.mktemp("grid")))


def drawn(axes: Axes) -> dict[str, list[float]]:
    """The heights of the labelled lines of a panel."""
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): [float(value) for value in line.get_ydata()] for line in lines}


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left").replace("\n", " "): axes for axes in figure.axes if axes.get_title(loc="left")}


@pytest.mark.parametrize(
    ("draw", "titles"),
    [
        (lines.beside_the_paper, 4),
        (lines.lengths, 4 * 2 * 3),
        (lines.jumps, 2),
        (lines.learning, 1),
        (inside.sharpness, 4 + 2),
        (inside.similarity, 1),
        (inside.heat_map, 1),
        (inside.rate_distortion, 2),
    ],
)
def test_every_figure_of_a_grid_is_drawn_for_both_widths(draw, titles: int, inputs: Inputs) -> None:
    for width in (PAGE, PHONE):
        figure = draw(inputs, width)
        shown = panels(figure)
        assert (figure.get_figwidth(), len(shown)) == (width, titles)
        artists = [axes.lines or axes.images or axes.collections for axes in shown.values()]
        assert all(artists)
        columns = {round(axes.get_position().x0, 2) for axes in shown.values()}
        assert (len(columns) == 1) == (width == PHONE or titles == 1)


def test_what_was_not_measured_has_no_figure(tmp_path: Path) -> None:
    bare = load([write(tmp_path, results=[accuracy(0.5)])])
    for draw in (lines.learning, inside.sharpness, inside.similarity, inside.heat_map):
        assert draw(bare).axes == []


def test_accuracies_and_the_papers_stand_at_their_heights(inputs: Inputs) -> None:
    figure = panels(lines.lengths(inputs))
    shown = drawn(figure["List recall, rope, 512"])
    means = [100 * (skilled("meta", "list_recall", length, 512) - 1 / 50) for length in LENGTHS]  # of three seeds
    assert shown["meta"] == pytest.approx(means)
    assert shown["paper's meta"][:5] == [100.0, 100.0, 99.3, 58.9, 5.6]
    assert isnan(shown["paper's meta"][5])
    assert shown["floor"] == [10.0] * 6
    parity = drawn(figure["Parity, rope, 512"])
    assert parity["floor"] == pytest.approx([52.0] * 6)
    learned = drawn(figure["List recall, learned, 512"])
    assert learned["meta"] == pytest.approx([40.0] * 4)  # nothing where it cannot be run
    assert "paper's gpt-neo" in learned


def test_learning_and_what_is_inside_stand_at_their_heights(inputs: Inputs) -> None:
    [axes] = lines.learning(inputs).axes
    meta = [line for line in axes.lines if line.get_color() == lines.STYLES["meta"].colour]
    assert [list(line.get_ydata())[:3] for line in meta] == [
        pytest.approx([100 / 3, 200 / 3, 100]), pytest.approx([25, 50, 75])
    ]  # fmt: skip
    assert list(meta[0].get_xdata())[:2] == [300_000, 600_000]
    shown = drawn(panels(inside.similarity(inputs))["meta, rope"])
    assert shown["meta-token"] == pytest.approx([0.55 / distance for distance in (1, 2, 3, 4, 8, 16, 32)])
    [held_out, _] = panels(inside.rate_distortion(inputs)).values()
    assert drawn(held_out)["meta"] == pytest.approx([1.85, 1.55, 1.15])  # each the mean of two fits
    [image] = next(iter(panels(inside.heat_map(inputs)).values())).images
    assert image.get_array().tolist() == [[pytest.approx(position / 10) for position in range(10)]] * 3


def test_the_figures_of_another_run(tmp_path: Path) -> None:
    run = load([demo(tmp_path)])
    run.figures = labelled(run.figures)
    styles = palette(MODELS)
    figure = lines.accuracy(run, styles)
    assert list(panels(figure)) == ["List recall", "Segment counting", "Parity", "Copying"]
    shown = drawn(panels(figure)["List recall"])
    assert shown["twin"] == pytest.approx([100 * skilled("twin", "list_recall", length) for length in LENGTHS[:4]])
    conditions = panels(lines.marker_conditions(run, styles, "list_recall", PHONE))
    assert [drawn(axes)["meta"][0] for axes in conditions.values()] == pytest.approx([99.2, 10.0, 10.0])
    assert [text.get_text() for text in figure.legends[0].get_texts()][:4] == ["gpt2", "pause", "twin", "meta"]


def test_losses_are_drawn_in_the_order_of_steps(tmp_path: Path) -> None:
    points = [
        loss(step, value, model=model) for model in ("meta", "mine") for step, value in ((20, 3), (10, 5), (20, 2))
    ]
    points += [one | {"task": "parity", "train_length": 64} for one in points] + [loss(30, 4, model="$x_1$ {y}")]
    curves = labelled(load([write(tmp_path, results=[accuracy(0.5)], curves=points)]).curves)
    styles = palette(["meta", "mine", "$x_1$ {y}"])
    [axes] = lines.pretraining(curves, styles, 412.0).axes
    assert drawn(axes) == {"meta": [5, 2], "mine": [5, 2], "$x_1$ {y}": [4]}
    assert "unigram, held-out text" in [text.get_text() for text in axes.texts]
    [axes] = lines.fine_tuning(curves, styles).axes
    assert drawn(axes) == {"meta": [5, 2], "mine": [5, 2]}
    assert png(lines.fine_tuning(curves, styles, PHONE)).startswith(b"\x89PNG")


def test_every_label_has_a_look_of_its_own() -> None:
    styles = palette(["meta", "meta \u00b7 learned", "gpt2", "mine", "yours"])
    assert styles["meta"].colour == styles["meta \u00b7 learned"].colour == lines.STYLES["meta"].colour
    assert len({(style.colour, style.fill) for style in styles.values()}) == 5
    assert swatch(styles["gpt2"])["dashes"] == "1.8 2.16"
