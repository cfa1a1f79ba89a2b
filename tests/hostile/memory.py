"""How much memory a call takes, in a process of its own, where nothing that was taken and freed before hides it."""

import resource
from collections.abc import Callable
from typing import Any


def print_growth(call: Callable[..., object], *arguments: Any) -> None:
    """Call, and print by how many KiB the most memory that this process had has grown meanwhile."""
    before = _most_memory()
    call(*arguments)
    print(_most_memory() - before, flush=True)


def _most_memory() -> int:
    """The most memory that this process had, in KiB; a forked one begins with what it has then."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
