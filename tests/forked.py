"""Calls in processes of their own, forked from one that has imported the package, which takes five seconds."""

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

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch warns when the processes of a training end
PATIENCE = 600  # seconds to wait for anything: the machine may have other work
IMPORTED = "metatokens.paper.pools"  # imports nearly everything


class Forked:
    """A call in a new process and process group, with its exit status and its output."""

    def __init__(
        self,
        folder: Path,
        call: Callable[..., None],
        arguments: Sequence[Any],
        environment: Mapping[str, str],
    ):
        self._printed = [folder / "output", folder / "error"]
        self._process = worker_context(IMPORTED).Process(
            target=_carry_out, args=(call, arguments, environment, self._printed)
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self) -> tuple[int, str, str]:
        """Wait for the end; return exit status, standard output and standard error."""
        self._process.join(PATIENCE)
        assert self.status is not None
        return self.status, *(path.read_text(encoding="utf-8") for path in self._printed)

    def kill(self) -> None:
        """Kill this process alone."""
        self._process.kill()

    @property
    def group_is_gone(self) -> bool:
        """Whether no process of the group is left."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def end(self) -> None:
        """Kill what is left of the group."""
        if not self.group_is_gone:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def start_server() -> None:
    """Import the package in the process from which all others are forked."""
    worker_context(IMPORTED)
    forkserver.ensure_running()


def command(*arguments: object) -> None:
    """Run the command `metatokens` in this process."""
    sys.argv = ["metatokens", *map(str, arguments)]
    cli.main()


def _carry_out(
    call: Callable[..., None],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    printed: Sequence[Path],
) -> None:
    gc.freeze()  # imported modules are never garbage
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= environment
    call(*arguments)


Start = Callable[..., list[Forked]]
Run = Callable[..., str]
