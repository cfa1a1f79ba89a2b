"""A delta: what was added to a base, saved without the base's weights."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from metatokens.decoder import decoder_of, own_blocks
from metatokens.differences import differences
from metatokens.errors import UserError, one_line
from metatokens.files import DAMAGED, read_json, relative_base_name, resolve_base, write_whole
from metatokens.model.wrappers import takes_wrapped, uncompiled
from metatokens.retrofit.classes import MODEL_TYPE, MetaModel
from metatokens.retrofit.identity import settings_of, weights_checksum
from metatokens.retrofit.injection import convert
from metatokens.retrofit.layers import MetaModule, added_parameters
from metatokens.retrofit.settings import MetaSettings, check_entries

DELTA = "meta_tokens.json"
DELTA_WEIGHTS = "meta_tokens.safetensors"
MAX_BYTES = 2**20  # of DELTA


@takes_wrapped
def save_meta(model: PreTrainedModel, folder: str | Path) -> None:
    """Save what `add_meta_attention` added to a model, without the base's weights.

    To load it, `load_meta` needs the same base. If the base was trained too, save the whole model by `save_pretrained`.

    Args:
        model: a retrofitted model, also inside wrappers, such as torch.compile's.
        folder: where to write `meta_tokens.safetensors`, `meta_tokens.json` with the base's name, settings and
            checksums, and a `config.json` unless there is one; created if it does not exist.

    Raises:
        UserError: if nothing was added to the model, what was added is quantised or sharded, PEFT's adapters are in the
            model, the base's weights have changed since, or its vocabulary has grown; if the folder cannot be written,
            or holds a whole model, which would be loaded in place of this one.
    """
    folder = Path(folder)
    if (folder / SAFE_WEIGHTS_NAME).exists() or (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        raise UserError(
            f"{folder} holds a whole model, which would be loaded: give another folder."
        )
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise UserError(
            "adapters are in this model: save what their merge_and_unload() returns, by save_pretrained."
        )
    if not isinstance(model, MetaModel):
        raise UserError("this is no retrofitted model: nothing was added that could be saved.")
    settings = MetaSettings(**model.config.meta_attention)
    weights = {
        name: parameter.detach().contiguous() for name, parameter in added_parameters(model).items()
    }
    _check_added(model, settings, weights)
    _check_base_of(model, settings)
    settings.base = relative_base_name(folder, settings.base)
    delta = {
        "meta_token_id": model.config.meta_token_id,
        "unpadded_vocab_size": model.config.unpadded_vocab_size,
        "meta_attention": settings.model_dump(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / DELTA_WEIGHTS, metadata={"format": "pt"})
        write_whole(folder / DELTA, json.dumps(delta, indent=1).encode())
        config = folder / "config.json"
        if not config.exists():
            # Lets the Auto classes explain what this folder is.
            write_whole(config, json.dumps({"model_type": MODEL_TYPE}).encode())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written to: {error}.") from error


def _check_added(
    model: PreTrainedModel, settings: MetaSettings, weights: dict[str, torch.Tensor]
) -> None:
    """Refuse added weights that are not whole or not exact."""
    if not all(weight.is_floating_point() for weight in weights.values()):
        raise UserError(
            "what was added to this model is quantised, which is lossy: save it before quantising."
        )
    is_sharded = any(isinstance(weight, DTensor) for weight in weights.values())
    if is_sharded or _shapes(weights) != _expected_shapes(model, settings):
        raise UserError(
            "the weights of this model are in parts, on several devices or processes: gather them first."
        )


def _check_base_of(model: PreTrainedModel, settings: MetaSettings) -> None:
    """Refuse a retrofitted model whose base is no longer the one that was retrofitted."""
    rows = settings.base_rows
    if _has_other_weights(settings, model, rows):
        raise UserError(
            "the base's weights are not those that meta-attention was added to: it was trained too, or adapters were "
            "merged into it. Save the whole model, by save_pretrained."
        )
    if model.config.unpadded_vocab_size > max(rows, model.config.meta_token_id + 1):
        raise UserError(
            "tokens were added to this model after the meta-token, and their embeddings are no part of meta-attention. "
            "Save the whole model, by save_pretrained."
        )


def load_meta(base: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Add what `save_meta` saved to a base, in place, and freeze the base's own weights.

    Args:
        base: a model with the configuration and the weights of the base that the delta was trained with, in any
            precision.
        folder: a folder that `save_meta` wrote.

    Returns:
        The same model.

    Raises:
        UserError: if the base is another one, is wrapped by more than torch.compile, or has meta-tokens already; if a
            file is missing or damaged. The base is then unchanged.
    """
    model = uncompiled(base)
    folder = Path(folder)
    settings, meta_token_id, in_use = _read(folder)
    if isinstance(model, MetaModel) or not isinstance(model, PreTrainedModel):
        raise UserError(
            "this is no model of transformers without meta-tokens: give the plain base."
        )
    _check_identity(model, settings, folder)
    rows = model.get_input_embeddings().weight.shape[0]
    if not rows <= in_use <= 2 * rows:  # more for the meta-token, and for tokens that came with it
        raise UserError(
            f"{folder} has {in_use} entries in use, which does not fit the {rows} rows of the base."
        )
    try:
        weights = load_file(folder / DELTA_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / DELTA_WEIGHTS} cannot be read: {error}.") from error
    is_exact = all(weight.is_floating_point() for weight in weights.values())
    if not is_exact or _shapes(weights) != _expected_shapes(model, settings):
        raise UserError(
            f"the weights in {folder} do not fit its {DELTA}, or that does not fit the base."
        )
    convert(model, settings, meta_token_id, in_use)
    with torch.no_grad():
        for name, parameter in added_parameters(model).items():
            parameter.copy_(weights[name])
    return base


def _check_identity(base: PreTrainedModel, settings: MetaSettings, folder: Path) -> None:
    """Refuse a base that is not the one that a delta in `folder` was trained with."""
    names = [name for name, _, _ in differences(settings.base_settings, settings_of(base.config))]
    if names:
        differing = f"it had another {', '.join(names)}"
    elif _has_other_weights(settings, base):
        differing = (
            "the configuration is the same, but the weights have another checksum, as they also have in float16 if "
            "they were not in float16 before, and the other way round"
        )
    else:
        return
    name = settings.base or "never saved"
    raise UserError(f"{folder} was trained with another base ({name}): {differing}.")


def _has_other_weights(
    settings: MetaSettings, model: PreTrainedModel, rows: int | None = None
) -> bool:
    """Whether a base's weights are not those that a delta was trained with, as far as both are known."""
    checksums = {settings.base_weights, weights_checksum(model, rows)}
    return None not in checksums and len(checksums) > 1


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def _expected_shapes(base: PreTrainedModel, settings: MetaSettings) -> dict[str, torch.Size] | None:
    """The shapes of the added weights, by name; None if the base lacks a submodule that the settings name."""
    names = {module: name for name, module in base.named_modules()}
    _, blocks = decoder_of(base)
    settings.check_blocks(own_blocks(base.config))
    table = base.get_input_embeddings()
    shapes = {f"{names[table]}.meta_token.weight": torch.Size([table.weight.shape[1]])}
    for layer, point in zip(settings.layers, settings.injection_points, strict=True):
        block = names[blocks[layer]]
        if f"{block}.{point}" not in names.values():
            return None
        with torch.device("meta"):
            module = MetaModule(settings, layer, layer)
        for name, parameter in module.named_parameters():
            shapes[f"{block}.meta_attention.{name}"] = parameter.shape
    return shapes


def base_of(folder: Path) -> str:
    """The base of a delta: a folder, or a name on the Hub."""
    settings, _, _ = _read(folder)
    if not settings.base:
        raise UserError("the base was never saved; load_meta takes one that has its configuration.")
    return settings.base


def _read(folder: Path) -> tuple[MetaSettings, int, int]:
    """The settings of a delta, its meta-token's id, and the number of vocabulary entries in use."""
    path = folder / DELTA
    try:
        delta = read_json(path, MAX_BYTES)
        settings = MetaSettings.checked(**delta["meta_attention"])
        settings.base = resolve_base(folder, settings.base)
        meta_token_id, in_use = delta["meta_token_id"], delta["unpadded_vocab_size"]
        check_entries(meta_token_id, in_use, rows=in_use)  # the table may still grow
    except DAMAGED as error:
        raise UserError(f"{path} is missing or damaged: {one_line(error)}.") from error
    return settings, meta_token_id, in_use
