"""The workers that carry out a plan's stages: processes of this machine, or jobs of a cluster."""

import multiprocessing
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import cycle, islice
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple, Self

import torch
import yaml

from metatokens.errors import UserError
from metatokens.machine import available_cores, end_with_parent, keep_freed_memory, worker_context
from metatokens.paper.choices import Executor
from metatokens.paper.plan import Stage
from metatokens.paper.runner import Outcome, Runner
from metatokens.recipe import parse_yaml
from metatokens.training.trainer import Progress, unwatched

TRIES = 3  # of a job that the cluster ends
POLL = 0.5  # seconds between two polls of the jobs


class TimedOutcome(NamedTuple):
    """A stage's outcome, and the time that it took."""

    outcome: Outcome
    seconds: float  # by the clock
    cpu_seconds: float  # of one core


class Pool(ABC):
    """Workers that carry out stages, for use in a `with` statement; an exception ends their work."""

    size: int  # stages at a time

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: type | None, *error: object) -> None: ...

    @abstractmethod
    def submit(self, stage: Stage) -> None:
        """Start a stage."""

    @abstractmethod
    def finished(self) -> Iterator[tuple[str, TimedOutcome]]:
        """Wait for up to a second, then give the names and outcomes of stages that are done.

        Raises:
            UserError: if a worker was killed, or a stage raised it.
        """

    def progress(self) -> Iterator[tuple[str, float]]:
        """The fraction of each running stage that is done, where it is known."""
        return iter(())


def open_pool(
    runner: Runner, executor: Executor, workers: int | None, job: Mapping[str, Any]
) -> Pool:
    """The workers for an executor: `processes`, `slurm`, or `local`, which runs the jobs of `slurm` on this machine.

    Args:
        runner: carries the stages out.
        executor: the name.
        workers: stages at a time; by default 64 for `slurm`, and the number of cores for `local`. For `processes` it is
            the number of GPUs that this process may use, or of cores if there is none.
        job: settings of a job for submitit's `update_parameters`, such as `slurm_partition`.

    Raises:
        UserError: if `job` is given with `processes`, or submitit is not installed or refuses the settings.
    """
    if executor == "processes":
        if job:
            raise UserError(
                "--job gives settings of a cluster's jobs, so it needs --executor slurm."
            )
        return ProcessPool(runner, workers or len(gpus()) or available_cores())
    return JobPool(
        runner, executor, workers or (64 if executor == "slurm" else available_cores()), job
    )


def job_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse settings of a job such as `slurm_partition=gpu`, whose values are YAML."""
    parsed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        try:
            parsed[key] = parse_yaml(value)
        except yaml.YAMLError as error:
            raise UserError(f"--job {setting!r}: the value is not valid YAML.") from error
        if not (key and equals):
            raise UserError(f"--job {setting!r} is not of the form key=value.")
    return parsed


def gpus() -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names and torch.cuda.is_available():
        return names.split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


class ProcessPool(Pool):
    """Processes with one GPU and one thread each: for small models, two processes are faster than two threads."""

    def __init__(self, runner: Runner, size: int):
        self.runner, self.size = runner, size
        context = worker_context(__name__)
        self._reports, self._gpus = context.Queue(), context.Queue()
        for gpu in islice(cycle(gpus() or [None]), size):
            self._gpus.put(gpu)
        self._pool = ProcessPoolExecutor(size, context, _start_worker, (self._reports, self._gpus))
        self._running: dict[Future[TimedOutcome], str] = {}

    def __exit__(self, kind: type | None, *error: object) -> None:
        if kind is not None:  # do not wait for stages that take minutes
            for process in multiprocessing.active_children():
                process.terminate()
        self._pool.shutdown()

    def submit(self, stage: Stage) -> None:
        """Start a stage."""
        self._running[self._pool.submit(_work_and_report, self.runner, stage)] = stage.name

    def finished(self) -> Iterator[tuple[str, TimedOutcome]]:
        """Give the stages that are done, after a short wait."""
        done, _ = wait(self._running, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            try:
                outcome = future.result()
            except BrokenProcessPool as error:
                raise UserError(
                    f"a worker was killed while it did {', '.join(sorted(self._running.values()))} (usually for lack "
                    "of memory); the same command resumes, and --workers 1 needs less memory."
                ) from error
            yield self._running.pop(future), outcome

    def progress(self) -> Iterator[tuple[str, float]]:
        """Give the latest reports of the workers."""
        while not self._reports.empty():
            yield self._reports.get()


class JobPool(Pool):
    """submitit jobs, one per stage. A job that the cluster ends is submitted again.

    submitit passes pickles to its jobs. They are in a new folder below the user's cache, which no other user can write
    and all nodes must share.
    """

    def __init__(self, runner: Runner, cluster: str, size: int, settings: Mapping[str, Any]):
        try:
            import submitit
        except ImportError as error:
            raise UserError(
                "--executor slurm needs submitit: pip install 'metatokens[slurm]'."
            ) from error
        self.runner, self.size = runner, size
        private = Path.home() / ".cache" / "metatokens" / "jobs"
        private.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(dir=private))  # only this user has access
        self._lost = submitit.core.utils.UncompletedJobError
        try:
            self._executor = submitit.AutoExecutor(self._folder, cluster=cluster)
            self._executor.update_parameters(name="metatokens", **{"timeout_min": 120, **settings})
        except (NameError, RuntimeError, ValueError, TypeError) as error:
            rmtree(self._folder)
            raise UserError(
                f"submitit refuses these jobs: {' '.join(str(error).split())}"
            ) from error
        self._running: dict[str, tuple[Any, Stage, int]] = {}
        self._keeps_logs = False

    def __exit__(self, kind: type | None, *error: object) -> None:
        for running, _, _ in self._running.values():
            running.cancel(check=False)
        if not self._keeps_logs:
            rmtree(self._folder, ignore_errors=True)

    def submit(self, stage: Stage, tries: int = 1) -> None:
        """Start a stage."""
        self._running[stage.name] = (
            self._executor.submit(_work_as_job, self.runner, stage),
            stage,
            tries,
        )

    def finished(self) -> Iterator[tuple[str, TimedOutcome]]:
        """Give the stages that are done, after a short wait."""
        time.sleep(POLL)
        for name, (running, stage, tries) in list(self._running.items()):
            if not running.done():
                continue
            del self._running[name]
            try:
                outcome = running.result()
            except self._lost as error:
                if tries == TRIES:
                    self._keeps_logs = True
                    raise UserError(
                        f"the job of {name} was ended {TRIES} times; its output is in {self._folder}."
                    ) from error
                self.submit(stage, tries + 1)
            else:
                if isinstance(outcome, Exception):
                    raise outcome
                yield name, outcome


_reports: Any = None  # in a worker process: the queue for reports of progress


def _start_worker(reports: Any, left: Any) -> None:
    global _reports
    _reports = reports
    if (gpu := left.get()) is not None:  # workers that see several GPUs would all use the first
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    end_with_parent()
    torch.set_num_threads(1)


def _work_and_report(runner: Runner, stage: Stage) -> TimedOutcome:
    return _work(runner, stage, lambda done, total, _: _reports.put((stage.name, done / total)))


def _work_as_job(runner: Runner, stage: Stage) -> TimedOutcome | UserError | OSError:
    try:
        return _work(runner, stage, unwatched)
    except (UserError, OSError) as error:  # returned, since another try would fail the same way
        return error


def _work(runner: Runner, stage: Stage, progress: Progress) -> TimedOutcome:
    keep_freed_memory()
    began, began_on_cpu = time.monotonic(), time.process_time()
    outcome = runner.carry_out(stage, progress)
    return TimedOutcome(outcome, time.monotonic() - began, time.process_time() - began_on_cpu)
