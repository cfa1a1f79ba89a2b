"""The machine and the process: cores, memory, worker processes, and the rank in distributed training."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any

# Options of glibc's malloc.h (M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD) with their values: serve every allocation from
# the heap, return nothing to the kernel, and ask the kernel for 256 MiB more than is needed each time.
_MALLOPT = ((-4, 0), (-1, -1), (-2, 2**28))


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, since the kernel zeroes each page that it hands out again.

    Call it before torch allocates, in each process that computes. The user's own settings take precedence: any variable
    MALLOC_*, or malloc's in GLIBC_TUNABLES. Another C library or a preloaded allocator ignores all of this.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    for option, value in _MALLOPT:
        _call_glibc("mallopt", option, value)


def return_freed_memory() -> None:
    """Give the kernel the free pages of glibc's heap, which fragments if tensors have ever other sizes."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *args: int) -> None:
    """Call a function that only glibc has; do nothing with another C library."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*args)


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has_fast_bfloat16() -> bool:
    """Whether this machine computes in bfloat16 faster than in float32."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()


def worker_context(module: str) -> BaseContext:
    """How to start workers: on Linux as forks of a server process that has imported a module and computes nothing.

    The imports, which take seconds, then happen once for all workers. Elsewhere each worker is spawned, since system
    libraries do not survive a fork.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def end_with_parent(*watched: connection.Connection) -> None:
    """Have a worker process exit when its parent does, and ignore Ctrl-C, which its parent handles.

    Args:
        watched: ends of pipes; the worker exits too when the other end of one is closed.
    """
    # Ctrl-C reaches every process of the terminal. A worker that it ended could make the parent report a broken pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinels: list[Any] = [parent.sentinel, *watched]

    def wait() -> None:
        connection.wait(sentinels)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def process_count() -> int:
    """How many processes torchrun or accelerate started to train together; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process, and of its GPU, on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_first_process() -> bool:
    """Whether this is the first process of a distributed training, or the only one."""
    return os.environ.get("RANK", "0") == "0"
