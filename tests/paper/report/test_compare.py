"""One comparison: which seeds and settings it is of, its interval, and whether its figures can tell."""

from collections.abc import Callable, Sequence
from math import hypot, inf, log, sqrt
from statistics import fmean, stdev
from typing import Any

import pytest

from metatokens.paper.report.compare import Comparison, Versus, compare
from metatokens.paper.report.frame import Inputs
from tests.paper.report.made_lines import Line, accuracy, inner, majority, perplexity, recall, timing, wilson

Read = Callable[..., Inputs]
AT_512 = {"task": ["list_recall"], "position_embedding": ["rope"], "train_length": [512], "length": [512]}


def of_seeds(model: str, *values: float | None, first: int = 0, **fields: Any) -> list[Line]:
    return [accuracy(value, model=model, seed=seed, **fields) for seed, value in enumerate(values, start=first)]


def only(inputs: Inputs, a: Any, b: Any, over: Line = AT_512, **fields: Any) -> Comparison:
    [one] = compare(inputs, Versus(a=a, b=b, over=over, **fields))
    return one


def ends(*values: float) -> tuple[float, float]:
    """The mean of the ends of the intervals of some seeds' figures."""
    low, high = zip(*(wilson(value, 500) for value in values), strict=True)
    return fmean(low), fmean(high)


def newcombe(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    (low, high), (base_low, base_high) = ends(*a), ends(*b)
    gap = fmean(a) - fmean(b)
    down, up = hypot(fmean(a) - low, base_high - fmean(b)), hypot(high - fmean(a), fmean(b) - base_low)
    return gap, gap - down, gap + up


def test_only_the_seeds_that_both_sides_have_are_compared(read: Read) -> None:
    one = only(read([*of_seeds("meta", 0.9, 0.8, 0.7), *of_seeds("gpt2", 0.3, 0.6, 0.1, first=1)]), "meta", "gpt2")
    assert one.gap == pytest.approx(newcombe([0.8, 0.7], [0.3, 0.6]))
    assert one.by_seed == pytest.approx((0.5, 0.1))
    assert (one.label, one.figures) == ("List recall, rope, 512 \u2192 512", "75.0 v 45.0")
    assert one.side(0.0) == 1


def test_a_single_seed_has_no_sign_to_agree_with(read: Read) -> None:
    one = only(read([*of_seeds("meta", 0.9, 0.8), *of_seeds("gpt2", 0.2, first=1)]), "meta", "gpt2")
    assert one.gap == pytest.approx(newcombe([0.8], [0.2]))
    assert (one.by_seed, one.figures, one.side(0.0)) == ((), "80.0 v 20.0 (seed 1)", 1)


def test_one_seed_on_the_other_side_leaves_it_open(read: Read) -> None:
    one = only(read([*of_seeds("meta", 0.9, 0.9, 0.49), *of_seeds("gpt2", 0.1, 0.1, 0.5)]), "meta", "gpt2")
    assert one.gap is not None
    assert one.gap.low > 0.4
    assert [one.side(margin) for margin in (0.0, -0.05)] == [0, 1]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        of_seeds("meta", 0.9),
        [*of_seeds("meta", 0.9), *of_seeds("gpt2", None)],
        [*of_seeds("meta", 0.9), *of_seeds("gpt2", 0.5, first=1)],
        [*of_seeds("meta", 0.9), *of_seeds("gpt2", 0.5, length=256)],
        [*of_seeds("meta", 0.9), *of_seeds("gpt2", 0.5, recipe="small/k=0")],
    ],
    ids=["nothing", "one side", "cannot be run", "other seeds", "another length", "another variant"],
)
def test_what_was_not_run_has_no_difference(read: Read, lines: list[Line]) -> None:
    assert only(read([*lines, accuracy(0.5, model="twin")]), "meta", "gpt2").gap is None


@pytest.mark.parametrize(
    ("a", "b", "floor", "is_match", "tells"),
    [
        (0.12, 0.10, 0.0, False, False),  # both at chance, which is 0.1
        (0.12, 0.10, 0.0, True, False),
        (0.01, 0.00, 0.0, False, False),  # below it
        (0.60, 0.10, 0.0, False, True),
        (0.10, 0.60, 0.0, False, True),
        (0.60, 0.55, 0.58, False, False),  # of the commonest answer
        (0.80, 0.75, 0.58, False, True),
        (1.00, 0.98, 0.0, False, False),
        (1.00, 0.98, 0.0, True, True),
        (1.00, 0.976, 0.0, False, True),
    ],
)
def test_figures_at_floor_or_at_the_top_tell_nothing(
    read: Read, a: float, b: float, floor: float, is_match: bool, tells: bool
) -> None:
    rates = [majority(floor, "list_recall", 512), majority(1.0, "list_recall", 128)]
    inputs = read([*of_seeds("meta", a), *of_seeds("gpt2", b), *rates])
    one = only(inputs, "meta", "gpt2", is_match=is_match)
    assert (one.is_informative and not one.is_low) == tells


def test_within_two_points_of_floor_is_at_floor(read: Read) -> None:
    low = wilson(0.15, 500)[0]
    for rate, is_low in ((low - 0.021, False), (low - 0.019, True)):
        inputs = read([*of_seeds("meta", 0.15), *of_seeds("gpt2", 0.1), majority(rate, "list_recall", 512)])
        assert only(inputs, "meta", "gpt2").is_low == is_low


def test_a_seed_agrees_by_two_points_of_accuracy_and_by_any_other_difference(read: Read) -> None:
    few = only(read([*of_seeds("meta", 0.95, 0.515), *of_seeds("gpt2", 0.5, 0.5)]), "meta", "gpt2")
    assert (few.gap and few.gap.low > 0, few.agreement, few.seeds, few.side(0.0)) == (True, 0.02, 2, 0)
    more = only(read([*of_seeds("meta", 0.95, 0.525), *of_seeds("gpt2", 0.5, 0.5)]), "meta", "gpt2")
    assert (more.side(0.0), more.task) == (1, "list_recall")


def test_a_bound_is_compared_with_every_seed(read: Read) -> None:
    inputs = read([*of_seeds("meta", 0.9, 0.7), majority(0.3, "list_recall", 512)])
    low, high = ends(0.9, 0.7)
    for bound, value in {0.75: 0.75, "floor": 0.3}.items():
        one = only(inputs, "meta", bound)
        assert one.gap == pytest.approx((0.8 - value, low - value, high - value))
        assert one.by_seed == pytest.approx((0.9 - value, 0.7 - value))
        assert (one.figures, one.is_informative) == ("80.0", True)
    over = only(inputs, 0.75, "meta")
    assert over.gap == pytest.approx((-0.05, 0.75 - high, 0.75 - low))


def test_room_is_asked_of_the_figures_that_are_named(read: Read) -> None:
    def inputs(meta: float) -> Inputs:
        ends_: list[tuple[str, int, float]] = [("meta", 128, 0.5), ("meta", 512, meta)]
        ends_ += [("gpt2", 128, 0.9), ("gpt2", 512, 0.99)]
        return read([accuracy(value, model=model, train_length=trained) for model, trained, value in ends_])

    over = {name: AT_512[name] for name in ("task", "position_embedding", "length")}
    sides = [{"model": model, "metric": "training_gain"} for model in ("meta", "gpt2")]
    room = {"metric": "exact_match", "train_length": 512}
    gains = [only(inputs(meta), *sides, over, room=room, label="{length}") for meta in (0.99, 0.95)]
    assert [one.is_informative for one in gains] == [False, True]
    (gap, down, up), (base, base_down, base_up) = newcombe([0.95], [0.5]), newcombe([0.99], [0.9])
    assert gains[1].gap == pytest.approx(
        (gap - base, gap - base - hypot(gap - down, base_up - base), gap - base + hypot(up - gap, base - base_down))
    )


def test_a_time_tells_of_the_device_of_the_bound_alone(read: Read) -> None:
    speeds = [timing("prefill", "dense", 1.5), timing("prefill", "dense", 1.01, batch=8, device="a CPU")]
    side = {"metric": "slowdown", "benchmark": "prefill", "model": "dense", "against": "gpt2", "shape": "paper"}
    versus = Versus(a=1.1, b=side, over={"measured": ["batch"]}, device="A100", label="batch {batch}")
    slow, other = compare(read([accuracy(0.5)], speeds=speeds), versus)
    assert (slow.label, slow.figures, slow.is_informative) == ("batch 1", "1.500 v 1.100", True)
    assert slow.gap == pytest.approx((-0.4, 1.1 - 1.51, 1.1 - 1.49))
    assert (other.label, other.side(0.0), other.is_informative) == ("batch 8", 1, False)


def distortions(by_seed: dict[int, list[float]], model: str) -> list[Line]:
    """Distortions at the rate of 1, of each seed's fits."""
    lines = []
    for seed, fits in by_seed.items():
        for fit, value in enumerate(fits):
            about: Line = {"model": model, "seed": seed, "fit_seed": fit, "beta": 0.1, "subject": "meta"}
            for metric, one in (("rate", 1.0), ("distortion", value)):
                lines.append(inner("rate_distortion", metric, one, None, split="held_out", **about))
    return lines


def test_distortions_are_compared_over_seeds_and_those_of_a_single_seed_over_its_fits(read: Read) -> None:
    over = {"split": ["held_out"], "rate": [1.0]}
    sides = [{"model": model, "subject": "meta", "metric": "distortion_at_rate"} for model in ("gpt2", "meta")]

    def one(gpt2: dict[int, list[float]], meta: dict[int, list[float]]) -> Comparison:
        analysis = distortions(gpt2, "gpt2") + distortions(meta, "meta")
        return only(read([accuracy(0.5)], analysis=analysis), *sides, over, label="{rate} nats")

    several = one({0: [1.0, 1.2], 1: [2.0, 2.0], 2: [9.0]}, {0: [0.5, 0.9], 1: [1.2, 1.3], 3: [9.0]})
    gaps = [0.4, 0.75]
    reach = 12.706204736 * stdev(gaps) / sqrt(2)  # t(1) at 97.5 %
    assert several.gap == pytest.approx((0.575, 0.575 - reach, 0.575 + reach))
    assert (several.by_seed, several.figures) == (pytest.approx(gaps), "2 seeds")
    fits = one({0: [1.0, 1.2, 1.4]}, {0: [0.5, 0.9, 1.0]})
    reach = 4.302652730 * stdev([0.5, 0.3, 0.4]) / sqrt(3)  # t(2)
    assert fits.gap == pytest.approx((0.4, 0.4 - reach, 0.4 + reach))
    assert (fits.label, fits.by_seed, fits.figures) == ("1 nats", (), "1 seed, 3 fits")
    assert one({0: [1.0]}, {1: [0.5]}).gap is None


def test_perplexities_are_compared_by_the_spread_of_training(read: Read) -> None:
    over = {"condition": ["none"], "position_embedding": ["rope"], "text": ["held_out"]}
    sides = [{"model": model, "metric": "log_perplexity"} for model in ("gpt2", "meta")]
    values = {"gpt2": [80.0], "meta": [70.0, 72.0], "twin": [60.0, 61.0, 65.0]}
    lines = [perplexity(one, model=model, seed=seed) for model in values for seed, one in enumerate(values[model])]
    one = only(read(lines), *sides, over, label="{text}")
    logs = {model: [*map(log, own)] for model, own in values.items()}
    squares = sum((value - fmean(logs[model])) ** 2 for model in ("meta", "twin") for value in logs[model])
    gap, reach = fmean(logs["gpt2"]) - fmean(logs["meta"]), 3.182446305 * sqrt(squares / 3 * (1 + 1 / 2))  # t(3)
    assert one.gap == pytest.approx((gap, gap - reach, gap + reach))
    assert (one.label, one.is_informative) == ("held-out text", True)
    alone = only(read([perplexity(80, model="gpt2"), perplexity(70)]), *sides, over, label="{text}")
    assert alone.gap == pytest.approx([log(80 / 70)] * 3)
    assert not alone.is_informative  # no model has two seeds
    assert only(read([perplexity(80, model="gpt2")]), *sides, over).gap is None


def test_who_learns_first_is_told_by_three_seeds_on_each_side(read: Read) -> None:
    sides = [{"model": model, "metric": "tokens_to_learn"} for model in ("meta", "gpt2")]

    def one(meta: list[float], gpt2: list[float]) -> Comparison:
        curves = [
            recall(step, float(step >= learned), model=model, seed=seed)
            for model, own in {"meta": meta, "gpt2": gpt2}.items()
            for seed, learned in enumerate(own)
            for step in (1, 2, 3)
        ]
        return only(read([accuracy(0.5)], curves=curves), *sides, {"position_embedding": ["rope"]}, label="tokens")

    first = one([1, 1, 2], [3, 3, inf])
    assert (first.gap, first.is_informative) == ((1, 1, 1), True)
    assert first.figures == "3\u00a0k / 3\u00a0k / 6\u00a0k v 9\u00a0k / 9\u00a0k / not reached"
    assert one([1, 1, 3], [2, 3, 3]).gap == (0, 0, 0)
    assert one([3, 3, 3], [1, 2, 2]).gap == (-1, -1, -1)
    assert not one([1, 1], [2, 2, 2]).is_informative
    assert one([], [1, 2]).gap is None


def test_settings_are_every_combination_that_can_be_run(read: Read) -> None:
    inputs = read([accuracy(0.5)])

    def labels(over: Line, **fields: Any) -> list[str]:
        form = "{position_embedding} {train_length} {length}"
        return [one.label for one in compare(inputs, Versus(a="meta", b="gpt2", over=over, label=form, **fields))]

    over: Line = {"task": ["copying"], "position_embedding": ["rope", "learned"], "train_length": [512, 2048]}
    assert labels(over | {"ratio": [1, 4]}) == ["rope 512 512", "rope 512 2,048", "rope 2,048 2,048", "learned 512 512"]
    assert labels(over | {"ratio": [1, 4], "up_to": 512}) == ["rope 512 512", "learned 512 512"]
    assert labels(over | {"length": [128]}, scale=4)[:2] == ["rope 128 32", "rope 512 32"]
    assert labels({"measured": ["task", "position_embedding", "train_length", "length"]}) == ["rope 512 512"]
    assert labels({"measured": ["layer"], "length": [64]}) == ["not measured"]
