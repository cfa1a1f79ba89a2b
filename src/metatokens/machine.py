"""What the machine gives a process: cores, memory, workers, a place among processes that train together."""

import ctypes
import multiprocessing
import os
import sys
from multiprocessing.context import BaseContext

# Options of glibc's malloc.h with their values. glibc then serves every allocation from its heap, gives nothing back to
# the kernel, and asks the kernel for 256 MiB more than it needs each time.
_MALLOPT = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_TOP_PAD": (-2, 2**28)}


def keep_freed_memory() -> None:
    """Have glibc keep the memory that is freed, since the kernel zeroes each page that it hands out again.

    To be called before torch allocates, in each process that computes. Settings that the user gave glibc hold instead:
    any variable MALLOC_*, or malloc's in GLIBC_TUNABLES. Another C library or a preloaded allocator reads none of this.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _MALLOPT.values():
            mallopt(option, value)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int | None:
    """Bytes; None where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def worker_context(module: str) -> BaseContext:
    """How workers start: on Linux as forks of a process that has imported a module and computes nothing.

    So the imports, which take seconds, are done once for all workers. Elsewhere each worker begins anew, since
    libraries of those systems do not survive a fork.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def process_count() -> int:
    """The processes that torchrun or accelerate started to train together; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_rank() -> int:
    """The number of this one among them, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The number of this one among those on its machine, and of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_first_process() -> bool:
    """Whether this is the first of them, or the only one."""
    return process_rank() == 0
