"""Reading run folders: what is optional may be absent, what is there must be right, and a mistake is named."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_inputs import CHANCE, EXAMPLES, accuracy, meta_best, write_run

from metatokens.errors import UserError
from metatokens.records import MARKER, ShownExample, append_records
from metatokens.report.inputs import read_inputs


def test_a_whole_run_folder_is_read(tmp_path: Path) -> None:
    inputs = read_inputs([write_run(tmp_path / "run")])
    assert len(inputs.results) == 4 * 4 * (3 + 1 + 1 + 1) + 4 * 4 + 4 * 2 + 2 * 4
    assert len(inputs.curves) == 5 * 4 * 100
    assert [example.task for example in inputs.examples] == list(CHANCE)
    assert inputs.runs[0].models["meta"].parameters == 394880


def test_a_result_file_alone_suffices(tmp_path: Path) -> None:
    inputs = read_inputs([write_run(tmp_path / "run") / "results.jsonl"])
    assert inputs.results
    assert [*inputs.curves, *inputs.examples, *inputs.runs] == []


def test_a_runs_compressed_files_are_read_as_its_plain_ones(tmp_path: Path) -> None:
    plain, packed = (write_run(tmp_path / name) for name in ("plain", "packed"))
    for file in packed.glob("*.jsonl"):
        file.with_suffix(".jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert read_inputs([packed]) == read_inputs([plain])
    assert read_inputs([packed / "results.jsonl.gz"]) == read_inputs([plain / "results.jsonl"])


def test_a_figure_measured_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    append_records(file, [accuracy("meta", "parity", "paper", 128, 0.5), accuracy("meta", "parity", "paper", 128, 0.9)])
    inputs = read_inputs([file])
    assert [result.value for result in inputs.results] == [0.9]
    assert inputs.remeasured == 1


def test_another_seed_is_another_figure(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    append_records(file, [accuracy("meta", "parity", "paper", 128, 0.5, seed=seed) for seed in (0, 1)])
    assert len(read_inputs([file]).results) == 2


def test_a_line_separator_inside_a_prompt_does_not_end_the_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    example = {"task": "copying", "prompt": "before\u2028after\x85end", "completion": "x"}
    (run / "examples.jsonl").write_text(json.dumps(example, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_inputs([run]).examples[0].prompt == example["prompt"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("results.jsonl", b'{"model": "meta"}\n', "line 1"),
        ("results.jsonl", b"\xff\xfe not text", "utf-8"),
        ("results.jsonl", b"", "no result"),
        ("curves.jsonl", b'{"model": "a", "seed": 0, "step": 1, "loss": 2.0}\n{"model": \n', "curves.jsonl, line 2"),
        ("curves.jsonl", b'{"model": "a", "seed": 0, "step": 1, "loss": "high"}\n', "loss"),
        ("curves.jsonl", b"\xff\xfe not text", "curves.jsonl"),
        ("examples.jsonl", b'{"prompt": "a _PAUSE_", "markers": [0], "completion": "b"}\n', "offset 0"),
        ("examples.jsonl", b"[1, 2]\n", "examples.jsonl, line 1"),
        ("run.json", b'{"cores": "two"}', "cores"),
        ("run.json", b"{", "run.json"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_inputs([run])


def test_missing_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent"):
        read_inputs([tmp_path / "absent"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds no results\.jsonl"):
        read_inputs([tmp_path / "empty"])
    with pytest.raises(UserError, match="no result"):
        read_inputs([])


def test_one_bad_path_is_enough(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent"):
        read_inputs([write_run(tmp_path / "run", meta_best), tmp_path / "absent"])


@given(st.lists(st.sampled_from(["", "word", " _PAUSE_", " _PAUSE", "a\nb", "|"]).map(str), min_size=1, max_size=6))
def test_markers_split_a_prompt_back_into_its_segments(segments: list[str]) -> None:
    prompt, markers = segments[0], []
    for segment in segments[1:]:
        markers.append(len(prompt))
        prompt += MARKER + segment
    pieces = ShownExample(prompt=prompt, markers=markers, completion="x").pieces()
    assert [text for text, is_meta_token in pieces if is_meta_token] == ["_PAUSE_"] * (len(segments) - 1)
    assert [text for text, is_meta_token in pieces if not is_meta_token] == [segment for segment in segments if segment]


def test_literal_pause_in_a_text_is_text() -> None:
    example = ShownExample.model_validate(EXAMPLES[3])
    assert sum(is_meta_token for _, is_meta_token in example.pieces()) == 3
    assert "A literal _PAUSE_ and" in example.pieces()[0][0]
