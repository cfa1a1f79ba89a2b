"""A disk that is full or read-only, and a clock that goes backwards: one sentence, and nothing is lost.

What is written to a full disk is cut short by the system itself: by a limit on the size of files (`no_room`), which
any user can set, and on a small file system in memory, where this process may mount one. Then the same command is
given again, and ends like one that nothing disturbed. Run as a script, this file carries commands out, each in a fork
with its fault.

By default a few faults of each kind; `make reliability` sets METATOKENS_RELIABILITY=long for all of them.
"""

import ctypes
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from test_kills import IS_LONG, SIZES, TRAINING, left, settings

from metatokens.errors import UserError
from metatokens.evaluation.results import Result, read_results, write_results
from metatokens.files import append_lines, exclusive, library_writes

DAY = 86_400  # seconds
QUICK = ("tokenize", "pretrain", "evaluate")  # the verbs that most tests are content with by default
MEASURED = {"meta": 0.9, "gpt2": 0.5}  # that a report is made of


# --- the script: commands with faults


def no_room(at: str, room: int) -> None:
    """Let files grow by so many bytes at most, once one is written, or a folder made, whose path has `at` in it."""

    def limit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir") or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        is_written = event == "os.mkdir" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_written and isinstance(path, str) and at in path:
            size = os.stat(path).st_size if os.path.isfile(path) else 0  # what is appended to is that long already
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))

    sys.addaudithook(limit)


def unprivileged() -> None:
    """Give up the superuser's right to write where permissions forbid it, in programs that are started too."""
    libc, without_privileges = ctypes.CDLL(None), 1
    libc.prctl(28, without_privileges, 0, 0, 0)  # PR_SET_SECUREBITS; refused to other users, who need it not
    assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0


def clock_goes_back() -> None:
    """Every look at the clock finds it a day before the last one; checkpoints, too, are dated from late to early."""
    from metatokens.evaluation import results
    from metatokens.training.trainer import RunCallback

    true_time, looks, save = time.time, itertools.count(), RunCallback.on_save
    time.time = lambda: true_time() - DAY * next(looks)
    time.time_ns = lambda: int(time.time() * 1e9)

    class Backwards(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.fromtimestamp(time.time(), tz)

    def save_earlier(self: RunCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for path in Path(args.output_dir).glob("checkpoint-*"):
            when = 2_000_000_000 - DAY * int(path.name.removeprefix("checkpoint-"))
            os.utime(path, (when, when))
        save(self, args, state, control, **kwargs)

    results.datetime = Backwards
    RunCallback.on_save = save_earlier


def tiny_plan(corpus: str, workers: str) -> None:
    """`reproduce --preset tiny` is a plan of seconds; its workers are `threads`, or processes as ever."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "experiment"))
    from tiny_preset import tiny

    from metatokens.experiment import pools, presets

    presets.PRESETS = {"tiny": tiny(corpus)}
    if workers == "threads":

        def in_a_thread(size: int, context: object, start: object, arguments: tuple[Any, ...]) -> ThreadPoolExecutor:
            return ThreadPoolExecutor(1, initializer=setattr, initargs=(pools, "_reports", arguments[0]))

        pools.ProcessPoolExecutor = in_a_thread


def serve() -> None:
    """Carry out what standard input asks for, one a line, and say how it ended."""
    import killing

    for line in sys.stdin:
        plan = json.loads(line)
        if "shell" in plan:
            print(json.dumps([subprocess.run(plan["shell"], shell=True).returncode, ""]), flush=True)
            continue
        read, write = os.pipe()  # which no limit cuts short
        pid = os.fork()
        if pid == 0:
            os.close(read)
            for name, values in plan["faults"].items():
                globals()[name](*values)
            child = killing.attempt(plan["arguments"], Path(f"/dev/fd/{write}"))
            os.close(write)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.close(write)
        with open(read) as said:
            text = said.read()
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text]), flush=True)


class Server:
    """The script, at work: in a name space of its own where it can, so that it may mount file systems."""

    def __init__(self) -> None:
        mounting = "mount -t tmpfs -o size=1m tmpfs /mnt"
        ways = (["unshare", "-rm"], ["unshare", "-m"])
        self._way = next((way for way in ways if succeeds([*way, "sh", "-c", mounting])), [])
        self._process = subprocess.Popen(
            [*self._way, sys.executable, __file__],
            # The tries end without a clean exit, of which a process of multiprocessing's would complain.
            env=os.environ | {"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def attempt(self, arguments: list[str], out: Path, **faults: Any) -> tuple[int, str]:
        """Carry out a command with faults; its exit status, and what it printed."""
        status, said = self._ask({"arguments": [*arguments, "--out", str(out)], "faults": faults})
        return status, said

    def fail(self, arguments: list[str], out: Path, **faults: Any) -> str:
        """Carry out a command, which has to end with one sentence; the sentence."""
        status, said = self.attempt(arguments, out, **faults)
        return assert_one_sentence(status, said)

    def succeed(self, arguments: list[str], out: Path, **faults: Any) -> str:
        """Carry out a command that nothing hinders; what it printed."""
        status, said = self.attempt(arguments, out, **faults)
        assert status == 0, said
        return said

    def mount(self, folder: Path, options: str) -> None:
        """Mount a file system in memory, for the commands alone, or change it."""
        if not self._way:
            pytest.skip("this process may not mount a file system")
        folder.mkdir(exist_ok=True)
        assert self._ask({"shell": f"mount -t tmpfs -o '{options}' tmpfs '{folder}'"})[0] == 0

    def copy(self, path: Path, to: Path) -> None:
        """Copy out of a mounted file system."""
        assert self._ask({"shell": f"cp -r '{path}' '{to}'"})[0] == 0

    def stop(self) -> None:
        """End the script."""
        self._process.communicate()

    def _ask(self, plan: dict[str, Any]) -> tuple[int, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        status, said = json.loads(self._process.stdout.readline())
        return status, said


def assert_one_sentence(status: int, said: str) -> str:
    """A command has ended as with a user's mistake; the sentence."""
    assert status == 2, said
    *notices, sentence = said.splitlines()
    assert not [line for line in notices if not re.search(r"It is dropped|half a line|^ *[0-9]+% in ", line)], said
    assert sentence.startswith("metatokens: ")
    assert sentence.endswith(".")
    return sentence


def succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


# --- the commands


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def verbs(
    small_corpus: Path, small_store: Any, small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """The commands; each is given `--out`."""
    model, results = str(small_model()), tmp_path_factory.mktemp("measured") / "results.jsonl"
    about: dict[str, Any] = {"task": "parity", "length": 64, "metric": "exact_match", "seed": 0, "n": 100}
    measured = [Result(model=name, value=value, created="2026-01-01", **about) for name, value in MEASURED.items()]
    write_results(results, measured)
    pretraining = settings(f"data.tokens={small_store.path}", "training.max_steps=8", *SIZES, *TRAINING)
    tuning = settings("task.train_lengths=[64, 128]", "training.max_steps=4", *TRAINING)
    return {
        "tokenize": ["tokenize", "--corpus", str(small_corpus), "--tokenizer", "train:400"],
        "pretrain": ["pretrain", "--recipe", "demo", *pretraining],
        "finetune": ["finetune", "--task", "parity", "--model", model, *tuning],
        "evaluate": ["evaluate", "--task", "parity", "--model", model, "--lengths", "64,128", "-n", "4"],
        "reproduce": [
            "reproduce",
            "--preset",
            "tiny",
            "--workers",
            "1",
            *(() if IS_LONG else ("--only", "perplexity")),
        ],
        "report": ["report", str(results)],
    }


@pytest.fixture
def plan(small_corpus: Path) -> dict[str, Any]:
    """What `reproduce` needs beside its arguments; nothing to other verbs."""
    return {"tiny_plan": [str(small_corpus), "threads"]}


@pytest.fixture(scope="session")
def undisturbed(
    verbs: dict[str, list[str]], server: Server, small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The output of a command that nobody disturbed."""
    done: dict[str, Path] = {}

    def give(verb: str) -> Path:
        if verb not in done:
            out = tmp_path_factory.mktemp(verb) / "out"
            server.succeed(verbs[verb], out, tiny_plan=[str(small_corpus), "threads"])
            done[verb] = out
        return done[verb]

    return give


def kept(out: Path) -> dict[str, Any]:
    """What counts of what a command left: see `left`; of a plan's run, not what stages took, nor their order."""
    found = left(out)
    for name in found:
        if name in ("results.jsonl", "analysis.jsonl", "curves.jsonl", "stages.jsonl"):
            lines = [json.loads(line) for line in found[name].splitlines()]
            own = [line["name"] if name == "stages.jsonl" else line | {"created": None} for line in lines]
            found[name] = sorted(json.dumps(line) for line in own)
        elif name == "run.json":
            found[name] = sorted(stage["name"] for stage in json.loads(found[name])["stages"])
        elif name.startswith("report/"):  # which has times
            found[name] = None
    return found


# --- a full disk

# In the order in which a command comes to them, so that each try gets further than the last one.
FULL = {
    "tokenize": [
        ("tokenizer", 100),
        ("tokenizer", 10_000),
        ("plan.json", 100),
        ("00000-00000.arrow", 1_000),
        ("00000-00000.json", 100),
        ("manifest.json", 100),
    ],
    "pretrain": [
        ("settings.json", 100),
        ("checkpoint-2", 100),  # config.json
        ("checkpoint-2", 20_000),  # the weights
        ("checkpoint-2", 100_000),  # the state of the optimizer
        ("checkpoint-4", 100_000),
        ("checkpoint-6/trainer_state.json", 100),
        ("checkpoint-6/manifest.json", 100),
        ("curve.jsonl", 100),
        ("curve.jsonl", 20_000),  # the weights of the final model
        ("pretrain/manifest.json", 100),
    ],
    "finetune": [
        ("examples", 100),
        ("64/checkpoints/checkpoint-2", 20_000),
        ("64/checkpoints/checkpoint-4", 100_000),
        ("64/curve.jsonl", 100),
        ("128/checkpoints/checkpoint-2", 100_000),
        ("128/curve.jsonl", 20_000),
    ],
    "evaluate": [("evaluate", room) for room in (0, 100, 900)],
    "report": [("index.html", 100), ("report.md", 100), (".png", 100)],
    "reproduce": [
        ("tokens", 10_000),
        ("curves.jsonl", 100),
        ("checkpoint-2", 20_000),
        ("results.jsonl", 900),
        ("examples.jsonl", 100),
        ("examples/parity", 100),
        ("stages.jsonl", 100),
        ("run.json", 3_000),
        ("report/index.html", 20_000),
    ],
}


@pytest.mark.parametrize("verb", FULL)
def test_no_room_for_the_rest_of_a_file(
    verb: str,
    verbs: dict[str, list[str]],
    server: Server,
    plan: dict[str, Any],
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    if not IS_LONG and verb == "finetune":
        pytest.skip("make reliability does this")
    out = tmp_path / verb
    part = slice(None) if IS_LONG else slice(7, 8) if verb == "reproduce" else slice(1, None, 3)
    for at, room in FULL[verb][part]:
        print(at, room, server.fail(verbs[verb], out, no_room=[at, room], **plan))
    server.succeed(verbs[verb], out, **plan)
    assert kept(out) == kept(undisturbed(verb))


# KiB of the file system at first, and by how much it grows from try to try; 20 times as much in the quick run.
SIZES_OF_DISK = {
    "tokenize": (8, 4),
    "pretrain": (16, 12),
    "finetune": (16, 40),
    "report": (8, 8),
    "reproduce": (16, 300),
}


@pytest.mark.parametrize("verb", SIZES_OF_DISK)
def test_a_file_system_that_fills(
    verb: str,
    verbs: dict[str, list[str]],
    server: Server,
    plan: dict[str, Any],
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    if not IS_LONG and verb not in QUICK:
        pytest.skip("make reliability does this")
    size, step = SIZES_OF_DISK[verb]
    disk = tmp_path / "disk"
    server.mount(disk, f"size={size}k")
    failures = 0
    while (ended := server.attempt(verbs[verb], disk / "out", **plan))[0] != 0:
        assert_one_sentence(*ended)
        failures += 1
        size += step if IS_LONG else 20 * step
        server.mount(disk, f"remount,size={size}k")
    assert failures >= (6 if IS_LONG else 1)
    print(f"{verb}: {failures} times full, up to {size} KiB")
    server.copy(disk / "out", tmp_path / "out")
    assert kept(tmp_path / "out") == kept(undisturbed(verb))


def test_results_stay_on_a_disk_that_is_full(
    verbs: dict[str, list[str]], server: Server, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    disk, before = tmp_path / "disk", left(undisturbed("evaluate"))["lines"]
    size = undisturbed("evaluate").stat().st_size
    server.mount(disk, "size=4k")
    whole = 4096 // size
    for _ in range(whole):
        server.succeed(verbs["evaluate"], disk / "results.jsonl")
    assert "No space left on device" in server.fail(verbs["evaluate"], disk / "results.jsonl")
    server.copy(disk / "results.jsonl", tmp_path / "full.jsonl")
    assert left(tmp_path / "full.jsonl")["lines"] == before * whole
    server.mount(disk, "remount,size=64k")
    server.succeed(verbs["evaluate"], disk / "results.jsonl")
    server.copy(disk / "results.jsonl", tmp_path / "more.jsonl")
    assert left(tmp_path / "more.jsonl")["lines"] == before * (whole + 1)


def test_workers_that_write_to_a_full_disk(
    verbs: dict[str, list[str]], server: Server, small_corpus: Path, tmp_path: Path
) -> None:
    if not IS_LONG:
        pytest.skip("make reliability does this")
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(small_corpus.read_bytes())
    tokenize = [*verbs["tokenize"], "--corpus", str(tmp_path / "*.txt"), "--workers"]
    server.fail([*tokenize, "2"], tmp_path / "store", no_room=["plan.json", 10_000])
    server.succeed([*tokenize, "2"], tmp_path / "store")
    server.succeed([*tokenize, "1"], tmp_path / "alone")
    assert left(tmp_path / "store") == left(tmp_path / "alone")
    # Processes that train: the limit is theirs too, and the first weights meet it.
    plan = {"tiny_plan": [str(small_corpus), "processes"]}
    server.fail(verbs["reproduce"], tmp_path / "run", no_room=["settings.json", 60_000], **plan)
    server.succeed(verbs["reproduce"], tmp_path / "run", **plan)


@pytest.mark.parametrize(
    ("end", "after", "message"),
    [
        ('{"metric": "exact_match", "val', "", "ended in half a line, which is dropped"),
        ('{"a": {"b": 1}', "", "ended in half a line, which is dropped"),
        ('{"metric": "exact_match"}', '{"metric": "exact_match"}\n', ""),  # whole, but for its end
        ("my own notes", "my own notes\n", ""),
        ("", "", ""),
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


@pytest.mark.parametrize("theirs", [SafetensorError("full"), RuntimeError("full"), Exception("full"), OSError("full")])
def test_a_librarys_failure_to_write_is_the_systems(theirs: Exception, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), library_writes(tmp_path):
        raise theirs


@pytest.mark.parametrize("ours", [KeyError("x"), TypeError("x"), UserError("x")])
def test_a_mistake_in_a_program_is_not_taken_for_a_full_disk(ours: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(ours)), library_writes(tmp_path):
        raise ours


# --- read-only


@pytest.mark.parametrize("way", ["permissions", "file system"])
@pytest.mark.parametrize("verb", FULL)
def test_what_cannot_be_written_is_left_as_it_is(
    verb: str,
    way: str,
    verbs: dict[str, list[str]],
    server: Server,
    plan: dict[str, Any],
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    if not IS_LONG and verb not in QUICK:
        pytest.skip("make reliability does this")
    disk = tmp_path / "disk"
    out = disk / verb
    if way == "permissions":
        disk.mkdir()
        plan |= {"unprivileged": []}
        reason = "Permission denied"
    else:
        server.mount(disk, "size=64m")
        reason = "Read-only file system"

    def allow(is_allowed: bool) -> None:
        if way == "file system":
            server.mount(disk, f"remount,{'rw' if is_allowed else 'ro'}")
            return
        for path in (disk, *disk.rglob("*")):
            if path.name != ".lock":  # further than this a command would not come
                path.chmod(path.stat().st_mode | 0o200 if is_allowed else path.stat().st_mode & ~0o222)

    def contents(name: str) -> dict[str, Any] | None:
        server.copy(disk, tmp_path / name)
        return left(tmp_path / name)

    allow(False)
    assert reason in server.fail(verbs[verb], out, **plan)
    allow(True)
    assert contents("never written") == {}
    server.fail(verbs[verb], out, no_room=list(FULL[verb][-1]), **plan)
    allow(False)
    before = contents("before")
    assert reason in server.fail(verbs[verb], out, **plan)
    assert contents("after") == before
    allow(True)
    server.succeed(verbs[verb], out, **plan)
    server.copy(out, tmp_path / "out")
    assert kept(tmp_path / "out") == kept(undisturbed(verb))


# --- a clock that goes backwards


@pytest.mark.parametrize("verb", FULL)
def test_a_clock_that_goes_back_changes_nothing_but_dates(
    verb: str,
    verbs: dict[str, list[str]],
    server: Server,
    plan: dict[str, Any],
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    if not IS_LONG and verb not in QUICK:
        pytest.skip("make reliability does this")
    out, began = tmp_path / verb, time.monotonic()
    plan |= {"clock_goes_back": []}
    if verb == "pretrain":
        server.fail(verbs[verb], out, no_room=["checkpoint-8", 100], **plan)  # the fourth
        good = {path.parent.name for path in out.glob("checkpoints/*/manifest.json")}
        assert good == {"checkpoint-4", "checkpoint-6"}  # the newest by their numbers, not by their dates
        with exclusive(out):
            assert "another process works in" in server.fail(verbs[verb], out, **plan)
    said = server.succeed(verbs[verb], out, **plan)
    took = time.monotonic() - began
    assert kept(out) == kept(undisturbed(verb))
    if verb == "pretrain":
        assert {path.name for path in out.glob("checkpoints/*")} == {"checkpoint-6", "checkpoint-8"}
    if verb == "evaluate":
        dates = [result.created for result in read_results([out])]
        assert dates == sorted(dates, reverse=True)
        assert datetime.fromisoformat(dates[-1]).timestamp() < time.time() - DAY
    if verb == "reproduce":
        stages = [json.loads(line) for line in (out / "stages.jsonl").read_text().splitlines()]
        assert all(0 <= stage["seconds"] <= took for stage in stages)
        assert sum(stage["seconds"] for stage in stages) > 0
        assert 0 < json.loads((out / "run.json").read_text())["wall_seconds"] <= took
        shown = [int(minutes) * 60 + int(seconds) for minutes, seconds in re.findall(r"in (\d+):(\d\d),", said)]
        assert shown == sorted(shown)
        assert shown[-1] <= took
        left_shown = [int(minutes) for minutes in re.findall(r"(-?\d+):\d\d left", said)]
        assert all(0 <= minutes < 10 for minutes in left_shown)


if __name__ == "__main__":
    serve()
