"""A store that was interrupted and continued, or that several processes wrote, has the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import chain, count

import psutil
import pytest

from metatokens.data import corpus as corpus_module
from metatokens.data import writing
from metatokens.data.corpus import corpus_parts, read_corpus, read_part
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import encode_documents
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.files import exclusive
from tests.data.small_corpora import (
    documents_of,
    json_lines,
    save_word_level,
    word_documents,
    write_corpus,
    write_dataset,
)
from tests.forked import PATIENCE


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A corpus of five files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("files")
    documents = word_documents(60)
    for number in range(5):
        write_corpus(folder / f"{number}.jsonl", documents[number * 12 : number * 12 + 12])
    return {"corpus_spec": f"{folder}/?.jsonl", "tokenizer_spec": save_word_level(folder / "words", 300)}


@pytest.fixture
def three_parts(files, monkeypatch):
    """Arguments that write a store of three parts, each of several shards."""
    monkeypatch.setattr(corpus_module, "PART_BYTES", 2_000)
    monkeypatch.setattr(writing, "SHARD_CHARACTERS", 800)
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 300)
    assert [len(part.files) for part in corpus_parts(files["corpus_spec"])] == [2, 2, 1]
    return files | {"held_out": 0.2, "workers": 1}


@pytest.fixture
def undisturbed(three_parts, tmp_path):
    return write_token_store(tmp_path / "undisturbed", **three_parts).path


class CutOff(BaseException):
    """An exception that no code catches, as if the process ended here."""


def interrupting(function, at):
    """The function, except for its call of that number."""
    calls = count(1)

    def call(*args, **kwargs):
        if next(calls) == at:
            raise CutOff
        return function(*args, **kwargs)

    return call


def test_a_store_cut_off_at_any_file_ends_like_one_that_was_not(
    three_parts, undisturbed, contents, tmp_path, monkeypatch
):
    out, encoded = tmp_path / "tokens", []

    def noting(tokenizer, texts):
        encoded.extend(texts)
        return encode_documents(tokenizer, texts)

    monkeypatch.setattr(writing, "encode_documents", noting)
    for at in count(1):
        with monkeypatch.context() as patch, suppress(CutOff):
            patch.setattr(os, "replace", interrupting(os.replace, at))
            write_token_store(out, **three_parts)
            break
        with pytest.raises(UserError, match="holds no complete token store"):
            TokenStore.open(out)
        finished = [json.loads(path.read_bytes())["shards"] for path in out.glob(".partial/done/*.json")]
        encoded.clear()
        store = write_token_store(out, **three_parts)
        assert contents(out) == contents(undisturbed)
        assert len(encoded) == 60 - sum(shards[split]["documents"] for shards in finished for split in shards)
        assert not out.joinpath(".partial").exists()
        shutil.rmtree(out)
    assert at > 2 * len(store.manifest.splits["train"].shards) > 12


def test_a_store_cut_off_again_and_again_is_finished_at_last(three_parts, undisturbed, contents, tmp_path, monkeypatch):
    out, tries = tmp_path / "tokens", 0
    while not (out / "manifest.json").exists():
        tries += 1
        with monkeypatch.context() as patch, suppress(CutOff):
            patch.setattr(os, "replace", interrupting(os.replace, 5))
            write_token_store(out, **three_parts)
    assert 5 < tries < 40
    assert contents(out) == contents(undisturbed)


@pytest.mark.parametrize("function", ["replace", "rmtree"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_replacement_cut_off_half_way_does_not_pass_for_a_store(
    three_parts, undisturbed, contents, tmp_path, monkeypatch, function, at
):
    """With an old store in place, moving the new one takes four renames and four removals."""
    out, move = tmp_path / "tokens", writing._move_into_place
    write_token_store(out, **three_parts | {"held_out": 0.4})

    def cut_off(*args):
        module = os if function == "replace" else shutil
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, function, interrupting(getattr(module, function), at))
            move(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_move_into_place", cut_off)
        with pytest.raises(CutOff):
            write_token_store(out, **three_parts, overwrite=True)
    if (function, at) == ("rmtree", 4):  # all but the removal of what is left of the staging folder
        assert TokenStore.open(out).manifest == TokenStore.open(undisturbed).manifest
        assert list(out.glob(".partial/done/*.json"))  # not to be taken for shards
    else:
        with pytest.raises(UserError, match="holds no complete token store"):
            TokenStore.open(out)
        monkeypatch.setattr(writing, "encode_documents", None)  # nothing is encoded again
    write_token_store(out, **three_parts, overwrite=True)
    assert contents(out) == contents(undisturbed)


def test_other_settings_do_not_go_on_with_an_unfinished_store(three_parts, tmp_path, contents, monkeypatch):
    out = tmp_path / "tokens"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupting(os.replace, 12))
        with pytest.raises(CutOff):
            write_token_store(out, **three_parts | {"held_out": 0.3})
    before = contents(out)
    with pytest.raises(UserError, match=r"tokens holds an unfinished token store .*held_out=0\.3.*--overwrite"):
        write_token_store(out, **three_parts)
    assert contents(out) == before
    assert write_token_store(out, **three_parts, overwrite=True).manifest.settings.held_out == 0.2
    assert not (out / ".partial").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_costs_nothing_that_was_finished(workers, three_parts, undisturbed, tmp_path):
    shutil.copytree(os.path.dirname(three_parts["corpus_spec"]), tmp_path / "files")
    own, out = three_parts | {"corpus_spec": f"{tmp_path}/files/?.jsonl", "workers": workers}, tmp_path / "tokens"
    last = tmp_path / "files" / "4.jsonl"
    good = last.read_text()
    last.write_text(good + '{"body": 1}\n')
    with pytest.raises(UserError, match=r"^\S*4\.jsonl, line 13 has no text in its field .text.\.$"):
        write_token_store(out, **own)
    assert workers > 1 or len(list(out.glob(".partial/done/*.json"))) > 5
    last.write_text(good)
    assert write_token_store(out, **own).manifest.splits == TokenStore.open(undisturbed).manifest.splits


def test_two_at_once_in_one_folder(three_parts, tmp_path):
    out = tmp_path / "tokens"
    out.mkdir()
    with exclusive(out), pytest.raises(UserError, match="another process works in"):
        write_token_store(out, **three_parts)
    write_token_store(out, **three_parts)


# --- parts and processes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset of five files."""
    documents = word_documents(100)
    files = [json_lines(*documents[start : start + 20]) for start in range(0, 100, 20)]
    return write_dataset(tmp_path_factory.mktemp("c4"), *files)


def test_parts_one_after_the_other_are_the_corpus(three_parts, dataset):
    for spec, parts in ((three_parts["corpus_spec"], 3), (dataset, 5), ("builtin", 1)):
        found = [list(read_part(spec, part)) for part in corpus_parts(spec)]
        assert len(found) == parts
        assert list(chain(*found)) == list(read_corpus(spec))
        assert all(found)


@pytest.mark.parametrize(("kind", "parts", "documents"), [("files", 3, 60), ("dataset", 5, 100)])
def test_workers_share_the_parts_and_change_no_byte(kind, parts, documents, dataset, three_parts, contents, tmp_path):
    own = three_parts if kind == "files" else three_parts | {"corpus_spec": dataset}
    for workers in (1, 2):
        store = write_token_store(tmp_path / f"{workers}", **own | {"workers": workers})
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert {shard.part for shard in store.manifest.splits["train"].shards} == {*range(parts)}
    assert sorted(documents_of(store, "train") + documents_of(store, "held_out")) == sorted(word_documents(documents))


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(process):
    """The forks of the process that has imported what they need."""
    servers = [child for child in process.children() if "forkserver" in " ".join(child.cmdline())]
    return [worker for server in servers for worker in server.children()]


def test_a_worker_killed_by_the_system_is_one_sentence(three_parts, tmp_path):
    def kill_one():
        wait_for(lambda: workers_of(psutil.Process()))
        first = workers_of(psutil.Process())[0]
        first.suspend()  # so that it does not finish before it is killed
        wait_for(lambda: len(workers_of(psutil.Process())) == 2)  # Python's pool breaks otherwise while it is starting
        first.kill()

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(UserError, match="was killed, perhaps because memory ran out: run the same command again"):
        write_token_store(tmp_path / "tokens", **three_parts | {"workers": 2})
    thread.join()
    assert write_token_store(tmp_path / "tokens", **three_parts).manifest.splits["train"].shards


SCRIPT = """if True:
    import json, sys, time
    from pathlib import Path
    from metatokens.data import corpus, writing

    def slow(tokenizer, texts, encode=writing.encode_documents):
        time.sleep(0.05)
        return encode(tokenizer, texts)

    corpus.PART_BYTES, writing.SHARD_CHARACTERS, writing.encode_documents = 2_000, 400, slow
    if __name__ == "__main__":
        writing.write_token_store(Path(sys.argv[1]), **json.loads(sys.argv[2]))
"""


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_killed_with_its_workers_and_started_again(three_parts, contents, tmp_path, monkeypatch, kill, is_thorough):
    (tmp_path / "write.py").write_text(SCRIPT)
    out = tmp_path / "tokens"
    command = [sys.executable, tmp_path / "write.py", out, json.dumps(three_parts | {"workers": 2})]
    kept: dict[str, int] = {}
    for finished in (2, 6) if is_thorough else (2,):
        process = subprocess.Popen(
            command,
            # A shell starts what runs in its background with Ctrl-C ignored, which is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda finished=finished: len(list(out.glob(".partial/done/*.json"))) >= finished)
        workers = workers_of(psutil.Process(process.pid))
        assert len(workers) == 2
        process.send_signal(kill)
        error = process.communicate()[1]
        assert process.returncode
        assert "start_worker" not in error
        assert kill == signal.SIGKILL or error.splitlines()[-1] == "KeyboardInterrupt"
        assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []
        assert not (out / "manifest.json").exists()
        records = [json.loads(path.read_bytes())["shards"]["train"] for path in out.glob(".partial/done/*.json")]
        names = [f"train/{one['part']:05}-{one['number']:05}.arrow" for one in records if one["documents"]]
        now = {name: (out / ".partial" / name).stat().st_mtime_ns for name in names}
        assert now | kept == now
        kept = now
    monkeypatch.setattr(writing, "SHARD_CHARACTERS", 400)
    write_token_store(out, **three_parts)
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert contents(out) == contents(write_token_store(tmp_path / "whole", **three_parts).path)
