"""The sentences follow the numbers, whatever the numbers are."""

import pytest
from report_inputs import (
    accuracies,
    accuracy,
    all_equal,
    beyond_table,
    meta_best,
    other_results,
)

from metatokens.records import ModelInfo
from metatokens.report.findings import caution, comparisons, marker_effects, perplexities, verdict


def at_128(**scores: float | None) -> list:
    return [accuracy(model, "list_recall", "paper", 128, score) for model, score in scores.items()]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (
            {"gpt2": 0.1, "pause": 0.1, "twin": 0.5, "meta": 1.0},
            "meta is above gpt2, and the control twin explains part",
        ),
        ({"gpt2": 0.1, "pause": 0.2, "twin": 0.2, "meta": 1.0}, "above pause, and the control twin does not explain"),
        ({"gpt2": 0.1, "pause": 0.4, "twin": 0.1, "meta": 1.0}, "above pause, and the control twin does not explain"),
        ({"gpt2": 0.1, "pause": 0.1, "twin": 0.996, "meta": 1.0}, "but not measurably above the control twin"),
        ({"gpt2": 0.1, "pause": 0.1, "twin": 1.0, "meta": 0.5}, "the control twin is above meta"),
        ({"gpt2": 0.1, "pause": 0.1, "twin": 1.0, "meta": 0.1}, "gains nothing measurable over gpt2, and the control"),
        ({"gpt2": 0.3, "pause": 0.3, "twin": 0.3, "meta": 0.3}, "meta gains nothing measurable over gpt2."),
        ({"gpt2": 0.1, "pause": 0.1, "twin": 0.1, "meta": 0.1}, "at 128 tokens (train), no model is above chance."),
        ({"gpt2": 0.0, "pause": 0.0, "twin": 0.0, "meta": 0.09}, "at 128 tokens (train), no model is above chance."),
        ({"gpt2": 0.9, "pause": 0.1, "twin": 0.1, "meta": 0.1}, "meta is below gpt2."),
        ({"gpt2": 0.1, "meta": 1.0}, "meta is above gpt2."),
        ({"twin": 0.1, "meta": 1.0}, "meta is above twin."),
        ({"gpt2": 0.1, "pause": 0.5}, "pause is above gpt2."),
        ({"mine": 0.5, "yours": 0.5}, "gains nothing measurable over"),
        ({"meta": 0.5}, "only meta was measured"),
        ({"gpt2": None, "meta": 0.5}, "only meta was measured"),
        ({"meta": None}, "nothing was measured"),
    ],
)
def test_the_verdict_is_computed(scores: dict[str, float | None], said: str) -> None:
    assert said in verdict(at_128(**scores), "list_recall")


def test_lengths_with_one_verdict_share_it() -> None:
    assert verdict(accuracies(all_equal), "parity") == (
        "Parity: at 128 tokens (train), 256 tokens (2\u00d7) and 1,024 tokens (8\u00d7), "
        "meta gains nothing measurable over gpt2."
    )


def test_variants_are_compared_among_themselves() -> None:
    results = [
        accuracy(model, "parity", "paper", 128, score, position_embedding=position)
        for position, scores in (("rope", (0.1, 1.0)), ("learned", (0.7, 0.7)))
        for model, score in zip(("gpt2", "meta"), scores, strict=True)
    ]
    assert verdict(results, "parity") == (
        "Parity: at 128 tokens (train), learned, meta gains nothing measurable over gpt2; "
        "at 128 tokens (train), rope, meta is above gpt2."
    )


def test_comparisons_give_the_figures() -> None:
    [finding] = comparisons(at_128(gpt2=0.1, pause=0.1, twin=0.98, meta=1.0), "list_recall")
    assert finding.place == "128 tokens (train)"
    assert finding.detail == (
        "Above chance (10.0\u00a0%): twin, meta. "
        "meta is 90.0 points above gpt2 (87.0 to 92.3); meta is 2.0 points above twin (0.8 to 3.6); "
        "twin is 88.0 points above gpt2 (84.6 to 90.5)."
    )


def test_comparisons_say_what_n_cannot_show() -> None:
    [finding] = comparisons(at_128(gpt2=0.3, pause=0.1, twin=0.5, meta=0.31), "list_recall")
    assert finding.detail == (
        "Above chance (10.0\u00a0%): gpt2, twin, meta. meta is 19.0 points below twin (13.0 to 24.9); "
        "twin is 20.0 points above gpt2 (14.0 to 25.8). "
        "No difference that n\u00a0=\u00a0500 can show: meta and gpt2 (\u22124.7 to +6.7)."
    )


def test_comparisons_say_that_nobody_is_above_chance() -> None:
    [finding] = comparisons(at_128(gpt2=0.1, pause=0.1, twin=0.1, meta=0.1), "list_recall")
    assert finding.detail.startswith("No model is above chance (10.0\u00a0%). No difference")


def test_models_that_cannot_be_run_are_named() -> None:
    findings = comparisons(accuracies(beyond_table), "copying")
    assert ["Cannot be run at this length: gpt2, pause." in finding.detail for finding in findings] == [0, 0, 1]


def test_the_commonest_answer_is_the_floor_where_it_beats_chance() -> None:
    rates = [result for result in other_results() if result.metric == "majority_rate"]  # 0.41, and chance is 0.2
    counted = [
        accuracy(model, "segment_counting", "paper", 128, score) for model, score in (("gpt2", 0.4), ("meta", 0.5))
    ]
    [finding] = comparisons([*rates, *counted], "segment_counting")
    assert finding.detail.startswith("Above the rate of the commonest answer (41.0\u00a0%): meta.")


def test_marker_effects_compare_meta_with_itself() -> None:
    [finding] = marker_effects(accuracies(meta_best), "list_recall")
    assert finding.place == "meta at 128 tokens (train)"
    assert finding.detail == (
        "with markers 100.0\u00a0%, without markers 14.6\u00a0% (\u221288.2 to \u221281.9 points), "
        "among decoys 82.0\u00a0% (\u221221.6 to \u221214.8 points)."
    )
    unmarked = [result for result in accuracies(meta_best) if result.condition != "paper"]
    assert marker_effects(unmarked, "list_recall")[0].detail.startswith("without markers 14.6\u00a0%, among decoys")
    assert marker_effects(accuracies(meta_best), "parity") == []
    assert marker_effects(accuracies(meta_best, ("gpt2", "pause")), "list_recall") == []


def test_perplexity_sentences() -> None:
    assert perplexities(other_results()) == (
        "On the text alone, below the unigram perplexity: gpt2, pause, twin, meta. "
        "With inserted meta-tokens (uniform), below the unigram perplexity: pause, twin, meta. "
        "Insertion changes the perplexity of the same text tokens: "
        "pause \u22121.2\u00a0%, twin \u22121.2\u00a0%, meta \u22121.2\u00a0%."
    )


def test_caution_names_seed_n_and_sizes() -> None:
    results = [*accuracies(meta_best), *other_results()]
    sizes = {"gpt2": ModelInfo(parameters=361_984), "meta": ModelInfo(parameters=394_880), "other": ModelInfo()}
    text = caution(results, "parity", sizes)
    assert text.startswith("One training seed (0)")
    assert "n\u00a0=\u00a0500 at 128 tokens, n\u00a0=\u00a0200 at 256 and 1,024 tokens." in text
    assert "Small models: 0.36\u20130.39 million parameters" in text
    large = caution(results, "parity", {"meta": ModelInfo(parameters=151_908_096)})
    assert "Models: 152 million parameters" in large
    two_seeds = [*results, accuracy("meta", "parity", "paper", 128, 0.5, seed=7)]
    assert caution(two_seeds, "parity", {}).startswith("2 seeds (0, 7)")
