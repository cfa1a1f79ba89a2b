"""Causal attention and meta-attention (paper, section 3 and Appendix A).

    CausalAttention(Q, K, V) = softmax(Q K^T / sqrt(d) + M) V
    MetaAttention(Q, K, V) = softmax(Q K^T / sqrt(d) + M + P) V

M is the causal mask; P is 0 where query and key are both meta-tokens, and minus infinity elsewhere. Meta-attention has
two forms of the same function:

- **Gathered**, where the model has the meta-tokens' rows. The block (`modeling.py`) gathers them, `MetaAttention`
  attends causally among them, and the block adds the result back at their places. T/8 meta-tokens make T^2/64 pairs.
- **Dense**, where an engine owns the cache, the cache has a fixed size, or a graph has no room for rows whose number
  depends on the data. P becomes one more feature of each head, and ordinary causal attention over all positions
  computes the rest. Any kernel can do that: paged, packed, compiled.

Both leave the rows of text unchanged.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from metatokens.model.cache import Entries, SecondStore
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.linear import linear, residual_linear
from metatokens.model.paged_cache import TEXT_KEY, put_into_pages
from metatokens.model.positions import Rotary
from metatokens.model.rows import TEXT_FEATURE, DenseRows, GatheredRows

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]  # as transformers defines them


class AttentionKwargs(TypedDict):
    """The arguments of an attention module that are the same in every block.

    Attributes:
        attend: the attention function, of transformers.
        mask: M, as transformers' `create_causal_mask` makes it for the attention function.
        rotary: rotary tables for the positions of x, or None.
        log_keys: (batch or 1, length, 1), the logarithm of the number of keys that each query sees; scalable softmax
            alone reads it.
        engine: an engine's own arguments of the attention function, such as its paged cache; empty without one.
    """

    attend: AttentionFunction
    mask: Tensor | None
    rotary: Rotary | None
    log_keys: Tensor | None
    engine: Mapping[str, Any]


class MetaAttentionKwargs(AttentionKwargs):
    """The same for meta-attention, and the rows that it sees."""

    rows: GatheredRows | DenseRows


class Attention(nn.Module):
    """The projections of causal attention and meta-attention."""

    # With this number of keys, scalable softmax leaves logits unchanged before training.
    usual_keys = 64
    is_rotated = True  # whether rotary positions apply in this layer
    is_causal = True  # read by the attention functions of transformers, as is the next one
    num_key_value_groups = 1
    is_second = False
    # As a second attention: whether it needs the rows of text too, for keys and values.
    needs_all_rows = False

    def __init__(self, config: MetaGPT2Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx  # the layer of a cache that holds its keys and values; the name is transformers'
        self.scaling = config.head_size**-0.5
        inner = config.num_attention_heads * config.head_size
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * inner, bias=config.bias)
        # Scalable softmax (Nakanishi, 2025): logits grow with the logarithm of the number of keys.
        self.length_scale: nn.Parameter | None = None
        if config.attention_scale == "log_length":
            self.length_scale = nn.Parameter(torch.empty(config.num_attention_heads))
        self.out_proj = residual_linear(inner, config.hidden_size, bias=config.bias)

    def project(
        self, x: Tensor, rotary: Rotary | None, log_keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (batch, length, width), each (batch, heads, length, head size)."""
        batch, length, _ = x.shape
        qkv = linear(self.qkv_proj, x).view(
            batch, length, 3, self.config.num_attention_heads, self.config.head_size
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.length_scale is not None and log_keys is not None:
            q = q * (self.length_scale[:, None, None] * log_keys[:, None])
        if rotary is None or not self.is_rotated:
            return q, k, v
        return *apply_rotary_pos_emb(q, k, *rotary), v  # Su et al., 2021


class CausalAttention(Attention):
    """softmax(Q K^T / sqrt(d) + M) V: every position attends to itself and the ones before.

    With `second=True` it is the control of meta-attention: the same module over all positions, whose keys and values go
    into further layers of the cache.
    """

    def __init__(self, config: MetaGPT2Config, layer_idx: int, *, second: bool = False):
        super().__init__(config, layer_idx)
        self.is_second = second

    def forward(
        self,
        x: Tensor,
        *,
        cache: Cache | None,
        attend: AttentionFunction,
        mask: Tensor | None,
        rotary: Rotary | None,
        log_keys: Tensor | None,
        engine: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """The output for x, both (batch, length, width), and the weights if the attention function returns them.

        `cache` holds earlier keys and values, and takes the new ones; see `AttentionKwargs` for the other arguments.
        """
        q, k, v = self.project(x, rotary, log_keys)
        engine = dict(engine)  # which an update of the pages changes
        store = engine.pop("cache", cache)
        if store is not None:
            k, v = store.update(k, v, self.layer_idx, kwargs=engine)
        if cache is not None and isinstance(mask, Tensor):  # not the block mask of flex attention
            # The mask fits the first module, where PEFT's prefix may add keys in front. A second one has none of these.
            mask = mask[..., -k.shape[2] :]
        out, weights = attend(self, q, k, v, mask, scaling=self.scaling, dropout=0.0, **engine)
        return linear(self.out_proj, out.flatten(2)), weights


class MetaAttention(Attention):
    """softmax(Q K^T / sqrt(d) + M + P) V, computed on the meta-tokens' rows: causal attention among them alone."""

    usual_keys = 3
    is_second = True

    def __init__(self, config: MetaGPT2Config, block: int, layer_idx: int):
        # A cache of a fixed size, or of pages, has a further layer for this module. In a cache that grows, its entries
        # are a second store of the block's own layer.
        super().__init__(config, layer_idx)
        self.block = block

    def forward(
        self,
        x: Tensor,
        *,
        rows: GatheredRows | DenseRows,
        cache: Cache | None,
        attend: AttentionFunction | None = None,
        mask: Tensor | None = None,
        rotary: Rotary | None,
        log_keys: Tensor | None = None,
        engine: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: the meta-tokens' rows, (batch, most, width); all rows in the dense form.
            rows: where they are in the input. `DenseRows` ask for the dense form, with the mask of causal attention.
            cache: holds earlier meta-tokens' keys and values, and takes the new ones.
            attend: the model's attention function. The gathered form uses it if it is transformers' eager one and there
                is a `mask`, and otherwise sdpa.
            mask: a mask over all positions, (batch, heads or 1, length, total). None: the rows' order decides. The
                gathered form is given one in two cases: the model was given a mask of four dimensions, or the eager
                function has to return weights.
            rotary: rotary tables for the positions of these rows, or None.
            log_keys: (batch, most, 1), the logarithm of the number of meta-tokens that each row sees; for scalable
                softmax.
            engine: as in `AttentionKwargs`, for the dense form.

        Returns:
            The output, (batch, most, width), arbitrary in padded rows and in rows of text; and the weights, (batch,
            heads, length, total), or None if the attention function returns none.
        """
        q, k, v = self.project(x, rotary, log_keys)
        if isinstance(rows, DenseRows):
            return self._dense(
                q, k, v, rows.valid, cache, attend or sdpa_attention_forward, mask, dict(engine)
            )
        return self._gathered(q, k, v, rows, cache, attend, mask)

    def _gathered(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: GatheredRows,
        cache: Cache | None,
        attend: AttentionFunction | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend among the meta-tokens' rows, which are few."""
        key_slots = rows.slots
        if cache is not None:
            layer: SecondStore = cache.layers[self.block]
            k, v, key_slots = layer.update_second(Entries(k, v, rows.slots))
        seen = rows.seen_entries(key_slots, mask)
        if mask is None or attend is not eager_attention_forward:
            attend = sdpa_attention_forward
        out, weights = attend(self, q, k, v, seen, scaling=self.scaling)
        if mask is not None and weights is not None:
            weights = rows.spread(weights, key_slots, mask.shape)
        return linear(self.out_proj, out.flatten(2)), weights

    def _dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_meta: Tensor,
        cache: Cache | None,
        attend: AttentionFunction,
        mask: Tensor | None,
        engine: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over all positions, where one more feature of each head hides text from meta-tokens.

        The feature is 1 in each query. In a key it is 0 at a meta-token, and at text a number so far below zero that
        text gets a weight of exactly 0, since a meta-token sees itself at least. An engine's pages have no room for it:
        there, a key whose features are all `TEXT_KEY` is text, and gets the feature when it is read.
        """
        is_meta = is_meta[:, None, :, None]
        is_text = ~is_meta
        pages = engine.pop("cache", None)
        if pages is not None:
            k, v, engine = put_into_pages(
                pages, k.masked_fill(is_text, TEXT_KEY), v, self.layer_idx, engine
            )
            is_text = (k == TEXT_KEY).all(dim=-1, keepdim=True)
            k = k.masked_fill(is_text, 0.0)
        feature = torch.zeros_like(k[..., :1]).masked_fill(is_text, TEXT_FEATURE)
        head_size = q.shape[-1]
        unused = -(head_size + 1) % 8  # kernels take sizes that are multiples of 8
        q = pad(pad(q, (0, 1), value=1.0), (0, unused))
        k = pad(torch.cat([k, feature], dim=-1), (0, unused))
        v = pad(v, (0, 1 + unused))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        out, weights = attend(self, q, k, v, mask, scaling=self.scaling, **engine)
        if weights is not None:
            weights = weights * is_meta
        return linear(self.out_proj, out[..., :head_size].flatten(2)), weights
