"""The workers that carry out a plan's stages: processes of this machine."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import cycle, islice
from typing import Any, Self

import torch

from metatokens.errors import UserError
from metatokens.machine import available_cores, end_with_parent, keep_freed_memory, worker_context
from metatokens.paper.plan import Stage
from metatokens.paper.runner import Outcome, Runner


def gpus() -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return names.split(",")[:count]


class ProcessPool:
    """Processes with one GPU and one thread each: for small models, two processes are faster than two threads.

    It is for use in a `with` statement; an exception ends the work of all processes.

    Args:
        runner: carries the stages out.
        size: stages at a time; by default the number of GPUs that this process may use, or of cores if there is none.
    """

    def __init__(self, runner: Runner, size: int | None = None):
        self.runner, self.size = runner, size or len(gpus()) or available_cores()
        context = worker_context(__name__)
        self._others = set(multiprocessing.active_children())
        self._reports = context.Queue()
        self._gpus = context.Queue()
        for gpu in islice(cycle(gpus() or [None]), self.size):
            self._gpus.put(gpu)
        workers_get = (self._reports, self._gpus)
        self._pool = ProcessPoolExecutor(self.size, context, _start_worker, workers_get)
        self._running: dict[Future[Outcome], str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        if kind is not None:  # do not wait for stages that take minutes
            for process in {*multiprocessing.active_children()} - self._others:
                process.terminate()
        self._pool.shutdown()

    def submit(self, stage: Stage) -> None:
        """Start a stage."""
        self._running[self._pool.submit(_work, self.runner, stage)] = stage.name

    def finished(self) -> Iterator[tuple[str, Outcome]]:
        """Wait for up to a second, then give the names and outcomes of stages that are done.

        Raises:
            UserError: if a worker was killed, or a stage raised it.
        """
        done, _ = wait(self._running, timeout=1.0, return_when=FIRST_COMPLETED)
        # The outcomes first: an error ends the run.
        for future in sorted(done, key=lambda future: future.exception() is not None):
            try:
                outcome = future.result()
            except BrokenProcessPool as error:
                raise UserError(
                    f"a worker was killed while it did {', '.join(sorted(self._running.values()))} (usually for lack "
                    "of memory); the same command resumes, and --workers 1 needs less memory."
                ) from error
            yield self._running.pop(future), outcome

    def progress(self) -> Iterator[tuple[str, float]]:
        """The fraction of each running stage that is done, where a worker has reported it."""
        while not self._reports.empty():
            yield self._reports.get()


_reports: Any = None  # in a worker process: the queue for reports of progress


def _start_worker(reports: Any, free_gpus: Any) -> None:
    global _reports
    _reports = reports
    gpu = free_gpus.get()
    if gpu is not None:  # workers that see several GPUs would all use the first
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    end_with_parent()
    keep_freed_memory()
    torch.set_num_threads(1)


def _work(runner: Runner, stage: Stage) -> Outcome:
    began, began_on_cpu = time.monotonic(), time.process_time()
    outcome = runner.carry_out(
        stage, lambda done, total, _: _reports.put((stage.name, done / total))
    )
    outcome.seconds = round(time.monotonic() - began, 3)
    outcome.cpu_seconds = round(time.process_time() - began_on_cpu, 3)
    return outcome
