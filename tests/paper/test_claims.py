"""How claims select the scores of runs, on lines made up by hand and judged by an independent slow reading of them."""

import base64
from statistics import fmean, variance

import numpy as np
import pytest
from scipy.stats import t as student_t

from metatokens.paper.claims import Claim, claims, judge
from metatokens.paper.frame import load
from metatokens.paper.plan import stages
from metatokens.paper.presets import PRESETS
from metatokens.paper.variants import finetune_recipe
from metatokens.records import pack_hits
from tests.paper.report.made_lines import accuracy, inner, shortcut, write

SEEDS = (10, 11, 12, 13)
N = 80
META, GPT2 = {"model": "meta"}, {"model": "gpt2"}
PARITY = {"task": ["parity"], "train_length": [128, 512], "length": [128, 256, 512]}


def score(value, **fields):
    """An accuracy on 128 tokens with an interval of 4 points to either side, and no bits."""
    short = {
        "train_length": 128,
        "length": 128,
        "chance": None,
        "low": value - 0.04,
        "high": value + 0.04,
    }
    return accuracy(value, N, **short | fields)


def answered(hits, **fields):
    """An accuracy with a bit for each prompt."""
    return score(fmean(hits), hits=pack_hits(hits), n=len(hits), low=None, high=None, **fields)


@pytest.fixture
def judged(tmp_path):
    """Judges a claim, by default that `meta` beats `gpt2` on parity, on some lines."""

    def judged(results, analysis=(), **claim):
        inputs = load([write(tmp_path, results=results, analysis=analysis)])
        fields = {
            "text": "",
            "question": "",
            "only": "",
            "source": "",
            "a": META,
            "b": GPT2,
            "over": PARITY,
        }
        return judge(inputs, Claim.model_validate(fields | claim))

    return judged


def run_against_run(meta, gpt2, **fields):
    """Four runs of each model, whose scores differ little."""
    lines = []
    for model, value in (("meta", meta), ("gpt2", gpt2)):
        lines += [score(value + 0.001 * seed, model=model, seed=seed, **fields) for seed in SEEDS]
    return lines


# --- the effect and its interval, against sums over runs and prompts


def drawn(seed, share, model, task, train_length, length):
    """Bits that depend on the run, and on how hard each prompt of a length is for this model."""
    difficulty = np.random.default_rng([length, model == "meta", len(task)]).random(N)
    luck = np.random.default_rng([seed, length, train_length, model == "meta"]).random(N)
    hits = (0.6 * difficulty + 0.4 * luck < share).tolist()
    return answered(
        hits,
        model=model,
        task=task,
        train_length=train_length,
        length=length,
        seed=seed,
    )


def draw_two_models():
    lines = []
    for task, skill in (("parity", 0.1), ("copying", 0.3)):
        for model, seeds, gap in (("meta", SEEDS, skill), ("gpt2", SEEDS[:3], 0.0)):
            for seed in seeds:
                for train_length in (128, 512):
                    for length in (128, 256):
                        share = 0.3 + gap + 0.03 * (seed % 3) + 0.02 * (train_length == 512)
                        lines.append(drawn(seed, share, model, task, train_length, length))
    return lines


def scores_of_runs(lines, model):
    """The mean score of each run of a model."""
    by_seed: dict[int, list[float]] = {}
    for line in lines:
        if line["model"] == model:
            by_seed.setdefault(line["seed"], []).append(line["value"])
    return [fmean(values) for values in by_seed.values()]


def bits_of(line):
    packed = np.frombuffer(base64.b64decode(line["hits"]), dtype=np.uint8)
    return np.unpackbits(packed)[: line["n"]]


def slow_prompt_variance(lines, weight):
    """The variance from prompts by sums over runs and prompts."""
    table = {}
    for model in ("meta", "gpt2"):
        by_seed: dict[int, np.ndarray] = {}
        for line in lines:
            if line["model"] == model:
                by_seed[line["seed"]] = by_seed.get(line["seed"], 0) + weight * bits_of(line)
        table[model] = np.array(list(by_seed.values()))
    gaps = table["meta"].mean(axis=0) - table["gpt2"].mean(axis=0)
    total = variance(gaps)
    for runs in table.values():
        residuals = runs - runs.mean(axis=1, keepdims=True) - runs.mean(axis=0) + runs.mean()
        total -= (residuals**2).sum() / (len(runs) - 1) / (N - 1) / len(runs)
    return total / N


def seeds_of(stratum):
    """The seeds of each sample."""
    return tuple(tuple(sample) for sample in stratum.samples)


def test_two_models_over_tasks_and_settings(judged):
    """The same bits read prompt by prompt: two train lengths share the prompts of a length."""
    lines = draw_two_models()
    over = {
        "task": ["parity", "copying"],
        "train_length": [128, 512],
        "length": [128, 256, 512],
    }

    result = judged(lines[::-1], over=over)

    effects, prompts = [], 0.0
    for task in ("parity", "copying"):
        of_task = [line for line in lines if line["task"] == task]
        meta, gpt2 = scores_of_runs(of_task, "meta"), scores_of_runs(of_task, "gpt2")
        effects.append(fmean(meta) - fmean(gpt2))
        for length in (128, 256):
            of_length = [line for line in of_task if line["length"] == length]
            prompts += slow_prompt_variance(of_length, weight=1 / 4) / 4
    variances_of_runs, degrees = [], []
    for model in ("meta", "gpt2"):
        of_seeds = scores_of_runs(lines, model)
        variances_of_runs.append(variance(of_seeds) / len(of_seeds))
        degrees.append(len(of_seeds) - 1)
    of_runs = sum(variances_of_runs)
    squares = sum(part**2 / degree for part, degree in zip(variances_of_runs, degrees, strict=True))
    reach = student_t.ppf(0.975, of_runs**2 / squares) * (of_runs + prompts) ** 0.5
    assert prompts > 0.0003
    assert result.effect.value == pytest.approx(fmean(effects))
    assert result.effect.low == pytest.approx(fmean(effects) - reach)
    assert result.effect.high == pytest.approx(fmean(effects) + reach)
    effects_of_tasks = [result.tasks[task].value for task in ("parity", "copying")]
    assert effects_of_tasks == pytest.approx(effects)
    for stratum in result.strata:
        assert seeds_of(stratum) == (SEEDS, SEEDS[:3])


def first_right(right):
    """Bits of which so many are right, the first ones."""
    return [prompt < right for prompt in range(N)]


def test_an_intervention_is_compared_within_each_run(judged):
    """Runs that differ much lose the same: Student's t of the losses is sharp, and shared prompts cancel."""
    lines = []
    for seed, right, lost in ((10, 40, 20), (11, 50, 21), (12, 60, 20), (13, 70, 21)):
        lines.append(answered(first_right(right), task="parity", seed=seed))
        lines.append(
            answered(
                first_right(right - lost),
                task="parity",
                seed=seed,
                intervention="no_pos",
            )
        )

    result = judged(lines, b={"model": "meta", "intervention": "no_pos"})

    [stratum] = result.strata
    assert seeds_of(stratum) == (SEEDS,)
    assert [*stratum.samples[0].values()] == pytest.approx([20 / 80, 21 / 80, 20 / 80, 21 / 80])
    assert result.verdict == "supported"


def test_a_test_with_fewer_prompts_is_compared_on_those_alone(judged):
    """The run with No Pos had the first 20 of 80 prompts: what it lost there counts, not what the others show."""
    lines = []
    for seed, lost in ((10, 2), (11, 3), (12, 2), (13, 3)):
        first_twenty = [True] * 10 + [False] * 10
        lines.append(
            answered(
                first_twenty + [True] * seed + [False] * (60 - seed),
                task="parity",
                seed=seed,
            )
        )
        worse = [True] * (10 - lost) + [False] * (10 + lost)
        lines.append(answered(worse, task="parity", seed=seed, intervention="no_pos"))

    result = judged(lines, b={"model": "meta", "intervention": "no_pos"})

    [stratum] = result.strata
    assert [*stratum.samples[0].values()] == pytest.approx([2 / 20, 3 / 20, 2 / 20, 3 / 20])
    assert stratum.settings[0].means == pytest.approx((0.5, 0.375))


def test_without_bits_the_intervals_of_the_lines_count_as_wholly_dependent(judged):
    """The error of a side is the mean over its runs, and over the train lengths of a length's prompts."""
    lines = [
        *run_against_run(0.5, 0.3, task="parity"),
        *run_against_run(0.5, 0.3, task="parity", length=256),
        *run_against_run(0.5, 0.3, task="parity", train_length=512),
    ]

    result = judged(lines)

    error = 0.04 / 1.96
    at_128, at_256 = 2 / 3 * error, 1 / 3 * error  # 128 was tested twice, 256 once
    assert result.strata[0].prompts == pytest.approx(2 * (at_128**2 + at_256**2))


# --- what counts


def reasons_of(result):
    """Why each setting was left out."""
    reasons = []
    for stratum in (*result.strata, *result.empty_strata):
        reasons += [setting.left_out for setting in stratum.settings]
    return reasons


def test_settings_in_which_both_guess_or_are_at_the_ceiling_are_left_out(judged):
    lines = [
        *run_against_run(0.52, 0.53, task="parity", chance=0.5),
        *run_against_run(0.8, 0.5, task="parity", length=256, chance=0.5),
        *run_against_run(0.985, 0.975, task="parity", length=512, chance=0.5),
        *run_against_run(0.1, 0.2, task="segment_counting"),
        *run_against_run(0.1, 0.32, task="segment_counting", length=256),
        *run_against_run(0.01, 0.02, task="copying", chance=0.0),
        shortcut(0.21, "segment_counting", 128, model="the commonest answer"),
        shortcut(0.21, "segment_counting", 256, model="the commonest answer"),
    ]
    over = {
        "task": ["parity", "segment_counting", "copying"],
        "train_length": [128],
        "length": [128, 256, 512],
    }

    gain = judged(lines, over=over)
    match = judged(lines, over=over, kind="match")
    copying = judged(lines, over=over | {"task": ["copying"]})

    assert reasons_of(gain) == [
        "both guess",
        "",
        "both exceed 98 %",
        "both guess",
        "",
        "both guess",
    ]
    assert gain.tasks["parity"].value == pytest.approx(0.3)
    assert gain.tasks["segment_counting"].value == pytest.approx(-0.22)
    # A claim that nothing is lost has no ceiling.
    assert reasons_of(match)[:3] == [
        "both guess",
        "",
        "",
    ]
    assert (copying.verdict, copying.strata) == ("inconclusive", ())


def test_what_longer_training_adds_is_a_difference_of_differences_within_runs(judged):
    gains = {"meta": (0.2, 0.22, 0.24, 0.18), "gpt2": (0.1, 0.11, 0.08, 0.11)}
    lines = []
    for model, gains_of_runs in gains.items():
        for seed, gain in zip(SEEDS, gains_of_runs, strict=True):
            run = {"model": model, "task": "parity", "seed": seed, "length": 256}
            before = 0.03 * seed
            lines.append(score(before, **run, train_length=128))
            lines.append(score(before + gain, **run, train_length=512))
    over = {"task": ["parity"], "train_length": [256, 512], "length": [256]}

    result = judged(lines, less={"train_length": 128}, over=over)

    [stratum] = result.strata
    assert [*stratum.samples[0].values()] == pytest.approx(gains["meta"])
    losses = [-gain for gain in gains["gpt2"]]
    assert [*stratum.samples[1].values()] == pytest.approx(losses)
    assert result.effect.value == pytest.approx(0.21 - 0.1)
    assert stratum.settings[0].fields == {
        "task": "parity",
        "train_length": 512,
        "length": 256,
    }


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(META, 0.8, 0.1), (META, "chance", 0.4), (0.8, META, -0.1)],
)
def test_a_bound_and_guessing_as_a_bound(a, b, expected, judged):
    lines = run_against_run(0.9 - 0.0115, 0.5, task="parity", chance=0.5)

    result = judged(lines, a=a, b=b, kind="above")

    assert result.effect.value == pytest.approx(expected)
    assert len(result.strata[0].samples) == 1


def test_only_runs_with_every_setting_count(judged):
    lines = run_against_run(0.8, 0.6, task="parity")
    for line in run_against_run(0.7, 0.6, task="parity", length=256):
        if (line["model"], line["seed"]) != ("meta", 11):
            lines.append(line)

    assert seeds_of(judged(lines).strata[0]) == ((10, 12, 13), SEEDS)


def test_a_claim_about_all_tasks_against_two_models(judged):
    parity = run_against_run(0.8, 0.6, task="parity")
    lines = [*parity, *run_against_run(0.8, 0.5, task="copying", chance=0.0)]
    better = [{**line, "model": "gpt-neo", "value": line["value"] + 0.3} for line in parity[4:]]
    over = {"task": ["parity", "copying"], "train_length": [128], "length": [128]}
    everywhere = {"universal": True, "over": over, "smallest": 0.05}

    against_gpt2 = judged(lines, **everywhere)
    without_runs = judged(lines, **everywhere, b=[GPT2, {"model": "gpt-neo"}])
    against_both = judged([*lines, *better], **everywhere, b=[GPT2, {"model": "gpt-neo"}])

    assert against_gpt2.verdict == "supported"
    assert against_gpt2.effect.value == pytest.approx(0.2)  # the worst case
    assert without_runs.verdict == "inconclusive"
    assert against_both.verdict == "no lead"


def test_models_that_differ_in_training_are_strata_of_their_task(judged):
    """What each run keeps from one train length to the next, for two models in two tasks."""
    lines = []
    for task, model, lost in (
        ("parity", "meta", 0.0),
        ("parity", "gpt2", 0.2),
        ("copying", "meta", 0.5),
    ):
        for seed in SEEDS:
            run = {"model": model, "task": task, "seed": seed}
            lines.append(score(0.8 + 0.001 * seed, **run, train_length=128))
            lines.append(score(0.8 + 0.001 * seed - lost, **run, train_length=512))
    over = {"task": ["parity", "copying"], "model": ["gpt2", "meta"], "length": [128]}

    result = judged(
        lines, a={"train_length": 512}, b={"train_length": 128}, over=over, kind="match"
    )

    assert result.effect.value == pytest.approx(-(0.1 + 0.5) / 2)
    strata = [stratum.fields for stratum in result.strata]
    assert strata == [
        {"task": "parity", "model": "gpt2"},
        {"task": "parity", "model": "meta"},
        {"task": "copying", "model": "meta"},
    ]


def test_heads_and_layers_are_averaged_within_a_run(judged):
    analysis = []
    for seed in SEEDS:
        measured = {"keys": "earlier_meta", "module": "attention", "seed": seed}
        for layer in (0, 1):
            for head in (0, 1):
                value = 0.1 * layer + 0.02 * head + 0.001 * seed
                analysis.append(
                    inner(
                        "residual",
                        "attention_weight",
                        value,
                        **measured,
                        layer=layer,
                        head=head,
                    )
                )
        analysis.append(inner("residual", "attention_weight_if_uniform", 0.05, **measured))
    weight = {"model": "meta", "metric": "attention_weight", "keys": "earlier_meta"}
    uniform = weight | {"metric": "attention_weight_if_uniform"}
    over = {"task": ["list_recall"], "position_embedding": ["rope"]}

    result = judged(
        run_against_run(0.5, 0.5, task="parity"),
        analysis,
        a=weight,
        b=uniform,
        over=over,
    )

    means = [0.05 + 0.01 + 0.001 * seed for seed in SEEDS]
    differences = [mean - 0.05 for mean in means]
    assert [*result.strata[0].samples[0].values()] == pytest.approx(differences)


# --- the claims themselves


def test_the_papers_claims_are_numbered_and_three_claims_are_primary():
    numbers = [claim.number for claim in claims() if claim.number]
    primary = [claim.text for claim in claims() if claim.primary]

    assert sorted(numbers) == list(range(1, 27))
    assert primary == [
        "meta beats gpt2 up to 512 tokens",
        "The mask, not the parameters: meta beats twin up to 512 tokens",
        "meta beats gpt2 at 2 and 4 times the train length",
    ]
    for claim in claims():
        is_ours = claim.source.startswith(("control", "beyond the paper"))
        assert (claim.number is None) == is_ours


def landmark_lines():
    """Lines with the fields of the stages of `small`; more parameters and fewer facts are better in them."""
    small = PRESETS["small"]
    skills = {"gpt2": 0.5, "pause": 0.6, "twin": 0.7, "meta": 0.9}
    lines = []
    for stage in stages(small):
        if "landmarks" not in stage.tables or "counts" not in stage.settings:
            continue
        model, task = stage.subject["model"], stage.subject["task"]
        [condition] = stage.settings["counts"]
        facts = int(condition.removeprefix("facts_")) if "facts" in condition else 4
        if model.variant:
            value = skills[model.model] - 0.02 * facts - 0.2 * model.variant.endswith("in-sight")
        else:
            value = 0.6 if model.model == "meta" else 0.5
        fields = {
            "model": model.model,
            "seed": model.seed,
            "recipe": f"small/{model.variant}" if model.variant else "small",
            "task": task,
            "condition": condition,
            "train_condition": finetune_recipe(small, model, task).task.condition,
        }
        if stage.settings.get("question_sees"):
            fields["intervention"] = "landmarks_alone"
        chance = 0.5 if task == "parity" else 0.1
        lines.append(
            score(value + 0.001 * model.seed, **fields, chance=chance, low=None, high=None)
        )
    return lines


def test_what_the_preset_measures_through_landmarks_judges_the_claims_on_it(tmp_path):
    inputs = load([write(tmp_path, results=landmark_lines())])

    results = {claim.text: judge(inputs, claim) for claim in claims() if claim.only == "landmarks"}

    assert len(results) == 12
    contradicted = "With one fact per landmark pause loses nothing against meta (5 points)"
    for text, result in results.items():
        assert result.verdict == ("contradicted" if text == contradicted else "supported"), text
    mask = results["The mask, not the parameters: with four facts per landmark meta beats twin"]
    fewer_facts = results["More facts per landmark, less is held: one beats eight"]
    assert mask.effect.value == pytest.approx(0.2)
    assert fewer_facts.effect.value == pytest.approx(0.14)


def test_every_claim_can_be_judged(tmp_path):
    """No claim names a column or a metric that does not exist; the primary ones are corrected for being three."""
    lines = run_against_run(0.9, 0.5, task="parity", length=256, chance=0.5)
    for line in run_against_run(0.1, 0.6, task="parity", length=256)[4:]:
        lines.append(line | {"model": "twin"})
    inputs = load([write(tmp_path, results=lines)])

    results = [judge(inputs, claim) for claim in claims()]

    primary = [result for result in results if result.claim.primary]
    verdicts = [result.verdict for result in primary]
    assert verdicts == ["supported"] * 3
    assert all(result.holds_among(3) for result in primary)
