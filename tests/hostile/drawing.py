"""Random input: texts, JSON, and bytes that were good once."""

import json
from collections.abc import Collection
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

ODD = [
    "", "\0", "\x1b[2J", "\ufeff", "\u2028", "\x85", "\r\n", "\n\n", "\t", "\U0001d518", "\ud800", "%s", "{{ 7 }}",
    "../../etc/passwd", "<script>alert(1)</script>", "' \"", "_PAUSE_", " _PAUSE_", "<|endoftext|>", "$\\frac", "|",
]  # fmt: skip
TEXT = st.text(max_size=8) | st.sampled_from(ODD)
NUMBER = (
    st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, -(2**63) - 1, 10**12, 10**30, 10**400])
    | st.floats()
    | st.sampled_from([1e308, -1e308, 5e-324, 0.5])
)
SCALAR = st.none() | st.booleans() | NUMBER | TEXT
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)


def cases(count: int) -> settings:
    """So many drawn cases, and 80 times as many in a thorough run."""
    return settings(
        max_examples=count * settings.default.max_examples // settings.get_profile("quick").max_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Good bytes with a few of them changed, left out, doubled or cut off."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 12))
        match draw(st.sampled_from(["put", "drop", "copy", "cut"])):
            case "put":
                data[start : start + length] = draw(st.binary(max_size=length))
            case "drop":
                del data[start : start + length]
            case "copy":
                data[start:start] = data[start : start + 8 * length]
            case "cut":
                del data[start:]
    return bytes(data)


@st.composite
def one_damaged(draw: st.DrawFn, good: dict[str, bytes]) -> dict[str, bytes]:
    """Good files, one of them damaged: somewhere, or at a place of 200 bytes."""
    name = draw(st.sampled_from(sorted(good)))
    content = good[name]
    size = draw(st.sampled_from([200, len(content)]))
    start = draw(st.integers(0, max(0, len(content) - size)))
    damage = draw(damaged(content[start : start + size]))
    return good | {name: content[:start] + damage + content[start + size :]}


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """A good record with some of its values replaced, left out, or further ones put in."""
    record = dict(good)
    for _ in range(draw(st.integers(1, 3))):
        field = draw(st.sampled_from([*fields]) | TEXT)
        if draw(st.booleans()) and field in record:
            del record[field]
        else:
            record[field] = draw(SCALAR | JSON)
    return record


@st.composite
def json_file(draw: st.DrawFn, good: list[dict[str, Any]], fields: Collection[str]) -> bytes:
    """A file of JSON lines: good and changed records, other JSON, other bytes; sometimes damaged as a whole."""
    line = st.sampled_from(good).map(_dumped) | st.sampled_from(good).flatmap(
        lambda record: changed(record, fields).map(_dumped)
    )
    anything = JSON.map(_dumped) | st.binary(max_size=20) | st.sampled_from([b"[" * 3_000, b"NaN", b"", b"{}"])
    lines = draw(st.lists(line | line | anything, min_size=1, max_size=4))
    content = draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"])).join(lines)
    return draw(damaged(content)) if draw(st.integers(0, 3)) == 0 else content


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()
