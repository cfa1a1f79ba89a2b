"""Training blocks: windows of a token store's text with meta-tokens inserted, in a new order each epoch."""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from metatokens.data.insertion import (
    PLACEMENTS,
    Ids,
    insert_meta_tokens,
    labels_of,
    meta_token_count,
)
from metatokens.data.landmarks import AFTER, BEFORE, Landmarks
from metatokens.data.store import StoreSplit, TokenSequence, TokenStore
from metatokens.data.tokenizer import meta_token_id
from metatokens.errors import UserError

STRETCHES = 2**20  # at most, in a text with landmarks; each takes one number of memory
STRETCH = 1024  # tokens of text, at least


class NoBlocks(UserError):
    """A split makes no block: it is too short, or a rule inserts no meta-token into it."""


class BlockDataset:
    """Training blocks: windows of text, in a new order each epoch, with meta-tokens inserted.

    A map-style dataset of `epochs` times N items: `input_ids` and `labels`, each (block_size,) int64. Item i is in
    epoch i // N. With the placements of `insert_meta_tokens`, N is the number of whole windows of `block_size - M` ids
    in the split. With a rule for landmarks, N is the number of whole windows of `block_size` ids in the split with its
    landmarks, so the number of meta-tokens differs between blocks. An item depends only on the arguments and its index:
    the order of an epoch on (seed, epoch), the meta-tokens on (seed, epoch, window), or with a rule on the window. So
    neither the number of workers nor an interruption changes it.

    Attributes:
        epochs: how many times the text is read; may be set.
    """

    def __init__(
        self,
        store: TokenStore,
        split: StoreSplit,
        *,
        block_size: int,
        fraction: float,
        placement: str,
        seed: int,
        epochs: int = 1,
    ) -> None:
        """See `insert_meta_tokens` for block_size, fraction and placement, which may also be a rule of `Landmarks`.

        A rule reads the whole split once, about eight million tokens a second, and does not use `fraction`.

        Raises:
            NoBlocks: if the split is shorter than a block, or has no landmark.
            UserError: if the fraction is too small for one meta-token a block, or a setting is out of its range.
        """
        text = store.tokens(split)
        source = f"the {split} split of {store.path}"
        self._meta_token_id = meta_token_id(store.tokenizer)
        self._window_size = block_size
        self._tokens: TokenSequence | _TextWithLandmarks = text
        # With a rule the text has its meta-tokens already.
        self._insert: Callable[..., tuple[Ids, Ids]] | None = None
        if placement in PLACEMENTS:
            count = meta_token_count(block_size, fraction, placement)
            if fraction and placement != "none" and not count:
                raise UserError(
                    f"a block of {block_size} with a fraction {fraction} of meta-tokens has none of them."
                )
            self._window_size -= count
            self._insert = partial(
                insert_meta_tokens,
                meta_token_id=self._meta_token_id,
                block_size=block_size,
                fraction=fraction,
                placement=placement,
            )
        else:
            self._tokens = _TextWithLandmarks(text, Landmarks(store.tokenizer, placement))
            if len(self._tokens) == len(text):
                raise NoBlocks(f"the rule {placement} inserts no meta-token into {source}.")
        self._windows = len(self._tokens) // self._window_size
        if not self._windows:
            raise NoBlocks(
                f"{source} has {len(self._tokens)} tokens, too few for one block of {block_size}."
            )
        self.epochs = epochs
        self._seed = seed

    def __len__(self) -> int:
        return self.epochs * self._windows

    def __getitem__(self, index: int) -> dict[str, Ids]:
        epoch, index_in_epoch = divmod(range(len(self))[index], self._windows)
        window = shuffled(index_in_epoch, self._windows, f"{self._seed} {epoch}")
        start = window * self._window_size
        input_ids = self._tokens[start : start + self._window_size]
        if self._insert is None:
            labels = labels_of(input_ids, self._meta_token_id)
        else:
            generator = np.random.default_rng([self._seed, epoch, window])
            input_ids, labels = self._insert(input_ids, generator=generator)
        return {"input_ids": input_ids, "labels": labels}


class _TextWithLandmarks:
    """The ids of a split with its landmarks, computed slice by slice.

    Memory holds one number for each stretch of text: its start among the ids with landmarks.
    """

    def __init__(self, text: TokenSequence, landmarks: Landmarks) -> None:
        self._text = text
        self.landmarks = landmarks
        self._size = max(STRETCH, math.ceil(len(text) / STRETCHES))
        sizes = [len(self._stretch(start)) for start in range(0, len(text), self._size)]
        self._starts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, window: slice) -> Ids:
        ends = (window.start, window.stop - 1)
        first, last = np.searchsorted(self._starts, ends, side="right").tolist()
        ids = np.concatenate(
            [self._stretch(number * self._size) for number in range(first - 1, last)]
        )
        offset = self._starts[first - 1]
        return ids[window.start - offset : window.stop - offset]

    def _stretch(self, start: int) -> Ids:
        """The stretch that begins with token `start` of the text, with its landmarks."""
        around_start = max(0, start - BEFORE)  # the rule reads tokens on both sides of a landmark
        around = self._text[around_start : start + self._size + AFTER]
        stretch = slice(start - around_start, start - around_start + self._size)
        marked = np.flatnonzero(self.landmarks(around, around_start)[stretch])
        return np.insert(around[stretch], marked + 1, self.landmarks.meta_token_id)


def shuffled(index: int, size: int, key: str) -> int:
    """The number at an index of a pseudo-random permutation of range(size), without a table.

    At the paper's scale a table would have 10^8 entries in every worker. A Feistel network permutes the numbers of 2b
    bits whatever its round function is, and four rounds make the permutation random (Luby and Rackoff, 1988). Applying
    it until the number is below `size` leaves a permutation of range(size) (Black and Rogaway, 2002).
    """
    bits = max(1, math.ceil((size - 1).bit_length() / 2))
    while True:
        left, right = index >> bits, index % 2**bits
        for round_ in range(4):
            digest = hashlib.blake2b(f"{key} {round_} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest) % 2**bits
        index = left << bits | right
        if index < size:
            return index
