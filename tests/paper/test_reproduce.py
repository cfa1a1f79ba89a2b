"""The whole plan: carried out, cut off and resumed."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pandas.testing import assert_frame_equal
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from metatokens.analysis import rate_distortion
from metatokens.data.tokenizer import load_tokenizer, text_vocab_size
from metatokens.errors import UserError
from metatokens.files import write_whole
from metatokens.paper import pools, presets, run
from metatokens.paper import run_log as run_log_module
from metatokens.paper.frame import load
from metatokens.paper.plan import Stage, stages
from metatokens.paper.records import RunInfo, lines_file
from metatokens.paper.run_log import RunLog
from metatokens.paper.runner import Outcome, Runner
from metatokens.paper.variants import LandmarksTest, Preset, TrainedModel
from metatokens.records import ExampleRecord, Result, read_lines, read_record, unpack_hits
from metatokens.tasks.curriculum import TASKS
from metatokens.tasks.example_store import ExampleStore
from tests.paper import tiny_preset
from tests.paper.run_lines import assert_same_run, lines, records, unpack

Reproduce = Callable[..., Path]
STAGES = [
    "tokenize",
    "describe_tasks",
    "draw_tests-parity-paper",
    "draw_tests-parity-decoy",
    "draw_examples-parity-paper-seed0-64x16",
]
for model in ("gpt2", "meta"):
    STAGES += [f"{kind}-{model}" for kind in ("pretrain", "perplexity")]
    STAGES += [f"{kind}-{model}-parity" for kind in ("finetune", "evaluate")]

NEO = ("model.architecture=gpt_neo", "model.second_attention=none")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the stages that are started."""
    names: list[str] = []
    carry_out = Runner.carry_out

    def note(runner: Runner, stage: Stage, progress: Any) -> Outcome:
        names.append(stage.name)
        return carry_out(runner, stage, progress)

    monkeypatch.setattr(Runner, "carry_out", note)
    return names


# --- the files of a run


def test_the_result_lines(undisturbed: Path) -> None:
    results = read_lines(lines_file(undisturbed, "results"), Result)

    def found(**fields: object) -> list[Result]:
        return [result for result in results if result.model_dump(include={*fields}) == fields]

    for name, placements in (("gpt2", {"none"}), ("meta", {"none", "uniform"})):
        assert {result.condition for result in found(model=name, metric="perplexity")} == placements
        for condition in ("paper", "decoy"):
            for length, n in ((64, 4), (128, 3)):
                (exact,) = found(model=name, task="parity", condition=condition, length=length, metric="exact_match")
                assert (exact.n, exact.train_length, exact.train_condition, exact.chance) == (n, 64, "paper", 0.5)
                assert len(found(model=name, condition=condition, length=length, metric="token_accuracy")) == 1
    perplexities = [(result.n, result.chance) for result in found(metric="perplexity")]
    assert len(perplexities) == 3
    assert len(set(perplexities)) == 1  # the same text tokens for all
    shortcuts = found(metric="shortcut")
    assert {(one.task, one.condition, one.length, one.n) for one in shortcuts} == {
        ("parity", condition, length, n) for condition in ("paper", "decoy") for length, n in ((64, 4), (128, 3))
    }
    assert "the XOR of all bits" in {one.model for one in shortcuts}
    assert len(results) == 3 + 2 * 2 * 2 * 2 + len(shortcuts)
    assert {result.recipe for result in results} == {"tiny"}


def test_the_caller_hears_of_each_task_that_is_done_while_another_is_left(
    reproduce: Callable[..., Path], tiny: Preset, tmp_path: Path
) -> None:
    tasks, seen = ("parity", "list_recall"), []
    both = replace(
        tiny,
        models=tuple(TrainedModel(model=model, tasks=tasks) for model in ("gpt2", "meta")),
        finetune_recipes=dict.fromkeys(tasks, "demo_finetune"),
        inspections=(LandmarksTest(models=("meta",), counts={"paper": {64: 4}}, train_lengths=(64,)),),
    )

    def look() -> None:
        results = read_lines(tmp_path / "run" / "results.jsonl", Result)
        exact = [one for one in results if one.metric == "exact_match"]
        seen.append({(one.model, one.task, one.intervention) for one in exact})

    reproduce(sizes=both, task_done=look)
    in_sight = {("gpt2", "list_recall", None), ("meta", "list_recall", None)}
    assert seen == [in_sight | {("meta", "list_recall", "landmarks_alone")}]


def test_curves_examples_and_provenance_are_what_the_report_reads(undisturbed: Path) -> None:
    inputs = load([undisturbed])
    steps = inputs.curves.fillna({"train_length": 0}).groupby(["model", "task", "train_length"])["step"].agg(list)
    assert steps.to_dict() == {
        (f"{name}, tiny", task, length): [1, 2, 3, 4]
        for name in ("gpt2", "meta")
        for task, length in (("", 0), ("parity", 64))
    }
    assert set(zip(inputs.curves["seed"], inputs.curves["position_embedding"], strict=True)) == {(0, "rope")}
    assert [example.task for example in inputs.read.examples] == [*TASKS]
    (about,) = inputs.read.runs
    assert (about.preset, about.command) == ("tiny", "metatokens reproduce --preset tiny --out undisturbed")
    assert {stage.name for stage in about.stages} == set(STAGES)
    assert about.wall_seconds is not None
    assert 0 < sum(stage.seconds for stage in about.stages) <= about.wall_seconds + 0.1 * len(STAGES)
    # Width 16, one layer: embedding 832 x 16, 12 x 16^2 with 9 x 16 biases, 3 LayerNorms of 2 x 16;
    # meta-attention adds 4 x 16^2 with 4 x 16 biases, and a LayerNorm.
    assert about.models["gpt2"].parameters == 832 * 16 + 12 * 16**2 + 9 * 16 + 3 * 2 * 16
    assert about.models["meta"].parameters == about.models["gpt2"].parameters + 4 * 16**2 + 4 * 16 + 2 * 16


def test_a_stages_fields_are_the_parts_of_its_name(undisturbed: Path) -> None:
    about = read_record(undisturbed / "run.json", RunInfo)
    took = {"name", "seconds", "cpu_seconds"}
    fields = {stage.name: stage.model_dump(exclude_none=True, exclude=took) for stage in about.stages}
    meta = {"model": "meta", "position_embedding": "rope", "seed": 0, "recipe": "tiny"}
    assert fields["tokenize"] == {"kind": "tokenize"}
    assert fields["draw_tests-parity-decoy"] == {"kind": "draw_tests", "task": "parity", "condition": "decoy"}
    drawn = {"kind": "draw_examples", "task": "parity", "condition": "paper", "seed": 0}
    assert fields["draw_examples-parity-paper-seed0-64x16"] == drawn
    assert fields["pretrain-meta"] == {"kind": "pretrain"} | meta
    assert fields["evaluate-meta-parity"] == {"kind": "evaluate", "task": "parity"} | meta


def test_the_curve_of_a_task_begins_with_its_curriculum(reproduce: Reproduce, tiny: Preset) -> None:
    own = "task.stages=[{lists: [3, 3], items: [6, 6], max_steps: 3}, {lists: [3, 4], items: [6, 7], max_steps: 2}]"
    overrides = (*tiny.finetune_overrides, own)
    sizes = replace(tiny, models=tiny.models[1:], finetune_overrides=overrides, probe_steps={"parity": 1})
    out = reproduce(sizes=sizes)
    points = [one for one in load([out]).read.points if one.task == "parity"]
    assert [one.step for one in points if one.loss is not None] == [*range(1, 10)]  # 3 and 2 of the curriculum, then 4
    assert [one.step for one in points if one.exact_match is not None] == [*range(1, 10)]
    assert {one.train_length for one in points} == {64}
    seen = [one.text_tokens for one in points if one.loss is not None]
    markers = {}
    for name in ("stage-1", "stage-2", "train-64"):
        (file,) = (out / "examples").rglob(f"{name}.arrow")
        tokenizer = load_tokenizer(str(out / "tokens" / "tokenizer"))
        drawn = [[token for token in one.input_ids if token != tokenizer.meta_token_id] for one in ExampleStore(file)]
        markers[name] = 4 * sum(map(len, drawn)) / len(drawn)  # text tokens of a step
    assert seen[2] == pytest.approx(3 * markers["stage-1"], abs=1)
    assert seen[4] == pytest.approx(3 * markers["stage-1"] + 2 * markers["stage-2"], abs=1)
    assert seen[8] == pytest.approx(seen[4] + 4 * markers["train-64"], abs=2)


def test_models_are_trained_on_the_same_text(undisturbed: Path) -> None:
    data = {
        name: json.loads((undisturbed / "models" / name / "pretrained" / "settings.json").read_text())["recipe"]["data"]
        for name in ("gpt2", "meta")
    }
    assert data["meta"] == {"block_size": 32, "fraction": 0.1, "placement": "uniform"}
    assert data["gpt2"] == {"block_size": 29, "fraction": 0.1, "placement": "none"}


# --- cut off and resumed, in this process


def cut_off(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.quick(cut=[6])
@pytest.mark.parametrize("cut", range(0, len(STAGES), 3))
def test_stages_that_were_finished_are_not_repeated(
    cut: int,
    reproduce: Reproduce,
    started: list[str],
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carry_out = Runner.carry_out

    def stop_at_cut(*arguments: Any) -> Any:
        return cut_off() if len(started) == cut else carry_out(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "carry_out", stop_at_cut)
        with pytest.raises(KeyboardInterrupt):
            reproduce()
    before = records(tmp_path / "run")
    assert len(before) == len(started) == cut
    out = reproduce()
    after = records(out)
    assert {name: after[name] for name in before} == before
    assert sorted(after) == sorted(STAGES)
    assert len(started) == len(STAGES)
    assert_same_run(out, undisturbed)
    (about,) = load([out]).read.runs
    assert (about.wall_seconds is None) == (cut > 0)  # the first try's time is unknown
    assert records(reproduce()) == after
    assert len(started) == len(STAGES)


def test_a_run_cut_off_before_its_provenance_gets_it(
    reproduce: Reproduce, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run, "_write_provenance", cut_off)
        with pytest.raises(KeyboardInterrupt):
            reproduce()
    assert not (tmp_path / "run" / "run.json").exists()
    out = reproduce()
    assert {stage.name for stage in load([out]).read.runs[0].stages} == set(STAGES)
    assert_same_run(out, undisturbed)


def test_a_run_goes_on_from_its_records_alone(
    reproduce: Reproduce, undisturbed: Path, copied: Path, started: list[str]
) -> None:
    for folder in ("models", "tokens", "examples"):
        shutil.rmtree(copied / folder)
    for begun in ("models/meta/pretrained", "models/meta/parity", "tokens", "examples/parity"):
        (copied / begun).mkdir(parents=True)  # as if cut off there, without a product
    last = "evaluate-gpt2-parity"
    kept = [line for name, line in records(copied).items() if name != last]
    assert len(kept) == len(STAGES) - 1
    assert list(records(copied))[-1] == last  # so its result lines are the last ones too
    (copied / "stages.jsonl").write_text("".join(line + "\n" for line in kept))
    reproduce()
    drawn = {name for name in STAGES if name.startswith("draw_")}
    needed = {"tokenize", "pretrain-gpt2", *drawn, "finetune-gpt2-parity", last}
    assert len(started) == len(needed)
    assert set(started) == needed
    assert list(records(copied).values())[:-1] == kept
    assert_same_run(copied, undisturbed)


def test_weights_that_come_out_otherwise_are_noticed(
    reproduce: Reproduce, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training again gives other weights than those that finished stages measured, as on another machine."""
    shutil.rmtree(copied / "models" / "gpt2")
    entries = [json.loads(line) for name, line in records(copied).items() if name != "evaluate-gpt2-parity"]
    facts = {entry["name"]: entry["facts"] for entry in entries}
    assert len(facts["finetune-gpt2-parity"]["weights_sha256"]["64"]) == 64
    facts["pretrain-gpt2"]["weights_sha256"] = "0"
    (copied / "stages.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    reproduce()
    said = [line for line in capsys.readouterr().err.splitlines() if "other weights" in line]
    assert said == ["pretrain-gpt2 gave other weights than those that finished stages measured."]


def test_lines_of_a_stage_that_was_cut_off_are_dropped(reproduce: Reproduce, undisturbed: Path, copied: Path) -> None:
    unpack(copied)
    ends = dict.fromkeys(("results", "curves", "stages"), '{"cut off": ') | {"analysis": '{"whole": "not counted"}\n'}
    for name, end in ends.items():
        with (copied / f"{name}.jsonl").open("a") as file:
            file.write(end)
    reproduce()
    assert lines(copied) == lines(undisturbed)
    assert records(copied) == records(undisturbed)


def files_of_lines(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.glob("*.jsonl*")) if path.name[0] in "arc"}


def test_the_files_of_a_finished_run_are_compressed_and_their_bytes_are_those_of_the_lines(
    reproduce: Reproduce, copied: Path
) -> None:
    before = files_of_lines(copied)
    assert list(before) == ["analysis.jsonl.gz", "curves.jsonl.gz", "results.jsonl.gz"]
    for content in before.values():
        assert content[3] == 0  # no name
        assert content[4:8] == bytes(4)  # no time
    unpack(copied)  # as if killed before it was packed
    about = (copied / "run.json").read_bytes()
    reproduce()
    assert files_of_lines(copied) == before
    assert (copied / "run.json").read_bytes() == about


@pytest.mark.quick(killed_at=[1, 4])
@pytest.mark.parametrize("killed_at", range(6))
def test_nothing_is_lost_while_files_are_packed_or_unpacked(
    killed_at: int, undisturbed: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, expected = copied, files_of_lines(copied)

    def killed(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (cut_off if next(steps) == killed_at else call)(*arguments, **options)

    for act in (RunLog.resume, RunLog.pack):
        steps = iter(range(6))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", killed(Path.unlink))
            patch.setattr(run_log_module, "write_whole", killed(write_whole))
            with pytest.raises(KeyboardInterrupt):
                act(RunLog(out))
        assert lines(out) == lines(undisturbed)
        assert_frame_equal(load([out]).figures, load([undisturbed]).figures)
        if act is RunLog.resume:
            RunLog(out).resume()
            assert not [path for path in out.iterdir() if path.suffix == ".gz"]
    RunLog(out).pack()
    assert files_of_lines(out) == expected


def test_a_finished_stage_with_other_settings_is_refused_and_a_longer_plan_is_not(
    reproduce: Reproduce, copied: Path, tiny: Preset
) -> None:
    before = records(copied)
    changed = replace(tiny, finetune_overrides=(*tiny.finetune_overrides, "training.learning_rate=0.5"))
    with pytest.raises(
        UserError, match=r"finetune-gpt2-parity with other settings \(recipe.training.learning_rate was"
    ):
        reproduce(sizes=changed)
    assert records(copied) == before
    reproduce(sizes=replace(tiny, models=(*tiny.models, replace(tiny.models[0], model="pause"))))
    after = list(records(copied))
    assert after[: len(before)] == list(before)
    further = {"pretrain-pause", "perplexity-pause", "finetune-pause-parity", "evaluate-pause-parity"}
    assert set(after[len(before) :]) == further


def test_the_committed_run_has_the_lines_that_it_counts() -> None:
    folder = Path(__file__).parents[2] / "results" / "small"
    assert len(read_lines(lines_file(folder, "results"), Result)) == sum(
        entry.lines.get("results", 0) for entry in RunLog(folder).entries.values()
    )


def test_the_committed_run_describes_its_stages_as_a_new_one_would() -> None:
    about = read_record(Path(__file__).parents[2] / "results" / "small" / "run.json", RunInfo)
    written = {stage.name: stage for stage in about.stages}
    planned = {stage.name: stage.fields("small") for stage in stages(presets.SMALL)}
    assert written.keys() & planned.keys()
    for name in written.keys() & planned.keys():
        given = written[name].model_dump(exclude_none=True, exclude={"name", "seconds", "cpu_seconds"})
        assert given == {key: one for key, one in planned[name].items() if one is not None}, name
    model = {"model": "meta", "position_embedding": "rope", "seed": 33, "task": "list_recall"}
    analysis = planned["rate-distortion-meta-seed33-list_recall"]
    assert analysis == model | {"kind": "rate-distortion", "recipe": "small", "train_length": 128}
    longer = planned["finetune-meta-seed33-yarn4-list_recall"]
    assert longer == model | {"kind": "finetune", "recipe": "small/yarn4", "train_length": None}


def test_result_lines_that_are_lost_are_noticed(reproduce: Reproduce, copied: Path) -> None:
    unpack(copied)
    (copied / "results.jsonl").write_text("")
    with pytest.raises(UserError, match=r"results.jsonl has fewer lines than stages.jsonl counts"):
        reproduce()
    (copied / "stages.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"stages.jsonl, line 1 is no finished stage"):
        reproduce()


def test_one_tables_part(reproduce: Reproduce) -> None:
    out = reproduce(only="perplexity")
    models = {f"{kind}-{model}" for kind in ("pretrain", "perplexity") for model in ("gpt2", "meta")}
    assert set(records(out)) == {"tokenize"} | models
    assert run.unfinished("tiny", out, only="perplexity") == []
    assert {stage.name for stage in run.unfinished("tiny", out)} == set(STAGES) - set(records(out))


def test_every_kind_of_stage(reproduce: Reproduce, small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_distortion, "BETAS", (0.1,))  # three bottlenecks are trained for each
    out = reproduce(sizes=tiny_preset.wide(str(small_corpus)))
    results = read_lines(lines_file(out, "results"), Result)
    extended = [one for one in results if one.recipe == "tiny/yarn" and one.metric == "exact_match"]
    assert {(one.train_length, one.length, one.n) for one in extended} == {(128, 64, 4), (128, 128, 3)}
    assert {one.text for one in results if one.metric == "perplexity"} == {"held_out", "book"}
    noise = [one for one in results if one.intervention == "noise:1" and one.metric == "exact_match"]
    assert [(one.noise_seed, one.n) for one in noise] == [(0, 4)]
    (zeroed,) = [one for one in results if one.intervention == "no_pos" and one.metric == "exact_match"]
    assert (zeroed.noise_seed, zeroed.n) == (None, 4)
    through = [one for one in results if one.intervention == "landmarks_alone" and one.metric == "exact_match"]
    assert sorted((one.recipe, one.condition, one.train_condition, one.n) for one in through) == [
        ("tiny", "paper", "paper", 4),
        ("tiny/alone", "landmark", "landmark", 4),
    ]
    assert all(0 < one.kv_kept < 0.5 and one.kv_bytes for one in through)
    assert all(one.intervention == "landmarks_alone" for one in results if one.recipe == "tiny/alone")
    [right] = [one.completion for one in read_lines(out / "examples.jsonl", ExampleRecord) if one.task == "parity"]
    answered = [one for one in results if one.answer is not None]
    assert {one.intervention for one in answered} == {None, "landmarks_alone"}
    assert all((one.condition, one.length, one.metric) == ("paper", 64, "exact_match") for one in answered)
    assert all((one.answer == right) == unpack_hits(one.hits, one.n)[0] for one in answered)
    found = [json.loads(line) for line in lines(out)["analysis.jsonl"]]
    assert {one["analysis"] for one in found} == {"sharpness", "residual", "rate_distortion"}
    assert {one.get("intervention") for one in found if one["analysis"] == "rate_distortion"} == {None, "no_pos"}
    points = [json.loads(line) for line in lines(out)["curves.jsonl"]]
    probed = [(one["step"], one["n"]) for one in points if "exact_match" in one]
    assert probed == [(2, 4), (4, 4)] * 3
    tokens = {one["step"]: one["text_tokens"] for one in points if one.get("train_length") == 64}
    assert tokens[4] == pytest.approx(4 * tokens[1], abs=4)
    assert 4 * 20 < tokens[1] < 4 * 64
    page = out / "looks" / "parity.html"
    assert "<title>Inside meta and meta-yarn</title>" in page.read_text(encoding="utf-8")
    assert load([out]).read.looks == {"parity": page}


def test_a_published_model_in_place_of_a_pretrained_one(
    reproduce: Reproduce, tiny: Preset, undisturbed: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(undisturbed / "tokens" / "tokenizer"))
    sizes = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "attention_types": [[["global"], 1]]}
    config = GPTNeoConfig(**sizes, vocab_size=text_vocab_size(tokenizer), eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    GPTNeoForCausalLM(config).save_pretrained(tmp_path / "neo")
    tokenizer.save_pretrained(tmp_path / "neo")
    one = TrainedModel(
        model="gpt-neo",
        position_embedding="learned",
        tasks=("parity",),
        published=str(tmp_path / "neo"),
        pretrain_overrides=NEO,
        finetune_overrides=("training.train_base=true",),
    )
    sizes = replace(tiny, models=(one,))
    out = reproduce(sizes=sizes)
    facts = json.loads((out / "run.json").read_text())["models"][one.name]
    rows = 64 * math.ceil((config.vocab_size + 1) / 64) + 1  # the meta-token's own row is outside the table
    trained = GPTNeoForCausalLM(config).num_parameters() + (rows - config.vocab_size) * 16
    assert facts == {"parameters": trained, "description": f"{tmp_path / 'neo'}, as published"}
    found = {(one.model, one.metric, one.task) for one in read_lines(lines_file(out, "results"), Result)}
    assert {("gpt-neo", "perplexity", None), ("gpt-neo", "exact_match", "parity")} <= found

    shutil.rmtree(out)
    with pytest.raises(UserError, match="neo and the token store"):
        reproduce(sizes=replace(sizes, tokenizer="train:600"))


def test_another_preset_is_refused_and_overwriting_replaces(
    reproduce: Reproduce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_carry_out", cut_off)
    with pytest.raises(KeyboardInterrupt):
        reproduce()
    settings = (tmp_path / "run" / "settings.json").read_bytes()
    with pytest.raises(UserError, match="preset was 'tiny' and is now 'other'"):
        reproduce("other")
    assert (tmp_path / "run" / "settings.json").read_bytes() == settings
    with pytest.raises(KeyboardInterrupt):
        reproduce("other", overwrite=True)
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["preset"] == "other"


class FailsSecond(pools.Pool):
    """A pool of two workers: when the first of two stages is done, the second fails."""

    size = 2

    def __init__(self, done: pools.TimedOutcome):
        self.done = done
        self.at_work: list[str] = []

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, stage: Stage) -> None:
        self.at_work.append(stage.name)

    def finished(self) -> Iterator[tuple[str, pools.TimedOutcome]]:
        yield self.at_work.pop(0), self.done
        if self.at_work:
            raise UserError("the disk is full.")


def test_what_is_done_is_kept_when_the_next_stage_fails(
    reproduce: Reproduce, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized = json.loads(records(undisturbed)["tokenize"])
    done = pools.TimedOutcome(Outcome(facts=tokenized["facts"]), seconds=1.0, cpu_seconds=1.0)
    monkeypatch.setattr(run, "open_pool", lambda *_: FailsSecond(done))
    with pytest.raises(UserError, match="the disk is full"):
        reproduce()
    assert len(records(tmp_path / "run")) == 2  # tokenize, and the first of two


def test_a_users_mistake_in_a_stage_is_passed_on(reproduce: Reproduce, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file matches the corpus nowhere"):
        reproduce(corpus="nowhere")
    assert records(tmp_path / "run") == {}
