"""Model folders: saved with checksums, and loaded from safetensors without running any code in them.

A folder with a `manifest.json` is complete: the manifest is written last and has the checksum of every file. A folder
without one, such as a model that another program saved, is read as transformers reads it, from safetensors alone.
"""

import json
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
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
    sha256_of,
    write_whole,
)
from metatokens.machine import local_rank
from metatokens.model.configuration import REMOTE_CODE_FILE
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.wrappers import takes_wrapped
from metatokens.retrofit.classes import MODEL_TYPE, MetaModel
from metatokens.retrofit.saving import DELTA, DELTA_WEIGHTS, base_of, load_meta, save_meta
from metatokens.untrusted import read_config

EXAMPLE = Path(__file__).parent / "example"  # the bundled model, and make.sh, which made it
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"  # names the file of each tensor, where weights are in several files

_MAX_INDEX_BYTES = 2**24
# Encoder models that can also run as decoders (BERT, say) are in both lists.
_DECODERS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
)
_KINDS = {"meta_gpt2", MODEL_TYPE, *_DECODERS}
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
                f"{one_line(folder / name)} is missing: the checkpoint is not complete."
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
) -> None:
    """Write a model and its tokenizer to `folder`, the manifest last.

    Args:
        model: any model that `load_model` returns. A retrofitted one whose base is elsewhere is saved by `save_meta`.
        tokenizer: the model's tokenizer.
        folder: where to write.

    Raises:
        OSError: if they cannot be written.
        UserError: if a retrofitted model cannot be saved so (`save_meta`).
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    with library_writes(folder):
        if getattr(model, "base_is_elsewhere", False):
            save_meta(model, folder)
        else:
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_manifest(folder)


def weights_sha256(folder: Path) -> str:
    """Checksum of a model's weights, its base's included. Equal models have equal ones, wherever they are."""
    files = _weight_files(folder)
    sums = [file_sha256(file) for file in files]
    is_one_file = files == [folder / WEIGHTS]
    return sums[0] if is_one_file else sha256_of("".join(sums).encode())


def weights_size(folder: Path) -> int:
    """Bytes of a model's weights on disk, its base's included."""
    return sum(file.stat().st_size for file in _weight_files(folder))


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, its base's included."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / SHARDS).is_file():
        return _shards(folder)
    if _is_delta(folder) and (folder / DELTA_WEIGHTS).is_file():
        return [folder / DELTA_WEIGHTS, *_weight_files(_base_folder(folder))]
    raise UserError(
        f"there is no model in {folder}: it has no {WEIGHTS} (a run's models are in folders below it)."
    )


def _is_delta(folder: Path) -> bool:
    """Whether a folder holds what was added to a base, and not a whole model too, which goes before it."""
    is_whole = (folder / WEIGHTS).is_file() or (folder / SHARDS).is_file()
    return not is_whole and (folder / DELTA).is_file()


def with_its_base(path: Path) -> list[Path]:
    """The folder of a model and, if that is a delta, the folder of its base; any other path alone."""
    return [path, _base_folder(path)] if _is_delta(path) else [path]


def _shards(folder: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(folder / SHARDS, _MAX_INDEX_BYTES)["weight_map"].values()))
    except DAMAGED as error:
        raise UserError(
            f"{folder / SHARDS} does not name the files of the weights: {one_line(error)}."
        ) from error
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    missing = set(names) - present  # also pickles, and names that lead out of the folder
    if missing:
        raise UserError(
            f"the weights in {folder} are not complete: there is no {one_line(missing.pop())}, which {SHARDS} names."
        )
    return [folder / name for name in names]


def fetch_model(spec: Path) -> Path:
    """The folder that a user means by `spec`: a folder, `hf:NAME` for a model of the Hub, or `example`.

    A model of the Hub is downloaded unless it is in the cache. `example` is the bundled model, unless there is a
    folder of that name.

    Raises:
        UserError: if the Hub does not give the model.
    """
    if spec == Path("example") and not spec.exists():
        return EXAMPLE
    prefix, _, name = spec.as_posix().partition(":")
    if prefix != "hf":
        return spec
    # REMOTE_CODE_FILE comes since a manifest lists it; it is never run.
    texts = [
        "*.json",
        "*.jsonl",
        "*.txt",
        "*.jinja",
        "tokenizer.model",
        REMOTE_CODE_FILE,
    ]
    weights = [WEIGHTS, "model-*-of-*.safetensors", DELTA_WEIGHTS]
    try:  # a manifest lists all files of a folder, so all that this package writes must come
        return Path(
            snapshot_download(name, allow_patterns=texts + weights, ignore_patterns="checkpoint*/*")
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"the Hugging Face Hub gave no model {name!r}: {one_line(error)}."
        ) from error


def _base_folder(folder: Path) -> Path:
    """The folder of the base that a delta in `folder` names, by a relative path or on the Hub."""
    name = base_of(folder)
    base = Path(name)
    if not base.exists() and (name.startswith("../") or base.is_absolute()):
        raise UserError(
            f"the base of {folder} is not at {folder / name}: put it there (a link will do)."
        )
    return base if base.exists() else fetch_model(Path(f"hf:{base.as_posix()}"))


def load_model(
    folder: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> PreTrainedModel:
    """Load a model of this package, a retrofitted one, or any other causal language model of transformers.

    A model of transformers stays as it is, and has no meta-token: its `config.meta_token_id` is None.

    Args:
        folder: a folder that `save_model`, transformers' `save_pretrained` or `save_meta` wrote. The base of a delta is
            loaded from where it was, on disk or on the Hub.
        device: `cpu` or `cuda`; by default the GPU if there is one.
        dtype: `float32` or `bfloat16`; by default that of the weights on disk. Meta-attention that was added to a base
            stays in float32.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: if the folder holds no such model, or a file is missing or damaged; if there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU that PyTorch can use; leave the device out, or give cpu.")
    folder = Path(folder)
    model = _with_delta(folder, dtype) if _is_delta(folder) else _load(folder, _KINDS, dtype)
    if not isinstance(model, MetaModel | MetaGPT2ForCausalLM):
        model.config.meta_token_id = None
        model.config.position_embedding = position_embedding_of(model)
    if device in (None, "cuda") and torch.cuda.is_available():
        # Modulo, since the launcher may show each process its own GPU alone.
        device = f"cuda:{local_rank() % torch.cuda.device_count()}"
    return model.to(device or "cpu")


def load_base(folder: Path, dtype: str | None = None) -> PreTrainedModel:
    """Load a causal language model of transformers for `add_meta_attention`.

    Raises:
        UserError: if it is missing, cannot be read, or is no decoder that this package supports.
    """
    return _load(folder, _DECODERS, dtype)


def load_base_and_tokenizer(
    model: Path, dtype: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a base for `add_meta_attention` and its tokenizer from a folder or `hf:NAME`.

    Args:
        model: the folder or name.
        dtype: as in `load_model`.

    Raises:
        UserError: as `fetch_model` and `load_base`, and if the tokenizer cannot be loaded.
    """
    folder = fetch_model(model)
    if not folder.exists():
        raise UserError(f"there is no folder {folder}; a model of the Hub is hf:NAME.")
    tokenizer = load_plain_tokenizer(str(folder))
    base = load_base(folder, dtype)
    # A name that holds wherever the added weights are saved, and on other machines.
    base.config.name_or_path = (
        str(folder.absolute()) if folder == model else model.as_posix().removeprefix("hf:")
    )
    return base, tokenizer


def _with_delta(folder: Path, dtype: str | None) -> Any:
    """The base of a delta that `save_meta` wrote to `folder`, with the delta in it."""
    _verify_if_present(folder)
    model: Any = load_meta(load_base(_base_folder(folder), dtype), folder)
    model.base_is_elsewhere = True
    # PEFT would look for a configuration under that name.
    model.name_or_path = model.config.name_or_path = ""
    return model


def _load(folder: Path, kinds: Set[str], dtype: str | None) -> Any:
    """A whole model of one of these model types."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"there is no model in {folder}: it has no config.json (a run's models are in folders below it; adapters "
            "must be merged first)."
        )
    _verify_if_present(folder)
    config, parameters = read_config(folder, kinds)
    try:
        size = weights_size(folder)
        if parameters > size:
            raise ValueError(
                f"config.json asks for {parameters:,} parameters, and the weights have {size:,} bytes"
            )
        model, report = AutoModelForCausalLM.from_pretrained(
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
