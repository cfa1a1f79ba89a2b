"""Every reader of files, given damaged ones: it reads what is there, or one sentence says what is wrong."""

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from hypothesis import given

from metatokens.checkpoint import MANIFEST, load_model, verify_manifest
from metatokens.data.corpus import read_corpus
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.paper.frame import load
from metatokens.recipe import PretrainRecipe, load_recipe
from metatokens.records import MARKER, Result, read_lines
from metatokens.tasks.example import read_examples
from tests.hostile.drawing import cases, damaged, one_damaged
from tests.hostile.good import (
    RECIPE,
    RECORDS,
    Files,
    Good,
    files_of,
    lines_of,
    run_folder,
)
from tests.paper.report.made_lines import timing

CASES = 40  # of each reader


def seal(manifest):
    """A token store's manifest with the checksum that the package would give it."""
    text = json.dumps(manifest | {"sha256": ""}, indent=2).encode() + b"\n"
    return (
        json.dumps(manifest | {"sha256": hashlib.sha256(text).hexdigest()}, indent=2).encode()
        + b"\n"
    )


# --- what reads a folder, and what then holds


def read_results(folder, good):
    path = folder / "results.jsonl"
    results = read_lines(path, Result)
    path.write_text("".join(result.line() + "\n" for result in results), encoding="utf-8")
    assert read_lines(path, Result) == results


def read_run_folder(folder, good):
    for example in load([folder, folder / "speeds.jsonl"]).read.examples:
        for text, is_marker in example.pieces():
            assert not is_marker or text.strip() == MARKER.strip()


def read_records(folder, good):
    meta = good.store.tokenizer.meta_token_id
    for example in read_examples(folder / "records.jsonl", good.store.tokenizer):
        prompt, answer = (
            example.input_ids[: example.answer_start],
            example.input_ids[example.answer_start :],
        )
        assert list(prompt).count(meta) == len(example.markers)
        assert meta not in answer


def read_recipe(folder, good):
    path = folder / "recipe.yaml"
    recipe = load_recipe(PretrainRecipe, str(path))
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(PretrainRecipe, str(path)) == recipe


def read_store(folder, good):
    store = TokenStore(folder)
    assert store.tokenizer.get_vocab()
    for split in ("train", "held_out"):
        assert len(store.tokens(split)[:])
    assert files_of(folder) == files_of(good.store.path), (
        "damage passed for the store that was written"
    )


def read_documents(folder, good):
    for path in folder.glob("corpus.*"):
        for document in read_corpus(str(path)):
            assert document.strip()
            assert document.encode().decode() == document


# --- the good files of each


def tokenizer_files(good):
    return files_of(good.store.path / "tokenizer")


def manifest(good):
    sums = {"weights": hashlib.sha256(b"abc").hexdigest()}
    return {
        "weights": b"abc",
        MANIFEST: json.dumps({"sha256": sums}, indent=2).encode(),
    }


class Reader(NamedTuple):
    """The files of a good folder, and what reads them."""

    files: Callable[[Good], Files]
    read: Callable[[Path, Good], object]


READERS = {
    "results": Reader(lambda _: {"results.jsonl": run_folder()["results.jsonl"]}, read_results),
    "run folder": Reader(
        lambda _: run_folder() | {"speeds.jsonl": lines_of([timing("train", "meta", 1.1)])},
        read_run_folder,
    ),
    "manifest": Reader(manifest, lambda folder, _: verify_manifest(folder)),
    "records": Reader(lambda _: {"records.jsonl": lines_of(RECORDS)}, read_records),
    "tokenizer": Reader(tokenizer_files, lambda folder, _: load_tokenizer(str(folder))),
    "recipe": Reader(lambda _: {"recipe.yaml": RECIPE}, read_recipe),
    "token store": Reader(lambda good: files_of(good.store.path), read_store),
    "text": Reader(
        lambda _: {"corpus.txt": "the cat\r\n\r\né\u2028sat\n".encode()}, read_documents
    ),
    "JSON lines": Reader(
        lambda _: {"corpus.jsonl": b'{"text": "the cat", "id": 3}\n' * 3},
        read_documents,
    ),
    "gzip": Reader(
        lambda _: {"corpus.txt.gz": gzip.compress(b"the cat sat\n" * 9, 1)},
        read_documents,
    ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")  # the libraries' doubts about a configuration
def test_damaged_input_is_read_or_refused_in_a_sentence(name, good, tmp_path, clean):
    reader = READERS[name]

    @cases(CASES)
    @given(files=one_damaged(reader.files(good)))
    def check(files):
        for file, content in files.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_bytes(content)
        with clean():
            reader.read(tmp_path, good)

    check()


@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_was_good(name, good, tmp_path):
    reader = READERS[name]
    for file, content in reader.files(good).items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)

    reader.read(tmp_path, good)


# --- models


def header_end(weights):
    """Where the header of a file of weights ends."""
    return 8 + int.from_bytes(weights[:8], "little")


def damaged_model(good):
    """A model's files with a damaged configuration, or a damaged header of its weights."""
    files = files_of(good.models["meta_gpt2"])
    weights = files["model.safetensors"]
    header, tensors = weights[: header_end(weights)], weights[header_end(weights) :]
    configurations = damaged(files["config.json"]).map(lambda text: files | {"config.json": text})
    headers = damaged(header).map(lambda damage: files | {"model.safetensors": damage + tensors})
    return configurations | headers


@pytest.mark.filterwarnings("ignore")  # the libraries' doubts about a configuration
def test_a_model_is_read_or_refused_in_a_sentence(good, tmp_path, clean):
    @cases(CASES)
    @given(files=damaged_model(good))
    def check(files):
        for file, content in files.items():
            (tmp_path / file).write_bytes(content)
        with clean():
            load_model(tmp_path)

    check()


# --- a token store whose manifest is whole, and wrong


def test_the_seal_of_these_tests_is_the_packages(small_store):
    manifest = (small_store.path / "manifest.json").read_bytes()

    assert seal(json.loads(manifest)) == manifest
