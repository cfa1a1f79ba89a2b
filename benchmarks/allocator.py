"""What commands gain and lose by having glibc keep freed memory: runs with and without it, in turns.

    python -m benchmarks.allocator --tokenizer gpt2 --corpus 'my/*.txt' --out benchmarks/results/allocator.jsonl

The figures are of a command's whole process, its start included: user and system time, wall time, peak memory.
"Without" sets one of glibc's variables to its default, upon which the commands leave glibc alone.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

PLAIN = {"MALLOC_ARENA_TEST": "8"}  # glibc's default
FIGURES = ("user", "system", "wall", "peak")  # seconds, seconds, seconds, MiB


def main(
    tokenizer: Annotated[str, typer.Option(help="Tokenizer, as for `metatokens tokenize`.")],
    corpus: Annotated[str, typer.Option(help="Text, as for `metatokens tokenize`.")] = "builtin",
    steps: Annotated[int, typer.Option(help="Pretraining steps.")] = 16,
    shape: Annotated[str, typer.Option(help="Shape of the model of `benchmark train`.")] = "paper",
    rounds: Annotated[
        int, typer.Option(help="Runs of each command with, and as many without.")
    ] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a command's row; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write JSON lines to.")] = None,
) -> None:
    """Print the table of ratios."""
    with tempfile.TemporaryDirectory() as folder:
        base, tokens = f"{folder}/base", f"{folder}/tokens"
        pretrain = f"metatokens pretrain --recipe demo --set data.tokens={tokens} --overwrite --set training.max_steps="
        tokenize = [
            "metatokens",
            "tokenize",
            "--corpus",
            corpus,
            "--tokenizer",
            tokenizer,
            "--overwrite",
            "--out",
        ]
        commands = {
            "tokenize": [*tokenize, f"{folder}/again"],
            "pretrain, the demo's model": [*f"{pretrain}{steps}".split(), "--out", f"{folder}/run"],
            f"benchmark train, {shape}": f"benchmarks.speed train --shape {shape} --contestant gpt2 --rounds 3 "
            "--warmup 1 --no-memory".split(),
            "perplexity": [
                "metatokens",
                "perplexity",
                "--model",
                base,
                "--corpus",
                corpus,
                "--max-tokens",
                "20000",
            ],
            "generate": f"metatokens generate --model {base} --max-new-tokens 200 Once".split(),
            "evaluate": [
                "metatokens",
                "evaluate",
                "--model",
                "example",
                "--task",
                "list_recall",
                "--lengths",
                "128",
                "-n",
                "200",
            ],
        }
        if unknown := set(only or ()) - set(commands):
            raise typer.BadParameter(f"{', '.join(unknown)}; there are: {'; '.join(commands)}")
        for line in ([*tokenize, tokens], [*f"{pretrain}2".split(), "--out", base]):
            measured(line, {})
        runs: dict[tuple[str, bool], list[list[float]]] = {}
        turns = [(name, keeping) for name in only or commands for keeping in (True, False)]
        for name, keeping in track(
            [turn for _ in range(rounds) for turn in random.Random(0).sample(turns, len(turns))],
            "runs",
            console=Console(stderr=True),
        ):
            runs.setdefault((name, keeping), []).append(
                measured(commands[name], {} if keeping else PLAIN)
            )
    # With torch, whose size each new process would begin with.
    from benchmarks.speed.speed import (
        device_name,
    )

    table = Table(
        title="glibc keeps freed memory, against what it does by itself (median, quartiles)"
    )
    for heading in ("", *FIGURES):
        table.add_column(heading, justify="right" if heading else "left")
    lines = []
    for name in only or commands:
        keeping, plain = (np.array(runs[name, variant]) for variant in (True, False))
        row = []
        for index, figure in enumerate(FIGURES):
            low, ratio, high = np.quantile(
                keeping[:, index] / plain[:, index], (0.25, 0.5, 0.75)
            ).tolist()
            medians = [float(np.median(variant[:, index])) for variant in (keeping, plain)]
            row.append(
                f"{medians[0]:,.1f} / {medians[1]:,.1f} = {ratio:.2f} ({low:.2f} to {high:.2f})"
            )
            fields = {
                "measured": name,
                "figure": figure,
                "kept": medians[0],
                "plain": medians[1],
                "ratio": ratio,
            }
            lines.append(
                fields | {"low": low, "high": high, "n": rounds, "device": device_name("cpu")}
            )
        table.add_row(name, *row)
    Console().print(table)
    if out is not None:
        out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def measured(arguments: list[str], variables: dict[str, str]) -> list[float]:
    """Run a module with its arguments in a process; the process's figures."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    }
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        line = [sys.executable, "-m", *arguments]
        process = subprocess.Popen(
            line, env=environment | variables, stdout=said, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(arguments)}: {said.read().decode()[-2000:]}")
    return [usage.ru_utime, usage.ru_stime, time.monotonic() - began, usage.ru_maxrss / 1024]


if __name__ == "__main__":
    typer.run(main)
