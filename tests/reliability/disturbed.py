"""Runs commands, each in a fork of this process: killed at random moments, or with faults.

Reads one plan a line from standard input, in JSON, and writes to standard output how it ended. A plan has the
command's `arguments`, and

- `faults`: functions of this file to call first, by name, each with its arguments;
- `kills`: how often to kill the command and run it again before it may end. The moments are drawn by `seed` from the
  first `seconds`; or else `inside` names a function, as `module:name`, and a number: in that call of it the process
  kills itself, halfway through if the call writes a file.

A plan with `shell` instead of arguments is a line for the shell. This process imports everything first, so that a
kill hits the work and not the imports.
"""

import ctypes
import gc
import importlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import metatokens.analysis.rate_distortion
import metatokens.data.blocks
import metatokens.evaluation.accuracy
import metatokens.training.extend
import metatokens.training.finetune  # noqa: F401
from metatokens import records
from metatokens.cli import main
from metatokens.paper import pools, presets
from metatokens.training.trainer import RunCallback
from tests.paper import tiny_preset

DAY = 86_400  # seconds


# --- faults


def die_inside(target: str, call: int) -> None:
    """Make the process kill itself in the given call of a function."""
    module_name, name = target.split(":")
    module = importlib.import_module(module_name)
    function: Callable[..., Any] = getattr(module, name)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call:
            return function(*args, **kwargs)
        if name == "safe_save_file":  # half of a weights file
            function(*args, **kwargs)
            path = Path(args[1] if len(args) > 1 else kwargs["filename"])
            os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dying)


def no_room(at: str, room: int) -> None:
    """Limit the growth of files to `room` bytes, once a file is written or a folder made whose path contains `at`."""

    def limit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir") or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        is_written = event == "os.mkdir" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_written and isinstance(path, str) and at in path:
            # A file that is appended to already has a size.
            size = os.stat(path).st_size if os.path.isfile(path) else 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))

    sys.addaudithook(limit)


def unprivileged() -> None:
    """Give up the superuser's right to write where permissions forbid it, also in programs started from here."""
    libc, without_privileges = ctypes.CDLL(None), 1
    # PR_SET_SECUREBITS; refused to other users, who do not need it.
    libc.prctl(28, without_privileges, 0, 0, 0)
    assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0


def clock_goes_back() -> None:
    """Set the clock back by a day at every look at it; date later checkpoints earlier, too."""
    true_time, looks, save = time.time, itertools.count(), RunCallback.on_save
    time.time = lambda: true_time() - DAY * next(looks)
    time.time_ns = lambda: int(time.time() * 1e9)

    class Backwards(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.fromtimestamp(time.time(), tz)

    def save_earlier(self: RunCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for path in Path(args.output_dir).glob("checkpoint-*"):
            when = 2_000_000_000 - DAY * int(path.name.removeprefix("checkpoint-"))
            os.utime(path, (when, when))
        save(self, args, state, control, **kwargs)

    records.datetime = Backwards
    RunCallback.on_save = save_earlier


def tiny_plan(corpus: str, workers: str) -> None:
    """Make `reproduce --preset tiny` a plan of seconds, whose workers are `threads`, or processes as usual."""
    presets.PRESETS = {"tiny": tiny_preset.tiny(corpus)}
    if workers == "threads":

        def in_a_thread(
            size: int, context: object, start: object, arguments: tuple[Any, ...]
        ) -> ThreadPoolExecutor:
            return ThreadPoolExecutor(
                1, initializer=setattr, initargs=(pools, "_reports", arguments[0])
            )

        pools.ProcessPoolExecutor = in_a_thread


# --- commands


def begin(arguments: list[str], faults: dict[str, list[Any]]) -> tuple[int, int]:
    """Start a command in a process of its own; return its id, and a pipe with its output, which no limit cuts."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.closerange(read, write + 1)
        sys.argv = ["metatokens", *arguments]
        status = 1
        try:
            for name, values in faults.items():
                globals()[name](*values)
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0) if not isinstance(end.code, str) else 1
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.setpgid(pid, pid)  # both processes do this: either may be first
    os.close(write)
    return pid, read


def carry_through(plan: dict[str, Any]) -> dict[str, Any]:
    """Kill the command as often as planned, while it has work to do; then let it end."""
    draw, killed, said = random.Random(plan["seed"]), 0, ""
    while True:
        may_kill = killed < plan["kills"]
        inside = {"die_inside": plan["inside"]} if may_kill and plan["inside"] else {}
        pid, pipe = begin(plan["arguments"], plan["faults"] | inside)
        if may_kill and not inside:
            killer = threading.Timer(
                draw.uniform(0, plan["seconds"]), os.killpg, (pid, signal.SIGKILL)
            )
            killer.start()
        with open(pipe, errors="replace") as text:
            said += text.read()
        if may_kill and not inside:
            killer.join()  # a command that has ended can still be killed until it is waited for
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            return {"killed": killed, "status": os.waitstatus_to_exitcode(status), "said": said}
        killed += 1


if __name__ == "__main__":
    gc.freeze()  # imported modules are never garbage
    for line in sys.stdin:
        plan = json.loads(line)
        if "shell" in plan:
            print(json.dumps(subprocess.run(plan["shell"], shell=True).returncode), flush=True)
        else:
            print(json.dumps(carry_through(plan)), flush=True)
