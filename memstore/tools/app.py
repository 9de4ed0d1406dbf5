"""The command ``memstore``: its verbs, and how each run ends."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import typer

from memstore._version import __version__
from memstore.errors import InvalidArgument, MemstoreError, ReadOnlyMemory
from memstore.readers.kinds import trainable
from memstore.report import Report
from memstore.tools.models import remember
from memstore.tools.verb import (
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    PIPE,
    USAGE,
    Interruption,
    Mistake,
    argument,
    report_failure,
    verb,
    with_way_out,
)

DEBUG_VARIABLE = "MEMSTORE_DEBUG"
_OUTPUT_LOST = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}

Shells = Literal["bash", "zsh", "fish"]
COMPLETION_VARIABLE = "_MEMSTORE_COMPLETE"
"""Environment variable with which a shell's script asks the command for completions."""

Shell = Annotated[Shells, argument("SHELL", "The shell: bash, zsh or fish.")]
TrustedModel = Annotated[str, argument("MODEL", "Model to trust: a Hugging Face directory or hub id, or smollm2.")]


def trust(model: TrustedModel) -> Report:
    """Let memories load this model without --model.

    A memory names the model that read it, and the memory's maker chose that name. So a directory or hub id that only a
    memory names is neither loaded nor fetched. First you name it yourself: here, or with --model. Models that come with
    the package need no trust.

    Example:

        memstore trust HuggingFaceTB/SmolLM2-135M

    In Python: memstore.tools.models.remember.
    """
    if not model.strip():
        raise InvalidArgument("the name of the model is empty. Name a directory or a hub id such as owner/name.")
    name = remember(model)
    return Report(data={"model": name}, text=lambda page: page.line(f"memories read by {name} may now load it"))


def completion(shell: Shell) -> Report:
    """Print the script that lets a shell complete verbs and options.

    With bash, put the line of the example into ~/.bashrc. With zsh, put it into ~/.zshrc, after compinit. With fish:
    memstore completion fish > ~/.config/fish/completions/memstore.fish

    Example:

        eval "$(memstore completion bash)"

    In Python: typer.completion.get_completion_script.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # imported there, not listed

    script = get_completion_script(prog_name="memstore", complete_var=COMPLETION_VARIABLE, shell=shell)
    return Report(data={"shell": shell, "script": script}, text=lambda page: page.line(script))


VERBS = {
    "read": "read:read",
    "ask": "ask:ask",
    "chat": "chat:chat",
    "ls": "listing:ls",
    "show": "listing:show",
    "search": "search:search",
    "audit": "audit:audit",
    "plot": "audit:plot",
    "trace": "trace:trace",
    "verify": "verify_repair:verify",
    "stats": "listing:stats",
    "copy": "retention:copy",
    "diff": "diff:diff",
    "export": "export:export",
    "import": "export:import_",
    "fork": "retention:fork",
    "forget": "retention:forget",
    "pin": "retention:pin",
    "unpin": "retention:unpin",
    "expire": "retention:expire",
    "limit": "retention:limit",
    "index": "listing:index",
    "compact": "retention:compact",
    "rekey": "retention:rekey",
    "repair": "verify_repair:repair",
    "view": "serve:view",
    "serve": "serve:serve",
    "mcp": "serve:mcp",
    "trust": "app:trust",
    "demo": "demo:demo",
    "completion": "app:completion",
}
"""Module and function of each verb."""
EVALUATIONS = {
    "passkey": "eval:passkey",
    "two-hop": "eval:two_hop",
    "multi-needle": "eval:multi_needle",
    "perplexity": "eval:perplexity",
    "generate": "eval:generate",
}
"""The same for ``memstore eval``."""
GROUPS = {"train": "Train a model that retrieves.", "eval": "Measure a model that retrieves."}
"""Groups of verbs, as in ``memstore train drt``, and the purpose of each."""


class _Verbs(Mapping[str, Any]):
    """Verbs by name, for Click. A verb is imported only when it is requested, because most runs need one."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()


def _imported(homes: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    return {name: partial(_command, name, home) for name, home in homes.items()}


def _training(name: str) -> Any:
    """Return the verb that trains this kind of model, which supplies the options."""
    from memstore.tools.train import training_verb

    return _made(name, training_verb(trainable()[name]))


def _command(name: str, home: str) -> Any:
    return _made(name, resolve_name(f"memstore.tools.{home}"))


def _made(name: str, function: Callable[..., Report]) -> Any:
    made = typer.Typer(add_completion=False, rich_markup_mode=None)
    made.command(name)(verb(function))
    return typer.main.get_command(made)


def _group(name: str, purpose: str) -> Any:
    made = typer.Typer(name=name, add_completion=False, help=purpose, epilog=EXIT_CODES, rich_markup_mode=None)
    made.callback(invoke_without_command=True)(_help_alone)
    group: Any = typer.main.get_command(made)
    trainings = {kind: partial(_training, kind) for kind in trainable()} | _imported({"router": "train:router"})
    group.commands = _Verbs(trainings if name == "train" else _imported(EVALUATIONS))
    return group


def _help_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    no_resident: Annotated[  # noqa: ARG001 - memstore.__main__ sees it
        bool, typer.Option("--no-resident", help="Run ask and chat in a process of their own, with its own imports.")
    ] = False,
) -> None:
    """A searchable, persistent memory for transformers."""
    if version:
        typer.echo(f"memstore {__version__}")
        raise typer.Exit
    _help_alone(context)


def main(
    arguments: Sequence[str] | None = None,
    pressed: Callable[[], bool] = lambda: False,
    closing: Callable[[], None] = lambda: None,
) -> int:
    """Run the command line and return the exit code.

    No error ends in a traceback, unless ``MEMSTORE_DEBUG`` is set. ``pressed`` returns whether Ctrl-C was pressed; then
    every error counts as an interruption. ``closing`` is called before a failure is printed, which is the last message:
    a second Ctrl-C must not add another.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stdout is None or sys.stderr is None:  # the parent closed it; a file opened now could get its number
        return FAILED if sys.stderr is None else _lost_output("it is closed")
    try:
        code = _run(arguments, pressed, closing)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        _drop_output()
        return PIPE
    except OSError as error:
        _drop_output()
        return _lost_output(error.strerror or str(error))
    return code


@cache
def command_line() -> Any:
    """Return all verbs as a Click command."""
    command: Any = typer.main.get_command(app)
    command.commands = _Verbs(_imported(VERBS) | {name: partial(_group, name, GROUPS[name]) for name in GROUPS})
    return command


def _run(arguments: Sequence[str], pressed: Callable[[], bool], closing: Callable[[], None]) -> int:
    if COMPLETION_VARIABLE in os.environ:  # a shell requests completions
        return _completed(command_line())

    def failed(error: Exception) -> int:
        closing()
        return report_failure(error, json="--json" in arguments)

    try:
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        for argument in arguments:
            if any("\ud800" <= letter <= "\udfff" for letter in argument):
                raise InvalidArgument(f"the argument {argument!a} is not valid UTF-8 text.")
        code: int = command_line().main(arguments, prog_name="memstore", standalone_mode=False) or 0
    except (MemstoreError, typer.TyperException) as error:
        if not pressed() or isinstance(error, Interruption):
            return failed(with_way_out(error, arguments))
        code = INTERRUPTED
    except SystemExit:  # typer's answer to a broken pipe, its only remaining exit in this mode
        raise BrokenPipeError from None
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_LOST:
            raise
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exception(error)
        if not pressed():
            return failed(_explained(error))
        code = INTERRUPTED
    # Where typer catches Ctrl-C, this code is its only message. A verb that knows more raises Interruption itself.
    if code != INTERRUPTED:
        return code
    when = " before anything was read" if arguments[:1] == ["read"] else ""
    return failed(Interruption(f"interrupted{when}; run the same command again"))


def _completed(command: Any) -> int:
    """Print the completions that a shell requests in ``COMPLETION_VARIABLE``, and return the exit code."""
    from typer.completion import completion_init, shell_complete  # type: ignore[attr-defined]  # imported there

    completion_init()
    return shell_complete(command, {}, "memstore", COMPLETION_VARIABLE, os.environ[COMPLETION_VARIABLE])


def _explained(error: Exception) -> MemstoreError:
    """Return the message for an error that is not a ``MemstoreError``: a system error, or else a bug of ours."""
    match error:
        case PermissionError(filename=str(name)):
            return ReadOnlyMemory(f"{name}: permission denied. Choose another path, or change its permissions.")
        case OSError(strerror=str(reason), filename=str(name)):
            return MemstoreError(f"{name}: {reason}")
    return Mistake(error)


def _lost_output(why: str) -> int:
    sys.stderr.write(f"memstore: standard output cannot be written: {why}\n")
    return FAILED


def _drop_output() -> None:
    """Send Python's own last flush nowhere, because it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
