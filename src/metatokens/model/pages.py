"""An engine's paged cache: the keys and values of the second attention module in it.

The pages' further layers hold every token. Meta-attention must not see text, and the pages have no room for one more
feature. So all features of a text's key are `TEXT_KEY`, which marks it as text.
"""

from typing import Any

import torch
from torch import Tensor, nn

from metatokens.errors import UserError
from metatokens.model.releases import pages_among

TEXT_KEY = 2.0**14  # which every precision holds exactly
# The engine gives these to the model, which gives them to the attention functions.
_ENGINE = (
    "cache", "read_index", "write_index", "block_table", "is_causal",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip


def engine_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass that an engine gave for its attention functions; empty without an engine.

    Raises:
        UserError: in vLLM or SGLang, whose caches have no layers for the second attention module.
    """
    if "attention_instances" in inputs:
        raise UserError("this model does not run in vLLM or SGLang; `transformers serve` serves it.")
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
    first = cache.config.first_further_layer
    _, heads, tokens, size = k.shape
    allocator = cache.layer_to_allocator[first]
    features = allocator.num_key_value_heads * allocator.head_dim  # of one layer of pages
    layers = -(-heads * size // features)

    def into_layers(x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).reshape(1, tokens, heads * size).to(cache.dtype)
        padded = nn.functional.pad(flat, (0, layers * features - heads * size))
        by_layer = padded.view(1, tokens, layers, allocator.num_key_value_heads, allocator.head_dim)
        return by_layer.permute(2, 0, 3, 1, 4)

    def from_layers(stored: list[Tensor], like: Tensor) -> Tensor:
        flat = torch.stack(stored).permute(1, 3, 0, 2, 4).flatten(2)[:, :, : heads * size]
        return flat.unflatten(2, (heads, size)).transpose(1, 2).to(like.dtype)

    stored_keys, stored_values = [], []
    first_layer = first + (layer_idx - first) * layers
    for layer, key, value in zip(range(first_layer, first_layer + layers), into_layers(k), into_layers(v), strict=True):
        for_attention = dict(engine)  # which `update` changes
        all_keys, all_values = cache.update(key, value, layer, for_attention)
        stored_keys.append(all_keys)
        stored_values.append(all_values)
    return from_layers(stored_keys, k), from_layers(stored_values, v), for_attention
