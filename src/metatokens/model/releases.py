"""What differs between the supported releases of transformers: the name of a cache, and the reading of later turns.

Models, masks and outputs call it `cache` from release 5.24 on, and `past_key_values` before. This package takes either
name with each release.
"""

from collections.abc import Mapping
from typing import Any

import transformers
from packaging.version import Version
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")
PEFTS_CACHE = "past_key_values"  # PEFT 0.21.2 knows no other name
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"

# Whether `prefill_chunk_size` also splits what follows a filled cache.
SPLITS_LATER_TURNS = Version(transformers.__version__) >= Version("5.21")


def pages_among(inputs: Mapping[str, Any]) -> PagedAttentionCache | None:
    """The paged cache of an engine among the inputs of a model; with each release an engine calls it `cache`."""
    cache = inputs.get("cache")
    return cache if isinstance(cache, PagedAttentionCache) else None


def cache_among(inputs: Mapping[str, Any]) -> Any:
    """The cache among the inputs of a model, by either name; None without one, and where an engine has pages."""
    if pages_among(inputs) is not None:
        return None
    return next((inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None), None)


def with_cache_renamed(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a model, their cache by the name that this release knows; an engine's stay as they are."""
    if pages_among(inputs) is not None:
        return inputs
    cache = cache_among(inputs)
    renamed = {name: value for name, value in inputs.items() if name not in CACHE_NAMES}
    return renamed if cache is None else renamed | {CACHE: cache}
