"""What differs between the supported releases of transformers: the name of a cache.

Models, masks and outputs call it `cache` from release 5.24 on, and `past_key_values` before. This package takes either
name with each release.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from metatokens.errors import UserError

CACHE_NAMES = ("cache", "past_key_values")
PEFTS_CACHE = "past_key_values"  # PEFT 0.21.2 knows no other name
CACHE = next(
    name
    for name in CACHE_NAMES
    if name in {field.name for field in fields(BaseModelOutputWithPast)}
)


def pages_among(inputs: Mapping[str, Any]) -> PagedAttentionCache | None:
    """The paged cache of an engine among the inputs of a model; with each release an engine calls it `cache`."""
    cache = inputs.get("cache")
    return cache if isinstance(cache, PagedAttentionCache) else None


def cache_among(inputs: Mapping[str, Any]) -> Any:
    """The cache among the inputs of a model, by either name; None without one, and where an engine has pages.

    Raises:
        UserError: if there are two.
    """
    if pages_among(inputs) is not None:
        return None
    caches = [inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None]
    if len(caches) > 1:
        raise UserError("two caches are given, as cache and as past_key_values; give one of them.")
    return caches[0] if caches else None


def with_cache_renamed(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a model, their cache by the name that this release knows; an engine's stay as they are."""
    if pages_among(inputs) is not None:
        return inputs
    cache = cache_among(inputs)
    renamed = {name: value for name, value in inputs.items() if name not in CACHE_NAMES}
    return renamed if cache is None else renamed | {CACHE: cache}


def check_learned_prompts(
    prepare_inputs: Callable[..., dict[str, Any]], device: torch.device, *, uses_cache: bool
) -> None:
    """Refuse learned prompts of PEFT where generated text would be wrong.

    PEFT puts the prompts in front of a step that has no cache. A PEFT that does not find the cache would put them in
    front of every new token, as 0.21.2 does with transformers 5.24 and models of other packages. A learned prefix is
    itself a cache, which without `use_cache` the next step would be given along with all text. Both show in the inputs
    that PEFT prepares for one token.

    Args:
        prepare_inputs: a model's `prepare_inputs_for_generation`. While PEFT generates, it is a method of PEFT's model.
        device: the model's.
        uses_cache: whether steps are given a cache.

    Raises:
        UserError: if PEFT prepares such inputs.
    """
    peft_model = getattr(prepare_inputs, "__self__", None)
    if not getattr(getattr(peft_model, "active_peft_config", None), "is_prompt_learning", False):
        return
    token, filled = torch.zeros(1, 1, dtype=torch.int64, device=device), DynamicCache()
    filled.update(*torch.zeros(2, 1, 1, 1, 1, device=device), 0)
    # Prompts of several tasks need the number of one.
    step = prepare_inputs(token, task_ids=token[0], **{CACHE: filled if uses_cache else None})
    caches = [step[name] for name in CACHE_NAMES if step.get(name) is not None]
    if uses_cache and (step.get("inputs_embeds") is not None or caches != [filled]):
        raise UserError(
            f"PEFT {version('peft')} does not find the model's cache, and would put learned prompts in front of every "
            "new token: install PEFT 0.21.2."
        )
    if caches and not uses_cache:
        raise UserError(
            "a learned prefix is itself a cache: generate() needs use_cache=True for it."
        )
