"""Output to a terminal of 80 columns, and to a pipe."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from metatokens.cli.output import print_figures
from tests.cli.command_lines import Models, Run, Succeed, read_lines, write_records

Show = Callable[[str], str]
Print = Callable[..., list[str]]


@contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """A terminal of 80 columns: its file descriptor and, once the context ends, the bytes that it showed."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # Linux's way to say that the other end is closed
            while chunk := os.read(leader, 4096):
                shown.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield follower, shown
    finally:
        os.close(follower)
        reader.join()
        os.close(leader)
        shown[:] = [b"".join(shown).replace(b"\r\n", b"\n")]


@pytest.fixture
def at_a_terminal(metatokens: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs the command in this process with a terminal as standard output; returns the text shown."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "dumb")

    def run(line: str) -> str:
        with (
            terminal() as (follower, shown),
            open(os.dup(follower), "w") as stream,
            monkeypatch.context() as patch,
        ):
            patch.setattr(sys, "stdout", stream)
            saved = os.dup(1)
            os.dup2(follower, 1)
            try:
                status, _, _ = metatokens(line)
            finally:
                stream.flush()
                os.dup2(saved, 1)
                os.close(saved)
        assert status == 0
        return shown[0].decode()

    return run


def table(printed: str) -> list[str]:
    """The lines of a table, none longer than the terminal."""
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    return [line.rstrip() for line in lines]


def records(lines: str) -> list[dict[str, Any]]:
    """JSON lines, without the time of the measurement."""
    return [record | {"created": None} for record in read_lines(lines)]


def test_a_terminal_and_a_pipe_get_a_table_and_a_file_json_lines(
    small_model: Models, workplace: Path, run: Succeed, at_a_terminal: Show
) -> None:
    line = f"evaluate --model {small_model()} --task parity --lengths 64,96 -n 4 --name small"

    piped, _ = run(f"{line} --out figures.jsonl")
    printed, _ = run(f"{line} --json")

    exact, *others = records(printed)
    above, headings, *rows = table(piped)
    assert table(at_a_terminal(line)) == table(piped)
    assert (
        records(at_a_terminal(f"{line} --json"))
        == records(Path("figures.jsonl").read_text())
        == [exact, *others]
    )
    assert above == "model small, position embedding rope, task parity, condition paper, seed 0"
    assert headings.split() == ["measured", "value", "95", "%", "interval", "n", "chance"]
    percent = [f"{100 * exact[name]:.1f} %" for name in ("value", "low", "high")]
    assert (
        rows[0].split()
        == f"exact match, length 64 {percent[0]} {percent[1]} to {percent[2]} 4 50.0 %".split()
    )
    measured = [row.split("  ")[0] for row in rows]
    assert measured == [
        "exact match, length 64",
        "token accuracy, length 64",
        "exact match, length 96",
        "token accuracy, length 96",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "perplexity --corpus text.txt --block-size 32",
        "analyze sharpness --task parity --length 64 -n 4",
        "evaluate --data own.jsonl",
    ],
)
def test_every_verb_with_results_shows_a_table_or_with_json_its_lines(
    line: str, small_model: Models, workplace: Path, run: Succeed
) -> None:
    write_records("own.jsonl", [{"prompt": "the cat", "completion": " sat"}])
    verb, arguments = line.split(" ", 1)

    shown, _ = run(f"{verb} --model {small_model()} {arguments}")
    as_json, _ = run(f"{verb} --model {small_model()} {arguments} --json")

    assert "{" not in shown
    assert len(table(shown)) >= 3
    assert len(records(as_json)) >= 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_is_utf_8_whatever_the_encoding_of_standard_output(
    encoding: str, small_model: Models, run: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    run(f"generate café→ --max-new-tokens 2 --model {small_model()}")
    sys.stdout.flush()
    assert written.getvalue().decode().startswith("café→")


def test_a_terminal_keeps_its_encoding_and_shows_what_it_has_no_character_for(
    metatokens: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal() as (follower, shown), open(os.dup(follower), "w", encoding="latin-1") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert metatokens("report café→ --out report")[0] == 2
    assert b"caf\xe9\\u2192" in shown[0]


@pytest.fixture
def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """The table of rows on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(*rows: dict[str, Any]) -> list[str]:
        print_figures(rows)
        return table(capsys.readouterr().out)

    return show


def test_a_table_of_one_figure_still_says_what_it_is(printed: Print) -> None:
    interval = {"value": 15232.4, "low": 999.96, "high": 1e6}
    above, headings, row = printed(
        {"model": "m", "metric": "perplexity", **interval, "n": 15232, "chance": 16.04}
    )
    assert above == "model m"
    assert headings.split() == ["measured", "value", "95", "%", "interval", "n", "chance"]
    assert row.split() == ["perplexity", "15,232", "1000", "to", "1,000,000", "15,232", "16.04"]


def test_what_rows_lack_stands_in_no_row(printed: Print) -> None:
    shared = {"analysis": "residual", "model": "m", "metric": "similarity_centred", "n": 4}
    first = shared | {"value": -0.25, "low": -0.5, "high": 0.125, "layer": 0}
    second = shared | {"layer": 1, "premise": False}

    above, headings, *rows = printed(first, second)

    assert above == "analysis residual, model m"
    assert "chance" not in headings
    assert rows[0].split() == [
        "similarity",
        "centred,",
        "layer",
        "0",
        "-0.25",
        "-0.5",
        "to",
        "0.125",
        "4",
    ]
    assert rows[1].split() == ["similarity", "centred,", "layer", "1,", "premise", "no", "-", "4"]


@pytest.mark.parametrize("line", ["--help", "--version"])
def test_a_full_device_is_one_sentence(line: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "metatokens", line], stdout=full, stderr=subprocess.PIPE
        )

    assert (done.returncode, done.stderr) == (2, b"metatokens: No space left on device.\n")


def test_a_reader_that_ends_early_is_no_mistake() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "metatokens", "--version"], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)

    assert done.stderr == b""
