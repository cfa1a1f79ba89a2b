"""Caches that forget text: entries that no later query sees are dropped. Positions stay those of the text."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import QuantizedCache
from transformers.cache_utils import DynamicLayer

from metatokens.errors import UserError
from metatokens.model.cache import AnyCache, AnyCacheLayer
from metatokens.model.mixins import add_mixin
from metatokens.model.rows import gather_rows, positions_of

_OTHER_CACHE = (
    "this cache was filled with another text window, or other full blocks or heads, than the model has now; begin a "
    "new one."
)

_UNKNOWN_ENTRIES = (
    "this cache lost entries, or has some that a text_window cannot place: those of learned prompts, or of a pass in "
    "training mode."
)


class KeyNotes(NamedTuple):
    """What a rule has to know about keys.

    Attributes:
        positions: (batch, keys) int64, the position of each key.
        last_readers: (batch, keys) int64, the last position that sees each key; -1 at padding, which none sees.
    """

    positions: Tensor
    last_readers: Tensor


class ForgettingLayer(AnyCacheLayer):
    """Mixin for a layer of a cache that grows: entries can be dropped, and still count as tokens that were read.

    Attributes:
        forgotten: the number of tokens read, less that of entries held.
        holds_everything: whether no entry is ever dropped.
        has_notes: whether it holds `KeyNotes` in place of keys and values.
    """

    keys: Tensor
    values: Tensor
    forgotten = 0
    holds_everything = False
    has_notes = False

    def get_seq_length(self) -> int:
        """The number of tokens read."""
        return super().get_seq_length() + self.forgotten

    def keep(self, index: Tensor) -> None:
        """Keep the entries at `index`, (batch, kept), any entry where it is -1."""
        index = index.to(self.keys.device).clamp(min=0)
        self.forgotten += self.keys.shape[-2] - index.shape[1]
        self.keys, self.values = gather_rows(self.keys, index), gather_rows(self.values, index)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.forgotten = 0


class Parts(NamedTuple):
    """Keys or values of a block with full heads.

    Attributes:
        forgetting: of the heads that forget text, (batch, heads, held, head size).
        full: of the heads that see all text, (batch, heads, tokens, head size).
    """

    forgetting: Tensor
    full: Tensor


class FullHeads(NamedTuple):
    """Which key-value heads of a block keep all text; some do, and some do not.

    Attributes:
        are_full: whether each head does, up to the last one that does. Indices would be inputs of a graph of
            torch.compile, and these are constants.
    """

    are_full: tuple[bool, ...]

    def split(self, count: int) -> tuple[list[int], list[int]]:
        """The heads that forget text, and those that keep it, of `count` heads.

        Raises:
            UserError: if there are not so many, or all keep it.
        """
        full = [head for head, is_full in enumerate(self.are_full) if is_full]
        forgetting = [head for head in range(count) if head not in full]
        if len(self.are_full) > count or not forgetting:
            raise UserError(
                f"text_full_heads does not fit a block with {count} key-value heads: set_text_window writes what does."
            )
        return forgetting, full

    def parts_of(self, states: Tensor | Parts) -> Parts:
        """The parts of keys or values, (batch, heads, tokens, head size); those of a cache are parts already."""
        if isinstance(states, Parts):
            return states
        forgetting, full = self.split(states.shape[1])
        return Parts(states[:, forgetting], states[:, full])


class LayerOfHeads(ForgettingLayer):
    """Mixin for the layer of a block with full heads: it holds the other heads.

    Attributes:
        full_heads: which key-value heads hold everything.
        full_part: a further layer of the cache, which holds them.
    """

    full_heads: FullHeads
    full_part: DynamicLayer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Hold new keys and values, (batch, heads, new, head size); returns the parts of all."""
        new_keys = self.full_heads.parts_of(key_states)
        new_values = self.full_heads.parts_of(value_states)
        keys, values = super().update(new_keys.forgetting, new_values.forgetting, *args, **kwargs)
        full_keys, full_values = self.full_part.update(new_keys.full, new_values.full)
        return Parts(keys, full_keys), Parts(values, full_values)


class ForgettingCache(AnyCache):
    """Mixin for a cache whose layers hold what later queries can see, and little else.

    Entries that no later query sees are dropped when some have piled up, so that a step seldom copies the cache. A
    layer holds at most max(16, text_window // 4) such entries, and those that the last forward pass added.

    The cache has to keep `KeyNotes` about its entries while its rows are reordered, repeated and selected. So the notes
    are further layers, after those with keys and values: the positions are their keys and the last readers their
    values, (batch, 1, held, 1) each. After the notes come layers with the full heads of blocks whose other heads
    forget.

    Attributes:
        layers_of_notes: the layers with notes: one about the layers that forget, and if any layer holds everything, one
            about these.
        rule: the `text_window`, `text_sinks`, `text_full_layers` and `text_full_heads` of the model that fills it.
        held_after_drop: how many entries were held after some were dropped the last time.
    """

    layers: list[Any]
    layers_of_notes: list[Any]
    rule: tuple[Any, ...]
    held_after_drop = 0

    @property
    def notes(self) -> Any:
        """The layer with the notes about the entries of layers that forget."""
        return self.layers_of_notes[0]

    def make_room(self, new: KeyNotes, window: int) -> None:
        """Drop entries that no query sees from now on, if enough have piled up.

        No query of this pass or of a later one has a position below the first new key's. So an entry is dropped if its
        last reader is before that.

        Args:
            new: about the new keys, in layers that forget.
            window: the model's `text_window`.

        Raises:
            UserError: if the cache lost entries, or has some that it did not note.
        """
        if self.notes.get_seq_length() != self.get_seq_length():
            raise UserError(_UNKNOWN_ENTRIES)
        held = int(self.get_seq_length()) - self.notes.forgotten
        needed = max(self.held_after_drop, window)
        if held - needed >= max(16, window // 4):
            first_position = new.positions.amin(dim=1, keepdim=True)
            self._drop(positions_of(self.notes.values[:, 0, :, 0] >= first_position))

    def take_note(self, new: Sequence[KeyNotes]) -> list[KeyNotes]:
        """Note new keys, and return the notes about all.

        Args:
            new: (batch, length), in the layers that forget, and in those that hold everything if there are any.

        Returns:
            The same about the entries that are held and the new ones, (batch, held + length).
        """
        all_notes = []
        for layer, (positions, last_readers) in zip(self.layers_of_notes, new, strict=True):
            keys, values = layer.update(positions[:, None, :, None], last_readers[:, None, :, None])
            all_notes.append(KeyNotes(keys[:, 0, :, 0], values[:, 0, :, 0]))
        return all_notes

    def _drop(self, index: Tensor) -> None:
        """Drop all entries but those at `index`, (batch, left), in each layer that forgets."""
        for layer in self.layers:
            if not layer.holds_everything:
                layer.keep(index)
        self.notes.values = self.notes.values.masked_fill((index < 0)[:, None, :, None], -1)
        self.held_after_drop = index.shape[1]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, unless text was dropped, which they may have to see again."""
        if self.notes.forgotten:
            raise UserError("text was dropped from this cache, so that it cannot be cropped.")
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.held_after_drop = 0


def last_position_noted(cache: Any, rows: int) -> Tensor:
    """The highest position of a real token that a cache noted, (rows, 1) int64; -1 where there is none."""
    if not isinstance(cache, ForgettingCache) or not cache.notes.is_initialized:
        return torch.full((rows, 1), -1)
    is_padding = cache.notes.values < 0
    return cache.notes.keys.masked_fill(is_padding, -1).amax(dim=2)[:, 0]


def make_forgetting(cache: Any, config: Any) -> None:
    """Have the cache of a model with this configuration forget text from now on, in place.

    Raises:
        UserError: if the cache is of another kind, or was filled with another window, or without one; it then stays as
            it is.
    """
    full_blocks = tuple(config.text_full_layers or ())
    full_heads = full_heads_by_block(config)
    rule = config.text_window, config.text_sinks, full_blocks, full_heads
    if isinstance(cache, ForgettingCache):
        if cache.rule != rule:
            raise UserError(_OTHER_CACHE)
        return
    _check_kind(cache)
    if cache.get_seq_length():
        raise UserError(_UNKNOWN_ENTRIES)
    blocks = config.get_text_config().num_hidden_layers
    cache.layers += [DynamicLayer() for _ in range(blocks - len(cache.layers))]
    add_mixin(cache, ForgettingCache)
    cache.rule = rule
    # A second causal attention has the layer `blocks + block` for each block.
    full_layers = [
        layer for number, layer in enumerate(cache.layers) if number % blocks in full_blocks
    ]
    kind_of_layer = type(cache.layers[0])
    notes = kind_of_layer()
    notes_on_full = [kind_of_layer()] if full_blocks or full_heads else []
    full_parts = {block: kind_of_layer() for block in full_heads}
    cache.layers_of_notes = [notes, *notes_on_full]
    cache.layers += [*cache.layers_of_notes, *full_parts.values()]
    for layer in cache.layers:
        add_mixin(layer, ForgettingLayer)
    for layer in (*full_layers, *notes_on_full, *full_parts.values()):
        layer.holds_everything = True
    for layer in cache.layers_of_notes:
        layer.has_notes = True
    for block, part in full_parts.items():
        layer = cache.layers[block]
        add_mixin(layer, LayerOfHeads)
        layer.full_heads, layer.full_part = full_heads[block], part


def full_heads_by_block(config: Any) -> dict[int, FullHeads]:
    """The full heads of each block that has some; only retrofitted models have any."""
    heads_of: dict[int, list[int]] = defaultdict(list)
    for block, head in getattr(config, "text_full_heads", None) or ():  # ascending
        heads_of[block].append(head)
    full_heads = {}
    for block, heads in heads_of.items():
        up_to_the_last = range(heads[-1] + 1)
        full_heads[block] = FullHeads(tuple(head in heads for head in up_to_the_last))
    return full_heads


def _check_kind(cache: Any) -> None:
    """Refuse a cache whose layers are not all of a kind that can forget."""
    is_other = isinstance(cache, QuantizedCache) or cache.offloading
    if is_other or not all(
        isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in cache.layers
    ):
        raise UserError(
            "a text_window needs a cache that grows, such as a DynamicCache, neither quantized nor offloaded."
        )


def refuse_forgetting_cache(cache: Any) -> None:
    """Refuse a cache that forgets text, for a model that has no text window now."""
    if isinstance(cache, ForgettingCache):
        raise UserError(_OTHER_CACHE)
