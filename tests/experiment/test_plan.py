"""The presets and their stages: one text, one set of prompts and one budget for all models."""

from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from metatokens.data.insertion import meta_token_count
from metatokens.errors import UserError
from metatokens.experiment.plan import DEMO, MODELS, PRESETS, Preset, preset, stages
from metatokens.experiment.stages import Workshop, finetune_recipe, pretrain_recipe
from metatokens.tasks.curriculum import CONDITIONS, TASKS

all_presets = pytest.mark.parametrize("sizes", PRESETS.values(), ids=PRESETS.keys())


@all_presets
def test_every_stage_comes_after_what_it_needs(sizes: Preset) -> None:
    plan = {stage.name: stage for stage in stages(sizes)}
    tasks = len(sizes.task_steps)
    assert len(plan) == len(stages(sizes)) == 2 + tasks + len(sizes.models) * (2 + 2 * tasks)
    assert all(before in plan for stage in plan.values() for before in stage.after)
    order = list(TopologicalSorter({name: stage.after for name, stage in plan.items()}).static_order())
    place = {name: order.index(name) for name in plan}
    for model in sizes.models:
        assert place["tokenize"] < place[f"pretrain-{model}"] < place[f"perplexity-{model}"]
        for task in sizes.task_steps:
            tuned, measured = place[f"finetune-{model}-{task}"], place[f"evaluate-{model}-{task}"]
            assert place[f"pretrain-{model}"] < tuned < measured
            assert place["tokenize"] < place[f"draw_examples-{task}"] < tuned
    assert all(stage.cost > 0 for stage in plan.values())


@all_presets
def test_every_verb_is_one_of_the_workshops(sizes: Preset) -> None:
    for stage in stages(sizes):
        assert callable(getattr(Workshop, stage.verb))


@all_presets
def test_all_models_read_the_same_text_for_the_same_steps(sizes: Preset) -> None:
    recipes = {model: pretrain_recipe(sizes, model, Path("tokens")) for model in sizes.models}
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
def test_fine_tuning_fits_the_tests(sizes: Preset) -> None:
    for task, steps in sizes.task_steps.items():
        recipe = finetune_recipe(sizes, task)
        assert recipe.training.max_steps == steps
        assert set(recipe.task.train_lengths) <= set(sizes.test_counts)
        assert recipe.task.condition == "paper"


def test_the_demo_measures_what_it_should() -> None:
    assert DEMO.models == ("gpt2", "pause", "twin", "meta") == tuple(MODELS)
    assert set(DEMO.task_steps) == set(TASKS)
    (length,) = finetune_recipe(DEMO, "parity").task.train_lengths
    assert DEMO.test_counts == {length: 500, 2 * length: 200, 4 * length: 200, 8 * length: 200}
    assert set(CONDITIONS) == {"paper", "none", "decoy"}
    assert DEMO.extra_conditions == {"list_recall": ("none", "decoy")}
    assert DEMO.corpus == "builtin"
    assert all(pretrain_recipe(DEMO, model, Path("x")).model.position_embedding == "rope" for model in DEMO.models)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no preset 'huge'; the presets are smoke, demo"):
        preset("huge")
