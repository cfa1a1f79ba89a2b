"""Every reader of files, given damaged ones: it reads what is there, or one sentence says what is wrong."""

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from metatokens.checkpoint import MANIFEST, load_model, verify_manifest
from metatokens.data.blocks import BlockDataset
from metatokens.data.corpus import read_corpus
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.paper.frame import load
from metatokens.paper.run_log import LOG, RunLog
from metatokens.recipe import PretrainRecipe, load_recipe
from metatokens.records import MARKER, Result, read_lines
from metatokens.tasks.example import read_examples
from metatokens.training.run_folder import open_run, training_of
from tests.hostile.drawing import TEXT, cases, damaged, one_damaged
from tests.hostile.good import (
    RECIPE,
    RECORDS,
    STAGE,
    Files,
    Good,
    files_of,
    lines_of,
    run_folder,
)
from tests.paper.report.made_lines import timing

CASES = 40  # of each reader
SETTINGS = {"verb": "pretrain", "recipe": {"seed": 0}}


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


def read_stages(folder, good):
    log = RunLog(folder)
    log.resume()
    assert RunLog(folder).entries == log.entries


def read_settings(folder, good):
    assert isinstance(training_of(folder / "128"), dict)
    with open_run(folder, SETTINGS):
        pass


def read_records(folder, good):
    meta = good.store.manifest.meta_token_id
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
    store = TokenStore.open(folder)
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


def parquet(good):
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["the cat", "", "sat"]}), sink, compression="snappy")
    return {"corpus.parquet": sink.getvalue()}


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
    "stages": Reader(lambda _: {LOG: lines_of([STAGE, STAGE | {"name": "pretrain"}])}, read_stages),
    "settings": Reader(lambda _: {"settings.json": json.dumps(SETTINGS).encode()}, read_settings),
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
    "parquet": Reader(parquet, read_documents),
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


FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "activation",
    "position_embedding",
    "second_attention",
    "meta_token_id",
    "rope_parameters",
    "initializer_range",
    "n_embd",
    "attention_types",
    "num_labels",
    "id2label",
    "model_type",
    "auto_map",
    "dtype",
)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.lists(st.integers(), max_size=2)
)


def reconfigured_model(good):
    """A model's files with other values in its configuration."""

    def with_fields(kind, fields):
        files = files_of(good.models[kind])
        config = json.loads(files["config.json"]) | fields
        return files | {"config.json": json.dumps(config).encode()}

    fields = st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3)
    return st.builds(with_fields, st.sampled_from(sorted(good.models)), fields)


@pytest.mark.parametrize("models_of", [damaged_model, reconfigured_model])
@pytest.mark.filterwarnings("ignore")  # the libraries' doubts about a configuration
def test_a_model_is_read_or_refused_in_a_sentence(models_of, good, tmp_path, clean):
    @cases(CASES)
    @given(files=models_of(good))
    def check(files):
        for file, content in files.items():
            (tmp_path / file).write_bytes(content)
        with clean():
            load_model(tmp_path)

    check()


# --- a token store whose manifest is whole, and wrong


@pytest.mark.parametrize("field", ["tokens", "documents", "part", "number", "characters"])
@pytest.mark.parametrize("value", [-1, 1, 10**6, 2**63])
def test_a_token_store_that_is_miscounted(field, value, small_store, tmp_path, clean):
    for name, content in files_of(small_store.path).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    manifest["splits"]["train"]["shards"][0][field] = value
    (tmp_path / "manifest.json").write_bytes(seal(manifest))

    with clean():
        store = TokenStore.open(tmp_path)
        blocks = BlockDataset(
            store, "train", block_size=32, fraction=0.1, placement="uniform", seed=0
        )
        assert len(blocks[0]["input_ids"]) == len(blocks[len(blocks) - 1]["input_ids"]) == 32


def test_the_seal_of_these_tests_is_the_packages(small_store):
    manifest = (small_store.path / "manifest.json").read_bytes()

    assert seal(json.loads(manifest)) == manifest
