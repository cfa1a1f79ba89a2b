"""What was added to a base, on disk by itself: a few megabytes for a base of billions of parameters."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from metatokens.errors import UserError
from metatokens.files import write_whole
from metatokens.model.retrofit.classes import MetaModel, own_parameters
from metatokens.model.retrofit.settings import MetaSettings
from metatokens.model.retrofit.surgery import config_sha256, put_in

DELTA = "meta_tokens.json"  # in a folder of what was added to a base
DELTA_WEIGHTS = "meta_tokens.safetensors"
MAX_BYTES = 2**20


def save_meta(model: PreTrainedModel, folder: str | Path) -> None:
    """Write what `add_meta_attention` put into a model, and no weight of its base.

    Whoever loads it needs the same base: one that was trained too is to be saved whole, by `save_pretrained`.

    Args:
        model: a retrofitted model.
        folder: for `meta_tokens.json`, with the base's name and the checksum of its configuration, and
            `meta_tokens.safetensors`; made if it is not there.

    Raises:
        UserError: if the model has no meta-attention, or adapters of PEFT are in it.
    """
    if not isinstance(model, MetaModel):
        raise UserError(f"this {type(model).__name__} is no retrofitted model: it has nothing to save by itself.")
    if any("modules_to_save" in name or "lora_" in name for name, _ in model.named_parameters()):
        raise UserError("adapters are in this model: save what their merge_and_unload() returns, by save_pretrained.")
    Path(folder).mkdir(parents=True, exist_ok=True)
    weights = {name: one.detach().contiguous() for name, one in own_parameters(model).items()}
    save_file(weights, Path(folder) / DELTA_WEIGHTS, metadata={"format": "pt"})
    own = {name: getattr(model.config, name) for name in ("meta_token_id", "unpadded_vocab_size", "meta_attention")}
    write_whole(Path(folder) / DELTA, json.dumps(own, indent=1).encode())


def load_meta(base: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Put into a base, in place, what `save_meta` wrote; its own weights are frozen.

    Args:
        base: a model without meta-attention, whose configuration is that of the one it was trained with.
        folder: that `save_meta` wrote to.

    Returns:
        The base.

    Raises:
        UserError: if the base is another, or the folder has no such files, or damaged ones.
    """
    settings, meta_token_id, used = _read(Path(folder))
    if isinstance(base, MetaModel):
        raise UserError(f"this {type(base).__name__} has meta-tokens already.")
    if (given := config_sha256(base.config)) != settings.base_sha256:
        raise UserError(
            f"{folder} was trained with another base, {settings.base or 'of no name'}: its configuration has the "
            f"checksum {settings.base_sha256[:12]}, and that of the {type(base).__name__} given has {given[:12]}."
        )
    try:
        weights = load_file(Path(folder) / DELTA_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{Path(folder) / DELTA_WEIGHTS} cannot be read: {error}.") from error
    put_in(base, settings, meta_token_id, used)
    own = own_parameters(base)
    if {name: one.shape for name, one in own.items()} != {name: one.shape for name, one in weights.items()}:
        raise UserError(f"the weights in {folder} do not fit its {DELTA}.")
    with torch.no_grad():
        for name, one in own.items():
            one.copy_(weights[name])
    return base


def base_of(folder: Path) -> str:
    """What the base was called of what `save_meta` wrote into a folder: a folder, or its name on the Hub.

    Raises:
        UserError: if its file is damaged, or the base had no name.
    """
    if not (base := _read(folder)[0].base):
        raise UserError(f"the base of {folder} was never saved; load_meta takes one that has its configuration.")
    return base


def _read(folder: Path) -> tuple[MetaSettings, int, int]:
    path = folder / DELTA
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        given = json.loads(path.read_bytes())
        settings = MetaSettings(**given["meta_attention"])
        return settings, int(given["meta_token_id"]), int(given["unpadded_vocab_size"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is missing or damaged: {' '.join(str(error).split())[:200]}.") from error
