"""Key-value caches with a second store.

Each layer keeps two stores. Causal attention's grows by one entry a token, as in any decoder. The second module's
store grows by one entry a *meta-token* (`second_attention="meta"`) or a token (`"causal"`). Rows of a batch hold
different numbers of meta-tokens, so an entry carries the slot of its token, its place in the first store, or -1 where
a row had none to add. Slots decide which entries a mask hides and a crop removes. Someone may drop entries of the first
store, as methods that compress a cache do: then slots no longer tell where an entry is, and positions do.
"""

import functools
from abc import ABC
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.rows import MetaRows

if TYPE_CHECKING:  # what the mixins are put ahead of; not their base, since there are several kinds
    from transformers import Cache as AnyCache
    from transformers.cache_utils import CacheLayerMixin as AnyCacheLayer
else:
    AnyCache, AnyCacheLayer = object, ABC  # what theirs begin with, or Python would not put a mixin ahead of them


@functools.cache  # one class for all of them
def derived(mixin: Any, base: Any) -> Any:
    """`base` with a mixin ahead of it, under the base's name, by which transformers looks up much of what it knows."""
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (mixin, base), named)


def give(thing: object, mixin: type) -> None:
    """Put a mixin ahead of the class of one object, in place, unless it is there."""
    if not isinstance(thing, mixin):
        thing.__class__ = derived(mixin, type(thing))  # type: ignore[arg-type]  # a class is hashable


class SecondStore(AnyCacheLayer):
    """Mixin for a cache's layer: keys and values of a second attention module, beside those that the layer is for."""

    second_keys: Tensor | None = None  # (batch, heads, entries, head size)
    second_values: Tensor | None = None
    second_slots: Tensor | None = None  # (batch, entries) int64, -1 where a row has no entry
    second_positions: Tensor | None = None  # the same of each entry's position in the sequence
    first_length: int | None = None  # of the first store, when it was last looked at
    has_lost_entries = False  # whether someone dropped entries of the first store

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers', with a look at whether entries were dropped since."""
        self.look_for_losses()
        stored = super().update(*args, **kwargs)
        self.first_length = self._length()
        return stored

    def _length(self) -> int | None:
        """The length of the first store; None in a layer that has a state in its place."""
        return self.get_seq_length() if hasattr(self, "get_seq_length") else None

    def look_for_losses(self) -> None:
        """Notice that someone else changed the length of the first store."""
        self.has_lost_entries |= self.first_length not in (None, self._length())

    def update_second(
        self, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Append the second module's new entries and return all of them.

        Args:
            keys, values: (batch, heads, new, head size).
            slots: (batch, new), the place of each entry's token in the first store, -1 for padding.
            positions: (batch, new), its position in the sequence, -1 for padding.

        Returns:
            Keys, values and slots of all entries, and (new,) the places of the new ones among them.
        """
        places = torch.arange(keys.shape[-2], device=keys.device)
        if (
            self.second_keys is not None
            and self.second_values is not None
            and self.second_slots is not None
            and self.second_positions is not None
        ):
            places = places + self.second_keys.shape[-2]
            keys = torch.cat([self.second_keys, keys], dim=-2)
            values = torch.cat([self.second_values, values], dim=-2)
            slots = torch.cat([self.second_slots, slots], dim=-1)
            positions = torch.cat([self.second_positions, positions], dim=-1)
        self.first_length = self._length()
        self.second_keys, self.second_values, self.second_slots, self.second_positions = keys, values, slots, positions
        return keys, values, slots, places

    def check_second(self, rows: MetaRows, *, is_masked: bool) -> None:
        """Refuse new meta-tokens that do not follow those in the store.

        Args:
            rows: the new ones.
            is_masked: whether a mask over the first store's entries decides what the new ones see.

        Raises:
            UserError: if the position of one is not behind the last one's; or if there is such a mask, and entries of
                the first store were dropped.
        """
        if self.second_positions is None or self.second_slots is None or self.second_slots.numel() == 0:
            return
        last = self.second_positions.amax(dim=1, keepdim=True)
        if bool((rows.valid & (rows.positions <= last)).any()):
            raise UserError(
                "a meta-token's position is not behind that of the last meta-token in the cache: give position_ids "
                "that go on from there. The length of a cache is not the next position once entries were dropped."
            )
        self.look_for_losses()
        if is_masked and self.has_lost_entries:
            raise UserError(
                "entries were dropped from this cache, so that a mask of four dimensions, or attention by 'eager', "
                "cannot say which meta-tokens are seen; use 'sdpa' and no such mask."
            )

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.second_keys = self.second_values = self.second_slots = self.second_positions = None
        self.first_length, self.has_lost_entries = None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (transformers' convention: a negative number).

        Raises:
            UserError: if entries of the first store were dropped, so that slots do not tell which tokens are the last.
        """
        self.look_for_losses()
        if self.has_lost_entries and self.second_slots is not None:
            raise UserError("entries were dropped from this cache, so that it cannot be cropped.")
        super().crop(tokens_to_remove)
        self.first_length = self._length()
        if self.second_slots is not None and self.second_positions is not None and tokens_to_remove:
            gone = self.second_slots >= self.get_seq_length()
            kept = ~(gone | (self.second_slots < 0)).all(dim=0)
            self.second_slots = self.second_slots.masked_fill(gone, -1)
            self.second_positions = self.second_positions.masked_fill(gone, -1)
            self._change_second(lambda entries: entries[..., kept] if entries.ndim == 2 else entries[:, :, kept])

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
        for name in ("second_keys", "second_values", "second_slots", "second_positions"):
            if (entries := getattr(self, name)) is not None:
                setattr(self, name, change(entries))


class StaticSecondStore(SecondStore):
    """A second store of a fixed size, written in place, as a layer of transformers' `StaticCache` has its first one.

    All of its entries are returned each time; those that are still to come have slot -1.

    Attributes:
        second_room: entries that may follow the first ones; None: as many as the layer has tokens.
    """

    second_room: int | None = None
    second_length: Tensor  # entries in use

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers'."""
        return super(SecondStore, self).update(*args, **kwargs)

    def look_for_losses(self) -> None:
        """Nothing: the first store has a fixed size, and its device alone has the number of its entries."""

    def update_second(
        self, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `SecondStore.update_second`."""
        new = keys.shape[-2]
        if (
            self.second_keys is None
            or self.second_values is None
            or self.second_slots is None
            or self.second_positions is None
        ):
            entries = self.max_cache_len if self.second_room is None else new + self.second_room
            shape = (*keys.shape[:2], entries, keys.shape[-1])
            self.second_keys, self.second_values = keys.new_zeros(shape), values.new_zeros(shape)
            self.second_slots = slots.new_full((len(slots), entries), -1)
            self.second_positions = self.second_slots.clone()
            self.second_length = torch.zeros((), dtype=torch.int64, device=keys.device)
            if not torch.compiler.is_compiling():  # a captured graph writes to these very places
                stores = (self.second_keys, self.second_values, self.second_slots, self.second_positions)
                for store in (*stores, self.second_length):
                    torch._dynamo.mark_static_address(store)
        places = torch.arange(new, device=keys.device) + self.second_length
        self.second_keys.index_copy_(2, places, keys)
        self.second_values.index_copy_(2, places, values)
        self.second_slots.index_copy_(1, places, slots)
        self.second_positions.index_copy_(1, places, positions)
        self.second_length.add_(new)
        return self.second_keys, self.second_values, self.second_slots, places


class MetaTokenCacheLayer(SecondStore, DynamicLayer):
    """Keys and values of one block: causal attention's, with room to grow, and the second module's."""

    keys: Tensor  # (batch, heads, tokens, head size)
    values: Tensor

    _room: tuple[Tensor, Tensor] | None = None  # of keys and values, as long as they may grow

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append causal attention's new entries, (batch, heads, new, head size), and return all of them.

        They are written behind the others into room that was made for more, so that a step copies no cache.
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
        self.first_length = total
        return self.keys, self.values

    def _room_for(self, length: int) -> tuple[Tensor, Tensor]:
        """The room in use, if these are its entries and it is long enough, or new."""
        room, (batch, heads, _, size) = self._room, self.keys.shape
        if (
            room is None
            or room[0].data_ptr() != self.keys.data_ptr()
            or room[0].shape[0] != batch
            or room[0].shape[2] < length
            or room[0].is_inference() != torch.is_inference_mode_enabled()  # or it could not be written to
        ):
            shape = (batch, heads, length + length // 4 + 64, size)
            room = self._room = (self.keys.new_empty(shape), self.values.new_empty(shape))
        return room


class InsertedTokens(AnyCache):
    """Mixin for a cache that `generate()` inserts meta-tokens into.

    Attributes:
        inserted: where it inserted them, which it leaves out of the ids that it returns: before each of them, so many
            ids had been read. A later call puts them back.
    """

    inserted: Sequence[int] = ()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.inserted = ()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, inserted meta-tokens counted."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self.inserted = [ids for number, ids in enumerate(self.inserted) if ids + number < length]


class MetaTokenCache(InsertedTokens, DynamicCache):
    """The cache that `MetaGPT2ForCausalLM` fills; `generate()` makes one by itself."""

    def __init__(self, config: MetaGPT2Config):
        super().__init__()
        give_second_stores(self, config)


def entries_in_second_store(cache: Cache | None) -> Tensor | int:
    """How many tokens of each row the second modules have keys of, (batch, 1); 0 before the first ones."""
    layer = cache.layers[0] if cache is not None and cache.layers else None
    slots = getattr(layer, "second_slots", None)
    return 0 if slots is None else (slots >= 0).sum(dim=1, keepdim=True)


def give_second_store(layer: AnyCacheLayer) -> None:
    """Make a layer of a cache, in place, one with a second store, which grows or does not as the first one.

    Beside a window that slides it grows: the second module sees beyond the window.
    """
    give(layer, StaticSecondStore if isinstance(layer, StaticLayer) and not layer.is_sliding else SecondStore)


def give_second_stores(cache: Cache, config: MetaGPT2Config) -> None:
    """Make a cache of transformers, in place, one that a second attention module can use.

    What it holds already, as after PEFT's prefix tuning, stays causal attention's: the second module has no keys for
    it, and a meta-token's slot counts it.

    Raises:
        UserError: if the cache is of another kind than transformers' `DynamicCache` or `StaticCache`.
    """
    if isinstance(cache, StaticCache) and all(isinstance(layer, StaticLayer) for layer in cache.layers):
        for layer in cache.layers:
            give_second_store(layer)
        return
    if isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers):
        missing = config.num_hidden_layers - len(cache.layers)
        layers = [*cache.layers, *(DynamicLayer() for _ in range(missing))]
        for layer in layers:
            layer.__class__ = MetaTokenCacheLayer
        cache.layers, cache.layer_class_to_replicate = layers, None
    layers = getattr(cache, "layers", [None])
    if not all(isinstance(layer, MetaTokenCacheLayer) for layer in layers):
        raise UserError(
            f"past_key_values is a {type(cache).__name__}; give a MetaTokenCache, a DynamicCache or a StaticCache."
        )
