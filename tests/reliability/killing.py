"""Runs commands again and again, killed at random moments, until they have done their work.

Standard input has a plan a line, in JSON. It says the command's `arguments`, how many `kills`, the `seed` of their
moments, and the `seconds` that the command takes undisturbed; or, in place of moments, `inside`: a function, as
`module:name`, in whose n-th call (`call`) the process kills itself, having done half of the call's work where it writes
a file. Every try is a fork of this process, which has imported everything before, so that a kill hits the work and not
the imports. How the tries ended is written to standard output, a line a plan; what they printed, to the file that the
plan names (`said`).
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metatokens.analysis.rate_distortion
import metatokens.data.blocks
import metatokens.evaluation.accuracy
import metatokens.training.extend
import metatokens.training.finetune  # noqa: F401
from metatokens.cli import main


def die_inside(target: str, call: int) -> None:
    """Make the process kill itself in a call of a function."""
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
            result = function(*args, **kwargs)
            path = Path(args[1] if len(args) > 1 else kwargs["filename"])
            os.truncate(path, path.stat().st_size // 2)
            del result
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dying)


def attempt(arguments: list[str], said: Path, *, inside: str | None = None, call: int = 1) -> int:
    """Begin a try in a process of its own."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if inside is not None:
            die_inside(inside, call)
        sys.argv = ["metatokens", *arguments]
        status = 1
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0) if not isinstance(end.code, str) else 1
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def carry_through(plan: dict[str, Any]) -> dict[str, Any]:
    """Kill as often as the plan says, as far as the work lasts; then let it end."""
    draw, said = random.Random(plan.get("seed", 0)), Path(plan["said"])
    killed = 0
    while True:
        may_kill = killed < plan["kills"]
        inside = plan.get("inside") if may_kill else None
        pid = attempt(plan["arguments"], said, inside=inside, call=plan.get("call", 1))
        if may_kill and inside is None:
            time.sleep(draw.uniform(0, plan["seconds"]))
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        else:
            return {"killed": killed, "status": os.waitstatus_to_exitcode(status)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(carry_through(json.loads(line))), flush=True)
