"""The benchmarks' command, from the repository's root: `python -m benchmarks.speed train --shape paper`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from benchmarks.speed.contestants import Setting
from benchmarks.speed.data_speed import data_speed
from benchmarks.speed.figures import draw, table
from benchmarks.speed.peers import ShapeName
from benchmarks.speed.speed import run, run_lengths
from metatokens.cli import main
from metatokens.cli.options import CORPUS, TOKENIZER, AsJson, ResultFile, parse_numbers
from metatokens.cli.output import check_results_file, progress_bar, write_records
from metatokens.errors import UserError
from metatokens.machine import available_cores
from metatokens.paper.records import Benchmark
from metatokens.recipe import Device, Dtype

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    kind: Annotated[Literal[Benchmark, "data"], typer.Argument(help="What to time.")],
    shape: Annotated[ShapeName, typer.Option(help="Size of the models.")] = "small",
    lengths: Annotated[
        str,
        typer.Option(
            metavar="LENGTH,...",
            help="Length of a sequence in tokens; the benchmark `length` takes several.",
        ),
    ] = "1024",
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences per batch.")] = 1,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Timed rounds.")] = 10,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=1, help="Untimed rounds before them.")
    ] = 2,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="PyTorch threads; one per core by default."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number type.")] = "float32",
    device: Annotated[Device, typer.Option(help="Where the models run.")] = "cpu",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the models with torch.compile.")
    ] = False,
    contestant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A model that takes part; repeatable; by default all do."
        ),
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    corpus: Annotated[
        str, typer.Option(metavar="CORPUS", help=f"Text for `data`: {CORPUS}.")
    ] = "builtin",
    tokenizer: Annotated[
        str, typer.Option(metavar="TOKENIZER", help=f"Tokenizer for `data`: {TOKENIZER}.")
    ] = "train:4096",
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG file to draw the comparison into.")
    ] = None,
    out: ResultFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed and memory of models side by side.

    The table shows each ratio next to the limit that arithmetic sets.
    """
    check_results_file(out)
    writes_lines = as_json or out is not None  # the table on standard error shows the same
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 130)
    if kind == "data":
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

    positions = parse_numbers("lengths", lengths, smallest=1)
    if len(positions) > 1 and kind != "length":
        raise UserError(
            f"the benchmark {kind} takes one length; several go with the benchmark length."
        )
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
            timings = run_lengths(
                setting, positions, models=contestant, memory=memory, progress=progress
            )
        else:
            timings = run(kind, setting, models=contestant, memory=memory, progress=progress)
    console.print(table(timings, console.width))
    if writes_lines:
        write_records(timings, out)
    if figure is not None:
        draw(timings, figure)


if __name__ == "__main__":
    main(app)
