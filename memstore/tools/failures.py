"""How a verb that fails ends: the exit code, and one or two lines that say what to do."""

from __future__ import annotations

import json as jsonlib
import sys

import typer

from memstore.errors import (
    DamagedError,
    DifferentRun,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    NotFound,
    ReadOnlyMemory,
    StoreFull,
    UnsupportedModel,
    WrongKey,
)
from memstore.stored import printable

OK, FAILED, USAGE, NOT_FOUND, DAMAGED, REFUSED, INTERRUPTED, PIPE = 0, 1, 2, 3, 4, 5, 130, 141

EXIT_CODES = """\
Exit codes: 0 done, 1 another failure (a mistake in memstore, or of the system), 2 bad usage, 3 not found, 4 damaged,
5 refused (another model's memory, another key or training run there, in use, read-only, full), 130 interrupted,
141 the reader of the output left.
With --json a failure is the object {"error": TYPE, "message": TEXT} on standard output."""


class Interrupted(MemstoreError):
    """Ctrl-C; the message says what is safe and how to go on."""


class Mistake(MemstoreError):
    """An error that nobody expected, in one line."""

    def __init__(self, error: Exception) -> None:
        self.kind = type(error).__name__
        words = " ".join(str(error).split())
        super().__init__(f"{self.kind}: {words} - this is a mistake in memstore; please report it")


def exit_code(error: Exception) -> int:
    """The code that scripts see."""
    match error:
        case InvalidArgument():
            return USAGE
        case NotFound() | NotAMemory():
            return NOT_FOUND
        case DamagedError():
            return DAMAGED
        case ForeignMemory() | WrongKey() | UnsupportedModel() | DifferentRun():
            return REFUSED
        case MemoryInUse() | ReadOnlyMemory() | StoreFull():
            return REFUSED
        case Interrupted():
            return INTERRUPTED
        case typer.TyperException():
            return error.exit_code
    return FAILED


def report_failure(error: Exception, *, json: bool) -> int:
    """Tell the error, as text on standard error or as JSON on standard output; the exit code."""
    usage = isinstance(error, typer.TyperException)
    message = " ".join(error.format_message().split()) if isinstance(error, typer.TyperException) else str(error)
    if json:
        kind = "UsageError" if usage else error.kind if isinstance(error, Mistake) else type(error).__name__
        print(jsonlib.dumps({"error": kind, "message": message}))
    else:
        print(f"memstore: {printable(message)}", file=sys.stderr)
        if usage:
            print(f"Try '{_command_path(error)} --help'.", file=sys.stderr)
    return exit_code(error)


def _command_path(error: Exception) -> str:
    context: typer.Context | None = getattr(error, "ctx", None)
    return context.command_path if context else "memstore"
