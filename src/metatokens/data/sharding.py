"""The shards of a token store: parts of the corpus side by side, each in shards that appear one by one.

A shard depends on the plan and its place in the corpus alone, so neither the number of workers nor an interruption
changes a byte of the store.
"""

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import Part, read_part
from metatokens.data.store import SPLITS, Record, Shard, Split, StoreSettings, is_held_out
from metatokens.data.tokenizer import encode_documents, text_vocab_size
from metatokens.files import sha256_of, write_whole
from metatokens.machine import worker_context

BATCH_CHARACTERS = 400_000  # encoded at a time: enough for every core, and few enough for the next batch to overlap


class Plan(Record):
    """What the shards of a store are made of."""

    settings: StoreSettings
    parts: tuple[Part, ...]
    shard_characters: int
    first: tuple[str, ...]  # the checksums of the first two distinct documents


class Done(Record):
    """What the manifest will say of a shard."""

    shards: dict[Split, Shard]


class Work(NamedTuple):
    """What every worker knows."""

    folder: Path
    plan: Plan
    tokenizer: PreTrainedTokenizerBase


def write_parts(work: Work, workers: int) -> None:
    """Write the shards that are not there yet.

    Args:
        work: its folder has the subfolders `train`, `held_out` and `done`.
        workers: processes at most.

    Raises:
        UserError: if the corpus cannot be read.
        OSError: if the folder cannot be written.
        BrokenProcessPool: if a worker was killed.
    """
    left = [number for number in range(len(work.plan.parts)) if not (work.folder / "done" / f"{number:05}").exists()]
    processes = min(workers, len(left))
    if processes <= 1:
        _write_parts_here(work, left, in_threads=workers > 1)
        return
    context = worker_context(__name__)
    watched, held = context.Pipe(duplex=False)
    with (
        ProcessPoolExecutor(processes, context, _start_worker, (work, workers // processes, watched)) as pool,
        held,  # closed first, however this ends: workers stop at once
    ):
        for future in as_completed([pool.submit(_write_own_part, number) for number in left]):
            future.result()


def _write_parts_here(work: Work, parts: Iterable[int], *, in_threads: bool) -> None:
    before = os.environ["TOKENIZERS_PARALLELISM"]
    if not in_threads:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        for part in parts:
            _write_part(work, part)
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before


_work: Work  # of a worker process


def _start_worker(work: Work, threads: int, watched: Connection) -> None:
    """Run until the parent process closes its end of a pipe, or is no more."""
    global _work
    _work = work
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business

    def stop_with_parent() -> None:
        watched.poll(None)
        os._exit(1)

    threading.Thread(target=stop_with_parent, daemon=True).start()


def _write_own_part(number: int) -> None:
    _write_part(_work, number)


def _write_part(work: Work, number: int) -> None:
    """Write the shards of a part that are not there yet."""
    shard = written = 0
    while (path := work.folder / "done" / f"{number:05}-{shard:05}.json").exists():
        written += sum(counts.documents for counts in Done.model_validate_json(path.read_bytes()).shards.values())
        shard += 1
    documents = islice(read_part(work.plan.settings.corpus, work.plan.parts[number]), written, None)
    while _write_shard(work, documents, number, shard):
        shard += 1
    (work.folder / "done" / f"{number:05}").touch()


def _write_shard(work: Work, documents: Iterator[str], part: int, number: int) -> bool:
    """Write the next shard of a part, of both splits; whether there was any document left."""
    dtype = np.uint16 if text_vocab_size(work.tokenizer) <= 2**16 else np.uint32
    counts: dict[Split, Counter[str]] = {split: Counter(documents=0, characters=0, tokens=0) for split in SPLITS}
    ids: dict[Split, list[npt.NDArray[np.unsignedinteger]]] = {split: [] for split in SPLITS}
    texts = batches(documents, work.plan.shard_characters)
    for batch, encoded in _encoded_batches(texts, work.tokenizer):
        batch_ids: dict[Split, list[list[int]]] = {split: [] for split in SPLITS}
        for text, text_ids in zip(batch, encoded, strict=True):
            split = _side(text, work.plan)
            batch_ids[split].append(text_ids)
            counts[split].update(documents=1, characters=len(text), tokens=len(text_ids) - 1)  # its end aside
        for split in SPLITS:
            ids[split].append(np.fromiter(chain.from_iterable(batch_ids[split]), dtype))
    if not ids[SPLITS[0]]:
        return False
    shards: dict[Split, Shard] = {}
    for split in SPLITS:
        content = _arrow_file(np.concatenate(ids[split]))
        shards[split] = Shard(part=part, number=number, sha256=sha256_of(content), **counts[split])
        if shards[split].documents:
            write_whole(work.folder / split / shards[split].name, content)
    done = work.folder / "done" / f"{part:05}-{number:05}.json"
    write_whole(done, Done(shards=shards).model_dump_json().encode())
    return True


def _arrow_file(ids: npt.NDArray[np.unsignedinteger]) -> memoryview:
    batch = pa.record_batch({"ids": ids})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _side(text: str, plan: Plan) -> Split:
    digest = sha256_of(text.encode())
    if digest in plan.first:
        return SPLITS[plan.first.index(digest)]
    return "held_out" if is_held_out(digest, plan.settings.held_out) else "train"


def _encoded_batches(
    batches: Iterable[list[str]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Batches of texts with their ids; the next batch is encoded, outside Python, while this one is in use."""
    with ThreadPoolExecutor(1) as thread:
        ahead: deque[tuple[list[str], Future[list[list[int]]]]] = deque()
        for batch in batches:
            ahead.append((batch, thread.submit(encode_documents, tokenizer, batch)))
            if len(ahead) == 2:
                texts, ids = ahead.popleft()
                yield texts, ids.result()
        for texts, ids in ahead:
            yield texts, ids.result()


def batches(documents: Iterable[str], most: int) -> Iterator[list[str]]:
    """Batches of documents, until they have so many characters together."""
    batch: list[str] = []
    characters = before = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        is_last = before + characters >= most
        if characters >= BATCH_CHARACTERS or is_last:
            yield batch
            if is_last:
                return
            before += characters
            batch, characters = [], 0
    if batch:
        yield batch
