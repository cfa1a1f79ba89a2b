"""Rates of making data: the figures are of the work that is timed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.speed import data_speed
from benchmarks.speed.data_speed import (
    example_rates,
    paper_examples,
    start_times,
    tokenizing,
    waiting_share,
)
from metatokens.data.store import TokenStore


def ticking(step: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += step
        yield now


def test_examples_a_second(
    small_store: TokenStore, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ticking(0.5)
    monkeypatch.setattr(data_speed.time, "process_time", lambda: next(clock))
    rates = list(
        example_rates(
            small_store.tokenizer,
            [small_corpus.read_text() * times for times in (40, 39, 38)],
            rounds=2,
        )
    )
    assert [rate.measured.split(",")[0] for rate in rates] == [
        "list_recall",
        "segment_counting",
        "parity",
        "copying",
    ]
    assert {(rate.value, rate.low, rate.high, rate.n) for rate in rates} == {
        (2000.0, 2000.0, 2000.0, 2)
    }


def test_all_examples_are_drawn_by_processes(
    small_store: TokenStore, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_speed, "PAPER_EXAMPLES", {"train": 6, "test": 2})
    monkeypatch.setattr(data_speed, "TASKS", ("parity", "list_recall"))
    rate = paper_examples(small_store.path / "tokenizer", str(small_corpus), processes=1)
    assert rate.measured == "16 examples, 1 processes"
    assert rate.value > 0


def test_tokenizing_is_compared_with_the_library(
    small_store: TokenStore, small_corpus: Path, tmp_path: Path
) -> None:
    rate = tokenizing(str(small_corpus), small_store.tokenizer, tmp_path, rounds=2)
    stores = [TokenStore(tmp_path / f"store{number}") for number in range(3)]
    assert {store.manifest.splits["train"].sha256 for store in stores} == {
        small_store.manifest.splits["train"].sha256
    }
    assert rate.n == 2
    assert 0 < rate.low <= rate.value <= rate.high


def test_the_share_of_waiting_lies_between_none_and_all(small_store: TokenStore) -> None:
    rate = waiting_share(small_store.tokenizer, steps=2, rounds=2)
    assert 0 < rate.low <= rate.high < 1


def test_starting_is_timed_in_processes_of_its_own() -> None:
    help_, import_ = start_times(rounds=1)
    assert min(help_.value, import_.value) > 0
