"""Text that is forgotten: in most blocks a query sees the meta-tokens, the first tokens, the last ones, and no others.

A query sees itself and earlier keys: a key that is a meta-token, a key whose position is below `text_sinks`, and a key
that is fewer than `text_window` positions back. In the blocks `text_full_layers`, counted from 0, it sees all earlier
keys, and the cache drops nothing. The same holds for the key-value heads `text_full_heads` of other blocks.

So a key is seen from its own position to that of its last reader. These two positions are all that a mask needs, and
all that a cache has to keep about each entry (`KeyNotes`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

from metatokens.errors import UserError
from metatokens.model.forgetting_cache import (
    KeyNotes,
    full_heads_by_block,
    last_position_noted,
    make_forgetting,
)

FOREVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class ForgettingRule:
    """Which keys the queries of one forward pass see.

    Attributes:
        positions: (batch or 1, length) int64, those of the queries.
        keys: the keys, cached ones first: where they are, and until where they are seen.
        full: the rule of the blocks and heads that see all text; None if there are none.
    """

    positions: Tensor
    keys: KeyNotes
    full: "ForgettingRule | None" = None

    @classmethod
    def of(
        cls,
        config: Any,
        positions: Tensor,
        is_meta: Tensor,
        is_real: Tensor,
        cache: Any,
        *,
        are_chosen: bool,
    ) -> "ForgettingRule":
        """The rule for new tokens. A cache, if given, notes them, and forgets text from now on.

        Args:
            config: the model's, with `text_window`, `text_sinks`, `text_full_layers` and `text_full_heads`.
            positions: (batch or 1, length) int64.
            is_meta: (batch, length) bool.
            is_real: (batch, length) bool, False at padding.
            cache: the cache of the tokens before, or None.
            are_chosen: whether the caller chose the positions. Those that count real tokens grow anyway, so a training
                step is spared a device sync.

        Raises:
            UserError: if positions are fractions; if the cache is of another kind, or has entries that are unknown
                here; or if positions do not grow from one real token to the next.
        """
        if positions.is_floating_point():
            raise UserError("with a text_window, positions are whole numbers; these are fractions.")
        stays = is_meta | (positions < config.text_sinks)
        last_readers = [torch.where(stays, FOREVER, positions + config.text_window - 1)]
        if (are_chosen or cache is not None) and not torch.compiler.is_compiling():
            _check_order(positions, is_real, cache)
        if config.text_full_layers or full_heads_by_block(config):
            last_readers.append(torch.full_like(last_readers[0], FOREVER))
        key_positions = positions.expand_as(is_real)
        notes = [KeyNotes(key_positions, last.masked_fill(~is_real, -1)) for last in last_readers]
        if cache is not None:
            make_forgetting(cache, config)
            cache.make_room(notes[0], config.text_window)
            notes = cache.take_note(notes)
        full = cls(positions, notes[1]) if len(notes) == 2 else None
        return cls(positions, notes[0], full)

    def mask_function(self) -> Callable[[Any, Any, Any, Any], Tensor]:
        """The rule as a mask function of transformers, whose indices count from 0, and broadcast."""
        # As flex attention needs them.
        key_positions, last_readers = (tensor.contiguous() for tensor in self.keys)
        positions = self.positions.expand(len(key_positions), -1)

        def is_seen(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
            position = positions[batch, query]
            return (key_positions[batch, key] <= position) & (position <= last_readers[batch, key])

        return is_seen

    def mask(self, config: Any, dtype: torch.dtype) -> Any:
        """The mask for the configured attention function, a block mask for flex attention.

        `create_causal_mask` would run the rule under `vmap`, which takes longer than a decoding step.
        """
        make = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation, flash_attention_mask)
        if make is flash_attention_mask:
            raise UserError(
                "a text_window needs attention that takes masks: 'sdpa', 'flex_attention' or 'eager'."
            )
        batch, keys = self.keys.positions.shape
        return make(
            batch_size=batch,
            q_length=self.positions.shape[1],
            kv_length=keys,
            device=self.positions.device,
            dtype=dtype,
            mask_function=self.mask_function(),
            allow_is_causal_skip=False,
        )

    def seen(self) -> Tensor:
        """Which keys each query sees, (batch, length, keys) bool."""
        positions = self.positions[:, :, None]
        is_earlier = self.keys.positions[:, None, :] <= positions
        is_kept = positions <= self.keys.last_readers[:, None, :]
        return is_earlier & is_kept


def _check_order(positions: Tensor, is_real: Tensor, cache: Any) -> None:
    """Refuse positions, (batch or 1, length), that are not above those of all real tokens before them.

    The rule takes a key with a lower position for an earlier key. Positions that count the real tokens of a mask do not
    grow if the mask hides a token that the cache noted as real.
    """
    before = last_position_noted(cache, len(is_real)).to(positions)
    real_positions = positions.expand_as(is_real).masked_fill(~is_real, -1)
    reached = torch.cat([before, real_positions], dim=1).cummax(dim=1).values
    if (is_real & (positions <= reached[:, :-1])).any():
        raise UserError(
            "with a text_window, positions have to grow from each real token to the next. Give position_ids that do, "
            "and a cache the mask that it was filled with."
        )
