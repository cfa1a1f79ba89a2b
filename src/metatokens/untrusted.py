"""Reading a `config.json` that may be damaged or hostile: nothing is run, and sizes are bounded before they are used.

transformers takes any field of a configuration: names of code to run or to download, tables of any size. Here only the
fields that the configuration's own class declares are kept, and a few more that are known.
"""

from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from metatokens.errors import UserError, one_line
from metatokens.files import DAMAGED, read_json
from metatokens.machine import physical_memory
from metatokens.retrofit.classes import MODEL_TYPE, MetaTokensConfig

MAX_CONFIG_BYTES = 2**20
MAX_LAYERS = (
    1_000  # a layer takes milliseconds and some 50 kB of Python objects, however narrow it is
)

_FURTHER_FIELDS = {
    "dtype",
    "torch_dtype",
    "meta_token_id",
    "unpadded_vocab_size",
    "attention_layers",
    # Rotary positions as releases of transformers before 5 wrote them.
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_emb_base",
    "rope_local_base_freq",
    "global_rope_theta",
    "local_rope_theta",
    "sliding_window_pattern",
}
_RETROFITTED = {"base_model_type", "architectures", "meta_attention"}


def read_config(folder: Path, kinds: Set[str]) -> tuple[PreTrainedConfig, int]:
    """The configuration of the model in a folder, whose model type must be one of `kinds`, and its parameters' number.

    A model that this machine's memory cannot hold is refused here, before anything is allocated for it.

    Raises:
        UserError: if the file is missing or damaged, has another model type, or describes too large a model.
    """
    path = folder / "config.json"
    try:
        settings = read_json(path, MAX_CONFIG_BYTES)
        kind = settings.get("model_type")
        if kind not in kinds:
            if kind == MODEL_TYPE:
                raise ValueError(f"the model in {folder} has meta-tokens already")
            raise ValueError(
                f"{folder} holds a {kind} model, which is no decoder that metatokens supports"
            )
        base = settings.get("base_model_type") if kind == MODEL_TYPE else kind
        declared = CONFIG_MAPPING[base]
        config = _of_known_fields(settings, declared, is_retrofitted=kind == MODEL_TYPE)
        # Its parts are configurations, whose fields nothing here bounds.
        if config.get_text_config() is not config:
            raise ValueError(
                f"{folder} holds a {base} model, which takes more than text: load it by transformers"
            )
        parameters = check_memory(config)
    except (StrictDataclassError, *DAMAGED) as error:
        raise UserError(f"{path} cannot be used: {one_line(error)}.") from error
    return config, parameters


def _of_known_fields(
    settings: dict[str, Any], declared: type[PreTrainedConfig], *, is_retrofitted: bool
) -> PreTrainedConfig:
    """A configuration of the class `declared`, or a retrofitted model's with such a base."""
    # A GPT-Neo's configuration writes its layers out, item by item.
    layers = sum(len(kinds) * abs(count) for kinds, count in settings.get("attention_types") or ())
    if layers > MAX_LAYERS:
        raise ValueError(f"attention_types has more than {MAX_LAYERS:,} layers")
    known = {field.name for field in fields(declared)} - {
        field.name for field in fields(PreTrainedConfig)
    }
    known |= _FURTHER_FIELDS
    if is_retrofitted:
        known |= _RETROFITTED
    named = {declared.attribute_map.get(key, key): value for key, value in settings.items()}
    maker = MetaTokensConfig if is_retrofitted else declared
    return maker.from_dict({key: named[key] for key in named.keys() & known})


def check_memory(config: PreTrainedConfig) -> int:
    """Refuse a model that this machine cannot hold in two-byte parameters, before anything is allocated for it.

    Returns:
        The number of its parameters, counted in a model without storage.
    """
    layers = config.num_hidden_layers
    if min(layers, config.num_attention_heads) < 1:
        raise UserError("sizes in a model configuration must be positive.")
    if layers > MAX_LAYERS:
        raise UserError(f"the model has {layers:,} layers; allowed are {MAX_LAYERS:,}.")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except RuntimeError as error:  # a tensor of impossible size
        raise UserError(f"there is no such model: {one_line(error)}.") from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    needed = 2 * parameters + sum(buffer.nbytes for buffer in model.buffers())
    memory = physical_memory()
    if needed > memory:
        raise UserError(
            f"the model takes {needed:,} bytes at least, and this machine's memory has {memory:,}."
        )
    return parameters
