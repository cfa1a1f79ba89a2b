"""A grid's cells, claims and tables: what stands in them is computed here from the records, by hand."""

from pathlib import Path
from typing import Any

import pytest
from grid_inputs import accuracy, learning, measurement, measurements, results, speeds, write_grid

from metatokens.errors import UserError
from metatokens.evaluation.intervals import wilson_interval
from metatokens.records import RunInfo, Stage
from metatokens.records import Timing as SpeedLine
from metatokens.report import ablation_tables, comparison, control_tables, measured, recall_claims
from metatokens.report.cost_claims import tokens_to_learn
from metatokens.report.grid import Grid, grid_of
from metatokens.report.inner_claims import distortion_at
from metatokens.report.inputs import Inputs, RecallPoint, read_inputs
from metatokens.report.overview import Claims, claims, cost


@pytest.fixture(scope="module")
def grid() -> Grid:
    recall = [RecallPoint.model_validate(point) for point in learning()]
    lines = [SpeedLine.model_validate(line) for line in speeds()]
    runs = [RunInfo(stages=[Stage(name="pretrain-meta", seconds=7200), Stage(name="evaluate-meta-parity", seconds=60)])]
    return Grid("small", Inputs(results(), recall=recall, measurements=measurements(), speeds=lines, runs=runs))


@pytest.fixture(scope="module")
def found(grid: Grid) -> Claims:
    return claims(grid)


def small(*records: Any, **more: Any) -> Grid:
    return Grid("small", Inputs(list(records), **more))


def verdict(found: Claims, text: str) -> str:
    [claim] = [claim for group in found.groups.values() for claim in group if claim.text == text]
    return claim.verdict


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("meta beats gpt2 up to 512 tokens", "holds"),
        ("It beats both on all tasks at all train lengths", "holds"),
        ("No Pos loses nothing (5 points), counting aside", "holds"),
        ("No Pos improves list recall at 2 and 4 times the length", "holds"),
        ("No Pos costs accuracy in segment counting", "does not hold"),
        ("No Embed hurts, parity aside", "holds"),
        ("In parity No Embed loses no more than No Pos (5 points)", "does not hold"),
        ("Training to 512 rather than 128 tokens adds more to meta than to gpt2", "holds"),
        ("YaRN: exact match above guessing at twice the window", "holds"),
        ("Data-efficient: fewer tokens of fine-tuning than gpt2 to 90 % recall", "holds"),
        ("Meta-tokens slow decoding by 1.11 at most, dense as the paper's", "does not hold"),
        ("Meta-tokens slow decoding by 1.11 at most, gathered as ours", "holds"),
        ("Meta-tokens slow the first token by 1.02 at most, gathered as ours", "does not hold"),
        ("Meta-tokens' embeddings raise attention logits at them", "holds"),
        ("Theorem 4.1 needs \u03b1 > exp(\u2212H): so it is in most rows", "does not hold"),
        ("The final meta-token attends to earlier ones", "holds"),
        ("No more of it (0.05 nats) than gpt2 and twin have at the same place", "holds"),
        ("The mask, not the parameters: meta beats twin", "holds"),
        ("Random positions: meta holds 95 % at 16 times the length", "holds"),
        ("Random positions: twin holds 95 % at 16 times the length", "does not hold"),
        ("Random ranges: meta holds 95 % at 16 times the length", "does not hold"),
        ("Random ranges: better than plain at 4 to 16 times, trained alike", "holds"),
        ("Perplexity no worse than gpt2's (1 %) per text token", "holds"),
        ("Perplexity no worse than gpt2's (1 %) per compute", "does not hold"),
    ],
)
def test_verdicts_follow_the_records(found: Claims, text: str, said: str) -> None:
    assert verdict(found, text) == said


def test_every_claim_has_comparisons_and_a_place(found: Claims) -> None:
    everything = [claim for group in found.groups.values() for claim in group]
    assert len({claim.text for claim in everything}) == len(everything)
    assert all(claim.comparisons for claim in everything)
    assert [claim.text for claim in everything if claim.counts() == "\u2026"] == []


def test_the_first_words_count_the_verdicts(found: Claims) -> None:
    paper = [claim.verdict for claim in found.groups["The paper claims"]]
    assert found.verdict.startswith(
        f"Of {len(paper)} claims of the paper, {paper.count('holds')} hold at this scale, "
        f"{paper.count('does not hold')} do not, "
    )
    assert "meta beats twin: holds" in found.verdict


def test_what_was_not_run_is_told_of_no_claim() -> None:
    empty = claims(small(accuracy(0.5, model="gpt2")))
    everything = [claim for group in empty.groups.values() for claim in group]
    assert {claim.verdict for claim in everything} == {"cannot be told at this scale"}
    assert {claim.tally() for claim in everything} == {"\u2026"}


def test_swapped_models_turn_the_verdict() -> None:
    swap = {"meta": "gpt2", "gpt2": "meta"}
    plain = (one for one in results() if (one.recipe, one.condition, one.intervention) == ("small", "paper", None))
    turned = [one.model_copy(update={"model": swap.get(one.model, one.model)}) for one in plain]
    assert verdict(claims(small(*turned)), "meta beats gpt2 up to 512 tokens") == "does not hold"


def test_a_length_table_sets_ours_beside_the_papers() -> None:
    ends = zip(wilson_interval(250, 500), wilson_interval(300, 500), strict=True)
    low, high = (f"{100 * sum(end) / 2:.1f}" for end in ends)
    table = comparison.lengths(small(accuracy(0.5), accuracy(0.6, seed=1)), "list_recall")
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.header[1:] == ("128", "256", "512", "1,024", "2,048")
    assert rows["meta, rope, 512"] == (
        "\u2026\npaper 100.0", "\u2026\npaper 100.0", f"55.0 ({low}\u2013{high})\npaper 99.3\nseeds 50 60",
        "\u2026\npaper 58.9", "\u2026\npaper 5.6",
    )  # fmt: skip
    assert len(rows) == 10
    assert table.footer[1] == ("n (prompts a seed)", "\u2026", "\u2026", "500", "\u2026", "\u2026")


def test_a_length_beyond_the_table_is_a_dash_and_one_not_run_an_ellipsis() -> None:
    cut = accuracy(None, position_embedding="learned", length=2048)
    rows = {row[0]: row[1:] for row in comparison.lengths(small(cut), "list_recall").rows}
    assert rows["meta, learned, 512"][3:] == ("\u2026\npaper 11.1", "-\npaper \u2014")


def test_models_trained_longer_speak_for_their_positions() -> None:
    learned = {"position_embedding": "learned", "train_length": 512, "length": 512}
    longer = learned | {"recipe": "small/longer"}
    zeroed = {"intervention": "no_pos"}
    recall = [
        RecallPoint.model_validate(point | {"position_embedding": "learned", "recipe": recipe, "step": step})
        for recipe, step in (("small", 50), ("small/longer", 100))
        for point in learning()[:1]
    ]
    runs = [
        RunInfo(
            recipes={
                f"finetune-meta-learned{note}-list_recall": {"task": {"train_steps": [steps, 5]}}
                for note, steps in {"": 3000, "-longer": 16000}.items()
            }
        )
    ]
    grid = small(
        accuracy(0.1, **learned),
        accuracy(0.12, **learned, model="gpt2"),
        accuracy(0.9, **longer),
        accuracy(0.7, **longer, **zeroed),
        accuracy(0.11, **learned, **zeroed),
        accuracy(0.2, **learned, task="copying"),
        accuracy(1.0),
        accuracy(0.98, **zeroed),
        measurements=[
            measurement(1.0, analysis="sharpness", metric="premise_holds", position_embedding="learned", recipe=recipe)
            for recipe in ("small", "small/longer")
        ],
        recall=recall,
        runs=runs,
    )
    assert [one.recipe for one in grid.measured("sharpness", "premise_holds")] == ["small/longer"]
    assert [point.step for seeds in grid.recall().values() for points in seeds.values() for point in points] == [100]
    rows = {row[0]: row for row in comparison.lengths(grid, "list_recall").rows}
    assert rows["meta, learned, 512 (seed 0)"][3].startswith("90.0")
    assert rows["gpt2, learned, 512"][3].startswith("\u2026")  # trained longer too, and not yet run
    copied = {row[0]: row for row in comparison.lengths(grid, "copying").rows}
    assert copied["meta, learned, 512 (seed 0)"][3].startswith("20.0")
    plain, own = (comparison.all_lengths(grid, "list_recall", note=note) for note in ("", "longer"))
    assert [row[1].split()[0] for row in plain.rows] == ["100.0", "12.0", "10.0"]
    assert [row[1].split()[0] for row in own.rows] == ["90.0"]
    assert own.title == "List recall, trained longer: answers exactly right, %"
    taken = ablation_tables.by_length(grid, "list_recall", 512).rows
    assert [row[1].split()[0] for row in taken if "learned" in row[0]] == ["90.0", "70.0", "\u2026", "\u2026"]
    assert "for 16,000 steps at 128 tokens in place of 3,000" in comparison.longer(grid)
    assert comparison.longer(grid).startswith("List recall with learned positions is of models trained longer")
    assert comparison.longer(small(accuracy(0.1, **learned))) == ""
    del runs[0].recipes["finetune-meta-learned-longer-list_recall"]  # not run yet
    assert "trained longer; those" in comparison.longer(small(accuracy(0.9, **longer), runs=runs))


def test_draws_of_the_noise_are_one_figure() -> None:
    draws = [
        accuracy(value, 100, length=128, intervention="noise:1", noise_seed=k) for k, value in enumerate((0.5, 0.7))
    ]
    low, high = (f"{100 * end:.1f}" for end in wilson_interval(120, 200))
    rows = {row[0]: row[1:] for row in ablation_tables.noise(small(*draws), "list_recall", 128).rows}
    assert rows["meta, rope, 512 (seed 0)"][3] == f"60.0 ({low}\u2013{high})\npaper 98.8"


def test_zeroed_positions_show_the_paper_s_gain_and_ours() -> None:
    pair = [accuracy(0.5, length=1024), accuracy(0.7, length=1024, intervention="no_pos")]
    rows = {row[0]: row[1:] for row in ablation_tables.zeroed_positions(small(*pair)).rows}
    assert rows["rope, 512 \u2192 1,024 (seed 0)"][2].startswith("+20.0 (+")
    assert rows["rope, 512 \u2192 1,024 (seed 0)"][2].endswith("\npaper +11.1")
    assert rows["rope, 512 \u2192 1,024 (seed 0)"][3:] == ("10.0", "500")
    assert rows["learned, 512 \u2192 1,024"][1] == "\u2026\npaper 50.0"  # stands in Table 2 alone
    assert rows["learned, 256 \u2192 512"][2] == "\u2026\npaper \u221222.2"


def test_yarn_stands_beside_lengths_four_times_as_long(grid: Grid) -> None:
    table = comparison.yarn(grid, "list_recall")
    rows = {row[0]: row[1:] for row in table.rows}
    # 0.1 + 0.9 * 0.99 / 2 ** 0.7: 130 of 200 answers, 259 of 400 tokens
    cell = rows["meta, window 2,048, trained to 1,024 (seed 0)\npaper's 8k / 4k"][3]
    assert cell.startswith("65.0 (58.2")
    assert cell.endswith(")\ntokens 64.8, paper 93.9")
    assert table.footer[1] == ("n (prompts a seed)", *["200"] * 5)
    assert "50.0 % of the answer tokens here" in table.note  # 200 answers have 400 tokens
    assert table.header[4] == "2,048 (paper's 8k)"


def test_random_positions_stand_beside_plain_ones(grid: Grid) -> None:
    rows = {row[0]: row[1:] for row in control_tables.random_positions(grid, "list_recall").rows}
    assert rows["twin, random positions (seed 0)"][4] == "70.0 (63.3\u201375.9)"
    # 0.1 + 0.9 * 0.6 / 16 ** 0.7: 36 of 200 prompts
    assert rows["twin, plain, at 128 alone (seed 0)"][4].startswith("18.0 (")
    assert rows["twin, plain, first phase (seed 0)"][4].startswith("18.0 (")
    assert "twin, plain, at 128 alone" not in {row[0] for row in control_tables.random_positions(grid, "parity").rows}


def test_perplexity_shows_each_seed(grid: Grid) -> None:
    rows = {row[0]: row[1:] for row in measured.perplexity(grid).rows}
    assert rows["meta, rope"][0] == "77.10 (75.10\u201379.10)\n77.00 / 77.10 / 77.20"
    assert rows["gpt2, rope, equal-compute (seed 0)"][0] == "76.00 (74.00\u201378.00)"
    assert rows["gpt2, rope"][1] == ""
    assert measured.perplexity(grid).footer == (
        ("n (text tokens)", "51,234", "51,234", "\u2026", "51,234", "51,234", "\u2026"),
    )


def test_learning_says_who_never_got_there(grid: Grid) -> None:
    rows = {row[0]: row[1:] for row in measured.learning(grid).rows}
    assert rows["gpt2, rope"][0] == "2.55\u00a0M / 2.25\u00a0M / not reached"
    assert rows["meta, rope"] == ("900\u00a0k / 1.05\u00a0M / 1.2\u00a0M", "3\u00a0M", "200")


@pytest.mark.parametrize(
    ("accuracies", "reached"),
    [((0.1, 0.9, 0.95), 2), ((0.9, 0.8, 0.95), 3), ((0.1, 0.2, 0.89), None), ((0.95, 0.95, 0.2), None), ((), None)],
)
def test_tokens_to_learn_ask_for_an_accuracy_that_stays(accuracies: tuple[float, ...], reached: int | None) -> None:
    points = [
        RecallPoint(model="m", seed=0, step=step, text_tokens=step, exact_match=value)
        for step, value in enumerate(accuracies, start=1)
    ]
    assert tokens_to_learn(points) == reached


def test_two_seeds_a_side_do_not_tell_who_learns_first() -> None:
    points = [RecallPoint.model_validate(point) for point in learning() if point["seed"] < 2]
    only = claims(small(accuracy(0.5), recall=points))
    text = "Data-efficient: fewer tokens of fine-tuning than gpt2 to 90 % recall"
    assert verdict(only, text) == "cannot be told at this scale"


@pytest.mark.parametrize(
    ("rate", "distortion"), [(0.0, 2.0), (1.0, 1.5), (2.0, 1.0), (2.5, 1.4), (3.0, 1.8), (9.0, 0.5)]
)
def test_distortion_between_the_points_of_a_curve(rate: float, distortion: float) -> None:
    assert distortion_at([(0.0, 2.0), (2.0, 1.0), (3.0, 1.8), (4.0, 0.5)], rate) == pytest.approx(distortion)


def test_a_seed_that_disagrees_keeps_a_measurement_open() -> None:
    about = {"analysis": "sharpness", "metric": "premise_holds", "module": "attention"}
    ones = [measurement(value, **about, seed=seed) for seed, value in enumerate((0.9, 0.9, 0.4))]
    text = "Theorem 4.1 needs \u03b1 > exp(\u2212H): so it is in most rows"
    assert verdict(claims(small(accuracy(0.5), measurements=ones)), text) == "cannot be told at this scale"
    assert verdict(claims(small(accuracy(0.5), measurements=ones[:2])), text) == "holds"


def test_the_cost_is_in_core_hours(grid: Grid) -> None:
    section = cost(grid)
    assert section.intro.startswith("2.0 core-hours in 2 stages, of which 1 trained a model. Of a stage")
    [table] = section.blocks
    assert isinstance(table, comparison.Table)
    assert table.rows == (("pretrain", "1", "2 h 0 min"), ("evaluate", "1", "1 min 0 s"))


def test_table_1_has_the_papers_own_lengths_in_its_preset() -> None:
    own = accuracy(0.9, recipe="paper/yarn8", train_length=4096, length=8192)
    grid = Grid("paper", Inputs([own]))
    rows = {row[0]: row[1:] for row in comparison.yarn(grid, "list_recall").rows}
    figures = rows["meta, window 8,192, trained to 4,096 (seed 0)\npaper's 8k / 4k"]
    assert figures[3].startswith("90.0 (")
    assert "is the published model" in comparison.neo(grid)
    [wide] = (one for one in recall_claims.claims(grid) if one.text.startswith("YaRN 8"))
    assert [one.gap is None for one in wide.comparisons] == [True, True, True, False]


def test_models_that_have_not_learned_their_own_length_are_named() -> None:
    extended = accuracy(0.04, recipe="small/yarn8", train_length=1024, length=1024)
    grid = small(accuracy(0.79), accuracy(0.9, model="gpt2"), extended)
    assert comparison.unlearned(grid).endswith("tells little: meta, rope, 512 (79.0).")
    assert comparison.unlearned_yarn(grid).endswith("tells little: window 2,048, trained to 1,024 (4.0).")
    assert comparison.unlearned(small(accuracy(0.9))) == ""


def test_a_line_of_no_grid_counts_nowhere() -> None:
    plain = accuracy(1.0)
    grid = small(plain, plain.model_copy(update={"recipe": None, "value": 0.0}))
    cell = grid.accuracy(model="meta", position_embedding="rope", task="list_recall", train_length=512, length=512)
    assert cell is not None
    assert cell.seeds[0].value == 1.0


def test_two_grids_are_not_mixed() -> None:
    with pytest.raises(UserError, match="gpu and small"):
        grid_of(Inputs([accuracy(0.5), accuracy(0.5, recipe="gpu/unmarked")]))
    assert grid_of(Inputs([accuracy(0.5, recipe="demo")])) is None


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    inputs = read_inputs(write_grid(tmp_path))
    assert len(inputs.results) == len(results())
    assert len(inputs.measurements) == len(measurements())
    assert inputs.measurements[0].quantiles == measurements()[0].quantiles
    assert [point.model_dump(exclude={"recipe"}) for point in inputs.recall] == [
        RecallPoint.model_validate(point).model_dump(exclude={"recipe"}) for point in learning()
    ]
    assert len(inputs.speeds) == len(speeds())
    assert len(inputs.curves) == 5 * 4 * 100


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("small/analysis.jsonl", '{"analysis": "sharpness"}', "analysis.jsonl, line 1"),
        ("decode.jsonl", '{"benchmark": "decode", "model": "meta"}', "decode.jsonl, line 1: against"),
        ("small/curves.jsonl", '{"model": "meta", "seed": 0, "step": 1, "exact_match": 0.5}', "text_tokens"),
        ("small/curves.jsonl", '{"model": "meta", "seed": 0, "step": 1}', "loss"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, file: str, line: str, said: str) -> None:
    paths = write_grid(tmp_path, keep=lambda result: result.task == "parity")
    (tmp_path / file).write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_inputs(paths)
