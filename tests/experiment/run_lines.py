"""What a run of the plan has written down, to be compared with that of another run."""

import json
from pathlib import Path


def records(out: Path) -> dict[str, str]:
    """The line of each finished stage, in the order in which they were finished."""
    ledger = out / "stages.jsonl"
    return {json.loads(line)["name"]: line for line in ledger.read_text().splitlines()} if ledger.exists() else {}


def lines(out: Path) -> dict[str, list[str]]:
    """What stages found, in a fixed order, but for when."""
    found = {}
    for name in ("results.jsonl", "analysis.jsonl", "curves.jsonl"):
        parsed = [json.loads(line) for line in (out / name).read_text().splitlines()]
        found[name] = sorted(json.dumps(line | {"created": None}) for line in parsed)
    return found


def assert_same_run(out: Path, undisturbed: Path) -> None:
    assert lines(out) == lines(undisturbed)
    assert (out / "examples.jsonl").read_bytes() == (undisturbed / "examples.jsonl").read_bytes()
