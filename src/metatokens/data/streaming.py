"""Training blocks straight from a corpus, tokenized while they are trained on, for those without the disk for a store.

A token store costs its disk space once, and is better at everything else: it is shuffled by windows, it is the same
for any number of readers, and a run resumes at once, where a stream has to be read again up to that point.
"""

from collections.abc import Iterator
from functools import partial
from itertools import count
from sys import maxsize
from typing import Any, NamedTuple, cast, get_args

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from metatokens.data.blocks import shuffled
from metatokens.data.corpus import Part, corpus_parts, read_part
from metatokens.data.insertion import Placement, insert_meta_tokens, meta_token_count
from metatokens.data.sharding import batches
from metatokens.data.store import HELD_OUT, is_held_out
from metatokens.data.tokenizer import encode_documents, load_tokenizer, meta_token_id
from metatokens.errors import UserError
from metatokens.files import sha256_of
from metatokens.machine import process_count, process_rank


class TextStream(NamedTuple):
    """A corpus, its parts (see `corpus_parts`), and its tokenizer."""

    corpus: str
    parts: list[Part]
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def open(cls, corpus: str, tokenizer_spec: str) -> "TextStream":
        """See `read_corpus` and `load_tokenizer` for the specs.

        Raises:
            UserError: if the corpus or the tokenizer cannot be had, or the tokenizer is one that would be trained.
        """
        if tokenizer_spec.startswith("train:"):
            raise UserError(
                f"data.tokenizer={tokenizer_spec} would be trained on all of the corpus before the stream begins: give "
                "gpt2 or a tokenizer's folder, or make a token store with `metatokens tokenize`."
            )
        return cls(corpus, corpus_parts(corpus), load_tokenizer(tokenizer_spec))


class StreamedBlocks(IterableDataset[dict[str, Any]]):
    """Blocks of a stream's text with meta-tokens inserted, without end, as `BlockDataset` has of a store's.

    The documents that `write_token_store` would hold out at its default share are left out (the first two of a corpus
    aside, of which it always holds out one). Each process of a run, and each data-loading worker of it, is a reader.
    Where the corpus has a part or more for each of them (see `corpus_parts`), a reader reads whole parts, in an order
    of their own each epoch; otherwise each reads every part and keeps every so many-th document. So every document is
    read once an epoch. What is left of an epoch that is shorter than a block is dropped, by each reader.

    A block depends on the arguments, its reader and the number of readers.
    """

    def __init__(self, stream: TextStream, *, block_size: int, fraction: float, placement: str, seed: int) -> None:
        """See `insert_meta_tokens` for block_size, fraction and placement.

        Raises:
            UserError: if a setting is out of its range, or a rule for landmarks.
        """
        if placement not in get_args(Placement):
            raise UserError(
                f"landmarks by {placement} need a token store (data.tokens), and this is a stream (data.corpus): write "
                "one with `metatokens tokenize`."
            )
        super().__init__()
        self._stream = stream
        self._insert = partial(
            insert_meta_tokens,
            meta_token_id=meta_token_id(stream.tokenizer),
            block_size=block_size,
            fraction=fraction,
            placement=cast(Placement, placement),
        )
        self._window_size = block_size - meta_token_count(block_size, fraction, placement)
        self._seed = seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Blocks of `input_ids` and `labels`, each of shape (block_size,).

        Raises:
            UserError: if the corpus cannot be read, or has no block for a reader.
        """
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        reader, readers = process_rank() * workers + number, process_count() * workers
        for epoch in count():
            place = 0
            for place, window in enumerate(self._windows(epoch, reader, readers), start=1):
                generator = np.random.default_rng([self._seed, epoch, reader, place])
                input_ids, labels = self._insert(window, generator=generator)
                yield {"input_ids": input_ids, "labels": labels}
            if place == 0:
                raise UserError(
                    f"the corpus {self._stream.corpus} has too little text for a block of {self._window_size} text "
                    f"tokens for each of {readers} readers (processes x data-loading workers)."
                )

    def _windows(self, epoch: int, reader: int, readers: int) -> Iterator[np.ndarray]:
        tokenizer, size = self._stream.tokenizer, self._window_size
        left: list[int] = []
        for batch in batches(self._documents(epoch, reader, readers), maxsize):
            for ids in encode_documents(tokenizer, batch):
                left += ids
            whole = len(left) // size
            yield from np.array(left[: whole * size]).reshape(whole, size)
            left = left[whole * size :]

    def _documents(self, epoch: int, reader: int, readers: int) -> Iterator[str]:
        size = len(self._stream.parts)
        parts = [self._stream.parts[shuffled(n, size, f"{self._seed} {epoch}")] for n in range(size)]
        by_part = len(parts) >= readers
        for part in parts[reader::readers] if by_part else parts:
            for number, text in enumerate(read_part(self._stream.corpus, part)):
                is_own = by_part or number % readers == reader
                if is_own and not is_held_out(sha256_of(text.encode()), HELD_OUT):
                    yield text
