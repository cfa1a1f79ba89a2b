"""Figures: the same bytes for the same input, the same look for the same model, and no state left behind."""

import math
import subprocess
import sys

from matplotlib.colors import to_hex
from report_inputs import accuracies, accuracy, beyond_table, curves, meta_best, other_results

from metatokens.report.figures import (
    PHONE,
    fine_tuning,
    headline,
    marker_conditions,
    palette,
    png,
    pretraining,
    swatch,
)
from metatokens.report.inputs import CurvePoint

STYLES = palette(["gpt2", "pause", "twin", "meta"])


def points(**fields: object) -> list[CurvePoint]:
    return [CurvePoint.model_validate(point | fields) for point in curves(models=("gpt2", "meta"))]


def test_the_four_models_differ_in_colour_dashes_and_marker() -> None:
    for attribute in ("colour", "dashes", "marker"):
        assert len({getattr(style, attribute) for style in STYLES.values()}) == 4


def test_a_model_looks_the_same_whatever_else_is_shown() -> None:
    assert palette(["other", "meta", "more"])["meta"] == palette(["meta"])["meta"] == STYLES["meta"]


def test_further_models_and_variants_are_told_apart() -> None:
    styles = palette(["gpt2", "meta · rope", "meta · learned", "ant", "bee"])
    assert len(set(styles.values())) == 5
    assert styles["meta · rope"].colour == styles["meta · learned"].colour == STYLES["meta"].colour
    assert styles["ant"].colour not in {style.colour for style in STYLES.values()}


def test_a_swatch_has_the_marker_of_the_figure() -> None:
    square = swatch(STYLES["gpt2"])
    corners = {tuple(map(float, point.split(","))) for point in square["points"].split()}
    half = STYLES["gpt2"].size / 2
    assert corners == {(x, y) for x in (-half, half) for y in (-half, half)}


def test_headline_draws_every_value_of_every_task() -> None:
    results = [*accuracies(meta_best), *other_results()]
    axes = headline(results, STYLES).axes
    assert [panel.get_title(loc="left") for panel in axes] == ["List recall", "Segment counting", "Parity", "Copying"]
    for panel, task in zip(axes, ("list_recall", "segment_counting", "parity", "copying"), strict=True):
        drawn = {line.get_label(): line for line in panel.get_lines()}
        for model in STYLES:
            shown = dict(zip(drawn[model].get_xdata(), drawn[model].get_ydata(), strict=True))
            expected = {
                result.length: 100 * (result.value or 0)
                for result in results
                if (result.model, result.task, result.condition, result.metric) == (model, task, "paper", "exact_match")
            }
            assert shown == expected
            assert to_hex(drawn[model].get_color()) == STYLES[model].colour


def test_a_length_that_cannot_be_run_leaves_a_gap() -> None:
    panel = headline(accuracies(beyond_table), STYLES).axes[0]
    [gpt2] = [line for line in panel.get_lines() if line.get_label() == "gpt2"]
    assert [math.isnan(value) for value in gpt2.get_ydata()] == [False, False, True, True]


def test_panels_stand_in_one_column_on_a_phone() -> None:
    figure = headline(accuracies(meta_best), STYLES, PHONE)
    assert len({round(panel.get_subplotspec().colspan.start) for panel in figure.axes}) == 1
    assert len({panel.get_subplotspec().rowspan.start for panel in figure.axes}) == 4


def test_the_same_figure_gives_the_same_bytes() -> None:
    results = [*accuracies(meta_best), *other_results()]
    first, second = (png(marker_conditions(results, STYLES, "list_recall", PHONE)) for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")
    assert b"matplotlib" not in first


def test_awkward_losses_and_names_are_drawn() -> None:
    for loss in (math.nan, 0.0, 1e9):
        assert png(fine_tuning(points(loss=loss, task="parity"), STYLES))
    odd = [point.model_copy(update={"model": "a$b$c_^{"}) for point in points(task="parity")]
    styles = palette(["a$b$c_^{"])
    assert png(fine_tuning(odd, styles))
    assert png(pretraining(odd, styles, None))
    assert png(headline([accuracy("a$b$c_^{", "x$y$", "paper", 128, 0.5)], styles))


def test_the_unigram_is_drawn_as_a_loss() -> None:
    panel = pretraining(points(), STYLES, unigram=400.0).axes[0]
    assert any(list(line.get_ydata()) == [math.log(400.0)] * 2 for line in panel.get_lines())


def test_no_global_figure_state_is_used() -> None:
    code = "import sys, metatokens.report.page; sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
