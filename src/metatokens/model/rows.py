"""Where rows of a batch stand: meta-tokens, and positions that queries come from.

Positions are tensors of a fixed shape, (batch, most), -1 where a row has fewer. Who makes a batch knows them; to find
them in the ids is to read from the device how many there are, which stops a compiled model.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor, nn

Index = Tensor | tuple[slice | Tensor, slice | Tensor]  # of (batch, length)


@torch.compiler.disable  # how many there are only the data tells
def positions_of(chosen: Tensor, *, least: int = 0, multiple: int = 1) -> Tensor:
    """The positions that a mask marks, ascending, -1 behind those of a row that has fewer than the most.

    Args:
        chosen: (batch, length) bool.
        least: so many columns at least.
        multiple: of which the number of columns is one, so that few shapes occur.

    Returns:
        (batch, most) int64.
    """
    counts = chosen.sum(dim=1)
    most = max(int(counts.max()), least)
    most = -(-most // multiple) * multiple
    # Those that are marked are moved to the front in their order, and the others behind them.
    index = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    index = torch.nn.functional.pad(index, (0, most - index.shape[1]))
    return index.masked_fill(torch.arange(most, device=chosen.device) >= counts[:, None], -1)


def asked_positions(keep: Index, x: Tensor, is_meta: Tensor | None, meta_positions: Tensor | None) -> Tensor:
    """The positions that an index takes, and those of meta-tokens, (batch, most) int64, -1 where a row has fewer.

    Each stands there once where it has to be looked for, or else maybe twice, so that nothing is looked for.

    Args:
        keep: an index of (batch, length).
        x: (batch, length, ...).
        is_meta: (batch, length) bool; None: not known, or there are none.
        meta_positions: (batch, most meta-tokens); None: there are none.
    """
    if isinstance(keep, Tensor) or is_meta is not None:
        is_asked = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        is_asked[keep] = True
        if is_meta is not None:
            return positions_of(is_asked | is_meta)
        asked = positions_of(is_asked)
    elif isinstance(keep[1], Tensor) and keep[1].ndim == 2:
        asked = keep[1]
    else:
        asked = torch.arange(x.shape[1], device=x.device)[keep[1]].expand(len(x), -1)
    return asked if meta_positions is None else torch.cat([asked, meta_positions], dim=1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tensors that say where rows of a batch stand."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same on another device, which accelerate asks for where layers are on several."""
        moved = (getattr(self, one.name).to(device, non_blocking=non_blocking) for one in fields(self))
        return type(self)(*moved)


@dataclass(frozen=True, slots=True)
class QueryRows(_Rows):
    """The positions of a batch that queries come from, where few do; sequences with fewer than the most are padded.

    Nothing follows the last block but the head, so it computes only what is asked for, and keys and values.

    Attributes:
        index: (batch, most) int64, each such position, in any order and maybe twice; padding points at the first one.
        place: (batch, length) int64, a column of `index` in which such a position stands.
    """

    index: Tensor
    place: Tensor

    @classmethod
    def at(cls, positions: Tensor, length: int) -> "QueryRows | None":
        """Rows at (batch, most) positions of so many, -1 for none; None if gathering them would not pay."""
        batch, most = positions.shape
        if not pays(most, length):
            return None
        columns = torch.arange(most, device=positions.device).expand(batch, most)
        beyond = positions.masked_fill(positions < 0, length)
        place = positions.new_zeros(batch, length + 1).scatter(1, beyond, columns)[:, :length]
        return cls(positions.clamp(min=0), place)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of x, (batch or 1, ..., length, features) -> (batch, ..., most, features)."""
        return _gather_rows(x, self.index)

    def mask(self, mask: Tensor | None, keys: int) -> Tensor:
        """Which of `keys` keys each row sees, (batch, 1, most, keys); `mask` says it of all positions, None: causal."""
        if mask is not None:
            return self.gather(mask)
        slots = self.index + (keys - self.place.shape[1])
        return (torch.arange(keys, device=slots.device) <= slots[:, :, None])[:, None]

    def take(self, x: Tensor, keep: Index) -> Tensor:
        """What an index of (batch, length) takes, from the gathered rows x, (batch, most, features)."""
        first = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
        return x.flatten(0, 1)[(first + self.place)[keep]]


def pays(most: int, length: int) -> bool:
    """Whether to gather `most` of each sequence's positions for the last block, rather than compute all of them.

    An explicit mask costs what a causal kernel saves: at 70 % of the positions the two take equally long, at half of
    them gathering takes 0.8 to 0.9 of a block's time, in narrow models and wide ones (benchmarks/LOG.md).
    """
    return 0 < 2 * most < length


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    batch, most = index.shape
    index = index.view(batch, *[1] * (x.ndim - 3), most, 1).expand(-1, *x.shape[1:-2], -1, x.shape[-1])
    return x.expand(batch, *x.shape[1:]).gather(-2, index)


@dataclass(frozen=True, slots=True)
class MetaRows(_Rows):
    """Where the meta-tokens of a batch stand; rows with fewer than the most are padded.

    Attributes:
        index: (batch, most) int64, position in the input of each meta-token, ascending; then padding, which points
            at the row's first position. So plain causal attention among the gathered rows never lets a real row see
            padding.
        valid: (batch, most) bool, False at padding.
        slots: (batch, most) int64, place in the cache, cached tokens counted; -1 at padding.
        positions: (batch, most) int64, position in the whole sequence, which differs from the slot where a row is
            padded on the left or entries were dropped from the cache; -1 at padding.
    """

    index: Tensor
    valid: Tensor
    slots: Tensor
    positions: Tensor

    @classmethod
    def at(cls, places: Tensor, cached: Tensor | int = 0, position_ids: Tensor | None = None) -> "MetaRows | None":
        """Rows at (batch, most) places of an input that follows `cached` tokens; None if there is no column.

        Args:
            places: (batch, most), ascending, -1 where a row has fewer.
            cached: how many tokens the cache holds.
            position_ids: (batch or 1, length), the input's positions; None: the slots.
        """
        if places.shape[1] == 0:
            return None
        valid, index = places >= 0, places.clamp(min=0)
        slots = (places + cached).masked_fill(~valid, -1)
        if position_ids is None:
            return cls(index, valid, slots, slots)
        positions = position_ids.expand(len(places), -1).gather(1, index)
        return cls(index, valid, slots, positions.masked_fill(~valid, -1))

    def gather(self, x: Tensor) -> Tensor:
        """The rows of x, (batch or 1, ..., length, features) -> (batch, ..., most, features)."""
        return _gather_rows(x, self.index)

    def mask(self, mask: Tensor, key_slots: Tensor) -> Tensor:
        """What a mask of all positions says of these rows, (batch, heads or 1, most, entries).

        Args:
            mask: (batch, heads or 1, length, total); True where a key is seen, or what is added to the logits.
            key_slots: (batch, entries), where the keys stand in the whole sequence, -1 at padding, which is unseen.
        """
        is_bool = mask.dtype == torch.bool
        seen, unseen = (True, False) if is_bool else (0.0, torch.finfo(mask.dtype).min)
        columns = _gather_rows(self.gather(mask).transpose(-1, -2), key_slots.clamp(min=0)).transpose(-1, -2)
        columns = columns.masked_fill((key_slots < 0)[:, None, None, :], unseen)
        return columns.masked_fill(~self.valid[:, None, :, None], seen)  # a padded query sees something, to avoid NaN

    def spread(self, weights: Tensor, key_slots: Tensor, shape: torch.Size) -> Tensor:
        """Attention weights of all positions, (batch, heads, length, total), 0 but among the meta-tokens.

        Args:
            weights: (batch, heads, most, entries).
            key_slots: see `mask`.
            shape: (..., length, total).
        """
        length, total = shape[-2:]
        weights = weights * (self.valid[:, None, :, None] & (key_slots >= 0)[:, None, None, :])
        columns = key_slots.clamp(min=0)[:, None, None, :].expand_as(weights)
        wide = weights.new_zeros(*weights.shape[:-1], total).scatter_add(-1, columns, weights)
        rows = self.index[:, None, :, None].expand_as(wide)
        return wide.new_zeros(*wide.shape[:2], length, total).scatter_add(-2, rows, wide)

    def among(self, queries: QueryRows) -> "MetaRows":
        """Where the meta-tokens stand among gathered rows, which all of them belong to."""
        return replace(self, index=queries.place.gather(1, self.index))

    def scatter_add(self, x: Tensor, rows: Tensor) -> Tensor:
        """x (batch, length, features) plus `rows` (batch, most, features) at the meta-tokens' places."""
        # Padding is dropped here, after the output projection, since the projection's bias would leak.
        rows = rows.to(x.dtype).masked_fill(~self.valid[:, :, None], 0.0)  # autocast may have lowered the rows
        return x.scatter_add(1, self.index[:, :, None].expand_as(rows), rows)


def least_rows(module: nn.Module) -> int:
    """How many rows of meta-tokens there are to be at least: in training by several processes one, even of padding.

    Each of them has to use every parameter, or they would wait for one another's gradients.
    """
    return int(module.training and torch.distributed.is_available() and torch.distributed.is_initialized())
