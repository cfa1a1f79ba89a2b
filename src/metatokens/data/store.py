"""The token store: the ids of a corpus, in files that are read piece by piece.

A store is a folder:

    train/, held_out/   the shards, a file for each part of the corpus: the ids of one document after another (uint16,
                        or uint32 for a larger vocabulary), each with what the tokenizer puts before a text, if
                        anything, and the end-of-text id after it
    tokenizer/          the tokenizer, as `save_pretrained` writes it
    manifest.json       settings, counts and the checksum of every file, including this one; written last, so that it
                        marks a complete store

A process checks a file when it first opens it. So a store of any size opens at once, and no damaged file is read.

`datasets` 5.2 does not replace it, since a kill costs it what was encoded: `Dataset.map` begins with the first document
again, and this store encodes the unfinished parts alone. Nor does `datasets` notice a flipped bit. On one process both
take the same CPU time, within a tenth.
"""

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.files import file_sha256, sha256_of

StoreSplit = Literal["train", "held_out"]
SPLITS: tuple[StoreSplit, ...] = get_args(StoreSplit)
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"

Count = Annotated[int, Field(ge=0, lt=2**48)]
Ids = npt.NDArray[np.unsignedinteger]


class StoreRecord(BaseModel):
    """A part of the manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def shard_name(part: int) -> str:
    """The name of the file with a part's ids."""
    return f"{part:05}.bin"


def id_type(vocab_size: int) -> type[np.unsignedinteger]:
    """The type of the ids of a vocabulary."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class StoreSettings(StoreRecord):
    """Everything that determines a store's content."""

    corpus: str
    tokenizer: str
    held_out: Annotated[float, Field(ge=0, lt=1)]


class Shard(StoreRecord):
    """One file of a split."""

    part: Count  # the part of the corpus, see `corpus_parts`
    documents: Count = 0
    characters: Count = 0  # Unicode code points
    tokens: Count = 0  # without the end-of-text id of each document
    sha256: str

    @property
    def name(self) -> str:
        """The file's name."""
        return shard_name(self.part)

    @property
    def length(self) -> int:
        """How many ids it holds."""
        return self.tokens + self.documents


class SplitCounts(StoreRecord):
    """The sums over a split's shards, in the order of the corpus."""

    documents: int
    characters: int
    tokens: int
    sha256: str  # of the shards' checksums, so equal for equal splits
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> "SplitCounts":
        """Add up the shards."""
        shards = tuple(shards)
        return cls(
            documents=sum(shard.documents for shard in shards),
            characters=sum(shard.characters for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            sha256=sha256_of("".join(shard.sha256 for shard in shards).encode()),
            shards=shards,
        )


class Manifest(StoreRecord):
    """The content of a store, and the settings that it was made with."""

    settings: StoreSettings
    vocab_size: int
    splits: Annotated[dict[StoreSplit, SplitCounts], Field(min_length=len(SPLITS))]
    tokenizer: dict[str, str]  # the checksum of each file
    sha256: str = ""  # of the manifest's text without this value

    def sealed(self) -> bytes:
        """The manifest's text with its checksum."""
        assert not self.sha256
        sealed = self.model_copy(update={"sha256": sha256_of(self._text())})
        return sealed._text()

    def _text(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check the manifest of the store in a folder."""
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
            manifest = cls.model_validate_json(text)
        except OSError as error:
            raise UserError(
                f"{folder} holds no complete token store: {MANIFEST} cannot be read ({error.strerror}); "
                "write the store with `metatokens tokenize`."
            ) from error
        except ValidationError as error:
            raise UserError(f"{path} is not the manifest of a token store.") from error
        if sha256_of(text.replace(manifest.sha256.encode(), b"")) != manifest.sha256:
            raise _damaged(path)
        return manifest


class TokenStore:
    """A complete token store: its `path`, `manifest` and `tokenizer`, and the ids of each split.

    Its manifest is read and checked at once; the other files are checked when they are first read.

    Raises:
        UserError: if there is no complete store at the path, or its manifest is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the ids come from."""
        folder = self.path / TOKENIZER
        for name, checksum in self.manifest.tokenizer.items():
            is_inside = Path(name).name == name
            if not is_inside or not _has_sha256(folder / name, checksum):
                raise _damaged(folder / name)
        return load_tokenizer(str(folder))

    def tokens(self, split: StoreSplit) -> "TokenSequence":
        """The ids of a split: one document after another, each with the end-of-text id."""
        return TokenSequence(self, split)


class TokenSequence:
    """The token ids of one split, read slice by slice.

    Each process checks a shard once. No shard stays open, since a large corpus has more than a process may open.
    """

    def __init__(self, store: TokenStore, split: StoreSplit) -> None:
        self._folder = store.path / split
        self._dtype = id_type(store.manifest.vocab_size)
        self._shards = store.manifest.splits[split].shards
        self._starts = [0, *accumulate(shard.length for shard in self._shards)]
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, window: slice) -> npt.NDArray[np.int64]:
        """The ids of a window; its step is 1."""
        start, stop, _ = window.indices(len(self))
        pieces: list[Ids] = [np.empty(0, np.uint16)]
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            shard_start, shard_end = self._starts[number : number + 2]
            pieces.append(self._read(number, start - shard_start, min(stop, shard_end) - start))
            start = shard_end
            number += 1
        return np.concatenate(pieces).astype(np.int64)

    def _read(self, number: int, start: int, count: int) -> Ids:
        """So many ids of a shard."""
        shard = self._shards[number]
        path = self._folder / shard.name
        size = np.dtype(self._dtype).itemsize
        if number not in self._checked:
            if not _has_sha256(path, shard.sha256) or path.stat().st_size != shard.length * size:
                raise _damaged(path)
            self._checked.add(number)
        return np.fromfile(path, self._dtype, count, offset=start * size)


def _has_sha256(path: Path, checksum: str) -> bool:
    try:
        return file_sha256(path) == checksum
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return False


def _damaged(path: Path) -> UserError:
    """The refusal of a file that differs from the manifest."""
    return UserError(
        f"{path} is missing, cut short or altered: write the store again, with --overwrite."
    )
