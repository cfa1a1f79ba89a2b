"""Nothing that a folder holds is run: no pickle, no Python file, whatever names it and however well it is sealed."""

import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from metatokens.checkpoint import MANIFEST, load_model, write_manifest
from metatokens.data.corpus import read_corpus
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError

# Where a library might look for a pickle.
PICKLES = (
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "scaler.pt",
    "pytorch_model.bin",
    "training_args.bin",
    "optimizer.bin",
    "adapter_model.bin",
    "vocab.pkl",
)
FOREIGN = "from pathlib import Path\nPath({marker!r}).touch()\nclass Foreign: pass\n"
SMALL = (
    "--set data.block_size=32 --set model.hidden_size=16 --set model.num_hidden_layers=1 "
    "--set model.num_attention_heads=2 --set training.per_device_train_batch_size=2"
)
ONE_STEP = "--set training.max_steps=1 --set training.save_steps=1 --set training.per_device_train_batch_size=2"


@pytest.fixture
def model(small_model, tmp_path):
    """A model's folder that a test may change, without a manifest."""
    folder = shutil.copytree(small_model(), tmp_path / "model")
    (folder / MANIFEST).unlink()
    return folder


def change_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_payloads_would_run(trap, tmp_path):
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(trap))
    torch.save(trap, tmp_path / "zipped.pt")

    pickle.loads((tmp_path / "plain.pt").read_bytes())
    assert trap.was_sprung
    trap.marker.unlink()
    torch.load(tmp_path / "zipped.pt", weights_only=False)
    assert trap.was_sprung


@pytest.mark.parametrize(
    ("is_zipped", "has_weights"),
    [(False, True), (True, False)],
    ids=["beside weights", "in place of weights"],
)
def test_pickles_of_a_model(
    is_zipped,
    has_weights,
    model,
    trap,
    small_store,
    tmp_path,
    metatokens,
):
    for name in PICKLES:
        if is_zipped:
            torch.save(trap, model / name)
        else:
            (model / name).write_bytes(pickle.dumps(trap))
    if not has_weights:
        (model / "model.safetensors").unlink()
    write_manifest(model)

    for number, command in enumerate(
        (
            f"pretrain --init {model} --recipe demo {ONE_STEP} --set data.block_size=32 "
            f"--set data.tokens={small_store.path} --out {tmp_path / 'pretrained'}",
            f"finetune --model {model} --task parity --set task.train_lengths=[64] {ONE_STEP} "
            f"--out {tmp_path / 'finetuned'}",
            f"evaluate --model {model} --task parity --lengths 64 -n 2",
            f"generate --model {model} the --max-new-tokens 2",
        )
    ):
        status, _, error = metatokens(command)
        assert (status == 0) == has_weights, (number, error)
    assert not trap.was_sprung


class Interrupted(NamedTuple):
    """A command, the checkpoint in the middle of its run from which it goes on, and the weights it ended with."""

    command: str
    out: Path
    checkpoint: Path
    weights: bytes


@pytest.fixture
def interrupted(small_store, tmp_path, metatokens):
    out = tmp_path / "run"
    command = (
        f"pretrain --recipe demo {SMALL} --set training.max_steps=3 --set training.save_steps=2 "
        f"--set training.logging_steps=1 --set data.tokens={small_store.path} --out {out}"
    )
    status, _, error = metatokens(command)
    assert status == 0, error
    weights = (out / "model.safetensors").read_bytes()
    for path in (out / MANIFEST, out / "model.safetensors", out / "curve.jsonl"):
        path.unlink()
    shutil.rmtree(out / "checkpoints" / "checkpoint-3")
    return Interrupted(command, out, out / "checkpoints" / "checkpoint-2", weights)


@pytest.mark.quick(name=["optimizer.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "pytorch_model.bin"])
def test_sealed_pickles_in_a_checkpoint_that_training_goes_on_from(
    name, trap, interrupted, metatokens
):
    checkpoint = interrupted.checkpoint
    (checkpoint / name).write_bytes(pickle.dumps(trap))
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    write_manifest(checkpoint)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on what it did not load
        status, _, error = metatokens(interrupted.command)

    assert not trap.was_sprung
    assert status == 2
    assert f"{checkpoint} cannot be loaded" in error
    assert error.count("\n") == 1


def test_a_pickle_in_a_checkpoint_that_no_training_needs_is_not_read(trap, interrupted, metatokens):
    (interrupted.checkpoint / "scaler.pt").write_bytes(pickle.dumps(trap))
    write_manifest(interrupted.checkpoint)

    status, _, error = metatokens(interrupted.command)

    assert not trap.was_sprung
    assert status == 0, error
    assert (interrupted.out / "model.safetensors").read_bytes() == interrupted.weights


@pytest.mark.parametrize("model_type", ["meta_gpt2", "foreign"])
def test_code_beside_a_model(model_type, model, trap, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # to whoever would ask
    (model / "foreign.py").write_text(FOREIGN.format(marker=str(trap.marker)))
    auto_map = {
        "AutoConfig": "foreign.Foreign",
        "AutoModelForCausalLM": "foreign.Foreign",
        "AutoTokenizer": ["foreign.Foreign", None],
    }
    change_json(model / "config.json", auto_map=auto_map, model_type=model_type)
    change_json(model / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Foreign")

    if model_type == "meta_gpt2":
        load_model(model)
    else:
        with pytest.raises(UserError, match="is no decoder that metatokens supports"):
            load_model(model)
    with pytest.raises(UserError, match="holds no tokenizer that can be loaded"):
        load_tokenizer(str(model))

    assert not trap.was_sprung


def test_names_of_code_to_download_are_not_read(model):
    # transformers would download and run it, with the package `kernels`.
    kernel = "somebody/attention"
    change_json(
        model / "config.json",
        _attn_implementation=kernel,
        attn_implementation=kernel,
        experts_implementation=kernel,
        quantization_config={"quant_method": "bitsandbytes"},
        transformers_weights="pytorch_model.bin",
    )

    config = load_model(model).config

    assert config._attn_implementation in ("sdpa", "eager")
    assert not hasattr(config, "quantization_config")
    assert not hasattr(config, "transformers_weights")


def test_code_beside_a_dataset(trap, tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "dataset.py").write_text(FOREIGN.format(marker=str(trap.marker)))
    (folder / "train.pkl").write_bytes(pickle.dumps(trap))

    with pytest.raises(UserError, match="cannot be read"):
        list(read_corpus(f"hf:{folder}"))

    (folder / "dataset.py").rename(folder / "other.py")
    (folder / "train.jsonl").write_text('{"text": "words"}\n')
    assert list(read_corpus(f"hf:{folder}")) == ["words"]
    assert not trap.was_sprung
