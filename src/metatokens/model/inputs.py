"""The inputs of one forward pass as transformers gives them: caches, padding, masks, attention functions."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from metatokens.errors import UserError
from metatokens.model.attention import AttentionFunction
from metatokens.model.positions import check_positions, counts_within, position_ids_from_mask
from metatokens.model.rows import shown
from metatokens.model.window import TextRule


@dataclass(frozen=True, slots=True)
class InputSpan:
    """The tokens that one forward pass reads: those that follow the cached ones.

    Attributes:
        cached: the number of tokens in the cache; a tensor if the cache is static, since only the device has its value.
        cache_position: (length,) int64, the tokens' places in the cache.
        padding_mask: (batch, cached + length), 1 at real tokens; None if there is no mask, or one of four dimensions.
            For a static cache it may be longer than what has been read.
        columns: which columns of `padding_mask` are those of the tokens.
        is_static: whether the cache is static.
    """

    cached: int | Tensor
    cache_position: Tensor
    padding_mask: Tensor | None
    columns: slice | Tensor
    is_static: bool

    @classmethod
    def of(cls, x: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> "InputSpan":
        """The span of the embeddings x, (batch, length, ...); columns of the mask for tokens to come are left out.

        Raises:
            UserError: if the mask has fewer columns than there are tokens.
        """
        length = x.shape[1]
        cached = 0 if cache is None else cache.get_seq_length()
        cache_position = torch.arange(length, device=x.device) + cached
        is_static = cache is not None and cache.is_compileable
        columns = cache_position if is_static else slice(-length, None)
        if attention_mask is None or attention_mask.ndim == 4:
            return cls(cached, cache_position, None, columns, is_static)
        if not torch.compiler.is_compiling() and attention_mask.shape[1] < cached + length:
            raise UserError("the attention_mask needs a column for each cached token too, forgotten or not.")
        padding_mask = attention_mask if is_static else attention_mask[:, : cached + length]
        return cls(cached, cache_position, padding_mask, columns, is_static)

    def positions(self, chosen: Tensor | None) -> Tensor:
        """The positions of the tokens, (batch or 1, length) int64, or fractions if the caller gives them.

        Args:
            chosen: those that the caller gives, of any type. None: real tokens are counted from 0.
        """
        if chosen is not None:
            return chosen if chosen.is_floating_point() else chosen.long()
        if self.padding_mask is None:
            return self.cache_position[None]
        return position_ids_from_mask(self.padding_mask)[:, self.columns]

    def check_positions(self, config: PreTrainedConfig, position_ids: Tensor) -> None:
        """Refuse positions beyond a learned table; a compiled graph, which cannot look at them, takes them all."""
        if not torch.compiler.is_compiling():
            check_positions(config, int(self.cached) + len(self.cache_position), position_ids)

    def real(self, chosen: Tensor) -> Tensor:
        """`chosen`, (batch, length) bool, without padding."""
        return chosen if self.padding_mask is None else chosen & self.padding_mask[:, self.columns].bool()

    def key_counts(self, attention_mask: Tensor | None, sequences: Tensor | None) -> Tensor:
        """How many keys each query sees, (batch or 1, length)."""
        if sequences is not None:
            return counts_within(sequences)
        if attention_mask is None:
            return self.cache_position[None] + 1
        if self.padding_mask is not None:
            return self.padding_mask.long().cumsum(dim=1)[:, self.columns]
        return shown(attention_mask)[:, 0].sum(dim=-1)


def meta_tokens(
    table: Any, meta_token_id: Any, input_ids: Tensor | None, embeddings: Any, given: Tensor | None
) -> Tensor:
    """Where the meta-tokens are, (batch, length) bool: as `given`, or by ids, or where embeddings equal theirs.

    Raises:
        UserError: if `given` has another shape, or NEFTune changes the embeddings.
    """
    if given is not None:
        inputs = embeddings if input_ids is None else input_ids
        if inputs is not None and given.shape != inputs.shape[:2]:
            raise UserError(f"meta_token_mask has the shape {[*given.shape]}, and the input {[*inputs.shape[:2]]}.")
        return given.bool()
    if input_ids is not None:
        return input_ids == meta_token_id
    if table.training and getattr(table, "neftune_noise_alpha", None):
        raise UserError("NEFTune changes the embeddings by which meta-tokens are found: give a meta_token_mask too.")
    row = table(torch.tensor([[meta_token_id]], device=embeddings.device)).to(embeddings)
    return (embeddings == row).all(dim=-1)


def attention_function(
    config: PreTrainedConfig,
    x: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    sequences: Tensor | None,
    rule: TextRule | None,
    *,
    needs_weights: bool,
) -> tuple[AttentionFunction, Any]:
    """The attention function, and the causal mask M in the form that this function takes.

    Only the eager function returns attention weights, so it replaces any other where they are needed. transformers
    begins a packed sequence wherever positions jump. It therefore gets positions that jump only where the numbers in
    `sequences`, as from `packed_sequences`, change. A `rule` alone decides what is seen, padding included.

    Raises:
        UserError: if sequences are packed, and the attention function takes no mask.
    """
    if needs_weights and config._attn_implementation != "eager":
        config = copy(config)
        config._attn_implementation = "eager"
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
    if rule is not None:
        return attend, rule.mask(config, x.dtype)
    packed = None if sequences is None else sequences + torch.arange(x.shape[1], device=x.device)
    mask = create_causal_mask(config, x, attention_mask, cache, packed)
    if packed is not None and mask is None and not torch.compiler.is_compiling():
        raise UserError("packed sequences need attention that takes masks: 'sdpa', 'flex_attention' or 'eager'.")
    if attend is eager_attention_forward and mask.dtype == torch.bool:  # a given mask of four dimensions; to be added
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
    return attend, mask
