"""What the machine gives a process: cores, memory, a place among processes that train together."""

import os


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int | None:
    """Bytes; None where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


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
