"""What the machine gives a process: cores, memory, a folder to itself, a place among processes that train together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metatokens.errors import UserError

LOCK = ".lock"  # in a folder that a process works in; says nothing about what the folder holds


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int | None:
    """Bytes; None where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def process_count() -> int:
    """The processes that torchrun or accelerate started to train together; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the first of those, or the only one."""
    return os.environ.get("RANK", "0") == "0"


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
