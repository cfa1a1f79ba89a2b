"""How names and figures read in the report."""

import math
from collections.abc import Callable

from metatokens.evaluation.intervals import Difference, Estimate

NOT_RUN = "-"
NOT_YET = "\u2026"  # of what a run under way has still to measure
EN_DASH, MINUS, DIVIDED = "\u2013", "\u2212", "\u00f7"


def name(value: str | None) -> str:
    """A task or condition as a reader sees it: `list_recall` is "List recall"."""
    return (value or "no name").replace("_", " ").capitalize()


def tokens(length: int | None) -> str:
    """A length as a reader sees it: `1,024`."""
    return "all" if length is None else f"{length:,}"


def percent(value: float | None) -> str:
    """A proportion in percent: `97.4`; `-` where there is none."""
    return NOT_RUN if value is None else f"{100 * value:.1f}"


def with_interval(estimate: Estimate, form: Callable[[float | None], str] = percent, to: str = EN_DASH) -> str:
    """A figure, by default a proportion in percent, and its interval where it is known: `97.4 (95.6–98.5)`."""
    is_known = estimate.low is not None and estimate.high is not None
    return form(estimate.value) + (f" ({form(estimate.low)}{to}{form(estimate.high)})" if is_known else "")


def signed(value: float) -> str:
    """A signed proportion in percent or percentage points: `+3.1`."""
    return f"{100 * value:+.1f}".replace("-", MINUS)


def points(gap: Difference | None) -> str:
    """A difference and its interval in percentage points: `+3.1 (+0.4 to +5.8)`; `-` where there is none."""
    return NOT_RUN if gap is None else f"{signed(gap.value)} ({signed(gap.low)} to {signed(gap.high)})"


def duration(seconds: float) -> str:
    """A time as a reader sees it: `13 min 30 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def count(value: float) -> str:
    """A whole number as a reader sees it: `51,234`."""
    return f"{value:,.0f}"


def compact(value: float) -> str:
    """A large number in three figures: `1.23 M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}\u00a0{letter}"
    return f"{value:.3g}"


def nats(value: float | None, digits: int = 3) -> str:
    """An amount: `0.305`, `−0.305`; `-` where there is none."""
    return NOT_RUN if value is None else f"{value:z.{digits}f}".replace("-", MINUS)


def signed_nats(value: float) -> str:
    """A signed amount: `+0.31`."""
    return f"{value:+.2f}".replace("-", MINUS)


def learned_at(text_tokens: float | None) -> str:
    """The text tokens until something was learned: `991 k`."""
    return "not reached" if text_tokens is None or math.isinf(text_tokens) else compact(text_tokens)
