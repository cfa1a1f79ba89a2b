"""Files that survive a crash: locks on folders, files that appear whole or not at all, checksums, relative paths.

A disk may be full, and a process may be killed while it writes. `write_whole` and `append_lines` raise OSError where
they cannot; `exclusive` and `replace_same_kind` raise UserError.
"""

import hashlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from metatokens.errors import UserError, one_line

LOCK = ".lock"  # in a folder that a process works in, or has worked in
GZIP = b"\x1f\x8b"  # the first bytes of a compressed file, and of no text
PARTIAL = ".partial"  # suffix of a file that is being written
LONGEST_LINE = 2**28  # bytes that are read to see whether a file has lines of JSON
# Exceptions that this package or transformers may raise when a file is damaged or hostile.
DAMAGED = (
    OSError,
    ValueError,
    RecursionError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder. The lock is the system's: when a process dies, its lock is released."""
    from filelock import FileLock, Timeout

    try:
        lock = FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout as error:
        raise UserError(
            f"another process works in {folder}; wait for it, or give another folder."
        ) from error
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}.") from error
    with lock:
        yield


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically and flush it to the disk. On an error the file that was there stays."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # frees room on a full disk
        raise


def replace_same_kind(path: Path, content: bytes, signature: bytes) -> None:
    """Write a file, but never over one of another kind, which somebody else wrote.

    Args:
        path: the file.
        content: its new content.
        signature: bytes that every file of its kind holds.
    """
    try:
        if path.exists() and signature not in path.read_bytes():
            raise UserError(f"{path} is another kind of file, and is kept; give another name.")
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}.") from error


def read_json(path: Path, max_bytes: int) -> Any:
    """The content of a JSON file of at most `max_bytes`; raises one of DAMAGED if it is larger or not JSON."""
    if path.stat().st_size > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return json.loads(path.read_bytes())


def sha256_of(content: bytes | memoryview) -> str:
    """The SHA-256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines of JSON to a file: all of them or, on an error, none.

    All lines are made before the file is touched, since other processes may append to it meanwhile.

    Raises:
        UserError: if the file is of another kind.
        OSError: if the file cannot be written.
    """
    check_lines(path)
    text = "".join(f"{line}\n" for line in lines)
    _end_last_line(path)
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            if path.is_file():  # not a pipe
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        if path.is_file():
            os.truncate(path, before)
        raise


def check_lines(path: Path) -> None:
    """Refuse a file that holds something other than lines of JSON; a new file and a pipe may be written.

    Raises:
        UserError: if the file is compressed, or is to be by its name, or its first line is no JSON object.
        OSError: if the file cannot be read.
    """
    first = b""
    if path.is_file():
        with path.open("rb") as file:
            first = file.readline(LONGEST_LINE)
    if path.suffix == ".gz" or first.startswith(GZIP):
        raise UserError(f"{path} is compressed: no line can be appended to it; give another name.")
    if first and not _is_object(first):
        raise UserError(f"{path} is another kind of file, and is kept; give another name.")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _end_last_line(path: Path) -> None:
    """End a file's last line, or drop it if it is half a record that a killed process left."""
    if not path.is_file():
        return
    with path.open("a+b") as file:
        file.seek(0)
        (last,) = deque(chain([b"\n"], file), maxlen=1)
        if last.endswith(b"\n"):
            return
        if last.startswith(b"{") and not _is_object(last):  # only records start so
            print(f"{path} ended in half a line, which is dropped.", file=sys.stderr)
            file.truncate(file.tell() - len(last))
        else:
            file.write(b"\n")


def relative_base_name(folder: Path, base: str) -> str:
    """How a file in `folder` names a base: the relative path of a folder or file, or the name on the Hub unchanged.

    So a published file does not show an absolute path of the machine that wrote it. A base that is a symbolic link
    keeps the link's name.
    """
    path = Path(base)
    if not base or not (path.exists() or path.is_absolute()):
        return base
    return Path(os.path.relpath(_resolved(path), folder.resolve())).as_posix()


def resolve_base(folder: Path, name: str) -> str:
    """The path that `relative_base_name` gave the name for, if it exists; otherwise the name."""
    return str(_resolved(folder / name)) if name and (folder / name).exists() else name


def _resolved(path: Path) -> Path:
    """The absolute path, with links in its parents resolved, as the system resolves `..`; a link at its end stays."""
    return path.parent.resolve() / path.name


@contextmanager
def library_writes(target: Path) -> Iterator[None]:
    """Turn what libraries raise when they cannot write into an OSError.

    safetensors raises SafetensorError, tokenizers a bare Exception, and torch a RuntimeError without a reason. All
    other exceptions pass.

    Args:
        target: an existing folder on the disk that is written to.
    """
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:  # tokenizers has no class of its own
        if type(error) is not Exception and not isinstance(error, SafetensorError | RuntimeError):
            raise
        free = shutil.disk_usage(target).free
        raise OSError(f"{one_line(error)}, with {free:,} bytes free on its disk") from error
