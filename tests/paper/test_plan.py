"""The presets and their stages: one text, one set of prompts and one budget for all models."""

from dataclasses import replace
from functools import cache
from inspect import signature
from typing import get_args

import pytest

from benchmarks.speed.cost import flops, forward_products
from metatokens.data.insertion import meta_token_count
from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.paper.choices import PresetName
from metatokens.paper.plan import select, stages
from metatokens.paper.presets import PRESETS
from metatokens.paper.runner import Runner
from metatokens.paper.variants import (
    TrainedModel,
    counts_of,
    extend_recipe,
    finetune_recipe,
    lengths_tested,
    pretrain_recipe,
)
from metatokens.tasks import TASKS

DEMO, SMALL, PAPER = PRESETS["demo"], PRESETS["small"], PRESETS["paper"]
MODELS = ("gpt2", "pause", "twin", "meta")

all_presets = pytest.mark.parametrize("name", PRESETS)


@cache
def planned(name):
    """The plan of a preset, made once, since that of a large preset takes half a second."""
    return stages(PRESETS[name])


def test_the_commands_offer_all_presets():
    assert get_args(PresetName) == tuple(PRESETS)


def model_of(sizes, name):
    [model] = (model for model in sizes.models if model.name == name)
    return model


def text_of_a_block(recipe):
    """The text tokens of a pretraining block."""
    data = recipe.data
    return data.block_size - meta_token_count(data.block_size, data.fraction, data.placement)


@all_presets
def test_every_stage_comes_after_what_it_needs(name):
    earlier: dict[str, set[str]] = {}  # what each stage waits for, directly or not
    for stage in planned(name):
        assert stage.name not in earlier
        waits_for = set(stage.after)
        for needed in stage.after:
            waits_for |= earlier[needed]
        earlier[stage.name] = waits_for

    for model in PRESETS[name].models:
        pretrained = (
            f"{'fetch' if model.published else 'pretrain'}-{model.pretrained_as or model.name}"
        )
        assert "tokenize" in earlier[pretrained]
        for task in model.tasks:
            finetuned = earlier[f"finetune-{model.name}-{task}"]
            assert pretrained in finetuned
            assert f"finetune-{model.name}-{task}" in earlier[f"evaluate-{model.name}-{task}"]
            if model.extension is not None:
                assert f"extend-{model.name}" in finetuned


@all_presets
def test_every_stage_gives_its_method_what_it_takes(name):
    for stage in planned(name):
        method = getattr(Runner, stage.method)
        signature(method).bind("the runner", "progress", **stage.subject, **stage.options)


@pytest.mark.parametrize("only", ["", "--only reversal"])
def test_a_new_task_is_planned_and_answers_to_its_name(only, metatokens, monkeypatch, tmp_path):
    tasks = (*TASKS, "reversal")
    models = tuple(replace(model, tasks=tasks) for model in DEMO.models)
    recipes = DEMO.finetune_recipes | {"reversal": "small_parity"}
    monkeypatch.setitem(PRESETS, "demo", replace(DEMO, models=models, finetune_recipes=recipes))

    status, output, _ = metatokens(f"reproduce --preset demo --dry-run {only} --out {tmp_path}")

    assert status == 0
    stages_shown = {line.split()[-1] for line in output.splitlines()}
    assert {
        "draw_tests-reversal-paper",
        "finetune-meta-reversal",
        "evaluate-gpt2-reversal",
    } <= stages_shown
    assert ("finetune-meta-parity" in stages_shown) == (only == "")


@all_presets
def test_all_models_read_the_same_text_for_the_same_steps(name):
    recipes = {model: pretrain_recipe(PRESETS[name], TrainedModel(model=model)) for model in MODELS}

    meta = recipes["meta"]
    for recipe in recipes.values():
        assert text_of_a_block(recipe) == text_of_a_block(meta)
        assert recipe.training == meta.training
        architecture = recipe.model.model_copy(
            update={"second_attention": meta.model.second_attention}
        )
        assert architecture == meta.model


@all_presets
def test_fine_tuning_fits_the_tests(name):
    sizes = PRESETS[name]
    for model in sizes.models:
        for task in model.tasks:
            recipe = finetune_recipe(sizes, model, task)
            lengths_of_tests = counts_of(sizes, model, task)[recipe.task.condition]
            assert set(recipe.task.train_lengths) <= lengths_of_tests.keys()
            pretrained = pretrain_recipe(sizes, model)
            assert recipe.training.seed == pretrained.training.seed == model.seed


@pytest.mark.parametrize("sizes", [DEMO, SMALL, PAPER], ids=["demo", "small", "paper"])
def test_one_recipe_a_task_for_all_models(sizes):
    for task in TASKS:
        recipes = set()
        for model in sizes.models:
            if not model.variant and not model.published and task in model.tasks:
                recipe = finetune_recipe(sizes, model, task).model_dump()
                del recipe["training"]["seed"]
                recipes.add(str(recipe))
        assert len(recipes) == 1


def test_the_demo_begins_with_list_recall_and_asks_with_the_text_covered():
    plan = planned("demo")

    covered = {stage.name for stage in plan if stage.options.get("question_sees")}
    tasks = [stage.subject["task"] for stage in plan if "task" in stage.subject]
    assert covered == {
        "landmarks-alone-pause-list_recall",
        "landmarks-alone-meta-list_recall",
    }
    assert tasks == sorted(tasks, key=TASKS.index)


def test_fine_tuning_another_models_weights_needs_that_one():
    base = TrainedModel(model="meta", tasks=("parity",))
    tuned = TrainedModel(model="meta", variant="again", tasks=("parity",), pretrained_as="meta")

    plan = stages(replace(DEMO, models=(base, tuned), inspections=(), looked_into=()))

    by_name = {stage.name: stage for stage in plan}
    assert "pretrain-meta-again" not in by_name
    assert "pretrain-meta" in by_name["finetune-meta-again-parity"].after


@pytest.mark.parametrize(
    ("model", "task", "conditions"),
    [
        (TrainedModel(model="meta"), "list_recall", {"paper", "landmark", "decoy"}),
        (TrainedModel(model="meta"), "copying", {"paper"}),
        (
            TrainedModel(model="meta", position_embedding="none"),
            "list_recall",
            {"paper"},
        ),
    ],
    ids=["with rope", "another task", "without positions"],
)
def test_marker_conditions_are_tested_with_rope_up_to_a_length(model, task, conditions):
    sizes = replace(DEMO, test_counts={128: 500, 256: 200, 512: 100}, extra_condition_limit=256)

    counts = counts_of(sizes, model, task)

    assert counts.keys() == conditions
    assert counts.pop("paper") == sizes.test_counts
    for up_to_a_length in counts.values():
        assert up_to_a_length == {128: 500, 256: 200}


@pytest.mark.parametrize(
    ("sizes", "name", "block"),
    [(SMALL, "meta-seed33-yarn", 256), (PAPER, "meta-yarn", 1024)],
    ids=["small", "paper"],
)
@pytest.mark.parametrize("factor", [4, 8])
def test_contexts_are_extended_as_in_the_papers_first_table(factor, sizes, name, block):
    model = model_of(sizes, f"{name}{factor}")
    short = pretrain_recipe(sizes, model)
    longer = extend_recipe(sizes, model, short)

    assert short == pretrain_recipe(sizes, model_of(sizes, model.pretrained_as or ""))
    assert short.data.block_size == block
    assert longer.data.block_size == factor * block
    assert lengths_tested(sizes, model, "list_recall") == (
        factor * block // 2,
        factor * block,
    )
    assert max(counts_of(sizes, model, "list_recall")["paper"]) >= 2 * factor * block


def pretraining_operations(model):
    """By the benchmarks' formula, at the paper's size."""
    recipe = pretrain_recipe(PAPER, model)
    sizes = recipe.model.model_dump(exclude={"architecture"})
    config = MetaGPT2Config(
        **sizes, vocab_size=50304, meta_token_id=4096, bos_token_id=0, eos_token_id=0
    )
    length = recipe.data.block_size
    meta_tokens = length - text_of_a_block(recipe)
    products = forward_products(
        config,
        batch=1,
        length=length,
        meta_tokens=meta_tokens,
        scored=length - 1 - meta_tokens,
        skips_masked=True,
    )
    return recipe.training.max_steps * flops(products, training=True)


@pytest.mark.parametrize("model", ["gpt2", "pause", "twin"])
def test_as_much_compute_is_as_many_steps_as_the_formula_says(model):
    longer = pretraining_operations(model_of(PAPER, f"{model}-equal-compute"))

    assert longer == pytest.approx(pretraining_operations(model_of(PAPER, "meta")), rel=1e-2)


@pytest.mark.parametrize("variant", ["", "-periodic", "-k=0", "-k=0.05", "-k=0.2"])
def test_models_read_the_same_text_whatever_their_share_of_meta_tokens(variant):
    assert text_of_a_block(pretrain_recipe(PAPER, model_of(PAPER, f"meta{variant}"))) == 922


@pytest.mark.parametrize(
    ("table", "answering", "other"),
    [
        ("table7", "evaluate-gpt2-learned-list_recall", "evaluate-gpt2-parity"),
        (
            "table1",
            "evaluate-meta-yarn8-segment_counting",
            "evaluate-meta-segment_counting",
        ),
        ("figure3", "rate-distortion-twin-list_recall", "evaluate-twin-list_recall"),
        ("parity", "evaluate-gpt2-parity", "evaluate-gpt2-copying"),
    ],
)
def test_one_tables_part_of_the_plan_is_whole(table, answering, other):
    chosen = select(planned("paper"), table)

    names = {stage.name for stage in chosen}
    assert answering in names
    assert other not in names
    for stage in chosen:
        assert names.issuperset(stage.after)


def test_a_table_that_nothing_answers_is_refused():
    with pytest.raises(
        UserError,
        match=r"answers 'table0'; --only takes copying, facts, figure1, .*table9\.$",
    ):
        select(planned("small"), "table0")
