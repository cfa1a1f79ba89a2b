"""A grid's controls: figures are compared by the seeds that both sides have, and the page says which these are."""

import math
from typing import Any

import pytest
from grid_inputs import accuracy

from metatokens.records import RunInfo
from metatokens.report import ablation_tables, comparison, control_claims, control_tables, recall_claims
from metatokens.report.estimates import Difference
from metatokens.report.grid import Grid
from metatokens.report.inputs import CurvePoint, Inputs, RecallPoint
from metatokens.report.measured import evidence
from metatokens.report.overview import claims
from metatokens.report.tables import Table
from metatokens.report.verdicts import Claim, Comparison


def small(*records: Any, **more: Any) -> Grid:
    return Grid("small", Inputs(list(records), **more))


def rows(table: Table) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in table.rows}


def claim(found: list[Claim], text: str) -> Claim:
    [one] = [one for one in found if one.text == text]
    return one


def test_a_row_mixes_no_seeds() -> None:
    plain = [accuracy(value, seed=seed) for seed, value in enumerate((0.9, 0.5, 0.1))]
    noisy = accuracy(0.8, intervention="noise:1")
    found = rows(ablation_tables.noise(small(*plain, noisy), "list_recall", 512))
    assert found["meta, rope, 512 (seed 0)"][0].startswith("90.0 (")
    placed = accuracy(0.8, recipe="small/periodic")
    found = rows(control_tables.placement(small(*plain, placed)))
    assert found["uniform, k = 0.1 (paper), trained to 512 (seed 0)"][2].startswith("90.0 (")
    assert rows(control_tables.placement(small(*plain)))["uniform, k = 0.1 (paper), trained to 512"][2].endswith(
        "\nseeds 90 50 10"
    )


def test_a_column_of_one_seed_is_named() -> None:
    several = [accuracy(0.5, model="meta", seed=seed) for seed in (0, 1)]
    header = control_tables.controls(small(*several, accuracy(0.5, model="pause", seed=1))).header
    assert header[1:5] == ("gpt2", "pause (seed 1)", "twin", "meta")


def test_figures_of_one_seed_say_so_on_the_first_screen() -> None:
    ones = [accuracy(value, model="meta", length=1024, seed=seed) for seed, value in enumerate((0.2, 0.7))]
    found = control_claims.controls(small(*ones, accuracy(0.1, model="pause", length=1024)))
    said = claim(found, "Meta-attention helps: meta beats pause").decisive
    assert said == "list recall, rope, 512 \u2192 1,024: 20.0 v 10.0 (seed 0)"


def ablated(**losses: float) -> list[Any]:
    """List recall at 512 tokens: 90 % in full, and less what a model loses without positions."""
    records = []
    for model, loss in losses.items():
        records += [accuracy(0.9, model=model), accuracy(0.9 - loss, model=model, intervention="no_pos")]
    return records


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"meta": 0.8}, "has not been measured yet"),
        ({"gpt2": 0.8}, "has not been measured yet"),
        ({"gpt2": 0.8, "meta": 0.8}, "and others do too (gpt2): the loss is not meta's alone"),
        ({"gpt2": 0.0, "meta": 0.8}, "only meta loses more than 5 points at each: the loss is meta's alone"),
        ({"gpt2": 0.0, "meta": 0.0}, "So meta does not lose more than 5 points at each."),
        ({"gpt2": 0.8, "meta": 0.0}, "meta does not lose more than 5 points at each, while others do: gpt2."),
    ],
)
def test_whether_the_loss_is_metas_alone(losses: dict[str, float], said: str) -> None:
    assert said in ablation_tables.whose_loss(small(*ablated(**losses)))


def test_every_model_stands_beside_meta_without_positions() -> None:
    grid = small(*ablated(twin=0.6, meta=0.8), accuracy(0.2, model="twin", seed=1))
    found = rows(ablation_tables.by_length(grid, "list_recall", 512))
    assert list(found)[:2] == ["twin, rope, full (seed 0)", "twin, rope, no position (seed 0)"]
    assert found["twin, rope, full (seed 0)"][0].startswith("90.0 (")  # not pooled with seed 1
    assert found["meta, rope, no position (seed 0)"][0].startswith("10.0 (")
    assert ablation_tables.by_length(grid, "list_recall", 256).rows == ()
    assert "twin \u221260.0" in ablation_tables.whose_loss(grid).replace(" (seed 0)", "")


def test_markers_stand_in_one_table_with_guessing_and_n() -> None:
    grid = small(*(accuracy(value, 200, condition=name) for name, value in (("paper", 0.9), ("none", 0.1))))
    table = control_tables.markers(grid)
    assert table.header == ("task, model", "paper", "none", "decoy", "guessing", "n (prompts a seed)")
    figures = rows(table)["List recall, meta (seed 0)"]
    assert figures[0].startswith("90.0 (")
    assert figures[1].startswith("10.0 (")
    assert figures[2:] == ("\u2026", "10.0", "200")
    text = "Without markers meta still beats gpt2"
    assert claim(control_claims.controls(grid), text).decisive == "meta: 90.0 with markers, 10.0 without (seed 0)"


def test_what_the_plan_never_runs_is_not_listed_as_missing() -> None:
    found = control_claims.controls(small(accuracy(0.5)))
    marked = [one for one in found if one.section == "markers"]
    places = {one.text: {comparison.label for comparison in one.comparisons} for one in marked}
    assert not any("\u2192 1,024" in label for label in places["Among decoys meta still beats gpt2"])
    assert any("\u2192 2,048" in label for label in places["Trained without markers, meta beats gpt2"])


def test_random_positions_are_compared_with_plain_ones_trained_alike() -> None:
    about: dict[str, Any] = {"train_length": 128, "length": 1024}
    plain = [accuracy(0.1, **about, seed=seed) for seed in (0, 1)]
    records = [
        *plain,
        *(accuracy(v, **about, recipe=f"small/{n}") for v, n in ((0.9, "random-positions"), (0.6, "one-length"))),
        accuracy(0.95, **about, recipe="small/random-ranges"),
    ]
    found = control_claims.controls(small(*records))
    for title, ours in {"Random positions": 90.0, "Random ranges": 95.0}.items():
        own = claim(found, f"{title}: better than plain at 4 to 16 times, trained alike")
        figures = {one.label: one.figures for one in own.comparisons}
        assert figures["List recall, meta, 128 \u2192 1,024"] == f"{ours} v 60.0 (seed 0)"
    steps = {"finetune-meta-one-length-list_recall": {"task": {"train_steps": [8000]}}}
    steps["finetune-meta-list_recall"] = {"task": {"train_steps": [3000, 500, 300]}}
    table = rows(control_tables.random_positions(small(*records, runs=[RunInfo(recipes=steps)]), "list_recall"))
    assert table["meta, random ranges (seed 0)"][3].startswith("95.0 (")
    assert table["meta, plain, at 128 alone, 8,000 steps (seed 0)"][3].startswith("60.0 (")
    assert table["meta, plain, first phase, 3,000 steps (seed 0)"][3].startswith("10.0 (")


def pretraining(block: int, fraction: float, placement: str = "uniform") -> dict[str, Any]:
    training = {"max_steps": 10, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return {"data": {"block_size": block, "fraction": fraction, "placement": placement}, "training": training}


def test_the_text_read_is_worked_out_from_the_settings() -> None:
    recipes = {"pretrain-meta": pretraining(1024, 0.1), "pretrain-meta-k=0": pretraining(1024, 0.1, "none")}
    said = control_tables.text_read(small(accuracy(0.5), runs=[RunInfo(recipes=recipes)]))
    assert said == (
        "The rows differ in the text read, tokens in pretraining: uniform, k = 0.1 (paper): 36.9\u00a0k (922 of a "
        "block's 1,024); none: 41\u00a0k (1,024 of a block's 1,024)."
    )
    recipes["pretrain-meta-k=0"] = pretraining(922, 0.1, "none")
    assert control_tables.text_read(small(accuracy(0.5), runs=[RunInfo(recipes=recipes)])).startswith("All read the")
    assert control_tables.text_read(small(accuracy(0.5))) == ""


def test_untrained_positions_are_named() -> None:
    recipes = {"pretrain-gpt2-learned": pretraining(922, 0.1, "none")}
    learned = accuracy(0.5, model="gpt2", position_embedding="learned")
    grid = small(learned, runs=[RunInfo(recipes=recipes)])
    said = "beyond the blocks of pretraining (gpt2: 922 tokens) are untrained: fine-tuning goes to 512 tokens."
    assert said in comparison.lengths(grid, "list_recall").note
    assert said in comparison.all_lengths(grid, "list_recall").note
    assert comparison.all_lengths(small(accuracy(0.5)), "list_recall").note == ""


def test_token_accuracy_says_how_much_of_it_is_the_end_of_text() -> None:
    grid = small(accuracy(0.0), accuracy(0.5, 1500, metric="token_accuracy"))  # answers of 3 tokens
    table = comparison.all_lengths(grid, "list_recall", metric="token_accuracy")
    assert "33.3 % of the answer tokens here" in table.note
    assert table.footer == (("n (tokens a seed)", "1,500"),)


@pytest.mark.parametrize(
    ("kind", "title", "unit"),
    [
        ("", "noise on positions (Table 15): tested", "S in positions"),
        (":meta", "noise on positions at the meta-tokens alone: tested", "the meta-tokens alone gets"),
        (":raw", "noise on positions in raw units: tested", "S in radians"),
        (":meta:raw", "at the meta-tokens alone, in raw units: tested", "S in radians"),
    ],
)
def test_each_noise_table_says_what_its_noise_is(kind: str, title: str, unit: str) -> None:
    noisy = accuracy(0.5, intervention=f"noise:1{kind}")
    table = ablation_tables.noise(small(accuracy(0.6), noisy), "list_recall", 512, kind)
    assert title in table.title
    assert unit in table.note
    assert table.footer[1][4] == "500"
    assert rows(table)["meta, rope, 512 (seed 0)"][3].startswith("50.0 (")


def test_no_verdict_compares_unlike_units() -> None:
    assert not any("learned positions" in one.text for one in recall_claims.claims(small(accuracy(0.5))))


@pytest.mark.parametrize(
    ("ours", "said"), [((1, 2, 3), "all before"), ((4, 5, 9), "seeds overlap"), ((8, 8, 8), "all after")]
)
def test_an_order_of_seeds_is_told_in_words(ours: tuple[int, ...], said: str) -> None:
    points = [
        RecallPoint(
            model=model, position_embedding="rope", task="list_recall", recipe="small", seed=seed, step=step,
            text_tokens=step, exact_match=float(step >= steps),
        )
        for model, needed in (("meta", ours), ("gpt2", (5, 6, 7)))
        for seed, steps in enumerate(needed)
        for step in range(1, 10)
    ]  # fmt: skip
    found = claims(small(accuracy(0.5), recall=points))
    one = claim(
        found.groups["The paper claims"], "Data-efficient: fewer tokens of fine-tuning than gpt2 to 90 % recall"
    )
    [table] = evidence([one])
    assert table.rows[0][2] == said


def test_a_verdict_of_which_most_is_still_to_be_run_is_so_far() -> None:
    run, missing = Comparison("a", Difference(0.2, 0.1, 0.3)), Comparison("b")
    assert Claim("t", "s", "lengths", (run, missing, missing)).so_far() == " (so far)"
    assert Claim("t", "s", "lengths", (run, missing)).so_far() == ""
    assert Claim("t", "s", "lengths", (missing,)).so_far() == " (not run)"
    lost = Comparison("a", Difference(-0.2, -0.3, -0.1))
    assert Claim("t", "s", "lengths", (lost, missing, missing), is_universal=True).so_far() == ""  # nothing turns it
    found = claims(small(accuracy(0.5)))
    assert "of them less than half has been run" in found.verdict
    assert "(so far): more than half" in found.key


def test_what_longer_training_prompts_add_is_compared() -> None:
    accuracies = {("meta", 128): (0.2, 0.3), ("meta", 512): (0.9, 0.8), ("gpt2", 128): (0.1,), ("gpt2", 512): (0.5,)}
    records = [
        accuracy(value, model=model, train_length=trained, length=512, seed=seed)
        for (model, trained), values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    text = "Training to 512 rather than 128 tokens adds more to meta than to gpt2"

    def compared(*records: Any) -> Comparison:
        found = claim(recall_claims.claims(small(*records)), text)
        assert [one.label for one in found.comparisons if one.gap] == ["List recall, rope, 128 or 512 \u2192 512"]
        return next(one for one in found.comparisons if one.gap)

    one = compared(*records)  # of seed 0 alone: 70 points and 40
    assert one.gap is not None
    assert one.gap.value == pytest.approx(0.3)
    spread = 1.96 * math.sqrt(sum(p * (1 - p) for p in (0.9, 0.2, 0.5, 0.1)) / 500)  # of four independent proportions
    assert (one.gap.low, one.gap.high) == pytest.approx((0.3 - spread, 0.3 + spread), abs=0.01)
    assert (one.is_informative, one.figures) == (True, "70.0 v 40.0 (seed 0)")
    full = [accuracy(0.99, model=model, train_length=512, length=512) for model in ("meta", "gpt2")]
    assert not compared(*records[:1], *full, records[4]).is_informative  # both at 1 in the end


def test_losses_are_those_of_the_models_that_are_compared() -> None:
    about: dict[str, Any] = {
        "task": "list_recall",
        "position_embedding": "rope",
        "train_length": 128,
        "recipe": "small",
    }
    places = [
        {}, {"recipe": "small/k=0"}, {"recipe": "other"}, {"train_length": 256}, {"task": None, "train_length": None},
        {"position_embedding": "learned"}, {"position_embedding": "learned", "recipe": "small/longer"},
    ]  # fmt: skip
    points = [
        CurvePoint.model_validate({"model": "meta", "seed": 0, "step": step, "loss": 1.0} | about | place)
        for step, place in enumerate(places)
    ]
    grid = small(accuracy(0.5, position_embedding="learned", recipe="small/longer"), curves=points)
    assert [point.step for point in grid.losses("rope", 128)] == [0]
    assert [point.step for point in grid.losses("learned", 128)] == [6]
