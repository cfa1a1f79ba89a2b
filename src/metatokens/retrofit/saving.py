"""What was added to a base, on disk by itself."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from metatokens.files import found_from, name_from, write_whole
from metatokens.retrofit.classes import MODEL_TYPE, MetaModel, own_parameters
from metatokens.retrofit.identity import difference, have_same_weights, settings_of, weight_checksums
from metatokens.retrofit.layers import MetaModule
from metatokens.retrofit.settings import MetaSettings
from metatokens.retrofit.surgery import put_in

DELTA = "meta_tokens.json"  # in a folder of what was added to a base
DELTA_WEIGHTS = "meta_tokens.safetensors"
MAX_BYTES = 2**20


def save_meta(model: PreTrainedModel, folder: str | Path) -> None:
    """Write what `add_meta_attention` put into a model, and no weight of its base.

    Whoever loads it needs the same base: one that was trained too is to be saved whole, by `save_pretrained`.

    Args:
        model: a retrofitted model.
        folder: for `meta_tokens.json`, with the base's name, settings and checksums, and `meta_tokens.safetensors`;
            made if it is not there.

    Raises:
        UserError: if the model has no meta-attention, it is quantised, adapters of PEFT are in the model, its base was
            changed since meta-attention was added, or the folder cannot be written to.
    """
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise UserError("adapters are in this model: save what their merge_and_unload() returns, by save_pretrained.")
    if not isinstance(model, MetaModel):
        raise UserError(f"this {type(model).__name__} is no retrofitted model: it has nothing to save by itself.")
    if not have_same_weights(model.config.meta_attention["base_weights"], weight_checksums(model)):
        raise UserError(
            "the base's weights are not those that meta-attention was added to: it was trained too, or adapters were "
            "merged into it. Save the whole model, by save_pretrained."
        )
    weights = {name: one.detach().contiguous() for name, one in own_parameters(model).items()}
    if not all(one.is_floating_point() for one in weights.values()):
        raise UserError("what was added to this model is quantised, which loses what it was: save it before.")
    own = {name: getattr(model.config, name) for name in ("meta_token_id", "unpadded_vocab_size", "meta_attention")}
    own["meta_attention"] = own["meta_attention"] | {"base": name_from(Path(folder), own["meta_attention"]["base"])}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(weights, Path(folder) / DELTA_WEIGHTS, metadata={"format": "pt"})
        write_whole(Path(folder) / DELTA, json.dumps(own, indent=1).encode())
        if not (Path(folder) / "config.json").exists():  # for which the Auto classes look, to say what this folder is
            write_whole(Path(folder) / "config.json", json.dumps({"model_type": MODEL_TYPE}).encode())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written to: {error}.") from error


def load_meta(base: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Put into a base, in place, what `save_meta` wrote; its own weights are frozen.

    Args:
        base: a model without meta-attention, with the configuration and the weights that it was trained with; the
            precision may be another.
        folder: that `save_meta` wrote to.

    Returns:
        The base.

    Raises:
        UserError: if the base is another, or the folder has no such files, or damaged ones. The base is as it was then.
    """
    settings, meta_token_id, used = _read(Path(folder))
    if isinstance(base, MetaModel) or not isinstance(base, PreTrainedModel):
        raise UserError(f"this {type(base).__name__} is no model of transformers without meta-tokens.")
    if differing := difference(settings.base_settings, settings_of(base.config)):
        raise UserError(f"{folder} was trained with another base{_named(settings)}: {differing}.")
    if not have_same_weights(settings.base_weights, weight_checksums(base)):
        raise UserError(
            f"{folder} was trained with another base{_named(settings)}: one of the same configuration, whose weights "
            "have other checksums than those of the base given."
        )
    try:
        weights = load_file(Path(folder) / DELTA_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{Path(folder) / DELTA_WEIGHTS} cannot be read: {error}.") from error
    rows = base.get_input_embeddings().weight.shape[0]
    if not rows <= used <= 2 * rows:  # one more for the meta-token, others for tokens that were added behind it
        raise UserError(f"{folder} has {used} entries in use, which does not fit the {rows} rows of the base.")
    fits = _shapes(base, settings) == {name: one.shape for name, one in weights.items()}
    if not (fits and all(one.is_floating_point() for one in weights.values())):
        raise UserError(f"the weights in {folder} do not fit its {DELTA}, or that does not fit the base.")
    put_in(base, settings, meta_token_id, used)
    with torch.no_grad():
        for name, one in own_parameters(base).items():
            one.copy_(weights[name])
    return base


def _named(settings: MetaSettings) -> str:
    return f", {settings.base}" if settings.base else ""


def _shapes(base: PreTrainedModel, settings: MetaSettings) -> dict[str, torch.Size] | None:
    """Of the weights that settings ask for, by name; None if they ask for what is not in this base."""
    names = {module: name for name, module in base.named_modules()}
    _, blocks = decoder_of(base)
    places, known = zip(settings.layers, settings.sites, strict=True), set(names.values())
    if any(i >= len(blocks) or f"{names[blocks[i]]}.{site}" not in known for i, site in places):
        return None
    table = base.get_input_embeddings()
    shapes = {f"{names[table]}.meta_token.weight": torch.Size([table.weight.shape[1]])}
    with torch.device("meta"):
        for index in settings.layers:
            for name, one in MetaModule(settings, index).named_parameters():
                shapes[f"{names[blocks[index]]}.meta_attention.{name}"] = one.shape
    return shapes


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
        settings.base = found_from(folder, settings.base)
        meta_token_id, used = given["meta_token_id"], given["unpadded_vocab_size"]
        if not (type(meta_token_id) is type(used) is int and 0 <= meta_token_id < used):
            raise ValueError(f"the meta-token is {meta_token_id}, of {used} entries")
        return settings, meta_token_id, used
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is missing or damaged: {' '.join(str(error).split())[:200].rstrip('.')}.") from error
