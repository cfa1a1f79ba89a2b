"""Sizes are checked before anything is allocated: a sentence, and no more memory than without the model."""

import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metatokens.checkpoint import MANIFEST, load_model
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.recipe import PretrainRecipe, load_recipe
from metatokens.training.pretrain import pretrain
from metatokens.untrusted import check_memory
from tests.forked import Forked
from tests.hostile.good import Clean


def with_fields(folder: Path, target: Path, fields: dict[str, Any]) -> Path:
    """A copy of a model's folder with other fields in its config.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


HUGE = {
    "meta_gpt2": [
        {"vocab_size": 10**12}, {"hidden_size": 10**6}, {"hidden_size": 10**9}, {"num_hidden_layers": 10**12},
        {"num_hidden_layers": 10**6}, {"intermediate_size": 10**12}, {"hidden_size": 9}, {"num_hidden_layers": -1},
        {"num_hidden_layers": 0}, {"num_attention_heads": 0}, {"num_attention_heads": -2}, {"num_attention_heads": 3},
        {"max_position_embeddings": 10**12, "position_embedding": "learned"}, {"vocab_size": -5},
        {"intermediate_size": -4},
        {"vocab_size": 10**400}, {"vocab_size": 2.5}, {"vocab_size": None}, {"hidden_size": "8"}, {"hidden_size": [8]},
    ],
    "gpt2": [
        {"vocab_size": 10**12}, {"n_embd": 10**6}, {"hidden_size": 10**9}, {"n_layer": 10**12}, {"n_layer": 10**5},
        {"n_inner": 10**12}, {"n_positions": 10**12}, {"n_head": 0}, {"n_head": -1}, {"n_head": 3}, {"n_layer": 0},
    ],
    "gpt_neo": [
        {"vocab_size": 10**12}, {"hidden_size": 10**6}, {"num_layers": 10**12}, {"num_heads": 0}, {"num_heads": 3},
        {"attention_types": [[["global"], 10**12]]}, {"attention_types": [[["global", "local"], -(10**12)]]},
        {"max_position_embeddings": 10**12}, {"intermediate_size": 10**12}, {"attention_types": [[["global"]]]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields"), [(kind, fields) for kind in HUGE for fields in HUGE[kind]], ids=lambda value: str(value)[:60]
)
def test_impossible_sizes_are_refused_and_nothing_is_allocated(
    kind: str, fields: dict[str, Any], models: dict[str, Path], tmp_path: Path, clean: Clean
) -> None:
    folder = with_fields(models[kind], tmp_path / "model", fields)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with clean(), pytest.raises(UserError, match=r"is not a model configuration|the weights in .* cannot be read"):
        load_model(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB; 10^8 parameters take 400 MB


def test_a_tables_size_in_positions_counts_for_the_masks_too() -> None:
    check_memory(MetaGPT2Config(max_position_embeddings=200_000))
    with pytest.raises(UserError, match="bytes at least, and this machine's memory has"):
        check_memory(MetaGPT2Config(max_position_embeddings=200_000), has_masks=True)


def load_apart(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load_model(folder)
    except UserError as error:
        print(error, file=sys.stderr)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)


def test_a_trillion_parameters_in_a_process_of_its_own(
    models: dict[str, Path], tmp_path: Path, forked: Callable[..., Forked]
) -> None:
    fields = {"hidden_size": 65536, "num_hidden_layers": 20, "num_attention_heads": 64, "num_labels": 10**12}
    folder = with_fields(models["meta_gpt2"], tmp_path / "model", fields)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**42)  # a hole of 4 TB, so that the file could hold them
    status, grown, said = forked(load_apart, folder).wait()
    assert (status, said.count("\n")) == (0, 1)
    assert "bytes at least, and this machine's memory has" in said
    assert int(grown) < 64  # MiB more than before


@pytest.mark.parametrize(
    "settings",
    [
        "model.hidden_size=1000000000", "model.num_hidden_layers=1000000000",
        "model.hidden_size=1000000000000", "model.num_hidden_layers=-1", "model.num_attention_heads=0",
        "model.position_embedding=learned model.max_position_embeddings=2000000000",
        "model.architecture=gpt_neo model.position_embedding=learned model.second_attention=none "
        "model.max_position_embeddings=1000000",
        "model.num_hidden_layers=10001 model.hidden_size=2 model.num_attention_heads=1",
    ],
)  # fmt: skip
def test_recipes_are_bounded_too(settings: str, small_store: TokenStore, tmp_path: Path, clean: Clean) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run() -> None:
        recipe = load_recipe(PretrainRecipe, "demo", [f"data.tokens={small_store.path}", *settings.split()])
        pretrain(recipe, tmp_path / "out")

    with clean(), pytest.raises(UserError, match=r"memory has|layers; allowed are|model\.(hidden|num)_"):
        run()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
    assert not (tmp_path / "out").exists()


def header(**tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


WHOLE = {"dtype": "F32", "shape": [60, 8], "data_offsets": [0, 1920]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 8, (2**63).to_bytes(8, "little"), (2**64 - 1).to_bytes(8, "little") + b"{}", header(),
        header(a=WHOLE), header(a=WHOLE | {"data_offsets": [0, 2**60]}) + bytes(1920),
        header(a=WHOLE | {"shape": [2**40, 2**40]}) + bytes(1920), header(a=WHOLE | {"dtype": "F7"}) + bytes(1920),
        header(a=WHOLE, b=WHOLE) + bytes(1920), header(a=WHOLE | {"data_offsets": [1920, 0]}) + bytes(1920),
        (2).to_bytes(8, "little") + b"[]", (6_000).to_bytes(8, "little") + b"[" * 6_000,
    ],
    ids=range(13),
)  # fmt: skip
def test_headers_that_lie(content: bytes, models: dict[str, Path], tmp_path: Path, clean: Clean) -> None:
    folder = with_fields(models["meta_gpt2"], tmp_path / "model", {})
    (folder / "model.safetensors").write_bytes(content + b" " * 20_000 * (content == header()))
    with clean(), pytest.raises(UserError, match="the weights in"):
        load_model(folder)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 50_000, b'{"x": 1, ' + b" " * 2**20 + b"}"])
def test_a_configuration_that_is_a_bomb(content: bytes, models: dict[str, Path], tmp_path: Path, clean: Clean) -> None:
    folder = with_fields(models["meta_gpt2"], tmp_path / "model", {})
    (folder / "config.json").write_bytes(content)
    assert not (folder / MANIFEST).exists()
    with clean(), pytest.raises(UserError, match="is not a model configuration"):
        load_model(folder)


def test_weights_come_back_in_their_own_type(models: dict[str, Path], tmp_path: Path) -> None:
    loaded = load_model(models["meta_gpt2"]).to(torch.bfloat16)
    loaded.save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16


LAUGHS = "\n".join([f"a0: &a0 [{'x,' * 9}x]", *(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}*a{i - 1}]" for i in range(1, 12))])
MERGES = "\n".join([f"a{i}: &a{i}\n  <<: [{f'*a{i - 1},' * 9}*a{i - 1}]" for i in range(1, 12)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "aliases are not allowed"),
        (f"a0: &a0 {{x: 1}}\n{MERGES}", "aliases are not allowed"),
        ("training: &a [*a]", "aliases are not allowed"),
        ("[" * 30_000, "maximum recursion depth exceeded"),
        ("# a comment\n" * 10_000, "it has more than 65,536 bytes"),
        ("training: !!python/object/apply:os.abort []", "could not determine a constructor"),
        ("training: {max_steps: " + "9" * 5_000 + "}", "Exceeds the limit"),
        ("training: {max_steps: 1e400}", "training.max_steps"),
        ("training: {max_steps: 3000000000}", "less than 2147483648"),
        ("training: {max_steps: 1, seed: 4294967296}", "less than 2147483648"),
        ("training: {max_steps: 1, position_jumps: 2000000000}", "less than or equal to 1048576"),
        ("training: {max_steps: 1, learning_rate: .nan}", "training.learning_rate"),
    ],
)
def test_a_recipe_that_is_a_bomb(text: str, said: str, tmp_path: Path, clean: Clean) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with clean(), pytest.raises(UserError, match=said):
        load_recipe(PretrainRecipe, str(path))
