"""The folder of a run: its settings, and one process at a time."""

import itertools
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metatokens.checkpoint import write_manifest
from metatokens.errors import UserError
from metatokens.training import run_folder
from metatokens.training.run_folder import open_run, training_of
from tests.forked import Forked

SETTINGS = {"verb": "pretrain", "recipe": {"training": {"seed": 0, "max_steps": 5}}, "init": None}


def is_finished(out: Path, settings: dict[str, Any], **options: Any) -> bool:
    with open_run(out, settings, **options) as finished:
        return finished


def test_a_new_folder_gets_its_settings_and_the_same_settings_resume(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    assert is_finished(out, SETTINGS) is False
    assert json.loads((out / "settings.json").read_text()) == SETTINGS
    (out / "curve.jsonl").write_text("kept")
    assert is_finished(out, SETTINGS) is False
    write_manifest(out)
    assert is_finished(out, SETTINGS) is True
    (out / "curve.jsonl").write_text("damaged")
    assert is_finished(out, SETTINGS) is False
    (out / "curve.jsonl").write_text("kept")
    assert (out / "curve.jsonl").read_text() == "kept"


def test_overwrite_keeps_what_the_run_reads_and_folders_of_others(tmp_path: Path) -> None:
    out = tmp_path / "run"
    is_finished(out, SETTINGS)
    (out / "own.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to(out, target_is_directory=True)
    for path in (
        out / "own.jsonl",
        tmp_path / "link" / "own.jsonl",
        out / "sub" / ".." / "own.jsonl",
        out,
    ):
        with pytest.raises(
            UserError,
            match=r"--overwrite would remove .*, which this run reads; give another folder",
        ):
            is_finished(out, SETTINGS, overwrite=True, inputs=[None, path])
    assert (out / "own.jsonl").exists()
    foreign = tmp_path / "editor"
    foreign.mkdir()
    (foreign / "settings.json").write_text('{"editor.fontSize": 12}')
    with pytest.raises(UserError, match=r"its settings\.json holds no settings of a run"):
        is_finished(foreign, SETTINGS, overwrite=True)
    assert (foreign / "settings.json").read_text() == '{"editor.fontSize": 12}'


def test_another_process_waits_for_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(run_folder, "PATIENCE", 0.2)
    with pytest.raises(UserError, match="the first of this run's processes has not begun"):
        is_finished(out, SETTINGS)
    assert list(out.iterdir()) == []
    monkeypatch.setattr(run_folder, "PATIENCE", 60)
    writing = threading.Timer(0.2, lambda: (out / "settings.json").write_text(json.dumps(SETTINGS)))
    writing.start()
    assert is_finished(out, SETTINGS) is False
    writing.join()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"verb": "finetune"}, "verb was 'pretrain' and is now 'finetune'"),
        ({"recipe": {"training": {"seed": 0}}}, "recipe.training.max_steps was 5 and is now None"),
    ],
)
def test_other_settings_are_refused_and_named(
    other: dict[str, object], difference: str, tmp_path: Path
) -> None:
    is_finished(tmp_path / "run", SETTINGS)
    (tmp_path / "run" / "curve.jsonl").write_text("kept")
    with pytest.raises(UserError, match="holds a run with other settings") as caught:
        is_finished(tmp_path / "run", SETTINGS | other)
    assert difference in str(caught.value)
    assert json.loads((tmp_path / "run" / "settings.json").read_text()) == SETTINGS
    assert (tmp_path / "run" / "curve.jsonl").read_text() == "kept"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_other_things_is_never_taken(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        is_finished(tmp_path, SETTINGS, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(UserError, match="cannot be used as a run folder"):
        is_finished(tmp_path, SETTINGS)


def hold(out: Path, held: Path) -> None:
    with open_run(out, {"verb": "pretrain"}):
        held.touch()
        signal.pause()


def test_a_second_process_is_refused_and_a_dead_one_holds_nothing(
    tmp_path: Path, forked: Callable[..., Forked]
) -> None:
    out, held, settings = tmp_path / "run", tmp_path / "held", {"verb": "pretrain"}
    holder = forked(hold, out, held)
    while not held.exists():
        assert holder.status is None
        time.sleep(0.01)
    (out / "curve.jsonl").write_text("half written")
    for overwrite in (False, True):
        with pytest.raises(
            UserError, match=r"another process works in .*run; wait for it, or give another folder"
        ):
            is_finished(out, settings, overwrite=overwrite)
    assert (out / "curve.jsonl").read_text() == "half written"
    holder.end()
    assert is_finished(out, settings) is False
    assert (out / "curve.jsonl").read_text() == "half written"


def test_overwriting_removes_everything_that_the_run_left(tmp_path: Path) -> None:
    assert is_finished(tmp_path / "run", SETTINGS) is False
    (tmp_path / "run" / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept.txt").write_text("kept")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "curve.jsonl").symlink_to(tmp_path / "elsewhere" / "kept.txt")
    assert is_finished(tmp_path / "run", SETTINGS, overwrite=True) is False
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"settings.json", ".lock"}
    assert (tmp_path / "elsewhere" / "kept.txt").read_text() == "kept"


@pytest.mark.parametrize("removed", range(4))
def test_a_run_whose_replacement_was_interrupted_can_be_replaced(
    removed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, new_settings = tmp_path / "run", SETTINGS | {"verb": "finetune"}
    is_finished(out, SETTINGS)
    for name in ("curve.jsonl", "config.json", "model.safetensors"):
        (out / name).touch()
    unlink, removals = Path.unlink, itertools.count()

    def interrupted(path: Path) -> None:
        if next(removals) == removed:
            raise KeyboardInterrupt
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            is_finished(out, new_settings, overwrite=True)
    assert len(list(out.iterdir())) == 5 - removed
    assert is_finished(out, new_settings, overwrite=True) is False
    assert {path.name for path in out.iterdir()} == {"settings.json", ".lock"}
    assert json.loads((out / "settings.json").read_text()) == new_settings


def test_several_processes_do_not_replace_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_finished(tmp_path / "run", SETTINGS) is False
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(
            UserError,
            match=r"cannot replace a run together: remove .*run if it is there, and leave",
        ):
            is_finished(tmp_path / "run", SETTINGS, overwrite=True)
    assert (tmp_path / "run" / "settings.json").exists()


# --- how a model was trained


FINETUNED = {"recipe": {"training": {"seed": 7}, "task": {"condition": "decoy"}}}


@pytest.mark.parametrize(
    ("run", "folder", "fields"),
    [
        (
            FINETUNED | {"task": "parity"},
            "64",
            {"seed": 7, "train_condition": "decoy", "train_length": 64},
        ),
        (FINETUNED, "data", {"seed": 7}),  # on a user's own records
        ({"recipe": {"training": {"seed": 4}}}, ".", {"seed": 4}),  # as pretraining leaves it
        ([], "64", {}),
        ({"recipe": 3}, "64", {}),
        ({"recipe": {}}, "64", {}),
    ],
)
def test_the_training_of_a_model_is_read_from_its_run(
    run: object, folder: str, fields: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(run))
    assert training_of(tmp_path / folder) == fields


def test_the_training_of_a_run_in_another_runs_folder_is_its_own(tmp_path: Path) -> None:
    for folder, seed in ((tmp_path, 1), (tmp_path / "further", 2)):
        folder.mkdir(exist_ok=True)
        settings = {"recipe": {"training": {"seed": seed}}}
        (folder / "settings.json").write_text(json.dumps(settings))

    assert training_of(tmp_path / "further") == {"seed": 2}


def test_the_training_of_a_phase_is_read_by_any_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = tmp_path / "run" / "64"
    phase.mkdir(parents=True)
    (tmp_path / "run" / "settings.json").write_text(json.dumps(FINETUNED | {"task": "parity"}))
    (tmp_path / "link").symlink_to(phase, target_is_directory=True)
    monkeypatch.chdir(phase)

    expected = {"seed": 7, "train_condition": "decoy", "train_length": 64}
    assert training_of(Path()) == training_of(tmp_path / "link") == expected
