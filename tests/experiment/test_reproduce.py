"""The whole plan: carried out, cut off, gone on with."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import tiny_preset

from metatokens.errors import UserError
from metatokens.evaluation.results import Result, read_results
from metatokens.experiment import plan, run
from metatokens.report.inputs import read_inputs

STAGES = ["tokenize", "describe_tasks", "draw_examples-parity"]
for model in ("gpt2", "meta"):
    STAGES += [f"{verb}-{model}" for verb in ("pretrain", "perplexity")]
    STAGES += [f"{verb}-{model}-parity" for verb in ("finetune", "evaluate")]


class InThisProcess:
    """Stands for the process pool: carries each stage out when it is submitted."""

    def __init__(self, workers: int, context: object, initializer: object, initargs: tuple[Any]):
        run._reports = initargs[0]

    def __enter__(self) -> "InThisProcess":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pass

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(work(*arguments))
        return future


@pytest.fixture
def reproduce(small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`reproduce` with the tiny preset, in this process."""
    monkeypatch.setattr(plan, "PRESETS", {name: tiny_preset.tiny(str(small_corpus)) for name in ("tiny", "other")})
    monkeypatch.setattr(run, "ProcessPoolExecutor", InThisProcess)
    return lambda out, name="tiny", **options: run.reproduce(name, out, workers=1, **options)


@pytest.fixture(scope="module")
def undisturbed(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PRESETS", {"tiny": tiny_preset.tiny(str(small_corpus))})
        patch.setattr(run, "ProcessPoolExecutor", InThisProcess)
        run.reproduce("tiny", out, workers=1)
    return out


def figures(out: Path) -> list[dict[str, Any]]:
    """The result lines but for when they were made."""
    return [result.model_dump(exclude={"created"}) for result in read_results([out / "results.jsonl"])]


def records(out: Path) -> dict[str, tuple[int, bytes]]:
    """When each finished stage was finished, and what it left."""
    return {path.stem: (path.stat().st_mtime_ns, path.read_bytes()) for path in (out / "stages").glob("*.json")}


def assert_same_run(out: Path, undisturbed: Path) -> None:
    assert figures(out) == figures(undisturbed)
    for name in ("curves.jsonl", "examples.jsonl"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()


# --- what a run leaves


def test_the_result_lines(undisturbed: Path) -> None:
    results = read_results([undisturbed / "results.jsonl"])

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
    assert [(result.task, result.length) for result in found(metric="majority_rate")] == [
        ("segment_counting", 64),
        ("segment_counting", 128),
        ("parity", 64),
        ("parity", 128),
    ]
    assert len(results) == 3 + 2 * 2 * 2 * 2 + 4
    assert {result.recipe for result in results} == {"tiny"}


def test_curves_examples_and_provenance_are_what_the_report_reads(undisturbed: Path) -> None:
    inputs = read_inputs([undisturbed])
    curves = {(point.model, point.task, point.train_length) for point in inputs.curves}
    assert curves == {
        (name, task, length) for name in ("gpt2", "meta") for task, length in ((None, None), ("parity", 64))
    }
    for key in curves:
        steps = [point.step for point in inputs.curves if (point.model, point.task, point.train_length) == key]
        assert steps == [1, 2, 3, 4]
    assert {(point.seed, point.position_embedding) for point in inputs.curves} == {(0, "rope")}
    assert [example.task for example in inputs.examples] == ["list_recall", "segment_counting", "parity", "copying"]
    (about,) = inputs.runs
    assert (about.preset, about.command) == ("tiny", "metatokens reproduce --preset tiny --out undisturbed")
    assert [stage.name for stage in about.stages] == STAGES
    assert about.wall_seconds is not None
    assert 0 < sum(stage.seconds for stage in about.stages) <= about.wall_seconds + 0.1 * len(STAGES)
    # Width 16, one layer: embedding 832 x 16, 12 x 16^2 in matrices, 3 LayerNorms without bias; meta-attention adds
    # 4 x 16^2 and a LayerNorm.
    assert about.models["gpt2"].parameters == 832 * 16 + 12 * 16**2 + 3 * 16
    assert about.models["meta"].parameters == about.models["gpt2"].parameters + 4 * 16**2 + 16


def test_models_are_trained_on_the_same_text(undisturbed: Path) -> None:
    data = {
        name: json.loads((undisturbed / "models" / name / "pretrained" / "settings.json").read_text())["recipe"]["data"]
        for name in ("gpt2", "meta")
    }
    assert data["meta"] == {"block_size": 32, "fraction": 0.1, "placement": "uniform"}
    assert data["gpt2"] == {"block_size": 29, "fraction": 0.1, "placement": "none"}


# --- cut off and gone on with, in this process


def cut_off(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("cut", range(0, len(STAGES), 3))
def test_stages_that_were_finished_are_not_repeated(
    cut: int, reproduce: Callable[..., None], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    carry_out = run.carry_out

    def note(workshop: Any, verb: str, arguments: dict[str, str], progress: Any) -> Any:
        started.append("-".join([verb, *arguments.values()]))
        if len(started) == cut + 1:
            raise KeyboardInterrupt
        return carry_out(workshop, verb, arguments, progress)

    monkeypatch.setattr(run, "carry_out", note)
    with pytest.raises(KeyboardInterrupt):
        reproduce(tmp_path / "run")
    before = records(tmp_path / "run")
    assert sorted(before) == sorted(started[:-1])
    reproduce(tmp_path / "run")
    after = records(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert sorted(after) == sorted(STAGES)
    assert len(started) == len(STAGES) + 1
    assert_same_run(tmp_path / "run", undisturbed)
    (about,) = read_inputs([tmp_path / "run"]).runs
    assert (about.wall_seconds is None) == (cut > 0)  # what the first try took is not known
    reproduce(tmp_path / "run")
    assert records(tmp_path / "run") == after


def test_a_run_cut_off_before_its_provenance_gets_it(
    reproduce: Callable[..., None], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run, "_write_provenance", cut_off)
        with pytest.raises(KeyboardInterrupt):
            reproduce(tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()
    reproduce(tmp_path / "run")
    assert [stage.name for stage in read_inputs([tmp_path / "run"]).runs[0].stages] == STAGES
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_run_goes_on_from_its_records_alone(
    reproduce: Callable[..., None], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run", ignore=shutil.ignore_patterns("models", "tokens", "examples"))
    for begun in ("models/meta/pretrained", "models/meta/parity", "tokens", "examples/parity"):
        (tmp_path / "run" / begun).mkdir(parents=True)  # and was cut off there, which is no product
    (tmp_path / "run" / "stages" / "evaluate-meta-parity.json").unlink()
    before, started, carry_out = records(tmp_path / "run"), [], run.carry_out

    def note(workshop: Any, verb: str, arguments: dict[str, str], progress: Any) -> Any:
        started.append("-".join([verb, *arguments.values()]))
        return carry_out(workshop, verb, arguments, progress)

    monkeypatch.setattr(run, "carry_out", note)
    reproduce(tmp_path / "run")
    needed = ["tokenize", "pretrain-meta", "draw_examples-parity", "finetune-meta-parity", "evaluate-meta-parity"]
    assert sorted(started) == sorted(needed)
    assert set(records(tmp_path / "run")) - set(before) == {"evaluate-meta-parity"}
    assert_same_run(tmp_path / "run", undisturbed)


def test_another_preset_is_refused_and_overwriting_replaces(
    reproduce: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_carry_out", cut_off)
    with pytest.raises(KeyboardInterrupt):
        reproduce(tmp_path / "run")
    settings = (tmp_path / "run" / "settings.json").read_bytes()
    with pytest.raises(UserError, match="preset was 'tiny' and is now 'other'"):
        reproduce(tmp_path / "run", "other")
    assert (tmp_path / "run" / "settings.json").read_bytes() == settings
    with pytest.raises(KeyboardInterrupt):
        reproduce(tmp_path / "run", "other", overwrite=True)
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["preset"] == "other"


def test_a_users_mistake_in_a_stage_is_passed_on(
    reproduce: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("the disk is full.")

    monkeypatch.setattr(run, "carry_out", refuse)
    with pytest.raises(UserError, match="the disk is full"):
        reproduce(tmp_path / "run")
    assert records(tmp_path / "run") == {}


# --- killed, for real

PATIENCE = 600  # seconds


def start(corpus: Path, out: Path, *, workers: int, **environment: str) -> subprocess.Popen[str]:
    """The command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, tiny_preset.__file__, str(corpus), str(out), str(workers)],
        env=os.environ | environment,
        start_new_session=True,
        # A shell starts what runs in its background with Ctrl-C ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it came true; the patience is for machines with other work."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def group_is_gone(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def stalled(small_corpus: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose worker stands still after the first checkpoint of `meta`, ended with the test whatever happens."""
    process = start(small_corpus, tmp_path / "run", workers=1, STALL=str(tmp_path / "stalled"))
    wait_until(lambda: (tmp_path / "stalled").exists() or process.poll() is not None)
    yield process
    if not group_is_gone(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def assert_cut_off_in_pretraining(out: Path) -> None:
    assert list(records(out)) == ["tokenize"]  # what takes longest is done first
    checkpoints = out / "models" / "meta" / "pretrained" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-2"]


def test_ctrl_c_and_going_on_in_worker_processes(
    stalled: subprocess.Popen[str], small_corpus: Path, undisturbed: Path, tmp_path: Path
) -> None:
    os.killpg(stalled.pid, signal.SIGINT)  # as a terminal does
    output, error = stalled.communicate(timeout=PATIENCE)
    assert stalled.returncode == 130
    assert output == ""
    assert error.splitlines()[-1] == "metatokens: interrupted; the same command goes on from here."
    assert "Traceback" not in error
    assert wait_until(lambda: group_is_gone(stalled.pid))
    assert_cut_off_in_pretraining(tmp_path / "run")
    before = records(tmp_path / "run")

    again = start(small_corpus, tmp_path / "run", workers=2)
    output, error = again.communicate(timeout=PATIENCE)
    assert (again.returncode, output) == (0, "")
    *progress, last = error.splitlines()
    assert last == f"report: {tmp_path / 'run' / 'report' / 'index.html'}"
    assert len([line for line in progress if " left: " in line or "estimating the time left: " in line]) >= 4
    assert progress[-1].startswith("100% in ")
    assert (tmp_path / "run" / "report" / "index.html").stat().st_size > 10_000
    after = records(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_worker_that_the_system_kills_is_one_sentence(
    stalled: subprocess.Popen[str], reproduce: Callable[..., None], undisturbed: Path, tmp_path: Path
) -> None:
    os.kill(int((tmp_path / "stalled").read_text()), signal.SIGKILL)
    _, error = stalled.communicate(timeout=PATIENCE)
    assert stalled.returncode == 2
    assert error.splitlines()[-1].startswith("metatokens: a worker was killed while it did pretrain-meta (")
    assert "Traceback" not in error
    reproduce(tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)


def test_no_worker_outlives_a_command_that_was_killed(
    stalled: subprocess.Popen[str], reproduce: Callable[..., None], undisturbed: Path, tmp_path: Path
) -> None:
    worker = int((tmp_path / "stalled").read_text())
    os.kill(worker, 0)  # it runs
    stalled.kill()  # the command alone
    stalled.wait(timeout=PATIENCE)
    assert wait_until(lambda: group_is_gone(stalled.pid))
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert_cut_off_in_pretraining(tmp_path / "run")
    before = records(tmp_path / "run")
    reproduce(tmp_path / "run")
    after = records(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert_same_run(tmp_path / "run", undisturbed)
