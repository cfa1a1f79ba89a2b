"""Write a token store: it appears at once, and an interrupted writing continues where it stopped.

While it is written, a store is the subfolder `.partial` of its folder:

    tokenizer/                written before the plan
    plan.json                 the settings, the parts of the corpus, and what else the shards depend on
    train/, held_out/         the finished shards
    done/PART-SHARD.json      the manifest's entries of a shard, of both splits; written last
    done/PART                 an empty file: the whole part is done

Processes write the parts of the corpus side by side. A shard depends only on the plan and its place in the corpus, so
neither the number of processes nor an interruption changes a byte of the store.
"""

import importlib.metadata
import os
import platform
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import Part, corpus_parts, read_corpus, read_part
from metatokens.data.store import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Ids,
    Manifest,
    Shard,
    SplitCounts,
    StoreRecord,
    StoreSettings,
    StoreSplit,
    TokenStore,
)
from metatokens.data.tokenizer import (
    encode_documents,
    load_tokenizer,
    meta_token_id,
    text_vocab_size,
)
from metatokens.errors import UserError
from metatokens.files import LOCK, exclusive, file_sha256, library_writes, sha256_of, write_whole
from metatokens.machine import available_cores, end_with_parent, worker_context

STAGING = ".partial"  # the subfolder of an unfinished store
PLAN = "plan.json"
HELD_OUT = 0.05  # the share of documents that is held out by default
# Both splits of a shard together: 15 MB of GPT-2's ids, which a reader checks in about 20 ms. C4 has about 22,000 such
# shards; a process can map all of them at once (Linux allows 65,530 mappings).
SHARD_CHARACTERS = 2**25
BATCH_CHARACTERS = 400_000  # encoded at a time: enough for every core


class Plan(StoreRecord):
    """Everything that the shards of a store depend on."""

    settings: StoreSettings
    parts: tuple[Part, ...]
    shard_characters: int
    first: tuple[str, ...]  # the checksums of the first two distinct documents


class FinishedShard(StoreRecord):
    """The manifest's entries of a finished shard, by split; a split without a document has no entry."""

    shards: dict[StoreSplit, Shard]


class Work(NamedTuple):
    """The data that each process needs to write shards."""

    folder: Path
    plan: Plan
    tokenizer: PreTrainedTokenizerBase


# --- the folder


def write_token_store(
    out: Path,
    corpus_spec: str,
    tokenizer_spec: str,
    *,
    held_out: float = HELD_OUT,
    extra_texts: Iterable[str] = (),
    overwrite: bool = False,
    workers: int | None = None,
) -> TokenStore:
    """Encode a corpus, continue an interrupted encoding, or open the finished store.

    A document is held out if the SHA-256 of its text, read as a fraction, is below `held_out`, so copies of a text are
    in one split. The first document is always for training, and the first one that differs from it is always held out,
    so that neither split is empty.

    If it is interrupted, a store keeps its finished shards, and a call with the same arguments continues. Whether the
    files behind a corpus spec have changed since then is not checked. Memory holds the ids of one shard and a few
    documents for each worker.

    Args:
        out: the store's folder.
        corpus_spec: see `read_corpus`.
        tokenizer_spec: see `load_tokenizer`.
        held_out: the share of documents that is held out, between 0 and 1.
        extra_texts: see `load_tokenizer`.
        overwrite: replace the store in the folder, if there is one.
        workers: the number of processes; each encodes one part of the corpus at a time (see `corpus_parts`);
            by default the number of cores. This process encodes a corpus of a single part itself, in several threads.

    Raises:
        UserError: if the corpus or the tokenizer cannot be loaded, or the corpus has no text; if the folder cannot be
            written, or another process is writing it; or if it holds a store with other settings, finished or not, and
            `overwrite` is not set.
    """
    texts = list(extra_texts) if tokenizer_spec.startswith("train:") else []
    settings = StoreSettings(
        corpus=corpus_spec,
        tokenizer=tokenizer_spec,
        held_out=held_out,
        extra_texts_sha256=sha256_of("\0".join(texts).encode()) if texts else None,
        python=platform.python_version() if corpus_spec == "builtin" else None,
    )
    if (out / MANIFEST).exists() and not overwrite:
        store = TokenStore.open(out)
        _check_same(settings, store.manifest.settings, f"{out} holds a token store")
        return store
    has_files = out.is_dir() and any(path.name != LOCK for path in out.iterdir())
    if has_files and not (out / STAGING).exists() and not overwrite:
        raise UserError(
            f"{out} is not empty and holds no token store: choose another folder, or --overwrite."
        )
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with exclusive(out):
            _write_store(
                out,
                settings,
                texts,
                is_new=is_new,
                overwrite=overwrite,
                workers=workers or available_cores(),
            )
    except OSError as error:
        raise UserError(f"the token store {out} cannot be written: {error}.") from error
    except BrokenProcessPool as error:
        raise UserError(
            "a process that wrote the token store was killed, perhaps because memory ran out: run the same command "
            "again to continue, with fewer --workers if need be."
        ) from error
    return TokenStore.open(out)


def _check_same(settings: StoreSettings, made_with: StoreSettings, store: str) -> None:
    if made_with != settings:
        raise UserError(
            f"{store} made with other settings ({made_with}): choose another folder, or --overwrite."
        )


def _write_store(
    out: Path,
    settings: StoreSettings,
    extra_texts: Sequence[str],
    *,
    is_new: bool,
    overwrite: bool,
    workers: int,
) -> None:
    """Write the store of a folder, or what is missing of it, while no other process writes it."""
    staging = out / STAGING
    begun_with = _settings_of(staging)
    if begun_with is not None and not overwrite:
        _check_same(settings, begun_with, f"{out} holds an unfinished token store")
    try:
        if begun_with != settings:
            _begin(staging, settings, extra_texts)
        if not (staging / MANIFEST).exists():
            _finish(staging, workers)
    except BaseException:
        if not any(staging.glob("done/*")):  # nothing that the next try could use
            shutil.rmtree(out if is_new else staging, ignore_errors=True)
        raise
    _move_into_place(staging, out)


def _settings_of(staging: Path) -> StoreSettings | None:
    """The settings of the unfinished store in a folder; None if there is none that can be continued."""
    try:
        if (staging / MANIFEST).exists():  # it was being moved into place
            return Manifest.read(staging).settings
        if (staging / SPLITS[0]).exists():  # the first to be moved
            return Plan.model_validate_json((staging / PLAN).read_bytes()).settings
    except (FileNotFoundError, ValidationError, UserError):
        pass
    return None


def _begin(staging: Path, settings: StoreSettings, extra_texts: Sequence[str]) -> None:
    """Make `staging` a store without shards: the tokenizer and the plan."""
    plan = Plan(
        settings=settings,
        parts=tuple(corpus_parts(settings.corpus)),
        shard_characters=SHARD_CHARACTERS,
        first=_first_documents(settings.corpus),
    )
    tokenizer = load_tokenizer(
        settings.tokenizer, corpus=read_corpus(settings.corpus), extra_texts=extra_texts
    )
    shutil.rmtree(staging, ignore_errors=True)
    for name in (*SPLITS, "done"):
        (staging / name).mkdir(parents=True)
    with library_writes(staging):
        tokenizer.save_pretrained(staging / TOKENIZER)
    write_whole(staging / PLAN, plan.model_dump_json().encode())


def _first_documents(corpus: str) -> tuple[str, ...]:
    """The checksums of the first two distinct documents, or of the only one."""
    checksums: dict[str, None] = {}
    for text in read_corpus(corpus):
        checksums[sha256_of(text.encode())] = None
        if len(checksums) == len(SPLITS):
            break
    if not checksums:
        raise UserError(f"the corpus {corpus} holds no text.")
    return tuple(checksums)


def _finish(staging: Path, workers: int) -> None:
    """Write the missing shards of the store in `staging`, and its manifest."""
    plan = Plan.model_validate_json((staging / PLAN).read_bytes())
    tokenizer = load_tokenizer(str(staging / TOKENIZER))
    _write_parts(Work(staging, plan, tokenizer), workers)
    records = sorted(staging.glob("done/*.json"))  # in the order of the corpus
    finished = [FinishedShard.model_validate_json(path.read_bytes()).shards for path in records]
    manifest = Manifest(
        settings=plan.settings,
        vocab_size=text_vocab_size(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        meta_token_id=meta_token_id(tokenizer),
        splits={
            split: SplitCounts.of(shards[split] for shards in finished if split in shards)
            for split in SPLITS
        },
        tokenizer={
            path.name: file_sha256(path) for path in sorted((staging / TOKENIZER).iterdir())
        },
        metatokens=importlib.metadata.version("metatokens"),
    )
    write_whole(staging / MANIFEST, manifest.sealed())


def _move_into_place(staging: Path, out: Path) -> None:
    """Make the complete store in `staging` the store of `out`; a call that was cut off can be repeated."""
    (out / MANIFEST).unlink(missing_ok=True)
    for name in (*SPLITS, TOKENIZER):
        if (staging / name).exists():
            shutil.rmtree(out / name, ignore_errors=True)
            (staging / name).replace(out / name)
    (staging / MANIFEST).replace(out / MANIFEST)
    shutil.rmtree(staging)


# --- the parts, in this process or in others


def _write_parts(work: Work, workers: int) -> None:
    """Write the missing shards, in at most `workers` processes."""
    missing = [part for part in range(len(work.plan.parts)) if not _part_mark(work, part).exists()]
    processes = min(workers, len(missing))
    if processes <= 1:
        for part in missing:
            _write_part(work, part)
        return
    context = worker_context(__name__)
    watched, held = context.Pipe(duplex=False)
    with (
        ProcessPoolExecutor(
            processes, context, _start_worker, (work, workers // processes, watched)
        ) as pool,
        held,  # closed first, however this ends: workers stop at once
    ):
        for future in as_completed([pool.submit(_write_part_in_worker, part) for part in missing]):
            future.result()


_work: Work  # of a worker process


def _start_worker(work: Work, threads: int, watched: Connection) -> None:
    global _work
    _work = work
    # Tokenizers read these when they first encode.
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = str(threads > 1).lower()
    end_with_parent(watched)


def _write_part_in_worker(part: int) -> None:
    _write_part(_work, part)


def _write_part(work: Work, part: int) -> None:
    """Write the missing shards of a part."""
    number = 0
    written_documents = 0
    while _shard_record(work, part, number).exists():
        finished = FinishedShard.model_validate_json(_shard_record(work, part, number).read_bytes())
        written_documents += sum(shard.documents for shard in finished.shards.values())
        number += 1
    documents = islice(
        read_part(work.plan.settings.corpus, work.plan.parts[part]), written_documents, None
    )
    while _write_shard(work, documents, part, number):
        number += 1
    _part_mark(work, part).touch()


def _part_mark(work: Work, part: int) -> Path:
    return work.folder / "done" / f"{part:05}"


def _shard_record(work: Work, part: int, number: int) -> Path:
    return work.folder / "done" / f"{part:05}-{number:05}.json"


# --- a shard


@dataclass
class _Encoded:
    """The documents of a shard that are in one split."""

    ids: list[Ids] = field(default_factory=list)
    characters: int = 0


def _write_shard(work: Work, documents: Iterator[str], part: int, number: int) -> bool:
    """Write the next shard of a part, of both splits; return whether any document was left."""
    shards: dict[StoreSplit, Shard] = {}
    for split, encoded in _encode_shard(work, documents).items():
        content = _arrow_file(np.concatenate(encoded.ids))
        shards[split] = Shard(
            part=part,
            number=number,
            documents=len(encoded.ids),
            characters=encoded.characters,
            tokens=sum(map(len, encoded.ids)) - len(encoded.ids),
            sha256=sha256_of(content),
        )
        write_whole(work.folder / split / shards[split].name, content)
    if shards:
        write_whole(
            _shard_record(work, part, number),
            FinishedShard(shards=shards).model_dump_json().encode(),
        )
    return bool(shards)


def _encode_shard(work: Work, documents: Iterator[str]) -> dict[StoreSplit, _Encoded]:
    """Encode the next documents of a part, as many as a shard takes."""
    encoded: dict[StoreSplit, _Encoded] = defaultdict(_Encoded)
    dtype = np.uint16 if text_vocab_size(work.tokenizer) <= 2**16 else np.uint32
    of_shard = _take(documents, work.plan.shard_characters)
    for texts in iter(lambda: list(_take(of_shard, BATCH_CHARACTERS)), []):
        for text, ids in zip(texts, encode_documents(work.tokenizer, texts), strict=True):
            of_split = encoded[_split_of(text, work.plan)]
            of_split.ids.append(np.array(ids, dtype))
            of_split.characters += len(text)
    return encoded


def _take(documents: Iterator[str], characters: int) -> Iterator[str]:
    """The next documents, up to the one with which they have so many characters."""
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return


def _split_of(text: str, plan: Plan) -> StoreSplit:
    digest = sha256_of(text.encode())
    if digest in plan.first:
        return SPLITS[plan.first.index(digest)]
    return "held_out" if int(digest[:16], 16) < plan.settings.held_out * 2**64 else "train"


def _arrow_file(ids: Ids) -> memoryview:
    batch = pa.record_batch({"ids": ids})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())
