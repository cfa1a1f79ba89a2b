"""The command `metatokens`: one verb per step. You can run each verb alone, on your own files.

Results go to standard output, as a table or with `--json` as JSON lines; everything else goes to standard error. A
user's mistake is one sentence and exit status 2. Each verb imports what it needs when it runs, which keeps `--help`
quick.
"""

import atexit
import codecs
import importlib.metadata
import io
import os
import sys
from typing import Annotated, Any

import typer

from metatokens.cli.look_commands import generate, look, sample
from metatokens.cli.measure_commands import analyze, evaluate, perplexity
from metatokens.cli.output import say
from metatokens.cli.report_commands import report, reproduce
from metatokens.cli.shrink_command import shrink
from metatokens.cli.train_commands import extend, finetune, pretrain, retrofit, tokenize
from metatokens.errors import UserError, one_line
from metatokens.machine import keep_freed_memory, process_count

# In the order of use, as `--help` lists them.
PANELS = {
    "Everything in order": (reproduce,),
    "Train": (tokenize, pretrain, retrofit, extend, finetune),
    "A smaller cache": (shrink,),
    "Look": (sample, generate, look),
    "Measure": (evaluate, perplexity, analyze),
    "Report": (report,),
}
INTERRUPTED = 130  # typer's exit status after Ctrl-C
# Of click, or of the copy of click in typer, which exports neither.
UsageError: Any = typer.BadParameter.__base__


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
for panel, verbs in PANELS.items():
    for verb in verbs:
        app.command(rich_help_panel=panel, short_help=(verb.__doc__ or "").partition("\n")[0])(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"metatokens {importlib.metadata.version('metatokens')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", metavar="", help="Show the traceback of a mistake.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Language models with learned meta-tokens: train, evaluate, report."""


def main(command: typer.Typer = app) -> None:
    """Run a command line; a user's mistake is one sentence on standard error and exit status 2."""
    _write_utf_8()
    keep_freed_memory()
    # Keep the libraries' notices and progress bars out of the output.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        # A mistake then comes here, and typer draws no box around it.
        status = command(standalone_mode=False)
        sys.stdout.flush()
    except (UserError, UsageError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, OSError):
            _drop_output()
        sentence = _sentence(error)
        if sentence:
            print(f"metatokens: {sentence}", file=sys.stderr)
        sys.exit(2)
    if status == INTERRUPTED:
        say("metatokens: interrupted; if you repeat the command, a run resumes.")
    elif not status and process_count() > 1:
        _leave()
    if status:
        sys.exit(status)


def _write_utf_8() -> None:
    """Write UTF-8 whatever the system's encoding is; only a terminal keeps its own.

    So no result is lost because a character has no code, and lines of JSON can be read again.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(
                encoding=stream.encoding if stream.isatty() else "utf-8", errors="backslashreplace"
            )


def _drop_output() -> None:
    """Drop what standard output still holds, which Python would otherwise fail to write at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(error: Exception) -> str:
    """The sentence about a mistake; empty if typer has printed the help in its place, or nobody reads the output."""
    if isinstance(error, BrokenPipeError):
        return ""
    if isinstance(error, OSError):
        reason = error.strerror or one_line(error)
        return f"{error.filename}: {reason}." if error.filename else f"{reason}."
    if not isinstance(error, UsageError):
        return str(error)
    wrong = error.format_message().replace("Value error, ", "")  # pydantic's prefix
    verb = error.ctx.command_path if error.ctx else "metatokens"
    return wrong and f"{wrong.rstrip('.')}; see `{verb} --help`."


def _leave() -> None:
    """End a process that trained with others, without finalizing the interpreter.

    DDP's reducer keeps gloo's threads even after the group is destroyed. A thread that asks for the lock of a
    finalizing interpreter ends the process with SIGABRT (pytorch/pytorch#190489).
    """
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
        atexit._run_exitfuncs()  # experiment trackers send what they hold
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
