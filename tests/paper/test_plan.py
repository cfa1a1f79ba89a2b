"""The presets and their stages: one text, one set of prompts and one budget for all models."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import signature
from itertools import product
from pathlib import Path

import pytest

from benchmarks.speed.cost import flops, forward_products
from metatokens.data.insertion import meta_token_count
from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.paper.plan import Stage, examples_name, select, stages
from metatokens.paper.presets import DEMO, GPU, PAPER, PRESETS, SMALL
from metatokens.paper.runner import Runner
from metatokens.paper.variants import (
    Preset,
    TrainedModel,
    counts_of,
    extend_recipe,
    finetune_recipe,
    lengths_tested,
    pretrain_recipe,
)
from metatokens.recipe import FinetuneRecipe, load_recipe
from metatokens.tasks import curriculum, parity
from metatokens.tasks.curriculum import CONDITIONS, TASKS

MODELS = ("gpt2", "pause", "twin", "meta")

all_presets = pytest.mark.parametrize("name", PRESETS)


@cache
def planned(name: str) -> list[Stage]:
    """The plan of a preset, made once, since that of a large preset takes half a second."""
    return stages(PRESETS[name])


@all_presets
def test_every_stage_comes_after_what_it_needs(name: str) -> None:
    sizes, plan = PRESETS[name], planned(name)
    needs: dict[str, set[str]] = {}
    for stage in plan:
        assert stage.name not in needs
        assert needs.keys() >= set(stage.after), stage.name
        needs[stage.name] = set(stage.after).union(*map(needs.__getitem__, stage.after))
    for one in sizes.models:
        pretrained = f"{'fetch' if one.published else 'pretrain'}-{one.pretrained_as or one.name}"
        assert "tokenize" in needs[pretrained]
        if one.extension is not None:
            assert pretrained in needs[f"extend-{one.name}"]
            assert f"extend-{one.name}" in needs[f"perplexity-{one.name}"]
        elif one.pretrained_as is None:
            assert pretrained in needs[f"perplexity-{one.name}"]
        else:
            assert f"perplexity-{one.name}" not in needs
        for task in one.tasks:
            tuned, extended = f"finetune-{one.name}-{task}", f"extend-{one.name}"
            assert {pretrained, f"draw_tests-{task}-{finetune_recipe(sizes, one, task).task.condition}"} <= needs[tuned]
            assert extended not in needs or extended in needs[tuned]
            assert tuned in needs[f"evaluate-{one.name}-{task}"]
    assert all(stage.cost > 0 for stage in plan)


def test_a_new_task_is_planned_and_answers_to_its_name(
    metatokens: Callable[[str], tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The steps of CONTRIBUTING.md.
    monkeypatch.setitem(sys.modules, "metatokens.tasks.reversal", parity)
    monkeypatch.setattr(curriculum, "TASKS", (*curriculum.TASKS, "reversal"))
    models = tuple(replace(model, tasks=curriculum.TASKS) for model in DEMO.models)  # their default
    recipes = {**DEMO.finetune_recipes, "reversal": "small_parity"}
    monkeypatch.setitem(PRESETS, "demo", replace(DEMO, models=models, finetune_recipes=recipes))
    for given, is_all in (("", True), ("--only reversal", False)):
        status, output, error = metatokens(f"reproduce --preset demo --dry-run {given} --out {tmp_path}")
        assert (status, error.splitlines()[-1].split(",")[0].endswith("stages")) == (0, True)
        names = {line.split()[-1] for line in output.splitlines()}
        expected = {f"{kind}-{model}-reversal" for kind in ("finetune", "evaluate") for model in ("gpt2", "meta")}
        assert expected | {"draw_tests-reversal-paper", "tokenize"} <= names
        assert ("finetune-meta-parity" in names) == is_all


@all_presets
def test_every_stage_gives_its_method_what_it_takes(name: str) -> None:
    for stage in planned(name):
        signature(getattr(Runner, stage.method)).bind("the runner", "progress", **stage.subject, **stage.options)


@all_presets
def test_all_models_read_the_same_text_for_the_same_steps(name: str) -> None:
    sizes = PRESETS[name]
    plain = [TrainedModel(model=model) for model in MODELS]
    assert {one.model for one in sizes.models} >= ({"gpt2", "meta"} if name == "demo" else {*MODELS})
    recipes = {one.model: pretrain_recipe(sizes, one) for one in plain}
    blocks = {model: recipe.data for model, recipe in recipes.items()}
    text = {
        model: data.block_size - meta_token_count(data.block_size, data.fraction, data.placement)
        for model, data in blocks.items()
    }
    assert len(set(text.values())) == 1
    assert len({recipe.training.model_dump_json() for recipe in recipes.values()}) == 1
    others = {
        recipe.model.model_copy(update={"second_attention": None}).model_dump_json() for recipe in recipes.values()
    }
    assert len(others) == 1
    controls = {"gpt2": ("none", "none"), "pause": ("none", "uniform"), "twin": ("causal", "uniform")}
    for model, recipe in recipes.items():
        apart = (recipe.model.second_attention, recipe.data.placement)
        assert apart == controls.get(model, ("meta", "uniform"))


@all_presets
def test_fine_tuning_fits_the_tests(name: str) -> None:
    sizes = PRESETS[name]
    for one in sizes.models:
        for task in one.tasks:
            recipe = finetune_recipe(sizes, one, task)
            counts = counts_of(sizes, one, task)
            assert set(recipe.task.train_lengths) <= set(counts[recipe.task.condition])
            assert one.tests is not None or set(recipe.task.train_lengths) <= set(counts["paper"])
            named = [name for name in ("facts_1", "facts_2", "facts_4", "facts_8", "landmark") if name in one.variant]
            assert recipe.task.condition == (named[0] if named else "paper")
            assert recipe.training.seed == one.seed


def test_the_demo_measures_what_it_should() -> None:
    assert {one.name: one.tasks for one in DEMO.models} == {"gpt2": TASKS, "pause": ("list_recall",), "meta": TASKS}
    for task in TASKS:
        assert finetune_recipe(DEMO, DEMO.models[0], task).task.train_lengths == (min(DEMO.test_counts),)
    assert CONDITIONS[:5] == ("paper", "landmark", "none", "decoy", "long_prompt")
    assert DEMO.corpus == "builtin"
    recipes = [pretrain_recipe(DEMO, one) for one in DEMO.models]
    assert {(recipe.model.position_embedding, recipe.training.seed) for recipe in recipes} == {("rope", 0)}


def test_the_demo_begins_with_list_recall_and_asks_with_the_text_covered() -> None:
    plan = {stage.name: stage for stage in planned("demo")}
    covered = {f"landmarks-alone-{model}-list_recall" for model in ("pause", "meta")}
    assert covered == {name for name, stage in plan.items() if stage.options.get("question_sees")}
    tasks = {name: stage.subject.get("task", "list_recall") for name, stage in plan.items()}
    first = max(stage.priority for name, stage in plan.items() if tasks[name] == "list_recall")
    assert first < min(stage.priority for name, stage in plan.items() if tasks[name] != "list_recall")


def test_a_model_is_named_and_described_by_what_sets_it_apart() -> None:
    assert TrainedModel(model="meta").name == "meta"
    apart = TrainedModel(model="twin", position_embedding="learned", seed=2, variant="k=0.05")
    assert apart.name == "twin-learned-seed2-k=0.05"
    names = {one.name: one.description for one in PAPER.models}
    assert names["meta"] == "meta-tokens in pretraining, meta-attention: the paper's model"
    assert names["meta-k=0"] == f"{names['meta']}; but data.placement=none, data.block_size=922"
    assert names["meta-yarn8"] == f"{names['meta']}; but its context lengthened 8 times with YaRN"


def test_a_model_changes_what_it_says_and_nothing_else() -> None:
    unchanged = TrainedModel(model="meta")
    changed = TrainedModel(
        model="meta",
        position_embedding="none",
        seed=3,
        pretrain_overrides=("data.fraction=0.05",),
        finetune_overrides=("task.condition=none",),
    )
    plain, own = (pretrain_recipe(DEMO, one).model_dump() for one in (unchanged, changed))
    assert own["data"] == plain["data"] | {"fraction": 0.05}
    assert own["model"] == plain["model"] | {"position_embedding": "none"}
    assert own["training"] == plain["training"] | {"seed": 3}
    plain, own = (finetune_recipe(DEMO, one, "parity").model_dump() for one in (unchanged, changed))
    assert own["task"] == plain["task"] | {"condition": "none"}
    assert own["training"] == plain["training"] | {"seed": 3}


def test_fine_tuning_another_models_weights_needs_that_one() -> None:
    base = TrainedModel(model="meta", tasks=("parity",))
    tuned = TrainedModel(model="meta", variant="again", tasks=("parity",), pretrained_as="meta")
    plan = {stage.name: stage for stage in stages(replace(DEMO, models=(base, tuned), inspections=(), looked_into=()))}
    assert "pretrain-meta-again" not in plan
    [drawn] = [name for name in plan if name.startswith("draw_examples")]
    assert plan["finetune-meta-again-parity"].after == ("pretrain-meta", drawn, "draw_tests-parity-paper")


def test_marker_conditions_are_tested_with_rope_up_to_a_length() -> None:
    counts = {128: 500, 256: 200, 512: 100}
    sizes = replace(DEMO, test_counts=counts, extra_condition_limit=256)
    assert counts_of(sizes, TrainedModel(model="meta"), "list_recall") == {
        "paper": counts,
        "landmark": {128: 500, 256: 200},
        "decoy": {128: 500, 256: 200},
    }
    for one, task in (
        (TrainedModel(model="meta"), "copying"),
        (TrainedModel(model="meta", position_embedding="none"), "list_recall"),
    ):
        assert counts_of(sizes, one, task) == {"paper": counts}


def test_models_that_read_the_same_examples_share_them() -> None:
    drawn = [stage for stage in planned("small") if stage.kind == "draw_examples"]
    assert len({stage.product for stage in drawn}) == len(drawn)
    # By task: one for each seed, and two for longer contexts in three seeds.
    of_task = {task: sum(stage.subject["task"] == task for stage in drawn) for task in TASKS}
    # And through landmarks: three seeds up to 128 tokens alone, two tasks of them in another form, and facts. And four
    # seeds of list recall with more steps, and eight seeds of it among landmarks.
    more = {"list_recall": 2 * 3 + 3 + 4 * 8 + 4 + 8, "parity": 3}
    assert of_task == {task: 12 + 3 + more.get(task, 0) for task in TASKS}


def test_the_small_grid_is_whole() -> None:
    names = [one.name for one in SMALL.models]
    assert len({*names}) == len(names)
    core = {f"{model}-seed{seed}" for model in MODELS for seed in range(22, 34)}
    longer = {
        f"{model}-seed{seed}-yarn{factor}" for model in ("gpt2", "meta") for seed in (31, 32, 33) for factor in (4, 8)
    }
    through = {f"{model}-seed{seed}-facts_{k}" for model in MODELS for seed in range(22, 30) for k in (1, 2, 4, 8)}
    for own, last in {"facts_4-in-sight": 25, "alone": 24, "alone-landmark": 24}.items():
        through |= {f"{model}-seed{seed}-{own}" for model in MODELS[1:] for seed in range(22, last + 1)}
    steps = {f"{model}-seed{seed}-longer" for model in MODELS for seed in range(22, 26)}
    rates = {f"{model}-seed{seed}-{own}-rate" for model in MODELS for seed in (22, 23) for own in ("half", "twice")}
    unmarked = {f"{model}-seed{seed}-landmark" for model in MODELS for seed in range(22, 30)}
    assert {*names} == core | longer | through | steps | rates | unmarked


def test_models_among_landmarks_have_four_layers_and_their_own_recipe() -> None:
    unmarked = [one for one in SMALL.models if one.variant == "landmark"]
    for one in unmarked:
        pretrained, recipe = pretrain_recipe(SMALL, one).model, finetune_recipe(SMALL, one, "list_recall")
        assert (pretrained.num_hidden_layers, pretrained.rope_layers, one.made_by, one.start) == (
            4, None, "pretrain", one.name
        )  # fmt: skip
        assert (recipe.task.condition, recipe.task.train_lengths) == ("landmark", (128,))
        assert (recipe.training.muon_learning_rate, recipe.training.learning_rate) == (0.005, 0.001)
        assert counts_of(SMALL, one, "list_recall") == {"landmark": {128: 2000, 256: 2000, 512: 2000}}
    assert [one.priority for one in unmarked] == [150 + seed for seed in range(8) for _ in MODELS]


def test_other_recipes_differ_in_rates_or_steps_alone() -> None:
    settings = {stage.name: stage.settings for stage in planned("small")}
    compared = 0
    for one in SMALL.models:
        times = {"half-rate": 0.5, "twice-rate": 2.0, "longer": 1.0}.get(one.variant)
        for task in one.tasks if times else ():
            plain = finetune_recipe(SMALL, replace(one, variant="", rate=1.0, finetune_overrides=()), task)
            own = finetune_recipe(SMALL, one, task)
            for rate in ("learning_rate", "muon_learning_rate"):
                assert getattr(own.training, rate) == times * getattr(plain.training, rate)
            same = {key: getattr(plain.training, key) for key in ("learning_rate", "muon_learning_rate")}
            assert own.training.model_copy(update=same) == plain.training
            assert (own.task == plain.task) == (one.variant != "longer")
            read = [[phase.examples // 32 for phase in recipe.phases()] for recipe in (plain, own)]  # 32 in a step
            assert read[1] == ([900, 1500, 300] if one.variant == "longer" else read[0])
            assert settings[f"evaluate-{one.name}-{task}"]["counts"] == {"paper": {128: 2000, 256: 2000, 512: 2000}}
            compared += 1
    assert compared == 4 * 4 * 2 * 2 + 4 * 4


def test_what_is_recalled_through_landmarks_is_measured_so() -> None:
    """Models trained through landmarks are tested so alone; those trained with all text in sight, also so."""
    plan, by_name = planned("small"), {one.name: one for one in SMALL.models}
    settings = {stage.name: stage.settings for stage in plan}
    trained = [one for one in SMALL.models if "facts" in one.variant or "alone" in one.variant]
    steps = set()
    for one in trained:
        for task in one.tasks:
            recipe = finetune_recipe(SMALL, one, task)
            sees = None if one.variant.endswith("in-sight") else "landmarks"
            assert recipe.task.question_sees == settings[f"evaluate-{one.name}-{task}"].get("question_sees") == sees
            assert settings[f"evaluate-{one.name}-{task}"]["counts"] == {recipe.task.condition: {128: 2000}}
            assert recipe.phases()[-1].train_length == 128
            assert by_name[one.pretrained_as or ""].seed == one.seed
            if "facts" in one.variant:
                same = {"condition": "", "question_sees": ""}
                steps.add((recipe.task.model_copy(update=same), recipe.training.model_copy(update={"seed": 0})))
    assert len(steps) == 1  # one recipe for all
    tests = {name for name, own in settings.items() if name.startswith("landmarks-alone") and own["question_sees"]}
    core = {
        f"landmarks-alone-{model}-seed{seed}-{task}" for model in MODELS for seed in range(22, 25) for task in TASKS
    }
    both_ways = {one.name for one in trained if one.variant == "facts_4-in-sight"}
    assert tests == core | {f"landmarks-alone-{name}-list_recall" for name in both_ways}
    last = {f"finetune-{one.name}-{task}" for one in trained if "alone" in one.variant for task in one.tasks}
    order = {stage.name: stage.priority for stage in plan if stage.kind == "finetune"}
    assert min(map(order.get, last)) > max(map(order.get, order.keys() - last))
    facts = {stage.name for stage in select(plan, "facts")}
    assert {name for name in facts if name.startswith("finetune")} == {
        f"finetune-{one.name}-list_recall" for one in trained if "facts" in one.variant
    }


def _prompts(recipe: FinetuneRecipe) -> int:
    """The prompts that a recipe reads up to its first train length."""
    first = recipe.task.train_lengths[0]
    return sum(phase.examples for phase in recipe.phases() if phase.train_length == first)


def test_one_recipe_a_task_and_equal_steps_for_all_models() -> None:
    for task in TASKS:
        for sizes in (SMALL, DEMO):
            plain = [one for one in sizes.models if not one.variant and task in one.tasks]
            recipes = [finetune_recipe(sizes, one, task).model_dump() for one in plain]
            seeds = [recipe["training"].pop("seed") for recipe in recipes]
            assert all(recipe == recipes[0] for recipe in recipes)
            assert seeds == [one.seed for one in plain]
        demo, small = (finetune_recipe(sizes, TrainedModel(model="meta"), task) for sizes in (DEMO, SMALL))
        assert small.task.train_lengths == (128, 512)
        assert _prompts(demo) < 0.5 * _prompts(small)
    unmarked = [one for one in PAPER.models if one.variant == "landmark" and one.seed == 0]
    assert len(unmarked) == len({one.model for one in unmarked}) == 4
    assert len({finetune_recipe(PAPER, one, "list_recall").model_dump_json() for one in unmarked}) == 1


@pytest.mark.parametrize(("sizes", "block"), [(SMALL, 256), (PAPER, 1024)], ids=["small", "paper"])
def test_contexts_are_extended_as_in_the_papers_first_table(sizes: Preset, block: int) -> None:
    by_name = {one.name: one for one in sizes.models}
    for factor in (4, 8):
        one = by_name[f"meta-yarn{factor}" if sizes is PAPER else f"meta-seed33-yarn{factor}"]
        short = pretrain_recipe(sizes, one)
        base = by_name[one.pretrained_as or ""]
        assert short.model_dump() == pretrain_recipe(sizes, base).model_dump()
        assert short.data.block_size == block
        longer = extend_recipe(sizes, one, short)
        assert longer.data.block_size == factor * block
        assert longer.data.placement == "uniform"
        assert lengths_tested(sizes, one, "list_recall") == (factor * block // 2, factor * block)
        assert max(counts_of(sizes, one, "list_recall")["paper"]) >= 2 * factor * block


def test_as_much_compute_is_as_many_steps_as_the_formula_says() -> None:
    def work(name: str) -> int:
        recipe = pretrain_recipe(PAPER, {one.name: one for one in PAPER.models}[name])
        config = MetaGPT2Config(
            **recipe.model.model_dump(exclude={"architecture"}),
            vocab_size=50304,
            meta_token_id=4096,
            bos_token_id=0,
            eos_token_id=0,
        )
        length = recipe.data.block_size
        metas = meta_token_count(length, recipe.data.fraction, recipe.data.placement)
        scored = length - 1 - metas
        products = forward_products(config, batch=1, length=length, meta_tokens=metas, scored=scored, skips_masked=True)
        return recipe.training.max_steps * flops(products, training=True)

    for model in ("gpt2", "pause", "twin"):
        assert work(f"{model}-equal-compute") == pytest.approx(work("meta"), rel=1e-2)


def test_the_papers_sizes_are_the_papers() -> None:
    recipe = pretrain_recipe(PAPER, TrainedModel(model="meta"))
    sizes = recipe.model.hidden_size, recipe.model.num_hidden_layers, recipe.model.num_attention_heads
    assert (*sizes, recipe.data.block_size, recipe.training.max_steps) == (768, 12, 12, 1024, 200_000)
    assert recipe.training.batch == 480
    published, random = (one for one in PAPER.models if one.model == "gpt-neo")
    plan = {stage.name: stage for stage in planned("paper")}
    assert published.published == "hf:EleutherAI/gpt-neo-125m"
    assert pretrain_recipe(PAPER, random).model.architecture == "gpt_neo"
    assert plan["finetune-gpt-neo-learned-random-parity"].after[0] == "pretrain-gpt-neo-learned-random"
    assert plan["finetune-gpt-neo-learned-parity"].after[0] == "fetch-gpt-neo-learned"
    assert "pretrain-gpt-neo-learned" not in plan


def test_learned_tables_hold_the_answers_to_prompts_of_1024_tokens_too() -> None:
    learned = [one for one in PAPER.models if one.position_embedding == "learned" and one.published is None]
    tables = [(one.model, pretrain_recipe(PAPER, one).model.max_position_embeddings) for one in learned]
    assert sorted(tables) == sorted((model, 1152) for model in (*MODELS, "gpt-neo"))


def test_small_takes_40_core_hours_at_most_and_gpu_half_an_hour() -> None:
    assert sum(stage.cost for stage in planned("small")) <= 40 * 3600
    assert max(stage.cost for stage in planned("small")) <= 3600
    assert sum(stage.cost for stage in planned("gpu")) <= 1800
    shape = pretrain_recipe(GPU, TrainedModel(model="meta"))
    assert shape.model == pretrain_recipe(PAPER, TrainedModel(model="meta")).model
    assert finetune_recipe(GPU, TrainedModel(model="meta"), "parity").task.train_lengths == (128, 256, 512)


def test_models_trained_on_landmark_are_tested_so_at_every_length() -> None:
    plan = {stage.name: stage for stage in planned("paper")}
    own, others = (
        plan[f"evaluate-meta{variant}-list_recall"].settings["counts"]["landmark"] for variant in ("-landmark", "")
    )
    assert own == {128: 500, 256: 500, 512: 500, 1024: 200, 2048: 100}
    assert others == {128: 500, 256: 500, 512: 500}
    assert plan["draw_tests-list_recall-landmark"].settings["counts"] == own


def test_models_read_the_same_text_whatever_their_share_of_meta_tokens() -> None:
    shares = {}
    for one in PAPER.models:
        if one.variant in ("", "periodic", "k=0", "k=0.05", "k=0.2"):
            data = pretrain_recipe(PAPER, one).data
            inserted = 0 if data.placement == "none" else round(data.fraction * data.block_size)
            shares[one.variant, inserted] = data.block_size - inserted
    assert {inserted for _, inserted in shares} == {0, 48, 102, 230}
    assert set(shares.values()) == {922}


def test_jumps_have_a_control_of_as_many_steps() -> None:
    by_variant = {one.variant: one for one in PAPER.models if one.name == "meta" or one.name == "meta-jumps"}
    for task in TASKS:
        jumps, plain = (finetune_recipe(PAPER, by_variant[name], task) for name in ("jumps", ""))
        settings = [{phase.name: phase.settings for phase in recipe.phases()}["128"] for recipe in (jumps, plain)]
        assert (jumps.training.position_jumps, plain.training.position_jumps) == (2304, None)
        assert jumps.task.stages == plain.task.stages
        assert settings[0].max_steps == settings[1].max_steps
    changed = pretrain_recipe(PAPER, by_variant["jumps"]).model
    assert changed == pretrain_recipe(PAPER, by_variant[""]).model.model_copy(update={"attention_scale": "log_length"})


def test_noise_of_every_kind_and_analyses_of_every_seed() -> None:
    plan = {stage.name: stage for stage in planned("paper")}
    every = {"".join(parts) for parts in product(("noise:",), ("0.1", "0.5", "1", "2"), ("", ":meta"), ("", ":raw"))}
    for one in ("gpt2", "gpt2-learned", "meta", "meta-learned"):
        own = (plan[f"{kind}-{one}-copying"].settings["interventions"] for kind in ("noise", "raw-noise"))
        assert set().union(*own) == every
    for kind, models in {"sharpness": ("twin", "meta"), "rate-distortion": ("gpt2", "twin", "meta")}.items():
        assert {f"{kind}-{one}{seed}-list_recall" for one in models for seed in ("", "-seed1", "-seed2")} <= set(plan)


def test_bracket_loss_every_seed_of_small_is_looked() -> None:
    plan = {stage.name: stage for stage in planned("small")}
    looked = {"sharpness": ("twin", "meta"), "residual": ("twin", "meta"), "rate-distortion": ("gpt2", "twin", "meta")}
    for kind, models in looked.items():
        assert {f"{kind}-{one}-seed{seed}-list_recall" for one in models for seed in range(22, 34)} <= set(plan)


def test_seed_by_seed_list_recall_first_and_pause_after_all_others() -> None:
    trained = [stage for stage in planned("small") if stage.kind == "finetune" and not stage.subject["model"].variant]
    late = {model: 100 if model == "pause" else 0 for model in MODELS}
    for stage in trained:
        model, wait = stage.subject["model"], 0 if stage.subject["task"] == "list_recall" else 0.5
        assert stage.priority == model.seed - 22 + late[model.model] + wait
        measured = [one for one in planned("small") if one.kind == "evaluate" and one.after[0] == stage.name]
        assert [one.priority for one in measured] == [stage.priority - 0.25]


def test_a_model_is_tested_up_to_four_times_its_train_length() -> None:
    measured = [stage for stage in planned("small") if stage.kind == "evaluate"]
    assert {stage.settings["ratio"] for stage in measured} == {4}
    plain = next(stage for stage in measured if not stage.subject["model"].variant)
    counts = {128: 2000, 256: 2000, 512: 2000, 1024: 500, 2048: 500}
    assert plain.settings["counts"] == {"paper": counts, "decoy": {128: 2000}}
    plan = {stage.name: stage for stage in planned("small")}
    copied = plan["draw_tests-copying-paper"].settings["counts"]
    assert copied == {length: n for length, n in counts.items() if length <= 1024}


@pytest.mark.parametrize(
    ("table", "some", "none"),
    [
        ("table7", "evaluate-gpt2-learned-list_recall", "evaluate-gpt2-parity"),
        ("table1", "evaluate-meta-yarn8-segment_counting", "evaluate-meta-segment_counting"),
        ("table14", "ablation-meta-learned-copying", "evaluate-meta-copying"),
        ("table15", "noise-gpt2-list_recall", "evaluate-gpt2-list_recall"),
        ("figure3", "rate-distortion-twin-list_recall", "evaluate-twin-list_recall"),
        ("placement", "evaluate-meta-k=0.2-list_recall", "evaluate-meta-list_recall"),
        ("lengths", "evaluate-twin-jumps-copying", "evaluate-twin-copying"),
        ("perplexity", "perplexity-gpt2-equal-compute", "finetune-gpt2-parity"),
        ("parity", "evaluate-gpt2-parity", "evaluate-gpt2-copying"),
    ],
)
def test_one_tables_part_of_the_plan(table: str, some: str, none: str) -> None:
    plan = planned("paper")
    chosen = select(plan, table)
    names = [stage.name for stage in chosen]
    assert some in names
    assert none not in names
    assert {before for stage in chosen for before in stage.after} <= set(names)
    assert chosen == [stage for stage in plan if stage.name in set(names)]


def test_a_table_that_nothing_answers() -> None:
    with pytest.raises(
        UserError, match=r"no stage of this preset answers 'table0'; --only takes copying, facts, figure1, .*table9\.$"
    ):
        select(planned("small"), "table0")
    assert select(stages(DEMO), None) == stages(DEMO)


def test_recipes_whose_stages_draw_other_prompts_do_not_share_them() -> None:
    stage = "{lists: [2, 3], items: [3, 6], max_steps: 600}"
    others = [("600", "601"), ("[2", "[1"), ("6]", "7]"), ("}", ", drill: true}")]
    asked = ["", stage, *(stage.replace(*change) for change in others), f"{stage}, {stage}"]
    recipes = [load_recipe(FinetuneRecipe, "demo_finetune", [f"task.stages=[{own}]"]) for own in asked]
    assert len({examples_name(recipe) for recipe in recipes}) == len(recipes)
    sooner = stage.replace("}", ", learning_rate: 0.1}")  # draws the same examples
    same = load_recipe(FinetuneRecipe, "demo_finetune", [f"task.stages=[{sooner}]"])
    assert examples_name(same) == examples_name(recipes[1])
