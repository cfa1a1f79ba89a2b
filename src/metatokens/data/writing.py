"""Writing a token store, so that it appears at once and goes on after whatever stopped it.

While it is written, a store is the subfolder `.partial` of its folder:

    plan.json                 the settings, the parts of the corpus, what else the shards depend on
    tokenizer/                there before the plan
    train/, held_out/         the finished shards
    done/PART-SHARD.json      what the manifest will say of a shard, of both splits: put there last
    done/PART                 an empty file: all of the part is done
"""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from metatokens.data.corpus import corpus_parts, read_corpus
from metatokens.data.sharding import Done, Plan, Work, write_parts
from metatokens.data.store import (
    HELD_OUT,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Manifest,
    SplitCounts,
    StoreSettings,
    TokenStore,
)
from metatokens.data.tokenizer import load_tokenizer, meta_token_id, text_vocab_size
from metatokens.errors import UserError
from metatokens.files import LOCK, exclusive, file_sha256, library_writes, sha256_of, write_whole
from metatokens.machine import available_cores

PLAN = "plan.json"
# Of a shard, both splits together: 15 MB of GPT-2's ids, which a reader checks in some 20 ms. C4 has some 22,000 such
# shards; a process can have them all mapped at once (Linux allows 65,530 mappings).
SHARD_CHARACTERS = 2**25


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
    """Encode a corpus once, or go on with it, or open the store that already holds it.

    A document is held out if the SHA-256 of its text, read as a fraction, is below `held_out`, so copies of
    a text are on one side. Of the first two distinct documents the first is always for training and the
    second always held out, so that neither split is empty.

    The store is built in a subfolder and moved into place when it is complete. Cut off, it keeps every finished shard
    and goes on when called with the same arguments. Whether the files behind a corpus spec changed since is not
    looked at. Memory holds a shard's ids and a few documents for each worker.

    Args:
        out: the store's folder.
        corpus_spec: see `read_corpus`.
        tokenizer_spec: see `load_tokenizer`.
        held_out: the share of documents that is held out, between 0 and 1.
        extra_texts: see `load_tokenizer`.
        overwrite: replace the store that the folder holds, if any.
        workers: processes, each of which reads and encodes a part of the corpus at a time (see `corpus_parts`). Where
            all is one part, this process does it, in the threads of the library tokenizers; with 1, in a single one.
            By default the cores there are.

    Raises:
        UserError: if the corpus or the tokenizer cannot be had, the corpus has no text, the folder cannot be
            written, is being written by another process, or holds a store with other settings, finished or not, and
            `overwrite` is not set.
    """
    if not 0 < held_out < 1:
        raise UserError(f"the held-out share is {held_out}, but must lie between 0 and 1.")
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
        if store.manifest.settings != settings:
            raise UserError(
                f"{out} holds a token store made with other settings ({store.manifest.settings}): "
                "choose another folder, or --overwrite."
            )
        return store
    staging, is_new = out / ".partial", not out.exists()
    is_store = (out / MANIFEST).exists() or staging.exists()
    has_others = out.is_dir() and any(path.name != LOCK for path in out.iterdir())
    if has_others and not is_store and not overwrite:
        raise UserError(f"{out} is not empty and holds no token store: choose another folder, or --overwrite.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with exclusive(out):
            before = _settings_of(staging)
            if before not in (None, settings) and not overwrite:
                raise UserError(
                    f"{out} holds an unfinished token store made with other settings ({before}): "
                    "choose another folder, or --overwrite."
                )
            try:
                tokenizer = _begin(staging, settings, texts) if before != settings else None
                if not (staging / MANIFEST).exists():
                    tokenizer = tokenizer or load_tokenizer(str(staging / TOKENIZER))
                    _finish(staging, tokenizer, workers or available_cores())
            except BaseException:
                if not any(staging.glob("done/*")):  # nothing that the next try could use
                    shutil.rmtree(out if is_new else staging, ignore_errors=True)
                raise
            _move_into_place(staging, out)
    except OSError as error:
        raise UserError(f"the token store {out} cannot be written: {error}.") from error
    except BrokenProcessPool as error:
        raise UserError(
            "a process that wrote the token store was killed, perhaps for want of memory: the same command goes on, "
            "with fewer --workers if need be."
        ) from error
    return TokenStore.open(out)


def _begin(staging: Path, settings: StoreSettings, extra_texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Make `staging` a store without shards: the tokenizer and the plan."""
    shutil.rmtree(staging, ignore_errors=True)
    for name in (*SPLITS, "done"):
        (staging / name).mkdir(parents=True)
    first, parts = _first_documents(settings.corpus), tuple(corpus_parts(settings.corpus))
    tokenizer = load_tokenizer(settings.tokenizer, corpus=read_corpus(settings.corpus), extra_texts=extra_texts)
    with library_writes(staging):
        tokenizer.save_pretrained(staging / TOKENIZER)
    plan = Plan(settings=settings, parts=parts, shard_characters=SHARD_CHARACTERS, first=first)
    write_whole(staging / PLAN, plan.model_dump_json().encode())
    return tokenizer


def _finish(staging: Path, tokenizer: PreTrainedTokenizerBase, workers: int) -> None:
    """Write the shards that the store in `staging` lacks, and its manifest."""
    plan = Plan.model_validate_json((staging / PLAN).read_bytes())
    write_parts(Work(staging, plan, tokenizer), workers)
    done = [Done.model_validate_json(path.read_bytes()).shards for path in staging.glob("done/*.json")]
    done.sort(key=lambda shards: (shards["train"].part, shards["train"].number))
    manifest = Manifest(
        settings=plan.settings,
        vocab_size=text_vocab_size(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        meta_token_id=meta_token_id(tokenizer),
        splits={split: SplitCounts.of(shards[split] for shards in done) for split in SPLITS},
        tokenizer={path.name: file_sha256(path) for path in sorted((staging / TOKENIZER).iterdir())},
        metatokens=importlib.metadata.version("metatokens"),
    )
    write_whole(staging / MANIFEST, manifest.sealed())


def _settings_of(staging: Path) -> StoreSettings | None:
    """What the store that is being written in a folder is made from, if there is one that can be gone on with."""
    try:
        if (staging / MANIFEST).exists():  # it was being moved into place
            return Manifest.read(staging).settings
        if (staging / SPLITS[0]).exists():  # the first to be moved
            return Plan.model_validate_json((staging / PLAN).read_bytes()).settings
    except (FileNotFoundError, ValidationError, UserError):
        pass
    return None


def _first_documents(corpus: str) -> tuple[str, ...]:
    first: dict[str, None] = {}
    for text in read_corpus(corpus):
        first[sha256_of(text.encode())] = None
        if len(first) == len(SPLITS):
            break
    if not first:
        raise UserError(f"the corpus {corpus} holds no text.")
    return tuple(first)


def _move_into_place(staging: Path, out: Path) -> None:
    """Make a complete store in `staging` the store of `out`; can be cut off and called again."""
    (out / MANIFEST).unlink(missing_ok=True)
    for name in (*SPLITS, TOKENIZER):
        if (staging / name).exists():
            shutil.rmtree(out / name, ignore_errors=True)
            os.replace(staging / name, out / name)
    os.replace(staging / MANIFEST, out / MANIFEST)
    shutil.rmtree(staging)
