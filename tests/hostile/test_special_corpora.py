"""Corpora that are hard on a reader: odd bytes, bombs and many lines; and what they cost in memory."""

import gzip
import json
import subprocess
import sys

import pytest

from metatokens.data.corpus import HARD_CUT, read_corpus

MIB = 2**20

# Prints what a corpus holds, and the most memory that reading it took, in MiB.
READER = """
import json, resource, sys
from metatokens.data.corpus import read_corpus
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
characters = longest = 0
for document in read_corpus(sys.argv[1]):
    characters += len(document)
    longest = max(longest, len(document))
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
print(json.dumps({"characters": characters, "longest": longest, "peak": peak}))
"""


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("nul.txt", b"the\0cat\0\n", ["the\0cat\0\n"]),
        ("bom.txt", b"\xef\xbb\xbfthe cat", ["the cat"]),
        ("bom.jsonl", b'\xef\xbb\xbf{"text": "the cat"}', ["the cat"]),
        (
            "ends.txt",
            "a\r\nb\rc\n\re\x85f\u2028g".encode(),
            ["a\r\nb\rc\n\re\x85f\u2028g"],
        ),
        (
            "ends.jsonl",
            b'{"text": "a"}\r\n{"text": "b"}\n\r\n{"text": "c"}',
            ["a", "b", "c"],
        ),
        ("inner.jsonl", '{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c"]),
        ("empty.txt", b"", []),
        ("no-members.txt.gz", b"", []),
        ("blank.jsonl", b"\n \r\n\t\n", []),
        ("escapes.jsonl", b'{"text": "\\ud83d\\ude00"}', ["\U0001f600"]),
    ],
)
def test_odd_bytes_are_text(name, content, documents, tmp_path):
    (tmp_path / name).write_bytes(content)

    assert list(read_corpus(str(tmp_path / name))) == documents


def test_a_bomb_with_lines_takes_bounded_memory(is_thorough, tmp_path):
    size = (2_000 if is_thorough else 100) * MIB
    bomb = tmp_path / "bomb.txt.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        for _ in range(size // MIB):
            file.write((b"a" * 1023 + b"\n") * 1024)
    assert bomb.stat().st_size < size / 200

    printed = subprocess.run(
        [sys.executable, "-c", READER, str(bomb)],
        capture_output=True,
        check=True,
        timeout=600,
    )

    read = json.loads(printed.stdout)
    assert read["characters"] == size
    assert read["longest"] < 2 * HARD_CUT
    assert read["peak"] < 16
