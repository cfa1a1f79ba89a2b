"""Result records and Wilson's interval."""

import json
import math
import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from metatokens.errors import UserError
from metatokens.evaluation.results import Result, read_results, wilson_interval, write_results


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_the_closed_formula(counts: tuple[int, int]) -> None:
    successes, n = counts
    z, p = 1.959963984540054, successes / n  # z: the normal distribution's 97.5 % point
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = wilson_interval(successes, n)
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=1e-9)
    assert 0 <= low <= p <= high <= 1


@pytest.mark.parametrize("counts", [(1, 0), (3, 2), (-1, 2)])
def test_impossible_counts(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"n|k|successes"):
        wilson_interval(*counts)


EXACT = Result(
    model="meta\u2028é",  # a line separator that is no line feed
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
)
NOTHING = Result(model="gpt2", metric="token_accuracy", value=None, n=0, seed=1)


def test_results_survive_the_trip_through_files(tmp_path: Path) -> None:
    write_results(tmp_path / "a.jsonl", [EXACT])
    write_results(tmp_path / "a.jsonl", [NOTHING])  # appended
    write_results(tmp_path / "b.jsonl", [EXACT])
    assert read_results([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]) == [EXACT, NOTHING, EXACT]
    assert read_results([]) == []


def test_what_does_not_apply_is_null_and_provenance_is_filled_in() -> None:
    record = json.loads(NOTHING.model_dump_json())
    null = {key for key, value in record.items() if value is None}
    assert null == {
        "position_embedding", "task", "condition", "train_condition", "train_length", "length", "intervention",
        "noise_seed", "text", "value", "low", "high", "chance", "recipe",
    }  # fmt: skip
    assert record["versions"] == {
        "python": platform.python_version(),
        "metatokens": "0.1.0",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    age = datetime.now(UTC) - datetime.fromisoformat(record["created"])
    assert timedelta(0) <= age < timedelta(hours=1)


GOOD = NOTHING.model_dump_json()


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        GOOD.replace('"n":0', '"n":-1'),
        GOOD.replace('"value":null', '"value":NaN'),
        GOOD.replace("token_accuracy", "f1"),
        GOOD.replace('"seed":1', '"seeds":1'),
        GOOD.replace('"model":"gpt2",', ""),
    ],
)
def test_a_malformed_line_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(UserError) as caught:
        read_results([tmp_path / "a.jsonl"])
    assert str(caught.value).startswith(f"{tmp_path / 'a.jsonl'}, line 3 is not a result record: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"cannot read the results in .*a\.jsonl"):
        read_results([tmp_path / "a.jsonl"])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write results to .*: Is a directory\.$"):
        write_results(tmp_path, [EXACT])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(UserError, match="no result file at"):
            read_results([path])
