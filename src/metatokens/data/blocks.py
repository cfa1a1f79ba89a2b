"""Training blocks: windows of a token store's text with meta-tokens inserted, in an order of their own each epoch."""

import hashlib
import math

import numpy as np
import numpy.typing as npt

from metatokens.data.insertion import Placement, insert_meta_tokens, meta_token_count
from metatokens.data.store import Split, TokenStore
from metatokens.errors import UserError


class BlockDataset:
    """Training blocks: windows of text, in an order of their own each epoch, with meta-tokens inserted.

    A map-style dataset of `epochs` times N items, N being the whole windows of `block_size - M` ids in the
    split; epoch and place in it are `divmod(index, N)`. An item depends on the arguments and its index alone:
    the order of an epoch on (seed, epoch), the meta-tokens on (seed, epoch, window). So neither the number
    of workers nor a resumed run changes it.
    """

    def __init__(
        self,
        store: TokenStore,
        split: Split,
        *,
        block_size: int,
        fraction: float,
        placement: Placement,
        seed: int,
        epochs: int = 1,
    ) -> None:
        """See `insert_meta_tokens` for block_size, fraction and placement.

        Raises:
            UserError: if the split is shorter than a block, or a setting is out of its range.
        """
        if block_size < 2:
            raise UserError(f"the block size is {block_size}, but must be 2 or more.")
        count = meta_token_count(block_size, fraction, placement)
        self._tokens = store.tokens(split)
        self._window_size = block_size - count
        self._windows = len(self._tokens) // self._window_size
        if not self._windows:
            raise UserError(
                f"the {split} split of {store.path} has {len(self._tokens)} tokens, too few for one block of "
                f"{block_size} ({self._window_size} of text, {count} meta-tokens)."
            )
        self._epochs = epochs
        self._seed = seed
        self._meta_token_id = store.manifest.meta_token_id
        self._block_size = block_size
        self._fraction = fraction
        self._placement = placement

    def __len__(self) -> int:
        return self._epochs * self._windows

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        epoch, place = divmod(range(len(self))[index], self._windows)
        window = shuffled(place, self._windows, f"{self._seed} {epoch}")
        start = window * self._window_size
        input_ids, labels = insert_meta_tokens(
            self._tokens[start : start + self._window_size],
            meta_token_id=self._meta_token_id,
            block_size=self._block_size,
            fraction=self._fraction,
            placement=self._placement,
            generator=np.random.default_rng([self._seed, epoch, window]),
        )
        return {"input_ids": input_ids, "labels": labels}


def shuffled(place: int, size: int, key: str) -> int:
    """The number at a place of a pseudo-random permutation of range(size), without a table of it.

    At the paper's scale a table has 10^8 entries in every worker. A Feistel network permutes the numbers of
    2b bits whatever its round function is, and four rounds make that random (Luby and Rackoff, 1988); going
    on until the number is below `size` leaves a permutation of range(size) (Black and Rogaway, 2002).
    """
    bits = max(1, math.ceil((size - 1).bit_length() / 2))
    while True:
        left, right = place >> bits, place % 2**bits
        for round_ in range(4):
            digest = hashlib.blake2b(f"{key} {round_} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest) % 2**bits
        place = left << bits | right
        if place < size:
            return place
