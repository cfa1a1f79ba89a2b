"""Sizes are looked at before anything is allocated: a sentence, and no more memory than without the model."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

from metatokens.checkpoint import MANIFEST, load_model
from metatokens.data.store import TokenStore
from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.recipe import PretrainRecipe, load_recipe
from metatokens.training.pretrain import pretrain
from metatokens.untrusted import check_memory, parameters_at_least
from tests.hostile.drawing import JSON, NUMBER, SCALAR, cases, damaged

Clean = Callable[[], AbstractContextManager[None]]

SIZES = {"vocab_size": 60, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = {"bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each kind, without a manifest."""
    neo = {"vocab_size": 60, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}
    models = {
        "meta_gpt2": MetaGPT2ForCausalLM(MetaGPT2Config(**SIZES, **IDS, meta_token_id=1)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=8, n_layer=2, n_head=2, n_positions=32, **IDS)),
        "gpt_neo": GPTNeoForCausalLM(GPTNeoConfig(**neo, max_position_embeddings=32, **IDS)),
    }
    folders = {}
    for kind, model in models.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folders[kind])
        assert parameters_at_least(model.config) <= sum(p.numel() for p in model.parameters())
    return folders


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
    kind: str, fields: dict[str, Any], folders: dict[str, Path], tmp_path: Path, clean: Clean
) -> None:
    folder = with_fields(folders[kind], tmp_path / "model", fields)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with clean(), pytest.raises(UserError, match=r"is not a model configuration|the weights in .* cannot be read"):
        load_model(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB; 10^8 parameters take 400 MB


def test_a_tables_size_in_positions_counts_for_the_masks_too() -> None:
    check_memory(MetaGPT2Config(max_position_embeddings=200_000))
    with pytest.raises(UserError, match="bytes at least, and this machine's memory has"):
        check_memory(MetaGPT2Config(max_position_embeddings=200_000), has_masks=True)


LOADER = """
import resource, sys
from pathlib import Path
from metatokens.errors import UserError
from metatokens.checkpoint import load_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_model(Path(sys.argv[1]))
except UserError as error:
    print(error, file=sys.stderr)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_trillion_parameters_in_a_process_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    fields = {"hidden_size": 65536, "num_hidden_layers": 20, "num_attention_heads": 64, "num_labels": 10**12}
    folder = with_fields(folders["meta_gpt2"], tmp_path / "model", fields)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**42)  # a hole of 4 TB, so that the file could hold them
    command = [sys.executable, "-c", LOADER, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "bytes at least, and this machine's memory has" in done.stderr
    assert done.stderr.count("\n") == 1
    assert int(done.stdout) < 64  # MiB more than before


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
def test_headers_that_lie(content: bytes, folders: dict[str, Path], tmp_path: Path, clean: Clean) -> None:
    folder = with_fields(folders["meta_gpt2"], tmp_path / "model", {})
    (folder / "model.safetensors").write_bytes(content + b" " * 20_000 * (content == header()))
    with clean(), pytest.raises(UserError, match="the weights in"):
        load_model(folder)


@cases(20)
@given(data=st.data())
def test_damaged_weights(
    data: st.DataObject, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, clean: Clean
) -> None:
    folder = with_fields(folders["meta_gpt2"], tmp_path_factory.getbasetemp() / "damaged-weights", {})
    good = (folders["meta_gpt2"] / "model.safetensors").read_bytes()
    start = int.from_bytes(good[:8], "little") + 8
    (folder / "model.safetensors").write_bytes(data.draw(damaged(good[:start])) + good[start:])
    with clean():
        load_model(folder)


KEYS = st.sampled_from(
    [
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "activation",
        "max_position_embeddings", "position_embedding", "second_attention", "meta_token_id", "bias",
        "rope_parameters", "layer_norm_epsilon", "initializer_range", "eos_token_id", "pad_token_id",
        "tie_word_embeddings", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "attention_types",
        "attention_layers", "num_heads", "num_layers", "window_size", "activation_function", "num_labels",
        "id2label", "model_type", "auto_map", "dtype", "torch_dtype",
    ]
)  # fmt: skip
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "rope_theta", "factor", "beta_fast", "original_max_position_embeddings"]),
    NUMBER | st.sampled_from(["yarn", "linear", "dynamic", "llama3", "longrope", "default", None]),
)


@cases(40)
@given(
    kind=st.sampled_from([*HUGE]),
    fields=st.dictionaries(KEYS, SCALAR | JSON | ROPE | st.integers(0, 64), max_size=3)
    | st.fixed_dictionaries({"rope_parameters": ROPE}),
)
@example(kind="gpt2", fields={"initializer_range": -1.0})
@pytest.mark.filterwarnings("ignore")  # of the libraries, about what they doubt
def test_any_values(
    kind: str,
    fields: dict[str, Any],
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    clean: Clean,
) -> None:
    folder = with_fields(folders[kind], tmp_path_factory.getbasetemp() / f"any-{kind}", fields)
    with clean():
        load_model(folder)


@cases(20)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")
def test_damaged_configurations(
    data: st.DataObject, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, clean: Clean
) -> None:
    folder = with_fields(folders["meta_gpt2"], tmp_path_factory.getbasetemp() / "damaged-config", {})
    (folder / "config.json").write_bytes(data.draw(damaged((folders["meta_gpt2"] / "config.json").read_bytes())))
    with clean():
        load_model(folder)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 50_000, b'{"x": 1, ' + b" " * 2**20 + b"}"])
def test_a_configuration_that_is_a_bomb(content: bytes, folders: dict[str, Path], tmp_path: Path, clean: Clean) -> None:
    folder = with_fields(folders["meta_gpt2"], tmp_path / "model", {})
    (folder / "config.json").write_bytes(content)
    assert not (folder / MANIFEST).exists()
    with clean(), pytest.raises(UserError, match="is not a model configuration"):
        load_model(folder)


def test_weights_come_back_in_their_own_type(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load_model(folders["meta_gpt2"]).to(torch.bfloat16)
    loaded.save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16
