"""The engine of the tables, against a slow reader of the lines: plain Python, Student's t from a printed table."""

from math import sqrt
from statistics import fmean, stdev

import pandas as pd
from markupsafe import Markup

from metatokens.paper.report.make_table import Table, labelled, make_table
from metatokens.paper.report.tables import Tables
from tests.paper.report.made_lines import accuracy, shortcut, wilson

T_975 = {2: 4.302652730, 3: 3.182446305}  # by degrees of freedom
PARITY = {"task": "parity", "position_embedding": "rope", "train_length": 512}
META = {"meta": {**PARITY, "model": "meta", "metric": "exact_match"}}
AT_512 = {"512": {"length": 512}}


def shown_mean(values, n=500):
    """What a cell of accuracies shows."""
    if len(values) == 1:
        low, high = wilson(values[0], n)
        return f"{100 * values[0]:.1f} ({100 * low:.1f} to {100 * high:.1f})"
    if len(values) == 2:
        return f"{100 * fmean(values):.1f} ({', '.join(f'{100 * value:.1f}' for value in values)})"
    reach = T_975[len(values) - 1] * stdev(values) / sqrt(len(values))
    return f"{100 * fmean(values):.1f} \u00b1 {100 * reach:.1f}"


def runs(model, *values, **fields):
    tested = {"task": "parity", "model": model} | fields
    return [accuracy(value, **tested, seed=seed) for seed, value in enumerate(values)]


def test_a_cell_of_several_runs_of_two_and_of_one(read):
    inputs = read([*runs("meta", 0.9, 0.8, 0.7), *runs("gpt2", 0.5), *runs("twin", 0.6, 0.6)])
    rows = {model: {**PARITY, "model": model} for model in ("meta", "gpt2", "twin", "pause")}

    table = make_table(inputs.figures, rows, AT_512, title="Title", corner="model")

    assert table.rows == [
        ("meta", shown_mean([0.9, 0.8, 0.7])),
        ("gpt2", f"{shown_mean([0.5])} [1]"),
        ("twin", "60.0 (60.0, 60.0)"),
        ("guessing", "50.0"),
    ]
    assert table.header == ("model", "512")
    assert table.note == (
        "Exactly right, in %: the mean and its 95 % interval over 3 runs (Student's t); of two runs the mean and both; "
        "one run with its 95 % interval over prompts; [k]: k runs. n = 500 prompts a run."
    )


def test_each_run_is_shown_when_asked_for(read):
    figures = read(runs("meta", 0.9, 0.8, 0.7)).figures

    table = make_table(figures, META, AT_512, by_seed=True)

    assert table.rows[0][1] == (shown_mean([0.9, 0.8, 0.7]), "runs 90.0 80.0 70.0")


def test_the_best_shortcut_is_a_row_where_columns_have_their_own_and_a_column_where_rows_have(read):
    inputs = read(
        [
            *runs("meta", 0.9),
            accuracy(0.7, task="parity", length=256),
            shortcut(0.6, "parity", 512),
            shortcut(0.55, "parity", 512, model="another"),
            shortcut(0.52, "parity", 256),
        ]
    )
    at_256 = {"256": {"length": 256}}

    table = make_table(inputs.figures, META, at_256 | AT_512)
    turned = make_table(inputs.figures, at_256 | AT_512, META)

    assert table.rows[1:] == [("best shortcut", "52.0", "60.0"), ("guessing", "50.0", "50.0")]
    assert turned.header == ("", "meta", "best shortcut", "guessing")
    floors = [row[2:] for row in turned.rows]
    assert floors == [("52.0", "50.0"), ("60.0", "50.0")]


def test_rows_are_named_by_what_sets_them_apart(read):
    meta_twice = [*runs("meta", 0.9), *runs("meta", 0.9, train_length=128)]
    inputs = read([*meta_twice, *runs("gpt2", 0.9), *runs("a b", 0.1)])
    figures = inputs.measured(task="parity")

    named = labelled(figures, ["model", "position_embedding", "train_length"])

    assert list(named) == ["gpt2, to 512", "meta, to 128", "meta, to 512", "a b, to 512"]
    assert named["meta, to 128"]["train_length"] == 128
    assert list(labelled(figures, ["train_length"])) == ["to 128", "to 512"]


def test_rows_that_read_alike_stay_apart():
    figures = pd.DataFrame({"variant": ["half rate", "half:rate"], "value": [0.1, 0.2]})

    named = labelled(figures, ["variant"])

    assert list(named) == ["half rate", "half rate (2)"]


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
    [by_length, _] = Tables(grid_inputs).of("by_length")

    rows = {label: cells for label, *cells in by_length.rows}
    assert rows["meta, rotary positions, to 512"][0][1] == "paper 100.0"


def test_extended_windows_are_compared_at_the_papers_lengths(read):
    extended = {"metric": "token_accuracy", "recipe": "small/yarn4", "train_length": 1024}
    inputs = read([accuracy(0.9, **extended, length=1024)])

    [table] = Tables(inputs).of("yarn")

    assert (
        table.rows[0][1][1] == "paper 90.2"
    )  # trained to and tested at 4,096 of a window of 4,096


def test_other_recipes_are_shown_next_to_the_recipe_taken(read):
    short = {"train_length": 128, "length": 128}
    taken = [*runs("meta", 0.9, 0.8, 0.8, **short), *runs("gpt2", 0.5, 0.7, 0.7, **short)]
    twice_the_rate = runs("meta", 0.6, 0.4, **short, recipe="small/twice-rate")

    [table] = Tables(read([*taken, *twice_the_rate])).of("other_recipes")

    assert table.header == ("", "plain", "twice the rate")
    assert table.rows == [
        ("gpt2", shown_mean([0.5, 0.7, 0.7]), "\u2013"),
        ("meta", shown_mean([0.9, 0.8, 0.8]), shown_mean([0.6, 0.4])),
        ("guessing", "50.0", "50.0"),
    ]


def test_what_landmarks_hold_is_shown_with_what_is_kept_of_the_cache(read):
    facts = {
        "task": "list_recall",
        "train_length": 128,
        "length": 128,
        "condition": "facts_4",
        "train_condition": "facts_4",
    }
    alone = {"intervention": "landmarks_alone", "kv_kept": 0.025}
    inputs = read(
        [
            *runs("pause", 0.3, **facts, **alone, recipe="small/facts_4"),
            *runs("meta", 0.4, **facts, **alone, recipe="small/facts_4-in-sight"),
            *runs("meta", 0.95, **facts, recipe="small/facts_4-in-sight"),
        ]
    )

    [table] = Tables(inputs).of("facts")

    assert table.header == ("", "pause", "meta")
    in_sight = "trained with the text in sight"
    assert table.rows == [
        ("text covered", (shown_mean([0.3]), "KV 2.5 %"), "\u2013"),
        (in_sight, "\u2013", shown_mean([0.95])),
        (f"{in_sight}, text covered", "\u2013", (shown_mean([0.4]), "KV 2.5 %")),
        ("guessing", "10.0", "10.0"),
    ]
