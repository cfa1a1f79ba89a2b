"""Corpora that are hard on a reader: odd bytes, bombs and many lines; and what they cost in memory."""

import gzip

import pytest

from metatokens.data.corpus import HARD_CUT, read_corpus
from tests.hostile.memory import print_growth

MIB = 2**20


def print_lengths(spec):
    """Read a corpus; print the characters that it has, and those of its longest document."""
    characters = longest = 0
    for document in read_corpus(spec):
        characters += len(document)
        longest = max(longest, len(document))
    print(characters, longest)


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("nul.txt", b"the\0cat\0\n", ["the\0cat\0\n"]),
        ("bom.txt", b"\xef\xbb\xbfthe cat", ["the cat"]),
        (
            "ends.jsonl",
            b'{"text": "a"}\r\n{"text": "b"}\n\r\n{"text": "c"}',
            ["a", "b", "c"],
        ),
        ("inner.jsonl", '{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c"]),
        ("no-members.txt.gz", b"", []),
        ("blank.jsonl", b"\n \r\n\t\n", []),
        ("escapes.jsonl", b'{"text": "\\ud83d\\ude00"}', ["\U0001f600"]),
    ],
)
def test_odd_bytes_are_text(name, content, documents, tmp_path):
    (tmp_path / name).write_bytes(content)

    assert list(read_corpus(str(tmp_path / name))) == documents


def test_a_bomb_with_lines_takes_bounded_memory(is_thorough, tmp_path, forked):
    size = (2_000 if is_thorough else 100) * MIB
    bomb = tmp_path / "bomb.txt.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        for _ in range(size // MIB):
            file.write((b"a" * 1023 + b"\n") * 1024)
    assert bomb.stat().st_size < size / 200

    status, printed, error = forked(print_growth, print_lengths, str(bomb)).wait()

    assert status == 0, error
    characters, longest, growth = map(int, printed.split())
    assert characters == size
    assert longest < 2 * HARD_CUT
    assert growth < 16 * 1024
