"""The figures of what is inside the models and of accuracy by length: all seeds, legends, scales, nothing cut off."""

from itertools import product
from typing import Any

import pytest
from grid_inputs import accuracy, measurement, measurements, results
from matplotlib.figure import Figure

from metatokens.report import grid_figures, inner_figures
from metatokens.report.figures import PAGE, PHONE, small_multiples
from metatokens.report.grid import Grid
from metatokens.report.inputs import Inputs


def grid_of(*ones: Any) -> Grid:
    return Grid("small", Inputs([accuracy(0.5)], measurements=list(ones)))


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.parametrize("width", [PAGE, PHONE])
def test_sharpness_is_drawn_with_a_legend_for_both_attentions_and_the_output(width: float) -> None:
    figure = inner_figures.sharpness(grid_of(*measurements()), width)
    assert legend(figure) == ["98 % of values", "90 %", "50 %", "median"]
    assert titles(figure)[:6] == [
        "Attention logits, rope", "Second attention logits, rope", "Attention entropy, rope",
        "Second attention entropy, rope", "Output logits, rope", "Output entropy, rope",
    ]  # fmt: skip


def test_the_seeds_of_a_head_are_drawn_side_by_side() -> None:
    about: dict[str, Any] = {"analysis": "sharpness", "module": "attention", "layer": 0, "head": 0}
    spread = (-2.0, -1.5, -0.5, 0.0, 0.5, 1.5, 2.0)
    ones = [
        measurement(0.0, metric="attention_logit_change", seed=seed, quantiles=spread, **about) for seed in range(3)
    ]
    first = inner_figures.sharpness(grid_of(*ones), PAGE).axes[0]
    drawn = [line.get_xdata()[0] for line in first.get_lines() if line.get_label() == "median"]
    assert drawn == pytest.approx([-0.26, 0.0, 0.26])


def test_similarities_have_one_scale_and_say_where_bins_begin() -> None:
    ones = [
        measurement(
            0.5, analysis="residual", metric="similarity_centred", marker="context", layer=1, subject=subject,
            distance=distance, seed=seed, model=model,
        )
        for subject, distance, seed, model in product(("meta", "text"), (1, 2, 3, 8), range(2), ("meta", "pause"))
    ]  # fmt: skip
    panels = inner_figures.similarity(grid_of(*ones), PAGE).axes
    assert len({panel.get_ylim() for panel in panels[:2]}) == 1
    assert [text.get_text() for text in panels[0].texts] == ["each distance", "up to"]
    assert panels[0].texts[0].xy[0] == 3.5
    thin = [line for line in panels[0].get_lines() if line.get_linewidth() == 0.6]
    assert len(thin) == 2 * 2  # subjects, seeds


def test_the_heat_map_has_a_scale_and_a_panel_for_each_seed() -> None:
    ones = [
        measurement(
            0.5, analysis="residual", metric="similarity_to_final_centred", layer=layer, position=position, seed=seed,
            subject="meta" if position in (2, 5) else "text",
        )
        for layer, position, seed in product(range(2), range(6), range(2))
    ]  # fmt: skip
    figure = inner_figures.heat_map(grid_of(*ones), PAGE)
    assert [title for title in titles(figure) if title] == [
        f"Similarity to the final meta-token, centred: rope, seed {seed}" for seed in range(2)
    ]
    assert [axes.get_ylabel() for axes in figure.axes].count("cosine") == 2
    [marks] = [line for line in figure.axes[0].get_lines() if line.get_label() == "meta-token"]
    assert list(marks.get_xdata()) == [2, 5]


def test_the_seeds_of_a_curve_are_drawn_apart() -> None:
    about: dict[str, Any] = {"analysis": "rate_distortion", "subject": "meta", "split": "held_out"}
    ones = [
        measurement(value + 0.2 * fit + seed, metric=metric, beta=beta, seed=seed, fit_seed=fit, **about)
        for beta, rate, distortion in ((0.1, 4.0, 1.0), (1.0, 1.0, 3.0))
        for metric, value in (("rate", rate), ("distortion", distortion))
        for seed, fit in product((0, 2), range(2))
    ]
    mean, *seeds = inner_figures.rate_distortion(grid_of(*ones), PAGE).axes[0].get_lines()[:3]
    # By hand, at rate 2.1: the fits of seed 0 have 34/15 and 2.6, those of seed 2, not there yet, 5 and 5.2.
    assert list(mean.get_xdata()) == pytest.approx([2.1, 5.1])
    at_5 = (1 + 1.2 + (5 - 2.1 * 2 / 3) + (5.2 - 1.9 * 2 / 3)) / 4
    assert list(mean.get_ydata()) == pytest.approx([(34 / 15 + 2.6 + 5 + 5.2) / 4, at_5])
    assert [list(seed.get_ydata()) for seed in seeds] == [pytest.approx([3.1, 1.1]), pytest.approx([5.1, 3.1])]


def test_the_axis_of_rates_says_where_it_is_linear() -> None:
    panel = inner_figures.rate_distortion(grid_of(*measurements()), PAGE).axes[0]
    assert list(panel.get_xticks()) == [0, 5, 10, 15, 20, 30, 50, 100]
    assert [text.get_text() for text in panel.texts] == ["linear", "log"]
    looks = {line.get_label(): line for line in panel.get_lines() if not str(line.get_label()).startswith("_")}
    assert len({looks[model].get_marker() for model in ("gpt2", "twin", "meta")}) == 3
    assert looks["meta"].get_linewidth() > looks["twin"].get_linewidth() > looks["gpt2"].get_linewidth()
    assert looks["meta"].get_zorder() == looks["gpt2"].get_zorder()  # so that the one drawn last lies above
    assert list(looks).index("meta") < list(looks).index("twin") < list(looks).index("gpt2")


@pytest.mark.parametrize("width", [PAGE, PHONE])
def test_lengths_are_drawn_for_both_kinds_of_positions_beside_the_papers(width: float) -> None:
    figure = grid_figures.lengths(Grid("small", Inputs(results())), width)
    panels = dict(zip(titles(figure), figure.axes, strict=True))
    drawn = {
        title: {str(line.get_label()): line for line in panels[title].get_lines()}
        for title in ("List recall, rope, 512", "List recall, learned, 512")
    }
    assert "paper's gpt2" not in drawn["List recall, rope, 512"]  # it has learned positions
    assert {"gpt2", "meta", "gpt-neo", "paper's gpt2", "paper's meta", "paper's gpt-neo"} < set(
        drawn["List recall, learned, 512"]
    )
    assert list(drawn["List recall, learned, 512"]["paper's gpt-neo"].get_ydata())[:3] == [85.6, 86.0, 81.2]
    assert list(drawn["List recall, rope, 512"]["paper's meta"].get_ydata())[3] == 58.9
    assert list(drawn["List recall, rope, 512"]["guessing"].get_ydata()) == pytest.approx([10.0] * 6)
    assert {"guessing", "train length"} < set(legend(figure))


def test_random_positions_are_drawn_beside_plain_ones_trained_as_long() -> None:
    about: dict[str, Any] = {"model": "meta", "train_length": 128, "length": 128}
    plain = [
        accuracy(value, task=task, recipe=recipe, **about)
        for task, recipe, value in (
            ("list_recall", "small", 0.3), ("list_recall", "small/one-length", 0.7), ("parity", "small", 0.4)
        )
    ]  # fmt: skip
    figure = grid_figures.random_positions(Grid("small", Inputs(plain)), PAGE)
    drawn = {
        title: [list(line.get_ydata()) for line in axes.get_lines() if line.get_label() == "meta, plain positions"]
        for title, axes in zip(titles(figure), figure.axes, strict=True)
    }
    for note in ("random positions", "random ranges"):
        assert drawn[f"List recall, {note}"] == [[pytest.approx(70.0)]]
        assert drawn[f"Parity, {note}"] == [[pytest.approx(40.0)]]


def overlap(figure: Figure) -> bool:
    """Whether two titles touch, or a title or the legend leaves the picture."""
    figure.canvas.draw()
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes if axes.get_visible()]  # type: ignore[attr-defined]
    texts = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    edge = figure.bbox.width
    touching = any(a.overlaps(b) for number, a in enumerate(boxes) for b in boxes[:number] if a.width and b.width)
    return touching or any(box.x1 > edge for box in (*boxes, *texts))


@pytest.mark.parametrize("width", [PAGE, PHONE])
def test_titles_do_not_touch_and_nothing_is_cut_off(width: float) -> None:
    grid = Grid("small", Inputs(results(), measurements=measurements()))
    draws = (
        grid_figures.lengths, inner_figures.sharpness, inner_figures.similarity, inner_figures.heat_map,
        inner_figures.rate_distortion,
    )  # fmt: skip
    assert [draw.__name__ for draw in draws if overlap(draw(grid, width))] == []


def test_an_axis_is_named_once_where_its_neighbours_are_alike() -> None:
    def panel(name: str) -> Any:
        return lambda axes: axes.set(xlabel=name, ylabel="same")

    names = {"a": "one", "b": "one", "c": "one", "d": "other"}
    axes = small_multiples({title: panel(name) for title, name in names.items()}, {}, PAGE, across=2).axes
    assert [one.get_xlabel() for one in axes] == ["", "one", "one", "other"]
    assert [one.get_ylabel() for one in axes] == ["same", "", "same", ""]
