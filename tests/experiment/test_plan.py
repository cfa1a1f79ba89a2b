"""The presets and their stages: one text, one set of prompts and one budget for all models."""

from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from metatokens.data.insertion import meta_token_count
from metatokens.errors import UserError
from metatokens.experiment.plan import (
    DEMO,
    MODELS,
    PRESETS,
    SMALL,
    Preset,
    Variant,
    counts_of,
    finetune_recipe,
    preset,
    pretrain_recipe,
    stages,
)
from metatokens.experiment.stages import Workshop
from metatokens.tasks.curriculum import CONDITIONS, TASKS

all_presets = pytest.mark.parametrize("sizes", PRESETS.values(), ids=PRESETS.keys())


@all_presets
def test_every_stage_comes_after_what_it_needs(sizes: Preset) -> None:
    plan = {stage.name: stage for stage in stages(sizes)}
    tasks = len(sizes.task_overrides)
    of_variants = sum(2 * (one.pretrained_as is None) + 2 * len(one.tasks) for one in sizes.variants)
    assert len(plan) == len(stages(sizes)) == 2 + tasks + of_variants
    assert all(before in plan for stage in plan.values() for before in stage.after)
    order = list(TopologicalSorter({name: stage.after for name, stage in plan.items()}).static_order())
    place = {name: order.index(name) for name in plan}
    for one in sizes.variants:
        pretrained = place[f"pretrain-{one.pretrained_as or one.name}"]
        assert place["tokenize"] < pretrained
        assert one.pretrained_as or pretrained < place[f"perplexity-{one.name}"]
        for task in one.tasks:
            tuned, measured = place[f"finetune-{one.name}-{task}"], place[f"evaluate-{one.name}-{task}"]
            assert pretrained < tuned < measured
            assert place["tokenize"] < place[f"draw_examples-{task}"] < tuned
    assert all(stage.cost > 0 for stage in plan.values())


@all_presets
def test_every_verb_is_one_of_the_workshops(sizes: Preset) -> None:
    for stage in stages(sizes):
        assert callable(getattr(Workshop, stage.verb))


@all_presets
def test_all_models_read_the_same_text_for_the_same_steps(sizes: Preset) -> None:
    plain = [Variant(model=model) for model in MODELS]
    assert {one.name for one in plain} <= {one.name for one in sizes.variants}
    recipes = {one.model: pretrain_recipe(sizes, one, Path("tokens")) for one in plain}
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
    for one in sizes.variants:
        for task in one.tasks:
            recipe = finetune_recipe(sizes, one, task)
            assert set(recipe.task.train_lengths) <= set(sizes.test_counts)
            assert recipe.task.condition == ("none" if one.note == "unmarked" else "paper")
            assert recipe.training.seed == one.seed


def test_the_demo_measures_what_it_should() -> None:
    names = tuple(one.name for one in DEMO.variants)
    assert names == ("gpt2", "pause", "twin", "meta") == tuple(MODELS)
    assert set(DEMO.task_overrides) == set(TASKS)
    (length,) = finetune_recipe(DEMO, DEMO.variants[0], "parity").task.train_lengths
    assert DEMO.test_counts == {length: 500, 2 * length: 200, 4 * length: 200, 8 * length: 200}
    assert set(CONDITIONS) == {"paper", "none", "decoy"}
    assert DEMO.extra_conditions == {"list_recall": ("none", "decoy")}
    assert DEMO.corpus == "builtin"
    recipes = [pretrain_recipe(DEMO, one, Path("x")) for one in DEMO.variants]
    assert {(recipe.model.position_embedding, recipe.training.seed) for recipe in recipes} == {("rope", 0)}


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no preset 'huge'; the presets are smoke, demo"):
        preset("huge")


def test_a_variant_is_named_by_what_sets_it_apart() -> None:
    assert Variant(model="meta").name == "meta"
    assert Variant(model="twin", position="learned", seed=2, note="k=0.05").name == "twin-learned-seed2-k=0.05"


def test_a_variant_changes_what_it_says_and_nothing_else() -> None:
    variant = Variant(
        model="meta",
        position="none",
        seed=3,
        pretrain_overrides=("data.fraction=0.05",),
        finetune_overrides=("task.condition=none",),
    )
    plain, own = (pretrain_recipe(DEMO, one, Path("x")).model_dump() for one in (DEMO.variants[-1], variant))
    assert own["data"] == plain["data"] | {"fraction": 0.05}
    assert own["model"] == plain["model"] | {"position_embedding": "none"}
    assert own["training"] == plain["training"] | {"seed": 3}
    plain, own = (finetune_recipe(DEMO, one, "parity").model_dump() for one in (DEMO.variants[-1], variant))
    assert own["task"] == plain["task"] | {"condition": "none"}
    assert own["training"] == plain["training"] | {"seed": 3}


def test_fine_tuning_another_variants_model_needs_that_one() -> None:
    base = Variant(model="meta", tasks=("parity",))
    tuned = Variant(model="meta", note="unmarked", tasks=("parity",), pretrained_as="meta")
    plan = {stage.name: stage for stage in stages(replace(DEMO, variants=(base, tuned)))}
    assert "pretrain-meta-unmarked" not in plan
    assert plan["finetune-meta-unmarked-parity"].after == ("pretrain-meta", "draw_examples-parity")


def test_marker_conditions_are_tested_with_rope_up_to_a_length() -> None:
    sizes = replace(DEMO, extra_condition_limit=256)
    assert counts_of(sizes, Variant(model="meta"), "list_recall") == {
        "paper": {128: 500, 256: 200, 512: 200, 1024: 200},
        "none": {128: 500, 256: 200},
        "decoy": {128: 500, 256: 200},
    }
    for one, task in ((Variant(model="meta"), "parity"), (Variant(model="meta", position="none"), "list_recall")):
        assert counts_of(sizes, one, task) == {"paper": {128: 500, 256: 200, 512: 200, 1024: 200}}


def test_the_small_grid_is_whole() -> None:
    names = {one.name for one in SMALL.variants}
    assert len(names) == len(SMALL.variants) == 12 + 6 + 3 + 3 + 4
    for model in MODELS:
        assert {model, f"{model}-learned", f"{model}-none"} <= names
    for model in ("gpt2", "twin", "meta"):
        assert {f"{model}-seed1", f"{model}-seed2", f"{model}-unmarked", f"{model}-random-positions"} <= names
    learned, rope = (Variant(model="meta", position=position) for position in ("learned", "rope"))
    assert counts_of(SMALL, learned, "parity") == {"paper": {128: 500, 256: 500, 512: 500, 1024: 500, 2048: 200}}
    assert counts_of(SMALL, rope, "parity")["paper"][4096] == 200
    for one in SMALL.variants:
        recipe = pretrain_recipe(SMALL, one, Path("x"))
        # A learned table has a position for each token of the longest prompt of bin 1,024 and of its answer.
        assert recipe.model.max_position_embeddings == 1152
        limit = recipe.training.random_positions
        assert limit is None or limit >= 16 * 128


def test_three_seeds_of_list_recall_come_first() -> None:
    first = {stage.name for stage in stages(SMALL) if stage.priority == 0 and stage.verb == "finetune"}
    assert first == {
        f"finetune-{model}{seed}-list_recall" for model in ("gpt2", "twin", "meta") for seed in ("", "-seed1", "-seed2")
    }
