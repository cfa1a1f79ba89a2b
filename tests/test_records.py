"""Records in files of lines: written and read again; errors name the file and the line."""

import base64
import gzip
import json

import numpy as np
import pytest

from metatokens.errors import UserError
from metatokens.files import append_lines
from metatokens.paper.records import RunInfo
from metatokens.records import (
    Measurement,
    Result,
    pack_hits,
    read_lines,
    read_record,
    unpack_hits,
)

EXACT = Result(
    model="meta\u2028é",  # contains a line separator that is not a line feed
    position_embedding="rope",
    task="parity",
    condition="paper",
    train_condition="paper",
    train_length=128,
    length=256,
    metric="exact_match",
    value=1 / 3,
    n=3,
    low=0.1,
    high=0.7,
    chance=0.5,
    seed=0,
    recipe="demo",
    hits="gA==",
)
NOTHING = Result(model="gpt2", metric="token_accuracy", value=None, n=0, seed=1)
INNER = Measurement(
    analysis="sharpness",
    model="meta",
    position_embedding="rope",
    seed=0,
    metric="attention_logit_change",
    module="attention",
    layer=1,
    head=2,
    value=4.0,
    n=9,
)


def test_records_survive_the_trip_through_files(tmp_path):
    append_lines(tmp_path / "a.jsonl", [EXACT.line()])
    append_lines(tmp_path / "a.jsonl", [NOTHING.line()])
    append_lines(tmp_path / "b.jsonl", [INNER.line()])

    assert read_lines(tmp_path / "a.jsonl", Result) == [EXACT, NOTHING]
    assert read_lines(tmp_path / "b.jsonl", Measurement) == [INNER]


def test_what_does_not_apply_is_left_out():
    assert json.loads(NOTHING.line()) == {
        "model": "gpt2",
        "metric": "token_accuracy",
        "n": 0,
        "seed": 1,
    }


@pytest.mark.parametrize(
    ("record", "good", "bad"),
    [
        (EXACT, EXACT.line(), "{"),
        (EXACT, '"low":0.1', '"low":NaN'),
        (EXACT, '"n":3', '"n":9'),  # more than the 8 bits of `hits`
        (EXACT, "gA==", "gAA="),
        (EXACT, '"value":0.', '"value":7.'),
        (EXACT, "exact_match", "perplexity"),  # which is 1 at least
        (EXACT, "gA==", "g?=="),
        (EXACT, "exact_match", "f1"),
        (EXACT, '"length":256', '"lengths":256'),
        (INNER, "attention_logit_change", "logit_change"),
        (INNER, '"layer":1', '"layer":"1"'),  # strict
    ],
)
def test_a_malformed_line_is_named(record, good, bad, tmp_path):
    line = record.line()
    malformed = line.replace(good, bad)
    (tmp_path / "a.jsonl").write_text(f"{line}\n\n{malformed}\n{line}\n")

    with pytest.raises(UserError) as caught:
        read_lines(tmp_path / "a.jsonl", type(record))

    sentence = str(caught.value)
    assert malformed != line
    assert sentence.startswith(f"{tmp_path / 'a.jsonl'}, line 3: ")
    assert "\n" not in sentence


def test_a_file_that_is_no_record_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"presets": "small"}')

    with pytest.raises(UserError, match=r"run\.json: presets: "):
        read_record(tmp_path / "run.json", RunInfo)


PACKED = gzip.compress(EXACT.line().encode() * 9, mtime=0)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", PACKED[:-9], None], ids=["no UTF-8", "cut", "missing"]
)
def test_a_file_that_cannot_be_read_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)

    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl: "):
        read_lines(tmp_path / "a.jsonl", Result)


@pytest.mark.parametrize("n", [1, 8, 13])
def test_hits_come_back_as_they_were_packed(n):
    hits = (np.random.default_rng(n).random(n) < 0.5).tolist()

    assert unpack_hits(pack_hits(hits), n).tolist() == hits


def test_the_first_hit_is_the_highest_bit():
    assert pack_hits([True, False, False]) == base64.b64encode(b"\x80").decode()
