"""The engine of the tables, against a slow reader of the lines: plain Python, Student's t from a printed table."""

from collections.abc import Callable
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from markupsafe import Markup

from metatokens.paper.frame import Inputs, load
from metatokens.paper.report import figures
from metatokens.paper.report.table import Cell, Table, make_table, models
from metatokens.paper.report.tables import STEPS, Tables
from metatokens.paper.report.text import Form
from tests.paper.report.made_lines import Line, accuracy, grid, inner, recall, shortcut, wilson

T_975 = {1: 12.706204736, 2: 4.302652730, 3: 3.182446305}  # by degrees of freedom
ROW = {"task": "parity", "position_embedding": "rope", "train_length": 512}
Read = Callable[..., Inputs]
LANDMARKS = {"intervention": "landmarks_alone", "task": "list_recall", "train_length": 128, "length": 128}


def slow(values: list[float], n: int = 500) -> str:
    """What a cell of accuracies shows."""
    if len(values) == 1:
        return "{:.1f} ({:.1f} to {:.1f})".format(*(100 * end for end in (values[0], *wilson(values[0], n))))
    reach = T_975[len(values) - 1] * stdev(values) / sqrt(len(values))
    return f"{100 * fmean(values):.1f} \u00b1 {100 * reach:.1f}"


def runs(model: str, *values: float, **fields: Any) -> list[Line]:
    about = {"task": "parity", "model": model} | fields
    return [accuracy(value, **about, seed=seed) for seed, value in enumerate(values)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return load(grid(tmp_path_factory.mktemp("grid")))


def test_every_accuracy_by_length_is_what_a_slow_reader_finds(inputs: Inputs) -> None:
    found: dict[tuple[Any, ...], list[float]] = {}
    for line in inputs.read.results:
        is_plain = (
            line.condition == line.train_condition == "paper" and not line.intervention and line.recipe == "small"
        )
        if line.metric == "exact_match" and is_plain and line.value is not None:
            place = f", to {line.train_length}"
            place = f", {'rotary' if line.position_embedding == 'rope' else 'learned'} positions{place}"
            key = line.task, line.model, place, f"{line.length:,}"
            found.setdefault(key, []).append(line.value)
    compared = 0
    for task in ("list_recall", "parity"):
        table = Tables(inputs).by_length(task)
        for label, *cells in table.rows:
            for column, shown in zip(table.header[1:], cells, strict=True):
                if label not in ("best shortcut", "guessing"):
                    model, _, place = label.partition(",")
                    place = f",{place}" if task == "list_recall" else f", rotary positions,{place}"
                    values = found.get((task, model, place, column), [])
                    own = shown if isinstance(shown, str) else shown[0]
                    assert own == (
                        slow(values) + (f" [{len(values)}]" if len(values) < 3 else "") if values else "\u2013"
                    )
                    compared += bool(values)
    assert compared == len(found) > 40


def test_a_cell_of_several_runs_and_of_one(read: Read) -> None:
    inputs = read([*runs("meta", 0.9, 0.8, 0.7), *runs("gpt2", 0.5), *runs("twin", 0.6, 0.6)])
    rows = {one: {**ROW, "model": one} for one in ("meta", "gpt2", "twin", "pause")}
    table = make_table(inputs, "Title", "model", rows,
                     {"512": {"length": 512}})  # fmt: skip
    assert table.rows == [
        ("meta", f"{slow([0.9, 0.8, 0.7])}", "50.0"),
        ("gpt2", f"{slow([0.5])} [1]", "50.0"),
        ("twin", "60.0 \u00b1 0.0 [2]", "50.0"),
    ]
    assert table.header == ("model", "512", "guessing")
    assert table.note == (
        "Exactly right, in %: the mean \u00b1 its 95 % interval over 3 training runs (Student's t); [k]: k runs, and "
        "of one run the interval over its prompts. n = 500 prompts a run."
    )


def test_each_run_is_shown_when_asked_for(read: Read) -> None:
    about = {**ROW, "model": "meta", "length": 512}
    inputs = read(runs("meta", 0.9, 0.8))
    table = make_table(inputs, "", "", {"meta": about}, {"it": {}}, by_seed=True)
    assert table.rows[0][1] == (slow([0.9, 0.8]), "runs 90.0 80.0")


def test_rows_without_a_figure_are_kept_when_asked_for(read: Read) -> None:
    inputs = read(runs("meta", 0.9))
    rows = {one: {**ROW, "model": one} for one in ("meta", "gpt2")}
    kept = [make_table(inputs, "", "", rows, {"512": {"length": 512}}, whole=whole).rows for whole in (False, True)]
    assert [[row[0] for row in found] for found in kept] == [["meta"], ["meta", "gpt2"]]
    assert kept[1][1][1] == "\u2013"
    assert make_table(inputs, "", "", {}, {}).note == "Not run."


def test_the_best_shortcut_is_a_column_or_a_row(read: Read) -> None:
    lines = [*runs("meta", 0.9), *runs("gpt2", 0.8), accuracy(0.7, task="parity", length=256)]
    rates = [
        shortcut(0.6, "parity", 512),
        shortcut(0.55, "parity", 512, model="another"),
        shortcut(0.52, "parity", 256),
    ]
    inputs = read([*lines, *rates])
    rows = {one: {**ROW, "model": one} for one in ("meta", "gpt2")}
    columns = {str(length): {"length": length} for length in (256, 512)}
    by_length = make_table(inputs, "", "", rows, columns)
    assert [row[:1] + row[2:] for row in by_length.rows[2:]] == [("best shortcut", "60.0"), ("guessing", "50.0")]
    assert by_length.rows[2][1] == "52.0"
    turned = make_table(inputs, "", "", {one: {**ROW, **row} for one, row in columns.items()}, {
        one: {"model": one} for one in rows
    })  # fmt: skip
    assert turned.header[3:] == ("best shortcut", "guessing")
    assert [row[3:] for row in turned.rows] == [("52.0", "50.0"), ("60.0", "50.0")]


def test_heads_of_a_run_are_averaged(read: Read) -> None:
    heads = [inner("sharpness", "premise_holds", value, head=head) for head, value in enumerate((0.2, 0.4))]
    cell = Cell.of(read([accuracy(0.5)], analysis=heads).select(metric="premise_holds"))
    assert cell.runs == {0: pytest.approx(0.3)}
    assert cell.estimate()[1:] == pytest.approx((0.25, 0.35))


def test_logarithms_are_shown_raised() -> None:
    cell = Cell({0: log(100), 1: log(400)})
    reach = T_975[1] * (log(400) - log(100)) / sqrt(2) / sqrt(2)
    ends = [f"{exp(log(200) + sign * reach):,.0f}" for sign in (-1, 1)]
    assert cell.shown(STEPS) == f"200 ({ends[0]} to {ends[1]})"
    assert cell.shown(Form("nats", digits=2)).startswith("5.30 \u00b1 ")


def test_how_soon_counts_runs_that_do_not_learn(read: Read) -> None:
    points = [recall(step, exact, seed=seed) for seed, found in enumerate(((0.5, 0.95, 0.95), (0.5, 0.95, 0.8)))
              for step, exact in zip((100, 200, 300), found, strict=True)]  # fmt: skip
    [(label, shown)] = Tables(read([accuracy(0.5)], curves=points)).sooner().rows
    assert label == "meta"
    assert shown[0].startswith(f"{sqrt(200 * 300):.0f} (")
    assert shown[1:] == ("1 not learned",)


def test_rows_are_named_by_what_sets_them_apart(read: Read) -> None:
    lines = [*runs("meta", 0.9), *runs("meta", 0.9, train_length=128), *runs("gpt2", 0.9), *runs("a b", 0.1)]
    named = models(read(lines), metric="exact_match", task="parity")
    assert [*named] == ["gpt2, to 512", "meta, to 128", "meta, to 512", "a b, to 512"]
    assert named["meta, to 128"]["train_length"] == 128
    assert [*models(read(runs("meta", 0.9)), task="parity")] == ["meta"]


def test_a_table_in_markdown() -> None:
    rows = [("a|b", ("1.0", "2"), "128 \u2192 256"), (Markup("`c`"), "\u2013", "*x*")]
    assert Table("A_b", ("", "n", "where"), rows, "So.").markdown() == (
        "**A\\_b**\n\n|  | n | where |\n|---|---:|---|\n| a\\|b | 1.0<br>2 | 128 \u2192 256 |\n"
        "| `c` | \u2013 | \\*x\\* |\n\nSo.\n"
    )


def test_no_table_of_a_grid_is_without_figures(inputs: Inputs, tmp_path: Path) -> None:
    tables = Tables(inputs)
    names = ("learned", "sooner", "perplexity", "shortcuts", "sharpness", "premise", "caching", "attention_of_final",
             "rate_distortion")  # fmt: skip
    assert [one for one in names if not getattr(tables, one)().rows] == []
    assert [len(tables.each(one)) for one in ("by_length", "other_prompts", "yarn", "ablations")] == [2, 1, 1, 1]
    assert [row[0] for row in tables.papers(7).rows][:1] == ["gpt2, learned positions, to 128"]
    meta = {row[0]: row for row in tables.papers(7).rows}["meta, rotary positions, to 512"]
    assert meta[1][1] == "paper 100.0"
    assert meta[1][0] != "\u2013"


def test_other_recipes_are_shown_next_to_the_recipe_taken(read: Read) -> None:
    about = {"train_length": 128, "length": 128}
    lines = runs("meta", 0.9, 0.8, **about) + runs("gpt2", 0.5, 0.7, **about)
    lines += runs("meta", 0.6, 0.4, **about, recipe="small/twice-rate")
    lines += runs("gpt2", 0.3, **about, recipe="small/longer", task="copying")
    tables = Tables(read(lines + runs("gpt2", 0.2, **about, task="copying")))
    assert tables.other_recipes("parity").header[:3] == ("model", "as above", "twice the rate")
    assert tables.other_recipes("parity").rows == [
        ("gpt2", slow([0.5, 0.7]), "\u2013", "50.0"),
        ("meta", slow([0.9, 0.8]), slow([0.6, 0.4]), "50.0"),
    ]
    assert [table.title for table in tables.each("other_recipes")] == ["Parity", "Copying"]
    assert not Tables(read(runs("meta", 0.9, **about))).other_recipes("parity").rows


def test_what_landmarks_hold_is_shown_with_what_is_kept_of_the_cache(read: Read) -> None:
    def facts(number: int, variant: str = "", **fields: Any) -> Line:
        name = f"facts_{number}"
        about = LANDMARKS | {"condition": name, "train_condition": name, "recipe": f"small/{variant or name}"}
        return about | {"kv_kept": 0.2 / number} | fields

    lines = [line for model in ("pause", "meta") for number, value in ((1, 0.9), (8, 0.3))
             for line in runs(model, value, value + 0.02, **facts(number))]  # fmt: skip
    lines += runs("meta", 0.4, 0.5, **facts(8, "facts_8-in-sight"))
    lines += runs("meta", 0.95, 0.97, **facts(8, "facts_8-in-sight", intervention="", kv_kept=None))
    lines += runs("meta", 0.1, 0.2, **LANDMARKS | {"kv_kept": 0.02})
    table = Tables(read(lines)).held()
    assert table.header == ("", "pause", "meta", "guessing")
    assert {label: cells for label, *cells in table.rows} == {
        "List recall, 2.0 % of the KV": ["\u2013", slow([0.1, 0.2]), "10.0"],
        "one fact per landmark, 20.0 % of the KV": [*[slow([0.9, 0.92])] * 2, "10.0"],
        "eight facts per landmark, 2.5 % of the KV": [*[slow([0.3, 0.32])] * 2, "10.0"],
        "eight facts per landmark, trained with all text in sight, tested likewise": [
            "\u2013", slow([0.95, 0.97]), "10.0",
        ],
        "eight facts per landmark, trained with all text in sight, 2.5 % of the KV": [
            "\u2013", slow([0.4, 0.5]), "10.0",
        ],
    }  # fmt: skip
    [axes] = figures.held(read(lines)).axes
    kept = {line.get_label(): line.get_xdata().tolist() for line in axes.lines}
    assert kept == {"pause": pytest.approx([2.5, 20]), "meta": pytest.approx([2.5, 20])}
    assert axes.lines[0].get_ydata() == pytest.approx([31, 91])
    assert figures.held(read(runs("meta", 0.5))).axes == []
