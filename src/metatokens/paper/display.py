"""The progress of a plan, and an estimate of the time left, on standard error."""

import time
from collections.abc import Iterable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_EVERY = 20.0  # seconds between two printed lines where there is no terminal
FEW_SECONDS = 5.0  # after which the work done tells how long the rest takes


class Display:
    """A bar on a terminal, or lines elsewhere, for a plan whose stages have costs in any unit.

    The time left is the cost left, divided by the cost done per second so far. So the estimate adapts to the machine.
    """

    def __init__(self, costs: Mapping[str, float]):
        self._costs = costs
        self._total = sum(costs.values())
        self._fractions = dict.fromkeys(costs, 0.0)
        self._skipped: set[str] = set()
        self._began = self._last_line = time.monotonic()
        self._console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
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
            done = self._done(self._costs)
            self._bar.update(
                self._task, completed=done, description=self._line(running), refresh=True
            )
        elif time.monotonic() - self._last_line > LINE_EVERY:
            self._last_line = time.monotonic()
            self._print(running)

    def _print(self, names: Iterable[str]) -> None:
        self._console.print(self._line(names), soft_wrap=True, highlight=False)

    def _done(self, names: Iterable[str]) -> float:
        """The cost of what is done of some stages."""
        return sum(self._costs[name] * self._fractions[name] for name in names)

    def _line(self, names: Iterable[str]) -> str:
        elapsed = time.monotonic() - self._began
        done = self._done(self._costs)
        done_now = self._done(self._costs.keys() - self._skipped)
        left = "estimating the time left"
        if done_now and elapsed > FEW_SECONDS:
            seconds_left = (self._total - done) / (done_now / elapsed)
            left = f"{_minutes(seconds_left)} left"
        stages = ", ".join(f"{name} {self._fractions[name]:.0%}" for name in names)
        return f"{done / self._total:4.0%} in {_minutes(elapsed)}, {left}: {stages}"


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
