"""The folder of a run: used by one process at a time, and resumed only with the same settings."""

import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from metatokens.checkpoint import MANIFEST, verify_manifest, with_its_base
from metatokens.differences import differences
from metatokens.errors import UserError
from metatokens.files import LOCK, PARTIAL, exclusive, write_whole
from metatokens.machine import is_first_process, process_count

SETTINGS = "settings.json"
PATIENCE = 300  # seconds; if the first process fails, torchrun ends the others sooner


@contextmanager
def open_run(
    out: Path,
    settings: dict[str, Any],
    *,
    overwrite: bool = False,
    inputs: Iterable[Path | None] = (),
) -> Iterator[bool]:
    """Make `out` the folder of a run with these settings, and lock it against other processes.

    The operating system holds the lock, so it is free once its owner is dead. If several processes train one model, the
    first one holds it for all.

    Args:
        out: a new or empty folder, or one of a run with the same settings, which is resumed.
        settings: everything that determines the result; compared with `settings.json`, or written to it.
        overwrite: replace what is there.
        inputs: what the run reads; `overwrite` would remove those in `out`.

    Yields:
        Whether the run is finished already.

    Raises:
        UserError: if the folder holds something else, a run with other settings, or a lock, or cannot be used; or if
            `overwrite` would remove an input.
    """
    if overwrite:
        check_overwriting(out, inputs)
    settings = json.loads(json.dumps(settings, default=str))
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Before anything is written to a folder that holds other things.
        _check(out, settings, overwrite)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{out} cannot be used as a run folder: {error}.") from error
    with exclusive(out) if is_first_process() else nullcontext():
        try:
            if is_first_process():
                _prepare(out, settings, overwrite)
            else:
                _wait_for_settings(out)
            yield is_finished(out)
        except OSError as error:
            raise UserError(
                f"the run in {out} stopped: {error}; the same command resumes it."
            ) from error


def is_finished(out: Path) -> bool:
    """Whether a folder holds a whole model, and no damaged one."""
    if not (out / MANIFEST).exists():
        return False
    try:
        verify_manifest(out)
    except UserError as error:
        if is_first_process():
            print(
                f"{error} The model is written again, from the last checkpoint if there is one.",
                file=sys.stderr,
            )
        return False
    return True


def check_overwriting(out: Path, inputs: Iterable[Path | None]) -> None:
    """Refuse to replace what is in a folder where that cannot be done, or would remove what the run reads.

    Raises:
        UserError: if it cannot.
    """
    for path in chain.from_iterable(map(with_its_base, filter(None, inputs))):
        if path.resolve().is_relative_to(out.resolve()):
            raise UserError(
                f"--overwrite would remove {path}, which this run reads; give another folder than {out}."
            )
    if process_count() > 1:
        raise UserError(
            f"several processes cannot replace a run together: remove {out} if it is there, and leave --overwrite out."
        )


def _check(out: Path, settings: dict[str, Any], overwrite: bool) -> None:
    # Read once, since the first process may be writing the settings.
    names = {path.name for path in out.iterdir()}
    if SETTINGS in names:
        before = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
        if not (isinstance(before, dict) and before.keys() & {*settings, "recipe", "preset"}):
            raise UserError(
                f"{out} cannot be used as a run folder: its {SETTINGS} holds no settings of a run."
            )
        if not overwrite:
            _compare(out, before, settings)
    elif names - {SETTINGS + PARTIAL, LOCK}:
        raise UserError(f"{out} is not empty and holds no run; give a new folder.")


def _prepare(out: Path, settings: dict[str, Any], overwrite: bool) -> None:
    if overwrite:
        # The settings last, so that an interrupted removal leaves a folder that is still a run's.
        for path in sorted(out.iterdir(), key=lambda path: path.name == SETTINGS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    if not (out / SETTINGS).exists():
        write_whole(out / SETTINGS, json.dumps(settings, indent=1).encode())


def _wait_for_settings(out: Path) -> None:
    """Wait until the first process has written the settings: it would refuse a folder in which it finds other files."""
    end = time.monotonic() + PATIENCE
    while not (out / SETTINGS).exists():
        if time.monotonic() > end:
            raise UserError(
                f"the first of this run's processes has not begun in {out} for {PATIENCE} seconds."
            )
        time.sleep(0.05)


def _compare(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, old, new in differences(before, now):
        raise UserError(
            f"{out} holds a run with other settings ({' '.join(name.split())} was {old!r} and is now {new!r}); "
            "give a new folder, or --overwrite to replace it."
        )


def training_of(folder: Path) -> dict[str, Any]:
    """How the model in `folder` was trained, as fields of a result; empty if no run wrote it.

    Returns:
        `seed`; if the model was fine-tuned on a task, also `train_length` (tokens) and `train_condition`.
    """
    folder = folder.resolve()  # `.` and links have another name and another parent
    # Pretraining writes its model to the run's folder, fine-tuning each phase to a folder inside it.
    for run_folder in (folder, folder.parent):
        try:
            run = json.loads((run_folder / SETTINGS).read_text(encoding="utf-8"))
            recipe = run["recipe"]
            fields = {"seed": recipe["training"]["seed"]}
            if "task" in run:  # rather than on a user's own records
                fields["train_condition"] = recipe["task"]["condition"]
                fields["train_length"] = int(folder.name) if folder.name.isdecimal() else None
            return fields
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return {}
