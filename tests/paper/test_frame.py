"""The frames of everything that was read, on lines made up by hand."""

import json
import math
from pathlib import Path

import pytest

from metatokens.errors import UserError
from metatokens.paper.frame import learning_curves, load
from tests.paper.report.made_lines import (
    accuracy,
    inner,
    perplexity,
    recall,
    shortcut,
    write,
)

ROOT = Path(__file__).parents[2]


def test_a_later_line_of_the_same_figure_counts(read):
    inputs = read(
        [
            accuracy(0.1, hits="gAA=", n=10),
            accuracy(0.2),
            accuracy(0.5, recipe="small/jumps"),
        ]
    )

    assert inputs.preset == "small"
    assert inputs.measured()["value"].tolist() == [0.2]
    assert inputs.measured(variant=["", "jumps"])["value"].tolist() == [0.2, 0.5]


@pytest.mark.parametrize("recipe", ["gpu", None])
def test_lines_of_a_grid_and_of_other_runs_are_not_mixed(recipe, read):
    with pytest.raises(UserError, match=r"lines of the preset (small|gpu) and of other runs"):
        read([accuracy(0.5), accuracy(0.5, recipe=recipe)])
    with pytest.raises(UserError, match=r"lines of the preset (small|gpu) and of other runs"):
        read([accuracy(0.5)], curves=[recall(100, 0.5, recipe=recipe)])

    assert read([accuracy(0.5, recipe=recipe)], curves=[]).preset == recipe


def test_lines_of_two_presets_are_not_mixed(read):
    with pytest.raises(UserError, match="lines of the preset demo and of other runs"):
        read([accuracy(0.5, recipe="smoke"), accuracy(0.5, recipe="demo")])


def test_text_windows_and_recipes_of_no_preset_are_models_of_their_own(read):
    inputs = read(
        [
            accuracy(0.5, recipe="demo"),
            accuracy(0.5, recipe="mine/a"),
            accuracy(0.5, recipe="mine/b"),
            accuracy(0.5, recipe="demo", text_window=16),
            accuracy(0.5, recipe="demo", text_window=256),
            accuracy(0.5, recipe="demo", text="my/a.jsonl"),
            accuracy(0.5, recipe="demo", text="my/b.jsonl"),
        ],
        curves=[recall(100, 0.95, recipe="mine/a")],
    )

    names = [
        "meta",
        "meta, mine/a",
        "meta, mine/b",
        "meta, window 16",
        "meta, window 256",
        "meta, my/a.jsonl",
        "meta, my/b.jsonl",
    ]
    assert inputs.measured()["model"].tolist() == names
    shares = read([perplexity(40, 2), perplexity(50, 2, fraction=0.2)], curves=[]).measured(
        metric="perplexity", text="*"
    )
    assert shares["model"].tolist() == ["meta", "meta, k = 0.2"]
    assert inputs.curves["model"].tolist() == ["meta, mine/a"]


def test_an_accuracy_has_what_a_constant_answer_and_the_best_shortcut_score(read):
    counting = {"task": "segment_counting", "chance": None}
    inputs = read(
        [
            accuracy(0.5, task="parity"),
            accuracy(0.5, **counting, length=128),
            accuracy(0.5, **counting, length=256),
            accuracy(0.5, **counting, length=128, condition="decoy"),
            shortcut(0.2, "segment_counting", 128, model="the commonest answer"),
            shortcut(0.4, "segment_counting", 128, model="a table"),
            shortcut(0.3, "segment_counting", 256, model="a table"),
        ]
    )

    accuracies = inputs.figures.query("metric == 'exact_match'")
    assert accuracies["chance"].fillna(-1).tolist() == [0.5, 0.2, -1, -1]
    assert accuracies["shortcut"].fillna(-1).tolist() == [-1, 0.4, 0.3, -1]


def curve(*accuracies, **fields):
    """A learning curve with a point every 100 steps."""
    fields = {"task": "parity", "seed": 10} | fields
    return [
        recall(100 * number, exact, **fields) for number, exact in enumerate(accuracies, start=1)
    ]


def test_curves_are_those_of_plain_runs_at_the_first_train_length(read):
    not_drawn = [*curve(0.1, train_length=512), *curve(0.99, recipe="small/landmark")]

    inputs = read([accuracy(0.5)], curves=[*curve(0.5, 0.95), *curve(0.2, seed=11), *not_drawn])

    drawn = learning_curves(inputs.curves)
    assert drawn.groupby("seed")["value"].agg(list).to_dict() == {10: [0.5, 0.95], 11: [0.2]}


def test_a_distortion_at_a_rate_is_the_mean_of_a_runs_fits(read):
    """Curves start at rate 0 with the answers' entropy, 2 nats: at rate 1 the two fits have 1.5 and 1."""

    def point(metric, value, **fields):
        return inner("rate_distortion", metric, value, None, split="held_out", **fields)

    first, second = ({"beta": 0.1, "subject": "meta", "fit_seed": seed} for seed in (0, 1))
    inputs = read(
        [accuracy(0.5)],
        analysis=[
            point("answer_entropy", 2.0),
            point("rate", 2.0, **first),
            point("distortion", 1.0, **first),
            point("rate", 2.0, **second),
            point("distortion", 0.0, **second),
        ],
    )

    selected = inputs.measured(metric="distortion_at_rate", subject="meta", rate=1.0)
    assert selected["value"].tolist() == [pytest.approx(1.25)]


def test_a_slowdown_is_per_text_token_with_the_interval_of_a_median(tmp_path):
    benchmark = ROOT / "benchmarks" / "results" / "decode_8.jsonl"
    lines = [json.loads(text) for text in benchmark.read_text().splitlines()]
    [line] = (
        line
        for line in lines
        if (line["model"], line["against"]) == ("dense, inserting", "meta, inserting")
    )
    run = write(tmp_path, results=[accuracy(0.5)])

    slowdowns = load([run, benchmark]).measured(metric="slowdown")

    [row] = slowdowns.query("model == 'dense, inserting' and against == 'meta, inserting'").to_dict(
        "records"
    )
    error = 1.253 * (line["ratio_high"] - line["ratio_low"]) / 1.349 / math.sqrt(line["n"])
    assert row["value"] == line["ratio"]  # both have as many text tokens
    assert row["batch"] == 8
    assert row["high"] - row["value"] == pytest.approx(1.96 * error)
