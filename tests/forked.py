"""Processes of their own for tests, forked from one that has imported the package: its imports take five seconds."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from metatokens import cli
from metatokens.machine import worker_context

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # processes of one training say that they end
PATIENCE = 600  # seconds, for machines with other work
IMPORTED = "metatokens.paper.pools"  # which imports nearly all


class Forked:
    """A call in a new process and process group: what it prints, and how it ends."""

    def __init__(
        self, folder: Path, call: Callable[..., None], arguments: Sequence[Any], environment: Mapping[str, str]
    ):
        self._printed = [folder / "output", folder / "error"]
        self._process = worker_context(IMPORTED).Process(
            target=_carry_out, args=(call, arguments, environment, self._printed)
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def status(self) -> int | None:
        """How it ended: the exit status, or the signal that ended it, negated; None while it runs."""
        return self._process.exitcode

    def wait(self) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        self._process.join(PATIENCE)
        assert self.status is not None
        return self.status, *(path.read_text(encoding="utf-8") for path in self._printed)

    def kill(self) -> None:
        """Kill this process alone."""
        self._process.kill()

    @property
    def group_is_gone(self) -> bool:
        """Whether no process is left that it started."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def end(self) -> None:
        """Kill the whole group, if there is any."""
        if not self.group_is_gone:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def start_server() -> None:
    """Import the package in the process that all others will be forked from."""
    worker_context(IMPORTED)
    forkserver.ensure_running()


def command(*arguments: object) -> None:
    """The command `metatokens`, as a call."""
    sys.argv = ["metatokens", *map(str, arguments)]
    cli.main()


def _carry_out(
    call: Callable[..., None], arguments: Sequence[Any], environment: Mapping[str, str], printed: Sequence[Path]
) -> None:
    gc.freeze()  # what is imported is no garbage
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= environment
    call(*arguments)


Start = Callable[..., list[Forked]]
Run = Callable[..., str]
