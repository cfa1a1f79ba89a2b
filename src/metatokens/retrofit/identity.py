"""The identity of a base: the settings of its configuration, and checksums of some of its weights."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from metatokens.differences import differences
from metatokens.files import sha256_of
from metatokens.retrofit.layers import added_parameters
from metatokens.retrofit.settings import Checksums

# Settings that change neither what a model computes at inference nor the shapes of its weights.
_PASSING = re.compile(r"use_cache|.*_token_id|.*dropout.*|.*pdrop|pretraining_tp|initializer_range")
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_VALUES = 1024  # sampled from each weight, at least, if it has as many


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a configuration that differ from its class's defaults, as JSON values.

    Only fields that the class declares count: other entries of a `config.json` depend on how it was loaded. A setting
    that a later release of transformers adds counts only if its value is not the default.
    """
    declared = {field.name for field in fields(type(config))} - {
        field.name for field in fields(PreTrainedConfig)
    }
    # Getattr raises for some settings that vary by layer.
    values, defaults = (
        vars(config),
        vars(type(config)()),
    )
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


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings in which two bases differ, to be part of a sentence; empty if there are none."""
    return ", ".join(
        f"{name} was {_shown(old)} and is {_shown(new)}"
        for name, old, new in differences(before, now)
    )


def _shown(value: Any) -> str:
    """A setting in a sentence; None where it is not among the settings that differ from the default."""
    return "the default" if value is None else repr(value)[:100]


@torch.no_grad()
def weight_checksums(model: PreTrainedModel, rows: int | None = None) -> Checksums | None:
    """Checksums of a sample of a base's weights; None if a weight is quantised or not in memory.

    The sample is from all over each weight. It has one value of each row of the embeddings and the head, since training
    may change few rows.

    Args:
        model: the base, or a retrofitted model; what was added to it does not count.
        rows: how many rows of the embeddings and the head count, since these may have grown; None: all.
    """
    added = {id(parameter) for parameter in added_parameters(model).values()}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in added]
    if any(weight.is_meta or not weight.is_floating_point() for weight in weights):
        return None
    tables = [*model.get_input_embeddings().parameters()]
    if model.get_output_embeddings() is not None:
        tables += model.get_output_embeddings().parameters()
    table_ids = {id(table) for table in tables}
    sample = []
    for weight in weights:
        part = _first_column(weight[:rows]) if id(weight) in table_ids else _spread_values(weight)
        sample.append(part.float().cpu())
    values = torch.cat(sample)
    sums = {name: _sha256(values.to(precision)) for name, precision in _PRECISIONS.items()}
    size = f"{float(values.abs().mean()):.6g}"
    return Checksums.model_validate(sums | {"dtype": _coarsest_type(weights), "size": size})


def _first_column(table: Tensor) -> Tensor:
    """One value of each row, (rows,)."""
    return table.reshape(len(table), -1)[:, 0]


def _spread_values(weight: Tensor) -> Tensor:
    """At least `_VALUES` values at equal distances, or all of a smaller weight."""
    values = weight.reshape(-1)
    return values[:: max(1, len(values) // _VALUES)]


def _sha256(values: Tensor) -> str:
    """The checksum of some numbers in their own precision."""
    content = values.view(torch.uint8).numpy().tobytes()
    return sha256_of(content)


def _coarsest_type(weights: Iterable[Tensor]) -> str:
    """The name of the coarsest precision among some weights."""
    types = {weight.dtype for weight in weights}
    for name in ("bfloat16", "float16"):
        if _PRECISIONS[name] in types:
            return name
    return "float32"


def have_same_weights(before: Checksums | None, now: Checksums | None) -> bool:
    """Whether two checksums may be of the same weights.

    They are compared in the coarser precision. bfloat16 and float16 are compared by their sizes alone, since neither
    determines the other.
    """
    if before is None or now is None:
        return True
    types = {before.dtype, now.dtype}
    if types == {"bfloat16", "float16"}:
        return math.isclose(before.size, now.size, rel_tol=0.01)
    if "bfloat16" in types:
        return before.bfloat16 == now.bfloat16
    if "float16" in types:
        return before.float16 == now.float16
    return before.float32 == now.float32
