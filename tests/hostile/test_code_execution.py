"""Nothing that a folder holds is run: no pickle, no Python file, whatever names it and however well it is sealed."""

import json
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from metatokens.checkpoint import MANIFEST, load_model, write_manifest
from metatokens.data.corpus import read_corpus
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError

PICKLES = (
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "pytorch_model.bin", "training_args.bin",
    "optimizer.bin", "adapter_model.bin", "vocab.pkl",
)  # fmt: skip
FOREIGN = "from pathlib import Path\nPath({marker!r}).touch()\nclass Foreign: pass\n"


def test_the_payloads_would_run(trap, tmp_path: Path) -> None:
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(trap))
    pickle.loads((tmp_path / "plain.pt").read_bytes())
    assert trap.was_sprung
    trap.marker.unlink()
    torch.save(trap, tmp_path / "zipped.pt")
    torch.load(tmp_path / "zipped.pt", weights_only=False)
    assert trap.was_sprung


def plant(trap, folder: Path, *, zipped: bool, sealed: bool) -> None:
    """Pickles of every name that a library might look for, over those that are there."""
    for name in PICKLES:
        if zipped:
            torch.save(trap, folder / name)
        else:
            (folder / name).write_bytes(pickle.dumps(trap))
    if sealed:
        write_manifest(folder)
    else:
        (folder / MANIFEST).unlink(missing_ok=True)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("has_weights", [True, False])
def test_pickles_beside_a_model(
    sealed: bool,
    zipped: bool,
    has_weights: bool,
    trap,
    small_model,
    small_store: TokenStore,
    tmp_path: Path,
    metatokens,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small_model(), model)
    if not has_weights:
        (model / "model.safetensors").unlink()
    plant(trap, model, zipped=zipped, sealed=sealed)
    train = "--set training.max_steps=1 --set training.save_steps=1 --set training.per_device_train_batch_size=2"
    for number, line in enumerate(
        [
            f"pretrain --init {model} --recipe demo {train} --set data.block_size=32 "
            f"--set data.tokens={small_store.path}",
            f"finetune --model {model} --task parity --train-lengths 64 {train}",
        ]
    ):
        status, _, error = metatokens(f"{line} --out {tmp_path / str(number)}")
        assert (status == 0) is has_weights, error
    for line in (
        f"evaluate --model {model} --task parity --lengths 64 -n 2",
        f"analyze residual --model {model} --task parity --length 64 -n 2",
        f"generate --model {model} the --max-new-tokens 2",
    ):
        status, _, error = metatokens(line)
        assert (status == 0) is has_weights, error
    assert not trap.was_sprung


def interrupted_run(out: Path, small_store: TokenStore, metatokens) -> tuple[str, Path, bytes]:
    """A command, the checkpoint in the middle of its run from which it goes on, and the weights it ended with."""
    sizes = (
        "data.block_size=32", "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2",
        "training.max_steps=3", "training.save_steps=2", "training.logging_steps=1", f"data.tokens={small_store.path}",
        "training.per_device_train_batch_size=2",
    )  # fmt: skip
    line = f"pretrain --recipe demo {' '.join(f'--set {size}' for size in sizes)} --out {out}"
    assert metatokens(line)[0] == 0
    weights = (out / "model.safetensors").read_bytes()
    for path in (out / MANIFEST, out / "model.safetensors", out / "curve.jsonl"):
        path.unlink()
    shutil.rmtree(out / "checkpoints" / "checkpoint-3")
    checkpoint = out / "checkpoints" / "checkpoint-2"
    assert (checkpoint / "optimizer.pt").exists()
    return line, checkpoint, weights


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("sealed", [True, False])
def test_pickles_in_a_checkpoint_that_training_goes_on_from(
    name: str, sealed: bool, trap, small_store: TokenStore, tmp_path: Path, metatokens
) -> None:
    out = tmp_path / "run"
    line, checkpoint, weights = interrupted_run(out, small_store, metatokens)
    (checkpoint / name).write_bytes(pickle.dumps(trap))
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    if sealed:
        write_manifest(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on what it did not load
        status, _, error = metatokens(line)
    assert not trap.was_sprung
    if sealed or name == "scaler.pt":  # of which the manifest knows nothing
        assert status == 2
        assert f"{checkpoint} cannot be loaded" in error
        assert error.count("\n") == 1
    else:  # the manifest shows that the file is another one, so that training begins anew
        assert (status, (out / "model.safetensors").read_bytes()) == (0, weights)
        assert f"{checkpoint / name} is damaged" in error or "is missing" in error


# What files of a checkpoint hold instead, each sealed by a manifest.
DAMAGES = {
    "optimizer.pt": [b"PK", {}],
    "scheduler.pt": [[]],
    "rng_state.pth": [{}],
    "model.safetensors": [b"{}"],
    "trainer_state.json": [b"[]"],
}


def test_damaged_files_in_a_checkpoint_that_training_goes_on_from(
    small_store: TokenStore, tmp_path: Path, metatokens
) -> None:
    line, checkpoint, _ = interrupted_run(tmp_path / "run", small_store, metatokens)
    for name, contents in DAMAGES.items():
        before = (checkpoint / name).read_bytes()
        for content in contents:
            if isinstance(content, bytes):
                (checkpoint / name).write_bytes(content)
            else:
                torch.save(content, checkpoint / name)
            write_manifest(checkpoint)
            status, _, error = metatokens(line)
            assert status == 2, (name, content, error)
            assert f"{checkpoint} cannot be loaded" in error
            assert error.count("\n") == 1, error
        (checkpoint / name).write_bytes(before)
    write_manifest(checkpoint)
    assert metatokens(line)[0] == 0


AUTO_MAP = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "foreign.Foreign")
AUTO_MAP |= {"AutoTokenizer": ["foreign.Foreign", None]}


@pytest.mark.parametrize("model_type", ["meta_gpt2", "foreign", None])
def test_code_beside_a_model(
    model_type: str | None, trap, small_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # to whoever would ask
    folder = tmp_path / "model"
    shutil.copytree(small_model(), folder)
    (folder / MANIFEST).unlink()
    (folder / "foreign.py").write_text(FOREIGN.format(marker=str(trap.marker)))
    for name in ("config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text()) | {"auto_map": AUTO_MAP, "tokenizer_class": "Foreign"}
        (folder / name).write_text(json.dumps(fields | ({"model_type": model_type} if name == "config.json" else {})))
    if model_type == "meta_gpt2":
        load_model(folder)
    else:
        with pytest.raises(UserError, match="is no decoder that metatokens supports"):
            load_model(folder)
    with pytest.raises(UserError, match="holds no tokenizer that can be loaded"):
        load_tokenizer(str(folder))
    assert not trap.was_sprung


def test_names_of_code_to_download_are_not_read(small_model, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model(), folder)
    (folder / MANIFEST).unlink()
    fields = json.loads((folder / "config.json").read_text())
    for key in ("_attn_implementation", "attn_implementation", "experts_implementation"):
        fields[key] = "somebody/attention"  # transformers would download and run it, with the package `kernels`
    fields |= {"quantization_config": {"quant_method": "bitsandbytes"}, "transformers_weights": "pytorch_model.bin"}
    (folder / "config.json").write_text(json.dumps(fields | {"to_dict": 1, "__class__": "int", "num_labels": 10**12}))
    config = load_model(folder).config
    assert config._attn_implementation in ("sdpa", "eager")
    assert not hasattr(config, "quantization_config")
    assert not hasattr(config, "transformers_weights")


def test_code_beside_a_dataset(trap, tmp_path: Path) -> None:
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
