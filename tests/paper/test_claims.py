"""How claims select the scores of runs, on lines made up by hand and judged by an independent slow reading of them."""

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student_t

from metatokens.paper.claims import Claim, ClaimResult, after_holm, claims, judge
from metatokens.paper.frame import load
from metatokens.paper.plan import stages
from metatokens.paper.presets import SMALL
from metatokens.paper.variants import finetune_recipe
from metatokens.records import pack_hits

Line = dict[str, Any]
SEEDS = (10, 11, 12, 13)
N = 80


def _line(value: float, /, bits: Sequence[bool] | None = None, **fields: Any) -> Line:
    """An accuracy of preset small; without bits it has an interval of 4 points to either side."""
    about = {"position_embedding": "rope", "condition": "paper", "train_condition": "paper", "metric": "exact_match"}
    ends = {"low": value - 0.04, "high": value + 0.04} if bits is None else {"hits": pack_hits(bits)}
    n = N if bits is None else len(bits)
    return {**about, "value": value, "n": n, "recipe": "small", "train_length": 128, "length": 128, **ends, **fields}


def _answered(seed: int, share: float, model: str, task: str, train_length: int, length: int) -> Line:
    """Bits that depend on the run, and on how hard each prompt of a length is for this model."""
    hard = np.random.default_rng([length, model == "meta", len(task)]).random(N)
    luck = np.random.default_rng([seed, length, train_length, model == "meta"]).random(N)
    bits = (0.6 * hard + 0.4 * luck < share).tolist()
    fields = {"model": model, "task": task, "train_length": train_length, "length": length}
    return _line(fmean(bits), bits, seed=seed, **fields)


def _judge(tmp_path: Path, lines: Iterable[Line], analyses: Iterable[Line] = (), **claim: Any) -> ClaimResult:
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "analysis.jsonl").write_text("".join(json.dumps(line) + "\n" for line in analyses))
    over = {"task": ["parity"], "train_length": [128, 512], "length": [128, 256, 512]}
    fields = {"text": "", "question": "", "only": "", "source": "", "a": "meta", "b": "gpt2", "over": over}
    return judge(load([tmp_path]), Claim.model_validate(fields | claim))


def _interval(effect: float, parts: Sequence[tuple[float, int]], prompts: float) -> tuple[float, float]:
    """By variances of means and their degrees of freedom."""
    runs = sum(part for part, _ in parts)
    freedom = runs**2 / sum(part**2 / degrees for part, degrees in parts)
    reach = float(student_t.ppf(0.975, freedom)) * (runs + prompts) ** 0.5
    return effect - reach, effect + reach


def test_two_models_over_tasks_and_settings(tmp_path: Path) -> None:
    """The same bits read prompt by prompt: two train lengths share the prompts of a length."""
    lines = [
        _answered(seed, 0.3 + gap + 0.03 * (seed % 3) + 0.02 * (train == 512), model, task, train, length)
        for task, skill in (("parity", 0.1), ("copying", 0.3))
        for model, gap in (("meta", skill), ("gpt2", 0.0))
        for seed in (SEEDS if model == "meta" else SEEDS[:3])
        for train in (128, 512)
        for length in (128, 256)
    ]
    over = {"task": ["parity", "copying"], "train_length": [128, 512], "length": [128, 256, 512]}
    judged = _judge(tmp_path, reversed(lines), over=over)

    parts, prompts, effects = [], 0.0, []
    for task in ("parity", "copying"):
        own = [line for line in lines if line["task"] == task]
        scores = {
            (model, seed): fmean(line["value"] for line in own if (line["model"], line["seed"]) == (model, seed))
            for model in ("meta", "gpt2")
            for seed in SEEDS
            if any((line["model"], line["seed"]) == (model, seed) for line in own)
        }
        sides = [[score for (its, _), score in scores.items() if its == model] for model in ("meta", "gpt2")]
        effects.append(fmean(sides[0]) - fmean(sides[1]))
        parts += [(variance(side) / len(side) / 4, len(side) - 1) for side in sides]
        by_length = ([line for line in own if line["length"] == length] for length in (128, 256))
        prompts += sum(_prompts_of(tested, weight=1 / 4) for tested in by_length) / 4
    assert prompts > 0.0003
    assert judged.effect.value == pytest.approx(fmean(effects))
    assert (judged.effect.low, judged.effect.high) == pytest.approx(_interval(fmean(effects), parts, prompts))
    assert [judged.tasks[task].value for task in ("parity", "copying")] == pytest.approx(effects)
    assert [stratum.seeds for stratum in judged.strata] == [(SEEDS, SEEDS[:3])] * 2


def _bits(line: Line) -> list[int]:
    return [byte >> place & 1 for byte in base64.b64decode(line["hits"]) for place in range(7, -1, -1)][: line["n"]]


def _prompts_of(lines: Sequence[Line], weight: float) -> float:
    """The variance from prompts by sums over runs and prompts, one cell at a time."""
    seeds = {model: sorted({line["seed"] for line in lines if line["model"] == model}) for model in ("meta", "gpt2")}
    cells = {
        model: [[weight * sum(_bits(line)[prompt] for line in lines if (line["model"], line["seed"]) == (model, seed))
                 for prompt in range(N)] for seed in own]
        for model, own in seeds.items()
    }  # fmt: skip
    gaps = [
        fmean(run[prompt] for run in cells["meta"]) - fmean(run[prompt] for run in cells["gpt2"]) for prompt in range(N)
    ]
    found = variance(gaps)
    for runs in cells.values():
        grand = fmean(map(fmean, runs))
        by_prompt = [fmean(run[prompt] for run in runs) for prompt in range(N)]
        squares = sum(
            (run[prompt] - fmean(run) - by_prompt[prompt] + grand) ** 2 for run in runs for prompt in range(N)
        )
        found -= squares / (len(runs) - 1) / (N - 1) / len(runs)
    return found / N


def test_an_intervention_is_compared_within_each_run(tmp_path: Path) -> None:
    """Runs that differ much lose the same: Student's t of the losses is sharp, and shared prompts cancel."""
    lines = []
    for seed, right in zip(SEEDS, (40, 50, 60, 70), strict=True):
        bits = [place < right for place in range(N)]
        worse = [place < right - 20 - seed % 2 for place in range(N)]
        lines += [_line(fmean(bits), bits, model="meta", task="parity", seed=seed)]
        lines += [_line(fmean(worse), worse, model="meta", task="parity", seed=seed, intervention="no_pos")]
    judged = _judge(tmp_path, lines, b={"model": "meta", "intervention": "no_pos"})
    [stratum] = judged.strata
    assert stratum.seeds == (SEEDS,)
    assert stratum.samples[0] == pytest.approx([20 / 80, 21 / 80, 20 / 80, 21 / 80])
    assert judged.effect.freedom == pytest.approx(3)
    assert judged.verdict == "supported"


def test_a_test_with_fewer_prompts_is_compared_on_those_alone(tmp_path: Path) -> None:
    """The run with No Pos had the first 20 of 80 prompts: what it lost there counts, not what the others show."""
    lines = []
    for seed in SEEDS:
        bits = [place % 2 == 0 for place in range(20)] + [place < 20 + seed for place in range(20, N)]
        few = [right and place > 3 + seed % 2 for place, right in enumerate(bits[:20])]
        lines += [_line(fmean(bits), bits, model="meta", task="parity", seed=seed)]
        lines += [_line(fmean(few), few, model="meta", task="parity", seed=seed, intervention="no_pos")]
    judged = _judge(tmp_path, lines, b={"model": "meta", "intervention": "no_pos"})
    assert judged.strata[0].samples[0] == pytest.approx([2 / 20, 3 / 20, 2 / 20, 3 / 20])
    assert judged.strata[0].settings[0].means == pytest.approx((0.5, 0.375))


def test_without_bits_the_intervals_of_the_lines_count_as_wholly_dependent(tmp_path: Path) -> None:
    """The error of a side is the mean over its runs, and over the train lengths of a length's prompts."""
    lines = [
        _line(share + 0.01 * seed, model=model, task="parity", seed=seed, train_length=train, length=length)
        for model, share in (("meta", 0.5), ("gpt2", 0.3))
        for seed in SEEDS
        for train, length in ((128, 128), (128, 256), (512, 128))
    ]
    judged = _judge(tmp_path, lines)
    one = 0.04 / 1.96
    by_length = [2 / 3 * one, 1 / 3 * one]  # 128 was tested twice, 256 once
    assert judged.strata[0].prompts == pytest.approx(2 * sum(error**2 for error in by_length))


def _pair(meta: float, gpt2: float, **fields: Any) -> list[Line]:
    return [
        _line(value + 0.001 * seed, model=model, seed=seed, **fields)
        for model, value in (("meta", meta), ("gpt2", gpt2))
        for seed in SEEDS
    ]


def test_settings_in_which_both_guess_or_are_at_the_ceiling_are_left_out(tmp_path: Path) -> None:
    lines = [
        *_pair(0.52, 0.53, task="parity", chance=0.5),
        *_pair(0.8, 0.5, task="parity", length=256, chance=0.5),
        *_pair(0.985, 0.975, task="parity", length=512, chance=0.5),
        *_pair(0.1, 0.2, task="segment_counting"),
        *_pair(0.1, 0.32, task="segment_counting", length=256),
        *_pair(0.01, 0.02, task="copying", chance=0.0),
    ]
    for length in (128, 256):
        shortcut = {"model": "the commonest answer", "metric": "shortcut", "task": "segment_counting", "length": length}
        lines.append({**shortcut, "condition": "paper", "value": 0.21, "n": 500, "seed": 2026, "recipe": "small"})
    over = {"task": ["parity", "segment_counting", "copying"], "train_length": [128], "length": [128, 256, 512]}
    judged = _judge(tmp_path, lines, over=over)
    assert {task: round(found.value, 3) for task, found in judged.tasks.items()} == {
        "parity": 0.3,
        "segment_counting": -0.22,
    }
    strata = (*judged.strata, *judged.empty_strata)
    reasons = [setting.left_out for stratum in strata for setting in stratum.settings]
    assert reasons == ["both guess", "", "both exceed 98 %", "both guess", "", "both guess"]
    assert judged.strata[0].settings[1].means == pytest.approx((0.8115, 0.5115))

    nothing_lost = _judge(tmp_path, lines, over=over, kind="match")
    assert [setting.left_out for setting in nothing_lost.strata[0].settings] == ["both guess", "", ""]
    nothing_there = _judge(tmp_path, lines, over=over | {"task": ["copying"]})
    assert (nothing_there.verdict, nothing_there.strata) == ("inconclusive", ())


def test_what_longer_training_adds_is_a_difference_of_differences_within_runs(tmp_path: Path) -> None:
    gains = {"meta": (0.2, 0.22, 0.24, 0.18), "gpt2": (0.1, 0.11, 0.08, 0.11)}
    lines = [
        _line(0.3 + 0.1 * place + more, model=model, task="parity", seed=seed, train_length=train, length=256)
        for model, own in gains.items()
        for place, (seed, gain) in enumerate(zip(SEEDS, own, strict=True))
        for train, more in ((128, 0.0), (512, gain))
    ]
    over = {"task": ["parity"], "train_length": [256, 512], "length": [256]}
    judged = _judge(tmp_path, lines, less={"train_length": 128}, over=over)
    assert judged.strata[0].samples[0] == pytest.approx(gains["meta"])
    assert judged.strata[0].samples[1] == pytest.approx([-gain for gain in gains["gpt2"]])
    assert judged.effect.value == pytest.approx(0.21 - 0.1)
    assert judged.strata[0].settings[0].fields == {"task": "parity", "train_length": 512, "length": 256}


def test_a_bound_and_guessing_as_a_bound(tmp_path: Path) -> None:
    lines = _pair(0.9, 0.5, task="parity", chance=0.5)
    bound = _judge(tmp_path, lines, b=0.8, kind="above")
    assert bound.effect.value == pytest.approx(0.1 + 0.0115)
    assert len(bound.strata[0].samples) == 1
    assert _judge(tmp_path, lines, b="chance", kind="above").effect.value == pytest.approx(0.4 + 0.0115)
    assert _judge(tmp_path, lines, a=0.8, b="meta", kind="above").effect.value == pytest.approx(-0.1 - 0.0115)


def test_only_runs_with_every_setting_count(tmp_path: Path) -> None:
    lines = [*_pair(0.8, 0.6, task="parity"), *_pair(0.7, 0.6, task="parity", length=256)]
    lines = [line for line in lines if (line["model"], line["seed"], line["length"]) != ("meta", 11, 256)]
    assert _judge(tmp_path, lines).strata[0].seeds == ((10, 12, 13), SEEDS)


def test_one_run_or_none_on_a_side(tmp_path: Path) -> None:
    lines = [line for line in _pair(0.8, 0.6, task="parity") if line["model"] == "meta" or line["seed"] == 10]
    one = _judge(tmp_path, lines)
    assert one.verdict == "inconclusive"
    none = _judge(tmp_path, [line for line in lines if line["model"] == "meta"])
    assert none.verdict == "not run"


def test_a_claim_about_all_tasks_against_two_models(tmp_path: Path) -> None:
    lines = [*_pair(0.8, 0.6, task="parity"), *_pair(0.8, 0.5, task="copying", chance=0.0)]
    over = {"task": ["parity", "copying"], "train_length": [128], "length": [128]}
    both = _judge(tmp_path, lines, universal=True, over=over, smallest=0.05)
    assert both.verdict == "supported"
    assert both.effect.value == pytest.approx(0.2)  # the worst case
    assert _judge(tmp_path, lines, universal=True, over=over, b=["gpt2", "gpt-neo"]).verdict == "inconclusive"
    worse = [*lines, *({**line, "model": "gpt-neo", "value": line["value"] + 0.3} for line in lines[4:8])]
    assert _judge(tmp_path, worse, universal=True, over=over, b=["gpt2", "gpt-neo"]).verdict == "contradicted"


def test_models_that_differ_in_training_are_strata_of_their_task(tmp_path: Path) -> None:
    """What each run keeps from one train length to the next, for two models in two tasks."""
    lines = [
        _line(0.9 - lost * (train == 512) + 0.001 * seed, model=model, task=task, seed=seed, train_length=train)
        for task, model, lost in (("parity", "meta", 0.0), ("parity", "gpt2", 0.2), ("copying", "meta", 0.5))
        for seed in SEEDS
        for train in (128, 512)
    ]
    over = {"task": ["parity", "copying"], "model": ["gpt2", "meta"], "length": [128]}
    judged = _judge(tmp_path, lines, a={"train_length": 512}, b={"train_length": 128}, over=over, kind="match")
    assert judged.effect.value == pytest.approx(-(0.1 + 0.5) / 2)
    assert [stratum.fields for stratum in judged.strata] == [
        {"task": "parity", "model": "gpt2"},
        {"task": "parity", "model": "meta"},
        {"task": "copying", "model": "meta"},
    ]


def test_heads_and_layers_are_averaged_within_a_run(tmp_path: Path) -> None:
    about = {"analysis": "residual", "metric": "attention_weight", "model": "meta", "position_embedding": "rope"}
    about |= {"task": "list_recall", "keys": "earlier_meta", "module": "attention", "recipe": "small", "n": 100}
    analyses = [
        {**about, "seed": seed, "layer": layer, "head": head, "value": 0.1 * layer + 0.02 * head + 0.001 * seed}
        for seed in SEEDS
        for layer in (0, 1)
        for head in (0, 1)
    ]
    even = {**about, "metric": "attention_weight_if_uniform"}
    analyses += [{**even, "seed": seed, "value": 0.05} for seed in SEEDS]
    sides = [{"model": "meta", "metric": one, "keys": "earlier_meta"} for one in (about["metric"], even["metric"])]
    over = {"task": ["list_recall"], "position_embedding": ["rope"]}
    judged = _judge(tmp_path, _pair(0.5, 0.5, task="parity"), analyses, a=sides[0], b=sides[1], over=over)
    assert judged.strata[0].samples[0] == pytest.approx([0.05 + 0.01 + 0.001 * seed - 0.05 for seed in SEEDS])


def test_the_papers_claims_are_numbered_and_three_claims_are_primary() -> None:
    numbers = [claim.number for claim in claims() if claim.number]
    assert sorted(numbers) == list(range(1, 27))
    assert [claim.text for claim in claims() if claim.primary] == [
        "meta beats gpt2 up to 512 tokens",
        "The mask, not the parameters: meta beats twin up to 512 tokens",
        "meta beats gpt2 at 2 and 4 times the train length",
    ]
    assert len({claim.text for claim in claims()}) == len(claims())
    ours = ("control", "beyond the paper")
    assert all((claim.number is None) == (claim.source in ours) for claim in claims())


def test_what_the_preset_measures_through_landmarks_judges_the_claims_on_it(tmp_path: Path) -> None:
    """The lines have the fields of the preset's stages; more parameters and fewer facts are better in them."""
    lines = []
    for stage in (stage for stage in stages(SMALL) if "landmarks" in stage.tables and "counts" in stage.settings):
        model, task = stage.subject["model"], stage.subject["task"]
        [condition] = stage.settings["counts"]
        alone = {"intervention": "landmarks_alone"} if stage.settings.get("question_sees") else {}
        facts = int(condition.removeprefix("facts_")) if "facts" in condition else 4
        skill = {"gpt2": 0.5, "pause": 0.6, "twin": 0.7, "meta": 0.9}[model.model] - 0.02 * facts
        untrained = 0.6 if model.model == "meta" else 0.5
        value = skill - 0.2 * model.variant.endswith("in-sight") if model.variant else untrained
        trained = {"train_condition": finetune_recipe(SMALL, model, task).task.condition, "train_length": 128}
        about = model.subject("small", task=task, condition=condition, length=128, **trained, **alone)
        figure = {"metric": "exact_match", "value": value + 0.001 * model.seed, "n": 2000}
        lines.append(about.present_fields(**figure, chance=0.5 if task == "parity" else 0.1))
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    inputs = load([tmp_path])
    judged = [judge(inputs, claim) for claim in claims() if claim.only == "landmarks"]
    assert len(judged) == 12
    words = {one.claim.text: one.verdict for one in judged}
    assert [text for text, word in words.items() if word != "supported"] == [
        "With one fact per landmark pause loses nothing against meta (5 points)"
    ]
    assert words["With one fact per landmark pause loses nothing against meta (5 points)"] == "contradicted"
    effects = {one.claim.text: one.effect.value for one in judged}
    mask = "The mask, not the parameters: with four facts per landmark meta beats twin"
    assert effects[mask] == pytest.approx(0.2)
    assert effects["More facts per landmark, less is held: one beats eight"] == pytest.approx(0.14)
    assert effects["Training through landmarks alone helps to hold four facts per landmark"] == pytest.approx(0.202)


def test_every_claim_can_be_judged(tmp_path: Path) -> None:
    """No claim names a column or a metric that does not exist; the primary ones are corrected for being three."""
    lines = [
        *_pair(0.9, 0.5, task="parity", length=256, chance=0.5),
        *({**line, "model": "twin"} for line in _pair(0.1, 0.6, task="parity", length=256)[4:]),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged = [judge(load([tmp_path]), claim) for claim in claims()]
    told = {one.claim.text: one.verdict for one in judged if one.verdict != "not run"}
    assert {text for text, word in told.items() if word == "supported"} >= {
        one.claim.text for one in judged if one.claim.primary
    }
    assert after_holm(judged) == {one.claim.text: True for one in judged if one.claim.primary}
