"""Time a unit of work of several models side by side in one run.

The contestants take turns, in a new order each round, so that disturbances of the machine affect all of them. A ratio
pairs the times of two contestants in the same round. Its limit is the ratio of the operations (in decoding, of the
bytes read) that the two functions need. A further contestant computes the matrix products of the heat's first model
and nothing else, a bound that no implementation can beat.
"""

import ctypes
import gc
import math
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed.contestants import HEATS, Entry, Setting, Unit, make_unit, products_unit
from metatokens.errors import UserError
from metatokens.machine import keep_freed_memory, worker_context
from metatokens.paper.records import Benchmark, Timing
from metatokens.training.trainer import Progress, unwatched

PRODUCTS = "products"  # the contestant that computes only matrix products
_SHORTEST = 0.1  # seconds per turn; quicker work is repeated


def run(
    benchmark: Benchmark,
    setting: Setting,
    *,
    models: Sequence[str] | None = None,
    memory: bool = True,
    progress: Progress = unwatched,
) -> list[Timing]:
    """Carry out a benchmark.

    Args:
        benchmark: its name.
        setting: the settings that its contestants share.
        models: names of contestants; the baselines of their heats are added. None means all.
        memory: whether to measure memory too, on a CPU in a new process per contestant.
        progress: called with the rounds done and the total.

    Returns:
        A timing for each contestant and each one that it is compared with, heat by heat, baselines first.

    Raises:
        UserError: if a contestant is unknown.
    """
    heats = _heats(benchmark, models)
    torch.set_num_threads(setting.threads)
    rounds_done = 0

    def tick() -> None:
        nonlocal rounds_done
        rounds_done += 1
        progress(rounds_done, len(heats) * (setting.warmup + setting.rounds), {})

    timings: list[Timing] = []
    for entries in heats:
        settings = {
            entry.name: replace(setting, compiled=setting.compiled or entry.compiled)
            for entry in entries
        }
        peaks = {
            entry.name: peak_memory(benchmark, entry, settings[entry.name]) if memory else None
            for entry in entries
        }
        units = {entry.name: make_unit(benchmark, entry, settings[entry.name]) for entry in entries}
        units[PRODUCTS] = products_unit(units[entries[0].name], setting)
        heat = race(units, setting, tick)
        for entry in entries:
            against = [other for other in entry.against or (entries[0].name,) if other in units]
            name, peak = entry.name, peaks[entry.name]
            timings += [
                _timing(benchmark, settings[name], heat, name, other, peak) for other in against
            ]
    return timings


def run_lengths(setting: Setting, lengths: Sequence[int], **options: Any) -> list[Timing]:
    """The benchmark `length`, a training step at each length; options as in `run`."""
    return [
        timing
        for length in lengths
        for timing in run("length", replace(setting, length=length), **options)
    ]


def _heats(benchmark: Benchmark, models: Sequence[str] | None) -> list[list[Entry]]:
    """The heats of the chosen contestants."""
    known = [entry.name for heat in HEATS[benchmark] for entry in heat]
    for name in models or ():
        if name not in known:
            raise UserError(
                f"{name!r} takes no part in the benchmark {benchmark}; these do: {'; '.join(known)}."
            )
    heats = []
    for first, *others in HEATS[benchmark]:
        chosen = [entry for entry in others if models is None or entry.name in models]
        if chosen or models is None or first.name in models:
            heats.append([first, *chosen])
    return heats


@dataclass(frozen=True)
class Heat:
    """The times of a race.

    Attributes:
        units: the contestants, the baseline first.
        first: seconds of the first unit of work, by contestant.
        seconds: seconds per unit of work in each round, by contestant.
        repeats: units of work per round, by contestant.
    """

    units: Mapping[str, Unit]
    first: Mapping[str, float]
    seconds: Mapping[str, np.ndarray]
    repeats: Mapping[str, int]


def race(units: Mapping[str, Unit], setting: Setting, tick: Callable[[], None]) -> Heat:
    """Time contestants in turns, in a new order each round.

    Args:
        units: the contestants.
        setting: its rounds, warm-up and device.
        tick: called after each round.
    """
    order, shuffle = list(units), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in units}
    repeats = dict.fromkeys(units, 1)
    collects, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    gc.freeze()  # existing objects need not be searched for garbage
    try:
        for number in range(1, setting.warmup + setting.rounds + 1):
            shuffle(order)
            gc.collect()
            for name in order:
                turn = [_clock(units[name], setting.device) for _ in range(repeats[name])]
                seconds[name].append(sum(turn) / len(turn))
            if number == setting.warmup:
                repeats = {
                    name: max(1, math.ceil(_SHORTEST / rounds[-1]))
                    for name, rounds in seconds.items()
                }
            tick()
    finally:
        if not frozen:
            gc.unfreeze()
        if collects:
            gc.enable()
    first = {name: rounds[0] for name, rounds in seconds.items()}
    return Heat(
        units,
        first,
        {name: np.array(rounds[setting.warmup :]) for name, rounds in seconds.items()},
        repeats,
    )


def _clock(unit: Unit, device: str) -> float:
    """Seconds of one unit of work, until the device has finished."""
    unit.prepare()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    unit.work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _timing(
    benchmark: Benchmark, setting: Setting, heat: Heat, name: str, against: str, memory: int | None
) -> Timing:
    unit, other, baseline = (
        heat.units[name],
        heat.units[against],
        heat.units[next(iter(heat.units))],
    )
    own_seconds = heat.seconds[name]
    low, median, high = np.quantile(own_seconds, (0.25, 0.5, 0.75))
    ratio_low, ratio, ratio_high = np.quantile(
        own_seconds / heat.seconds[against], (0.25, 0.5, 0.75)
    )
    limit, a_token = unit.needed / other.needed, other.text_tokens / unit.text_tokens
    return Timing(
        benchmark=benchmark,
        model=name,
        against=against,
        shape=setting.shape,
        parameters=unit.parameters,
        length=setting.length,
        batch=setting.batch,
        text_tokens=unit.text_tokens,
        n=setting.rounds,
        repeats=heat.repeats[name],
        first=heat.first[name],
        rounds=own_seconds.tolist(),
        seconds=median,
        low=low,
        high=high,
        ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        limit=limit,
        ratio_per_text_token=ratio * a_token,
        limit_per_text_token=limit * a_token,
        over_products=float(np.median(own_seconds / heat.seconds[PRODUCTS]))
        * baseline.needed
        / unit.needed,
        flops=unit.needed if unit.reads is None else None,
        counted_flops=unit.counted_flops,
        reads=unit.reads,
        memory=memory,
        dtype=setting.dtype,
        threads=setting.threads,
        device=device_name(setting.device),
        compiled=setting.compiled,
    )


def device_name(device: str) -> str:
    """The name of the GPU or, where the system gives it, of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def peak_memory(benchmark: Benchmark, entry: Entry, setting: Setting) -> int | None:
    """The peak of bytes in use during a contestant's first unit of work, less the bytes in use before it.

    So it counts gradients, the optimizer's state and activations, but not the weights. On a GPU the figure comes from
    PyTorch's allocator; on a CPU it is the resident memory of a new process, or None on systems other than Linux.
    """
    if setting.device == "cpu":
        if not Path("/proc/self/clear_refs").exists():
            return None
        with ProcessPoolExecutor(1, worker_context(__name__)) as process:
            return process.submit(_peak_resident, benchmark, entry, setting).result()
    unit = make_unit(benchmark, entry, setting)
    unit.prepare()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    unit.work()
    return torch.cuda.max_memory_allocated() - before


def _peak_resident(benchmark: Benchmark, entry: Entry, setting: Setting) -> int:
    """`peak_memory` of this process."""
    keep_freed_memory()  # as in the process that measures time
    torch.set_num_threads(setting.threads)
    small = make_unit(benchmark, entry, replace(setting, shape="tiny", length=16, batch=1))
    small.prepare()
    small.work()  # libraries load and allocate on first use
    unit = make_unit(benchmark, entry, setting)
    unit.prepare()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc, whose reserve would hide what the work allocates
        trim(0)
    # This resets VmHWM. (ru_maxrss cannot be reset, and a new process inherits its parent's.)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status_bytes("VmRSS")
    unit.work()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    """A figure of this process's memory from /proc."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
