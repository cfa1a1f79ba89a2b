"""Names inside files lead to no other place: nothing outside a folder is read, written or removed."""

import json
import os
import shutil
from pathlib import Path

import pytest

from metatokens import checkpoint
from metatokens.checkpoint import MANIFEST, verify_manifest, write_manifest
from metatokens.data.store import TokenStore
from metatokens.paper.run_log import LOG, RunLog
from metatokens.training.trainer import last_good_checkpoint
from tests.hostile.test_readers import seal
from tests.paper.report.made_lines import accuracy, write
from tests.paper.report.pages import write_quick_report

OUTSIDE = (
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    "",
    "a/b",
    "x\0",
    "x" * 5_000,
    "/dev/zero",
    "\ud800",
)


@pytest.fixture
def outside(tmp_path):
    """A folder of the user's, which no command was given."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


@pytest.fixture
def model(small_model, tmp_path):
    """A model's folder that a test may change."""
    return shutil.copytree(small_model(), tmp_path / "model")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_other_files(name, tmp_path, refuses, monkeypatch):
    manifest = {"sha256": {name: "0" * 64}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    hashed: list[Path] = []
    monkeypatch.setattr(checkpoint, "file_sha256", hashed.append)

    with refuses("is missing: the checkpoint is not complete"):
        verify_manifest(tmp_path)

    assert hashed == []


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "merges\0", "x" * 5_000])
def test_a_token_store_that_names_other_files(name, small_store, tmp_path, refuses, monkeypatch):
    folder = shutil.copytree(small_store.path, tmp_path / "tokens")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_bytes(seal(manifest | {"tokenizer": {name: "0" * 64}}))
    opened: list[Path] = []
    open_file = Path.open

    def note(path, *arguments, **options):
        opened.append(path)
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", note)
    with refuses():
        _ = TokenStore(folder).tokenizer

    for path in opened:
        assert os.path.abspath(path).startswith(str(folder))


def test_only_checkpoints_of_the_folder_are_removed(outside, tmp_path, capsys):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "checkpoint-7").symlink_to(outside)
    (checkpoints / "checkpoint-best").mkdir()
    (checkpoints / "checkpoint-3").mkdir()
    write_manifest(checkpoints / "checkpoint-3")

    assert last_good_checkpoint(checkpoints) == checkpoints / "checkpoint-3"

    assert "It is dropped" in capsys.readouterr().err
    assert (outside / "thesis.txt").read_text() == "years of work"


def test_names_in_records_are_no_paths(tmp_path):
    stages, results = [], []
    for name in (
        "../../escaped",
        "/escaped",
        "a/b",
        "..",
        "x\0y",
        "<x>",
        "",
        "-rf",
        "%s",
        "\u202e",
    ):
        stage = {
            "name": name,
            "seconds": 1.0,
            "cpu_seconds": 1.0,
            "settings": {},
            "facts": {},
            "lines": {"results": 2},
        }
        stages.append(stage | {"finished": "2026-01-01T00:00:00+00:00", "versions": {}})
        results.append(
            accuracy(
                0.5,
                model=name,
                task=name,
                condition=name,
                recipe=name,
                intervention=name,
            )
        )
        results.append(accuracy(0.5, model=name, task=name, recipe=name))
    name = "../../escaped"
    run = {
        "preset": name,
        "recipes": {name: {}},
        "stages": [{"name": name, "seconds": 1, "cpu_seconds": 1}],
        "models": {name: {}},
    }
    folder = write(tmp_path / "run", run, results=results, stages=stages)
    before = names_in(folder)
    assert (folder / LOG).exists()

    RunLog(folder).resume()
    write_quick_report([folder], folder / "report")

    assert names_in(tmp_path) == ["run"]
    assert set(names_in(folder)) == {*before, "report"}
    assert names_in(folder / "report") == [
        "figures",
        "index.html",
        "report.md",
        "tables.html",
        "tables.md",
    ]
    assert set(names_in(folder / "report" / "figures")) <= {"by_length.png"}
