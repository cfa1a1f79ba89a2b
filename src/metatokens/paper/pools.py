"""Where a plan's stages are carried out: in processes of this machine, or as jobs of a cluster."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import cycle, islice
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch
import yaml

from metatokens.errors import UserError
from metatokens.machine import available_cores, end_with_parent, keep_freed_memory, worker_context
from metatokens.paper.plan import Stage
from metatokens.paper.runner import Outcome, Runner
from metatokens.recipe import Executor, parse_yaml
from metatokens.training.trainer import Progress, unwatched

TRIES = 3  # of a job that the cluster ended
POLL = 0.5  # seconds between two looks at the jobs


class Done(NamedTuple):
    """What a stage found, and what it took."""

    outcome: Outcome
    seconds: float  # by the clock
    cpu_seconds: float  # of one core


class Pool(Protocol):
    """Workers that carry out stages; to be used in a `with` statement, whose failure ends what they do."""

    size: int  # stages at a time

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None: ...

    def submit(self, stage: Stage) -> None:
        """Begin a stage."""
        ...

    def finished(self) -> Iterable[tuple[str, Done]]:
        """Wait a little, and give the names of stages that are done, with what they found.

        Raises:
            UserError: if a worker was killed, or a stage met a user's mistake.
        """
        ...

    def progress(self) -> Iterator[tuple[str, float]]:
        """The fraction that a running stage has done, where it is known."""
        ...


def open_pool(runner: Runner, executor: Executor, workers: int | None, job: Mapping[str, Any]) -> Pool:
    """The workers of an executor's name: `processes`, `slurm`, or `local`, which makes jobs as `slurm` does, but here.

    Args:
        runner: carries the stages out.
        executor: the name.
        workers: stages at a time; default: the GPUs that this process may use, or its cores, for `slurm` 64.
        job: settings of a job, of submitit's `update_parameters`, such as `slurm_partition`.

    Raises:
        UserError: if submitit is not installed, or does not know a setting.
    """
    if executor == "processes":
        if job:
            raise UserError("--job sets what a cluster's job gets; it goes with --executor slurm.")
        return ProcessPool(runner, workers or len(gpus()) or available_cores())
    return JobPool(runner, executor, workers or (64 if executor == "slurm" else available_cores()), job)


def job_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Strings such as `slurm_partition=gpu` as settings of a job; values are read as YAML.

    Raises:
        UserError: if one is not of that form.
    """
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
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named and torch.cuda.is_available() else [*map(str, range(torch.cuda.device_count()))]


class ProcessPool:
    """Processes of one thread each, since two of them beat one of two threads for small models, and of one GPU each."""

    def __init__(self, runner: Runner, size: int):
        self.runner, self.size = runner, size
        context = worker_context(__name__)
        self._reports, self._gpus = context.Queue(), context.Queue()
        for gpu in islice(cycle(gpus() or [None]), size):
            self._gpus.put(gpu)
        self._pool = ProcessPoolExecutor(size, context, _start_worker, (self._reports, self._gpus))
        self._running: dict[Future[Done], str] = {}

    def __enter__(self) -> "ProcessPool":
        self._pool.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            # Without this, leaving the pool would wait for stages of minutes.
            for process in multiprocessing.active_children():
                process.terminate()
        self._pool.__exit__(kind, error, traceback)

    def submit(self, stage: Stage) -> None:
        """Begin a stage."""
        self._running[self._pool.submit(_work_and_report, self.runner, stage)] = stage.name

    def finished(self) -> Iterator[tuple[str, Done]]:
        """Stages that are done, after a second at most."""
        done, _ = wait(self._running, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            try:
                found = future.result()
            except BrokenProcessPool as error:
                raise UserError(
                    f"a worker was killed while it did {', '.join(sorted(self._running.values()))} (too little memory "
                    "is the usual reason); the same command goes on from here, and --workers 1 needs less."
                ) from error
            yield self._running.pop(future), found

    def progress(self) -> Iterator[tuple[str, float]]:
        """What workers reported since the last look."""
        while not self._reports.empty():
            yield self._reports.get()


class JobPool:
    """Jobs of submitit, one a stage; a job that the cluster ends is submitted again.

    submitit hands its jobs over in pickles. They lie in a new folder below the user's own cache, which nobody else can
    write and all nodes must see.
    """

    def __init__(self, runner: Runner, cluster: str, size: int, settings: Mapping[str, Any]):
        try:
            import submitit
        except ImportError as error:
            raise UserError("--executor slurm needs submitit: pip install 'metatokens[slurm]'.") from error
        self.runner, self.size = runner, size
        private = Path.home() / ".cache" / "metatokens" / "jobs"
        private.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(dir=private))  # for the user alone
        self._lost = submitit.core.utils.UncompletedJobError
        try:
            self._executor = submitit.AutoExecutor(self._folder, cluster=cluster)
            self._executor.update_parameters(name="metatokens", **{"timeout_min": 120, **settings})
        except (NameError, RuntimeError, ValueError, TypeError) as error:
            rmtree(self._folder)
            raise UserError(f"submitit does not take these jobs: {' '.join(str(error).split())}") from error
        self._running: dict[str, tuple[Any, Stage, int]] = {}
        self._keeps_logs = False

    def __enter__(self) -> "JobPool":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for running, _, _ in self._running.values():
            running.cancel(check=False)
        if not self._keeps_logs:
            rmtree(self._folder, ignore_errors=True)

    def submit(self, stage: Stage, tries: int = 1) -> None:
        """Begin a stage."""
        self._running[stage.name] = (self._executor.submit(_work_as_job, self.runner, stage), stage, tries)

    def finished(self) -> Iterator[tuple[str, Done]]:
        """Stages that are done, after half a second."""
        time.sleep(POLL)
        for name, (running, stage, tries) in list(self._running.items()):
            if not running.done():
                continue
            del self._running[name]
            try:
                found = running.result()
            except self._lost as error:
                if tries == TRIES:
                    self._keeps_logs = True
                    raise UserError(
                        f"the job of {name} was ended {TRIES} times; what it printed is in {self._folder}."
                    ) from error
                self.submit(stage, tries + 1)
            else:
                if isinstance(found, Exception):
                    raise found
                yield name, found

    def progress(self) -> Iterator[tuple[str, float]]:
        """Nothing: jobs do not tell."""
        return iter(())


_reports: Any = None  # in a worker process: the queue that progress is put into


def _start_worker(reports: Any, left: Any) -> None:
    global _reports
    _reports = reports
    if (gpu := left.get()) is not None:  # workers that see several would all take the first
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    end_with_parent()
    torch.set_num_threads(1)


def _work_and_report(runner: Runner, stage: Stage) -> Done:
    return _work(runner, stage, lambda done, total, _: _reports.put((stage.name, done / total)))


def _work_as_job(runner: Runner, stage: Stage) -> Done | UserError | OSError:
    try:
        return _work(runner, stage, unwatched)
    except (UserError, OSError) as error:  # which the next try would meet again
        return error


def _work(runner: Runner, stage: Stage, progress: Progress) -> Done:
    keep_freed_memory()
    began, began_on_cpu = time.monotonic(), time.process_time()
    outcome = runner.carry_out(stage, progress)
    return Done(outcome, time.monotonic() - began, time.process_time() - began_on_cpu)
