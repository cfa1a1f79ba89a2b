"""Text that is forgotten: a query sees every meta-token, the first text and the last text, and nothing else.

A query sees a key that is not after it if the key is a meta-token, or its position is below `text_sinks`, or it is
fewer than `text_window` positions back. So each key has a last reader, which is the last position that sees it. Last
readers are all that a mask needs, and all that a cache has to remember of what it holds (`ForgettingCache`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

from metatokens.errors import UserError
from metatokens.model.cache import AnyCache, AnyCacheLayer, Entries, SecondStore, give
from metatokens.model.rows import gather_rows, positions_of


def last_readers(position_ids: Tensor, is_meta: Tensor, is_real: Tensor, config: Any) -> Tensor:
    """The last position that sees each token, (batch, length) int64; -1 at padding, which no position sees.

    Args:
        position_ids: (batch or 1, length) int64.
        is_meta: (batch, length) bool.
        is_real: (batch, length) bool, False at padding.
        config: the model's, with `text_window` and `text_sinks`.
    """
    is_kept = is_meta | (position_ids < config.text_sinks)
    readers = torch.where(is_kept, torch.iinfo(torch.int64).max, position_ids + config.text_window - 1)
    return readers.masked_fill(~is_real, -1)


@dataclass(frozen=True, slots=True)
class TextRule:
    """Which keys the queries of one forward pass see.

    Attributes:
        positions: (batch or 1, length) int64, those of the queries.
        readers: (batch, held + length) int64, the last readers of the cached entries and of the new ones.
    """

    positions: Tensor
    readers: Tensor

    def mask_function(self) -> Callable[[Any, Any, Any, Any], Tensor]:
        """The causal rule as a mask function of transformers; its indices count from 0, and broadcast."""
        positions, readers = self.positions.expand(len(self.readers), -1), self.readers
        held = readers.shape[1] - positions.shape[1]

        def is_seen(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
            return (key <= query + held) & (positions[batch, query] <= readers[batch, key])

        return is_seen

    def mask(self, config: Any, dtype: torch.dtype) -> Any:
        """The mask for the configured attention function, a block mask for flex attention.

        `create_causal_mask` would run the rule under `vmap`, which takes longer than a decoding step.
        """
        make = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation, flash_attention_mask)
        if make is flash_attention_mask:
            raise UserError("a text_window needs attention that takes masks: 'sdpa', 'flex_attention' or 'eager'.")
        (batch, keys), length, device = self.readers.shape, self.positions.shape[1], self.readers.device
        rule = {"mask_function": self.mask_function(), "allow_is_causal_skip": False}
        return make(batch_size=batch, q_length=length, kv_length=keys, device=device, dtype=dtype, **rule)

    def key_counts(self) -> Tensor:
        """How many keys each query sees, (batch, length)."""
        sizes = (len(self.readers), self.positions.shape[1], self.readers.shape[1])
        batch, query, key = (torch.arange(size, device=self.readers.device) for size in sizes)
        return self.mask_function()(batch[:, None, None], None, query[:, None], key).sum(dim=-1)


class ForgettingLayer(AnyCacheLayer):
    """Mixin for a layer of a cache that grows: entries can be dropped, and still count as tokens that were read."""

    keys: Tensor
    values: Tensor
    forgotten = 0  # the number of tokens read, less that of entries held

    def get_seq_length(self) -> int:
        """The number of tokens read."""
        return super().get_seq_length() + self.forgotten

    def keep(self, index: Tensor, *, in_second: bool) -> None:
        """Keep the entries at `index`, (batch, kept), any entry where it is -1; `in_second`: in both stores."""
        index = index.to(self.keys.device).clamp(min=0)
        self.forgotten += self.keys.shape[-2] - index.shape[1]
        self.keys, self.values = gather_rows(self.keys, index), gather_rows(self.values, index)
        if in_second and isinstance(self, SecondStore) and self.second is not None:
            vectors = (gather_rows(x, index) for x in self.second[:2])
            self.second = Entries(*vectors, *(x.gather(1, index) for x in self.second[2:]))

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.forgotten = 0


class ForgettingCache(AnyCache):
    """Mixin for a cache whose layers hold what later queries can see, and little else.

    Entries that no later query sees are dropped when some have piled up, so that a step seldom copies the cache. A
    layer holds at most max(16, text_window // 4) such entries, and those that the last forward pass added.

    Attributes:
        readers: (batch, held), the last readers of the entries of each layer.
        kept: how many entries were left when some were dropped the last time.
        has_dropped: whether any were.
    """

    readers: Tensor | None = None
    kept = 0
    has_dropped = False

    def read(self, new: Tensor, position_ids: Tensor, config: Any) -> Tensor:
        """Make room for new tokens, and note them.

        Args:
            new: (batch, length), their last readers.
            position_ids: (batch or 1, length). All later queries have positions from the least of a row on.
            config: the model's; its second store holds all tokens if `second_attention` is `causal`.

        Returns:
            The last readers of the entries that are held and of the new ones, (batch, held + length).
        """
        readers = new[:, :0] if self.readers is None else self.readers
        held = readers.shape[1]
        if held != self.get_seq_length() - self.layers[0].forgotten:
            raise UserError(
                "this cache lost entries, or has some, as of learned prompts, that a text_window cannot place."
            )
        if held >= max(self.kept, config.text_window) + max(16, config.text_window // 4):
            index = positions_of(readers >= position_ids.amin(dim=1, keepdim=True))
            for layer in self.layers:
                layer.keep(index, in_second=config.second_attention == "causal")
            readers = readers.gather(1, index.clamp(min=0)).masked_fill(index < 0, -1)
            self.kept, self.has_dropped = index.shape[1], True
        self.readers = torch.cat([readers, new], dim=1)
        return self.readers

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; at least those of the last forward pass can be removed.

        Raises:
            UserError: if text before them was dropped that their successors would have to see.
        """
        held = 0 if self.readers is None else self.readers.shape[1]
        if self.has_dropped and -tokens_to_remove > held - self.kept:
            raise UserError(
                f"text was dropped from this cache; only its last {held - self.kept} tokens can be removed."
            )
        super().crop(tokens_to_remove)
        self._change(lambda readers: readers[:, : max(held + tokens_to_remove, 0)])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.readers, self.kept, self.has_dropped = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]` (beam search)."""
        super().reorder_cache(beam_idx)
        self._change(lambda readers: readers.index_select(0, beam_idx.to(readers.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the given order."""
        super().batch_select_indices(indices)
        self._change(lambda readers: readers[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._change(lambda readers: readers.repeat_interleave(repeats, dim=0))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.readers = None if self.readers is None else change(self.readers)


def make_forgetting(cache: Any) -> None:
    """Have a cache forget text, in place."""
    if cache.is_compileable:
        raise UserError("a text_window needs a cache that grows, not one of a fixed size (cache_implementation).")
    give(cache, ForgettingCache)
    for layer in cache.layers:
        give(layer, ForgettingLayer)
