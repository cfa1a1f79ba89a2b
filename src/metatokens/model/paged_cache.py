"""The paged cache of continuous batching, with layers for a second attention module.

An engine puts tokens of many requests into one row, and their keys and values into pages. The second attention module
gets layers of its own in these pages, after those of the model, so that the engine shares prefixes, copies and offloads
its entries like all others. These layers hold every token. Meta-attention must not see text, and the pages have no room
for one more feature. So all features of a text's key are `TEXT_KEY`, which marks it as text.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from metatokens.errors import UserError
from metatokens.model.releases import pages_among

TEXT_KEY = 2.0**14  # which every precision holds exactly
# The engine gives these to the model, which gives them to the attention functions.
_ENGINE = (
    "cache", "read_index", "write_index", "block_table", "is_causal",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip


def engine_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a forward pass that an engine gave for its attention functions; empty without an engine.

    Raises:
        UserError: in vLLM or SGLang, whose caches have no layers for the second attention module.
    """
    if "attention_instances" in inputs:
        raise UserError(
            "this model does not run in vLLM or SGLang; `transformers serve` serves it."
        )
    if pages_among(inputs) is None:
        return {}
    return {name: inputs[name] for name in _ENGINE if name in inputs}


def put_into_pages(
    cache: Any, k: Tensor, v: Tensor, layer_idx: int, engine: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Put keys and values into an engine's pages, and read all those of the requests in this pass.

    Args:
        cache: the engine's.
        k, v: (1, heads, tokens, head size), of any sizes.
        layer_idx: the module's layer in a cache of a fixed size. A layer of pages has room for the features of the
            model's attention. Where the module has more features, it gets several layers.
        engine: what else the engine passes on.

    Returns:
        The keys and values, (1, heads, keys, head size), and `engine` for the attention function.
    """
    first_further = cache.config.first_further_layer
    pages = cache.layer_to_allocator[first_further]
    page_keys = _cut(k.to(cache.dtype), pages.num_key_value_heads, pages.head_dim)
    page_values = _cut(v.to(cache.dtype), pages.num_key_value_heads, pages.head_dim)
    first = first_further + (layer_idx - first_further) * len(page_keys)
    keys, values = [], []
    for layer, (page_key, page_value) in enumerate(
        zip(page_keys, page_values, strict=True), start=first
    ):
        for_attention = dict(engine)  # which `update` changes
        key, value = cache.update(page_key, page_value, layer, for_attention)
        keys.append(key)
        values.append(value)
    return _joined(keys, like=k), _joined(values, like=v), for_attention


def _cut(x: Tensor, page_heads: int, page_head_size: int) -> Tensor:
    """Cut (1, heads, tokens, head size) into layers of pages, (layers, 1, page heads, tokens, page head size)."""
    features = x.transpose(1, 2).flatten(2)
    missing = -features.shape[2] % (page_heads * page_head_size)
    layers = pad(features, (0, missing)).unflatten(2, (-1, page_heads, page_head_size))
    return layers.permute(2, 0, 3, 1, 4)


def _joined(layers: list[Tensor], like: Tensor) -> Tensor:
    """Undo `_cut`: the layers, (1, page heads, keys, page head size) each, in the heads and the type of `like`."""
    _, heads, _, head_size = like.shape
    features = torch.stack(layers).permute(1, 3, 0, 2, 4).flatten(2)
    x = features[:, :, : heads * head_size].unflatten(2, (heads, head_size))
    return x.transpose(1, 2).to(like.dtype)
