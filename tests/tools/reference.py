"""Write the pages that come from the code: ``python -m tests.tools.reference`` (``make docs``)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memstore
from memstore.tools.app import command_line
from memstore.tools.failures import EXIT_CODES

DOCS = Path(__file__).parents[2] / "docs"

CLI = """\
# The command `memstore`

Written by `make docs` from the command itself. Every verb prints tables on a terminal, plain text elsewhere,
and one JSON object with `--json`. Models that are fetched are kept in the user's cache directory, or in the folder
that the environment variable `MEMSTORE_CACHE` names; what a C compiler makes at the first use lies there too, and with
`MEMSTORE_NATIVE=0` nothing is compiled. `MEMSTORE_KEY_FILE` names the file of the key of encrypted memories. With
`MEMSTORE_DEBUG=1` an error that nobody expected also prints its traceback.
"""

API = """\
# Python

Written by `make docs` from the docstrings. Everything here is a name of `memstore`; [howto.md](howto.md) has programs
to start from. Models that learn to retrieve, layers and kernels have their own packages: `memstore.models`,
`memstore.attention`, `memstore.kernels`.
"""
FUNCTIONS = ("attach", "open", "read_many", "copy")
CLASSES = ("Reader", "Memory", "Document", "Retrieval", "MemorySpec", "Fingerprint")


def pages() -> dict[str, str]:
    """Name of a page -> its content."""
    return {"cli.md": cli(), "api.md": api()}


def cli() -> str:
    """The page of the command line."""
    parts = [CLI, f"{EXIT_CODES}\n"]
    for name, verb in _commands(command_line()):
        parts += _section(name, verb)
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


def api() -> str:
    """The page of the Python interface."""
    parts = [API]
    for name in FUNCTIONS:
        parts += [f"## memstore.{name}\n", *_function(name, getattr(memstore, name))]
    for name in CLASSES:
        kind: Any = getattr(memstore, name)
        parts += [f"## {name}\n", _prose(inspect.getdoc(kind) or "")]
        ours = [vars(base) for base in reversed(kind.__mro__) if base.__module__.startswith("memstore.")]
        for member, what in sorted({name: what for names in ours for name, what in names.items()}.items()):
            if not member.startswith("_") and (inspect.isfunction(what) or isinstance(what, property)):
                parts += _member(member, what)
    parts.append("## Errors\n")
    parts.append("Each is a `MemstoreError` and the built-in that fits, and has `code`, `memory` and `remedy`.\n")
    for name in sorted(memstore.__all__):
        kind = getattr(memstore, name)
        if isinstance(kind, type) and issubclass(kind, memstore.MemstoreError):
            parts.append(f"- `{name}` (`{kind.code}`): {(inspect.getdoc(kind) or '').splitlines()[0]}")
    return "\n".join(parts) + "\n"


def _member(name: str, what: Any) -> Iterator[str]:
    if isinstance(what, property):
        yield f"### .{name}\n"
        yield _prose(inspect.getdoc(what) or "")
    else:
        yield from _function(f".{name}", what, heading=f"### .{name}\n")


def _function(name: str, function: Any, heading: str = "") -> Iterator[str]:
    if heading:
        yield heading
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    shown = ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters)
    # A star stands alone before parameters that are given by name.
    stars = [each.kind for each in parameters]
    if inspect.Parameter.KEYWORD_ONLY in stars and inspect.Parameter.VAR_POSITIONAL not in stars:
        first = stars.index(inspect.Parameter.KEYWORD_ONLY)
        words = [str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters]
        shown = ", ".join([*words[:first], "*", *words[first:]])
    yield f"    {name.lstrip('.')}({shown})\n"
    yield _prose(inspect.getdoc(function) or "")


def _prose(doc: str) -> str:
    """A docstring as Markdown: lists of arguments and errors become lists, double ticks single ones."""
    lines: list[str] = []
    listing = False
    for line in doc.replace("``", "`").split("\n"):
        if head := re.fullmatch(r"((Args|Attributes|Raises|Returns|Yields)\b.*):", line):
            listing = head[2] not in ("Returns", "Yields")
            lines += [line, ""]
        elif listing and (entry := re.fullmatch(r"    (\w[\w.]*): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif listing and line.startswith("        "):
            lines[-1] += f" {line.strip()}"
        else:
            listing = listing and not line
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    for page, content in pages().items():
        (DOCS / page).write_text(content, encoding="utf-8")
