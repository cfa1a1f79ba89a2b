"""Model folders on disk: safetensors, and a manifest of checksums that is written last.

A folder with a `manifest.json` is complete, and every file in it has the checksum that the manifest gives. A folder
without one, such as a model that another program saved, is read as transformers reads it, from safetensors alone.
Whatever a folder holds, no code of it is run, and its sizes are looked at before anything is allocated.
"""

import json
from dataclasses import fields
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from metatokens.errors import UserError
from metatokens.files import LOCK, PARTIAL, file_sha256, library_writes, sha256_of, write_whole
from metatokens.machine import local_rank
from metatokens.model.configuration import (
    MAX_LAYERS,
    REMOTE_CODE_FILE,
    MetaGPT2Config,
    SecondAttention,
    check_memory,
    parameters_at_least,
)
from metatokens.model.gpt_neo import GPTNeoForCausalLM
from metatokens.model.modeling import MetaGPT2ForCausalLM

LanguageModel = MetaGPT2ForCausalLM | GPTNeoForCausalLM

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"  # which of several files of weights holds which tensor

_CLASSES = {MetaGPT2Config: MetaGPT2ForCausalLM, GPT2Config: GPT2LMHeadModel, GPTNeoConfig: GPTNeoForCausalLM}
_KINDS = {config_class.model_type: config_class for config_class in _CLASSES}
_MAX_CONFIG_BYTES, _MAX_INDEX_BYTES = 2**20, 2**24
# Read beside what the configuration's own class declares. Whatever else transformers would take from a config.json is
# left out: names of code to run or to download, tables of any size.
_FURTHER_FIELDS = {"dtype", "torch_dtype", "meta_token_id", "unpadded_vocab_size", "attention_layers"}
_WRONG_VALUES = (TypeError, LookupError, AttributeError, ArithmeticError)  # what transformers makes of some


def write_manifest(folder: Path) -> None:
    """Record the SHA-256 of every file in `folder` (not of its subfolders), which marks it as complete."""
    others = (MANIFEST, MANIFEST + PARTIAL, LOCK)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in others]
    sums = {path.name: file_sha256(path) for path in files}
    write_whole(folder / MANIFEST, json.dumps({"sha256": sums}, indent=1).encode())


def verify_manifest(folder: Path) -> None:
    """Compare a folder with its manifest.

    Raises:
        UserError: if a file is missing, cut short or changed; the sentence names it.
    """
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"].items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / MANIFEST} is missing or damaged, so {folder} may not be complete.") from error
    files = {path.name for path in folder.iterdir() if path.is_file()}
    for name, expected in sums:
        if name not in files:  # nor is a name taken that leads out of the folder
            raise UserError(f"{' '.join(str(folder / name).split())} is missing: the checkpoint is not complete.")
        if file_sha256(folder / name) != expected:
            raise UserError(f"{folder / name} is damaged: its checksum is not the one in {MANIFEST}.")


def save_model(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model and tokenizer to `folder`, the manifest last; `weights` in place of the model's own, if given.

    Raises:
        OSError: if they cannot be written.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    with library_writes(folder):
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    write_manifest(folder)


def weights_sha256(folder: Path) -> str:
    """The checksum of a model's weights, or of their shards' checksums; it tells two models apart wherever they are.

    Raises:
        UserError: if there are no weights.
    """
    files = _weight_files(folder)
    try:
        sums = [file_sha256(file) for file in files]
    except OSError as error:
        raise UserError(f"there is no model in {folder}: it has no {WEIGHTS}.") from error
    return sums[0] if files == [folder / WEIGHTS] else sha256_of("".join(sums).encode())


def _weight_files(folder: Path) -> list[Path]:
    """The file of a model's weights, or the shards that an index names, in the order of their names.

    Raises:
        UserError: if the index is damaged, or a shard is missing.
    """
    if (folder / WEIGHTS).exists() or not (folder / SHARDS).exists():
        return [folder / WEIGHTS]
    try:
        if (folder / SHARDS).stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES:,} bytes")
        names = sorted(set(json.loads((folder / SHARDS).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, RecursionError, *_WRONG_VALUES) as error:
        raise UserError(f"{folder / SHARDS} does not say where the weights are: {_one_line(error)}") from error
    there = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for name in names:
        if name not in there:  # nor is a name taken that leads out of the folder, or to a pickle
            shown = " ".join(str(name).split())[:100]
            raise UserError(f"the weights in {folder} are not complete: there is no {shown}, which {SHARDS} names.")
    return [folder / name for name in names]


def fetch_model(spec: Path) -> Path:
    """The folder of a model: `spec` itself, or where the Hugging Face Hub's model of the name in `hf:NAME` is kept.

    Raises:
        UserError: if the Hub gives no such model, and none was fetched before.
    """
    prefix, _, name = spec.as_posix().partition(":")
    if prefix != "hf":
        return spec
    patterns = ["*.json", "*.txt", WEIGHTS, "model-*-of-*.safetensors", REMOTE_CODE_FILE]  # which is not run
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise UserError(f"the Hugging Face Hub gave no model {name!r}: {_one_line(error)}") from error


def load_model(folder: Path, second_attention: SecondAttention | None = None) -> LanguageModel:
    """Load a checkpoint of this package or of transformers' GPT-2 or GPT-Neo; onto the GPU if there is one.

    A GPT-2 is converted; a GPT-Neo is given a meta-token if it has none (`GPTNeoForCausalLM.add_meta_token`).

    Args:
        folder: holds `config.json` and `model.safetensors`, or the shards and the index that transformers writes.
        second_attention: what a GPT-2 is to be given (`MetaGPT2ForCausalLM.from_gpt2`); other checkpoints have theirs.

    Raises:
        UserError: if there is no model, it is of another kind, cut short or damaged.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"there is no model in {folder}: it has no config.json{_models_below(folder)}.")
    if (folder / MANIFEST).exists():
        verify_manifest(folder)
    config, files = _load_config(folder), _weight_files(folder)
    try:
        size, parameters = sum(file.stat().st_size for file in files), parameters_at_least(config)
        if parameters > size:
            raise ValueError(f"config.json asks for {parameters:,} parameters, and the weights have {size:,} bytes")
        model, report = _CLASSES[type(config)].from_pretrained(
            folder, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (SafetensorError, OSError, RuntimeError, ValueError, *_WRONG_VALUES) as error:
        raise UserError(f"the weights in {folder} cannot be read: {_one_line(error)}") from error
    if report["missing_keys"] or report["unexpected_keys"]:
        first = sorted([*report["missing_keys"], *report["unexpected_keys"]])[0]
        raise UserError(f"the weights in {folder} do not fit its configuration: see {first}.")
    if isinstance(model, GPT2LMHeadModel):
        model = MetaGPT2ForCausalLM.from_gpt2(model, second_attention or "none")
    elif isinstance(model, GPTNeoForCausalLM) and model.config.meta_token_id is None:
        model.add_meta_token()
    gpus = torch.cuda.device_count()
    return model.to(f"cuda:{local_rank() % gpus}") if gpus else model  # a process may be shown its own GPU alone


def _models_below(folder: Path) -> str:
    """The nearest models below a folder that holds none, such as those of a run's phases, as the end of a sentence."""
    levels = (sorted(folder.glob(f"{'*/' * depth}config.json")) for depth in (1, 2, 3))
    nearest = next(filter(None, levels), [])[:3]
    return f"; there are models in {', '.join(str(path.parent) for path in nearest)}" if nearest else ""


def _load_config(folder: Path) -> PreTrainedConfig:
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES:,} bytes")
        given = json.loads(path.read_bytes())
        kind = given.get("model_type")
        if kind not in _KINDS:
            raise ValueError(f"{folder} holds a {kind} model; allowed are meta_gpt2, gpt2 and gpt_neo")
        # Written out, item by item, when the configuration is made.
        if sum(len(kinds) * abs(count) for kinds, count in given.get("attention_types") or ()) > MAX_LAYERS:
            raise ValueError(f"attention_types has more than {MAX_LAYERS:,} layers")
        known = {field.name for field in fields(_KINDS[kind])} - {field.name for field in fields(PreTrainedConfig)}
        other_names = _KINDS[kind].attribute_map
        given = {other_names.get(key, key): value for key, value in given.items()}
        config = _KINDS[kind].from_dict({key: given[key] for key in given.keys() & (known | _FURTHER_FIELDS)})
        check_memory(config, has_masks=kind == "gpt_neo")
    except (OSError, ValueError, RecursionError, StrictDataclassError, *_WRONG_VALUES) as error:
        raise UserError(f"{path} is not a model configuration: {_one_line(error)}") from error
    return config


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") + "."
