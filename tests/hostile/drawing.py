"""Random input: bytes that were good once."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def cases(count: int) -> settings:
    """So many drawn cases, and 80 times as many in a thorough run."""
    times = settings.default.max_examples // settings.get_profile("quick").max_examples
    return settings(
        max_examples=count * times,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged(draw, good):
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
def one_damaged(draw, good):
    """Good files, one of them damaged within 200 of its bytes, or anywhere."""
    name = draw(st.sampled_from(sorted(good)))
    content = good[name]
    size = draw(st.sampled_from([200, len(content)]))
    start = draw(st.integers(0, max(0, len(content) - size)))
    end = start + size
    damage = draw(damaged(content[start:end]))
    return good | {name: content[:start] + damage + content[end:]}
