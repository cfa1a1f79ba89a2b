"""The lines that a run has written, for comparison with those of another run."""

import json
from pathlib import Path


def records(out: Path) -> dict[str, str]:
    """The line of each finished stage, in the order in which the stages finished."""
    log = out / "stages.jsonl"
    if not log.exists():
        return {}
    return {json.loads(line)["name"]: line for line in log.read_text().splitlines()}


def lines(out: Path) -> dict[str, list[str]]:
    """The records of all stages, in a fixed order."""
    by_file = {}
    for name in ("results", "analysis", "curves"):
        by_file[f"{name}.jsonl"] = sorted((out / f"{name}.jsonl").read_text().splitlines())
    return by_file


def assert_same_run(out: Path, undisturbed: Path) -> None:
    assert lines(out) == lines(undisturbed)
    assert (out / "examples.jsonl").read_bytes() == (undisturbed / "examples.jsonl").read_bytes()
