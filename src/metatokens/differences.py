"""Where two nested settings differ."""

from collections.abc import Iterator
from typing import Any


def differences(before: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ, as (name with dots, value before, value now)."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{prefix}.{key}".lstrip("."))
    elif before != now:
        yield prefix, before, now
