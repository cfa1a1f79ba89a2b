"""The workers of a plan: processes with a GPU each, also when they are killed."""

import os
import signal
import time
from concurrent.futures import Future

import pytest
import torch

from metatokens.errors import UserError
from metatokens.paper import pools
from metatokens.paper.runner import Outcome, Runner
from tests.forked import PATIENCE
from tests.paper import tiny_preset
from tests.paper.run_lines import assert_same_run, records

# --- by workers with a GPU each


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")


def test_a_worker_a_gpu_by_default(two_gpus, tmp_path, monkeypatch):
    runner = Runner(tmp_path, "tiny", tiny_preset.tiny("builtin"))
    with pools.ProcessPool(runner) as pool:
        assert pool.size == 2
    assert pools.gpus() == ["3", "GPU-5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pools.gpus() == ["0", "1"]


def test_a_worker_sees_one_gpu(two_gpus, tmp_path):
    with pools.ProcessPool(Runner(tmp_path, "tiny", tiny_preset.tiny("builtin")), 1) as pool:
        assert pool._pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == "3"


def test_outcomes_come_before_an_error(tmp_path):
    pool = pools.ProcessPool(Runner(tmp_path, "tiny", tiny_preset.tiny("builtin")), 1)
    for number in range(20):  # a set has no order
        future = Future()
        future.set_exception(UserError("a")) if number == 10 else future.set_result(Outcome())
        pool._running[future] = str(number)

    outcomes = pool.finished()
    for _ in range(19):
        next(outcomes)
    with pytest.raises(UserError), pool:
        next(outcomes)


# --- killed, for real


def wait_until(condition):
    """Whether the condition came true in time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def stalled(small_corpus, tmp_path, forked):
    """A run whose worker stalls after the first checkpoint of `meta`; it ends with the test."""
    preset, stall = tiny_preset.tiny(str(small_corpus)), tmp_path / "stalled"
    process = forked(
        tiny_preset.reproduce, preset, tmp_path / "run", "--workers 1", STALL=str(stall)
    )
    wait_until(lambda: stall.exists() or process.status is not None)
    yield process
    process.end()


def assert_cut_off_in_pretraining(out):
    assert {"tokenize", "pretrain-meta"} & set(records(out)) == {"tokenize"}
    checkpoints = out / "models" / "meta" / "pretrained" / "checkpoints"
    names = [path.name for path in checkpoints.iterdir()]
    assert names == ["checkpoint-2"]


def test_ctrl_c_and_going_on_in_worker_processes(
    stalled, forked, small_corpus, undisturbed, tmp_path
):
    os.killpg(stalled.pid, signal.SIGINT)  # as a terminal does
    status, output, error = stalled.wait()
    assert (status, output) == (130, "")
    assert (
        error.splitlines()[-1]
        == "metatokens: interrupted; if you repeat the command, a run resumes."
    )
    assert "Traceback" not in error
    assert wait_until(lambda: stalled.group_is_gone)
    out = tmp_path / "run"
    assert_cut_off_in_pretraining(out)
    before = records(out)

    again = forked(tiny_preset.reproduce, tiny_preset.tiny(str(small_corpus)), out, "--workers 2")

    status, output, error = again.wait()
    assert (status, output) == (0, ""), error
    *progress, _, last = error.splitlines()  # one of the report
    assert last == f"report: {out / 'report' / 'index.html'}"
    lines_with_the_time_left = sum(" left: " in line for line in progress)
    assert lines_with_the_time_left >= 4
    assert progress[-1].startswith("100% in ")
    assert (out / "report" / "index.html").stat().st_size > 10_000
    assert before.items() <= records(out).items()
    assert_same_run(out, undisturbed)


def test_a_worker_that_the_system_kills_is_one_sentence(stalled, tmp_path):
    os.kill(int((tmp_path / "stalled").read_text()), signal.SIGKILL)
    status, _, error = stalled.wait()
    assert status == 2
    assert error.splitlines()[-1].startswith(
        "metatokens: a worker was killed while it did pretrain-meta ("
    )
    assert "Traceback" not in error


def test_no_worker_outlives_a_command_that_was_killed(stalled, reproduce, undisturbed, tmp_path):
    worker = int((tmp_path / "stalled").read_text())
    os.kill(worker, 0)  # it runs
    stalled.kill()  # the command alone
    stalled.wait()
    assert wait_until(lambda: stalled.group_is_gone)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert_cut_off_in_pretraining(tmp_path / "run")
    before = records(tmp_path / "run")

    out = reproduce()

    assert before.items() <= records(out).items()
    assert_same_run(out, undisturbed)
