"""Documents of text: from this Python installation, from files, or streamed from the Hugging Face Hub.

Every source is read as a stream, so memory holds about one document at a time (only `builtin`, 2 MB, is kept).
Documents without text are skipped.
"""

import ast
import glob
import gzip
import json
import os
import sysconfig
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any, NamedTuple

from metatokens.errors import UserError, one_line

if TYPE_CHECKING:
    from datasets import IterableDataset

BUILTIN = "builtin"
HUB = "hf:"

SKIPPED_PACKAGES = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
MIN_DOCSTRINGS = 200  # characters; a module with less documentation makes no document

# A text file is cut at the first blank line after SOFT_CUT characters or, if there is none, at the first line end after
# HARD_CUT. So any long file has several documents, and memory stays bounded.
SOFT_CUT, HARD_CUT = 8_000, 64_000

PART_BYTES = 2**26  # small files are grouped into parts of about this size


class Part(NamedTuple):
    """A piece of a corpus: some of its files, or one shard of a dataset."""

    files: tuple[str, ...] = ()
    # For each file its bytes, and when it was last changed, in nanoseconds.
    states: tuple[tuple[int, int], ...] = ()
    number: int = 0  # of the shard
    shards: int = 1  # of the dataset


def read_corpus(spec: str) -> Iterator[str]:
    """The documents of a corpus, in a fixed order.

    Args:
        spec: one of

            - `builtin`: the reference topics and the standard library's docstrings in the files of this Python
              installation, with a document for each topic and module (so it differs between versions);
            - a file, or a glob (`**` included) of files in sorted order. `.jsonl`: a document per line, in the field
              `text`. `.txt`: one long text, cut at blank lines into documents of at least 8,000 characters, or, if
              there is none, at a line end after 64,000, so that even a single book has a held-out split; joined, the
              documents are the file. `.txt.gz`, `.jsonl.gz` and `.json.gz` (also JSON lines): the same, compressed;
            - `hf:NAME` or `hf:NAME:CONFIG`: the field `text` of the train split of a dataset on the Hugging Face Hub or
              in a local folder, such as one of Parquet files, streamed.

    Raises:
        UserError: at once, if the spec names no file, or a file of an unknown kind; while reading, if a source cannot
            be read or a document is not as described above. The message names the file.
    """
    return read_part(spec, Part(tuple(files_of(spec))))


def corpus_parts(spec: str) -> list[Part]:
    """Divide a corpus into parts for parallel reading; one after another, they are the corpus.

    A part is one shard of a dataset (C4 has 1,024), or successive files that begin within the same 64 MiB of the
    corpus. `builtin` is one part. The parts differ if a file of the corpus was changed, added or removed.
    """
    if spec == BUILTIN:
        return [Part()]
    if spec.startswith(HUB):
        with _reading(spec):
            count = _open_dataset(spec).num_shards
        return [Part(number=number, shards=count) for number in range(count)]
    files_by_start: dict[int, list[tuple[str, tuple[int, int]]]] = defaultdict(list)
    start = 0
    for file in files_of(spec):
        status = Path(file).stat()
        state = status.st_size, status.st_mtime_ns
        files_by_start[start // PART_BYTES].append((file, state))
        start += status.st_size
    parts = []
    for files in files_by_start.values():
        names, states = zip(*files, strict=True)
        parts.append(Part(names, states))
    return parts


def read_part(spec: str, part: Part) -> Iterator[str]:
    """The documents of one part of a corpus, in order."""
    if spec == BUILTIN:
        return iter(_builtin())
    if spec.startswith(HUB):
        documents = _dataset(spec, part)
    else:  # a list: a file of an unknown kind is refused before any is read
        documents = chain.from_iterable([_documents_of(file) for file in part.files])
    return (document for document in documents if document and not document.isspace())


@cache  # parsing the standard library takes seconds, and a run reads its corpus more than once
def _builtin() -> tuple[str, ...]:
    modules = map(_docstrings, _sources(Path(sysconfig.get_path("stdlib"))))
    return (*topics.values(), *(text for text in modules if len(text) >= MIN_DOCSTRINGS))


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_PACKAGES)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _docstrings(path: Path) -> str:
    with warnings.catch_warnings(action="ignore"):  # invalid escape sequences in old modules
        tree = ast.parse(path.read_bytes())
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    # The module has no line and comes first.
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def files_of(spec: str) -> list[str]:
    """The files of a corpus; none if it has another source."""
    if spec == BUILTIN or spec.startswith(HUB):
        return []
    path = os.path.expanduser(spec)
    matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    files = list(filter(os.path.isfile, matches))
    for file in files:
        if file != file.encode(errors="replace").decode():
            raise UserError(f"the name of the corpus file {file!r} is not UTF-8; rename it.")
    if not files:
        raise UserError(
            f"no file matches the corpus {spec}: give builtin, a file, a glob or hf:NAME:CONFIG."
        )
    return files


def _documents_of(file: str) -> Iterator[str]:
    for suffix, read in READERS.items():
        if file.lower().endswith(suffix):
            return read(Path(file))
    raise UserError(
        f"{file} is not a corpus file: the name must end in one of {', '.join(READERS)}."
    )


def _text_file(path: Path) -> Iterator[str]:
    lines: list[str] = []
    size = 0  # without the white space around lines, so that every document has text
    for line in _lines(path):
        paragraph_starts = bool(lines) and lines[-1].isspace() and not line.isspace()
        if size >= HARD_CUT or (size >= SOFT_CUT and paragraph_starts):
            yield "".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line.strip())
    yield "".join(lines)


def _json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.isspace():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number} is not JSON: {error}.") from error
            yield _text(record, f"{path}, line {number}")


def _lines(path: Path) -> Iterator[str]:
    r"""The lines of a UTF-8 file, with their line ends: `\n`, `\r\n`, or `\r` as in old files of Macs."""
    open_text = gzip.open if path.suffix.lower() == ".gz" else open
    with _reading(path), open_text(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield from file


READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": _text_file,
    ".txt.gz": _text_file,
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json.gz": _json_lines,
}


def _dataset(spec: str, part: Part) -> Iterator[str]:
    source = f"{spec}, shard {part.number + 1} of {part.shards}"
    with _reading(source):
        rows = _open_dataset(spec).shard(num_shards=part.shards, index=part.number)
        for number, row in enumerate(rows, start=1):
            yield _text(row, f"{source}, row {number}")


def _open_dataset(spec: str) -> "IterableDataset":
    from datasets import load_dataset

    name, _, config = spec.removeprefix(HUB).partition(":")
    return load_dataset(name, config or None, split="train", streaming=True)


def _text(record: Any, source: str) -> str:
    try:
        text: str = record["text"]
        text.encode()  # fails for half a surrogate pair, which JSON can contain
    except (LookupError, TypeError, AttributeError, UnicodeEncodeError) as error:
        raise UserError(f'{source} has no text in its field "text".') from error
    return text


@contextmanager
def _reading(source: object) -> Iterator[None]:
    """Raise the errors of the libraries that read a source as UserError."""
    try:
        yield
    except UserError:
        raise
    # gzip raises EOFError or zlib.error for a damaged file; datasets, the others.
    except (OSError, ValueError, LookupError, EOFError, RuntimeError, zlib.error) as error:
        raise UserError(f"{source} cannot be read: {one_line(error)}.") from error
