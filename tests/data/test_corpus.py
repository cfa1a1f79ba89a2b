"""Corpus specs: what is read, in what pieces, and the errors of bad sources."""

import codecs
import gzip
import hashlib
import itertools
import re
import subprocess
import sys
import textwrap
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.data import corpus
from metatokens.data.corpus import read_corpus
from metatokens.errors import UserError
from tests.data.small_corpora import json_lines, write_dataset


def test_builtin_holds_topics_and_docstrings():
    documents = list(read_corpus("builtin"))
    assert set(topics.values()) <= set(documents)
    [wrapping] = [document for document in documents if document.startswith(textwrap.__doc__.strip())]
    for function in (textwrap.TextWrapper, textwrap.TextWrapper.fill, textwrap.dedent):
        assert function.__doc__.strip().splitlines()[0] in wrapping
    assert wrapping.index("Object for wrapping") < wrapping.index("Remove any common leading whitespace")
    assert sum(map(len, documents)) > 1_000_000


def test_builtin_is_the_same_in_another_process_and_imports_nothing_that_it_reads():
    code = """if True:
        import hashlib, sys
        from metatokens.data.corpus import read_corpus
        documents = list(read_corpus("builtin"))
        assert any("Turtle graphics is a popular way" in document for document in documents)
        assert not {"turtle", "antigravity", "this", "tkinter", "pyarrow", "datasets"} & set(sys.modules)
        print(hashlib.sha256(repr(documents).encode()).hexdigest())
    """
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert there.strip() == hashlib.sha256(repr(list(read_corpus("builtin"))).encode()).hexdigest()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "A.JSONL"])
def test_json_lines(tmp_path, name):
    data = codecs.BOM_UTF8 + json_lines("first", "", "zwölf\n\u2028", " \n") + b"\n" + json_lines("last").strip()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert list(read_corpus(str(tmp_path / name))) == ["first", "zwölf\n\u2028", "last"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_json_lines_with_other_line_ends(tmp_path, end):
    (tmp_path / "a.jsonl").write_bytes(json_lines("first", "zwölf\r").replace(b"\n", end))
    assert list(read_corpus(str(tmp_path / "a.jsonl"))) == ["first", "zwölf\r"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet(tmp_path, kind):
    texts = pa.array(["first", "", "zwölf"]).cast(kind)
    pq.write_table(pa.table({"id": [1, 2, 3], "text": texts}), tmp_path / "a.parquet")
    assert list(read_corpus(str(tmp_path / "a.parquet"))) == ["first", "zwölf"]


def test_glob_takes_files_in_sorted_order(tmp_path):
    (tmp_path / "sub" / "folder.txt").mkdir(parents=True)
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / "a.jsonl").write_bytes(json_lines("a"))
    (tmp_path / "[1].txt").write_text("brackets")
    assert list(read_corpus(f"{tmp_path}/**/*.txt")) == ["brackets", "b", "c"]
    assert list(read_corpus(f"{tmp_path}/?.*")) == ["a", "b"]
    assert list(read_corpus(f"{tmp_path}/[1].txt")) == ["brackets"]  # a file's own name before a pattern


@given(
    st.lists(st.sampled_from(["word", "wörter ", "\n", "\r\n", "\r", "\n\n", " \n", "\x85", "\u2028", "\t"])).map(
        "".join
    )
)
def test_a_text_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SOFT_CUT", 10)
        patch.setattr(corpus, "HARD_CUT", 10**9)
        documents = list(read_corpus(str(path)))
    assert "".join(documents) == (text if text.strip() else "")
    for before, after in itertools.pairwise(documents):
        assert len(before) >= 10
        *_, last, end = re.split("\r\n|\n|\r", before)
        assert last.strip() == end == ""
        assert re.split("\r\n|\n|\r", after)[0].strip()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_text_file_without_blank_lines_is_cut_all_the_same(tmp_path, end):
    text = f"a line of some length{end}" * 20_000
    (tmp_path / "log.txt").write_bytes(text.encode())
    documents = list(read_corpus(str(tmp_path / "log.txt")))
    assert "".join(documents) == text
    assert len(documents) > 2
    assert all(64_000 <= len(document) < 71_000 for document in documents[:-1])


def test_a_real_book(shared_data):
    path = shared_data / "books" / "alice_in_wonderland.txt.gz"
    documents = list(read_corpus(str(path)))
    assert "".join(documents) == gzip.decompress(path.read_bytes()).decode()
    assert len(documents) > 10
    assert all(8_000 <= len(document) < 16_000 for document in documents[:-1])


def test_dataset_in_a_local_folder(tmp_path):
    spec = write_dataset(tmp_path, json_lines("one", "", "two"))
    assert list(read_corpus(spec)) == ["one", "two"]
    with pytest.raises(UserError, match=r"fr.*Available.*en"):
        list(read_corpus(f"hf:{tmp_path}:fr"))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'{"text": "a"}\n{"text": \n', "cannot be read"),
        (b'{"body": "a"}\n', "row 1 has no text"),
        (b'{"text": "a"}\n{"text": null}\n', "row 2 has no text"),
    ],
)
def test_dataset_with_bad_records(tmp_path, data, sentence):
    with pytest.raises(UserError, match=sentence):
        list(read_corpus(write_dataset(tmp_path, data)))


@pytest.mark.parametrize("spec", ["hf:metatokens-tests/no-such-dataset:en", "hf:", "hf:/no/such/folder"])
def test_dataset_that_is_nowhere(spec):
    with pytest.raises(UserError, match=spec):
        list(read_corpus(spec))


BROKEN_FILES = [
    ("latin.txt", b"fine\nna\xefve", r"latin\.txt cannot be read: .utf-8. codec"),
    ("old.txt", b"fine\rna\xefve", r"old\.txt cannot be read: .utf-8. codec"),
    ("latin.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"latin\.jsonl cannot be read: .utf-8. codec"),
    ("wide.txt", "wide".encode("utf-16"), r"wide\.txt cannot be read: .utf-8. codec"),
    ("cut.jsonl", json_lines("a") + b'{"text": "b\n', r"cut\.jsonl, line 2 is not JSON"),
    ("deep.jsonl", b"[" * 100_000, r"deep\.jsonl, line 1 is not JSON"),
    ("list.jsonl", json_lines("a") + b'\n["text"]\n', r'list\.jsonl, line 3 has no text in its field "text"'),
    ("body.jsonl", b'{"body": "a"}\n', r"body\.jsonl, line 1 has no text"),
    ("null.jsonl", b'{"text": null}\n', r"null\.jsonl, line 1 has no text"),
    ("half.jsonl", b'{"text": "\\ud800"}\n', r"half\.jsonl, line 1 has no text"),
    ("plain.txt.gz", b"not compressed", r"plain\.txt\.gz cannot be read: Not a gzipped file"),
    ("cut.txt.gz", gzip.compress(b"some text " * 1000)[:-9], r"cut\.txt\.gz cannot be read"),
    ("flipped.txt.gz", gzip.compress(b"some")[:10] + b"\xff" * 20, r"flipped\.txt\.gz cannot be read"),
    ("cut.parquet", b"PAR1 and no more", r"cut\.parquet cannot be read"),
    *(
        (f"{name}.parquet", columns, f"{name}.parquet, row 1 has no text")
        for name, columns in {"body": {"body": ["a"]}, "number": {"text": [1]}, "null": {"text": [None]}}.items()
    ),
]


@pytest.mark.parametrize(("name", "data", "sentence"), BROKEN_FILES, ids=[name for name, _, _ in BROKEN_FILES])
def test_a_broken_file_is_named_with_the_line(tmp_path, name, data, sentence):
    if isinstance(data, bytes):
        (tmp_path / name).write_bytes(data)
    else:
        pq.write_table(pa.table(data), tmp_path / name)
    with pytest.raises(UserError, match=sentence) as caught:
        list(read_corpus(str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_a_wrong_spec_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "a.jsonl").write_bytes(b"not JSON")
    for spec, sentence in [
        (f"{tmp_path}/missing.txt", r"missing\.txt.*builtin, a file, a glob"),
        (f"{tmp_path}/*.txt", r"no file matches"),
        (f"{tmp_path}", r"no file matches"),
        (f"{tmp_path}/a.csv", r"a\.csv.*\.txt, \.txt\.gz, \.jsonl"),
        (f"{tmp_path}/a.*", r"a\.csv.*must end in"),
    ]:
        with pytest.raises(UserError, match=sentence):
            read_corpus(spec)
