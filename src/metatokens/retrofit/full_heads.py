"""Attention in a block in which some key-value heads see all text, and the others forget it.

The heads of a block attend apart: keys that one head sees are no keys of another. So the block gets two masks in place
of one, and an attention function that reads both.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from metatokens.errors import UserError
from metatokens.model.chunked_attention import chunked_attention
from metatokens.model.forgetting_cache import FullHeads

NAME = "sdpa_by_heads"  # of the attention function
# The attention functions that take `MasksOfHeads`, by name. Who registers one adds it.
TAKE_MASKS_OF_HEADS = {NAME}


class MasksOfHeads(NamedTuple):
    """The two masks of a block with full heads, in place of one.

    Attributes:
        forgetting: of the heads that forget text, (batch, 1, length, held) bool.
        full: of the heads that see all text, (batch, 1, length, keys) bool.
        full_heads: which key-value heads see all text.
    """

    forgetting: Tensor
    full: Tensor
    full_heads: FullHeads

    def of_each_head(self, count: int) -> Tensor:
        """One mask for `count` key-value heads, (batch, count, length, keys), of a pass without a cache."""
        _, full = self.full_heads.split(count)
        masks = [self.full if head in full else self.forgetting for head in range(count)]
        return torch.cat(masks, dim=1)


def attention_by_heads(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | MasksOfHeads | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same as transformers' `sdpa`, by two masks if there are two.

    Args:
        module: with the settings of attention.
        query: (batch, heads, length, head size).
        key: (batch, key-value heads, keys, head size), or the parts that a cache gives.
        value: as `key`.
        attention_mask: as `sdpa` takes it, or two masks.
        kwargs: further arguments of `sdpa`.

    Returns:
        The output, (batch, length, heads, head size), and no weights.
    """
    if not isinstance(attention_mask, MasksOfHeads):
        return chunked_attention(module, query, key, value, attention_mask, **kwargs)
    keys, values = (attention_mask.full_heads.parts_of(states) for states in (key, value))
    count = keys.forgetting.shape[1] + keys.full.shape[1]
    forgetting, full = attention_mask.full_heads.split(count)
    queries = query.unflatten(1, (count, -1))

    def attend(heads: list[int], keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The output of these key-value heads, (batch, length, heads, queries of a head, head size)."""
        of_heads = queries[:, heads].flatten(1, 2)
        output, _ = chunked_attention(module, of_heads, keys, values, mask, **kwargs)
        return output.unflatten(2, (len(heads), -1))

    outputs = torch.cat(
        [
            attend(forgetting, keys.forgetting, values.forgetting, attention_mask.forgetting),
            attend(full, keys.full, values.full, attention_mask.full),
        ],
        dim=2,
    )
    heads = [*forgetting, *full]
    in_order = outputs[:, :, [heads.index(head) for head in range(count)]]
    return in_order.flatten(2, 3), None


AttentionInterface.register(NAME, attention_by_heads)
AttentionMaskInterface.register(NAME, sdpa_mask)


def set_attention_by_heads(config: Any, *, has_full_heads: bool) -> None:
    """Have the decoder with this configuration use `attention_by_heads` if it has full heads, and `sdpa` if not.

    Raises:
        UserError: if it has full heads, and uses another function than `sdpa`.
    """
    name = config._attn_implementation
    if has_full_heads and name == "sdpa":
        config._attn_implementation = NAME
    elif has_full_heads and name not in TAKE_MASKS_OF_HEADS:
        raise UserError(f"full heads need attn_implementation 'sdpa', and this model has '{name}'.")
    elif not has_full_heads and name == NAME:
        config._attn_implementation = "sdpa"
