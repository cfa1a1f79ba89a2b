"""The progress of a plan, and an estimate of the time left, on standard error."""

import time
from collections.abc import Iterable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_EVERY = 20.0  # seconds between two printed lines where there is no terminal


class Display:
    """A bar on a terminal, or lines elsewhere, for a plan whose stages have costs in any unit.

    The time left is the cost left, divided by the cost done per second so far. So the estimate adapts to the machine.
    """

    def __init__(self, costs: Mapping[str, float]):
        self._costs, self._total = costs, sum(costs.values())
        self._fractions = dict.fromkeys(costs, 0.0)
        self._skipped: set[str] = set()
        self._start = self._last_line = time.monotonic()
        self._console = Console(stderr=True)
        columns = BarColumn(), TextColumn("{task.description}")
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=self._total)

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def skip(self, name: str) -> None:
        """Count a stage as done by an earlier command."""
        self._fractions[name] = 1.0
        self._skipped.add(name)

    def update(self, name: str, fraction: float) -> None:
        """Set the fraction of a stage that is done; a report that arrives late changes nothing."""
        self._fractions[name] = max(fraction, self._fractions[name])

    def finish(self, name: str) -> None:
        """Count a stage as done."""
        self._fractions[name] = 1.0
        if not self._console.is_terminal:
            self._print([name])

    def refresh(self, running: Iterable[str]) -> None:
        """Show the progress of the running stages."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done(), description=self._line(running), refresh=True)
        elif time.monotonic() - self._last_line > LINE_EVERY:
            self._last_line = time.monotonic()
            self._print(running)

    def _print(self, names: Iterable[str]) -> None:
        self._console.print(self._line(names), soft_wrap=True, highlight=False)

    def _done(self) -> float:
        return sum(self._costs[name] * fraction for name, fraction in self._fractions.items())

    def _line(self, names: Iterable[str]) -> str:
        done = self._done()
        elapsed = time.monotonic() - self._start
        done_now = sum(cost * self._fractions[name] for name, cost in self._costs.items() if name not in self._skipped)
        if done_now and elapsed > 5:
            rate = done_now / elapsed
            left = f"{_minutes((self._total - done) / rate)} left"
        else:
            left = "estimating the time left"
        stages = ", ".join(f"{name} {self._fractions[name]:.0%}" for name in names)
        return f"{done / self._total:4.0%} in {_minutes(elapsed)}, {left}: {stages}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
