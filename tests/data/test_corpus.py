"""Corpus specs: what is read, in what pieces, and the errors of bad sources."""

import codecs
import gzip
import itertools
import os
import re
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.data import corpus
from metatokens.data.corpus import read_corpus
from metatokens.errors import UserError
from tests.data.small_corpora import json_lines, write_dataset


def read(spec):
    return list(read_corpus(str(spec)))


def test_builtin_holds_topics_and_docstrings():
    documents = read("builtin")

    [wrapping] = (
        document for document in documents if document.startswith(textwrap.__doc__.strip())
    )
    assert set(topics.values()) <= set(documents)
    for function in (textwrap.TextWrapper, textwrap.TextWrapper.fill, textwrap.dedent):
        assert function.__doc__.strip().splitlines()[0] in wrapping
    assert wrapping.index("Object for wrapping") < wrapping.index(
        "Remove any common leading whitespace"
    )
    assert sum(map(len, documents)) > 1_000_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "A.JSONL"])
def test_json_lines(tmp_path, name):
    data = (
        codecs.BOM_UTF8
        + json_lines("first", "", "zwölf\n\u2028", " \n")
        + b"\n"
        + json_lines("last").strip()
    )
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)

    assert read(tmp_path / name) == ["first", "zwölf\n\u2028", "last"]


def test_glob_takes_files_in_sorted_order(tmp_path):
    (tmp_path / "sub" / "folder.txt").mkdir(parents=True)
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / "a.jsonl").write_bytes(json_lines("a"))
    (tmp_path / "[1].txt").write_text("brackets")

    assert read(f"{tmp_path}/**/*.txt") == ["brackets", "b", "c"]
    assert read(f"{tmp_path}/?.*") == ["a", "b"]
    assert read(f"{tmp_path}/[1].txt") == ["brackets"]  # a file's own name before a pattern


PIECES = st.sampled_from(
    ["word", "wörter ", "\n", "\r\n", "\r", "\n\n", " \n", "\x85", "\u2028", "\t"]
)


@given(st.lists(PIECES).map("".join))
def test_a_text_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SOFT_CUT", 10)
        patch.setattr(corpus, "HARD_CUT", 10**9)

        documents = read(path)

    assert "".join(documents) == (text if text.strip() else "")
    for before, after in itertools.pairwise(documents):
        *_, last_line, rest = re.split("\r\n|\n|\r", before)
        first_line, *_ = re.split("\r\n|\n|\r", after)
        assert len(before) >= 10
        assert last_line.strip() == rest == ""
        assert first_line.strip()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_text_file_without_blank_lines_is_cut_all_the_same(tmp_path, end):
    text = f"a line of some length{end}" * 20_000
    (tmp_path / "log.txt").write_bytes(text.encode())

    *documents, rest = read(tmp_path / "log.txt")

    assert "".join(documents) + rest == text
    assert len(documents) > 1
    for document in documents:
        assert 64_000 <= len(document) < 71_000


def test_dataset_in_a_local_folder(tmp_path):
    spec = write_dataset(tmp_path, json_lines("one", "", "two"))

    assert read(spec) == ["one", "two"]
    with pytest.raises(UserError, match=r"fr.*Available.*en"):
        read(f"hf:{tmp_path}:fr")


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("latin.txt", b"fine\nna\xefve", r"latin\.txt cannot be read: .utf-8. codec"),
        (
            "latin.jsonl",
            b'{"text": "a"}\n{"text": "\xff"}\n',
            r"latin\.jsonl cannot be read: .utf-8. codec",
        ),
        (
            "cut.jsonl",
            json_lines("a") + b'{"text": "b\n',
            r"cut\.jsonl, line 2 is not JSON",
        ),
        (
            "list.jsonl",
            json_lines("a") + b'\n["text"]\n',
            r'list\.jsonl, line 3 has no text in its field "text"',
        ),
        ("null.jsonl", b'{"text": null}\n', r"null\.jsonl, line 1 has no text"),
        (
            "plain.txt.gz",
            b"not compressed",
            r"plain\.txt\.gz cannot be read: Not a gzipped file",
        ),
    ],
)
def test_a_broken_file_is_named_with_the_line(tmp_path, name, data, sentence):
    (tmp_path / name).write_bytes(data)

    with pytest.raises(UserError, match=sentence) as caught:
        read(tmp_path / name)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("missing.txt", r"missing\.txt.*builtin, a file, a glob"),
        ("*.txt", "no file matches"),
        (".", "no file matches"),
        ("a.csv", r"a\.csv.*\.txt, \.txt\.gz, \.jsonl"),
        ("a.*", r"a\.csv.*must end in"),
    ],
)
def test_a_wrong_spec_is_refused_before_anything_is_read(spec, sentence, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "a.jsonl").write_bytes(b"not JSON")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=sentence):
        read_corpus(spec)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff.txt")).write_text("a text")

    with pytest.raises(UserError, match=r"is not UTF-8; rename it"):
        read_corpus(f"{tmp_path}/*.txt")
