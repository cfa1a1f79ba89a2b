"""Write a token store: it appears at once, and an interrupted writing continues where it stopped.

While it is written, a store is the subfolder `.partial` of its folder:

    tokenizer/            written before the plan
    plan.json             the settings, the parts of the corpus, and what else the shards depend on
    train/, held_out/     the shards, one for each part
    done/PART.json        the manifest's entries of a part's shards; written after them

Processes write the parts of the corpus side by side; a part that was not finished is written again. A shard depends
only on the plan and its part, so neither the number of processes nor an interruption changes a byte of the store.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeGuard

import numpy as np
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import Part, corpus_parts, read_corpus, read_part
from metatokens.data.store import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Manifest,
    Shard,
    SplitCounts,
    StoreRecord,
    StoreSettings,
    StoreSplit,
    TokenStore,
    id_type,
    shard_name,
)
from metatokens.data.tokenizer import (
    encode_documents,
    load_tokenizer,
    text_vocab_size,
)
from metatokens.errors import UserError
from metatokens.files import LOCK, exclusive, file_sha256, library_writes, sha256_of, write_whole
from metatokens.machine import available_cores, end_with_parent, worker_context

STAGING = ".partial"  # the subfolder of an unfinished store
PLAN = "plan.json"
HELD_OUT = 0.05  # the share of documents that is held out by default
BATCH_CHARACTERS = 400_000  # encoded at a time: enough for every core


class Plan(StoreRecord):
    """Everything that the shards of a store depend on."""

    settings: StoreSettings
    parts: tuple[Part, ...]
    first: tuple[str, ...]  # the checksums of the first two distinct documents


class FinishedPart(StoreRecord):
    """The manifest's entries of a part's shards, by split."""

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

    If it is interrupted, a store keeps its finished parts (see `corpus_parts`), and a call with the same arguments
    continues, or begins anew if a file of the corpus has changed since then. For a finished store, the corpus is not
    read again. Memory holds a few documents for each worker.

    Args:
        out: the store's folder.
        corpus_spec: see `read_corpus`.
        tokenizer_spec: see `load_tokenizer`.
        held_out: the share of documents that is held out, between 0 and 1.
        extra_texts: see `load_tokenizer`.
        overwrite: replace another store in the folder; what is no store stays.
        workers: the number of processes; each encodes one part of the corpus at a time (see `corpus_parts`);
            by default the number of cores. This process encodes a corpus of a single part itself, in several threads.

    Raises:
        UserError: if the corpus or the tokenizer cannot be loaded, or the corpus has no text; if the folder cannot be
            written, or another process is writing it; or if it holds a store with other settings, finished or not, and
            `overwrite` is not set.
    """
    settings = StoreSettings(corpus=corpus_spec, tokenizer=tokenizer_spec, held_out=held_out)
    if (out / MANIFEST).exists() and not overwrite:
        store = TokenStore(out)
        _check_same(settings, store.manifest.settings, f"{out} holds a token store")
        return store
    has_files = out.is_dir() and any(path.name != LOCK for path in out.iterdir())
    is_model = (out / "config.json").exists()  # which has a manifest of the same name
    has_store = (out / MANIFEST).exists() or (out / STAGING).exists()
    if has_files and (is_model or not has_store):
        raise UserError(f"{out} is not empty and holds no token store: choose another folder.")
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with exclusive(out):
            _write_store(
                out,
                settings,
                extra_texts,
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
    finally:
        if is_new and out.exists() and os.listdir(out) == [LOCK]:  # the corpus was refused
            shutil.rmtree(out)
    return TokenStore(out)


def _check_same(settings: StoreSettings, made_with: StoreSettings, store: str) -> None:
    if made_with != settings:
        raise UserError(
            f"{store} made with other settings ({made_with}): choose another folder, or --overwrite."
        )


def _write_store(
    out: Path,
    settings: StoreSettings,
    extra_texts: Iterable[str],
    *,
    overwrite: bool,
    workers: int,
) -> None:
    """Write the store of a folder, or what is missing of it, while no other process writes it."""
    staging = out / STAGING
    begun = _begun(staging)
    if begun is not None and not overwrite:
        _check_same(settings, begun.settings, f"{out} holds an unfinished token store")
    is_complete = isinstance(begun, Manifest) and begun.settings == settings
    if not is_complete:
        plan = begun if _goes_on(begun, settings) else _begin(staging, settings, extra_texts)
        _finish(staging, plan, workers)
    _move_into_place(staging, out)


def _begun(staging: Path) -> Plan | Manifest | None:
    """The manifest of a complete store that was being moved into place, or the plan of one without all its shards.

    None: there is no store that can be continued.
    """
    try:
        if (staging / MANIFEST).exists():
            return Manifest.read(staging)
        if (staging / SPLITS[0]).exists():  # the first to be moved
            return Plan.model_validate_json((staging / PLAN).read_bytes())
    except (FileNotFoundError, ValidationError, UserError):
        pass
    return None


def _goes_on(begun: Plan | Manifest | None, settings: StoreSettings) -> TypeGuard[Plan]:
    """Whether it is a plan with these settings, whose corpus has not changed since."""
    return (
        isinstance(begun, Plan)
        and begun.settings == settings
        and begun.parts == tuple(corpus_parts(settings.corpus))
    )


def _begin(staging: Path, settings: StoreSettings, extra_texts: Iterable[str]) -> Plan:
    """Make `staging` a store without shards: the tokenizer and the plan, which is returned."""
    plan = Plan(
        settings=settings,
        parts=tuple(corpus_parts(settings.corpus)),
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
    return plan


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


def _finish(staging: Path, plan: Plan, workers: int) -> None:
    """Write the missing shards of the store in `staging`, and its manifest."""
    tokenizer = load_tokenizer(str(staging / TOKENIZER))
    _write_parts(Work(staging, plan, tokenizer), workers)
    records = sorted(staging.glob("done/*.json"))  # in the order of the corpus
    parts = [FinishedPart.model_validate_json(path.read_bytes()).shards for path in records]
    manifest = Manifest(
        settings=plan.settings,
        vocab_size=text_vocab_size(tokenizer),
        splits={
            split: SplitCounts.of(shards[split] for shards in parts if shards[split].documents)
            for split in SPLITS
        },
        tokenizer={
            path.name: file_sha256(path) for path in sorted((staging / TOKENIZER).iterdir())
        },
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
    missing = [part for part in range(len(work.plan.parts)) if not _done_file(work, part).exists()]
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


def _done_file(work: Work, part: int) -> Path:
    """The file that marks a part as done, and holds the manifest's entries of its shards."""
    return work.folder / "done" / f"{part:05}.json"


def _write_part(work: Work, part: int) -> None:
    """Write a part's shard of each split."""
    plan = work.plan
    dtype = id_type(text_vocab_size(work.tokenizer))
    paths = {split: work.folder / split / shard_name(part) for split in SPLITS}
    counts: dict[StoreSplit, Counter[str]] = {split: Counter() for split in SPLITS}
    with ExitStack() as stack:
        files = {split: stack.enter_context(path.open("wb")) for split, path in paths.items()}
        for texts in _batches(read_part(plan.settings.corpus, plan.parts[part])):
            for text, ids in zip(texts, encode_documents(work.tokenizer, texts), strict=True):
                split = _split_of(text, plan)
                files[split].write(np.array(ids, dtype).data)
                counts[split].update(documents=1, characters=len(text), tokens=len(ids) - 1)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    shards = {
        split: Shard(part=part, sha256=file_sha256(path), **counts[split])
        for split, path in paths.items()
    }
    write_whole(_done_file(work, part), FinishedPart(shards=shards).model_dump_json().encode())


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """The documents in lists of about BATCH_CHARACTERS."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _split_of(text: str, plan: Plan) -> StoreSplit:
    digest = sha256_of(text.encode())
    if digest in plan.first:
        return SPLITS[plan.first.index(digest)]
    return "held_out" if int(digest[:16], 16) < plan.settings.held_out * 2**64 else "train"
