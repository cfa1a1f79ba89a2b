"""The key-value cache of a model with a second attention module.

Each layer keeps two stores. Causal attention's grows by one entry a token, as in any decoder. The second module's
store grows by one entry a *meta-token* (`second_attention="meta"`) or a token (`"causal"`). Rows of a batch hold
different numbers of meta-tokens, so an entry carries the slot of its token in the sequence, or -1 where a row had
none to add; slots decide what a query may see and what a crop removes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from metatokens.model.configuration import MetaGPT2Config


class MetaTokenCacheLayer(DynamicLayer):
    """Keys and values of one block: causal attention's (inherited) and the second module's."""

    def __init__(self) -> None:
        super().__init__()
        self.second_keys: Tensor | None = None  # (batch, heads, entries, head size)
        self.second_values: Tensor | None = None
        self.second_slots: Tensor | None = None  # (batch, entries) int64, -1 where a row has no entry

    def update_second(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append the second module's new entries and return all of them.

        Args:
            keys, values: (batch, heads, new, head size).
            slots: (batch, new), the index of each entry's token in the sequence, -1 for padding.
        """
        if self.second_keys is not None and self.second_values is not None and self.second_slots is not None:
            keys = torch.cat([self.second_keys, keys], dim=-2)
            values = torch.cat([self.second_values, values], dim=-2)
            slots = torch.cat([self.second_slots, slots], dim=-1)
        self.second_keys, self.second_values, self.second_slots = keys, values, slots
        return keys, values, slots

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.second_keys = self.second_values = self.second_slots = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (transformers' convention: a negative number)."""
        super().crop(tokens_to_remove)
        if self.second_slots is not None and tokens_to_remove:
            gone = self.second_slots >= self.get_seq_length()
            kept = ~(gone | (self.second_slots < 0)).all(dim=0)
            self.second_slots = self.second_slots.masked_fill(gone, -1)
            self._change_second(lambda entries: entries[..., kept] if entries.ndim == 2 else entries[:, :, kept])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]` (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the given order."""
        super().batch_select_indices(indices)
        self._change_second(lambda entries: entries[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._change_second(lambda entries: entries.repeat_interleave(repeats, dim=0))

    def _change_second(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.second_keys is not None and self.second_values is not None and self.second_slots is not None:
            self.second_keys = change(self.second_keys)
            self.second_values = change(self.second_values)
            self.second_slots = change(self.second_slots)


class MetaTokenCache(Cache):
    """The cache that `MetaGPT2ForCausalLM` fills; `generate()` makes one by itself."""

    def __init__(self, config: MetaGPT2Config):
        super().__init__(layers=[MetaTokenCacheLayer() for _ in range(config.num_hidden_layers)])
        self.inserted = 0  # meta-tokens that `generate()` added and left out of the ids it returned

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.inserted = 0
