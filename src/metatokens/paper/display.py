"""The progress of a plan, and an estimate of the time left, in lines on standard error."""

import sys
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta

LINE_EVERY = 20.0  # seconds between two lines while no stage ends


class Display:
    """Lines about a plan whose stages have costs in any unit: one for each finished stage, and some in between.

    The time left is the cost left, divided by the cost done per second so far. So the estimate adapts to the machine.
    """

    def __init__(self, costs: Mapping[str, float]):
        self._costs = costs
        self._fractions = dict.fromkeys(costs, 0.0)
        self._began = self._last_line = time.monotonic()

    def update(self, name: str, fraction: float) -> None:
        """Set the fraction of a stage that is done; a report that arrives late changes nothing."""
        self._fractions[name] = max(fraction, self._fractions[name])

    def finish(self, name: str) -> None:
        """Print that a stage is done."""
        self._fractions[name] = 1.0
        self._print([name])

    def refresh(self, running: Iterable[str]) -> None:
        """Print the progress of the running stages, now and then."""
        if time.monotonic() - self._last_line > LINE_EVERY:
            self._last_line = time.monotonic()
            self._print(running)

    def _print(self, names: Iterable[str]) -> None:
        elapsed = time.monotonic() - self._began
        total = sum(self._costs.values())
        done = sum(cost * self._fractions[name] for name, cost in self._costs.items())
        left = "estimating the time left"
        if done:
            left = f"{_clock(elapsed * (total - done) / done)} left"
        stages = ", ".join(f"{name} {self._fractions[name]:.0%}" for name in names)
        line = f"{done / total:4.0%} in {_clock(elapsed)}, {left}: {stages}"
        print(line, file=sys.stderr, flush=True)


def _clock(seconds: float) -> timedelta:
    return timedelta(seconds=int(seconds))
