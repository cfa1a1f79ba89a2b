"""How far a plan is, and how long it will still take, on standard error."""

import time
from collections.abc import Iterable, Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

LINE_EVERY = 20.0  # seconds between the lines that are printed where there is no terminal to redraw


class Display:
    """Progress of a plan whose stages have costs in any unit.

    The time left is the cost left over the cost done a second since the start, so it needs no knowledge of the machine.
    """

    def __init__(self, costs: Mapping[str, float]):
        self._costs = costs
        self._fractions = dict.fromkeys(costs, 0.0)
        self._skipped: set[str] = set()
        self._start = self._last_line = time.monotonic()
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._live.stop()

    def skip(self, name: str) -> None:
        """A stage was done before."""
        self._fractions[name] = 1.0
        self._skipped.add(name)

    def update(self, name: str, fraction: float) -> None:
        """A stage is so far; what arrives after a later report, or after the end, changes nothing."""
        self._fractions[name] = max(fraction, self._fractions[name])

    def finish(self, name: str) -> None:
        """A stage is done."""
        self._fractions[name] = 1.0
        if not self._console.is_terminal:
            self._console.print(self._line([name]), soft_wrap=True, highlight=False)

    def refresh(self, running: Iterable[str]) -> None:
        """Show the state of things."""
        running = list(running)
        if self._console.is_terminal:
            table = Table.grid(padding=(0, 1))
            total = sum(self._costs.values())
            table.add_row(ProgressBar(total=total, completed=self._done(), width=40), self._line(running))
            self._live.update(table, refresh=True)
        elif time.monotonic() - self._last_line > LINE_EVERY:
            self._last_line = time.monotonic()
            self._console.print(self._line(running), soft_wrap=True, highlight=False)

    def _done(self) -> float:
        return sum(self._costs[name] * fraction for name, fraction in self._fractions.items())

    def _line(self, names: list[str]) -> str:
        total, done, elapsed = sum(self._costs.values()), self._done(), time.monotonic() - self._start
        own = sum(cost * self._fractions[name] for name, cost in self._costs.items() if name not in self._skipped)
        rate = own / elapsed if elapsed > 5 else 0.0
        left = f"{_minutes((total - done) / rate)} left" if rate else "estimating the time left"
        stages = ", ".join(f"{name} {self._fractions[name]:.0%}" for name in names)
        return f"{done / total:4.0%} in {_minutes(elapsed)}, {left}: {stages}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
