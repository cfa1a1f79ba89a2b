"""What is inside the models and what they cost: seeds, intervals, both attentions, text tokens."""

import math
from itertools import product
from typing import Any

import pytest
from grid_inputs import accuracy, measurement, measurements, speeds

from metatokens.records import Timing as SpeedLine
from metatokens.report import inner_tables, measured
from metatokens.report.cost_claims import ratios
from metatokens.report.estimates import mean
from metatokens.report.grid import Grid
from metatokens.report.inner_claims import claims
from metatokens.report.inputs import Inputs
from metatokens.report.overview import claims as every_claim
from metatokens.report.verdicts import Claim


def grid_of(*ones: Any, speeds: Any = ()) -> Grid:
    lines = [SpeedLine.model_validate(line) for line in speeds]
    return Grid("small", Inputs([accuracy(0.5)], measurements=list(ones), speeds=lines))


def claim(grid: Grid, text: str) -> Claim:
    groups = every_claim(grid).groups.values()
    [found] = [one for group in groups for one in group if one.text == text]
    return found


def distortions(model: str, by_seed: dict[int, tuple[float, ...]], subject: str = "meta") -> list[Any]:
    """A curve from 5 nats at rate 0 to a distortion at half a nat, for each seed and fit."""
    about: dict[str, Any] = {"analysis": "rate_distortion", "model": model, "split": "held_out"}
    found = []
    for seed, fits in by_seed.items():
        found.append(measurement(5.0, metric="answer_entropy", seed=seed, **about))
        for fit, value in enumerate(fits):
            own = about | {"subject": subject, "beta": 0.1, "seed": seed, "fit_seed": fit}
            found += [measurement(0.5, metric="rate", **own), measurement(value, metric="distortion", **own)]
    return found


def test_heads_are_not_taken_as_independent() -> None:
    about = {"analysis": "sharpness", "metric": "attention_logit_change", "module": "attention"}
    figure = mean([measurement(0.2, 0.1, **about), measurement(0.6, 0.3, **about)])
    assert figure is not None
    assert (figure.value, figure.low, figure.high) == pytest.approx((0.4, 0.2, 0.6))
    assert mean([measurement(0.2, **about).model_copy(update={"value": None})]) is None


def test_every_seed_must_agree_and_is_shown() -> None:
    about = {"analysis": "sharpness", "metric": "attention_entropy_change", "module": "attention"}
    output: dict[str, Any] = {"analysis": "sharpness", "metric": "output_entropy_change", "marker": "final"}
    ones = [measurement(value, **about, seed=seed) for seed, value in enumerate((-0.4, -0.6, 0.1))]
    grid = grid_of(*ones, *(measurement(-0.5, **output, seed=seed) for seed in range(3)))
    comparison = next(
        one for one in claim(grid, "They lower the entropy of attention and output").comparisons if one.by_seed
    )
    assert comparison.by_seed == pytest.approx((0.4, 0.6, -0.1))
    assert comparison.gap is not None
    assert comparison.gap.low > 0
    assert comparison.side(0) == 0
    rows = {row[0]: row[1] for row in inner_tables.sharpness(grid).rows}
    shown = "\u22120.300 (\u22120.350 to \u22120.250)\nseeds \u22120.400 / \u22120.600 / 0.100"
    assert rows["attention entropy of rows that see one"] == shown
    assert "(n = 100 a seed)" in inner_tables.sharpness(grid).note
    assert "Seeds: meta 0, 1, 2." in inner_tables.sharpness(grid).note


def test_models_are_compared_over_their_seeds_not_over_the_fits_of_one() -> None:
    ours = distortions("meta", {0: (1.0, 1.2), 1: (1.0, 1.2), 2: (1.0, 1.2)})
    theirs = distortions("gpt2", {0: (2.0, 2.2), 1: (3.0, 3.2), 2: (4.0, 4.2)})
    first = claim(
        grid_of(*ours, *theirs), "No more of it (0.05 nats) than gpt2 and twin have at the same place"
    ).comparisons[0]
    assert first.by_seed == pytest.approx((1.0, 2.0, 3.0))
    assert first.gap is not None
    reach = 4.3027 / math.sqrt(3)  # Student's, two degrees of freedom; the standard deviation is 1
    assert (first.gap.value, first.gap.low, first.gap.high) == pytest.approx((2.0, 2 - reach, 2 + reach), rel=1e-4)
    assert first.figures == "3 seeds"
    alone = claim(
        grid_of(*ours[:5], *theirs[:5]), "No more of it (0.05 nats) than gpt2 and twin have at the same place"
    ).comparisons[0]
    assert (alone.by_seed, alone.figures) == ((), "1 seed, 2 fits")


def test_the_gap_to_the_text_before_is_told_of_every_model() -> None:
    ones = [
        *distortions("meta", {0: (1.0, 1.2)}), *distortions("meta", {0: (3.0, 3.2)}, "text"),
        *distortions("gpt2", {0: (1.0, 1.2)}), *distortions("gpt2", {0: (2.5, 2.7)}, "text"),
    ]  # fmt: skip
    found = claim(grid_of(*ones), "Less distortion at a rate than at the text before")
    assert found.decisive == "at 4 nats: meta +2.00, gpt2 +1.50, twin \u2026"


def test_distortions_are_shown_by_seed_with_n() -> None:
    rows = inner_tables.rate_distortion(grid_of(*distortions("meta", {0: (1.0, 1.2), 1: (2.0, 2.4)}))).rows
    assert rows[0][1] == "1.650\n1.000 to 2.400\nseeds 1.100 / 2.200"
    assert rows[0][-1] == "100"


def test_the_second_attention_stands_beside_the_first() -> None:
    grid = grid_of(*measurements())
    rows = {row[0]: row[1:] for row in inner_tables.sharpness(grid).rows}
    assert rows["second attention logit at a meta-token"][0] == "-"  # pause has none
    assert rows["second attention logit at a meta-token"][1].startswith("1.500 (")
    labels = [one.label for one in claim(grid, "Meta-tokens' embeddings raise attention logits at them").comparisons]
    assert any(label.startswith("second attention logit, rope") for label in labels)
    premise = claim(grid, "Theorem 4.1 needs \u03b1 > exp(\u2212H): so it is in most rows")
    assert not any("second" in one.label for one in premise.comparisons)


def test_the_premise_is_shown_head_by_head() -> None:
    table = inner_tables.premise(grid_of(*measurements()))
    assert table.header[1:3] == (
        "pause, rope\nlist recall, 512 \u2192 256\nattention", "twin, rope\nlist recall, 512 \u2192 256\nattention"
    )  # fmt: skip
    assert [row[0] for row in table.rows] == [f"layer {layer}, head {head}" for layer, head in product((0, 1), (0, 1))]
    assert table.rows[0][1] == "30.0 (25.0 to 35.0)"


def test_the_spread_of_output_changes_is_shown() -> None:
    rows = {row[0]: row[1:] for row in inner_tables.output_changes(grid_of(*measurements())).rows}
    assert rows["meta, rope, answer's logit at the end, seed 0"] == (
        "1.00", "1.50", "2.50", "3.00", "3.50", "4.50", "5.00", "100"
    )  # fmt: skip


def test_decoding_is_compared_per_text_token_and_reading_by_positions() -> None:
    [reading, _] = ratios(grid_of(speeds=speeds()), "prefill", "meta", "gpt2")
    assert (reading.ratio, reading.ratio_low, reading.limit) == (1.06, 1.05, 1.0)
    lines = speeds()
    [plain] = [line for line in lines if (line["benchmark"], line["batch"], line["model"]) == ("decode", 1, "gpt2")]
    plain["text_tokens"] = 2 * plain["text_tokens"]
    [decoding, _] = ratios(grid_of(speeds=lines), "decode", "meta, inserting", "gpt2")
    assert decoding.ratio == pytest.approx(2 * 1.05)


def test_speed_is_claimed_of_the_papers_size_alone() -> None:
    tiny = [line | {"shape": "tiny", "text_tokens": 3 * line["text_tokens"]} for line in speeds()]
    assert ratios(grid_of(speeds=tiny), "prefill", "meta", "gpt2") == []
    asked = "decode", "meta, inserting", "gpt2"
    assert ratios(grid_of(speeds=[*speeds(), *tiny]), *asked) == ratios(grid_of(speeds=speeds()), *asked)


def test_the_first_token_is_timed_by_positions() -> None:
    rows = {row[:2]: row[2:] for row in measured.speed(grid_of(speeds=speeds())).rows}
    without = rows["first token after 512 of text, batch 1", "gpt2"]
    gathered = rows["first token after 461 of text, batch 1", "meta / gpt2"]
    dense = rows["first token after 461 of text, batch 1", "dense / gpt2"]
    assert (without[1], gathered[1], dense[1]) == ("2,000", "2,120", "3,200")
    assert (without[0], gathered[0]) == ("256", "217")
    assert gathered[2].startswith("1.060 (")
    assert (gathered[3], dense[3], dense[5]) == ("", "1.02", "5")  # the paper's code was dense


def test_one_exception_refutes_an_at_most() -> None:
    lines = [line for line in speeds() if line["benchmark"] == "decode"]
    text = "Meta-tokens slow decoding by 1.11 at most, gathered as ours"
    assert claim(grid_of(speeds=lines), text).verdict == "holds"
    for line in lines:
        if (line["model"], line["batch"]) == ("meta, inserting", 8):
            line |= {"ratio": 1.2, "ratio_low": 1.15, "ratio_high": 1.25}
    assert claim(grid_of(speeds=lines), text).verdict == "does not hold"
    assert claim(grid_of(speeds=lines), "Meta-tokens slow decoding by 1.11 at most, dense as the paper's").decisive == (
        "1.40 (batch 1), 1.40 (batch 8), on a made-up A100; the bound is an A100's"
    )


def test_a_time_on_another_machine_settles_nothing() -> None:
    lines = [line | {"device": "a made-up processor"} for line in speeds()]
    for code in ("dense as the paper's", "gathered as ours"):
        found = claim(grid_of(speeds=lines), f"Meta-tokens slow decoding by 1.11 at most, {code}")
        assert (found.verdict, found.informative) == ("cannot be told at this scale", [])
        assert found.decisive.endswith("on a made-up processor; the bound is an A100's")
        assert {found.says(one) for one in found.comparisons} == {"uninformative"}
    sparse = claim(grid_of(speeds=lines), "A sparse implementation reduces the overhead")  # of one machine
    assert (sparse.verdict, sparse.middle()) == ("holds", "+0.35 times")


def test_no_more_distortion_is_no_less() -> None:
    text = "No more of it (0.05 nats) than gpt2 and twin have at the same place"

    def told(*others: float) -> str:
        ours = distortions("meta", dict.fromkeys(range(3), (1.0,)))
        theirs = [distortions(other, dict(enumerate((value,) for value in others))) for other in ("gpt2", "twin")]
        return claim(grid_of(*ours, *theirs[0], *theirs[1]), text).verdict

    assert told(1.0, 1.001, 1.002) == "holds"
    assert told(0.9, 0.901, 0.902) == "does not hold"
    assert told(0.9, 1.0, 1.1) == "cannot be told at this scale"


def test_what_was_not_measured_is_drawn_as_gaps() -> None:
    grid = grid_of()
    assert all(one.comparisons for one in claims(grid))
    for table in (
        inner_tables.premise,
        inner_tables.output_changes,
        inner_tables.caching,
        inner_tables.rate_distortion,
    ):
        assert table(grid).title
