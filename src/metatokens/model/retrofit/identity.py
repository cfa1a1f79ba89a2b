"""What tells one base from another: the settings of its configuration, and checksums of some of its weights."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from metatokens.files import sha256_of
from metatokens.model.retrofit.classes import decoder_of

# Settings that change neither the function of a model nor the shapes of its weights.
_PASSING = re.compile(r"use_cache|.*_token_id|.*dropout.*|.*pdrop|pretraining_tp|initializer_range")
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROWS = 4


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What a configuration sets otherwise than its class does by itself, as JSON has it.

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
        elif value != by_itself and not _PASSING.fullmatch(name):
            own[name] = value
    return json.loads(json.dumps(own, default=str))


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
    """Checksums of the first rows of a base's table of embeddings, and of the matrices of its first and last block.

    Returns:
        The checksum of their values in each of three precisions, since a base may be loaded in another one, and as
        `dtype` the precision that they have. Empty where a matrix is quantised or not in memory.
    """
    _, blocks = decoder_of(model)
    named = [*blocks[0].named_parameters(), *blocks[-1].named_parameters()]
    matrices = [model.get_input_embeddings().weight]
    matrices += [one for name, one in named if one.ndim == 2 and not name.startswith("meta_attention.")]
    if any(one.is_meta or not one.is_floating_point() for one in matrices):
        return {}
    rows = torch.cat([one[:_ROWS].flatten().float().cpu() for one in matrices])
    sums = {name: sha256_of(rows.to(dtype).view(torch.uint8).numpy().tobytes()) for name, dtype in _PRECISIONS.items()}
    kept = {str(one.dtype).removeprefix("torch.") for one in matrices}
    return sums | {"dtype": min(kept & {"bfloat16", "float16"}, default="float32")}


def have_same_weights(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether two results of `weight_checksums` may be of the same weights, compared in the coarser precision."""
    if not before or not now:
        return True
    half = {before["dtype"], now["dtype"]} - {"float32"}
    coarsest = half.pop() if half else "float32"
    return bool(half) or before[coarsest] == now[coarsest]  # of two halves neither tells the other's values
