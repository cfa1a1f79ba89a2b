"""The verb that measures speed and memory."""

import sys
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from metatokens.cli.options import (
    CORPUS,
    DEVICES,
    DTYPES,
    SEVERAL,
    TOKENIZER,
    AsJson,
    ResultFile,
    choice,
    parse_lengths,
)
from metatokens.cli.output import check_results_file, progress_bar, shows_tables, write_records
from metatokens.errors import UserError

BENCHMARKS = ("train", "answers", "prefill", "decode", "length", "compile", "data")
SHAPES = ("tiny", "demo", "small", "medium", "paper")
CONTESTANTS = (  # those whose names are one word
    "gpt2", "pause", "meta", "twin", "dense",
    "transformers", "gpt2-learned", "transformers-gelu", "gpt2-learned-gelu", "x-transformers", "plain",
)  # fmt: skip


def benchmark(
    kind: Annotated[str, typer.Argument(metavar="KIND", **choice("What to time", *BENCHMARKS))],
    shape: Annotated[str, typer.Option(metavar="NAME", **choice("Size of the models", *SHAPES))] = "small",
    lengths: Annotated[
        str, typer.Option(metavar=SEVERAL, help="Length of a sequence in tokens; several for the benchmark length.")
    ] = "1024",
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences at a time.")] = 1,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Timed rounds.")] = 10,
    warmup: Annotated[int, typer.Option(metavar="N", min=1, help="Untimed rounds before them.")] = 2,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Threads of PyTorch; by default one a core.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", **choice("Type of numbers", *DTYPES))] = "float32",
    device: Annotated[str, typer.Option(metavar="NAME", **choice("Where models run", *DEVICES))] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="Run the models through torch.compile.")] = False,
    contestant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model that takes part; may be repeated; by default all do.",
            autocompletion=lambda: list(CONTESTANTS),
        ),
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure the peak memory too.")] = True,
    corpus: Annotated[str, typer.Option(metavar="CORPUS", help=f"Text for the benchmark data: {CORPUS}.")] = "builtin",
    tokenizer: Annotated[
        str, typer.Option(metavar="TOKENIZER", help=f"For the benchmark data: {TOKENIZER}.")
    ] = "train:4096",
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="PNG file to draw the comparison into.")] = None,
    out: ResultFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed and memory of models side by side.

    Each ratio stands beside the limit that arithmetic sets.
    """
    from rich.console import Console

    from metatokens.machine import available_cores

    check_results_file(out)
    writes_lines = out is not None or not shows_tables(as_json)  # the table on standard error says it already
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 130)
    if kind == "data":
        from metatokens.benchmark.data_speed import data_speed

        rates = []
        for rate in data_speed(corpus, tokenizer, processes=available_cores()):
            console.print(
                f"{rate.measured}: {rate.value:,.4g} {rate.unit} ({rate.low:,.4g} to {rate.high:,.4g}, n = {rate.n}; "
                f"target {rate.target})",
                highlight=False,
            )
            rates.append(rate)
        if writes_lines:
            write_records(rates, out)
        return

    from metatokens.benchmark.contestants import Setting
    from metatokens.benchmark.figures import draw, table
    from metatokens.benchmark.speed import run, run_lengths
    from metatokens.records import Benchmark

    if kind not in get_args(Benchmark):
        raise UserError(f"unknown benchmark {kind!r}; choose {', '.join(get_args(Benchmark))} or data.")
    positions = parse_lengths(lengths)
    if len(positions) > 1 and kind != "length":
        raise UserError(f"the benchmark {kind} takes one length; several go with the benchmark length.")
    setting = Setting(
        shape=shape,
        length=positions[0],
        batch=batch_size,
        rounds=rounds,
        warmup=warmup,
        threads=threads or available_cores(),
        dtype=dtype,
        device=device,
        compiled=compiled,
    )
    with progress_bar(f"benchmark {kind}") as progress:
        if kind == "length":
            timings = run_lengths(setting, positions, models=contestant, memory=memory, progress=progress)
        else:
            timings = run(cast(Benchmark, kind), setting, models=contestant, memory=memory, progress=progress)
    console.print(table(timings, console.width))
    if writes_lines:
        write_records(timings, out)
    if figure is not None:
        draw(timings, figure)
