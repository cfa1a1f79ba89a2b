"""Sizes are checked before anything is allocated: a sentence, and no more memory than without the model."""

import json
import shutil

import pytest

from metatokens.checkpoint import load_model
from metatokens.recipe import PretrainRecipe, load_recipe
from metatokens.training.pretrain import pretrain
from tests.hostile.conftest import in_one_sentence
from tests.hostile.memory import print_growth

# KiB that a refusal may take, with the code that its process runs for the first time. The smallest of the models that
# are too large would take 350 MB.
MOST = 128 * 1024


def with_fields(folder, target, **fields):
    """A copy of a model's folder with other fields in its config.json."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


def refuse_to_load(folder):
    with in_one_sentence(r"cannot be used|the weights in .* cannot be read"):
        load_model(folder)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("meta_gpt2", {"vocab_size": 10**12}),
        ("meta_gpt2", {"vocab_size": 10**400}),
        ("meta_gpt2", {"vocab_size": -5}),
        ("meta_gpt2", {"hidden_size": 10**9}),
        ("meta_gpt2", {"hidden_size": "8"}),
        ("meta_gpt2", {"num_hidden_layers": 10**12}),
        ("meta_gpt2", {"num_attention_heads": 0}),
        (
            "meta_gpt2",
            {"max_position_embeddings": 10**12, "position_embedding": "learned"},
        ),
        ("gpt2", {"n_embd": 10**6}),
        ("gpt2", {"n_layer": 10**5}),
        ("gpt2", {"n_positions": 10**12}),
        ("gpt2", {"n_head": -1}),
        ("gpt_neo", {"intermediate_size": 10**12}),
        ("gpt_neo", {"attention_types": [[["global"], 10**12]]}),
        ("gpt_neo", {"attention_types": [[["global", "local"], -(10**12)]]}),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused_and_nothing_is_allocated(
    kind, fields, models, tmp_path, forked
):
    folder = with_fields(models[kind], tmp_path / "model", **fields)

    status, growth, error = forked(print_growth, refuse_to_load, folder).wait()

    assert status == 0, error
    assert int(growth) < MOST


def refuse_to_pretrain(overrides, out):
    with in_one_sentence(
        r"there is no such model|memory has|layers; allowed are|model\.(hidden|num)_"
    ):
        pretrain(load_recipe(PretrainRecipe, "demo", overrides), out)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.hidden_size=1000000000"],
        ["model.num_hidden_layers=1000000000"],
        [
            "model.position_embedding=learned",
            "model.max_position_embeddings=2000000000",
        ],
    ],
    ids=str,
)
def test_recipes_are_bounded_too(settings, small_store, tmp_path, forked):
    overrides = [f"data.tokens={small_store.path}", *settings]

    training = forked(print_growth, refuse_to_pretrain, overrides, tmp_path / "out")
    status, growth, error = training.wait()

    assert status == 0, error
    assert int(growth) < MOST
    assert not (tmp_path / "out").exists()


def weights_with(**changes):
    """A file of weights of one tensor, whose header says something else."""
    tensor = {"dtype": "F32", "shape": [60, 8], "data_offsets": [0, 1920]} | changes
    header = json.dumps({"a": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(1920)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (2**63).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (6_000).to_bytes(8, "little") + b"[" * 6_000,
        weights_with(data_offsets=[0, 2**60]),
        weights_with(shape=[2**40, 2**40]),
    ],
    ids=["empty", "endless", "a list", "deep", "beyond the file", "a huge shape"],
)
def test_headers_that_lie(content, models, tmp_path, refuses):
    folder = with_fields(models["meta_gpt2"], tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)

    with refuses("the weights in"):
        load_model(folder)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"x": 1, ' + b" " * 2**20 + b"}"],
    ids=["deep", "large"],
)
def test_a_configuration_that_is_a_bomb(content, models, tmp_path, refuses):
    folder = with_fields(models["meta_gpt2"], tmp_path / "model")
    (folder / "config.json").write_bytes(content)

    with refuses("config.json cannot be used"):
        load_model(folder)


def test_a_recipe_with_code_is_refused(tmp_path, refuses):
    path = tmp_path / "recipe.yaml"
    path.write_text("training: !!python/object/apply:os.abort []")

    with refuses("could not determine a constructor"):
        load_recipe(PretrainRecipe, str(path))
