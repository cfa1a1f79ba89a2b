"""Key-value caches with room for a second attention module.

In a cache that grows, meta-attention has a second store in each layer, which grows by one entry per *meta-token*. The
rows of a batch hold different numbers of meta-tokens. So each entry has a slot: its token's place in the first store,
or -1 where a row has nothing to add. Slots decide which entries a mask hides and a crop removes. Methods that compress
a cache drop entries of the first store. Slots then no longer give the order of tokens, but positions do.

In a cache of a fixed size, meta-attention has further layers, which hold every token. One more feature of a key hides
text (`MetaAttention`, the dense form). A second causal attention has further layers in every cache.
"""

from abc import ABC
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.positions import counts_within
from metatokens.model.rows import TEXT_FEATURE, DenseRows, GatheredRows, shown

# The mixins go in front of several kinds of caches, so that none of these can be their base.
if TYPE_CHECKING:
    from transformers import Cache as AnyCache
    from transformers.cache_utils import CacheLayerMixin as AnyCacheLayer
else:
    # The root classes of transformers' caches; Python requires the same here.
    AnyCache, AnyCacheLayer = (
        object,
        ABC,
    )


class Entries(NamedTuple):
    """The entries of a second store.

    Attributes:
        keys, values: (batch, heads, entries, head size).
        slots: (batch, entries) int64, the place of each entry's token in the first store, -1 where a row has no entry.
        positions: (batch, entries) int64, its position in the sequence, -1 where a row has no entry.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    positions: Tensor

    def followed_by(self, new: "Entries") -> "Entries":
        """These entries, then new ones."""
        return Entries(
            *(torch.cat(pair, dim=dim) for *pair, dim in zip(self, new, (2, 2, 1, 1), strict=True))
        )


class SecondStore(AnyCacheLayer):
    """Mixin for a layer of a cache: the keys and values of a second attention module next to the layer's own."""

    second: Entries | None = None
    first_length: int | None = None  # of the first store, when it was last looked at
    has_lost_entries = False  # whether entries of the first store were dropped
    tokens_read = 0  # by a layer with a recurrent state, which does not count its tokens

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Update as transformers does, and notice whether entries were dropped since the last time."""
        self.look_for_losses()
        stored = super().update(*args, **kwargs)
        self.first_length = self._length()
        return stored

    def _length(self) -> int | None:
        """The length of the first store; None in a layer that has a recurrent state instead."""
        return self.get_seq_length() if hasattr(self, "get_seq_length") else None

    def look_for_losses(self) -> None:
        """Notice if other code changed the length of the first store."""
        self.has_lost_entries |= self.first_length not in (None, self._length())

    def update_second(self, new: Entries) -> tuple[Entries, Tensor]:
        """Append the second module's new entries; return all entries, and the indices (new,) of the new ones."""
        earlier = 0 if self.second is None else self.second.keys.shape[2]
        new_index = torch.arange(new.keys.shape[2], device=new.keys.device) + earlier
        self.second = new if self.second is None else self.second.followed_by(new)
        self.first_length = self._length()
        return self.second, new_index

    def check_second(self, rows: GatheredRows, *, is_masked: bool) -> None:
        """Refuse new meta-tokens that do not follow those in the store.

        Args:
            rows: the new ones.
            is_masked: whether a mask over the entries of the first store decides what the new ones see, so that no
                entry may have been dropped.
        """
        if self.second is None or self.second.slots.numel() == 0:
            return
        last = self.second.positions.amax(dim=1, keepdim=True)
        if bool((rows.valid & (rows.positions <= last)).any()):
            raise UserError(
                "a meta-token's position is not after that of the last meta-token in the cache: give position_ids that "
                "continue from there. Once entries were dropped, the length of a cache is not the next position."
            )
        self.look_for_losses()
        if is_masked and self.has_lost_entries:
            raise UserError(
                "entries were dropped from this cache, so a mask of four dimensions, or attention by 'eager', cannot "
                "tell which meta-tokens are seen; use 'sdpa' and no such mask."
            )

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.second, self.first_length, self.has_lost_entries = None, None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (transformers' convention: a negative number)."""
        self.look_for_losses()
        if self.has_lost_entries and self.second is not None:
            raise UserError("entries were dropped from this cache, so that it cannot be cropped.")
        super().crop(tokens_to_remove)
        self.first_length = self._length()
        self.tokens_read += tokens_to_remove
        if self.second is not None and tokens_to_remove:
            gone = self.second.slots >= (
                self.tokens_read if self.first_length is None else self.first_length
            )
            is_left = ~(gone | (self.second.slots < 0)).all(dim=0)
            keys, values, slots, positions = self.second
            self.second = Entries(
                keys[:, :, is_left],
                values[:, :, is_left],
                slots.masked_fill(gone, -1)[:, is_left],
                positions.masked_fill(gone, -1)[:, is_left],
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


class DenseStaticLayer(StaticLayer):
    """A layer of a fixed size for the dense form, in which every free place is text.

    Attributes:
        feature: the index of a key's feature that hides text.
    """

    def __init__(self, max_cache_len: int, feature: int):
        super().__init__(max_cache_len)
        self.feature = feature

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the layer."""
        super().lazy_initialization(*args, **kwargs)
        self.keys[..., self.feature] = TEXT_FEATURE

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        if self.is_initialized:
            self.keys[..., self.feature] = TEXT_FEATURE


class MetaTokenCacheLayer(SecondStore, DynamicLayer):
    """The keys and values of a causal attention, with room to grow, and those of meta-attention in its block."""

    keys: Tensor  # (batch, heads, tokens, head size)
    values: Tensor

    # For keys and for values, longer than what they hold.
    _room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append causal attention's new entries, (batch, heads, new, head size), and return all of them.

        They are written into room that was allocated in advance, so that a step does not copy the cache.
        """
        if not self.is_initialized or key_states.requires_grad:
            return super().update(key_states, value_states, *args, **kwargs)
        self.look_for_losses()
        length = self.keys.shape[-2]
        total = length + key_states.shape[-2]
        grown = []
        for old, new, room in zip(
            (self.keys, self.values), (key_states, value_states), self._room_for(total), strict=True
        ):
            if old.data_ptr() != room.data_ptr():
                room[:, :, :length] = old
            room[:, :, length:total] = new
            grown.append(room[:, :, :total])
        self.keys, self.values = grown
        self.first_length = self._length()
        return self.keys, self.values

    def _room_for(self, length: int) -> tuple[Tensor, Tensor]:
        """The room in use if it holds the current entries and is long enough, otherwise new room."""
        room, (batch, heads, _, size) = self._room, self.keys.shape
        if (
            room is None
            or room[0].data_ptr() != self.keys.data_ptr()
            or room[0].shape[0] != batch
            or room[0].shape[2] < length
            or room[0].is_inference()
            != torch.is_inference_mode_enabled()  # only inference mode writes to its tensors
        ):
            shape = (batch, heads, length + length // 4 + 64, size)
            room = self._room = (self.keys.new_empty(shape), self.values.new_empty(shape))
        return room


class InsertedTokens(AnyCache):
    """Mixin for a cache that `generate()` inserts meta-tokens into.

    Attributes:
        inserted: for each inserted meta-token, the number of ids before it, other inserted ones not counted. The ids
            that `generate()` returns omit inserted meta-tokens; a later call puts them back.
    """

    inserted: Sequence[int] = ()

    def hide(self, mask: Tensor) -> None:
        """Hide, from meta-attention, cached meta-tokens at places where the mask, (batch, places), is 0."""
        for layer in self.layers:
            if getattr(layer, "second", None) is not None and not layer.has_lost_entries:
                keys, values, slots, positions = layer.second
                is_hidden = mask.to(slots.device).gather(1, slots.clamp(min=0)) == 0
                layer.second = Entries(
                    keys,
                    values,
                    slots.masked_fill(is_hidden, -1),
                    positions.masked_fill(is_hidden, -1),
                )

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.inserted = ()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, inserted meta-tokens included."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self.inserted = [ids for number, ids in enumerate(self.inserted) if ids + number < length]


class MetaTokenCache(InsertedTokens, DynamicCache):
    """The cache that `MetaGPT2ForCausalLM` fills; `generate()` makes one if it is given none."""

    def __init__(self, config: MetaGPT2Config):
        super().__init__()
        add_second_stores(self, config)


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
        is_key = rows.valid
        if cache is not None:
            is_key = _with_stored(is_key, cache, cache.layers[config.num_hidden_layers])
        if not isinstance(mask, Tensor):
            return rows.valid.cumsum(dim=1) + (is_key.sum(dim=1) - rows.valid.sum(dim=1))[:, None]
        return (shown(mask)[:, 0] & is_key[:, None, :]).sum(dim=-1)
    if rows.sequences is not None:
        return counts_within(rows.sequences)
    layer = cache.layers[0] if cache is not None and cache.layers else None
    second = getattr(layer, "second", None)
    slots = rows.slots[:, :0] if second is None else second.slots
    if mask is None:
        return rows.valid.cumsum(dim=1) + (slots >= 0).sum(dim=1, keepdim=True)
    return shown(rows.mask(mask, torch.cat([slots, rows.slots], dim=1)))[:, 0].sum(dim=-1)


def _with_stored(valid: Tensor, cache: Cache, layer: Any) -> Tensor:
    """Which entries of a layer for the dense form are meta-tokens, once it holds the new ones: (batch, places)."""
    stored = valid.new_zeros(len(valid), layer.max_cache_len)
    if layer.is_initialized:
        stored = layer.keys[:, 0, :, layer.feature] == 0
    slots = (torch.arange(valid.shape[1], device=valid.device) + cache.get_seq_length()).expand_as(
        valid
    )
    return stored.scatter(1, getattr(layer, "new_index", slots), valid)


def size_of(cache: Cache) -> int | None:
    """How many tokens a cache of a fixed size holds; None if it grows, or all its layers have sliding windows."""
    sizes = [
        layer.max_cache_len
        for layer in cache.layers
        if isinstance(layer, StaticLayer) and not layer.is_sliding
    ]
    return sizes[0] if sizes and cache.is_compileable else None


def add_second_layers(cache: Cache, layers: int, head_size: int | None) -> bool:
    """Make a cache of a fixed size have so many layers, further ones for the second attention, in place.

    Args:
        cache: the cache.
        layers: those of the model, and the further ones.
        head_size: of meta-attention; None for a second causal attention.

    Returns:
        Whether it has them now. A cache whose layers all have sliding windows does not show its number of tokens.
    """
    if (size := size_of(cache)) is None:
        return False
    for _ in range(layers - len(cache.layers)):
        cache.layers.append(
            StaticLayer(size) if head_size is None else DenseStaticLayer(size, head_size)
        )
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
    head_size = config.head_size if second == "meta" else None
    if isinstance(cache, StaticCache) and add_second_layers(
        cache, blocks * (1 + (second != "none")), head_size
    ):
        return
    layers = getattr(cache, "layers", [None])
    if isinstance(cache, DynamicCache) and all(
        type(layer) in (DynamicLayer, MetaTokenCacheLayer) for layer in layers
    ):
        total = 2 * blocks if holds_all_rows or second == "causal" else blocks
        cache.layers = [*layers, *(DynamicLayer() for _ in range(total - len(layers)))]
        cache.layer_class_to_replicate = None
        for layer in cache.layers:
            layer.__class__ = MetaTokenCacheLayer
    elif not all(isinstance(layer, MetaTokenCacheLayer) for layer in layers):
        raise UserError(
            f"past_key_values is a {type(cache).__name__}; give a MetaTokenCache, a DynamicCache or a StaticCache."
        )
