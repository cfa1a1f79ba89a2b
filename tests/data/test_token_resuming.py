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
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from metatokens.data import corpus as corpus_module
from metatokens.data import writing
from metatokens.data.corpus import corpus_parts
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import encode_documents
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from tests.data.small_corpora import (
    documents_of,
    json_lines,
    save_word_level,
    word_documents,
    write_corpus,
    write_dataset,
)
from tests.forked import PATIENCE

Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A corpus of five files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("files")
    documents = word_documents(60)
    for number in range(5):
        write_corpus(folder / f"{number}.jsonl", documents[number * 12 : number * 12 + 12])
    return {
        "corpus_spec": f"{folder}/?.jsonl",
        "tokenizer_spec": save_word_level(folder / "words", 300),
    }


@pytest.fixture
def three_parts(files, monkeypatch):
    """Arguments that write a store of three parts."""
    monkeypatch.setattr(corpus_module, "PART_BYTES", 2_000)
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 300)
    sizes = [len(part.files) for part in corpus_parts(files["corpus_spec"])]
    assert sizes == [2, 2, 1]
    return files | {"held_out": 0.2, "workers": 1}


@pytest.fixture
def undisturbed(three_parts, tmp_path):
    return write_token_store(tmp_path / "undisturbed", **three_parts).path


@pytest.fixture
def encoded(monkeypatch):
    """The documents that are encoded."""
    documents: list[str] = []

    def note(tokenizer, texts):
        documents.extend(texts)
        return encode_documents(tokenizer, texts)

    monkeypatch.setattr(writing, "encode_documents", note)
    return documents


class CutOff(BaseException):
    """An exception that no code catches, as if the process ended here."""


def interrupting(function, call_number):
    """The function, except for its call of that number."""
    calls = count(1)

    def call(*arguments, **options):
        if next(calls) == call_number:
            raise CutOff
        return function(*arguments, **options)

    return call


def write_until_cut_off(out, arguments, rename):
    """Write a store, cut off at the renaming of that number; whether it was finished before."""
    with pytest.MonkeyPatch.context() as patch, suppress(CutOff):
        patch.setattr(os, "replace", interrupting(os.replace, rename))
        write_token_store(out, **arguments)
        return True
    return False


def finished_parts(out):
    """What an unfinished store has noted about the shards of its finished parts, by split."""
    return [json.loads(path.read_bytes())["shards"] for path in out.glob(".partial/done/*.json")]


def test_a_store_cut_off_at_any_file_ends_like_one_that_was_not(
    three_parts, undisturbed, contents, encoded, tmp_path
):
    out = tmp_path / "tokens"
    for rename in count(1):
        if write_until_cut_off(out, three_parts, rename):
            break
        with pytest.raises(UserError, match="holds no complete token store"):
            TokenStore(out)
        documents_finished = 0
        for shards in finished_parts(out):
            documents_finished += sum(split["documents"] for split in shards.values())
        encoded.clear()

        write_token_store(out, **three_parts)

        assert contents(out) == contents(undisturbed)
        assert len(encoded) == 60 - documents_finished
        assert not (out / ".partial").exists()
        shutil.rmtree(out)
    assert rename > 8


@pytest.mark.parametrize("change", ["grown", "added", "removed"])
def test_an_unfinished_store_of_another_text_is_begun_anew(three_parts, contents, tmp_path, change):
    for file in Path(three_parts["corpus_spec"]).parent.glob("?.jsonl"):
        shutil.copy(file, tmp_path)
    arguments = three_parts | {"corpus_spec": f"{tmp_path}/?.jsonl"}
    assert not write_until_cut_off(tmp_path / "tokens", arguments, rename=3)
    assert len(finished_parts(tmp_path / "tokens")) == 1
    match change:
        case "grown":
            with (tmp_path / "0.jsonl").open("a", encoding="utf-8") as file:
                file.write('{"text": "w1 w2 w3"}\n')
        case "added":
            write_corpus(tmp_path / "5.jsonl", ["w1 w2 w3"])
        case "removed":
            (tmp_path / "4.jsonl").unlink()

    write_token_store(tmp_path / "tokens", **arguments)

    undisturbed = write_token_store(tmp_path / "undisturbed", **arguments)
    assert contents(tmp_path / "tokens") == contents(undisturbed.path)


@pytest.mark.parametrize(
    ("module", "function", "number"),
    [
        (os, "replace", 1),
        (os, "replace", 4),
        (shutil, "rmtree", 1),
        (shutil, "rmtree", 3),
    ],
    ids=["first rename", "last rename", "first removal", "last but one"],
)
def test_a_replacement_cut_off_half_way_does_not_pass_for_a_store(
    module,
    function,
    number,
    three_parts,
    undisturbed,
    contents,
    tmp_path,
    monkeypatch,
):
    """With an old store in place, moving the new one takes four renames and four removals."""
    out, move = tmp_path / "tokens", writing._move_into_place
    write_token_store(out, **three_parts | {"held_out": 0.4})

    def cut_off(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, function, interrupting(getattr(module, function), number))
            move(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_move_into_place", cut_off)
        with pytest.raises(CutOff):
            write_token_store(out, **three_parts, overwrite=True)
    with pytest.raises(UserError, match="holds no complete token store"):
        TokenStore(out)

    monkeypatch.setattr(writing, "encode_documents", None)  # nothing is encoded again
    write_token_store(out, **three_parts, overwrite=True)

    assert contents(out) == contents(undisturbed)


def test_other_settings_do_not_go_on_with_an_unfinished_store(three_parts, tmp_path, contents):
    out = tmp_path / "tokens"
    assert not write_until_cut_off(out, three_parts | {"held_out": 0.3}, rename=3)
    before = contents(out)

    with pytest.raises(
        UserError,
        match=r"tokens holds an unfinished token store .*held_out=0\.3.*--overwrite",
    ):
        write_token_store(out, **three_parts)

    assert contents(out) == before
    assert write_token_store(out, **three_parts, overwrite=True).manifest.settings.held_out == 0.2
    assert not (out / ".partial").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_costs_nothing_that_was_finished(
    workers, three_parts, undisturbed, tmp_path
):
    shutil.copytree(Path(three_parts["corpus_spec"]).parent, tmp_path / "files")
    arguments = three_parts | {
        "corpus_spec": f"{tmp_path}/files/?.jsonl",
        "workers": workers,
    }
    out, last_file = tmp_path / "tokens", tmp_path / "files" / "4.jsonl"
    good = last_file.read_text()
    last_file.write_text(good + '{"body": 1}\n')

    with pytest.raises(
        UserError, match=r"^\S*4\.jsonl, line 13 has no text in its field .text.\.$"
    ):
        write_token_store(out, **arguments)
    if workers == 1:
        assert len(finished_parts(out)) == 2

    last_file.write_text(good)
    assert (
        write_token_store(out, **arguments).manifest.splits
        == TokenStore(undisturbed).manifest.splits
    )


# --- parts and processes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset of five files."""
    documents = word_documents(100)
    files = [json_lines(*documents[start : start + 20]) for start in range(0, 100, 20)]
    return write_dataset(tmp_path_factory.mktemp("c4"), *files)


@pytest.mark.parametrize(("kind", "parts", "documents"), [("files", 3, 60), ("dataset", 5, 100)])
def test_workers_share_the_parts_and_change_no_byte(
    kind,
    parts,
    documents,
    dataset,
    three_parts,
    contents,
    tmp_path,
):
    arguments = three_parts | {"corpus_spec": dataset} if kind == "dataset" else three_parts

    alone = write_token_store(tmp_path / "1", **arguments)
    write_token_store(tmp_path / "2", **arguments | {"workers": 2})

    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    parts_stored = {shard.part for shard in alone.manifest.splits["train"].shards}
    assert parts_stored == set(range(parts))
    stored = documents_of(alone, "train") + documents_of(alone, "held_out")
    assert sorted(stored) == sorted(word_documents(documents))


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(process):
    """The forks of the process that has imported what they need."""
    workers = []
    for child in process.children():
        if "forkserver" in " ".join(child.cmdline()):
            workers += child.children()
    return workers


def kill_one_of_two_workers():
    this_process = psutil.Process()
    wait_for(lambda: workers_of(this_process))
    first = workers_of(this_process)[0]
    first.suspend()  # so that it does not finish before it is killed
    # Python's pool breaks otherwise while it is starting.
    wait_for(lambda: len(workers_of(this_process)) == 2)
    first.kill()


def test_a_worker_killed_by_the_system_is_one_sentence(three_parts, tmp_path):
    killing = threading.Thread(target=kill_one_of_two_workers)
    killing.start()

    with pytest.raises(
        UserError,
        match="was killed, perhaps because memory ran out: run the same command again",
    ):
        write_token_store(tmp_path / "tokens", **three_parts | {"workers": 2})

    killing.join()
    assert write_token_store(tmp_path / "tokens", **three_parts).manifest.splits["train"].shards


SCRIPT = """if True:
    import json, sys, time
    from pathlib import Path
    from metatokens.data import corpus, writing

    def slow(tokenizer, texts, encode=writing.encode_documents):
        time.sleep(0.05)
        return encode(tokenizer, texts)

    corpus.PART_BYTES, writing.BATCH_CHARACTERS, writing.encode_documents = 1, 300, slow
    if __name__ == "__main__":
        writing.write_token_store(Path(sys.argv[1]), **json.loads(sys.argv[2]))
"""


def listen_to_ctrl_c():
    # A shell starts what runs in its background with Ctrl-C ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def kill_when_finished(command, out, parts, kill):
    """Start writing with two workers, and kill it when so many parts are finished; what it wrote to standard error."""
    process = subprocess.Popen(
        command, preexec_fn=listen_to_ctrl_c, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: len(finished_parts(out)) >= parts)
    workers = workers_of(psutil.Process(process.pid))
    assert len(workers) == 2
    process.send_signal(kill)
    _, error = process.communicate()
    assert process.returncode
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    assert alive == []
    return error


def times_of_training_shards(out, folder):
    """When the finished shards of an unfinished store were written, as found in a folder."""
    times = {}
    for shards in finished_parts(out):
        shard = shards["train"]
        if shard["documents"]:
            name = f"train/{shard['part']:05}.bin"
            times[name] = (folder / name).stat().st_mtime_ns
    return times


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_killed_with_its_workers_and_started_again(
    kill,
    three_parts,
    contents,
    tmp_path,
    monkeypatch,
    is_thorough,
):
    (tmp_path / "write.py").write_text(SCRIPT)
    out = tmp_path / "tokens"
    command = [
        sys.executable,
        tmp_path / "write.py",
        out,
        json.dumps(three_parts | {"workers": 2}),
    ]

    before: dict[str, int] = {}
    for parts in (1, 3) if is_thorough else (1,):
        error = kill_when_finished(command, out, parts, kill)
        assert "start_worker" not in error
        if kill == signal.SIGINT:
            assert error.splitlines()[-1] == "KeyboardInterrupt"
        assert not (out / "manifest.json").exists()
        after = times_of_training_shards(out, out / ".partial")
        assert before.items() <= after.items()
        before = after

    monkeypatch.setattr(corpus_module, "PART_BYTES", 1)
    write_token_store(out, **three_parts)
    for name, written in before.items():
        assert (out / name).stat().st_mtime_ns == written
    assert contents(out) == contents(write_token_store(tmp_path / "whole", **three_parts).path)
