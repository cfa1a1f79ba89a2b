"""Corpora of any bytes: documents come out as they are described, or a sentence says what is wrong."""

import gzip
import io
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from metatokens.data.corpus import read_corpus
from tests.hostile.drawing import JSON, TEXT, cases, damaged

Clean = Callable[[], AbstractContextManager[None]]

PIECES = st.sampled_from(
    [
        b"word ",
        b"\n",
        b"\r\n",
        b"\r",
        b"\n\n",
        b"\0",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        "é\u2028".encode(),
        b"\x1a",
    ]
)
BYTES = st.lists(PIECES, max_size=30).map(b"".join) | st.binary(max_size=40)
RECORD = st.fixed_dictionaries({"text": TEXT}) | st.dictionaries(st.sampled_from(["text", "id"]), JSON) | JSON
LINES = st.lists(RECORD.map(json.dumps).map(str.encode) | BYTES, max_size=5).map(b"\n".join)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


def check(path: Path) -> list[str]:
    documents = list(read_corpus(str(path)))
    for document in documents:
        assert document.strip()
        assert document.encode().decode() == document
    return documents


@cases(200)
@given(content=BYTES)
def test_text(content: bytes, place: Path, clean: Clean) -> None:
    (place / "a.txt").write_bytes(content)
    (place / "a.txt.gz").write_bytes(gzip.compress(content, 1))
    with clean():
        documents = check(place / "a.txt")
        assert check(place / "a.txt.gz") == documents
        whole = content.decode().removeprefix("\ufeff")
        assert "".join(documents) == (whole if whole.strip() else "")


@cases(150)
@given(content=LINES | LINES.flatmap(damaged))
def test_json_lines(content: bytes, place: Path, clean: Clean) -> None:
    (place / "a.jsonl").write_bytes(content)
    with clean():
        documents = check(place / "a.jsonl")
        lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.decode().strip()]
        texts = [json.loads(line)["text"] for line in lines]
        assert documents == [text for text in texts if text.strip()]


@cases(100)
@given(data=st.data(), name=st.sampled_from(["a.txt.gz", "a.jsonl.gz", "a.json.gz"]))
def test_damaged_gzip(data: st.DataObject, name: str, place: Path, clean: Clean) -> None:
    good = b'{"text": "the cat"}\n' * data.draw(st.integers(0, 50))
    members = gzip.compress(good, 1) + data.draw(st.sampled_from([b"", gzip.compress(good, 1), b"\0" * 9, b"junk"]))
    content = data.draw(damaged(members) | st.just(members))
    (place / name).write_bytes(content)
    with clean():
        check(place / name)


COLUMNS = {
    "string": pa.array(["the cat", "", None, "sat"]), "large": pa.array(["a", "b"], pa.large_string()),
    "view": pa.array(["a" * 40, "b"], pa.string_view()), "binary": pa.array([b"the", b"\xff"]),
    "number": pa.array([1, None]), "list": pa.array([["a"], []]), "nothing": pa.nulls(3),
    "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(), "struct": pa.array([{"text": "a"}, None]),
}  # fmt: skip


def parquet(column: pa.Array, name: str = "text", **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({name: column}), sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("name", ["text", "Text", "other"])
def test_parquet_columns_of_any_type(kind: str, name: str, place: Path, clean: Clean) -> None:
    (place / "a.parquet").write_bytes(parquet(COLUMNS[kind], name))
    with clean():
        documents = check(place / "a.parquet")
        assert documents == [text for text in COLUMNS[kind].to_pylist() if text]


@cases(75)
@given(
    data=st.data(),
    kind=st.sampled_from(["string", "large", "dictionary"]),
    compression=st.sampled_from(["none", "snappy"]),
)
def test_damaged_parquet(data: st.DataObject, kind: str, compression: str, place: Path, clean: Clean) -> None:
    (place / "b.parquet").write_bytes(data.draw(damaged(parquet(COLUMNS[kind], compression=compression))))
    with clean():
        check(place / "b.parquet")


@cases(15)
@example(spec="~0")
@example(spec="~\0")
@given(spec=TEXT | st.sampled_from(["hf:", "hf::", "~", "*", "[", "**", "/", ".", "builtin/", "/dev/null", "a.txt\0"]))
def test_any_spec(spec: str, place: Path, clean: Clean, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assume("\n" not in spec)  # the sentence shows it as it is
    with clean():
        for document in read_corpus(spec):
            assert document.strip()
            break
