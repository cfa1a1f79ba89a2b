"""Text that is forgotten: a query sees every meta-token, the first tokens and the last ones, and nothing else.

A query sees itself and earlier keys: a key that is a meta-token, a key whose position is below `text_sinks`, and a key
that is fewer than `text_window` positions back. So a key is seen from its own position to that of its last reader.
These two positions are all that a mask needs, and all that a cache has to keep about each entry. In the blocks
`text_full_layers` every later query sees a key, and the cache drops nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import QuantizedCache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

from metatokens.errors import UserError
from metatokens.model.cache import AnyCache, AnyCacheLayer, give
from metatokens.model.rows import gather_rows, positions_of

_OTHER_CACHE = (
    "this cache was filled with another text_window, text_sinks or text_full_layers than the model has now; begin a "
    "new one."
)


@dataclass(frozen=True, slots=True)
class TextRule:
    """Which keys the queries of one forward pass see.

    Attributes:
        positions: (batch or 1, length) int64, those of the queries. The positions of a packed sequence are higher than
            those of the sequence before it.
        keys: (batch, held + length) int64, the position of each key, cached ones first.
        readers: (batch, held + length) int64, the last position that sees each key; -1 at padding, which none sees.
        full: the rule of the blocks that see all text; None if there are none.
    """

    positions: Tensor
    keys: Tensor
    readers: Tensor
    full: "TextRule | None" = None

    @classmethod
    def of(
        cls,
        config: Any,
        positions: Tensor,
        is_meta: Tensor,
        attention_mask: Any,
        cache: Any,
        sequences: Tensor | None = None,
        *,
        are_given: bool,
    ) -> "TextRule":
        """The rule for new tokens. A cache, if given, notes them, and forgets text from now on.

        Args:
            config: the model's, with `text_window`, `text_sinks` and `text_full_layers`.
            positions: (batch or 1, length) int64.
            is_meta: (batch, length) bool.
            attention_mask: (batch, read + length or more), 1 at real tokens, with a column for each token that was
                read before, forgotten ones included; or None.
            cache: the cache of the tokens before, or None.
            sequences: (batch or 1, length) int64, as from `packed_sequences`; then there is no cache.
            are_given: whether the caller chose the positions. Those that count real tokens grow anyway, so a training
                step is spared a device sync.

        Raises:
            UserError: if the mask has four dimensions, or positions are fractions; if the cache is of another kind, too
                small, or has entries that are unknown here; or if positions do not grow from one real token to the
                next.
        """
        if isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim == 4):
            raise UserError("a mask of four dimensions would replace the text_window; give one of two dimensions.")
        if positions.is_floating_point():
            raise UserError(
                f"with a text_window, positions are whole numbers; these are of the type {positions.dtype}."
            )
        is_kept, last = is_meta | (positions < config.text_sinks), torch.iinfo(torch.int64).max
        all_readers = [torch.where(is_kept, last, positions + config.text_window - 1)]
        if config.text_full_layers:
            all_readers.append(torch.full_like(all_readers[0], last))
        if attention_mask is not None:  # longer than what was read, with a cache of a fixed size
            before = 0 if cache is None else cache.get_seq_length()
            new = torch.arange(is_meta.shape[1], device=is_meta.device) + before
            all_readers = [readers.masked_fill(attention_mask[:, new] == 0, -1) for readers in all_readers]
        if (are_given or cache is not None) and sequences is None and not torch.compiler.is_compiling():
            _check_order(positions, all_readers[0] >= 0, cache)
        if sequences is not None:  # as if each sequence came after the one before
            size = positions.max() + 1
            all_readers = [torch.minimum(readers, size - 1) + sequences * size for readers in all_readers]
            positions = positions + sequences * size
        seen = [(positions.expand_as(readers), readers) for readers in all_readers]
        if cache is not None:
            cache = forgetting(cache, config)
            seen = cache.read(seen, config.text_window)
        rule, *full = (cls(positions, keys, readers) for keys, readers in seen)
        return replace(rule, full=full[0]) if full else rule

    def mask_function(self) -> Callable[[Any, Any, Any, Any], Tensor]:
        """The rule as a mask function of transformers, whose indices count from 0, and broadcast."""
        positions = self.positions.expand(len(self.keys), -1)
        keys, readers = self.keys.contiguous(), self.readers.contiguous()  # as flex attention needs them

        def is_seen(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
            position = positions[batch, query]
            return (keys[batch, key] <= position) & (position <= readers[batch, key])

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

    def seen(self) -> Tensor:
        """Which keys each query sees, (batch, length, keys) bool."""
        sizes = (len(self.readers), self.positions.shape[1], self.readers.shape[1])
        batch, query, key = (torch.arange(size, device=self.readers.device) for size in sizes)
        return self.mask_function()(batch[:, None, None], None, query[:, None], key)


class ForgettingLayer(AnyCacheLayer):
    """Mixin for a layer of a cache that grows: entries can be dropped, and still count as tokens that were read."""

    keys: Tensor
    values: Tensor
    forgotten = 0  # the number of tokens read, less that of entries held

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


class ForgettingStaticLayer(AnyCacheLayer):
    """Mixin for a layer of a fixed size: new entries take the places of those that no later query sees.

    Attributes:
        places: (batch, new) int64, of the entries of this forward pass.
    """

    forgotten = 0
    keys: Tensor
    values: Tensor
    places: Tensor
    is_initialized: bool
    cumulative_length: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new entries, (batch, heads, new, head size), and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length.add_(key_states.shape[-2])
        places = self.places.to(self.keys.device)[:, None, :, None]
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            store.scatter_(2, places.expand_as(new), new)
        return self.keys, self.values


class ForgettingCache(AnyCache):
    """Mixin for a cache whose layers hold what later queries can see, and little else.

    Entries that no later query sees are dropped when some have piled up, so that a step seldom copies the cache. A
    layer holds at most max(16, text_window // 4) such entries, and those that the last forward pass added. One
    more layer, after the model's, holds notes. Its keys are the positions of the entries, and its values the last
    positions that see them, each (batch, 1, held, 1). If some layers hold everything, the notes on them come last.

    Attributes:
        notes_at: the index of the notes.
        full: the indices of the layers that hold everything, the notes on them included.
        rule: the `text_window`, `text_sinks` and `text_full_layers` of the model that fills it.
        kept: how many entries were left when some were dropped the last time.
        keeps_all: whether it drops nothing, as for a model that drafts, whose last tokens are taken back.
    """

    layers: list[Any]
    is_compileable: bool  # whether the layers have a fixed size
    notes_at: int
    full: Sequence[int]
    rule: tuple[int, int, tuple[int, ...]]
    kept = 0
    keeps_all = False

    @property
    def has_dropped(self) -> bool:
        """Whether any entries were dropped."""
        return any(layer.forgotten for layer in self.layers)

    def check_weights(self) -> None:
        """Refuse to give attention weights whose columns are not the tokens in order."""
        if self.has_dropped or self.is_compileable:
            raise UserError("this cache drops text, and attention weights with it; use no cache.")

    @property
    def held(self) -> int:
        """The number of entries of each layer that forgets."""
        return int(self.get_seq_length()) - self.layers[self.notes_at].forgotten

    def read(self, seen: Sequence[tuple[Tensor, Tensor]], window: int) -> list[tuple[Tensor, Tensor]]:
        """Make room for new tokens, and note them.

        Args:
            seen: keys and readers, (batch, length) each, as in `TextRule`, in the layers that forget, and in those that
                hold everything if there are any. Positions of a later pass are at least the smallest here.
            window: the model's `text_window`.

        Returns:
            The same of the entries that are held and of the new ones, (batch, held + length).

        Raises:
            UserError: if the cache lost entries, has some that it did not note, or has a fixed size and is too small.
        """
        notes, seen = self.layers[self.notes_at], [(one[:, None, :, None], two[:, None, :, None]) for one, two in seen]
        keys, readers = seen[0]
        if self.is_compileable:
            self._find_places(notes, keys, readers)
        elif notes.get_seq_length() != self.get_seq_length():
            raise UserError(
                "this cache lost entries, or has some that a text_window cannot place: those of learned prompts, or of "
                "a pass in training mode."
            )
        elif not self.keeps_all and self.held >= max(self.kept, window) + max(16, window // 4):
            index = positions_of((notes.values >= keys.amin(dim=2, keepdim=True))[:, 0, :, 0])
            for number, layer in enumerate(self.layers):
                if number not in self.full:
                    layer.keep(index)
            notes.values = notes.values.masked_fill((index < 0)[:, None, :, None], -1)
            self.kept = index.shape[1]
        noted = [layer.update(*new) for layer, new in zip(self.layers[self.notes_at :], seen, strict=True)]
        return [(one[:, 0, :, 0], two[:, 0, :, 0]) for one, two in noted]

    def _find_places(self, notes: Any, keys: Tensor, readers: Tensor) -> None:
        """Choose the places of new entries in layers of a fixed size: free ones, and those of unseen entries."""
        if not notes.is_initialized:
            notes.lazy_initialization(keys, readers)
            notes.values.fill_(-1)
        places = notes.values[:, 0, :, 0].argsort(dim=1, stable=True)[:, : keys.shape[2]]
        is_seen = notes.values[:, 0, :, 0].gather(1, places) >= keys[:, 0, :, 0].amin(dim=1, keepdim=True)
        too_small = (
            f"a cache of {notes.values.shape[2]} tokens is too small for the text_window, the meta-tokens and "
            f"{keys.shape[2]} new tokens; give a larger one, or a smaller prefill_chunk_size."
        )
        if torch.compiler.is_compiling():  # a graph cannot raise anything else
            torch._assert_async(~is_seen.any(), too_small)
        elif places.shape[1] < keys.shape[2] or is_seen.any():
            raise UserError(too_small)
        for layer in self.layers:
            layer.places = places

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; at least those of the last forward pass can be removed.

        Raises:
            UserError: if more tokens are to be removed than were read since text was last dropped, or the cache has a
                fixed size.
        """
        if self.is_compileable:
            raise UserError("a cache of a fixed size that forgets text cannot be cropped.")
        if self.has_dropped and -tokens_to_remove > self.held - self.kept:
            raise UserError(
                f"text was dropped from this cache; only its last {self.held - self.kept} tokens can be removed."
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.kept = 0
        if self.is_compileable:
            self.layers[self.notes_at].values.fill_(-1)


def _check_order(positions: Tensor, is_real: Tensor, cache: Any) -> None:
    """Refuse positions, (batch or 1, length), that are not above those of all real tokens before them.

    By its position a key is before a query or after it. A mask that hides tokens that the cache noted as real lowers
    the positions after them.
    """
    before = positions.new_full((len(is_real), 1), -1)
    if isinstance(cache, ForgettingCache) and cache.layers[cache.notes_at].is_initialized:
        notes = cache.layers[cache.notes_at]
        before = notes.keys.masked_fill(notes.values < 0, -1).amax(dim=2)[:, 0].to(positions.device)
    reached = torch.cat([before, positions.expand_as(is_real).masked_fill(~is_real, -1)], dim=1).cummax(dim=1).values
    if (is_real & (positions <= reached[:, :-1])).any():
        raise UserError(
            "with a text_window, positions have to grow from each real token to the next. Give position_ids that do, "
            "sequences packed into a row without an attention_mask, and a cache the mask that it was filled with."
        )


def forgetting(cache: Any, config: Any) -> ForgettingCache:
    """The cache of a model with this configuration, which forgets text from now on.

    Raises:
        UserError: if the cache is of another kind, was filled with another window, or has a fixed size while some
            blocks see all text.
    """
    layers, full = config.get_text_config().num_hidden_layers, tuple(config.text_full_layers or ())
    rule = config.text_window, config.text_sinks, full
    if not isinstance(cache, ForgettingCache):
        cache.layers += [DynamicLayer() for _ in range(layers - len(cache.layers))]
        kind = StaticLayer if isinstance(cache.layers[0], StaticLayer) else DynamicLayer
        is_other = isinstance(cache, QuantizedCache) or cache.offloading
        if is_other or not all(isinstance(layer, kind) and not layer.is_sliding for layer in cache.layers):
            raise UserError("a text_window needs a DynamicCache or a StaticCache, neither quantized nor offloaded.")
        if kind is StaticLayer and full:
            raise UserError("text_full_layers need a cache that grows: in one of a fixed size all layers are as large.")
        size = [cache.layers[0].max_cache_len] if kind is StaticLayer else []
        give(cache, ForgettingCache)
        cache.notes_at, cache.rule = len(cache.layers), rule
        cache.full = [number for number in range(cache.notes_at) if number % layers in full]  # a second attention's too
        cache.layers += [type(cache.layers[0])(*size) for _ in range(1 + bool(full))]
        cache.full += range(cache.notes_at + 1, len(cache.layers))
        for layer in cache.layers:
            give(layer, ForgettingStaticLayer if size else ForgettingLayer)
    elif cache.rule != rule:
        raise UserError(_OTHER_CACHE)
    return cache


def check_remembering(cache: Any) -> None:
    """Refuse a cache that forgets text, for a model that has no text window now."""
    if isinstance(cache, ForgettingCache):
        raise UserError(_OTHER_CACHE)
