"""Write the reference of the command line as Markdown: ``python -m memstore.tools.reference > docs/cli.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer

from memstore.tools.app import app
from memstore.tools.failures import EXIT_CODES

HEAD = """\
# The command `memstore`

Written by `make docs` from the command itself. Every verb prints tables on a terminal, plain text elsewhere,
and one JSON object with `--json`. Models that are fetched are kept in the user's cache directory, or in the folder
that the environment variable `MEMSTORE_CACHE` names; what a C compiler makes at the first use lies there too, and with
`MEMSTORE_NATIVE=0` nothing is compiled. With `MEMSTORE_DEBUG=1` an error that nobody expected also prints
its traceback.
"""


def reference() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    parts = [HEAD, f"{EXIT_CODES}\n"]
    for name, command in _commands(group):
        parts += _section(name, command)
    return "\n".join(parts)


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    """Every verb, those of groups with the group's name before them."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {verb}", each) for verb, each in _commands(command))
        else:
            yield name, command


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [each.metavar for each in command.params if each.param_type_name == "argument"]
    yield f"## {name}\n"
    yield f"    {' '.join(['memstore', name, *arguments, '[OPTIONS]'])}\n"
    yield command.help.replace("\b\n", "").strip() + "\n"
    for parameter in command.params:
        yield _parameter(parameter)
    yield ""


def _parameter(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = parameter.metavar if is_argument else ", ".join(parameter.opts)
    has_default = not is_argument and parameter.default is not None and parameter.default is not False
    default = f" Default: `{parameter.default}`." if has_default else ""
    return f"- `{names}`: {parameter.help}{default}"


if __name__ == "__main__":
    sys.stdout.write(reference())
