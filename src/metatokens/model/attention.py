"""Causal attention and meta-attention (paper, section 3 and Appendix A).

Meta-attention is softmax(Q K^T / sqrt(d) + M + P) V, with M the causal mask and P = 0 where query and key are both
meta-tokens, -inf elsewhere. A dense mask would spend T^2 work to compute M^2 numbers and leaves every other row
without a key. Here the meta-tokens' rows are gathered, attend causally among themselves, and are scattered back:
the same function, with exactly nothing added to any other row.
"""

import math
from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.models.llama.modeling_llama import eager_attention_forward

from metatokens.model.cache import MetaTokenCache, SecondStore
from metatokens.model.positions import Rotary, rotate
from metatokens.model.rows import MetaRows, QueryRows

FEW_ROWS = 128
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]  # of transformers


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """What a linear layer maps x to, (..., in features) -> (..., out features); fast for few rows too, as in decoding.

    For a row x, MKL computes x W^T on one core, and for two rows in twice the time; W X^T with two columns or more
    runs at the speed of memory on all of them (benchmarks/LOG.md). From about 128 rows on the two are alike. A layer
    that was replaced, quantised or given a hook is called as it is.
    """
    if not _computes_itself(layer, x):
        return layer(x)
    rows = x.numel() // layer.in_features
    if not 0 < rows <= FEW_ROWS:
        return layer(x)
    columns = x.reshape(rows, -1)
    if rows == 1:
        columns = torch.cat([columns, columns])
    product = torch.mm(layer.weight, columns.t()).t()[:rows]
    if layer.bias is not None:
        product = product + layer.bias
    return product.contiguous().view(*x.shape[:-1], layer.out_features)


def residual_linear(in_features: int, out_features: int, *, bias: bool) -> nn.Linear:
    """A layer that writes to the residual stream; GPT-2 scales its initial weights down with depth."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    vars(layer)["writes_to_residual"] = True
    return layer


def _computes_itself(layer: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether nothing but MKL stands behind the call of a layer."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    is_plain = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and "forward" not in vars(layer)
    is_watched = layer._forward_hooks or layer._forward_pre_hooks
    return is_plain and not is_watched and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class Sizes(Protocol):
    """What attention asks of a configuration, `MetaGPT2Config` or another model's."""

    hidden_size: int
    num_attention_heads: int
    head_size: int
    bias: bool
    attention_scale: str


class Attention(nn.Module):
    """Projections that causal attention and meta-attention share."""

    usual_keys = 64  # as many as leave logits what they are, before training
    is_causal = True  # read by the attention functions of transformers, like the next two
    num_key_value_groups = 1

    def __init__(self, config: Sizes, layer_index: int):
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        self.scaling = config.head_size**-0.5
        inner = config.num_attention_heads * config.head_size
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * inner, bias=config.bias)
        # Scalable softmax (Nakanishi, 2025): logits grow with the logarithm of how many keys there are.
        self.length_scale: nn.Parameter | None = None
        if config.attention_scale == "log_length":
            self.length_scale = nn.Parameter(torch.full((config.num_attention_heads,), self.first_length_scale))
        self.out_proj = residual_linear(inner, config.hidden_size, bias=config.bias)

    @property
    def first_length_scale(self) -> float:
        """What `length_scale` is before training."""
        return 1 / math.log(self.usual_keys)

    def project(
        self, x: Tensor, rotary: Rotary | None, queries: QueryRows | None = None, log_keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (batch, length, width), each (batch, heads, length, head size).

        With `queries`, the first of them has those rows alone. They are taken behind the projection of all rows: a
        product with a part of its weights would gain 2 % of a small model's step, and pass by what wraps the layer.
        `log_keys` is described in `forward`.
        """
        batch, length, _ = x.shape
        qkv = linear(self.qkv_proj, x).view(batch, length, 3, self.config.num_attention_heads, self.config.head_size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.length_scale is not None and log_keys is not None:
            q = q * (self.length_scale[:, None, None] * log_keys[:, None])
        q = q if queries is None else queries.gather(q)
        if rotary is None:
            return q, k, v
        cos, sin = rotary if queries is None else map(queries.gather, rotary)
        return rotate(q, (cos, sin)), rotate(k, rotary), v


class CausalAttention(Attention):
    """Multi-head attention of every position to itself and the ones before.

    With `second=True` it is the control of meta-attention: the same module over all positions, and its keys and
    values go into the cache's second store.
    """

    def __init__(self, config: Sizes, layer_index: int, *, second: bool = False):
        super().__init__(config, layer_index)
        self.second = second

    def forward(
        self,
        x: Tensor,
        *,
        rotary: Rotary | None,
        mask: Tensor | None,
        attend: AttentionFunction,
        cache: MetaTokenCache | None,
        log_keys: Tensor | None = None,
        queries: QueryRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: (batch, length, width).
            rotary: tables for the positions of x, or None.
            mask: what transformers' `create_causal_mask` gave for the attention function.
            attend: the attention function, of transformers.
            cache: where earlier keys and values are, and where the new ones go.
            log_keys: (batch or 1, length, 1), the logarithm of how many keys each position sees; None: not needed.
            queries: the positions to answer for; keys and values are those of all. Only for "sdpa".

        Returns:
            The output, (batch, length or most, width), and the attention weights where the attention function has them.
        """
        q, k, v = self.project(x, rotary, queries, log_keys)
        if cache is not None and self.second:
            layer = cache.layers[self.layer_index]
            first_slot = layer.get_seq_length() - k.shape[2]  # the first module has stored these tokens already
            slots = (torch.arange(k.shape[2], device=k.device) + first_slot).expand(k.shape[0], -1)
            k, v, *_ = layer.update_second(k, v, slots, slots)
        elif cache is not None:
            k, v = cache.update(k, v, self.layer_index)
        if mask is not None:
            mask = mask[..., -k.shape[2] :]  # of a prefix that it was given, the second module has no keys
        if queries is not None:
            mask = queries.mask(mask, k.shape[2])
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
            return linear(self.out_proj, out.transpose(1, 2).flatten(2)), None
        out, weights = attend(self, q, k, v, mask, scaling=self.scaling, dropout=0.0)
        return linear(self.out_proj, out.flatten(2)), weights


class MetaAttention(Attention):
    """Causal attention among the meta-tokens alone, over rows already gathered."""

    usual_keys = 3

    def forward(
        self,
        x: Tensor,
        *,
        rows: MetaRows,
        rotary: Rotary | None,
        cache: Cache | None,
        mask: Tensor | None = None,
        attend: AttentionFunction | None = None,
        log_keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: the meta-tokens' rows, (batch, most, width).
            rows: where they stand in the input.
            rotary: tables for their positions, or None.
            cache: where earlier meta-tokens' keys and values are, and where the new ones go.
            mask: of all positions, (batch, heads or 1, length, total), where the model was given one of four
                dimensions, or the attention function is transformers' eager one; None: the rows' own order.
            attend: the attention function of the model; of all but the eager one, sdpa stands in.
            log_keys: (batch, most, 1), the logarithm of how many meta-tokens each one sees; None: not needed.

        Returns:
            The output, (batch, most, width); what stands in padded rows means nothing. And of the eager function the
            weights, (batch, heads, length, total).
        """
        q, k, v = self.project(x, rotary, log_keys=log_keys)
        key_slots, places = rows.slots, None
        if cache is not None:
            layer: SecondStore = cache.layers[self.layer_index]
            k, v, key_slots, places = layer.update_second(k, v, rows.slots, rows.positions)
        seen = None
        if mask is not None:
            seen = rows.mask(mask, key_slots)
        elif places is not None and key_slots.shape != rows.slots.shape:  # there are others than these rows' own
            is_before = torch.arange(k.shape[2], device=k.device) <= places[:, None]  # entries are in order
            seen = (key_slots[:, None, :] >= 0) & is_before
            seen = (seen | ~rows.valid[:, :, None])[:, None]  # a padded query sees something, to avoid NaN
        if mask is not None and attend is eager_attention_forward:
            out, weights = attend(self, q, k, v, seen, scaling=self.scaling)
            assert weights is not None
            return linear(self.out_proj, out.flatten(2)), rows.spread(weights, key_slots, mask.shape)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=self.scaling)
        return linear(self.out_proj, out.transpose(1, 2).flatten(2)), None
