"""A disk that is full or read-only, and a clock that goes backwards: one sentence, and nothing is lost.

The system itself cuts short what is written to a full disk: by a limit on the size of files (`no_room`), which any
user can set, and on a small file system in memory, where the process may mount one. Then the same command is run
again, and ends like one that nothing disturbed.

The quick run has one fault of each kind for some commands; a thorough one has all of them.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from metatokens.errors import UserError
from metatokens.files import append_lines, exclusive
from metatokens.records import Result
from tests.reliability.commands import Commands, assert_one_sentence, left, quickly, verbs_of

MEASURED = {"meta": 0.9, "gpt2": 0.5}  # the results of the report


# --- the commands


@pytest.fixture(scope="session")
def verbs(
    small_corpus: Path,
    small_store: Any,
    small_model: Callable[..., Path],
    is_thorough: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    """The commands, without `--out`."""
    results = tmp_path_factory.mktemp("measured") / "results.jsonl"
    shared: dict[str, Any] = {
        "task": "parity",
        "length": 64,
        "metric": "exact_match",
        "seed": 0,
        "n": 100,
    }
    measured = [
        Result(model=name, value=value, created="2026-01-01", **shared)
        for name, value in MEASURED.items()
    ]
    append_lines(results, [result.line() for result in measured])
    reproduce = ["reproduce", "--preset", "tiny", "--workers", "1"]
    if not is_thorough:
        reproduce += ["--only", "perplexity"]
    verbs = verbs_of(small_corpus, small_store.path, small_model(), steps=8, tuned=4, prompts=4)
    return verbs | {"reproduce": reproduce, "report": ["report", str(results)]}


@dataclass(frozen=True)
class Run:
    """Runs commands with faults, and compares their output with that of undisturbed ones."""

    verbs: dict[str, list[str]]
    commands: Commands
    plan: dict[str, Any]  # of `reproduce`; nothing to other verbs
    folders: pytest.TempPathFactory
    done: dict[str, Path] = field(default_factory=dict)

    def fails(self, verb: str, out: Path, **faults: Any) -> str:
        """Run a command that must fail; return its one sentence."""
        return self.commands.fail(self.verbs[verb], out, **self.plan | faults)

    def succeeds(self, verb: str, out: Path, **faults: Any) -> str:
        """Run a command that must end with the undisturbed output; return what it printed."""
        said = self.commands.succeed(self.verbs[verb], out, **self.plan | faults)
        self.is_whole(verb, out)
        return said

    def is_whole(self, verb: str, out: Path) -> None:
        copied = self.folders.mktemp(verb) / "copied"
        self.commands.copy(out, copied)
        assert without_times(copied) == without_times(self.undisturbed(verb))

    def undisturbed(self, verb: str) -> Path:
        """The output of an undisturbed command."""
        if verb not in self.done:
            self.done[verb] = self.folders.mktemp(verb) / "out"
            self.commands.succeed(self.verbs[verb], self.done[verb], **self.plan)
        return self.done[verb]


@pytest.fixture(scope="session")
def run(
    verbs: dict[str, list[str]],
    commands: Commands,
    small_corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    return Run(verbs, commands, {"tiny_plan": [str(small_corpus), "threads"]}, tmp_path_factory)


def without_times(out: Path) -> dict[str, Any]:
    """What `left` returns, without the times and the order of a plan's stages."""
    files = left(out)
    for name, content in files.items():
        if name in ("results.jsonl", "analysis.jsonl", "curves.jsonl"):
            files[name] = sorted(content.splitlines())
        elif name == "stages.jsonl":
            files[name] = sorted(json.loads(line)["name"] for line in content.splitlines())
        elif name == "run.json":
            files[name] = sorted(stage["name"] for stage in json.loads(content)["stages"])
        elif name.startswith("report/"):  # it shows times
            files[name] = None
    return files


# --- a full disk

# In the order in which a command writes them, so that each try gets further than the one before.
FULL = {
    "tokenize": [
        ("tokenizer", 100), ("tokenizer", 10_000), ("plan.json", 100), ("train/00000.bin", 1_000),
        ("00000.json", 100), ("manifest.json", 100),
    ],
    "pretrain": [
        ("settings.json", 100),
        ("checkpoint-2", 100),  # config.json
        ("checkpoint-2", 20_000),  # the weights
        ("checkpoint-2", 100_000),  # the state of the optimizer
        ("checkpoint-4", 100_000), ("checkpoint-6/trainer_state.json", 100), ("checkpoint-6/manifest.json", 100),
        ("curve.jsonl", 100),
        ("curve.jsonl", 20_000),  # the weights of the final model
        ("pretrain/manifest.json", 100),
    ],
    "finetune": [
        ("64/checkpoints/checkpoint-2", 20_000), ("64/checkpoints/checkpoint-4", 100_000),
        ("64/curve.jsonl", 100), ("128/checkpoints/checkpoint-2", 100_000), ("128/curve.jsonl", 20_000),
    ],
    "evaluate": [("evaluate", room) for room in (0, 100, 900)],
    "report": [("index.html", 100), ("tables.html", 100), ("report.md", 100), (".png", 100)],
    "reproduce": [
        ("tokens", 10_000), ("curves.jsonl", 100), ("checkpoint-2", 20_000), ("results.jsonl", 900),
        ("examples.jsonl", 100), ("stages.jsonl", 100), ("run.json", 3_000),
        ("report/index.html", 20_000),
    ],
}  # fmt: skip
# The one that the quick run takes.
MIDDLE = {"tokenize": 3, "pretrain": 3, "finetune": 2, "evaluate": 1, "report": 1, "reproduce": 6}


@pytest.mark.quick(verb=["tokenize", "pretrain", "report"])
@pytest.mark.parametrize("verb", FULL)
def test_no_room_for_the_rest_of_a_file(
    verb: str, run: Run, is_thorough: bool, tmp_path: Path
) -> None:
    for at, room in FULL[verb] if is_thorough else [FULL[verb][MIDDLE[verb]]]:
        print(at, room, run.fails(verb, tmp_path / verb, no_room=[at, room]))
    run.succeeds(verb, tmp_path / verb)


# KiB of the file system at first, and by how much it grows after each try; 20 times as much in the quick run.
DISKS = {
    "tokenize": (8, 4),
    "pretrain": (16, 12),
    "finetune": (16, 40),
    "report": (8, 8),
    "reproduce": (16, 300),
}


@pytest.mark.parametrize("verb", quickly(["tokenize"], DISKS))
def test_a_file_system_that_fills(verb: str, run: Run, is_thorough: bool, tmp_path: Path) -> None:
    size, step = DISKS[verb]
    disk = tmp_path / "disk"
    run.commands.mount(disk, f"size={size}k")
    failures = 0
    status, said = run.commands.attempt(run.verbs[verb], disk / "out", **run.plan)
    while status != 0:
        assert_one_sentence(status, said)
        failures += 1
        size += step if is_thorough else 20 * step
        run.commands.mount(disk, f"remount,size={size}k")
        status, said = run.commands.attempt(run.verbs[verb], disk / "out", **run.plan)
    assert failures >= (6 if is_thorough else 1)
    print(f"{verb}: {failures} times full, up to {size} KiB")
    run.is_whole(verb, disk / "out")


@pytest.mark.parametrize(
    ("end", "after", "message"),
    [
        ('{"metric": "exact_match", "val', "", "ended in half a line, which is dropped"),
        # Whole, except for its end.
        (
            '{"metric": "exact_match"}',
            '{"metric": "exact_match"}\n',
            "",
        ),
        ("my own notes", "my own notes\n", ""),
    ],
)
def test_a_last_line_that_was_cut_off(
    end: str, after: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, first = tmp_path / "results.jsonl", '{"first": "ä\u2028"}\n'
    file.write_text(first + end, encoding="utf-8")
    append_lines(file, ['{"next": 1}', '{"next": 2}'])
    assert file.read_text(encoding="utf-8") == first + after + '{"next": 1}\n{"next": 2}\n'
    assert message in capsys.readouterr().err


def test_a_compressed_file_of_any_name_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(gzip.compress(b'{"first": 1}\n'))
    before = file.read_bytes()

    with pytest.raises(UserError, match="is compressed: no line can be appended"):
        append_lines(file, ['{"next": 1}'])

    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"{my own} notes", b"{\n}\n", b"\x90\0\0{}\n", b"[1]\n"])
def test_a_file_of_another_kind_is_kept(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(content)

    with pytest.raises(UserError, match="is another kind of file, and is kept"):
        append_lines(file, ['{"next": 1}'])

    assert file.read_bytes() == content


def test_lines_of_which_one_cannot_be_made_are_not_begun(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"first": 1}\n')

    def lines() -> Iterator[str]:
        yield '{"next": 1}'
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        append_lines(file, lines())

    assert file.read_text() == '{"first": 1}\n'


# --- read-only


@pytest.mark.parametrize("way", ["permissions", "file system"])
@pytest.mark.parametrize("verb", quickly(["evaluate", "pretrain"], FULL))
def test_what_cannot_be_written_is_left_as_it_is(
    verb: str, way: str, run: Run, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    out = disk / verb
    if way == "permissions":
        disk.mkdir()
        fault: dict[str, Any] = {"unprivileged": []}
        reason = "Permission denied"
    else:
        run.commands.mount(disk, "size=64m")
        fault = {}
        reason = "Read-only file system"

    def allow(is_allowed: bool) -> None:
        if way == "file system":
            run.commands.mount(disk, f"remount,{'rw' if is_allowed else 'ro'}")
            return
        for path in (disk, *disk.rglob("*")):
            mode = path.stat().st_mode
            if path.name != ".lock":  # without it a command would stop here
                path.chmod(mode | 0o200 if is_allowed else mode & ~0o222)

    def contents(name: str) -> dict[str, Any]:
        run.commands.copy(disk, tmp_path / name)
        return left(tmp_path / name)

    allow(False)
    assert reason in run.fails(verb, out, **fault)
    allow(True)
    assert contents("never written") == {}
    run.fails(verb, out, no_room=list(FULL[verb][-1]), **fault)
    allow(False)
    before = contents("before")
    assert reason in run.fails(verb, out, **fault)
    assert contents("after") == before
    allow(True)
    run.succeeds(verb, out, **fault)


# --- a clock that goes backwards


CLOCK: dict[str, list[Any]] = {"clock_goes_back": []}


def test_checkpoints_are_kept_by_number_if_the_clock_goes_back(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "pretrain"
    run.fails("pretrain", out, no_room=["checkpoint-8", 100], **CLOCK)  # the fourth
    complete = {path.parent.name for path in out.glob("checkpoints/*/manifest.json")}
    assert complete == {"checkpoint-4", "checkpoint-6"}
    with exclusive(out):
        assert "another process works in" in run.fails("pretrain", out, **CLOCK)
    run.succeeds("pretrain", out, **CLOCK)
    checkpoints = {path.name for path in out.glob("checkpoints/*")}
    assert checkpoints == {"checkpoint-6", "checkpoint-8"}
