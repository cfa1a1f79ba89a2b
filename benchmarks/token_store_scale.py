"""How `metatokens tokenize` scales: memory over time, rate, and what they make of C4.

    python -m benchmarks.token_store_scale --tokenizer DIR --gigabytes 2 --workers 1 --workers 2

A corpus of that size is generated in a temporary folder: sentences of Python's own documentation in random order, in
JSON lines, one file of eight compressed. Memory is that of all processes together, without the pages of files.
"""

import gzip
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import psutil
import typer

from metatokens.data.corpus import read_corpus
from metatokens.data.store import TokenStore
from metatokens.machine import available_cores

FILES = 8
C4_TOKENS = 156e9


def generate(folder: Path, size: float) -> None:
    """Write the corpus: about `size` bytes of text."""
    draw = random.Random(0)
    sentences = [
        line + "\n"
        for text in read_corpus("builtin")
        for line in text.splitlines()
        if len(line) > 20
    ]
    for number in range(FILES):
        path = folder / f"{number}.jsonl{'.gz' if number == FILES - 1 else ''}"
        written = 0.0
        with gzip.open(path, "wt", 1) if path.suffix == ".gz" else path.open("w") as file:
            while written < size / FILES:
                text = "".join(draw.choices(sentences, k=draw.randrange(5, 70)))
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text)


def memory(process: psutil.Process) -> float:
    """Megabytes of anonymous memory of a process and its children."""
    total = 0
    for entry in [process, *process.children(recursive=True)]:
        try:
            usage = entry.memory_info()
        except psutil.NoSuchProcess:
            continue
        total += usage.rss - getattr(usage, "shared", 0)
    return total / 2**20


def cpu_of_children() -> float:
    """Seconds of a core that all processes took that this one started and saw end."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(corpus: str, tokenizer: str, out: Path, workers: int) -> None:
    """Tokenize, look at the memory every half second, and print what was seen."""
    command = [
        sys.executable,
        "-c",
        "from metatokens.cli import main; main()",
        "tokenize",
        "--corpus",
        corpus,
    ]
    began, cpu = time.monotonic(), cpu_of_children()
    running = subprocess.Popen(
        [*command, "--tokenizer", tokenizer, "--out", out, "--workers", str(workers)]
    )
    process, curve = psutil.Process(running.pid), []
    while running.poll() is None:
        curve.append((time.monotonic() - began, memory(process)))
        time.sleep(0.5)
    assert running.returncode == 0
    took, cpu = time.monotonic() - began, cpu_of_children() - cpu
    counts = TokenStore(out).manifest.splits.values()
    text, tokens = sum(entry.characters for entry in counts), sum(entry.tokens for entry in counts)
    shards = sum(len(entry.shards) for entry in counts)
    stored = sum(path.stat().st_size for path in out.rglob("*.bin"))
    at, used = np.array(curve).T
    steady = (at > 0.2 * took) & (at < 0.95 * took)  # while every worker works
    slope, _ = np.polyfit(at[steady], used[steady], 1)
    print(
        f"workers {workers}: {text / 1e6:,.0f} M characters, {tokens / 1e6:,.0f} M tokens, {shards} shards"
    )
    print(
        f"  {took:,.0f} s, {text / took / 1e6:.2f} M characters/s, {tokens / took / 1e6:.2f} M tokens/s"
    )
    print(f"  {cpu:,.0f} s of a core, {text / cpu / 1e6:.2f} M characters/s and core")
    low, high = used[steady].min(), used[steady].max()
    print(f"  memory: peak {used.max():,.0f} MB, {low:,.0f} to {high:,.0f} while steady")
    print(
        f"  slope {slope * 60:+.1f} MB/min, {slope * took / (text / 1e9):+.1f} MB a billion characters"
    )
    print(f"  stored {stored / 1e9:.2f} GB, {stored / tokens:.3f} bytes a token")
    hours = C4_TOKENS / tokens * cpu / 3600
    print(
        f"  C4's 156 billion tokens: {hours:,.0f} core-hours, {stored / tokens * C4_TOKENS / 1e9:,.0f} GB"
    )


def main(
    tokenizer: Annotated[str, typer.Option(help="As of `metatokens tokenize`.")],
    gigabytes: Annotated[float, typer.Option(help="Of text.")] = 2.0,
    workers: Annotated[
        list[int] | None, typer.Option(help="One a core by default; repeatable.")
    ] = None,
) -> None:
    """Generate, tokenize, and print."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder, gigabytes * 1e9)
        for count in workers or [available_cores()]:
            measure(f"{folder}/*.jsonl*", tokenizer, folder / f"{count}-workers", count)


if __name__ == "__main__":
    typer.run(main)
