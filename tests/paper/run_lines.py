"""The lines that a run has written, for comparison with those of another run."""

import gzip
import json
from pathlib import Path

from metatokens.paper.records import lines_file


def records(out: Path) -> dict[str, str]:
    """The line of each finished stage, in the order in which the stages finished."""
    log = out / "stages.jsonl"
    return {json.loads(line)["name"]: line for line in log.read_text().splitlines()} if log.exists() else {}


def lines(out: Path) -> dict[str, list[str]]:
    """The records of all stages, in a fixed order."""
    found = {}
    for name in ("results", "analysis", "curves"):
        file = lines_file(out, name)
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        found[f"{name}.jsonl"] = sorted(content.decode().splitlines())
    return found


def unpack(out: Path) -> None:
    """Turn a finished run's files into those of an unfinished one."""
    for file in out.glob("*.jsonl.gz"):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()


def assert_same_run(out: Path, undisturbed: Path) -> None:
    assert lines(out) == lines(undisturbed)
    assert (out / "examples.jsonl").read_bytes() == (undisturbed / "examples.jsonl").read_bytes()
