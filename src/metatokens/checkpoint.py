"""Model folders: saved with checksums, and loaded from safetensors without running any code in them.

A folder with a `manifest.json` is complete: the manifest is written last and has the checksum of every file. A folder
without one, such as a model that another program saved, is read as transformers reads it, from safetensors alone.
"""

import json
import re
from collections.abc import Set
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto import modeling_auto as auto

from metatokens.data.tokenizer import load_plain_tokenizer
from metatokens.decoder import position_embedding_of
from metatokens.errors import UserError, one_line
from metatokens.files import (
    DAMAGED,
    LOCK,
    PARTIAL,
    file_sha256,
    library_writes,
    read_json,
    relative_base_name,
    resolve_base,
    sha256_of,
    write_whole,
)
from metatokens.machine import local_rank
from metatokens.model.configuration import REMOTE_CODE_FILE, MetaGPT2Config, SecondAttention
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.wrappers import takes_wrapped
from metatokens.recipe import Device, Dtype
from metatokens.retrofit.classes import MODEL_TYPE, MetaModel
from metatokens.retrofit.saving import DELTA, DELTA_WEIGHTS, base_of, load_meta, save_meta
from metatokens.retrofit.text_window import apply_text_window, text_window_of
from metatokens.untrusted import MAX_CONFIG_BYTES, parameters_at_least, read_config

EXAMPLE = Path(__file__).parent / "example"  # the bundled model, and make.sh, which made it
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"  # names the file of each tensor, where weights are in several files
ADAPTER = "adapter_config.json"  # of an adapter that PEFT saved
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TEXT_WINDOW = "text_window.json"  # that of the model that the adapter was trained in

_MAX_INDEX_BYTES = 2**24
_CLASSES = {MetaGPT2Config: MetaGPT2ForCausalLM, GPT2Config: GPT2LMHeadModel}
# Encoder models that can also run as decoders (BERT, say) are in both lists.
_DECODERS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
)
_KINDS = {"meta_gpt2", "gpt2", MODEL_TYPE, *_DECODERS}
# Buffers in published GPT-Neo checkpoints.
_OLD_MASK = re.compile(r"\.attn\.attention\.(masked_)?bias$")


def write_manifest(folder: Path) -> None:
    """Record the SHA-256 of every file in `folder`, but not in its subfolders, which marks it as complete."""
    others = (MANIFEST, MANIFEST + PARTIAL, LOCK)
    files = [
        path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in others
    ]
    sums = {path.name: file_sha256(path) for path in files}
    write_whole(folder / MANIFEST, json.dumps({"sha256": sums}, indent=1).encode())


def verify_manifest(folder: Path) -> None:
    """Raise a `UserError` that names the first file of a folder that is missing or is not what its manifest records."""
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"].items()
    except DAMAGED as error:
        raise UserError(
            f"{folder / MANIFEST} is missing or damaged, so {folder} may not be complete."
        ) from error
    files = {path.name for path in folder.iterdir() if path.is_file()}
    for name, expected in sums:
        if name not in files:  # also refuses names that lead out of the folder
            raise UserError(
                f"{' '.join(str(folder / name).split())} is missing: the checkpoint is not complete."
            )
        if file_sha256(folder / name) != expected:
            raise UserError(
                f"{folder / name} is damaged: its checksum is not the one in {MANIFEST}."
            )


def _verify_if_present(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        verify_manifest(folder)


@takes_wrapped
def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a model and its tokenizer to `folder`, the manifest last.

    Args:
        model: any model that `load_model` returns. A retrofitted one whose base is elsewhere is saved by `save_meta`.
        tokenizer: the model's tokenizer.
        folder: where to write.
        weights: what to save instead of the model's own weights.

    Raises:
        OSError: if they cannot be written.
        UserError: if a retrofitted model cannot be saved so (`save_meta`).
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    with library_writes(folder):
        if getattr(model, "base_is_elsewhere", False) and not hasattr(model, "get_base_model"):
            save_meta(model, folder)
        else:
            model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    make_adapter_portable(model, folder)
    write_manifest(folder)


def make_adapter_portable(model: Any, folder: Path) -> None:
    """Complete an adapter that PEFT saved in `folder`, if it did: its base by a relative path, and its text window."""
    if not (folder / ADAPTER).is_file():
        return
    settings = json.loads((folder / ADAPTER).read_bytes())
    base = getattr(model, "read_from", "") or settings["base_model_name_or_path"]
    settings["base_model_name_or_path"] = relative_base_name(folder, base)
    write_whole(folder / ADAPTER, json.dumps(settings, indent=1).encode())
    text_window = text_window_of(model.config)
    if text_window:
        write_whole(folder / TEXT_WINDOW, json.dumps(text_window).encode())
    # PEFT's form to fill in, with the base's absolute path.
    (folder / "README.md").unlink(missing_ok=True)


def weights_sha256(folder: Path) -> str:
    """Checksum of a model's weights, its base's included. Equal models have equal ones, wherever they are."""
    files = _existing_weights(folder)
    sums = [file_sha256(file) for file in files]
    is_one_file = files == [folder / WEIGHTS]
    return sums[0] if is_one_file else sha256_of("".join(sums).encode())


def weights_size(folder: Path) -> int:
    """Bytes of a model's weights on disk, its base's included."""
    return sum(file.stat().st_size for file in _existing_weights(folder))


def _existing_weights(folder: Path) -> list[Path]:
    files = _weight_files(folder)
    if not all(file.is_file() for file in files):
        raise UserError(f"there is no model in {folder}: it has no {WEIGHTS}.")
    return files


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, its base's included; WEIGHTS even where there is no such file."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / DELTA_WEIGHTS).exists():
        return [folder / DELTA_WEIGHTS, *_weight_files(_base_folder(folder, base_of(folder)))]
    if (folder / ADAPTER_WEIGHTS).exists():
        return [folder / ADAPTER_WEIGHTS, *_weight_files(_adapted_folder(folder))]
    if (folder / SHARDS).exists():
        return _shards(folder)
    return [folder / WEIGHTS]


def _shards(folder: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(folder / SHARDS, _MAX_INDEX_BYTES)["weight_map"].values()))
    except DAMAGED as error:
        raise UserError(
            f"{folder / SHARDS} does not name the files of the weights: {one_line(error)}."
        ) from error
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for name in names:
        if name not in present:  # also refuses pickles, and names that lead out of the folder
            shown = " ".join(str(name).split())[:100]
            raise UserError(
                f"the weights in {folder} are not complete: there is no {shown}, which {SHARDS} names."
            )
    return [folder / name for name in names]


def fetch_model(spec: Path) -> Path:
    """The folder that a user means by `spec`: a folder, `hf:NAME` for a model of the Hub, or `example`.

    A model of the Hub is downloaded unless it is in the cache. `example` is the bundled model, unless there is a
    folder of that name.

    Raises:
        UserError: if the Hub does not give the model.
    """
    prefix, _, name = spec.as_posix().partition(":")
    if prefix == "example" and not spec.exists():
        return EXAMPLE
    if prefix != "hf":
        return spec
    # The last is never run.
    texts = [
        "*.json",
        "*.jsonl",
        "*.txt",
        "*.jinja",
        "tokenizer.model",
        REMOTE_CODE_FILE,
    ]
    weights = [WEIGHTS, "model-*-of-*.safetensors", DELTA_WEIGHTS, ADAPTER_WEIGHTS]
    try:  # a manifest lists all files of a folder, so all that this package writes must come
        return Path(
            snapshot_download(name, allow_patterns=texts + weights, ignore_patterns="checkpoint*/*")
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"the Hugging Face Hub gave no model {name!r}: {one_line(error)}."
        ) from error


def _base_folder(folder: Path, name: str) -> Path:
    """The folder of the base that a delta or an adapter in `folder` names, by a relative path or on the Hub."""
    base = Path(resolve_base(folder, name))
    if not base.exists() and (name.startswith("../") or base.is_absolute()):
        raise UserError(
            f"the base of {folder} is not at {folder / name}: put it there (a link will do)."
        )
    return base if base.exists() else fetch_model(Path(f"hf:{base.as_posix()}"))


def _adapted_folder(folder: Path) -> Path:
    """The folder of the base of an adapter in `folder`."""
    try:
        name = read_json(folder / ADAPTER, MAX_CONFIG_BYTES)["base_model_name_or_path"]
        resolve_base(folder, name)  # whether it can be a name at all
    except DAMAGED as error:
        raise UserError(f"{folder / ADAPTER} does not name the base of the adapter.") from error
    base = _base_folder(folder, name)
    if (base / ADAPTER).is_file():  # possibly the same one
        raise UserError(f"the adapter in {folder} belongs to another adapter, {base}.")
    return base


def _models_below(folder: Path) -> str:
    """The models right below a folder that holds none, such as those of a run's phases, as the end of a sentence."""
    models = [str(path.parent) for path in sorted(folder.glob("*/config.json"))]
    return f"; there are models in {', '.join(models[:3])}" if models else ""


def load_model(
    folder: str | Path,
    second_attention: SecondAttention | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> PreTrainedModel:
    """Load a model of this package, a retrofitted one, or any other causal language model of transformers.

    A GPT-2 is converted to a `MetaGPT2ForCausalLM`. Any other model of transformers stays as it is, and has no
    meta-token: its `config.meta_token_id` is None.

    Args:
        folder: a folder that `save_model`, transformers' `save_pretrained`, `save_meta` or PEFT wrote. The base of a
            delta or of an adapter is loaded from where it was, on disk or on the Hub.
        second_attention: the second attention to give a GPT-2 (`MetaGPT2ForCausalLM.from_gpt2`).
        device: `cpu` or `cuda`; by default the GPU if there is one.
        dtype: `float32` or `bfloat16`; by default that of the weights on disk. Meta-attention that was added to a base
            stays in float32.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: if the folder holds no such model, or a file is missing or damaged; if there is no such device or
            type of numbers.
    """
    check_placing(device, dtype)
    folder = Path(folder)
    is_whole = (folder / WEIGHTS).is_file() or (folder / SHARDS).is_file()
    if not is_whole and (folder / ADAPTER).is_file():
        return _with_adapter(folder, device, dtype)
    is_delta = not is_whole and (folder / DELTA).is_file()
    model = _with_delta(folder, dtype) if is_delta else _load(folder, _KINDS, dtype)
    if isinstance(model, GPT2LMHeadModel) and not isinstance(model, MetaModel):
        model = MetaGPT2ForCausalLM.from_gpt2(model, second_attention or "none")
    elif not isinstance(model, MetaModel | MetaGPT2ForCausalLM):
        model.config.meta_token_id = None
        model.config.position_embedding = position_embedding_of(model)
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    # A process may see its own GPU alone.
    return model.to(f"cuda:{local_rank() % gpus}") if gpus else model


def check_placing(device: str | None, dtype: str | None) -> None:
    """Refuse a device or a type of numbers that `load_model` does not take, or a GPU where there is none."""
    for name, choices in ((device, get_args(Device)), (dtype, get_args(Dtype))):
        if name is not None and name not in choices:
            raise UserError(f"unknown {name!r}; choose {' or '.join(choices)}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU that PyTorch can use; leave --device out, or give cpu.")


def load_base(folder: Path, dtype: str | None = None) -> PreTrainedModel:
    """Load a causal language model of transformers for `add_meta_attention`.

    Raises:
        UserError: if it is missing, cannot be read, or is no decoder that this package supports.
    """
    return _load(folder, _DECODERS, dtype, is_base=True)


def load_base_and_tokenizer(model: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a base for `add_meta_attention` and its tokenizer from a folder or `hf:NAME`.

    Raises:
        UserError: as `fetch_model` and `load_base`, and if the tokenizer cannot be loaded.
    """
    folder = fetch_model(model)
    if not folder.exists():
        raise UserError(f"there is no folder {folder}; a model of the Hub is hf:NAME.")
    tokenizer = load_plain_tokenizer(
        str(folder), f"the folder {folder} holds no tokenizer that can be loaded."
    )
    base = load_base(folder)
    # A name that holds wherever the added weights are saved, and on other machines.
    base.config.name_or_path = (
        str(folder.absolute()) if folder == model else model.as_posix().removeprefix("hf:")
    )
    return base, tokenizer


def _with_delta(folder: Path, dtype: str | None) -> Any:
    """The base of a delta that `save_meta` wrote to `folder`, with the delta in it."""
    _verify_if_present(folder)
    model: Any = load_meta(load_base(_base_folder(folder, base_of(folder)), dtype), folder)
    model.base_is_elsewhere, model.read_from = True, str(folder)
    # PEFT would look for a configuration under that name.
    model.name_or_path = model.config.name_or_path = ""
    return model


def _with_adapter(folder: Path, device: str | None, dtype: str | None) -> Any:
    """The base of an adapter that PEFT saved in `folder`, wrapped with the adapter."""
    _verify_if_present(folder)
    base = _adapted_folder(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():  # PEFT would take a pickle instead
        raise UserError(f"there is no adapter in {folder}: it has no {ADAPTER_WEIGHTS}.")
    model = load_model(base, device=device, dtype=dtype)
    try:
        if (folder / TEXT_WINDOW).is_file():
            apply_text_window(model, **read_json(folder / TEXT_WINDOW, MAX_CONFIG_BYTES))
        from peft import PeftModel

        adapted: Any = PeftModel.from_pretrained(model, folder, is_trainable=True)
        settings = adapted.peft_config["default"]
        adapted.read_from = resolve_base(folder, str(settings.base_model_name_or_path))
        # Where PEFT looks for a configuration.
        settings.base_model_name_or_path = model.name_or_path
    except (ImportError, SafetensorError, RuntimeError, *DAMAGED) as error:
        raise UserError(f"the adapter in {folder} cannot be read: {one_line(error)}.") from error
    return adapted.eval()


def _load(folder: Path, kinds: Set[str], dtype: str | None, *, is_base: bool = False) -> Any:
    """A whole model of one of these model types; `is_base`: of transformers' class, and not this package's."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"there is no model in {folder}: it has no config.json{_models_below(folder)}."
        )
    _verify_if_present(folder)
    config, files = read_config(folder, kinds), _weight_files(folder)
    loader = AutoModelForCausalLM if is_base else _CLASSES.get(type(config), AutoModelForCausalLM)
    try:
        size = sum(file.stat().st_size for file in files)
        parameters = parameters_at_least(config)
        if parameters > size:
            raise ValueError(
                f"config.json asks for {parameters:,} parameters, and the weights have {size:,} bytes"
            )
        model, report = loader.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            dtype=dtype or "auto",
        )
    except (SafetensorError, RuntimeError, *DAMAGED) as error:
        raise UserError(f"the weights in {folder} cannot be read: {one_line(error)}.") from error
    unexpected = {name for name in report["unexpected_keys"] if not _OLD_MASK.search(name)}
    unfit = unexpected | set(report["missing_keys"])
    if unfit:
        raise UserError(f"the weights in {folder} do not fit its configuration: see {min(unfit)}.")
    return model
