"""Recipes: the bundled ones, overrides, and the messages about mistakes."""

from pathlib import Path

import pytest

import metatokens
from metatokens.errors import UserError
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, ShrinkRecipe, load_recipe
from metatokens.tasks import TASKS

PRETRAINING = ("demo", "small_extend", "paper", "paper_extend")
FINETUNING = (
    "demo_finetune",
    "paper_finetune",
    "pretrained_finetune",
    "small_facts",
    "small_landmarks",
)
FINETUNING += tuple(f"{size}_{task}" for size in ("demo", "small") for task in TASKS)
PACKAGED = {
    **dict.fromkeys(PRETRAINING, PretrainRecipe),
    **dict.fromkeys(FINETUNING, FinetuneRecipe),
    "shrink": ShrinkRecipe,
}
STAGE = "lists: [1, 2], items: [1, 2], max_steps: 5"


def complaint(
    kind,
    source,
    *overrides,
):
    with pytest.raises(UserError) as caught:
        load_recipe(kind, str(source), overrides)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("name", PACKAGED)
def test_bundled_recipes_are_of_their_kind(name):
    for kind in (PretrainRecipe, FinetuneRecipe, ShrinkRecipe):
        if kind is PACKAGED[name]:
            assert isinstance(load_recipe(kind, name), kind)
        else:
            sentence = complaint(kind, name)
            assert ": Extra inputs are not permitted" in sentence or ": Field required" in sentence


def test_a_bundled_recipe_is_read_by_its_name_or_its_file():
    folder = Path(metatokens.__file__).parent / "recipes"
    names = {path.stem for path in folder.iterdir()}
    assert names == set(PACKAGED)
    for name, kind in PACKAGED.items():
        assert load_recipe(kind, name) == load_recipe(kind, str(folder / f"{name}.yaml"))


def test_the_papers_values():
    recipe = load_recipe(PretrainRecipe, "paper")
    training, model, data = recipe.training, recipe.model, recipe.data

    assert training.batch == 480
    assert (data.block_size, data.fraction, data.placement) == (1024, 0.1, "uniform")
    assert (model.num_hidden_layers, model.num_attention_heads, model.hidden_size) == (
        12,
        12,
        768,
    )
    assert (model.position_embedding, model.second_attention, model.bias) == (
        "rope",
        "meta",
        False,
    )
    assert (training.learning_rate, training.min_learning_rate) == (6e-4, 6e-5)
    assert (training.warmup_steps, training.max_steps, training.decay_steps) == (
        2_000,
        200_000,
        600_000,
    )
    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (
        0.9,
        0.95,
        0.1,
    )
    assert training.max_grad_norm == 1.0


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.max_steps=60", "training", "max_steps", 60),
        ("training.learning_rate=1e-3", "training", "learning_rate", 0.001),
        ("training.bf16=true", "training", "bf16", True),
        ("training.report_to=all", "training", "report_to", "all"),
        ("training.decay_steps=null", "training", "decay_steps", None),
        ("data.tokens=a=b/c", "data", "tokens", Path("a=b/c")),
    ],
)
def test_an_override_changes_one_setting(override, section, key, value):
    plain = load_recipe(PretrainRecipe, "demo").model_dump()

    changed = load_recipe(PretrainRecipe, "demo", [override]).model_dump()

    plain[section][key] = value
    assert changed == plain


def test_a_list_is_set_as_yaml_and_the_last_override_wins():
    overrides = [
        "task.train_lengths=[128, 256]",
        "training.max_steps=1",
        "training.max_steps=2",
    ]

    recipe = load_recipe(FinetuneRecipe, "demo_finetune", overrides)

    assert recipe.task.train_lengths == (128, 256)
    assert recipe.training.max_steps == 2


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            f"task.stages=[{{{STAGE}, max_stepz: 5}}]",
            "task.stages.0.max_stepz: Extra inputs are not permitted",
        ),
        (
            f"task={{condition: landmark, stages: [{{{STAGE}, drill: true}}]}}",
            "is for task.condition paper, whose markers bracket the answer, and task.condition is landmark",
        ),
        (
            f"task={{condition: landmark, stages: [{{{STAGE}, bracket_loss: 0.1}}]}}",
            "is for task.condition paper, whose markers bracket the answer, and task.condition is landmark",
        ),
        ("task.train_lengths=[128, 128]", "each has to be longer than the one before"),
        ("task.train_lengths=[128, 64]", "each has to be longer than the one before"),
        (
            "task.stages=[{lists: [5, 3], items: [1, 2], max_steps: 5}]",
            "the lists of a stage are 5 to 3: give the smaller number first",
        ),
    ],
)
def test_a_wrong_setting_of_a_task_is_named(override, sentence):
    assert sentence in complaint(FinetuneRecipe, "demo_finetune", override)


def test_a_loss_of_states_that_compiling_hides_is_refused():
    overrides = (f"task.stages=[{{{STAGE}, bracket_loss: 0.1}}]", "training.torch_compile=true")

    sentence = complaint(FinetuneRecipe, "demo_finetune", *overrides)

    assert "reads the states after each block, which training.torch_compile hides" in sentence


def test_an_override_may_open_a_section(tmp_path):
    (tmp_path / "own.yaml").write_text("training: {max_steps: 5}\n")

    recipe = load_recipe(PretrainRecipe, str(tmp_path / "own.yaml"), ["data.block_size=64"])

    assert (recipe.data.block_size, recipe.training.max_steps) == (64, 5)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "training.max_stepz=3",
            "training.max_stepz: Extra inputs are not permitted",
        ),
        (
            "optimizer.name=adam",
            "optimizer: Extra inputs are not permitted",
        ),
        (
            "training.max_steps=many",
            "training.max_steps: Input should be a valid integer",
        ),
        ("training.text_full_layers=[0]", "need training.text_window"),
        ("training={max_steps: 9, train_base: true, lora_rank: 2}", "give one of them"),
        ("training.text_full_heads=[[0,1]]", "need training.text_window"),
        (
            "training.learning_rate=1e-9",
            "training.min_learning_rate is 0.0001, above training.learning_rate (1e-09)",
        ),
        (
            "training.decay_steps=5",
            "training.decay_steps is 5, less than the 300 steps of the training",
        ),
        (
            "data.placement=every:0",
            "'every:0' is no placement: give uniform, periodic or none, or a rule for landmarks: line, ",
        ),
        (
            "training.max_steps",
            "--set 'training.max_steps' is not of the form section.key=value.",
        ),
        ("training.max_steps.a=3", "max_steps is not a section."),
        ("training.max_steps=[1", "the value is not valid YAML."),
    ],
)
def test_a_wrong_override_is_named_with_what_is_allowed(override, sentence):
    assert sentence in complaint(PretrainRecipe, "demo", override)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "must be a mapping of sections."),
        ("training: [1\nmodel: }", "cannot be read as YAML"),
        ("model: {hidden_size: 8}\n", "training: Field required."),
        (
            "training: {max_steps: 1, max_steps: 2}\n",
            "a mapping has a key twice among max_steps, m",
        ),
        (
            "training: {max_steps: 1, lr: 1}\n",
            "training.lr: Extra inputs are not permitted",
        ),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, content, sentence):
    path = tmp_path / "own.yaml"
    path.write_text(content)

    said = complaint(PretrainRecipe, path)

    assert said.startswith(f"recipe {path}")
    assert sentence in said


@pytest.mark.parametrize("source", ["nowhere.yaml", "."])
def test_a_missing_recipe_lists_the_bundled_ones(source):
    sentence = complaint(PretrainRecipe, source)
    assert (
        sentence
        == f"no recipe at {source}; give a YAML file or one of: {', '.join(sorted(PACKAGED))}."
    )
