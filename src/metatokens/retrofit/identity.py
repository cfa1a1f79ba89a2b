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
from metatokens.retrofit.classes import own_parameters

# Settings that change neither the function of a model nor the shapes of its weights.
_PASSING = re.compile(r"use_cache|.*_token_id|.*dropout.*|.*pdrop|pretraining_tp|initializer_range")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROWS, _VALUES = 64, 64  # at most, of each weight


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a configuration that differ from its class's defaults, in the form that JSON gives them.

    Only fields that the class declares count. Everything else in a `config.json` depends on how the configuration was
    loaded. A setting that a later release of transformers adds counts only where it was changed.
    """
    declared = {field.name for field in fields(type(config))} - {field.name for field in fields(PreTrainedConfig)}
    given, usual = vars(config), vars(type(config)())  # asked by name, some refuse what may differ from layer to layer
    own: dict[str, Any] = {}
    for name in sorted(declared):
        value, by_itself = given.get(name), usual.get(name)
        if isinstance(value, PreTrainedConfig):
            own[name] = settings_of(value)
        elif not _PASSING.fullmatch(name) and _as_json(value) != _as_json(by_itself):
            own[name] = _as_json(value)
    return own


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def difference(trained_with: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> str:
    """The settings in which two bases differ, for a sentence; empty if there are none."""
    found = []
    for name in sorted(trained_with.keys() | given.keys()):
        before, now = trained_with.get(name), given.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            found += [difference(before, now, f"{prefix}{name}.")]
        elif before != now:
            found += [f"{prefix}{name} was {before if name in trained_with else 'the default'!r}"[:120]]
            found[-1] += f" and is {now if name in given else 'the default'!r}"[:120]
    return ", ".join(filter(None, found))


@torch.no_grad()
def weight_checksums(model: PreTrainedModel) -> dict[str, str]:
    """Checksums of a few values of each of a base's matrices and vectors, among their first rows.

    So they stay what they are where a table of embeddings grows.

    Returns:
        The checksum of the values in each of three precisions, since a base may be loaded in another one; as `dtype`
        the precision that they have; as `size` the mean of their magnitudes. Empty where a weight is quantised or not
        in memory.
    """
    added = {id(one) for one in own_parameters(model).values()}
    weights = [one for one in model.parameters() if id(one) not in added]
    if any(one.is_meta or not one.is_floating_point() for one in weights):
        return {}
    rows = [one[:_ROWS].flatten() for one in weights if one.ndim in (1, 2)]
    values = torch.cat([one[:: max(1, len(one) // _VALUES)].float().cpu() for one in rows])
    sums = {name: sha256_of(values.to(dtype).view(torch.uint8).numpy().tobytes()) for name, dtype in PRECISIONS.items()}
    kept = {str(one.dtype).removeprefix("torch.") for one in weights}
    half = sorted(kept & {"bfloat16", "float16"})
    return sums | {"dtype": half[0] if half else "float32", "size": f"{float(values.abs().mean()):.6g}"}


def have_same_weights(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether two results of `weight_checksums` may be of the same weights.

    They are compared in the coarser precision. Two half precisions are only compared in size, since neither tells the
    other's values.
    """
    if not before or not now:
        return True
    half = sorted({before["dtype"], now["dtype"]} - {"float32"})
    if len(half) == 2:
        return math.isclose(float(before["size"]), float(now["size"]), rel_tol=0.01)
    coarsest = half[0] if half else "float32"
    return before[coarsest] == now[coarsest]
