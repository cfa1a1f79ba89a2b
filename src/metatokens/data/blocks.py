"""The token store, written once and memory-mapped after, and the training blocks cut from it.

A store is a folder:

    train.arrow, held_out.arrow   Arrow IPC files with one column: the ids of all documents in a row, the
                                  end-of-text id after each
    tokenizer/                    the tokenizer, as `save_pretrained` writes it
    manifest.json                 settings, counts, checksums; put there last, so it marks a complete store
"""

import hashlib
import importlib.metadata
import math
import os
import platform
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import read_corpus
from metatokens.data.insertion import Placement, insert_meta_tokens, meta_token_count
from metatokens.data.tokenizer import encode_text, load_tokenizer, meta_token_id
from metatokens.errors import UserError

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
MANIFEST = "manifest.json"
BATCH_CHARACTERS = 400_000  # encoded at a time: enough for every core, and few enough for the next batch to overlap
MAX_HASHED_BYTES = 2**30  # larger files are not hashed on opening, which would take minutes for a full C4


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoreSettings(_Record):
    """What decides a store's content."""

    corpus: str
    tokenizer: str
    held_out: float
    extra_texts_sha256: str | None  # what a trained tokenizer saw beside the corpus
    python: str | None  # of the corpus `builtin`, which is part of it


class SplitCounts(_Record):
    """The size of one split, and the checksum of its file."""

    documents: int
    characters: int  # Unicode code points
    tokens: int  # of text; the file holds one end-of-text id per document more
    sha256: str


class Manifest(_Record):
    """What a store holds, and what it was made from."""

    settings: StoreSettings
    vocab_size: int
    eos_token_id: int
    meta_token_id: int
    splits: Annotated[dict[Split, SplitCounts], Field(min_length=len(SPLITS))]
    metatokens: str  # the version of this package


class TokenSequence:
    """The token ids of one split, memory-mapped: a slice is read when it is asked for.

    Each process opens the file for itself, so this pickles as a path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _column(self) -> pa.ChunkedArray:
        return pa.ipc.open_file(pa.memory_map(str(self._path))).read_all().column(0)

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, window: slice) -> npt.NDArray[np.int64]:
        start, stop, step = window.indices(len(self))
        return self._column.slice(start, max(stop - start, 0)).to_numpy()[::step].astype(np.int64)

    def __reduce__(self) -> tuple[type["TokenSequence"], tuple[Path]]:
        return TokenSequence, (self._path,)


class TokenStore:
    """A complete token store: `path`, `manifest`, `tokenizer`, and the ids of each split."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path) -> "TokenStore":
        """Open a store after checking its files: by checksum up to 1 GiB (a second), by length beyond.

        Raises:
            UserError: if there is no complete store at the path, or one of its files is damaged.
        """
        try:
            manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
        except OSError as error:
            raise UserError(
                f"{path} holds no complete token store: {MANIFEST} cannot be read ({error.strerror}); "
                "write the store with `metatokens tokenize`."
            ) from error
        except ValidationError as error:
            raise UserError(f"{path / MANIFEST} is not the manifest of a token store.") from error
        store = cls(path, manifest)
        for split in SPLITS:
            if not store._is_whole(split):
                raise UserError(
                    f"{path / split}.arrow is missing, cut short or altered: write the store again, with --overwrite."
                )
        return store

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the ids come from."""
        tokenizer = load_tokenizer(str(self.path / "tokenizer"))
        if len(tokenizer) != self.manifest.vocab_size:
            raise UserError(
                f"{self.path / 'tokenizer'} has {len(tokenizer)} entries, "
                f"the store's manifest says {self.manifest.vocab_size}."
            )
        return tokenizer

    def tokens(self, split: Split) -> TokenSequence:
        """The ids of a split, documents in a row, the end-of-text id after each."""
        return TokenSequence(self.path / f"{split}.arrow")

    def _is_whole(self, split: Split) -> bool:
        path, counts = self.path / f"{split}.arrow", self.manifest.splits[split]
        try:
            if path.stat().st_size <= MAX_HASHED_BYTES:
                return _sha256(path) == counts.sha256
            return len(self.tokens(split)) == counts.tokens + counts.documents
        except (OSError, pa.ArrowInvalid):
            return False


def write_token_store(
    out: Path,
    corpus_spec: str,
    tokenizer_spec: str,
    *,
    held_out: float = 0.05,
    extra_texts: Iterable[str] = (),
    overwrite: bool = False,
) -> TokenStore:
    """Encode a corpus once, or open the store that already holds it.

    A document is held out if the SHA-256 of its text, read as a fraction, is below `held_out`, so copies of
    a text are on one side. Of the first two distinct documents the first is always for training and the
    second always held out, so that neither split is empty.

    The store's parts are built in a subfolder and moved into place when all are complete. Whether the files
    behind a corpus spec changed since is not looked at.

    Args:
        out: the store's folder.
        corpus_spec: see `read_corpus`.
        tokenizer_spec: see `load_tokenizer`.
        held_out: the share of documents that is held out, between 0 and 1.
        extra_texts: see `load_tokenizer`.
        overwrite: replace the store that the folder holds, if any.

    Raises:
        UserError: if the corpus or the tokenizer cannot be had, the corpus has no text, the folder cannot be
            written, or it holds a store with other settings and `overwrite` is not set.
    """
    if not 0 < held_out < 1:
        raise UserError(f"the held-out share is {held_out}, but must lie between 0 and 1.")
    texts = list(extra_texts) if tokenizer_spec.startswith("train:") else []
    settings = StoreSettings(
        corpus=corpus_spec,
        tokenizer=tokenizer_spec,
        held_out=held_out,
        extra_texts_sha256=hashlib.sha256("\0".join(texts).encode()).hexdigest() if texts else None,
        python=platform.python_version() if corpus_spec == "builtin" else None,
    )
    if (out / MANIFEST).exists() and not overwrite:
        store = TokenStore.open(out)
        if store.manifest.settings != settings:
            raise UserError(
                f"{out} holds a token store made with other settings ({store.manifest.settings}): "
                "choose another folder, or --overwrite."
            )
        return store
    staging, is_new = out / ".partial", not out.exists()
    # A store that was cut off while it was built or moved into place has left its staging folder.
    is_store = (out / MANIFEST).exists() or staging.exists()
    if out.is_dir() and any(out.iterdir()) and not is_store and not overwrite:
        raise UserError(f"{out} is not empty and holds no token store: choose another folder, or --overwrite.")
    if next(read_corpus(corpus_spec), None) is None:
        raise UserError(f"the corpus {corpus_spec} holds no text.")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            _build(staging, settings, texts)
        except BaseException:
            shutil.rmtree(out if is_new else staging)
            raise
        (out / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(out / "tokenizer", ignore_errors=True)
        for name in (*(f"{split}.arrow" for split in SPLITS), "tokenizer", MANIFEST):
            os.replace(staging / name, out / name)
        staging.rmdir()
    except OSError as error:
        raise UserError(f"the token store {out} cannot be written: {error}.") from error
    return TokenStore.open(out)


def _build(folder: Path, settings: StoreSettings, extra_texts: Sequence[str]) -> None:
    tokenizer = load_tokenizer(settings.tokenizer, corpus=read_corpus(settings.corpus), extra_texts=extra_texts)
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest = Manifest(
        settings=settings,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        meta_token_id=meta_token_id(tokenizer),
        splits=_write_splits(folder, read_corpus(settings.corpus), tokenizer, settings.held_out),
        metatokens=importlib.metadata.version("metatokens"),
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _write_splits(
    folder: Path, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, held_out: float
) -> dict[Split, SplitCounts]:
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    schema = pa.schema([("ids", pa.from_numpy_dtype(dtype))])
    side = _held_out_rule(held_out)
    counts: dict[Split, Counter[str]] = {split: Counter(documents=0, characters=0, tokens=0) for split in SPLITS}
    with ExitStack() as stack:
        writers = {}
        for split in SPLITS:
            file = stack.enter_context(pa.OSFile(str(folder / f"{split}.arrow"), "wb"))
            writers[split] = stack.enter_context(pa.ipc.new_file(file, schema))
        for batch, encoded in _encoded_batches(documents, tokenizer):
            ids: dict[Split, list[list[int]]] = {split: [] for split in SPLITS}
            for text, text_ids in zip(batch, encoded, strict=True):
                split = side(text)
                ids[split].append([*text_ids, tokenizer.eos_token_id])
                counts[split].update(documents=1, characters=len(text), tokens=len(text_ids))
            for split in SPLITS:
                column = np.fromiter(chain.from_iterable(ids[split]), dtype)
                writers[split].write_batch(pa.record_batch([column], schema=schema))
    return {split: SplitCounts(**counts[split], sha256=_sha256(folder / f"{split}.arrow")) for split in SPLITS}


def _encoded_batches(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Batches of texts with their ids; the next batch is encoded, outside Python, while this one is in use."""
    with ThreadPoolExecutor(1) as thread:
        ahead: deque[tuple[list[str], Future[list[list[int]]]]] = deque()
        for batch in _batches(documents):
            ahead.append((batch, thread.submit(encode_text, tokenizer, batch)))
            if len(ahead) == 2:
                texts, ids = ahead.popleft()
                yield texts, ids.result()
        for texts, ids in ahead:
            yield texts, ids.result()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _held_out_rule(held_out: float) -> Callable[[str], Split]:
    settled: dict[bytes, Split] = {}  # the first two distinct documents

    def side(text: str) -> Split:
        digest = hashlib.sha256(text.encode()).digest()
        if len(settled) < len(SPLITS):
            settled.setdefault(digest, SPLITS[len(settled)])
        below = int.from_bytes(digest[:8]) < held_out * 2**64
        return settled.get(digest, "held_out" if below else "train")

    return side


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
