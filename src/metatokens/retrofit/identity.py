"""The identity of a base: the settings of its configuration, and checksums of some of its weights."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

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
    declared = {field.name for field in fields(type(config))} - {field.name for field in fields(PreTrainedConfig)}
    given, defaults = vars(config), vars(type(config)())  # getattr raises for some settings that vary by layer
    own: dict[str, Any] = {}
    for name in sorted(declared):
        value, default = given.get(name), defaults.get(name)
        if isinstance(value, PreTrainedConfig):
            own[name] = settings_of(value)
        elif not _PASSING.fullmatch(name) and _as_json(value) != _as_json(default):
            own[name] = _as_json(value)
    return own


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def difference(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """The settings in which two bases differ, to be part of a sentence; empty if there are none."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found.append(difference(old, new, f"{prefix}{name}."))
        elif old != new:
            old, new = (given.get(name, "the default") for given in (before, now))
            found.append(f"{prefix}{name} was {old!r}"[:120] + f" and is {new!r}"[:120])
    return ", ".join(filter(None, found))


@torch.no_grad()
def weight_checksums(model: PreTrainedModel, rows: int | None = None) -> Checksums | None:
    """Checksums of a sample of a base's weights; None if a weight is quantised or not in memory.

    The sample is from all over each weight. It has one value of each row of the embeddings and the head, since training
    may change few rows.

    Args:
        model: the base, or a retrofitted model; what was added to it does not count.
        rows: how many rows of the embeddings and the head count, since these may have grown; None: all.
    """
    added = {id(one) for one in added_parameters(model).values()}
    weights = [one for one in model.parameters() if id(one) not in added]
    if any(one.is_meta or not one.is_floating_point() for one in weights):
        return None
    ends = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    tables = {id(one) for end in ends for one in end.parameters()}
    sample = []
    for one in weights:
        if id(one) in tables:
            part = one[:rows].reshape(len(one[:rows]), -1)[:, 0]
        else:
            part = one.reshape(-1)
            part = part[:: max(1, len(part) // _VALUES)]
        sample.append(part.float().cpu())
    values = torch.cat(sample)
    sums = {name: sha256_of(values.to(kind).view(torch.uint8).numpy().tobytes()) for name, kind in _PRECISIONS.items()}
    half = sorted({str(one.dtype).removeprefix("torch.") for one in weights} & {"bfloat16", "float16"})
    return Checksums.model_validate(
        sums | {"dtype": half[0] if half else "float32", "size": f"{float(values.abs().mean()):.6g}"}
    )


def have_same_weights(before: Checksums | None, now: Checksums | None) -> bool:
    """Whether two checksums may be of the same weights.

    They are compared in the coarser precision. bfloat16 and float16 are compared by their sizes alone, since neither
    determines the other.
    """
    if before is None or now is None:
        return True
    half = sorted({before.dtype, now.dtype} - {"float32"})
    if len(half) == 2:
        return math.isclose(before.size, now.size, rel_tol=0.01)
    coarser = half[0] if half else "float32"
    return bool(getattr(before, coarser) == getattr(now, coarser))
