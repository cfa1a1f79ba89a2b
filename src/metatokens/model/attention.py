"""Causal attention and meta-attention (paper, section 3 and Appendix A).

Meta-attention is softmax(Q K^T / sqrt(d) + M + P) V, with M the causal mask and P = 0 where query and key are both
meta-tokens, -inf elsewhere. A dense mask would spend T^2 work to compute M^2 numbers and leaves every other row
without a key. Here the meta-tokens' rows are gathered, attend causally among themselves, and are scattered back:
the same function, with exactly nothing added to any other row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.models.llama.modeling_llama import eager_attention_forward

from metatokens.model.cache import MetaTokenCache, SecondStore
from metatokens.model.positions import Rotary, rotate

FEW_ROWS = 128
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]  # of transformers
Index = Tensor | tuple[slice, slice | Tensor]  # of (batch, length)


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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tensors that say where rows of a batch stand."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same on another device, which accelerate asks for where layers are on several."""
        moved = (getattr(self, one.name).to(device, non_blocking=non_blocking) for one in fields(self))
        return type(self)(*moved)


@dataclass(frozen=True, slots=True)
class QueryRows(_Rows):
    """The positions of a batch that queries come from, where few do; sequences with fewer than the most are padded.

    Nothing follows the last block but the head, so it computes only what is asked for, and keys and values.

    Attributes:
        index: (batch, most) int64, each such position, ascending; then padding, which points at some other position.
        place: (batch, length) int64, the column of `index` in which such a position stands.
    """

    index: Tensor
    place: Tensor

    @classmethod
    @torch.compiler.disable  # how many there are only the data tells
    def find(cls, is_asked: Tensor) -> "QueryRows | None":
        """The positions of a (batch, length) mask; None if gathering them would not pay."""
        most = int(is_asked.sum(dim=1).max())
        if not pays(most, is_asked.shape[1]):
            return None
        return cls(_front(is_asked, most), (is_asked.cumsum(dim=1) - 1).clamp(min=0))

    def gather(self, x: Tensor) -> Tensor:
        """The rows of x, (batch or 1, ..., length, features) -> (batch, ..., most, features)."""
        return _gather_rows(x, self.index)

    def mask(self, mask: Tensor | None, keys: int) -> Tensor:
        """Which of `keys` keys each row sees, (batch, 1, most, keys); `mask` says it of all positions, None: causal."""
        if mask is not None:
            return self.gather(mask)
        slots = self.index + (keys - self.place.shape[1])
        return (torch.arange(keys, device=slots.device) <= slots[:, :, None])[:, None]

    def take(self, x: Tensor, keep: Index) -> Tensor:
        """What an index of (batch, length) takes, from the gathered rows x, (batch, most, features)."""
        first = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
        return x.flatten(0, 1)[(first + self.place)[keep]]


def pays(most: int, length: int) -> bool:
    """Whether to gather `most` of each sequence's positions for the last block, rather than compute all of them.

    An explicit mask costs what a causal kernel saves: at 70 % of the positions the two take equally long, at half of
    them gathering takes 0.8 to 0.9 of a block's time, in narrow models and wide ones (benchmarks/LOG.md).
    """
    return 0 < 2 * most < length


def _front(chosen: Tensor, most: int) -> Tensor:
    """(batch, most) positions: the chosen ones of a (batch, length) mask in their order, then others."""
    return chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    batch, most = index.shape
    index = index.view(batch, *[1] * (x.ndim - 3), most, 1).expand(-1, *x.shape[1:-2], -1, x.shape[-1])
    return x.expand(batch, *x.shape[1:]).gather(-2, index)


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
            slots = torch.arange(k.shape[2], device=k.device) + first_slot
            k, v, _ = layer.update_second(k, v, slots.expand(k.shape[0], -1))
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


@dataclass(frozen=True, slots=True)
class MetaRows(_Rows):
    """Where the meta-tokens of a batch stand; rows with fewer than the most are padded.

    Attributes:
        index: (batch, most) int64, position in the input of each meta-token, ascending; then padding, which points
            at some other position of the row.
        valid: (batch, most) bool, False at padding.
        slots: (batch, most) int64, position in the whole sequence, cached tokens counted; -1 at padding.
    """

    index: Tensor
    valid: Tensor
    slots: Tensor

    @classmethod
    @torch.compiler.disable  # how many there are only the data tells
    def find(cls, is_meta: Tensor, cached: int = 0, *, least: int = 0) -> "MetaRows | None":
        """The meta-tokens' rows of a (batch, length) mask that follows `cached` tokens; None if there are none.

        With `least`, so many rows are gathered if there are fewer; they are padding.
        """
        counts = is_meta.sum(dim=1)
        most = max(int(counts.max()), least)
        if most == 0:
            return None
        # The meta-tokens are moved to the front in their order, and padding behind them, so that plain causal
        # attention among the gathered rows never lets a real row see padding.
        index = _front(is_meta, most)
        valid = torch.arange(most, device=is_meta.device) < counts[:, None]
        return cls(index, valid, (index + cached).masked_fill(~valid, -1))

    def gather(self, x: Tensor) -> Tensor:
        """The rows of x, (batch or 1, ..., length, features) -> (batch, ..., most, features)."""
        return _gather_rows(x, self.index)

    def mask(self, mask: Tensor, key_slots: Tensor) -> Tensor:
        """What a mask of all positions says of these rows, (batch, heads or 1, most, entries).

        Args:
            mask: (batch, heads or 1, length, total); True where a key is seen, or what is added to the logits.
            key_slots: (batch, entries), where the keys stand in the whole sequence, -1 at padding, which is unseen.
        """
        is_bool = mask.dtype == torch.bool
        seen, unseen = (True, False) if is_bool else (0.0, torch.finfo(mask.dtype).min)
        columns = _gather_rows(self.gather(mask).transpose(-1, -2), key_slots.clamp(min=0)).transpose(-1, -2)
        columns = columns.masked_fill((key_slots < 0)[:, None, None, :], unseen)
        return columns.masked_fill(~self.valid[:, None, :, None], seen)  # a padded query sees something, to avoid NaN

    def spread(self, weights: Tensor, key_slots: Tensor, shape: torch.Size) -> Tensor:
        """Attention weights of all positions, (batch, heads, length, total), 0 but among the meta-tokens.

        Args:
            weights: (batch, heads, most, entries).
            key_slots: see `mask`.
            shape: (..., length, total).
        """
        length, total = shape[-2:]
        weights = weights * (self.valid[:, None, :, None] & (key_slots >= 0)[:, None, None, :])
        columns = key_slots.clamp(min=0)[:, None, None, :].expand_as(weights)
        wide = weights.new_zeros(*weights.shape[:-1], total).scatter_add(-1, columns, weights)
        rows = self.index[:, None, :, None].expand_as(wide)
        return wide.new_zeros(*wide.shape[:2], length, total).scatter_add(-2, rows, wide)

    def among(self, queries: QueryRows) -> "MetaRows":
        """Where the meta-tokens stand among gathered rows, which all of them belong to."""
        return replace(self, index=queries.place.gather(1, self.index))

    def scatter_add(self, x: Tensor, rows: Tensor) -> Tensor:
        """x (batch, length, features) plus `rows` (batch, most, features) at the meta-tokens' places."""
        # Padding is dropped here, after the output projection, since the projection's bias would leak.
        rows = rows.to(x.dtype).masked_fill(~self.valid[:, :, None], 0.0)  # autocast may have lowered the rows
        return x.scatter_add(1, self.index[:, :, None].expand_as(rows), rows)


def least_rows(module: nn.Module) -> int:
    """How many rows `MetaRows.find` is to gather at least: in training by several processes one, even of padding.

    Each of them has to use every parameter, or they would wait for one another's gradients.
    """
    return int(module.training and torch.distributed.is_available() and torch.distributed.is_initialized())


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
        key_slots, is_first = rows.slots, True
        if cache is not None:
            layer: SecondStore = cache.layers[self.layer_index]
            is_first = layer.second_keys is None
            k, v, key_slots = layer.update_second(k, v, rows.slots)
        seen = None
        if mask is not None:
            seen = rows.mask(mask, key_slots)
        elif not is_first:
            seen = (key_slots[:, None, :] >= 0) & (key_slots[:, None, :] <= rows.slots[:, :, None])
            seen = (seen | ~rows.valid[:, :, None])[:, None]  # a padded query sees something, to avoid NaN
        if mask is not None and attend is eager_attention_forward:
            out, weights = attend(self, q, k, v, seen, scaling=self.scaling)
            assert weights is not None
            return linear(self.out_proj, out.flatten(2)), rows.spread(weights, key_slots, mask.shape)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=self.scaling)
        return linear(self.out_proj, out.transpose(1, 2).flatten(2)), None
