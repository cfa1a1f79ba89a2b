"""Key-value caches with room for a second attention module.

In a cache that grows, meta-attention has a second store in each layer, which grows by one entry per *meta-token*. The
rows of a batch hold different numbers of meta-tokens. So each entry has a slot: its token's place in the first store,
or -1 where a row has nothing to add. Slots decide which entries a mask hides and a crop removes. A method that drops
entries of the first store would leave them wrong, and is refused.

In a cache of a fixed size, meta-attention has further layers, which hold every token. One more feature of a key hides
text (`MetaAttention`, the dense form). A second causal attention has further layers in every cache.
"""

from abc import ABC
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.rows import DenseRows, GatheredRows, shown

_OTHER_KIND = "give a DynamicCache or a StaticCache as past_key_values, not offloaded."

# Mixins go in front of several kinds of caches and layers. Python requires that they have the same root class; mypy is
# told `Any`, which has all methods.
AnyCache: Any = object
AnyCacheLayer: Any = ABC


class Entries(NamedTuple):
    """The entries of a second store.

    Attributes:
        keys, values: (batch, heads, entries, head size).
        slots: (batch, entries) int64, the place of each entry's token in the first store, -1 where a row has no entry.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor


class SecondStore(AnyCacheLayer):
    """Mixin for a layer of a cache: the keys and values of a second attention module next to the layer's own."""

    second: Entries | None = None
    first_length: int | None = None  # of the first store, when it was last changed here

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Update as transformers does.

        Raises:
            UserError: if other code dropped entries.
        """
        self.check_length()
        stored = super().update(*args, **kwargs)
        self.first_length = self._length()
        return stored

    def _length(self) -> int | None:
        """The length of the first store; None in a layer that has a recurrent state instead."""
        return self.get_seq_length() if hasattr(self, "get_seq_length") else None

    def check_length(self) -> None:
        """Refuse entries of meta-tokens next to a first store that other code has changed."""
        if self.second is not None and self.first_length != self._length():
            raise UserError(
                "entries were dropped from this cache, and meta-attention cannot tell which: methods that compress a "
                "cache do not go together with meta-attention."
            )

    def update_second(self, new: Entries) -> Entries:
        """Append the second module's new entries; return all entries."""
        before = self.second
        if before is not None:
            new = Entries(
                torch.cat([before.keys, new.keys], dim=2),
                torch.cat([before.values, new.values], dim=2),
                torch.cat([before.slots, new.slots], dim=1),
            )
        self.second = new
        self.first_length = self._length()
        return new

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.second = self.first_length = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (transformers' convention: a negative number)."""
        self.check_length()
        super().crop(tokens_to_remove)
        self.first_length = self._length()
        if self.second is None:
            return
        if self.first_length is None:
            raise UserError("a block with a state cannot forget meta-tokens that it has read.")
        keys, values, slots = self.second
        is_gone = slots >= self.first_length
        is_left = ~(is_gone | (slots < 0)).all(dim=0)
        self.second = Entries(
            keys[:, :, is_left],
            values[:, :, is_left],
            slots.masked_fill(is_gone, -1)[:, is_left],
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]` (beam search)."""
        super().reorder_cache(beam_idx)
        self._change_second(lambda entries: entries.index_select(0, beam_idx.to(entries.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the given order."""
        super().batch_select_indices(indices)
        self._change_second(lambda entries: entries[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._change_second(lambda entries: entries.repeat_interleave(repeats, dim=0))

    def _change_second(self, change: Callable[[Tensor], Tensor]) -> None:
        self.second = None if self.second is None else Entries(*map(change, self.second))


class LayerWithRoom(DynamicLayer):
    """A layer that grows: entries go into room that was allocated before, so that no step copies all of them."""

    keys: Tensor  # (batch, heads, tokens, head size)
    values: Tensor

    # For keys and for values, longer than what they hold.
    _room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new entries, (batch, heads, new, head size), and return all of them."""
        if not self.is_initialized or key_states.requires_grad or not self._takes(key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        length = self.keys.shape[2]
        total = length + key_states.shape[2]
        if not self._has_room(total):
            batch, heads, _, size = self.keys.shape
            shape = (batch, heads, total + total // 4 + 64, size)
            self._room = (self.keys.new_empty(shape), self.values.new_empty(shape))
            for room, held in zip(self._room, (self.keys, self.values), strict=True):
                room[:, :, :length] = held
        assert self._room is not None
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, length:total] = new
        self.keys, self.values = (room[:, :, :total] for room in self._room)
        return self.keys, self.values

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Crop as transformers does. What was dropped may be in tensors that a caller holds, and stays as it is."""
        super().crop(*args, **kwargs)
        self._room = None

    def _takes(self, key_states: Tensor) -> bool:
        """Whether new keys are of the batch and type of the others; assigning them would broadcast and convert."""
        return len(key_states) == len(self.keys) and key_states.dtype == self.keys.dtype

    def _has_room(self, total: int) -> bool:
        """Whether the room holds the current entries, and so many more that they are this many in total."""
        if self._room is None:
            return False
        keys, _ = self._room
        # A tensor of inference mode can be written to in that mode alone.
        is_writable = keys.is_inference() == torch.is_inference_mode_enabled()
        holds_them = keys.data_ptr() == self.keys.data_ptr() and len(keys) == len(self.keys)
        return is_writable and holds_them and total <= keys.shape[2]


class MetaTokenCacheLayer(SecondStore, LayerWithRoom):
    """The keys and values of a causal attention, with room to grow, and those of meta-attention in its block."""


def meta_key_counts(
    rows: GatheredRows | DenseRows, cache: Cache | None, mask: Tensor | None, config: MetaGPT2Config
) -> Tensor:
    """How many meta-tokens, cached ones included, each of these sees, (batch, most).

    Args:
        rows: those of the pass.
        cache: the cache, before it took them.
        mask: as for `MetaAttention`.
        config: the model's.
    """
    if isinstance(rows, DenseRows):
        return _counts_of_dense_rows(rows, cache, mask, config)
    second = None if cache is None else cache.layers[0].second
    slots = rows.slots if second is None else torch.cat([second.slots, rows.slots], dim=1)
    seen = rows.seen_entries(slots, mask)
    return rows.valid.cumsum(dim=1) if seen is None else shown(seen)[:, 0].sum(dim=-1)


def _counts_of_dense_rows(
    rows: DenseRows, cache: Cache | None, mask: Tensor | None, config: MetaGPT2Config
) -> Tensor:
    is_key = rows.valid
    if cache is not None:
        is_key = _with_stored(is_key, cache, config)
    if isinstance(mask, Tensor):
        return (shown(mask)[:, 0] & is_key[:, None, :]).sum(dim=-1)
    cached = is_key.sum(dim=1, keepdim=True) - rows.valid.sum(dim=1, keepdim=True)
    return cached + rows.valid.cumsum(dim=1)


def _with_stored(valid: Tensor, cache: Cache, config: MetaGPT2Config) -> Tensor:
    """Which entries of a layer for the dense form are meta-tokens, once it holds the new ones: (batch, places)."""
    layer = cache.layers[config.num_hidden_layers]
    slots = torch.arange(layer.max_cache_len, device=valid.device)
    cached = cache.get_seq_length()
    stored = valid.new_zeros(len(valid), len(slots))
    if layer.is_initialized:
        is_no_text = layer.keys[:, 0, :, config.head_size] == 0
        stored = is_no_text & (slots < cached)
    new_slots = slots[: valid.shape[1]] + cached
    return stored.scatter(1, new_slots.expand_as(valid), valid)


def size_of(cache: Cache) -> int | None:
    """How many tokens a cache of a fixed size holds; None if it grows, or all its layers have sliding windows."""
    sizes = [
        layer.max_cache_len
        for layer in cache.layers
        if isinstance(layer, StaticLayer) and not layer.is_sliding
    ]
    return sizes[0] if sizes and cache.is_compileable else None


def add_second_layers(cache: Cache, layers: int) -> bool:
    """Make a cache of a fixed size have so many layers, further ones for the second attention, in place.

    Args:
        cache: the cache.
        layers: those of the model, and the further ones.

    Returns:
        Whether it has them now. A cache whose layers all have sliding windows does not show its number of tokens.
    """
    size = size_of(cache)
    if size is None:
        return False
    cache.layers += [StaticLayer(size) for _ in range(layers - len(cache.layers))]
    return True


def add_second_stores(
    cache: Cache, config: MetaGPT2Config, *, holds_all_rows: bool = False
) -> None:
    """Give a `DynamicCache` or `StaticCache` of transformers room for the second attention, in place.

    Entries that it already holds, as after PEFT's prefix tuning, stay causal attention's alone: the second module has
    no keys for them, and the slots of meta-tokens count them.

    Args:
        cache: the cache.
        config: the model's.
        holds_all_rows: whether the second attention has entries of all tokens in a cache that grows, as a second causal
            attention has. These go into further layers.

    Raises:
        UserError: if the cache is of another kind.
    """
    blocks, second = config.num_hidden_layers, config.second_attention
    layers_needed = blocks if second == "none" else 2 * blocks
    if isinstance(cache, StaticCache) and add_second_layers(cache, layers_needed):
        return
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UserError(_OTHER_KIND)
    kinds = {type(layer) for layer in layers}
    if (
        isinstance(cache, DynamicCache)
        and not cache.offloading
        and kinds <= {DynamicLayer, MetaTokenCacheLayer}
    ):
        total = 2 * blocks if holds_all_rows or second == "causal" else blocks
        cache.layers = [*layers, *(DynamicLayer() for _ in range(total - len(layers)))]
        cache.layer_class_to_replicate = None
        for layer in cache.layers:
            layer.__class__ = MetaTokenCacheLayer
    elif not all(isinstance(layer, MetaTokenCacheLayer) for layer in layers):
        raise UserError(_OTHER_KIND)
