"""Pooling, labels, and the interval of a difference."""

import pytest
from report_inputs import accuracies, accuracy, all_equal, other_results

from metatokens.evaluation.intervals import wilson_interval
from metatokens.records import Result
from metatokens.report.estimates import Estimate, Labels, difference, pivot
from metatokens.report.inputs import CurvePoint


def proportion(successes: int, n: int) -> Estimate:
    return Estimate(successes / n, *wilson_interval(successes, n), n, None)


@pytest.mark.parametrize(
    ("a", "b", "low", "high"),  # Newcombe 1998, table II, method 10
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0000),
    ],
)
def test_difference_agrees_with_the_published_examples(
    a: tuple[int, int], b: tuple[int, int], low: float, high: float
) -> None:
    gap = difference(proportion(*a), proportion(*b))
    assert gap is not None
    assert (gap.low, gap.high) == pytest.approx((low, high), abs=5e-5)


def test_difference_needs_two_figures_with_intervals() -> None:
    known = proportion(5, 10)
    assert difference(known, Estimate(None, None, None, 0, None)) is None
    assert difference(Estimate(0.5, None, None, 10, None), known) is None


def test_a_cell_is_the_mean_of_its_seeds_as_of_the_same_prompts() -> None:
    results = [
        accuracy("meta", "parity", "paper", 128, 0.9, seed=0, n=100, value=0.9, low=0.82, high=0.95),
        accuracy("meta", "parity", "paper", 128, 0.5, seed=1, n=300, value=0.5, low=0.44, high=0.56),
    ]
    cell = pivot(results, "length", metric="exact_match", task="parity")["meta"][128]
    assert cell.value == pytest.approx((0.9 + 0.5) / 2)
    assert (cell.low, cell.high) == (pytest.approx((0.82 + 0.44) / 2), pytest.approx((0.95 + 0.56) / 2))
    assert (cell.n, cell.chance) == (400, 0.5)


def test_a_seed_that_cannot_be_run_does_not_count() -> None:
    results = [accuracy("meta", "parity", "paper", 128, value, seed=seed) for seed, value in enumerate((None, 0.5))]
    assert pivot(results, "length", metric="exact_match")["meta"][128].n == 500


def test_labels_name_the_model_alone_where_nothing_else_differs() -> None:
    results = [*accuracies(all_equal), *other_results()]
    assert Labels(results).all == ["gpt2", "pause", "twin", "meta"]


def test_labels_name_what_differs() -> None:
    results = [
        accuracy("meta", "parity", "paper", 128, 0.5, **fields)
        for fields in (
            {},
            {"position_embedding": "learned"},
            {"train_length": 256},
            {"train_condition": "none"},
            {"intervention": "no_pos"},
        )
    ]
    assert [Labels(results)(result) for result in results] == [
        "meta · rope · trained on paper · trained at 128",
        "meta · learned · trained on paper · trained at 128",
        "meta · rope · trained on paper · trained at 256",
        "meta · rope · trained on none · trained at 128",
        "meta · rope · trained on paper · trained at 128 · no_pos",
    ]


def test_recipes_are_named_only_where_two_fill_one_cell() -> None:
    def labels(*fields: dict[str, str]) -> list[str]:
        return Labels([accuracy("meta", "parity", "paper", 128, 0.5, **values) for values in fields]).all

    assert labels({"recipe": "a"}, {"recipe": "b"}) == ["meta · a", "meta · b"]
    assert labels({"recipe": "a", "task": "parity"}, {"recipe": "b", "task": "copying"}) == ["meta"]


def test_curves_and_results_share_labels() -> None:
    point = CurvePoint(model="meta", position_embedding="rope", task="parity", train_length=128, seed=0, step=1, loss=1)
    result: Result = accuracy("meta", "parity", "paper", 128, 0.5)
    assert Labels([point]).all == Labels([result]).all == Labels([point, result]).all == ["meta"]


def test_unknown_models_follow_the_known_ones() -> None:
    results = [accuracy(model, "parity", "paper", 128, 0.5) for model in ("zebra", "meta", "ant", "gpt2")]
    assert Labels(results).all == ["gpt2", "meta", "ant", "zebra"]
