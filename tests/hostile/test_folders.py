"""Names inside files lead to no other place: nothing outside a folder is read, written or removed."""

import json
import os
import shutil
from pathlib import Path

import pytest

from metatokens import checkpoint
from metatokens.checkpoint import MANIFEST, load_model, verify_manifest, write_manifest
from metatokens.data.store import TokenStore
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.files import append_lines
from metatokens.paper.report.page import write_report
from metatokens.paper.run_log import FILES, LOG, RunLog
from metatokens.records import Result, read_lines
from metatokens.training.run_folder import open_run
from metatokens.training.trainer import last_good_checkpoint
from tests.hostile.good import Clean
from tests.hostile.test_readers import seal
from tests.paper.report.pages import undrawn

ESCAPES = [
    "../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", "x\0", "x" * 5_000, "../secret", "/dev/zero", "\ud800",
]  # fmt: skip


def whole(folder: Path) -> set[tuple[str, bytes]]:
    return {(str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_manifest_that_names_other_files(
    name: str, tmp_path: Path, clean: Clean, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"sha256": {name: "0" * 64}}))
    read: list[Path] = []
    monkeypatch.setattr(checkpoint, "file_sha256", lambda path: read.append(path) or "")
    with clean(), pytest.raises(UserError, match="is missing: the checkpoint is not complete"):
        verify_manifest(folder)
    assert read == []


def test_a_fifo_or_a_link_to_nowhere_does_not_stop_the_reader(small_model, tmp_path: Path, clean: Clean) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model(), folder)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).unlink()
    os.mkfifo(folder / "model.safetensors")
    (folder / "tokenizer.json").symlink_to(folder / "nowhere")
    with clean(), pytest.raises(UserError, match="is missing"):
        load_model(folder)
    (folder / MANIFEST).unlink()
    with clean(), pytest.raises(UserError, match=r"the weights in .* cannot be read"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    with clean(), pytest.raises(UserError, match=r"the weights in .* cannot be read"):
        load_model(folder)


def test_shards_outside_the_folder_are_not_read(small_model, tmp_path: Path, clean: Clean) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model(), folder)
    (folder / MANIFEST).unlink()
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with clean(), pytest.raises(UserError, match=r"not complete: there is no \.\./outside\.safetensors"):
        load_model(folder)


def test_only_checkpoints_of_the_folder_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "checkpoint-7").symlink_to(outside)
    (checkpoints / "checkpoint-best").mkdir()
    (checkpoints / "checkpoint-3").mkdir()
    write_manifest(checkpoints / "checkpoint-3")
    assert last_good_checkpoint(checkpoints) == checkpoints / "checkpoint-3"
    assert "It is dropped" in capsys.readouterr().err
    assert (outside / "thesis.txt").read_text() == "years of work"


def test_a_run_is_replaced_in_its_own_folder_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    with open_run(tmp_path / "run", {"verb": "pretrain"}):
        (tmp_path / "run" / "model").symlink_to(outside)
        (tmp_path / "run" / "curve.jsonl").symlink_to(outside / "thesis.txt")
    with open_run(tmp_path / "run", {"verb": "finetune"}, overwrite=True):
        pass
    assert (outside / "thesis.txt").read_text() == "years of work"


NAMES = ["../../escaped", "/escaped", "a/b", "..", "x\0y", "<x>", "", "-rf", "%s", "\u202e"]


@pytest.mark.quick(name=["../../escaped", "a/b"])
@pytest.mark.parametrize("name", NAMES)
def test_names_in_records_are_no_paths(name: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    stage = {"name": name, "seconds": 1.0, "cpu_seconds": 1.0, "settings": {}, "facts": {}, "lines": {}}
    stage |= {"finished": "2026-01-01T00:00:00+00:00", "versions": {}}
    (inner / LOG).write_text(json.dumps(stage) + "\n")
    RunLog(inner).resume()
    fields = {"model": name, "task": name, "condition": name, "recipe": name, "intervention": name}
    line = Result(**fields, metric="exact_match", value=0.5, n=4, seed=0, length=128)
    append_lines(inner / FILES["results"], [line.line(), line.model_copy(update={"condition": "none"}).line()])
    assert read_lines(inner / FILES["results"], Result)[0].model == name
    run = {"preset": name, "recipes": {name: {}}, "stages": [{"name": name, "seconds": 1}], "models": {name: {}}}
    (inner / "run.json").write_text(json.dumps(run))
    before = whole(tmp_path)
    with undrawn():
        write_report([inner], inner / "report")
    written = {path for path, _ in whole(tmp_path) - before}
    assert written
    assert all(path.startswith(str(inner / "report")) for path in written)
    assert {path.name for path in (inner / "report" / "figures").iterdir()} <= {"by_length.png"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "../manifest.json", "merges\0", "x" * 5_000])
def test_a_token_store_that_names_other_files(
    name: str, small_store: TokenStore, tmp_path: Path, clean: Clean, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokens"
    shutil.copytree(small_store.path, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_bytes(seal(manifest | {"tokenizer": {name: "0" * 64}}))
    opened: list[Path] = []
    open_file = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self) or open_file(self, *a, **k))
    with clean(), pytest.raises(UserError):
        _ = TokenStore.open(folder).tokenizer
    assert [path for path in opened if not os.path.abspath(path).startswith(str(folder))] == []


def test_a_store_is_written_where_the_user_says_and_nowhere_else(small_corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    write_token_store(tmp_path / "inner" / ".." / "store", str(small_corpus), "train:300", workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "store"]
    assert not list((tmp_path / "inner").iterdir())
