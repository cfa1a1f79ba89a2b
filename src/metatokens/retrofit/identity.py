"""The identity of a base: the settings of its configuration, and a checksum of some of its weights."""

import json
import re
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from metatokens.files import sha256_of
from metatokens.retrofit.layers import added_parameters

# Settings that change neither what a model computes at inference nor the shapes of its weights.
_PASSING = re.compile(r"use_cache|.*_token_id|.*dropout.*|.*pdrop|pretraining_tp|initializer_range")


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a configuration that differ from its class's defaults, as JSON values.

    Only fields that the class declares count: other entries of a `config.json` depend on how it was loaded. A setting
    that a later release of transformers adds counts only if its value is not the default.
    """
    declared = {field.name for field in fields(type(config))} - {
        field.name for field in fields(PreTrainedConfig)
    }
    # `vars`, since getattr raises for some settings that vary by layer.
    values, defaults = vars(config), vars(type(config)())
    settings: dict[str, Any] = {}
    for name in sorted(declared):
        value, default = values.get(name), defaults.get(name)
        if isinstance(value, PreTrainedConfig):
            settings[name] = settings_of(value)
        elif not _PASSING.fullmatch(name) and _as_json(value) != _as_json(default):
            settings[name] = _as_json(value)
    return settings


def _as_json(value: Any) -> Any:
    """A value as a JSON file gives it back."""
    return json.loads(json.dumps(value, default=str))


def tables_of(model: PreTrainedModel) -> list[Any]:
    """The modules with a row for each entry of the vocabulary: embeddings (Gemma 4 has several) and the head."""
    table: Any = model.get_input_embeddings()
    rows = len(table.weight)
    others = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and len(module.weight) == rows and module is not table
    ]
    return [table, *others, *filter(None, [model.get_output_embeddings()])]


@torch.no_grad()
def weights_checksum(model: PreTrainedModel, rows: int | None = None) -> str | None:
    """A checksum of a sample of a base's weights; None if a weight is quantised or not in memory.

    The sample has one value of each row of each weight, since training may change few rows of a table. It is rounded to
    bfloat16, so that it is the same for a base in float32 and in bfloat16.

    Args:
        model: the base, or a retrofitted model; what was added to it does not count.
        rows: how many rows of the embeddings and the head count, since these may have grown; None: all.
    """
    added = {id(parameter) for parameter in added_parameters(model).values()}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in added]
    if any(weight.is_meta or not weight.is_floating_point() for weight in weights):
        return None
    table_ids = {id(weight) for table in tables_of(model) for weight in table.parameters()}
    sample = []
    for weight in weights:
        counted = weight[:rows] if id(weight) in table_ids else weight
        first_column = counted.reshape(*counted.shape[:1], -1)[..., 0]
        sample.append(first_column.flatten().to(torch.bfloat16).cpu())
    return sha256_of(torch.cat(sample).view(torch.uint8).numpy().tobytes())
