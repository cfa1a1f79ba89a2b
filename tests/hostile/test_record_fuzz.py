"""Result files, analyses, curves, stages, run descriptions, run folders, training examples: any lines."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens.checkpoint import MANIFEST, verify_manifest, write_manifest
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.paper.report.frame import load
from metatokens.paper.report.page import write_report
from metatokens.paper.run_log import LOG, FinishedStage, RunLog
from metatokens.records import MARKER, Measurement, Result, read_lines
from metatokens.tasks.example import read_examples
from metatokens.tasks.example_store import ExampleStore
from metatokens.training.run_folder import open_run, training_of
from tests.hostile.drawing import JSON, cases, changed, damaged, json_file

Clean = Callable[[], AbstractContextManager[None]]

MADE = {"versions": {"python": "3.11"}, "created": "2026-01-01T00:00:00+00:00"}
RESULTS: list[dict[str, Any]] = [
    {
        "model": model, "position_embedding": "rope", "task": task, "condition": "paper", "train_condition": "paper",
        "train_length": 128, "length": length, "metric": metric, "value": 0.5, "n": 20, "low": 0.3, "high": 0.7,
        "chance": 0.1, "seed": 0, "recipe": "small", **MADE,
    }
    for model in ("gpt2", "meta") for task in ("parity", "own") for length in (128, 256)
    for metric in ("exact_match", "token_accuracy")
]  # fmt: skip
RESULTS.append({"model": "meta", "metric": "perplexity", "value": 40.0, "n": 900, "seed": 0, "chance": 300.0, **MADE})
ANALYSES = [
    {
        "analysis": "sharpness", "model": "meta", "position_embedding": "rope", "seed": 0, "value": 0.1, "n": 5,
        "metric": "attention_entropy_change", "module": "attention", "layer": 0, "head": None, "keys": "near",
        "quantiles": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], **MADE,
    }
]  # fmt: skip
CURVES = [
    {"model": "meta", "seed": 0, "step": step, "loss": 2.0, "task": task, "train_length": 128, "learning_rate": 0.1}
    for step in (1, 2) for task in (None, "parity")
]  # fmt: skip
CURVES.append(
    {"model": "meta", "seed": 0, "step": 5, "text_tokens": 900, "exact_match": 0.4, "n": 10, "task": "parity"}
)
SHOWN = [{"task": "parity", "prompt": f"Bits: 1{MARKER} 0", "markers": [7], "completion": " 1", "phase": 1}]
SPEEDS = [
    {
        "benchmark": "train", "model": "meta", "against": "gpt2", "shape": "tiny", "length": 32, "batch": 1,
        "text_tokens": 32, "n": 3, "seconds": 0.1, "ratio": 1.1, "ratio_low": 1.0, "ratio_high": 1.2, "limit": 1.3,
        "threads": 1, "device": "cpu", "dtype": "float32", "parameters": 9, "repeats": 1, "rounds": [0.1], "low": 0.1,
        "high": 0.1, "ratio_per_text_token": 1.0, "limit_per_text_token": 1.0, "over_products": 1.0, "compiled": False,
    }
]  # fmt: skip
RUN = {
    "command": "metatokens reproduce", "preset": "demo", "recipes": {"pretrain": {"seed": 1}}, "cores": 2,
    "created": "2026-01-01T00:00:00+00:00", "stages": [{"name": "tokenize", "seconds": 1.0}],
    "corpus": {"spec": "builtin"}, "models": {"meta": {"parameters": 5, "description": "a model"}}, "wall_seconds": 3.0,
}  # fmt: skip
STAGES = [
    {"name": name, "seconds": 1.0, "settings": {"seed": 0}, "facts": {}, "lines": {"results": 1}} for name in ("a", "b")
]
RECORDS = [{"prompt": f"a{MARKER} b", "markers": [1], "completion": " c"}, {"prompt": "a", "completion": "b"}]
FIELDS = {
    "results": [*Result.model_fields], "analysis": [*Measurement.model_fields], "stages": [*FinishedStage.model_fields],
    "curves": [*CURVES[0], *CURVES[-1]], "shown": [*SHOWN[0]], "run": [*RUN], "speeds": [*SPEEDS[0]],
    "records": [*RECORDS[0], "task", "phase", "seed", "index", "split", "input_ids"],
}  # fmt: skip


def lines_of(records: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(record).encode() for record in records)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@cases(175)
@given(content=json_file(RESULTS, FIELDS["results"]))
def test_result_files(content: bytes, place: Path, clean: Clean) -> None:
    path = place / "results.jsonl"
    path.write_bytes(content)
    with clean():
        results = read_lines(path, Result)
        path.write_text("".join(result.line() + "\n" for result in results), encoding="utf-8")
        assert read_lines(path, Result) == results


@cases(100)
@given(
    analysis=json_file(ANALYSES, FIELDS["analysis"]) | st.just(b""),
    curves=json_file(CURVES, FIELDS["curves"]) | st.just(b""),
    shown=json_file(SHOWN, FIELDS["shown"]) | st.just(b""),
    run=changed(RUN, FIELDS["run"]).map(json.dumps).map(str.encode) | damaged(json.dumps(RUN).encode()),
)
def test_run_folders_of_a_report(
    analysis: bytes, curves: bytes, shown: bytes, run: bytes, place: Path, clean: Clean
) -> None:
    folder = place / "run"
    folder.mkdir(exist_ok=True)
    files = {"results": lines_of(RESULTS), "analysis": analysis, "curves": curves, "examples": shown}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_bytes(content)
    (folder / "run.json").write_bytes(run)
    with clean():
        inputs = load([folder])
        for example in inputs.read.examples:
            assert MARKER.strip() not in "".join(text for text, is_marker in example.pieces() if is_marker).replace(
                MARKER.strip(), ""
            )


@cases(50)
@given(content=json_file(SPEEDS, FIELDS["speeds"]))
def test_files_of_a_benchmark(content: bytes, place: Path, clean: Clean) -> None:
    (place / "good.jsonl").write_bytes(lines_of(RESULTS))
    (place / "speeds.jsonl").write_bytes(content)
    with clean():
        load([place / "good.jsonl", place / "speeds.jsonl"])


@cases(1)
@given(
    results=st.lists(st.sampled_from(RESULTS).flatmap(lambda good: changed(good, FIELDS["results"])), max_size=3),
    curves=st.lists(st.sampled_from(CURVES).flatmap(lambda good: changed(good, FIELDS["curves"])), max_size=2),
    run=changed(RUN, FIELDS["run"]),
)
@pytest.mark.filterwarnings("ignore:Glyph")  # a picture's font lacks some letters
def test_whole_reports(
    results: list[dict[str, Any]], curves: list[dict[str, Any]], run: dict[str, Any], place: Path, clean: Clean
) -> None:
    folder = place / "drawn"
    folder.mkdir(exist_ok=True)

    def is_read(record: dict[str, Any], name: str) -> bool:
        (folder / "results.jsonl").write_bytes(lines_of(RESULTS))
        (folder / "curves.jsonl").unlink(missing_ok=True)
        with (folder / f"{name}.jsonl").open("ab") as file:
            file.write(b"\n" + json.dumps(record).encode())
        try:
            load([folder])
        except UserError:
            return False
        return True

    (folder / "run.json").unlink(missing_ok=True)
    results = [*RESULTS, *(record for record in results if is_read(record, "results"))]
    curves = [*CURVES, *(record for record in curves if is_read(record, "curves"))]
    (folder / "results.jsonl").write_bytes(lines_of(results))
    (folder / "curves.jsonl").write_bytes(lines_of(curves))
    (folder / "run.json").write_text(json.dumps(run))
    with clean():
        write_report([folder], folder / "report")


@cases(50)
@given(stages=json_file(STAGES, FIELDS["stages"]), results=json_file(RESULTS, FIELDS["results"]) | st.just(b""))
def test_stages_of_a_run(stages: bytes, results: bytes, place: Path, clean: Clean) -> None:
    (place / LOG).write_bytes(stages + b"\n")
    (place / "results.jsonl").write_bytes(results + b"\n")
    with clean():
        log = RunLog(place)
        log.resume()
        assert RunLog(place).entries == log.entries


@cases(50)
@given(content=JSON.map(json.dumps).map(str.encode) | st.binary(max_size=30) | st.just(b"[" * 3_000))
def test_settings_of_a_run(content: bytes, place: Path, clean: Clean) -> None:
    out = place / "taken"
    out.mkdir(exist_ok=True)
    (out / "settings.json").write_bytes(content)
    with clean(), open_run(out, {"verb": "pretrain", "recipe": {"seed": 0}}):
        pass
    assert isinstance(training_of(out / "128"), dict)


@cases(75)
@given(data=st.data())
def test_manifests(data: st.DataObject, place: Path, clean: Clean) -> None:
    folder = place / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(b"abc")
    write_manifest(folder)
    good = (folder / MANIFEST).read_bytes()
    content = damaged(good) | JSON.map(lambda sums: json.dumps({"sha256": sums}).encode()) | st.just(b"[" * 3_000)
    (folder / MANIFEST).write_bytes(data.draw(content))
    with clean():
        verify_manifest(folder)


@cases(75)
@given(content=json_file(RECORDS, FIELDS["records"]))
def test_training_records(content: bytes, place: Path, small_store: TokenStore, clean: Clean) -> None:
    path = place / "records.jsonl"
    path.write_bytes(content)
    with clean():
        for example in read_examples(path, small_store.tokenizer):
            meta = small_store.manifest.meta_token_id
            assert list(example.input_ids[: example.answer_start]).count(meta) == len(example.markers)
            assert meta not in example.input_ids[example.answer_start :]


@cases(125)
@given(data=st.data())
def test_stored_examples(data: st.DataObject, place: Path, small_store: TokenStore, clean: Clean) -> None:
    path = place / "examples.arrow"
    if not path.exists():
        (place / "good.jsonl").write_bytes(lines_of(RECORDS * 3))
        ExampleStore.write(path, read_examples(place / "good.jsonl", small_store.tokenizer))
    damage = place / "damaged.arrow"
    damage.write_bytes(data.draw(damaged(path.read_bytes())))
    with clean():
        for example in ExampleStore(damage):
            assert 0 <= example.answer_start <= len(example.input_ids)


@cases(25)
@given(data=st.data())
def test_tokenizers(data: st.DataObject, place: Path, small_store: TokenStore, clean: Clean) -> None:
    folder = place / "tokenizer"
    small_store.tokenizer.save_pretrained(folder)
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    file.write_bytes(data.draw(damaged(file.read_bytes())))
    with clean():
        load_tokenizer(str(folder))
