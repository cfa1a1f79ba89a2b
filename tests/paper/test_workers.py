"""The workers of a plan: processes with a GPU each and jobs of a cluster, also when they are killed."""

import os
import signal
import sys
import time

import pytest
import submitit
import torch

from metatokens.errors import UserError
from metatokens.paper import pools
from metatokens.paper.runner import Runner
from tests.forked import PATIENCE
from tests.paper import tiny_preset
from tests.paper.run_lines import assert_same_run, lines, records

# --- by workers with a GPU each


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")


def test_a_worker_a_gpu_by_default(two_gpus, tmp_path, monkeypatch):
    runner = Runner(tmp_path, "tiny", tiny_preset.tiny("builtin"))
    assert pools.open_pool(runner, "processes", None, {}).size == 2
    assert pools.gpus() == ["3", "GPU-5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pools.gpus() == ["0", "1"]


def test_a_worker_sees_one_gpu(two_gpus, tmp_path):
    with pools.ProcessPool(Runner(tmp_path, "tiny", tiny_preset.tiny("builtin")), 1) as pool:
        assert pool._pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == "3"


# --- as jobs of a cluster


@pytest.mark.slow
def test_jobs_give_the_same_results_and_one_that_is_killed_is_submitted_again(
    small_corpus, undisturbed, tmp_path, forked
):
    out, stall = tmp_path / "run", tmp_path / "stalled"
    environment = {
        "STALL": str(stall),
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    preset = tiny_preset.tiny(str(small_corpus), models=("meta",))
    # Few stages, since each job starts an interpreter.
    running = forked(
        tiny_preset.reproduce,
        preset,
        out,
        "--executor local --workers 2 --only perplexity",
        **environment,
    )
    assert wait_until(lambda: stall.exists() or running.status is not None)
    [folder] = (tmp_path / ".cache" / "metatokens" / "jobs").iterdir()
    assert folder.stat().st_mode & 0o077 == 0  # no other user may put a pickle there

    (tmp_path / "stalled.once").touch()  # the next try does not stall
    os.kill(int(stall.read_text()), signal.SIGKILL)

    status, output, error = running.wait()
    assert (status, output) == (0, ""), error
    assert set(records(out)) == {"tokenize", "pretrain-meta", "perplexity-meta"}
    of_meta = [line for line in lines(undisturbed)["results.jsonl"] if '"model":"meta"' in line]
    perplexities = [line for line in of_meta if '"perplexity"' in line]
    assert lines(out)["results.jsonl"] == perplexities
    assert not folder.exists()
    assert list(out.rglob("*.pkl")) == []


def kill_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The folder of the folders of jobs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "metatokens" / "jobs"


@pytest.mark.parametrize(
    ("executor", "job", "sentence"),
    [
        (
            "processes",
            {"slurm_partition": "gpu"},
            "--job gives settings of a cluster's jobs",
        ),
        ("local", {"partitions": "gpu"}, "submitit refuses these jobs: "),
    ],
)
def test_unsuitable_settings_of_jobs_are_refused_before_a_run_is_replaced(
    executor, job, sentence, reproduce, copied, jobs
):
    before = records(copied)
    with pytest.raises(UserError, match=sentence):
        reproduce(executor=executor, job=job, overwrite=True)
    assert records(copied) == before
    assert list(jobs.glob("*")) == []


def test_a_job_that_is_ended_too_often_is_one_sentence(reproduce, jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "TRIES", 1)  # each try starts an interpreter
    monkeypatch.setattr(pools, "_work_as_job", kill_this_process)
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 1)  # seconds to wait for a killed job
    with pytest.raises(
        UserError, match="the job of tokenize was ended 1 times; its output is in "
    ) as caught:
        reproduce(executor="local")

    [folder] = jobs.iterdir()
    printed = "".join(log.read_text() for log in folder.glob("*_log.out"))
    assert str(caught.value).endswith(f" {folder}.")
    assert "submitit" in printed
    assert list((tmp_path / "run").rglob("*.pkl")) == []


def test_settings_of_jobs_are_read_as_yaml():
    settings = pools.job_settings(
        ["slurm_partition=gpu", "timeout_min=90", "slurm_array_parallelism=", "a=b=c"]
    )

    assert settings == {
        "slurm_partition": "gpu",
        "timeout_min": 90,
        "slurm_array_parallelism": None,
        "a": "b=c",
    }


@pytest.mark.parametrize("setting", ["gpu", "=gpu", "a=[1"])
def test_settings_of_jobs_that_cannot_be_read_are_refused(setting):
    with pytest.raises(UserError, match="--job"):
        pools.job_settings([setting])


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
    assert error.splitlines()[-1] == "metatokens: interrupted; repeat the command to resume."
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
