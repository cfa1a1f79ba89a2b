"""Blocks straight from a corpus: together, its readers read each document once an epoch."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from metatokens.data.store import TokenStore
from metatokens.data.streaming import StreamedBlocks, TextStream
from metatokens.data.tokenizer import load_tokenizer, meta_token_id
from metatokens.data.writing import write_token_store
from metatokens.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # Python's own, about forking with threads
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]
every_split = pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (ranks, workers) if (ranks, workers) in ((1, 0), (1, 3), (2, 1), (4, 0))
        else pytest.param(ranks, workers, marks=pytest.mark.thorough)
        for ranks in (1, 2, 4)
        for workers in (0, 1, 3)
    ],
)  # fmt: skip
DOCUMENTS = 600


@pytest.fixture(scope="module")
def tokenizer_folder(small_store: TokenStore) -> str:
    return str(small_store.path / "tokenizer")


@pytest.fixture(scope="module", params=["one file", "many files"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents that each tell their number, in one part or in more parts than there are readers."""
    folder = tmp_path_factory.mktemp("corpus")
    files = 1 if request.param == "one file" else 15
    for file in range(files):
        numbers = range(file * DOCUMENTS // files, (file + 1) * DOCUMENTS // files)
        lines = [json.dumps({"text": text_of(number)}) for number in numbers]
        (folder / f"{file:02}.jsonl").write_text("\n".join(lines))
    return str(folder / "*.jsonl")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a part."""
    monkeypatch.setattr("metatokens.data.corpus.PART_BYTES", 1)


def blocks(corpus: str, tokenizer: str, seed: int = 0) -> StreamedBlocks:
    stream = TextStream.open(corpus, tokenizer)
    return StreamedBlocks(stream, block_size=16, fraction=0.25, placement="uniform", seed=seed)


def numbers_in(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The documents that are whole in a row of text."""
    text = tokenizer.decode([one for one in ids if one != meta_token_id(tokenizer)])
    return [int(number) for number in re.findall(r"The document (\d+) says(?: so)*\.", text)]


class Told(IterableDataset[dict[str, Any]]):
    """Blocks that each tell the worker who read them."""

    def __init__(self, dataset: StreamedBlocks):
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        return ({**block, "worker": info.id if info else 0} for block in self.dataset)


def text_of(number: int) -> str:
    return f"The document {number} says{' so' * (number % 5)}."


@pytest.mark.usefixtures("small_parts")
@every_split
def test_every_document_is_read_once_an_epoch(
    ranks: int, workers: int, corpus: str, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    dataset, tokenizer = blocks(corpus, tokenizer_folder), load_tokenizer(tokenizer_folder)
    readers = ranks * max(1, workers)
    monkeypatch.setattr("metatokens.data.streaming.count", lambda: range(1))  # one epoch
    read: Counter[int] = Counter()
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        own: dict[int, list[int]] = {}  # by worker, of whom the loader takes a block in turn while they have one
        for block in DataLoader(Told(dataset), batch_size=None, num_workers=workers):
            ids = block["input_ids"].tolist()
            assert len(ids) == 16
            assert ids.count(meta_token_id(tokenizer)) == 4
            own.setdefault(block["worker"], []).extend(ids)
        assert len(own) == max(1, workers)
        for ids in own.values():
            read.update(numbers_in(ids, tokenizer))
    assert set(read.values()) == {1}
    digests = {number: hashlib.sha256(text_of(number).encode()).digest() for number in range(DOCUMENTS)}
    expected = {number for number, digest in digests.items() if int.from_bytes(digest[:8]) >= 0.05 * 2**64}
    assert 0.9 * DOCUMENTS < len(expected) < 0.98 * DOCUMENTS
    assert set(read) <= expected
    assert len(expected) - len(read) <= 2 * readers  # in what is left of a reader's epoch


def test_what_a_store_holds_out_is_left_out(corpus: str, tokenizer_folder: str, tmp_path: Path) -> None:
    store = write_token_store(tmp_path / "tokens", corpus, tokenizer_folder)
    stored = numbers_in(store.tokens("train")[:].tolist(), store.tokenizer)
    first = [window for window in blocks(corpus, tokenizer_folder)._windows(0, 0, 1)]
    streamed = numbers_in(np.concatenate(first).tolist(), store.tokenizer)
    beyond = [[number for number in numbers if number > 1] for numbers in (streamed, stored)]
    assert beyond[0] == beyond[1][: len(beyond[0])]
    assert len(streamed) > 0.9 * DOCUMENTS


@pytest.mark.usefixtures("small_parts")
def test_parts_are_read_in_an_order_of_their_own_each_epoch(corpus: str, tokenizer_folder: str) -> None:
    dataset, other = blocks(corpus, tokenizer_folder), blocks(corpus, tokenizer_folder, seed=1)
    first, second = ([window.tolist() for window in dataset._windows(epoch, 0, 1)] for epoch in (0, 1))
    again = [window.tolist() for window in blocks(corpus, tokenizer_folder)._windows(0, 0, 1)]
    assert first == again
    is_one_part = len(dataset._stream.parts) == 1
    assert (first == second) is is_one_part
    assert (first == [window.tolist() for window in other._windows(0, 0, 1)]) is is_one_part


def test_a_corpus_too_small_for_its_readers_is_a_sentence(tokenizer_folder: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Nothing much.")
    with pytest.raises(UserError, match="too little text for a block of 12 text tokens for each of 1 readers"):
        next(iter(blocks(str(tmp_path / "short.txt"), tokenizer_folder)))
