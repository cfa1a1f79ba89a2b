"""The rows of a batch that hold meta-tokens: meta-attention gathers them, and scatters its output back.

Their places are a tensor, (batch, most), with -1 where a row has fewer. Code that builds a batch can pass it along.
Finding them in the ids forces a device sync, which breaks a compiled graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from metatokens.errors import UserError

# The feature of a text's key that hides it in the dense form; half precision holds it.
TEXT_FEATURE = -1e4
BREAKS_GRAPH = (
    "a cache that grows holds meta-tokens alone, whose number no graph can know: give use_cache=False, or a cache of a "
    "fixed size."
)


def check_graph() -> None:
    """Refuse a graph that would hold the number of meta-tokens of one example."""
    if torch.compiler.is_exporting():
        raise UserError(BREAKS_GRAPH)
    if torch.jit.is_tracing():
        raise UserError(
            "torch.jit.trace would record the number of meta-tokens in its example: use torch.export."
        )


@torch.compiler.disable(reason=BREAKS_GRAPH)  # data-dependent shape
def positions_of(chosen: Tensor, *, multiple: int = 1) -> Tensor:
    """The positions that a mask marks, ascending, followed by -1 in rows that have fewer than the most.

    Args:
        chosen: (batch, length) bool.
        multiple: round the number of columns up to a multiple of this, so that few shapes occur.

    Returns:
        (batch, most) int64.

    Raises:
        UserError: in an exported or traced graph.
    """
    check_graph()
    counts = chosen.sum(dim=1)
    columns = -(-int(counts.max()) // multiple) * multiple
    # A stable sort moves the marked positions to the front and keeps their order.
    index = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :columns]
    index = nn.functional.pad(index, (0, columns - index.shape[1]))
    return index.masked_fill(torch.arange(columns, device=chosen.device) >= counts[:, None], -1)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of x, (batch or 1, ..., length, features), at `index`, (batch, most) -> (batch, ..., most, features)."""
    batch, rows = index.shape
    index = index.view(batch, *[1] * (x.ndim - 3), rows, 1)
    return torch.take_along_dim(x, index, dim=-2)


def shown(mask: Tensor) -> Tensor:
    """Where a mask shows a key, as bool. Numbers are added to the logits, where -1e4 or less hides a key."""
    return mask if mask.dtype == torch.bool else mask > -1e4


class GatheredRows(NamedTuple):
    """Where the meta-tokens of a batch are. Rows with fewer than the most are padded.

    Attributes:
        indices: (batch, most) int64, the place of each meta-token in the input, ascending. Padding comes last and
            points at the row's first place, so that causal attention among the gathered rows hides it from all
            real ones.
        valid: (batch, most) bool, False at padding.
        slots: (batch, most) int64, the place in the cache, which counts cached tokens; -1 at padding.
        sequences: (batch, most) int64, the number of the sequence, ascending and highest at padding, where several are
            packed into a row; otherwise None.
    """

    indices: Tensor
    valid: Tensor
    slots: Tensor
    sequences: Tensor | None = None

    @classmethod
    def at(
        cls,
        index: Tensor,
        cached: Tensor | int = 0,
        sequences: Tensor | None = None,
        *,
        minimum: int = 0,
    ) -> "GatheredRows | None":
        """Rows at (batch, most) places of an input that follows `cached` tokens; None if there is no column.

        Args:
            index: (batch, most) int64, ascending, -1 where a row of the batch has fewer, as from `positions_of`.
            cached: the number of tokens in the cache.
            sequences: (batch or 1, length), as from `packed_sequences`.
            minimum: pad to at least this many rows.
        """
        missing = minimum - index.shape[1]
        if missing > 0:
            index = nn.functional.pad(index, (0, missing), value=-1)
        if index.shape[1] == 0:
            return None
        valid = index >= 0
        slots = (index + cached).masked_fill(~valid, -1)
        index = index.clamp(min=0)
        if sequences is not None:
            sequences = sequences.expand(len(index), -1).gather(1, index)
            sequences = sequences.masked_fill(~valid, torch.iinfo(torch.int64).max)
        return cls(index, valid, slots, sequences)

    def gather(self, x: Tensor) -> Tensor:
        """These rows of x; shapes as in `gather_rows`."""
        return gather_rows(x, self.indices)

    def scatter_add(self, x: Tensor, rows: Tensor) -> Tensor:
        """Add `rows` (batch, most, features) to x (batch, length, features) at the meta-tokens' places."""
        # Padding is dropped after the output projection, whose bias would leak into the first place.
        # Autocast may have lowered the precision.
        rows = rows.to(x.dtype).masked_fill(~self.valid[:, :, None], 0.0)
        return x.scatter_add(1, self.indices[:, :, None].expand_as(rows), rows)

    def mask(self, mask: Tensor, key_slots: Tensor) -> Tensor:
        """The part of a mask over all positions that concerns these rows, (batch, heads or 1, most, entries).

        Args:
            mask: (batch, heads or 1, length, total), True where a key is seen, or added to the logits.
            key_slots: (batch, entries), the keys' places in the whole sequence, -1 at padding, which is unseen.
        """
        is_bool = mask.dtype == torch.bool
        seen, unseen = (True, False) if is_bool else (0.0, torch.finfo(mask.dtype).min)
        key_columns = key_slots.clamp(min=0)[:, None, None, :]
        columns = torch.take_along_dim(self.gather(mask), key_columns, dim=-1)
        columns = columns.masked_fill((key_slots < 0)[:, None, None, :], unseen)
        # A padded query that sees nothing gives NaN.
        return columns.masked_fill(~self.valid[:, None, :, None], seen)

    def seen_entries(self, key_slots: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which entries each of these rows sees, (batch, heads or 1, most, entries), as a mask for the scores.

        None: those before it among these rows. Padding comes last, so that no real row sees it.

        Args:
            key_slots: as in `mask`.
            mask: as for `MetaAttention`.
        """
        if mask is not None:
            return self.mask(mask, key_slots)
        if self.sequences is not None:
            return (self.sequences[:, None, :, None] == self.sequences[:, None, None, :]).tril()
        length = self.slots.shape[1]
        earlier = key_slots.shape[1] - length
        if earlier == 0:
            return None
        # The cache holds earlier meta-tokens, and its entries are in order.
        seen = (key_slots[:, None, :] >= 0).expand(-1, length, -1).tril(earlier)
        # A padded query that sees nothing would give NaN.
        return (seen | ~self.valid[:, :, None])[:, None]

    def spread(self, weights: Tensor, key_slots: Tensor, shape: torch.Size) -> Tensor:
        """Attention weights over all positions, (batch, heads, length, total), 0 except among meta-tokens.

        Args:
            weights: (batch, heads, most, entries).
            key_slots: as in `mask`.
            shape: (..., length, total).
        """
        length, total = shape[-2:]
        weights = weights * (self.valid[:, None, :, None] & (key_slots >= 0)[:, None, None, :])
        columns = key_slots.clamp(min=0)[:, None, None, :].expand_as(weights)
        wide = weights.new_zeros(*weights.shape[:-1], total).scatter_add(-1, columns, weights)
        rows = self.indices[:, None, :, None].expand_as(wide)
        return wide.new_zeros(*wide.shape[:2], length, total).scatter_add(-2, rows, wide)


class DenseRows(NamedTuple):
    """Every row of a batch, for the dense form of meta-attention, whose output counts at meta-tokens alone.

    Attributes:
        valid: (batch, length) bool, True at meta-tokens.
    """

    valid: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """All rows of x, unchanged."""
        return x

    def scatter_add(self, x: Tensor, rows: Tensor) -> Tensor:
        """Add `rows`, both (batch, length, features), at the meta-tokens' places."""
        return x + rows.to(x.dtype).masked_fill(~self.valid[:, :, None], 0.0)


def minimum_rows(module: nn.Module) -> int:
    """The smallest number of meta-token rows: 1, if only of padding, where several processes train; otherwise 0.

    Each process has to use every parameter, or the others would wait for its gradients.
    """
    return int(
        module.training and torch.distributed.is_available() and torch.distributed.is_initialized()
    )
