"""Attention by chunks of queries, which reads no key that none of them sees.

`sdpa` computes a whole square of logits where a mask hides most of them, as in a model that forgets text. On a CPU that
is half of a training step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

CHUNK = 256  # queries
_NAME = "sdpa_by_chunks"  # of the attention function


def chunked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same as transformers' `sdpa`; by chunks if the mask is one of bool that has a row for each query.

    Args:
        module: with the settings of attention.
        query: (batch, heads, length, head size).
        key: (batch, key heads, keys, head size).
        value: of the same shape as `key`.
        attention_mask: as `sdpa` takes it.
        kwargs: further arguments of `sdpa`.

    Returns:
        The output, (batch, length, heads, head size), and no weights.
    """
    if (
        attention_mask is None
        or attention_mask.dtype != torch.bool
        or attention_mask.shape[2] != query.shape[2]
        or query.shape[2] <= CHUNK
        or query.device.type != "cpu"
        or torch.compiler.is_compiling()
        or "position_bias" in kwargs
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for start in range(0, query.shape[2], CHUNK):
        queries = query[:, :, start : start + CHUNK]
        mask = attention_mask[:, :, start : start + CHUNK]
        seen = mask.any(dim=(0, 1, 2)).nonzero()[:, 0]
        output, _ = sdpa_attention_forward(
            module, queries, key[:, :, seen], value[:, :, seen], mask[..., seen], **kwargs
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(_NAME, chunked_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@contextmanager
def attention_by_chunks(model: Any) -> Iterator[None]:
    """Have a model whose text is read with `sdpa` use `chunked_attention`; others stay as they are."""
    # Not by `set_attn_implementation`, which changes a model's encoders of images too.
    config = model.config.get_text_config()
    # Falcon's attention takes the masks of `sdpa` under that name alone.
    is_replaced = config._attn_implementation == "sdpa" and model._can_set_attn_implementation()
    if is_replaced:
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        if is_replaced:
            config._attn_implementation = "sdpa"
