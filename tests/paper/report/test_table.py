"""The engine of the tables, against a slow reader of the lines: plain Python, Student's t from a printed table."""

from math import exp, log, sqrt
from statistics import fmean, stdev

import pytest
from markupsafe import Markup

from metatokens.paper.report import figures
from metatokens.paper.report.make_table import Cell, Table, make_table, models
from metatokens.paper.report.tables import STEPS, Tables
from metatokens.paper.report.text import Form
from tests.paper.report.made_lines import (
    accuracy,
    recall,
    shortcut,
    wilson,
)

T_975 = {1: 12.706204736, 2: 4.302652730, 3: 3.182446305}  # by degrees of freedom
PARITY = {"task": "parity", "position_embedding": "rope", "train_length": 512}
META = {"meta": {**PARITY, "model": "meta"}}
AT_512 = {"512": {"length": 512}}


def shown_mean(values, n=500):
    """What a cell of accuracies shows."""
    if len(values) == 1:
        low, high = wilson(values[0], n)
        return f"{100 * values[0]:.1f} ({100 * low:.1f} to {100 * high:.1f})"
    reach = T_975[len(values) - 1] * stdev(values) / sqrt(len(values))
    return f"{100 * fmean(values):.1f} \u00b1 {100 * reach:.1f}"


def runs(model, *values, **fields):
    tested = {"task": "parity", "model": model} | fields
    return [accuracy(value, **tested, seed=seed) for seed, value in enumerate(values)]


def test_a_cell_of_several_runs_and_of_one(read):
    inputs = read([*runs("meta", 0.9, 0.8, 0.7), *runs("gpt2", 0.5), *runs("twin", 0.6, 0.6)])
    rows = {model: {**PARITY, "model": model} for model in ("meta", "gpt2", "twin", "pause")}

    table = make_table(inputs, "Title", "model", rows, AT_512)

    assert table.rows == [
        ("meta", shown_mean([0.9, 0.8, 0.7]), "50.0"),
        ("gpt2", f"{shown_mean([0.5])} [1]", "50.0"),
        ("twin", "60.0 \u00b1 0.0 [2]", "50.0"),
    ]
    assert table.header == ("model", "512", "guessing")
    assert table.note == (
        "Exactly right, in %: the mean \u00b1 its 95 % interval over 3 training runs (Student's t); [k]: k runs, and "
        "of one run the interval over its prompts. n = 500 prompts a run."
    )


def test_each_run_is_shown_when_asked_for(read):
    table = make_table(read(runs("meta", 0.9, 0.8)), "", "", META, AT_512, by_seed=True)

    assert table.rows[0][1] == (shown_mean([0.9, 0.8]), "runs 90.0 80.0")


def test_the_best_shortcut_is_a_row_where_lengths_are_columns(read):
    inputs = read(
        [
            *runs("meta", 0.9),
            accuracy(0.7, task="parity", length=256),
            shortcut(0.6, "parity", 512),
            shortcut(0.55, "parity", 512, model="another"),
            shortcut(0.52, "parity", 256),
        ]
    )

    table = make_table(inputs, "", "", META, {"256": {"length": 256}} | AT_512)

    assert table.rows[1:] == [
        ("best shortcut", "52.0", "60.0"),
        ("guessing", "50.0", "50.0"),
    ]


def test_logarithms_are_shown_raised():
    cell = Cell({0: log(100), 1: log(400)})
    reach = T_975[1] * (log(400) - log(100)) / sqrt(2) / sqrt(2)
    low, high = exp(log(200) - reach), exp(log(200) + reach)

    assert cell.shown(STEPS) == f"200 ({low:,.0f} to {high:,.0f})"
    assert cell.shown(Form("nats", digits=2)).startswith("5.30 \u00b1 ")


def test_how_soon_counts_runs_that_do_not_learn(read):
    learns = [recall(step, exact, seed=0) for step, exact in ((100, 0.5), (200, 0.95), (300, 0.95))]
    falls_back = [
        recall(step, exact, seed=1) for step, exact in ((100, 0.5), (200, 0.95), (300, 0.8))
    ]

    [(label, shown)] = Tables(read([accuracy(0.5)], curves=learns + falls_back)).sooner().rows

    assert label == "meta"
    assert shown[0].startswith(f"{sqrt(200 * 300):.0f} (")
    assert shown[1:] == ("1 not learned",)


def test_rows_are_named_by_what_sets_them_apart(read):
    meta_twice = [*runs("meta", 0.9), *runs("meta", 0.9, train_length=128)]
    inputs = read([*meta_twice, *runs("gpt2", 0.9), *runs("a b", 0.1)])

    named = models(inputs, metric="exact_match", task="parity")

    assert list(named) == [
        "gpt2, to 512",
        "meta, to 128",
        "meta, to 512",
        "a b, to 512",
    ]
    assert named["meta, to 128"]["train_length"] == 128


def test_a_table_in_markdown():
    table = Table(
        "A_b",
        ("", "n", "where"),
        [("a|b", ("1.0", "2"), "128 \u2192 256"), (Markup("`c`"), "\u2013", "*x*")],
        "So.",
    )

    assert table.markdown() == (
        "**A\\_b**\n\n|  | n | where |\n|---|---:|---|\n| a\\|b | 1.0<br>2 | 128 \u2192 256 |\n"
        "| `c` | \u2013 | \\*x\\* |\n\nSo.\n"
    )


def test_the_papers_figures_stand_below_ours(grid_inputs):
    table = Tables(grid_inputs).papers(7)

    rows = {label: cells for label, *cells in table.rows}
    assert table.rows[0][0] == "gpt2, learned positions, to 128"
    ours, papers = rows["meta, rotary positions, to 512"][0]
    assert ours != "\u2013"
    assert papers == "paper 100.0"


def test_other_recipes_are_shown_next_to_the_recipe_taken(read):
    short = {"train_length": 128, "length": 128}
    taken = [*runs("meta", 0.9, 0.8, **short), *runs("gpt2", 0.5, 0.7, **short)]
    twice_the_rate = runs("meta", 0.6, 0.4, **short, recipe="small/twice-rate")

    table = Tables(read([*taken, *twice_the_rate])).other_recipes("parity")

    assert table.header[:3] == ("model", "as above", "twice the rate")
    assert table.rows == [
        ("gpt2", shown_mean([0.5, 0.7]), "\u2013", "50.0"),
        ("meta", shown_mean([0.9, 0.8]), shown_mean([0.6, 0.4]), "50.0"),
    ]


def test_what_landmarks_hold_is_shown_with_what_is_kept_of_the_cache(read):
    alone = {
        "intervention": "landmarks_alone",
        "task": "list_recall",
        "train_length": 128,
        "length": 128,
    }

    def facts(number, variant=""):
        name = f"facts_{number}"
        recipe = f"small/{variant or name}"
        return alone | {
            "condition": name,
            "train_condition": name,
            "recipe": recipe,
            "kv_kept": 0.2 / number,
        }

    in_sight = facts(8, "facts_8-in-sight")
    inputs = read(
        [
            *runs("pause", 0.9, 0.92, **facts(1)),
            *runs("pause", 0.3, 0.32, **facts(8)),
            *runs("meta", 0.9, 0.92, **facts(1)),
            *runs("meta", 0.3, 0.32, **facts(8)),
            *runs("meta", 0.4, 0.5, **in_sight),
            *runs("meta", 0.95, 0.97, **in_sight | {"intervention": "", "kv_kept": None}),
            *runs("meta", 0.1, 0.2, **alone, kv_kept=0.02),
        ]
    )

    table = Tables(inputs).held()
    [axes] = figures.held(inputs).axes

    assert table.header == ("", "pause", "meta", "guessing")
    shown = {label: cells for label, *cells in table.rows}
    trained_in_sight = "eight facts per landmark, trained with all text in sight"
    assert shown == {
        "List recall, 2.0 % of the KV": ["\u2013", shown_mean([0.1, 0.2]), "10.0"],
        "one fact per landmark, 20.0 % of the KV": [
            shown_mean([0.9, 0.92]),
            shown_mean([0.9, 0.92]),
            "10.0",
        ],
        "eight facts per landmark, 2.5 % of the KV": [
            shown_mean([0.3, 0.32]),
            shown_mean([0.3, 0.32]),
            "10.0",
        ],
        f"{trained_in_sight}, tested likewise": [
            "\u2013",
            shown_mean([0.95, 0.97]),
            "10.0",
        ],
        f"{trained_in_sight}, 2.5 % of the KV": [
            "\u2013",
            shown_mean([0.4, 0.5]),
            "10.0",
        ],
    }
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["pause", "meta"]
    for line in axes.lines:
        assert line.get_xdata() == pytest.approx([2.5, 20])
        assert line.get_ydata() == pytest.approx([31, 91])
