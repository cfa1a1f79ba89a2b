"""Corpora that are hard on a reader: huge lines, many documents, odd bytes, bombs; and what they cost in memory."""

import gzip
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from metatokens.data.corpus import HARD_CUT, read_corpus
from metatokens.data.tokenizer import load_tokenizer
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError
from metatokens.tasks.curriculum import task_texts
from tests.hostile.drawing import TEXT, cases
from tests.hostile.good import Clean

MIB = 2**20

READER = """
import json, resource, sys, time
from metatokens.errors import UserError
from metatokens.data.corpus import read_corpus
from tests.hostile.good import Clean
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
documents = characters = longest = 0
said = None
try:
    for document in read_corpus(sys.argv[1]):
        documents, characters, longest = documents + 1, characters + len(document), max(longest, len(document))
except UserError as error:
    said = str(error)
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
print(json.dumps({"documents": documents, "characters": characters, "longest": longest, "peak": peak, "said": said}))
"""


def read_apart(path: Path) -> dict[str, object]:
    """Reads a corpus in a process of its own; `peak` is in MiB, beyond what Python itself takes."""
    command = [sys.executable, "-c", READER, str(path)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True, timeout=600).stdout)


def test_one_long_line(is_thorough: bool, tmp_path: Path) -> None:
    size = (200 if is_thorough else 5) * 10**6
    path = tmp_path / "line.txt"
    path.write_bytes(b"abcde fgh " * (size // 10))
    found = read_apart(path)
    assert (found["documents"], found["characters"], found["said"]) == (1, size, None)
    assert found["peak"] < 6 * size / MIB + 32  # the line's bytes, its text, and the document joined from its lines
    path.write_bytes(b'{"text": "' + b"abcde fgh " * (size // 10) + b'"}\n')
    found = read_apart(path.rename(tmp_path / "line.jsonl"))
    assert (found["documents"], found["characters"], found["said"]) == (1, size, None)
    assert found["peak"] < 8 * size / MIB + 32


def test_many_documents_of_a_word(is_thorough: bool, tmp_path: Path) -> None:
    count = 10**6 if is_thorough else 10**4
    path = tmp_path / "words.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"text": "w{number}"}}\n' for number in range(count))
    assert sum(1 for _ in read_corpus(str(path))) == count
    tokenizer = tmp_path / "tokenizer"
    load_tokenizer("train:400", corpus=read_corpus(str(path)), extra_texts=task_texts()).save_pretrained(tokenizer)
    store = write_token_store(tmp_path / "tokens", str(path), str(tokenizer), held_out=0.1, workers=1)
    assert sum(split.documents for split in store.manifest.splits.values()) == count
    for name, split in store.manifest.splits.items():
        tokens = store.tokens(name)[:]
        assert (tokens == store.manifest.eos_token_id).sum() == split.documents
        assert len(tokens) == split.tokens + split.documents


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("nul.txt", b"the\0cat\0\n", ["the\0cat\0\n"]),
        ("only-nul.txt", b"\0", ["\0"]),
        ("bom.txt", b"\xef\xbb\xbfthe cat", ["the cat"]),
        ("two-boms.txt", b"\xef\xbb\xbf\xef\xbb\xbfcat", ["\ufeffcat"]),
        ("bom.jsonl", b'\xef\xbb\xbf{"text": "the cat"}', ["the cat"]),
        ("ends.txt", "a\r\nb\rc\n\re\x85f\u2028g".encode(), ["a\r\nb\rc\n\re\x85f\u2028g"]),
        ("ends.jsonl", b'{"text": "a"}\r\n{"text": "b"}\n\r\n{"text": "c"}', ["a", "b", "c"]),
        ("inner.jsonl", '{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c"]),
        ("empty.txt", b"", []),
        ("empty.txt.gz", gzip.compress(b"", mtime=0), []),
        ("no-members.txt.gz", b"", []),
        ("blank.jsonl", b"\n \r\n\t\n", []),
        ("escapes.jsonl", b'{"text": "\\ud83d\\ude00"}', ["\U0001f600"]),
    ],
)  # fmt: skip
def test_odd_bytes_are_text(name: str, content: bytes, documents: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(read_corpus(str(tmp_path / name))) == documents


GZIPPED = gzip.compress(random.Random(0).randbytes(3_000).hex().encode() + b"\n", mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("surrogate.jsonl", b'{"text": "\\ud800"}', "line 1 has no text"),
        ("surrogate.txt", b"\xed\xa0\x80", "cannot be read: .utf-8. codec"),
        ("utf16.txt", "the cat".encode("utf-16"), "cannot be read: .utf-8. codec"),
        ("cut.txt.gz", GZIPPED[: len(GZIPPED) // 2], "cannot be read"),
        ("cut.jsonl.gz", GZIPPED[:5], "cannot be read"),
        ("no-checksum.txt.gz", GZIPPED[:-8], "cannot be read"),
        ("checksum.txt.gz", GZIPPED[:-8] + bytes(8), "cannot be read"),
        ("plain.txt.gz", b"the cat", "cannot be read"),
        ("junk.txt.gz", GZIPPED + b"junk", "cannot be read"),
        ("deep.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("digits.jsonl", b'{"text": ' + b"9" * 5_000 + b"}", "line 1 is not JSON"),
    ],
)
def test_what_is_no_text_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as refusal:
        list(read_corpus(str(tmp_path / name)))
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def write_bomb(path: Path, size: int, piece: bytes) -> None:
    """A gzip file of so many bytes when unpacked."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(size // len(piece)):
            file.write(piece)


def test_a_bomb_with_lines_takes_bounded_memory(is_thorough: bool, tmp_path: Path) -> None:
    size = (2_000 if is_thorough else 100) * MIB
    write_bomb(tmp_path / "bomb.txt.gz", size, (b"a" * 1023 + b"\n") * 1024)
    assert (tmp_path / "bomb.txt.gz").stat().st_size < size / 200
    found = read_apart(tmp_path / "bomb.txt.gz")
    assert found["characters"] == size
    assert found["longest"] < 2 * HARD_CUT
    assert found["peak"] < 16


def test_a_bomb_of_one_line_is_as_large_as_its_line(is_thorough: bool, tmp_path: Path) -> None:
    size = (400 if is_thorough else 40) * MIB
    write_bomb(tmp_path / "bomb.txt.gz", size, b"a" * MIB)
    found = read_apart(tmp_path / "bomb.txt.gz")
    assert (found["documents"], found["characters"]) == (1, size)
    assert found["peak"] < 6 * size / MIB + 32


def test_reading_takes_time_in_proportion(tmp_path: Path) -> None:
    """A reader that looked at each line again for the next would take a hundred times as long for ten times as much."""

    def seconds(lines: int) -> float:
        (tmp_path / "lines.txt").write_bytes(b"a\n" * lines)
        began = time.process_time()
        assert sum(1 for _ in read_corpus(str(tmp_path / "lines.txt"))) > 0
        return time.process_time() - began

    seconds(1_000)
    assert seconds(300_000) < 40 * seconds(30_000)


COLUMNS = {
    "string": pa.array(["the cat", "", None, "sat"]), "large": pa.array(["a", "b"], pa.large_string()),
    "view": pa.array(["a" * 40, "b"], pa.string_view()), "binary": pa.array([b"the", b"\xff"]),
    "number": pa.array([1, None]), "list": pa.array([["a"], []]), "nothing": pa.nulls(3),
    "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(), "struct": pa.array([{"text": "a"}, None]),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("name", ["text", "Text", "other"])
def test_parquet_columns_of_any_type(kind: str, name: str, tmp_path: Path, clean: Clean) -> None:
    pq.write_table(pa.table({name: COLUMNS[kind]}), tmp_path / "a.parquet")
    with clean():
        assert list(read_corpus(str(tmp_path / "a.parquet"))) == [text for text in COLUMNS[kind].to_pylist() if text]


@cases(15)
@example(spec="~0")
@example(spec="~\0")
@given(spec=TEXT | st.sampled_from(["hf:", "hf::", "~", "*", "[", "**", "/", ".", "builtin/", "/dev/null", "a.txt\0"]))
def test_any_spec(spec: str, tmp_path: Path, clean: Clean, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assume("\n" not in spec)  # the sentence shows it as it is
    with clean():
        for document in read_corpus(spec):
            assert document.strip()
            break
