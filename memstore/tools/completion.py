"""``memstore completion``: what a shell needs to complete verbs and options, and the answers that it then asks for."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from memstore.errors import InvalidArgument
from memstore.tools.output import Report

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MEMSTORE_COMPLETE"
"""Environment variable in which the script tells the command that the shell asks."""

Shell = Annotated[str, typer.Argument(metavar="SHELL", help=f"One of {', '.join(SHELLS)}.", show_default=False)]


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
    script = get_completion_script(prog_name="memstore", complete_var=VARIABLE, shell=shell)
    return Report(data={"shell": shell, "script": script}, text=lambda page: page.line(script))


def answer(command: Any) -> int:
    """Tell a shell that asks in ``VARIABLE`` what could come next; the exit code."""
    from typer.completion import completion_init, shell_complete  # type: ignore[attr-defined]  # imported there

    completion_init()
    return shell_complete(command, {}, "memstore", VARIABLE, os.environ[VARIABLE])
