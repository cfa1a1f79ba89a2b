"""Writing for keeps: folders that one process has to itself, files that appear at once or not at all, checksums.

A disk may be full, and a process may end while it writes.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from metatokens.errors import UserError

LOCK = ".lock"  # in a folder that a process works in, or has worked in
PARTIAL = ".partial"  # what a file that is being written has at its name's end


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; the lock is the system's, so one that a dead process held is free.

    Raises:
        UserError: if another process works in the folder, or it cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise UserError(f"another process works in {folder}; wait for it, or give another folder.") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}.") from error
    try:
        yield
    finally:
        lock.release()


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file that appears at once, on the disk, in place of the one there; where it cannot be, nothing changes.

    Raises:
        OSError: if it cannot be written.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk, room for others
        raise


def gzipped(content: bytes) -> bytes:
    """Some bytes compressed; the same ones always, since neither a name nor a time is with them."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as file:
        file.write(content)
    return packed.getvalue()


def sha256_of(content: bytes | memoryview) -> str:
    """The checksum of some bytes, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines of JSON to a file: all of them or, where it cannot be written, none.

    Raises:
        OSError: if it cannot be written.
    """
    _end_last_line(path)
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
            if path.is_file():  # and no pipe
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        if path.is_file():
            os.truncate(path, before)
        raise


def _end_last_line(path: Path) -> None:
    """Have the next line begin as one: a record that a dead process left half written is dropped."""
    if not path.is_file():
        return
    with path.open("a+b") as file:
        file.seek(0)
        (last,) = deque(chain([b"\n"], file), maxlen=1)
        if last.endswith(b"\n"):
            return
        try:
            json.loads(last)
        except (ValueError, RecursionError):
            if last.startswith(b"{"):  # no other line is a record
                print(f"{path} ended in half a line, which is dropped.", file=sys.stderr)
                file.truncate(file.tell() - len(last))
                return
        file.write(b"\n")


def name_from(folder: Path, base: str) -> str:
    """The relative path by which a file in `folder` names the folder or file of a base; a name on the Hub stays.

    Others who get the file see no absolute path of its writer. A base that is a link keeps the link's name.
    """
    path = Path(base)
    if not base or not (path.exists() or path.is_absolute()):
        return base
    return Path(os.path.relpath(_placed(path), folder.resolve())).as_posix()


def found_from(folder: Path, name: str) -> str:
    """The path that `name_from` made a name of, if it is there; otherwise the name."""
    return str(_placed(folder / name)) if name and (folder / name).exists() else name


def _placed(path: Path) -> Path:
    """The absolute path. Links to its folder are followed, since the system takes `..` so; a link at its end stays."""
    return path.parent.resolve() / path.name


@contextmanager
def library_writes(target: Path) -> Iterator[None]:
    """Make an OSError of what libraries raise where they write files by themselves and cannot.

    That is SafetensorError, a bare Exception of tokenizers, and torch's RuntimeError, which does not say why. Anything
    else is a mistake in a program, and passes.

    Args:
        target: an existing folder that the files are on the disk of.
    """
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:  # tokenizers has no class of its own
        if type(error) is not Exception and not isinstance(error, SafetensorError | RuntimeError):
            raise
        reason, free = " ".join(str(error).split()), shutil.disk_usage(target).free
        raise OSError(f"{reason}, with {free:,} bytes free on its disk") from error
