"""Model folders on disk: safetensors, and a manifest of checksums that is written last.

A folder with a `manifest.json` is complete, and every file in it has the checksum that the manifest gives. A folder
without one, such as a model that another program saved, is read as transformers reads it, from safetensors alone.
Whatever a folder holds, no code of it is run, and its sizes are looked at before anything is allocated.
"""

import json
import re
from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from metatokens.decoder import position_embedding_of
from metatokens.errors import UserError
from metatokens.files import (
    LOCK,
    PARTIAL,
    file_sha256,
    found_from,
    library_writes,
    name_from,
    sha256_of,
    write_whole,
)
from metatokens.machine import local_rank
from metatokens.model.configuration import (
    MAX_LAYERS,
    REMOTE_CODE_FILE,
    MetaGPT2Config,
    SecondAttention,
    check_memory,
    parameters_at_least,
)
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.retrofit.classes import MODEL_TYPE, MetaModel, MetaTokensConfig
from metatokens.retrofit.saving import DELTA, DELTA_WEIGHTS, base_of, load_meta, save_meta

LanguageModel: TypeAlias = MetaGPT2ForCausalLM | PreTrainedModel

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"  # of an adapter that PEFT saved
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SHARDS = "model.safetensors.index.json"  # which of several files of weights holds which tensor

_CLASSES = {MetaGPT2Config: MetaGPT2ForCausalLM, GPT2Config: GPT2LMHeadModel}
# Models that see what comes later, unless they are told not to, are in both.
_DECODERS = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
_KINDS = {config_class.model_type: config_class for config_class in _CLASSES}
_OLD_MASK = re.compile(r"\.attn\.attention\.(masked_)?bias$")  # of a published GPT-Neo, next to its weights
_MAX_CONFIG_BYTES, _MAX_INDEX_BYTES = 2**20, 2**24
# Read beside what the configuration's own class declares. Whatever else transformers would take from a config.json is
# left out: names of code to run or to download, tables of any size.
_FURTHER_FIELDS = {
    *("dtype", "torch_dtype", "meta_token_id", "unpadded_vocab_size", "attention_layers"),
    # Rotary positions as releases of transformers before 5 wrote them.
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "rope_local_base_freq"),
    *("global_rope_theta", "local_rope_theta", "sliding_window_pattern"),
}
_RETROFITTED = {"base_model_type", "architectures", "meta_attention", "position_embedding"}
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
        if getattr(model, "base_is_elsewhere", False) and not hasattr(model, "get_base_model"):
            save_meta(model, folder)
        else:
            model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    name_base(model, folder)
    write_manifest(folder)


def name_base(model: Any, folder: Path) -> None:
    """Have the adapter of a model, which PEFT has saved in `folder`, name its base as seen from there."""
    if (folder / ADAPTER).is_file():
        given = json.loads((folder / ADAPTER).read_bytes())
        given["base_model_name_or_path"] = name_from(
            folder, getattr(model, "read_from", "") or given["base_model_name_or_path"]
        )
        write_whole(folder / ADAPTER, json.dumps(given, indent=1).encode())
        (folder / "README.md").unlink(missing_ok=True)  # a form to fill in, with the base's path


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


def weights_size(folder: Path) -> int:
    """Bytes of a model's weights on disk.

    Raises:
        UserError: if there are none.
    """
    try:
        return sum(file.stat().st_size for file in _weight_files(folder))
    except OSError as error:
        raise UserError(f"there is no model in {folder}: it has no {WEIGHTS}.") from error


def _weight_files(folder: Path) -> list[Path]:
    """The file of a model's weights, or the shards that an index names, in the order of their names.

    Raises:
        UserError: if the index is damaged, or a shard is missing.
    """
    if not (folder / WEIGHTS).exists():
        if (folder / DELTA_WEIGHTS).exists():
            return [folder / DELTA_WEIGHTS, *_weight_files(_there(folder, base_of(folder)))]
        if (folder / ADAPTER_WEIGHTS).exists():
            return [folder / ADAPTER_WEIGHTS, *_weight_files(_adapted_folder(folder))]
        if (file := gguf_file(folder)) is not None:
            return [file]
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


EXAMPLE = Path(__file__).parent / "example"  # what made it stands in it, make.sh


def fetch_model(spec: Path) -> Path:
    """The folder of a model: `spec` itself, or where the Hugging Face Hub's model of the name in `hf:NAME` is kept.

    `example`, where there is no folder of that name, is the small model that comes with the package.

    Raises:
        UserError: if the Hub gives no such model, and none was fetched before.
    """
    prefix, _, name = spec.as_posix().partition(":")
    if prefix == "example" and not spec.exists():
        return EXAMPLE
    if prefix != "hf":
        return spec
    tokenizer = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
    patterns = [*tokenizer, WEIGHTS, "model-*-of-*.safetensors", REMOTE_CODE_FILE]  # which is not run
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise UserError(f"the Hugging Face Hub gave no model {name!r}: {_one_line(error)}") from error


def check_placing(device: str | None, dtype: str | None) -> None:
    """Refuse a device that is not there, or a type of numbers that `load_model` does not take.

    Raises:
        UserError: if one of them is given and cannot be had.
    """
    for given, allowed in ((device, (None, "cpu", "cuda")), (dtype, (None, "float32", "bfloat16"))):
        if given not in allowed:
            raise UserError(f"unknown {given!r}; choose {' or '.join(filter(None, allowed))}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU that PyTorch can use; leave --device out, or give cpu.")


def load_model(
    folder: Path,
    second_attention: SecondAttention | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> LanguageModel:
    """Load a checkpoint of this package or of any causal language model of transformers.

    A GPT-2 is converted. Any other model stays as it is, without a meta-token (`config.meta_token_id` is None).

    Args:
        folder: holds `config.json` and `model.safetensors`, or the shards and the index that transformers writes; or
            what `save_meta` wrote, whose base is where it was: on disk or on the Hub.
        second_attention: what a GPT-2 is to be given (`MetaGPT2ForCausalLM.from_gpt2`); other checkpoints have theirs.
        device: `cpu` or `cuda`; by default the GPU if there is one.
        dtype: `float32` or `bfloat16`; by default that of the weights on disk. What was added to a base is in float32.

    Raises:
        UserError: if there is no model, it is of another kind, cut short or damaged; or no such device or type.
    """
    check_placing(device, dtype)
    is_whole = (folder / WEIGHTS).is_file() or (folder / SHARDS).is_file()
    if (folder / DELTA).is_file() and not is_whole:
        _verify(folder)
        model: Any = load_meta(load_base(_there(folder, base_of(folder)), dtype), folder)
        model.base_is_elsewhere, model.read_from = True, str(folder)
        model.name_or_path = model.config.name_or_path = ""  # PEFT would look for a configuration under that name
        return _placed(model, device)
    if (folder / ADAPTER).is_file() and not is_whole:
        return _with_adapter(folder, device, dtype)
    model = _load(folder, {*_KINDS, MODEL_TYPE, *_DECODERS}, dtype)
    if isinstance(model, MetaModel | MetaGPT2ForCausalLM):
        return _placed(model, device)
    if isinstance(model, GPT2LMHeadModel):
        model = MetaGPT2ForCausalLM.from_gpt2(model, second_attention or "none")
    else:
        model.config.meta_token_id, model.config.position_embedding = None, position_embedding_of(model)
    return _placed(model, device)


def _there(folder: Path, name: str) -> Path:
    """The base that a delta or an adapter in `folder` calls `name` (see `name_from`), fetched if it is on the Hub.

    Raises:
        UserError: if it is neither where it was on disk nor on the Hub.
    """
    base = Path(found_from(folder, name))
    if not base.exists() and (name.startswith("../") or base.is_absolute()):
        raise UserError(f"the base of {folder} is not at {folder / name}: put it there (a link will do).")
    return base if base.exists() else fetch_model(Path(f"hf:{base.as_posix()}"))


def load_base(folder: Path, dtype: str | None = None) -> PreTrainedModel:
    """Load a causal language model of transformers, for `add_meta_attention`: of a folder, or of a GGUF file.

    Raises:
        UserError: if there is none, or it is damaged.
    """
    if (file := gguf_file(folder)) is None:
        return _load(folder, _DECODERS, dtype, is_base=True)
    # Weights as numbers; so releases that have no such configuration read them anyway.
    plain = getattr(transformers, "GgufConfig", lambda dequantize: None)(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=plain, local_files_only=True, dtype=dtype or "auto"
        )
    except ImportError as error:
        raise UserError("a model in GGUF form needs the package gguf: pip install gguf.") from error
    except Exception as error:  # gguf and transformers raise whatever a damaged file leads to
        raise UserError(f"{file} cannot be read: {_one_line(error)}") from error
    if model.config.model_type not in _DECODERS:
        raise UserError(f"{file} holds a {model.config.model_type} model, which is no decoder that is known here.")
    return model


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names, or that a folder without a `config.json` holds.

    Raises:
        UserError: if the folder holds several.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{path} holds {len(files)} GGUF files, such as {files[0].name}; name one of them.")
    return next(iter(files), None)


def _with_adapter(folder: Path, device: str | None, dtype: str | None) -> Any:
    """The model that PEFT saved an adapter of, with the adapter.

    Raises:
        UserError: if the adapter is damaged, its base is not there, or PEFT is not.
    """
    _verify(folder)
    base = _adapted_folder(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():  # nor is a pickle taken
        raise UserError(f"there is no adapter in {folder}: it has no {ADAPTER_WEIGHTS}.")
    model = load_model(base, device=device, dtype=dtype)
    try:
        from peft import PeftModel

        adapted: Any = PeftModel.from_pretrained(model, folder, is_trainable=True)
        own = adapted.peft_config["default"]
        adapted.read_from = found_from(folder, str(own.base_model_name_or_path))
        own.base_model_name_or_path = model.name_or_path  # where PEFT looks for a configuration
        return adapted
    except (ImportError, SafetensorError, OSError, RuntimeError, ValueError, *_WRONG_VALUES) as error:
        raise UserError(f"the adapter in {folder} cannot be read: {_one_line(error)}") from error


def _adapted_folder(folder: Path) -> Path:
    """The base of an adapter.

    Raises:
        UserError: if its file is damaged, or the base is not there.
    """
    try:
        if (folder / ADAPTER).stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES:,} bytes")
        base = _there(folder, json.loads((folder / ADAPTER).read_bytes())["base_model_name_or_path"])
    except UserError:
        raise
    except (OSError, ValueError, RecursionError, *_WRONG_VALUES) as error:
        raise UserError(f"{folder / ADAPTER} does not say what the adapter belongs to.") from error
    if (base / ADAPTER).is_file():  # which might be this one
        raise UserError(f"the adapter in {folder} belongs to another adapter, {base}.")
    return base


def _verify(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        verify_manifest(folder)


def _placed(model: Any, device: str | None) -> Any:
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return model.to(f"cuda:{local_rank() % gpus}") if gpus else model  # a process may be shown its own GPU alone


def _load(folder: Path, kinds: Set[str], dtype: str | None, *, is_base: bool = False) -> Any:
    if not (folder / "config.json").is_file():
        if gguf_file(folder) is not None:
            raise UserError(f"{folder} is in GGUF form, which `metatokens retrofit` alone takes; it writes a folder.")
        raise UserError(f"there is no model in {folder}: it has no config.json{_models_below(folder)}.")
    _verify(folder)
    config, files = _load_config(folder, kinds), _weight_files(folder)
    loader = AutoModelForCausalLM if is_base else _CLASSES.get(type(config), AutoModelForCausalLM)
    try:
        size, parameters = sum(file.stat().st_size for file in files), parameters_at_least(config)
        if parameters > size:
            raise ValueError(f"config.json asks for {parameters:,} parameters, and the weights have {size:,} bytes")
        model, report = loader.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            dtype=dtype or "auto",
        )
    except (SafetensorError, OSError, RuntimeError, ValueError, *_WRONG_VALUES) as error:
        raise UserError(f"the weights in {folder} cannot be read: {_one_line(error)}") from error
    unfit = {*report["missing_keys"], *(name for name in report["unexpected_keys"] if not _OLD_MASK.search(name))}
    if unfit:
        raise UserError(f"the weights in {folder} do not fit its configuration: see {min(unfit)}.")
    return model


def _models_below(folder: Path) -> str:
    """The nearest models below a folder that holds none, such as those of a run's phases, as the end of a sentence."""
    levels = (sorted(folder.glob(f"{'*/' * depth}config.json")) for depth in (1, 2, 3))
    nearest = next(filter(None, levels), [])[:3]
    return f"; there are models in {', '.join(str(path.parent) for path in nearest)}" if nearest else ""


def _load_config(folder: Path, kinds: Set[str]) -> PreTrainedConfig:
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES:,} bytes")
        given = json.loads(path.read_bytes())
        kind = given.get("model_type")
        if kind not in kinds:
            if kind == MODEL_TYPE:
                raise ValueError(f"the model in {folder} has meta-tokens already")
            raise ValueError(f"{folder} holds a {kind} model, which is no decoder that is known here")
        # Written out, item by item, when the configuration is made.
        if sum(len(kinds) * abs(count) for kinds, count in given.get("attention_types") or ()) > MAX_LAYERS:
            raise ValueError(f"attention_types has more than {MAX_LAYERS:,} layers")
        base = given.get("base_model_type") if kind == MODEL_TYPE else kind
        declared = _KINDS.get(base) or CONFIG_MAPPING[base]
        known = {field.name for field in fields(declared)} - {field.name for field in fields(PreTrainedConfig)}
        known |= _FURTHER_FIELDS | (_RETROFITTED if kind == MODEL_TYPE else set())
        given = {declared.attribute_map.get(key, key): value for key, value in given.items()}
        maker = MetaTokensConfig if kind == MODEL_TYPE else declared
        config = maker.from_dict({key: given[key] for key in given.keys() & known})
        check_memory(config, has_masks=base == "gpt_neo")
    except (OSError, ValueError, RecursionError, StrictDataclassError, *_WRONG_VALUES) as error:
        raise UserError(f"{path} is not a model configuration: {_one_line(error)}") from error
    return config


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") + "."
