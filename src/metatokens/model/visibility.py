"""Who sees whom: the one place that decides what a forward pass lets each token see.

A caller gives `Visibility.of` what its model was given. It gets the positions of the tokens, the rows that
meta-attention computes, and a mask for each kind of attention. `MetaGPT2Model` and retrofitted decoders share these
decisions. They differ in who makes the causal mask M: `MetaGPT2Model` asks for it here (`of_blocks`), and a retrofitted
base makes its own, unless it forgets text.

| a pass               | its tokens see                                    | decided by               |
|----------------------|---------------------------------------------------|--------------------------|
| plain                | themselves and all tokens before                  | `_causal_mask`           |
| cached               | the cached tokens too                             | `NewTokens.cached`       |
| padded               | no padding                                        | `NewTokens.padding_mask` |
| packed               | the tokens of their own sequence                  | `packed_sequences`       |
| with a mask of 4-D   | what the mask shows                               | `_causal_mask`           |
| with a `text_window` | meta-tokens, the first tokens, and the last ones; | `ForgettingRule`         |
|                      | in full blocks and heads everything               |                          |
| of an engine         | what the engine's pages hold of their own request | the engine               |

Of these, meta-attention sees the meta-tokens alone: that is the paper's P, which `attention.py` computes. Padding is no
meta-token (`NewTokens.are_real`).
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from metatokens.errors import UserError
from metatokens.model.attention import AttentionKwargs, MetaAttentionKwargs
from metatokens.model.cache import meta_key_counts, size_of
from metatokens.model.forgetting import ForgettingRule
from metatokens.model.forgetting_cache import refuse_forgetting_cache
from metatokens.model.positions import (
    Rotary,
    check_positions,
    counts_within,
    position_ids_from_mask,
)
from metatokens.model.rows import DenseRows, GatheredRows, positions_of, shown

MetaAttentionForm = Literal["gathered", "dense"]


def meta_tokens(
    table: Any,
    meta_token_id: Any,
    input_ids: Tensor | None,
    embeddings: Any,
    meta_token_mask: Tensor | None,
) -> Tensor:
    """Where the meta-tokens are, (batch, length) bool: by the mask, or by ids, or where embeddings equal theirs.

    Raises:
        UserError: if the mask has another shape, or NEFTune changes the embeddings.
    """
    if meta_token_mask is not None:
        inputs = embeddings if input_ids is None else input_ids
        if inputs is not None and meta_token_mask.shape != inputs.shape[:2]:
            raise UserError("meta_token_mask needs the shape of the input, (batch, length).")
        return meta_token_mask.bool()
    if input_ids is not None:
        return input_ids == meta_token_id
    if table.training and getattr(table, "neftune_noise_alpha", None):
        raise UserError(
            "NEFTune changes the embeddings by which meta-tokens are found: give a meta_token_mask too."
        )
    meta_embedding = table(torch.tensor([[meta_token_id]], device=embeddings.device)).to(embeddings)
    return (embeddings == meta_embedding).all(dim=-1)


def meta_attention_form(
    cache: Cache | None, engine: Mapping[str, Any], *, gathers_in_graph: bool
) -> MetaAttentionForm:
    """The form of meta-attention: dense where its rows cannot be gathered.

    Their number depends on values of a tensor. An engine, a cache of a fixed size, and a graph without a cache all need
    shapes that do not.

    Args:
        cache: holds the tokens before, or None.
        engine: as from `engine_of`.
        gathers_in_graph: whether a graph without a cache can gather too: the model makes a cache, or the caller gave
            the places of the meta-tokens.
    """
    has_fixed_size = cache is not None and size_of(cache) is not None
    is_whole_graph = torch.compiler.is_compiling() and cache is None and not gathers_in_graph
    return "dense" if engine or has_fixed_size or is_whole_graph else "gathered"


def _without_sliding_window(attention_mask: Any) -> Any:
    """The mask of layers without a sliding window, if there are masks by kind of layer; any other mask unchanged."""
    is_by_kind = isinstance(attention_mask, dict)
    return attention_mask.get("full_attention") if is_by_kind else attention_mask


def mask_of_two_dimensions(attention_mask: Any) -> Tensor | None:
    """The mask that hides padding; None if there is none, or one of four dimensions."""
    mask = _without_sliding_window(attention_mask)
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens that one forward pass reads: those that follow the cached ones.

    Attributes:
        cached: the number of tokens in the cache; a tensor if the cache is static, since only the device has its value.
        cache_position: (length,) int64, the tokens' places in the cache.
        padding_mask: (batch, cached + length), 1 at real tokens; None if there is no mask, or one of four dimensions.
            For a static cache it may be longer than what has been read.
        columns: which columns of `padding_mask` are those of the tokens.
    """

    cached: int | Tensor
    cache_position: Tensor
    padding_mask: Tensor | None
    columns: slice | Tensor

    @classmethod
    def of(cls, x: Tensor, attention_mask: Any, cache: Cache | None) -> "NewTokens":
        """The tokens of x, (batch, length, ...); columns of the mask for tokens to come are left out.

        Raises:
            UserError: if the mask has fewer columns than there are tokens.
        """
        length = x.shape[1]
        cached = 0 if cache is None else cache.get_seq_length()
        cache_position = torch.arange(length, device=x.device) + cached
        is_static = cache is not None and cache.is_compileable
        columns = cache_position if is_static else slice(-length, None)
        padding_mask = mask_of_two_dimensions(attention_mask)
        if padding_mask is not None:
            if not torch.compiler.is_compiling() and padding_mask.shape[1] < cached + length:
                raise UserError(
                    "the attention_mask needs a column for each cached token too, forgotten or not."
                )
            if not is_static:
                padding_mask = padding_mask[:, : cached + length]
        return cls(cached, cache_position, padding_mask, columns)

    def positions(self, position_ids: Tensor | None) -> Tensor:
        """The positions of the tokens, (batch or 1, length) int64, or fractions if the caller gives them.

        Args:
            position_ids: those that the caller gives, of any type. None: real tokens are counted from 0.
        """
        if position_ids is not None:
            return position_ids if position_ids.is_floating_point() else position_ids.long()
        if self.padding_mask is None:
            return self.cache_position[None]
        return position_ids_from_mask(self.padding_mask)[:, self.columns]

    def are_real(self, is_meta: Tensor) -> Tensor:
        """Which tokens are no padding, of the shape of `is_meta`, (batch, length) bool."""
        if self.padding_mask is None:
            return torch.ones_like(is_meta)
        return self.padding_mask[:, self.columns] != 0


def _refuse_with_window(
    cache: Cache | None, sequences: Tensor | None, has_other_mask: bool, needs_weights: bool
) -> None:
    """Refuse what does not go together with a text_window, before the cache takes note of the tokens."""
    if has_other_mask:
        raise UserError(
            "a mask of four dimensions would replace the text_window; give one of two dimensions."
        )
    if sequences is not None:
        raise UserError(
            "sequences packed into one row do not go together with a text_window; give each its own row."
        )
    if needs_weights and cache is not None:
        raise UserError(
            "with a text_window a cache drops text, and attention weights with it; use no cache."
        )


@dataclass(frozen=True, slots=True)
class Visibility:
    """What the tokens of one forward pass see.

    Attributes:
        tokens: where they are among all tokens.
        positions: (batch or 1, length) int64, or fractions if the caller gave them.
        rotary_positions: the same for the rotary angles of meta-attention, which may count padding.
        sequences: (batch or 1, length) int64, as from `packed_sequences`; None where a row is one sequence.
        attention_mask: as the model was given it, without columns for tokens to come.
        cache: holds the tokens before; None without one.
        engine: as from `engine_of`.
        rows: those of meta-attention; None if the model has none, or there is no meta-token to gather.
        rule: what text is forgotten; None without a `text_window`.
        needs_weights: whether attention weights are to be returned.
    """

    tokens: NewTokens
    positions: Tensor
    rotary_positions: Tensor
    sequences: Tensor | None
    attention_mask: Any
    cache: Any
    engine: Mapping[str, Any]
    rows: GatheredRows | DenseRows | None
    rule: ForgettingRule | None
    needs_weights: bool

    @classmethod
    def of(
        cls,
        config: Any,
        is_meta: Tensor,
        *,
        attention_mask: Any,
        position_ids: Tensor | None,
        cache: Any,
        sequences: Tensor | None,
        engine: Mapping[str, Any],
        form: MetaAttentionForm | None,
        meta_places: Tensor | None = None,
        rotates_by_place: bool = False,
        minimum_rows: int = 0,
        needs_weights: bool = False,
    ) -> "Visibility":
        """What the tokens of this pass see. A cache that forgets text takes note of them.

        Args:
            config: the model's, with `position_embedding`, `text_window` and the fields about it.
            is_meta: (batch, length) bool, which tokens are meta-tokens; padding does not count.
            attention_mask: (batch, cached + length or more), 1 at real tokens; one of four dimensions; a dictionary of
                such masks by kind of layer; or None.
            position_ids: (batch or 1, length), those that the caller gave; None: real tokens are counted from 0.
            cache: holds the tokens before, or None.
            sequences: as from `packed_sequences`; then there is no cache.
            engine: as from `engine_of`.
            form: of meta-attention; None if the model has none.
            meta_places: (batch, most) int64, the places of meta-tokens, as from `positions_of`; they spare a sync.
            rotates_by_place: whether the rotary angles of meta-attention count padding too, unless the caller gave
                positions or text is forgotten.
            minimum_rows: the number of gathered rows is at least this.
            needs_weights: whether attention weights are to be returned.

        Raises:
            UserError: if the mask is too short, positions are beyond a learned table, or something does not go together
                with the `text_window` or the lack of one.
        """
        tokens = NewTokens.of(is_meta, attention_mask, cache)
        positions = tokens.positions(position_ids)
        if config.position_embedding == "learned" and not torch.compiler.is_compiling():
            check_positions(config, int(tokens.cached) + is_meta.shape[1], positions)
        is_real = tokens.are_real(is_meta)
        is_meta = is_meta & is_real
        forgets = config.text_window is not None
        counts_places = rotates_by_place and position_ids is None and not forgets
        rotary_positions = tokens.cache_position[None] if counts_places else positions
        rule = None
        if forgets:
            has_other_mask = attention_mask is not None and tokens.padding_mask is None
            _refuse_with_window(cache, sequences, has_other_mask, needs_weights)
            rule = ForgettingRule.of(
                config, positions, is_meta, is_real, cache, are_chosen=position_ids is not None
            )
        else:
            refuse_forgetting_cache(cache)
        rows: GatheredRows | DenseRows | None = None
        if form == "dense":
            rows = DenseRows(is_meta)
        elif form == "gathered":
            indices = positions_of(is_meta) if meta_places is None else meta_places
            rows = GatheredRows.at(indices, tokens.cached, sequences, minimum=minimum_rows)
        return cls(
            tokens=tokens,
            positions=positions,
            rotary_positions=rotary_positions,
            sequences=sequences,
            attention_mask=attention_mask if tokens.padding_mask is None else tokens.padding_mask,
            cache=cache,
            engine=engine,
            rows=rows,
            rule=rule,
            needs_weights=needs_weights,
        )

    def of_blocks(
        self, config: PreTrainedConfig, x: Tensor, rotary: Rotary | None
    ) -> tuple[list[AttentionKwargs], MetaAttentionKwargs | None]:
        """What causal attention gets in each block, and what meta-attention gets in all.

        Only the eager function returns attention weights, so it replaces any other where they are needed.

        Args:
            config: of a `MetaGPT2Model`.
            x: the residual stream, (batch, length, width).
            rotary: the rotary tables of all tokens, or None.

        Returns:
            A dictionary for each block, and one for meta-attention; None if no token is a meta-token.
        """
        if self.needs_weights and config._attn_implementation != "eager":
            config = copy(config)
            config._attn_implementation = "eager"
        causal = self._causal(config, x, rotary, self.rule)
        full = causal
        if self.rule is not None and self.rule.full is not None:
            full = self._causal(config, x, rotary, self.rule.full)
        full_blocks = config.text_full_layers or ()
        by_block = [
            full if number in full_blocks else causal for number in range(config.num_hidden_layers)
        ]
        return by_block, self._meta(config, causal)

    def _causal(
        self, config: Any, x: Tensor, rotary: Rotary | None, rule: ForgettingRule | None
    ) -> AttentionKwargs:
        """What causal attention gets: its function, its mask M, and what else all blocks share."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            config._attn_implementation, eager_attention_forward
        )
        mask = self._causal_mask(config, x) if rule is None else rule.mask(config, x.dtype)
        if attend is eager_attention_forward and mask is not None and mask.dtype == torch.bool:
            # a given mask of four dimensions; this function adds it to the logits
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(
                ~mask, torch.finfo(x.dtype).min
            )
        # Before transformers 5.24, "paged|eager" fills the pages itself.
        if self.engine and mask is not None:
            attend = sdpa_attention_forward
        log_keys = None
        if config.attention_scale == "log_length":
            counts = self._key_counts() if rule is None else rule.seen().sum(dim=-1)
            log_keys = log_counts(counts, x.dtype)
        return {
            "attend": attend,
            "mask": mask,
            "rotary": rotary,
            "log_keys": log_keys,
            "engine": self.engine,
        }

    def _causal_mask(self, config: PreTrainedConfig, x: Tensor) -> Any:
        """The mask M without a text window, in the form that the configured attention function takes.

        transformers begins a packed sequence wherever positions jump. It therefore gets positions that jump only where
        the numbers in `sequences` change.

        Raises:
            UserError: if sequences are packed, and the attention function takes no mask.
        """
        positions = None
        if self.sequences is not None:
            positions = self.sequences + torch.arange(x.shape[1], device=x.device)
        mask = create_causal_mask(config, x, self.attention_mask, self.cache, positions)
        if positions is not None and mask is None and not torch.compiler.is_compiling():
            raise UserError(
                "packed sequences need attention that takes masks: 'sdpa', 'flex_attention' or 'eager'."
            )
        return mask

    def _key_counts(self) -> Tensor:
        """How many keys each query sees without a text window, (batch or 1, length)."""
        if self.sequences is not None:
            return counts_within(self.sequences)
        if self.attention_mask is None:
            return self.tokens.cache_position[None] + 1
        if self.tokens.padding_mask is not None:
            return self.tokens.padding_mask.long().cumsum(dim=1)[:, self.tokens.columns]
        return shown(self.attention_mask)[:, 0].sum(dim=-1)

    def _meta(self, config: Any, causal: AttentionKwargs) -> MetaAttentionKwargs | None:
        """What meta-attention gets in every block of a `MetaGPT2Model`."""
        if self.rows is None:
            return None
        meta: MetaAttentionKwargs = {**causal, "rows": self.rows}
        if isinstance(self.rows, GatheredRows):
            if not self._reads_mask_in_gathered_form(causal):
                meta["mask"] = None
            if causal["rotary"] is not None:
                cos, sin = causal["rotary"]
                meta["rotary"] = self.rows.gather(cos), self.rows.gather(sin)
        if causal["log_keys"] is not None:
            counts = meta_key_counts(self.rows, self.cache, meta["mask"], config)
            meta["log_keys"] = log_counts(counts, causal["log_keys"].dtype)
        return meta

    def _reads_mask_in_gathered_form(self, causal: AttentionKwargs) -> bool:
        """Whether the gathered form needs the mask; otherwise the order of the meta-tokens says what they see.

        A mask of four dimensions may hide meta-tokens. The eager function returns weights, which are spread over the
        mask's columns. With a text window they are spread only if they are asked for: the window hides no meta-token,
        and the mask's columns are then the entries that the cache holds.
        """
        if self.attention_mask is not None and self.attention_mask.ndim == 4:
            return True
        return causal["attend"] is eager_attention_forward and (
            self.rule is None or self.needs_weights
        )

    def meta_mask_of_retrofit(self, config: PreTrainedConfig) -> Tensor | None:
        """Which keys the rows of a retrofit's meta-attention see, (batch or 1, 1, length, keys) bool.

        None: all that come before. A mask of two dimensions hides padding, which is no meta-token.

        Args:
            config: the base's.

        Raises:
            UserError: as `mask_of_four_dimensions`.
        """
        mask = mask_of_four_dimensions(config, self.attention_mask, self.cache)
        if mask is not None:  # then there is no rule
            return seen_by_a_head(mask)
        if not isinstance(self.rows, DenseRows):
            return None
        if self.rule is not None:
            return self.rule.seen()[:, None]
        if self.cache is not None:
            return self._causal_by_cache(self.cache.layers[-1].max_cache_len)
        if self.sequences is not None:
            is_same = self.sequences[:, None, :, None] == self.sequences[:, None, None, :]
            return self._causal_by_cache(self.rows.valid.shape[1]) & is_same
        return None

    def _causal_by_cache(self, total: int) -> Tensor:
        """Which of `total` keys each token sees, padding included, which is no meta-token: (1, 1, length, total)."""
        keys = torch.arange(total, device=self.tokens.cache_position.device)
        return (keys <= self.tokens.cache_position[:, None])[None, None]


def mask_of_four_dimensions(
    config: PreTrainedConfig, attention_mask: Any, cache: Cache | None
) -> Tensor | None:
    """The mask of four dimensions, without a sliding window, that a base was given; None if there is none.

    In a model with a sliding window, a single mask of four dimensions may contain the window, and is refused. With a
    cache of a fixed size, `generate()` makes such a mask. No sequences are packed then, so it can be ignored.

    Raises:
        UserError: if it cannot tell which meta-tokens see one another.
    """
    mask = _without_sliding_window(attention_mask)
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    has_sliding_window = getattr(config.get_text_config(), "sliding_window", None) is not None
    if isinstance(attention_mask, dict) or not has_sliding_window:
        return mask
    if cache is not None and cache.is_compileable:
        return None
    raise UserError(
        "in a model with a sliding window, a mask of four dimensions does not define which meta-tokens see one "
        'another; give a dictionary with one for "full_attention", or each sequence its own row.'
    )


def seen_by_a_head(mask: Tensor) -> Tensor:
    """Which keys any head sees by a mask of four dimensions, (batch, 1, length, keys) bool."""
    return shown(mask).any(dim=1, keepdim=True)


def log_counts(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of counts (batch, length), at least 1, as (batch, length, 1)."""
    return (
        counts.clamp(min=1).to(torch.promote_types(dtype, torch.float32)).log().to(dtype)[..., None]
    )
