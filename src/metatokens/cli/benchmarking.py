"""The verb that measures speed and memory."""

import sys
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from metatokens.cli.app import (
    AsJson,
    ResultFile,
    app,
    check_results_file,
    named,
    parse_lengths,
    progress_bar,
    shows_tables,
    write_records,
)
from metatokens.errors import UserError


@app.command(rich_help_panel="Measure")
def benchmark(
    kind: Annotated[str, typer.Argument(**named("train", "answers", "prefill", "decode", "length", "data"))],
    shape: Annotated[str, typer.Option(**named("tiny", "demo", "small", "medium", "paper"))] = "small",
    lengths: Annotated[str, typer.Option(help="Positions; for the benchmark `length` several: 1024,2048.")] = "1024",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Untimed rounds before them.")] = 2,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: the cores there are.")] = None,
    dtype: Annotated[str, typer.Option(**named("float32", "bfloat16"))] = "float32",
    device: Annotated[str, typer.Option(**named("cpu", "cuda"))] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="Run the models through torch.compile.")] = False,
    contestant: Annotated[list[str] | None, typer.Option(help="One of them; may be given again; default: all.")] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    corpus: Annotated[str, typer.Option(help="For the benchmark `data`: see tokenize.")] = "builtin",
    tokenizer: Annotated[str, typer.Option(help="For the benchmark `data`: see tokenize.")] = "train:4096",
    figure: Annotated[Path | None, typer.Option(help="Draw the comparison into this PNG file.")] = None,
    out: ResultFile = None,
    as_json: AsJson = False,
) -> None:
    """Time models side by side in one run, each ratio beside the limit that its arithmetic sets."""
    from rich.console import Console

    from metatokens.machine import available_cores

    check_results_file(out)
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
        write_records(rates, out, as_json=as_json)
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
        batch=batch,
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
    console.print(table(timings))
    if out is not None or not shows_tables(as_json):  # the table says it already
        write_records(timings, out)
    if figure is not None:
        draw(timings, figure)
