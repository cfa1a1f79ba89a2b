"""Every reader of files, given damaged and odd ones: it reads what is there, or one sentence says what is wrong."""

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import metatokens
from metatokens.checkpoint import MANIFEST, load_model, verify_manifest
from metatokens.data.blocks import BlockDataset
from metatokens.data.corpus import read_corpus
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.paper.frame import load
from metatokens.paper.report.page import write_report
from metatokens.paper.run_log import LOG, FinishedStage, RunLog
from metatokens.recipe import FinetuneRecipe, PretrainRecipe, load_recipe
from metatokens.records import MARKER, Measurement, Result, read_lines
from metatokens.tasks.example import read_examples
from metatokens.tasks.example_store import ExampleStore
from metatokens.training.run_folder import open_run, training_of
from tests.hostile import good as whole
from tests.hostile.drawing import JSON, NUMBER, SCALAR, TEXT, cases, changed, damaged, json_file, one_damaged
from tests.hostile.good import CURVES, RESULTS, RUN, Clean, Files, Good, Lines, files_of, lines_of

Drawn = SearchStrategy[Any]
DUMPED_JSON = JSON.map(json.dumps).map(str.encode)
DEEP = st.just(b"[" * 3_000)


class Reader(NamedTuple):
    """How many cases to draw, the files of a case, and what reads their folder."""

    cases: int
    files: Callable[[Good], SearchStrategy[Files]]
    read: Callable[[Path, Files, Good], object]


def one_file(name: Drawn | str, content: Drawn) -> SearchStrategy[Files]:
    return st.builds(lambda *file: dict([file]), st.just(name) if isinstance(name, str) else name, content)


# --- records of results, runs and examples


def read_results(folder: Path, files: Files, good: Good) -> None:
    path = folder / "results.jsonl"
    results = read_lines(path, Result)
    path.write_text("".join(result.line() + "\n" for result in results), encoding="utf-8")
    assert read_lines(path, Result) == results


def run_folder(good: Good) -> SearchStrategy[Files]:
    dumped = json.dumps(RUN).encode()
    return st.fixed_dictionaries(
        {
            "results.jsonl": st.just(lines_of(RESULTS)),
            "analysis.jsonl": json_file(whole.ANALYSES, Measurement.model_fields) | st.just(b""),
            "curves.jsonl": json_file(CURVES, CURVES[0] | CURVES[-1]) | st.just(b""),
            "examples.jsonl": json_file(whole.SHOWN, whole.SHOWN[0]) | st.just(b""),
            "run.json": changed(RUN, RUN).map(json.dumps).map(str.encode) | damaged(dumped),
        }
    )


def read_run_folder(folder: Path, files: Files, good: Good) -> None:
    for example in load([folder]).read.examples:
        markers = "".join(text for text, is_marker in example.pieces() if is_marker)
        assert markers.replace(MARKER.strip(), "").strip() == ""


def benchmark(good: Good) -> SearchStrategy[Files]:
    return json_file(whole.SPEEDS, whole.SPEEDS[0]).map(
        lambda speeds: {"good.jsonl": lines_of(RESULTS), "speeds.jsonl": speeds}
    )


def stages(good: Good) -> SearchStrategy[Files]:
    ended = st.just(b"\n")
    finished = st.tuples(json_file(whole.STAGES, FinishedStage.model_fields), ended).map(b"".join)
    results = st.tuples(json_file(RESULTS, Result.model_fields) | st.just(b""), ended).map(b"".join)
    return st.fixed_dictionaries({LOG: finished, "results.jsonl": results})


def read_stages(folder: Path, files: Files, good: Good) -> None:
    log = RunLog(folder)
    log.resume()
    assert RunLog(folder).entries == log.entries


def read_settings(folder: Path, files: Files, good: Good) -> None:
    assert isinstance(training_of(folder / "128"), dict)
    with open_run(folder, {"verb": "pretrain", "recipe": {"seed": 0}}):
        pass


def manifest(good: Good) -> SearchStrategy[Files]:
    sealed = json.dumps({"sha256": {"weights": hashlib.sha256(b"abc").hexdigest()}}, indent=2).encode()
    content = damaged(sealed) | JSON.map(lambda sums: json.dumps({"sha256": sums}).encode()) | DEEP
    return content.map(lambda content: {"weights": b"abc", MANIFEST: content})


def read_records(folder: Path, files: Files, good: Good) -> None:
    meta = good.store.manifest.meta_token_id
    for example in read_examples(folder / "records.jsonl", good.store.tokenizer):
        assert list(example.input_ids[: example.answer_start]).count(meta) == len(example.markers)
        assert meta not in example.input_ids[example.answer_start :]


def read_stored_examples(folder: Path, files: Files, good: Good) -> None:
    for example in ExampleStore(folder / "examples.arrow"):
        assert 0 <= example.answer_start <= len(example.input_ids)


# --- recipes

KINDS = {"pretrain.yaml": PretrainRecipe, "finetune.yaml": FinetuneRecipe}
RECIPES = [path.read_bytes() for path in sorted((Path(metatokens.__file__).parent / "recipes").iterdir())]
SECTIONS: dict[str, list[str]] = {
    name: [*section.annotation.model_fields] for kind in KINDS.values() for name, section in kind.model_fields.items()
}
PIECES = [
    "training:", " max_steps: ", "10", "\n", "  ", "- ", "? ", ": ", "[", "]", "{", "}", "&a ", "*a", "%YAML 9.9",
    "<<: *a", "!!timestamp ", "!!python/object/apply:os.system ", "!!binary ", "!!set ", "!!bool x", "!!float ",
    "!!int ", "---", "...", "'", '"', "|", ">", "#", "1:60", "0x", "2001-99-99", "1" * 5_000, ".inf", "~", "\t",
    "\0", "é", "\\",
]  # fmt: skip
KEY = st.lists(st.sampled_from([*SECTIONS, *SECTIONS["training"], "", "__class__", "model_config"]), max_size=3)


def pieces(count: int) -> SearchStrategy[str]:
    return st.lists(st.sampled_from(PIECES) | TEXT, max_size=count).map("".join)


@st.composite
def settings_of_any_value(draw: st.DrawFn) -> object:
    sections = {
        name: draw(st.dictionaries(st.sampled_from(fields) | TEXT, SCALAR | JSON, max_size=3) | JSON)
        for name, fields in SECTIONS.items()
        if draw(st.booleans())
    }
    if isinstance(training := sections.get("training", {}), dict):
        sections["training"] = {"max_steps": 5} | training
    return sections


def encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def recipe(content: Drawn) -> Callable[[Good], SearchStrategy[Files]]:
    return lambda good: one_file(st.sampled_from([*KINDS]), content)


def read_recipe(folder: Path, files: Files, good: Good) -> None:
    [name] = files
    read = load_recipe(KINDS[name], str(folder / name))
    (folder / name).write_text(yaml.safe_dump(read.model_dump(mode="json")))
    assert load_recipe(KINDS[name], str(folder / name)) == read


def override(good: Good) -> SearchStrategy[Files]:
    texts = st.builds("{}={}".format, KEY.map(".".join), pieces(4))
    return one_file("override", texts.map(encoded))


def read_override(folder: Path, files: Files, good: Good) -> None:
    load_recipe(PretrainRecipe, "demo", [files["override"].decode(errors="surrogatepass")])


# --- the token store


def read_store(folder: Path, files: Files, good: Good) -> None:
    store = TokenStore.open(folder)
    assert store.tokenizer.get_vocab()
    assert all(len(store.tokens(split)[:]) for split in ("train", "held_out"))
    assert files == files_of(good.store.path), "damage passed for the store that was written"


def read_no_store(folder: Path, files: Files, good: Good) -> None:
    TokenStore.open(folder)
    raise AssertionError("this was taken for a manifest")


def seal(manifest: dict[str, Any]) -> bytes:
    """A manifest with the checksum that the package would give it."""
    text = json.dumps(manifest | {"sha256": ""}, indent=2).encode() + b"\n"
    return json.dumps(manifest | {"sha256": hashlib.sha256(text).hexdigest()}, indent=2).encode() + b"\n"


@st.composite
def miscounted(draw: st.DrawFn, good: Good) -> Files:
    files = files_of(good.store.path)
    manifest = json.loads(files["manifest.json"])
    field = draw(st.sampled_from(["tokens", "documents", "part", "number", "characters"]))
    value = draw(st.sampled_from([-1, 0, 1, 10**6, 2**31, 2**63, 10**30]))
    manifest["splits"][draw(st.sampled_from(["train", "held_out"]))]["shards"][0][field] = value
    return files | {"manifest.json": seal(manifest)}


def read_miscounted(folder: Path, files: Files, good: Good) -> None:
    store = TokenStore.open(folder)
    for split in ("train", "held_out"):
        dataset = BlockDataset(store, split, block_size=32, fraction=0.1, placement="uniform", seed=0)
        assert [len(dataset[index]["input_ids"]) for index in (0, len(dataset) - 1)] == [32, 32]
        assert len(store.tokens(split)[:100]) == min(100, len(store.tokens(split)))


# --- corpora

BYTES = st.lists(
    st.sampled_from([
        b"word ", b"\n", b"\r\n", b"\r", b"\n\n", b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80",
        "é\u2028".encode(), b"\x1a",
    ]),
    max_size=30,
).map(b"".join) | st.binary(max_size=40)  # fmt: skip
RECORD = st.fixed_dictionaries({"text": TEXT}) | st.dictionaries(st.sampled_from(["text", "id"]), JSON) | JSON
LINES = st.lists(RECORD.map(json.dumps).map(str.encode) | BYTES, max_size=5).map(b"\n".join)


def documents_of(path: Path) -> list[str]:
    documents = list(read_corpus(str(path)))
    for document in documents:
        assert document.strip()
        assert document.encode().decode() == document
    return documents


def read_text(folder: Path, files: Files, good: Good) -> None:
    documents = documents_of(folder / "a.txt")
    assert documents_of(folder / "a.txt.gz") == documents
    text = files["a.txt"].decode().removeprefix("\ufeff")
    assert "".join(documents) == (text if text.strip() else "")


def read_json_lines(folder: Path, files: Files, good: Good) -> None:
    lines = files["a.jsonl"].removeprefix(b"\xef\xbb\xbf").split(b"\n")
    documents = documents_of(folder / "a.jsonl")
    texts = [json.loads(line)["text"] for line in lines if line.decode().strip()]
    assert documents == [text for text in texts if text.strip()]


@st.composite
def gzipped(draw: st.DrawFn, good: Good) -> Files:
    member = gzip.compress(b'{"text": "the cat"}\n' * draw(st.integers(0, 50)), 1)
    members = member + draw(st.sampled_from([b"", member, b"\0" * 9, b"junk"]))
    return draw(one_file(st.sampled_from(["a.txt.gz", "a.jsonl.gz", "a.json.gz"]), damaged(members) | st.just(members)))


def parquet(good: Good) -> SearchStrategy[Files]:
    texts = pa.array(["the cat", "", None, "sat"])
    wholes = []
    for column in (texts, pa.array(["a", "b"], pa.large_string()), pa.array(["a", "b", "a"]).dictionary_encode()):
        for compression in ("none", "snappy"):
            sink = io.BytesIO()
            pq.write_table(pa.table({"text": column}), sink, compression=compression)
            wholes.append(sink.getvalue())
    return one_file("a.parquet", st.sampled_from(wholes).flatmap(damaged))


def read_documents(folder: Path, files: Files, good: Good) -> None:
    [name] = files
    documents_of(folder / name)


# --- models

KEYS = st.sampled_from(
    [
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "activation",
        "max_position_embeddings", "position_embedding", "second_attention", "meta_token_id", "bias",
        "rope_parameters", "layer_norm_epsilon", "initializer_range", "eos_token_id", "pad_token_id",
        "tie_word_embeddings", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "attention_types",
        "attention_layers", "num_heads", "num_layers", "window_size", "activation_function", "num_labels",
        "id2label", "model_type", "auto_map", "dtype", "torch_dtype",
    ]
)  # fmt: skip
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "rope_theta", "factor", "beta_fast", "original_max_position_embeddings"]),
    NUMBER | st.sampled_from(["yarn", "linear", "dynamic", "llama3", "longrope", "default", None]),
)
FIELDS = st.dictionaries(KEYS, SCALAR | JSON | ROPE | st.integers(0, 64), max_size=3)
FIELDS |= st.fixed_dictionaries({"rope_parameters": ROPE}) | st.just({"initializer_range": -1.0})


def configured(good: Good) -> SearchStrategy[Files]:
    def with_fields(kind: str, fields: dict[str, Any]) -> Files:
        files = files_of(good.models[kind])
        return files | {"config.json": json.dumps(json.loads(files["config.json"]) | fields).encode()}

    return st.builds(with_fields, st.sampled_from([*good.models]), FIELDS)


def damaged_model(name: str) -> Callable[[Good], SearchStrategy[Files]]:
    """The file `name` damaged: of weights, the header."""

    def strategy(good: Good) -> SearchStrategy[Files]:
        files = files_of(good.models["meta_gpt2"])
        content = files[name]
        end = int.from_bytes(content[:8], "little") + 8 if name.endswith(".safetensors") else len(content)
        return damaged(content[:end]).map(lambda head: files | {name: head + content[end:]})

    return strategy


def tokenizer(good: Good) -> SearchStrategy[Files]:
    files = files_of(good.store.path)
    return one_damaged({Path(name).name: files[name] for name in files if name.startswith("tokenizer/")})


def read_model(folder: Path, files: Files, good: Good) -> None:
    load_model(folder)


ANY_BYTES = DUMPED_JSON | st.binary(max_size=30) | DEEP
RECORD_FIELDS = [*whole.RECORDS[0], "task", "phase", "seed", "index", "split", "input_ids"]
ANY_TEXT, ANY_VALUES = pieces(30).map(encoded), (settings_of_any_value() | JSON).map(json.dumps).map(str.encode)
READERS = {
    "results": Reader(175, lambda _: one_file("results.jsonl", json_file(RESULTS, Result.model_fields)), read_results),
    "run folder": Reader(100, run_folder, read_run_folder),
    "benchmark": Reader(50, benchmark, lambda folder, *_: load([folder / "good.jsonl", folder / "speeds.jsonl"])),
    "stages": Reader(50, stages, read_stages),
    "settings": Reader(50, lambda _: one_file("settings.json", ANY_BYTES), read_settings),
    "manifest": Reader(75, manifest, lambda folder, *_: verify_manifest(folder)),
    "records": Reader(75, lambda _: one_file("records.jsonl", json_file(whole.RECORDS, RECORD_FIELDS)), read_records),
    "examples": Reader(125, lambda good: one_file("examples.arrow", damaged(good.examples)), read_stored_examples),
    "tokenizer": Reader(25, tokenizer, lambda folder, *_: load_tokenizer(str(folder))),
    "recipe of any text": Reader(150, recipe(ANY_TEXT), read_recipe),
    "recipe, damaged": Reader(75, recipe(st.sampled_from(RECIPES).flatmap(damaged)), read_recipe),
    "recipe of any values": Reader(125, recipe(ANY_VALUES), read_recipe),
    "override": Reader(100, override, read_override),
    "token store": Reader(60, lambda good: one_damaged(files_of(good.store.path)), read_store),
    "token store's manifest": Reader(40, lambda _: one_file("manifest.json", ANY_BYTES), read_no_store),
    "token store, miscounted": Reader(25, miscounted, read_miscounted),
    "text": Reader(200, lambda _: BYTES.map(lambda it: {"a.txt": it, "a.txt.gz": gzip.compress(it, 1)}), read_text),
    "JSON lines": Reader(150, lambda _: one_file("a.jsonl", LINES | LINES.flatmap(damaged)), read_json_lines),
    "gzip": Reader(100, gzipped, read_documents),
    "parquet": Reader(75, parquet, read_documents),
    "configuration of any values": Reader(40, configured, read_model),
    "configuration, damaged": Reader(20, damaged_model("config.json"), read_model),
    "weights, damaged": Reader(20, damaged_model("model.safetensors"), read_model),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")  # the libraries' doubts about a configuration
def test_damaged_input_is_read_or_refused_in_a_sentence(name: str, good: Good, tmp_path: Path, clean: Clean) -> None:
    reader = READERS[name]

    @cases(reader.cases)
    @given(files=reader.files(good))
    def check(files: Files) -> None:
        for file, content in files.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_bytes(content)
        with clean():
            reader.read(tmp_path, files, good)

    check()


def test_what_is_damaged_was_good(good: Good, tmp_path: Path) -> None:
    lines = {"results": RESULTS, "analysis": whole.ANALYSES, "curves": CURVES, "examples": whole.SHOWN}
    lines |= {"speeds": whole.SPEEDS, "records": whole.RECORDS, "stages": whole.STAGES}
    for name, own in lines.items():
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of(own) + b"\n")
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    read = load([tmp_path, tmp_path / "speeds.jsonl"]).read
    assert (len(read.examples), len(read.runs)) == (1, 1)
    assert [*RunLog(tmp_path).entries] == ["a", "b"]
    assert len(read_examples(tmp_path / "records.jsonl", good.store.tokenizer)) == 2


def test_the_seal_of_these_tests_is_the_packages(small_store: TokenStore) -> None:
    manifest = (small_store.path / "manifest.json").read_bytes()
    assert seal(json.loads(manifest)) == manifest


@cases(1)
@given(
    results=st.lists(st.sampled_from(RESULTS).flatmap(lambda one: changed(one, Result.model_fields)), max_size=3),
    curves=st.lists(st.sampled_from(CURVES).flatmap(lambda one: changed(one, CURVES[0] | CURVES[-1])), max_size=2),
    run=changed(RUN, RUN),
)
@pytest.mark.filterwarnings("ignore:Glyph")  # a picture's font lacks some letters
def test_a_report_is_drawn_of_all_that_can_be_read(
    results: Lines,
    curves: Lines,
    run: dict[str, Any],
    tmp_path: Path,
    clean: Clean,
) -> None:
    kept: dict[str, Lines] = {"results": list(RESULTS), "curves": list(CURVES)}

    def write() -> None:
        for name, lines in kept.items():
            (tmp_path / f"{name}.jsonl").write_bytes(lines_of(lines))

    (tmp_path / "run.json").unlink(missing_ok=True)
    for name, record in [("results", one) for one in results] + [("curves", one) for one in curves]:
        kept[name].append(record)
        write()
        try:
            load([tmp_path])
        except UserError:
            kept[name].pop()
    write()
    (tmp_path / "run.json").write_text(json.dumps(run))
    with clean():
        write_report([tmp_path], tmp_path / "report")
