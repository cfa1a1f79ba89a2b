"""Tables: the right figure in the right cell, and "-" where a model cannot be run."""

import pytest
from report_inputs import accuracies, accuracy, beyond_table, meta_best, other_results

from metatokens.records import ModelInfo, Stage
from metatokens.report.tables import (
    accuracy as accuracy_table,
)
from metatokens.report.tables import (
    differences,
    majority_rates,
    marker_conditions,
    models,
    perplexity,
    settings,
    stages,
)
from metatokens.report.wording import duration


def test_accuracy_has_value_interval_chance_and_n() -> None:
    table = accuracy_table([*accuracies(meta_best), *other_results()], "parity", "paper")
    assert table.title == "Parity: answers exactly right, %"
    assert table.header == ("model", "128 (train)", "256", "512", "1,024")
    assert [row[0] for row in table.rows] == ["gpt2", "pause", "twin", "meta"]
    assert table.rows[0][1] == "50.0 (45.6\u201354.4)"  # 250 of 500
    assert table.rows[3][1] == "100.0 (99.2\u2013100.0)"
    assert table.footer == (
        ("chance", "50.0", "50.0", "50.0", "50.0"),
        ("commonest answer", "52.0", "52.0", "52.0", "52.0"),
        ("n (prompts)", "500", "200", "200", "200"),
    )


def test_a_model_that_cannot_be_run_shows_a_dash_and_one_not_measured_nothing() -> None:
    results = [result for result in accuracies(beyond_table) if (result.model, result.length) != ("meta", 512)]
    table = accuracy_table(results, "copying", "paper")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["gpt2"][2:] == ("-", "-")
    assert rows["meta"][2] == ""
    assert rows["twin"][2] != ""
    assert "cannot" not in table.note
    assert "beyond what the model can be run at" in table.note


def test_a_condition_is_named_where_there_are_several() -> None:
    results = accuracies(meta_best)
    assert accuracy_table(results, "list_recall", "decoy").title == (
        "List recall: answers exactly right in condition decoy, %"
    )


def test_a_differing_n_is_shown_as_a_range() -> None:
    results = [accuracy("gpt2", "parity", "paper", 128, 0.5, n=400), accuracy("meta", "parity", "paper", 128, 0.5)]
    assert accuracy_table(results, "parity", "paper").footer[-1] == ("n (prompts)", "400\u2013500")


def test_token_accuracy_counts_tokens() -> None:
    table = accuracy_table(other_results(), "copying", "paper", metric="token_accuracy")
    assert table.title == "Copying: answer tokens right, %"
    assert table.footer == (("n (tokens)", "9,000", "9,000", "9,000", "9,000"),)


def test_differences_list_every_comparison() -> None:
    rows = differences(accuracies(meta_best)).rows
    assert len(rows) == 4 * 3 * 3
    assert rows[0] == ("List recall", "128 tokens (train)", "meta \u2212 pause", "+81.0 (+77.3 to +84.2)")


def test_marker_conditions_show_what_a_condition_changes() -> None:
    table = marker_conditions(accuracies(meta_best), "list_recall")
    assert table.header == ("model", "paper", "none", "none \u2212 paper", "decoy", "decoy \u2212 paper")
    assert table.rows[3][0] == "meta"
    assert table.rows[3][3] == "\u221285.4 (\u221288.2 to \u221281.9)"


def test_perplexity_stands_beside_the_unigram() -> None:
    table = perplexity(other_results())
    assert table.header == ("model", "text alone", "with meta-tokens (uniform)")
    assert table.rows == (
        ("gpt2", "80.0", "-"),
        ("pause", "81.0", "80.0"),
        ("twin", "82.0", "81.0"),
        ("meta", "83.0", "82.0"),
    )
    assert table.footer == (("unigram", "412.5", "412.5"), ("n (tokens)", "51,234", "51,234"))


def test_perplexity_has_an_interval() -> None:
    measured = [one.model_copy(update={"low": 77.5, "high": 83.0}) for one in other_results(["gpt2"])]
    table = perplexity([one for one in measured if one.metric == "perplexity"])
    assert table.rows == (("gpt2", "80.0 (77.5\u201383.0)", "-"),)
    assert "95\u00a0% intervals over blocks" in table.note


def test_majority_rates() -> None:
    table = majority_rates(other_results())
    assert table.rows == (
        ("Segment counting", "41.0", "41.0", "41.0", "41.0"),
        ("Parity", "52.0", "52.0", "52.0", "52.0"),
    )


def test_settings_are_flattened() -> None:
    values = {"a": {"b": 50257, "c": {"d": [0.9, 0.95]}}, "e": None, "f": True}
    assert settings("S", values).rows == (("a.b", "50,257"), ("a.c.d", "0.9, 0.95"), ("e", "-"), ("f", "True"))


def test_models_and_stages() -> None:
    assert models({"meta": ModelInfo(description="words")}).rows == (("meta", "words", "-"),)
    times = [Stage(name="tokenize", seconds=3.25), Stage(name="pretrain-meta", seconds=60, cpu_seconds=50)]
    assert stages(times).rows == (("tokenize", "3.2 s", "3.2 s"), ("pretrain-meta", "1 min 0 s", "50.0 s"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.4, "59.4 s"), (59.6, "1 min 0 s"), (810, "13 min 30 s"), (7500, "2 h 5 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
