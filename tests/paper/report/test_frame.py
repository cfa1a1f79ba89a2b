"""Reading the lines of runs: what is optional may be absent, what is there must be right, and a mistake is named."""

import gzip
from collections.abc import Callable
from math import inf, log
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from metatokens.errors import UserError
from metatokens.paper.report.frame import Inputs, load, one_seed, shared
from metatokens.records import MARKER, ExampleRecord
from tests.paper.report.made_lines import (
    EXAMPLES,
    RUN,
    Line,
    accuracy,
    demo,
    inner,
    loss,
    majority,
    perplexity,
    recall,
    timing,
    wilson,
    write,
)

Read = Callable[..., Inputs]
RECALL = {"model": "meta", "position_embedding": "rope", "task": "list_recall"}


def test_a_whole_run_and_its_results_alone(tmp_path: Path) -> None:
    whole, alone = load([demo(tmp_path)]), load([tmp_path / "results.jsonl"])
    assert (whole.preset, len(whole.figures), len(whole.curves)) == (
        None,
        4 * 4 * 6 + 4 + 2 * 4 + 4,
        4 * 4 * 20 + 4 * 2,
    )
    assert [one.task for one in whole.read.examples] == ["list_recall", "copying"]
    assert whole.read.runs[0].models["meta"].parameters == 394880
    assert_frame_equal(alone.figures, whole.figures)
    assert [len(alone.curves), *alone.read.examples, *alone.read.runs] == [0]


def test_compressed_files_are_read_as_plain_ones(tmp_path: Path) -> None:
    plain = load([demo(tmp_path / "plain")])
    demo(tmp_path / "packed")
    for file in (tmp_path / "packed").glob("*.jsonl"):
        file.with_suffix(".jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    packed = load([tmp_path / "packed"])
    assert_frame_equal(packed.figures, plain.figures)
    assert_frame_equal(packed.curves, plain.curves)
    assert packed.read == plain.read


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("results.jsonl", b'\n{"model": "meta"}\n', r"results\.jsonl, line 2: metric"),
        ("results.jsonl", b"\xff\xfe not text", r"cannot read .*results\.jsonl: .*utf-8"),
        ("results.jsonl", b"", "there is no result in"),
        ("results.jsonl.gz", b"\x1f\x8bcut", r"cannot read .*results\.jsonl\.gz"),
        ("analysis.jsonl", b'{"analysis": "taste"}\n', r"analysis\.jsonl, line 1: analysis"),
        ("curves.jsonl", b'{"model": "a", "seed": 0, "step": 1, "loss": 2}\n{"model": \n', r"curves\.jsonl, line 2"),
        ("curves.jsonl", b'{"model": "a", "seed": 0, "step": 1}\n', "line 1: a point of a curve has a"),
        ("examples.jsonl", b'{"prompt": "a _PAUSE_", "markers": [0], "completion": "b"}\n', "offset 0"),
        ("run.json", b'{"cores": "two"}', r"run\.json: cores"),
        ("run.json", b"{", r"run\.json"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    write(tmp_path, RUN, results=[accuracy(0.5)])
    if name.endswith(".gz"):
        (tmp_path / "results.jsonl").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        load([tmp_path])


def test_what_is_missing_and_what_does_not_go_together(tmp_path: Path) -> None:
    good = write(tmp_path / "good", results=[accuracy(0.5), accuracy(0.5, recipe="demo")])
    write(tmp_path / "other", results=[accuracy(0.5, recipe="gpu/longer")])
    (tmp_path / "empty").mkdir()
    assert load([good]).preset == "small"
    for paths, said in {
        (good, tmp_path / "absent"): "cannot read .*absent: No such file",
        (tmp_path / "empty",): r"empty holds no results\.jsonl; give a run folder",
        (): "there is no result in an empty list of files",
        (good, tmp_path / "other"): "results of the presets gpu and small; report one at a time",
    }.items():
        with pytest.raises(UserError, match=said):
            load(paths)


def test_a_figure_measured_again_replaces_the_earlier_one_and_another_seed_does_not(read: Read) -> None:
    inputs = read([accuracy(0.5), accuracy(0.8, seed=1), accuracy(0.9)])
    assert (len(inputs.figures), inputs.remeasured) == (2, 1)
    cell = inputs.cell(**RECALL, train_length=512, length=512)
    assert cell is not None
    assert (list(cell.seeds), cell.values(), cell.n, cell.chance) == ([0, 1], [0.9, 0.8], 1000, 0.1)


def test_lines_of_older_runs_say_null_where_newer_ones_say_nothing(tmp_path: Path) -> None:
    new = [accuracy(0.5), perplexity(40, 1), inner("sharpness", "premise_holds", 0.3)]
    nulls: Line = {"intervention": None, "versions": {"torch": "2.8"}, "created": "2026-01-01"}
    old = [nulls | {"noise_seed": None, "text": None} | line for line in new[:2]] + [nulls | {"head": None} | new[2]]
    made = [write(tmp_path / f"{name}", results=lines[:2], analysis=lines[2:]) for name, lines in enumerate((new, old))]
    assert_frame_equal(load(made[:1]).figures, load(made[1:]).figures)
    assert load(made[1:]).cell(metric="perplexity", model="meta", text="held_out") is not None


def test_a_misspelt_field_is_an_error_and_never_not_run(read: Read) -> None:
    inputs = read([accuracy(0.5)])
    assert inputs.cell(**RECALL, length=64) is None
    for call in (inputs.cell, inputs.select):
        with pytest.raises(KeyError, match="lenght"):
            call(metric="exact_match", lenght=512)


def test_draws_of_noise_are_one_figure_of_all_their_prompts(read: Read) -> None:
    drawn = [accuracy(hits / n, n, intervention="noise:1", noise_seed=draw) for draw, (hits, n) in
             enumerate(((29, 100), (0, 100), (0, 10)))]  # fmt: skip
    aside = [{"value": None, "n": 0, "seed": 1}, {"value": 40.0, "metric": "perplexity"}]  # no proportions
    inputs = read([*drawn, accuracy(0.5), *({**drawn[0], **fields} for fields in aside)])
    cell = inputs.cell(**RECALL, intervention="noise:1")
    assert cell is not None
    assert cell.seeds == {0: (pytest.approx(29 / 210), *map(pytest.approx, wilson(29 / 210, 210)), 210, 0.1)}


def test_a_variants_runs_do_not_speak_for_their_model(read: Read) -> None:
    inputs = read([accuracy(0.5), accuracy(0.6, recipe="small/k=0")], curves=[recall(1, 0.3)])
    plain, other = inputs.cell(task="list_recall"), inputs.cell(task="list_recall", variant="k=0")
    assert [cell and cell.value for cell in (plain, other)] == [0.5, 0.6]


def test_figures_of_another_recipe_are_not_the_presets(read: Read) -> None:
    inputs = read([accuracy(0.5), accuracy(0.9, recipe="demo", seed=1)])
    assert inputs.values("seed", metric="exact_match") == [0]


def test_seeds_that_all_cells_have(read: Read) -> None:
    inputs = read([accuracy(0.5, model=model, seed=seed) for model, seeds in {"meta": 3, "gpt2": 1}.items()
                   for seed in range(seeds)] + [accuracy(None, model="pause")])  # fmt: skip
    cells = inputs.cells([{"model": model} for model in ("meta", "gpt2", "pause", "twin")])
    assert [cell and list(cell.seeds) for cell in cells] == [[0, 1, 2], [0], [], None]
    assert [cell and list(cell.seeds) for cell in shared(cells)] == [[0], [0], [], None]
    assert [one_seed(cells), one_seed(shared(cells))] == ["", " (seed 0)"]


def test_the_floor_is_chance_or_the_best_short_cut(read: Read) -> None:
    inputs = read([accuracy(0.5), majority(0.25, "list_recall", 512), majority(0.05, "list_recall", 128)])
    guesses = [inputs.floor("list_recall", length) for length in (512, 128, 64)] + [inputs.floor("copying", 128)]
    assert guesses == [0.25, 0.1, 0.1, 0.0]


@given(st.lists(st.sampled_from(["", "word", " _PAUSE_", " _PAUSE", "a\nb", "\u2028|"]), min_size=1, max_size=6))
def test_markers_split_a_prompt_back_into_its_segments(segments: list[str]) -> None:
    prompt, markers = segments[0], []
    for segment in segments[1:]:
        markers.append(len(prompt))
        prompt += MARKER + segment
    pieces = ExampleRecord(prompt=prompt, markers=tuple(markers), completion="x").pieces()
    assert [text for text, is_meta_token in pieces if is_meta_token] == ["_PAUSE_"] * (len(segments) - 1)
    assert [text for text, is_meta_token in pieces if not is_meta_token] == [segment for segment in segments if segment]


def test_a_literal_marker_in_a_text_and_a_line_separator_are_text(tmp_path: Path) -> None:
    odd = {"prompt": "before\u2028after\x85end", "completion": "x"}
    literal, other = load([write(tmp_path, results=[accuracy(0.5)], examples=[EXAMPLES[1], odd])]).read.examples
    assert literal.pieces()[0][0].startswith("A literal _PAUSE_ and")
    assert other.prompt == odd["prompt"]


# --- what is derived from the lines


def test_text_tokens_until_recall_stays_learned(read: Read) -> None:
    curves = [recall(step, value, seed=seed) for seed, values in enumerate((
        (0.95, 0.5, 0.9, 0.95),  # falls back once: from the third step on
        (0.9, 0.9, 0.9, 0.9), (0.5, 0.95, 0.95, 0.89),
    )) for step, value in enumerate(values, start=1)]  # fmt: skip
    curves += [loss(3, 2.0, task="list_recall", train_length=128), recall(2, 0.95), recall(3, 0.1, task="parity")]
    inputs = read([accuracy(0.5)], curves=[*curves[::-1], recall(2, 0.5)])  # in no order; of a step the last point
    cell = inputs.cell(metric="tokens_to_learn", model="meta", position_embedding="rope")
    assert cell is not None
    assert cell.values() == [9000, 3000, inf]


def test_what_longer_training_adds_is_the_difference_of_two_train_lengths(read: Read) -> None:
    ends: list[tuple[int, float]] = [(128, 0.2), (256, 0.9), (512, 0.7)]
    lines = [accuracy(value, train_length=trained, length=256) for trained, value in ends]
    aside = [accuracy(0.9, train_length=128, length=256, **{field: "other"}) for field in ("condition", "intervention")]
    cell = read([*lines, *aside, accuracy(0.9, seed=1)]).cell(**RECALL, metric="training_gain", length=256)
    assert cell is not None
    (low, high), (base_low, base_high) = wilson(0.7, 500), wilson(0.2, 500)
    down, up = ((0.7 - low) ** 2 + (base_high - 0.2) ** 2) ** 0.5, ((high - 0.7) ** 2 + (0.2 - base_low) ** 2) ** 0.5
    assert cell.seeds == {0: (pytest.approx(0.5), pytest.approx(0.5 - down), pytest.approx(0.5 + up), 500, None)}


def test_the_distortion_at_a_rate_lies_between_the_points_of_a_curve(read: Read) -> None:
    about: Line = {"split": "held_out", "marker": "final"}
    analysis = [inner("rate_distortion", "answer_entropy", 3.0, None, **about)]
    for beta, rate, distortion in ((0.1, 3.0, 1.0), (1.0, 1.0, 2.0)):
        for metric, value in (("rate", rate), ("distortion", distortion)):
            own = about | {"subject": "meta", "beta": beta, "fit_seed": 4}
            analysis.append(inner("rate_distortion", metric, value, None, **own))
    inputs = read([accuracy(0.5)], analysis=analysis)
    where = {"metric": "distortion_at_rate", "model": "meta", "subject": "meta", "split": "held_out"}
    cells = inputs.cells([where | {"rate": rate} for rate in (0.5, 1.0, 2.0, 4.0)], by=("seed", "fit_seed"))
    found = [cell and dict(cell.seeds)[0, 4].value for cell in cells]
    assert found == pytest.approx([2.5, 2.0, 1.5, 1.0])  # from the entropy at rate 0; beyond the last point its own


def test_decoding_is_slower_per_text_token_and_the_first_token_after_as_many_positions(read: Read) -> None:
    decode = [timing("decode", model, ratio, text_tokens=text) for model, ratio, text in
              (("gpt2", 1.0, 60), ("dense, inserting", 1.2, 50))]  # fmt: skip
    speeds = [*decode, timing("decode", "meta", 1.3, against="nobody"), timing("prefill", "meta", 1.5)]
    inputs = read([accuracy(0.5)], speeds=speeds)
    cells = {(line["benchmark"], line["model"]): inputs.cell(metric="slowdown", benchmark=line["benchmark"],
             model=line["model"]) for line in speeds}  # fmt: skip
    found = {key: [*cell.seeds[0][:3]] for key, cell in cells.items() if cell}
    assert found == {
        ("decode", "gpt2"): pytest.approx([1.0, 0.99, 1.01]),
        ("decode", "dense, inserting"): pytest.approx([1.44, 1.19 * 1.2, 1.21 * 1.2]),
        ("prefill", "meta"): pytest.approx([1.5, 1.49, 1.51]),
    }


def test_log_perplexity(read: Read) -> None:
    inputs = read([perplexity(40, 2), perplexity(44, 2, seed=1), perplexity(30, 2, text="book")])
    cell = inputs.cell(metric="log_perplexity", model="meta", text="held_out")
    assert cell is not None
    assert cell.values() == pytest.approx([log(40), log(44)])
    assert cell.seeds[0][1:3] == (None, None)  # the interval of the text says nothing of another training
