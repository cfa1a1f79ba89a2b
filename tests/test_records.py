"""Records in files of lines: written and read again; errors name the file and the line."""

import base64
import gzip
import json
import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from metatokens.errors import UserError
from metatokens.files import append_lines
from metatokens.paper.records import CurvePoint, RunInfo
from metatokens.records import Measurement, Record, Result, pack_hits, read_lines, read_record, stamped, unpack_hits

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
    quantiles=(0.1, 0.5, 2.0, 4.0, 6.0, 7.5, 7.9),
)


def test_records_survive_the_trip_through_files(tmp_path: Path) -> None:
    append_lines(tmp_path / "a.jsonl", [EXACT.line()])
    append_lines(tmp_path / "a.jsonl", [NOTHING.line()])
    assert read_lines(tmp_path / "a.jsonl", Result) == [EXACT, NOTHING]
    append_lines(tmp_path / "b.jsonl", [INNER.line()])
    assert read_lines(tmp_path / "b.jsonl", Measurement) == [INNER]


def test_a_compressed_file_is_read_as_such(tmp_path: Path) -> None:
    append_lines(tmp_path / "a.jsonl", [EXACT.line(), NOTHING.line()])
    (tmp_path / "a").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert read_lines(tmp_path / "a", Result) == [EXACT, NOTHING]


def test_what_does_not_apply_is_left_out() -> None:
    assert json.loads(NOTHING.line()) == {"model": "gpt2", "metric": "token_accuracy", "n": 0, "seed": 1}


def test_figures_by_themselves_say_what_made_them_and_when() -> None:
    (record,) = stamped([NOTHING])
    written = json.loads(record.line())
    assert written["versions"] == {
        "python": platform.python_version(),
        "metatokens": "0.1.0",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    age = datetime.now(UTC) - datetime.fromisoformat(written["created"])
    assert timedelta(0) <= age < timedelta(hours=1)
    point = CurvePoint(model="meta", seed=0, step=1, loss=2.0)
    assert list(stamped([point])) == [point]


def test_nulls_versions_and_time_may_be_written_out(tmp_path: Path) -> None:
    about = '"task":null,"condition":"none","train_length":null,"length":1024,"text":"book","seed":1'
    made = '"versions":{"torch":"2.13.0"},"created":"2026-11-21T20:10:48+00:00"'
    (tmp_path / "a").write_text(f'{{"model":"gpt2",{about},"metric":"perplexity","value":381.1,"n":9,{made}}}\n')
    (result,) = read_lines(tmp_path / "a", Result)
    assert (result.value, result.task, result.created) == (381.1, None, "2026-11-21T20:10:48+00:00")
    assert result.versions == {"torch": "2.13.0"}


GOOD = EXACT.line()


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (EXACT, (GOOD, "{")),
        (EXACT, (GOOD, "[]")),
        (EXACT, (GOOD, "3")),
        (EXACT, ('"n":3', '"n":-1')),
        (EXACT, ('"low":0.1', '"low":NaN')),
        (EXACT, ('"n":3', '"n":9')),  # more than the 8 bits of `hits`
        (EXACT, ("gA==", "gAA=")),
        (EXACT, ("gA==", "g?==")),
        (EXACT, ("gA==", "gA=")),
        (EXACT, ("exact_match", "f1")),
        (EXACT, ('"seed":0', '"seeds":0')),
        (EXACT, ('"length":256', '"lengths":256')),
        (EXACT, ('"metric":"exact_match",', "")),
        (INNER, ('"layer":1', '"layer":"1"')),
        (INNER, ('"layer":1', '"layers":1')),
        (INNER, ("attention_logit_change", "logit_change")),
        (INNER, ('"n":9', '"n":-9')),
        (INNER, ('"value":4.0', '"value":NaN')),
        (INNER, ('"seed":0,', "")),
        (INNER, ('"quantiles":[', '"quantiles":[0,')),
    ],
)
def test_a_malformed_line_is_named(record: Record, changes: tuple[str, str], tmp_path: Path) -> None:
    good = record.line()
    line = good.replace(*changes)
    assert line != good
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(UserError) as caught:
        read_lines(tmp_path / "a.jsonl", type(record))
    assert str(caught.value).startswith(f"{tmp_path / 'a.jsonl'}, line 3: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("figures", ['"exact_match":0.5', '"n":3', '"losses":1.0', '"loss":1.0,"lr":0.1'])
def test_a_point_of_a_curve_has_a_figure_and_nothing_unknown(figures: str, tmp_path: Path) -> None:
    (tmp_path / "curves.jsonl").write_text(f'{{"model":"meta","seed":0,"step":5,{figures}}}\n')
    with pytest.raises(UserError, match=r"curves\.jsonl, line 1: "):
        read_lines(tmp_path / "curves.jsonl", CurvePoint)


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"presets": "small"}')
    with pytest.raises(UserError, match=r"run\.json: presets: "):
        read_record(tmp_path / "run.json", RunInfo)


PACKED = gzip.compress(GOOD.encode() * 9, mtime=0)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", gzip.compress(b"\xff", mtime=0), PACKED[:-9], PACKED[:20] + b"?" * 20]
)
def test_a_file_that_is_no_text_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl: "):
        read_lines(tmp_path / "a.jsonl", Result)


@pytest.mark.parametrize(("name", "said"), [("nowhere.jsonl", "No such file or directory"), ("", "Is a directory")])
def test_a_missing_file_is_named(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"cannot read .*: {said}"):
        read_lines(tmp_path / name, Result)


def test_hits_come_back_as_they_were_packed() -> None:
    for n in (1, 8, 13, 2000):
        hits = np.random.default_rng(n).random(n) < 0.5
        assert unpack_hits(pack_hits(hits.tolist()), n).tolist() == hits.tolist()
    assert pack_hits([True, False, False]) == base64.b64encode(b"\x80").decode()
