"""What a run of the plan has written down, to be compared with that of another run."""

import gzip
import json
from pathlib import Path

from metatokens.records import lines_file


def records(out: Path) -> dict[str, str]:
    """The line of each finished stage, in the order in which they were finished."""
    log = out / "stages.jsonl"
    return {json.loads(line)["name"]: line for line in log.read_text().splitlines()} if log.exists() else {}


def lines(out: Path) -> dict[str, list[str]]:
    """What stages found, in a fixed order."""
    found = {}
    for name in ("results", "analysis", "curves"):
        file = lines_file(out, name)
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        found[f"{name}.jsonl"] = sorted(content.decode().splitlines())
    return found


def unpack(out: Path) -> None:
    """Have a run's files as they are before it is finished."""
    for file in out.glob("*.jsonl.gz"):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()


def assert_same_run(out: Path, undisturbed: Path) -> None:
    assert lines(out) == lines(undisturbed)
    assert (out / "examples.jsonl").read_bytes() == (undisturbed / "examples.jsonl").read_bytes()
