"""Write the pages that come from the code: ``python -m tests.tools.reference`` (``make docs``)."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

import memstore
from memstore.tools.app import command_line
from memstore.tools.verb import EXIT_CODES

DOCS = Path(__file__).parents[2] / "docs"

CLI = """\
# The command `memstore`

Written by `make docs` from the command itself. Every verb prints tables on a terminal, plain text elsewhere,
and one JSON object with `--json`.

| environment variable | effect |
|---|---|
| `MEMSTORE_CACHE` | folder for fetched models and compiled C code. Default: the user's cache directory. |
| `MEMSTORE_NATIVE=0` | compiles no C code |
| `MEMSTORE_RESIDENT=off` | answers `ask` and `chat` without a resident process |
| `MEMSTORE_KEY_FILE` | key file of encrypted memories |
| `MEMSTORE_DEBUG=1` | prints the traceback of an unexpected error too |
"""

API = """\
# Python

Written by `make docs` from the docstrings. Everything here is a name of `memstore`, except
[what to build on](#to-build-on), which is imported under the name given there. Start from the programs in
[howto.md](howto.md).
Layers and kernels have their own packages: `memstore.attention`, `memstore.kernels`.
"""
FUNCTIONS = ("attach", "open", "read_many", "copy")
CLASSES = ("Reader", "Memory", "Document", "Retrieval", "MemorySpec", "Fingerprint")

BUILD_ON = (
    "memstore.store:BlockStore", "memstore.index:VectorIndex", "memstore.readers.kinds:Kind",
    "memstore.readers.reader:Reader", "memstore.memory:LayerView", "memstore.readers.observer:Observer",
    "memstore.readers.observer:Choice", "memstore.memory.trace_file:Look",
    "memstore.readers.asking:Answer", "memstore.testing.stores:StoreTests", "memstore.testing.stores:StoreMachine",
    "memstore.testing.indexes:IndexTests", "memstore.testing.readers:ReaderTests",
    "memstore.models.drt:DRTForCausalLM", "memstore.models.drt:SharedBlocks",
    "memstore.models.landmark:LandmarkForCausalLM", "memstore.models.landmark:make_landmark",
    "memstore.models.hils:HilsForCausalLM", "memstore.models.hils:make_hils",
    "memstore.models.memorizing:MemorizingForCausalLM", "memstore.models.memorizing:add_knn_memory",
    "memstore.models.memorizing:load_knn_memory",
)  # fmt: skip
"""What pages tell people to subclass, train or call, beside the names of ``memstore`` itself."""
CALLED = ("Answer", "LayerView", "Observer")
"""Those whose methods people call, and do not write."""


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
        parts += [f"## {name}\n", _prose(inspect.getdoc(kind) or "", _fields(kind))]
        ours = [vars(base) for base in reversed(kind.__mro__) if base.__module__.startswith("memstore.")]
        for member, what in sorted({name: what for names in ours for name, what in names.items()}.items()):
            if not member.startswith("_") and (inspect.isfunction(what) or isinstance(what, property)):
                parts += _member(member, what)
    parts.append("## To build on\n")
    for each in BUILD_ON:
        parts += _to_build_on(*each.split(":"))
    parts.append("## Errors\n")
    parts.append("Each is a `MemstoreError` and the built-in class that fits. It has `code`, `memory` and `remedy`.\n")
    for name in sorted(memstore.__all__):
        kind = getattr(memstore, name)
        if isinstance(kind, type) and issubclass(kind, memstore.MemstoreError):
            parts.append(f"- `{name}` (`{kind.code}`): {(inspect.getdoc(kind) or '').splitlines()[0]}")
    return "\n".join(parts) + "\n"


def _fields(kind: Any) -> dict[str, str]:
    """Of a dataclass: the name of a field -> its type and its default."""
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        words = "" if default is dataclasses.MISSING else f" = {default!r}"
        found[field.name] = f"{_type(hints[field.name])}{words}"
    return found


def _annotations(kind: Any) -> dict[str, str]:
    """Name of a class's own attribute -> its type as it is written, and its default if it has one."""
    return {
        name: re.sub(r"ClassVar\[(.*)\]", r"\1", hint) + (f" = {vars(kind)[name]!r}" if name in vars(kind) else "")
        for name, hint in inspect.get_annotations(kind).items()
    }


def _words(kind: Any) -> dict[str, str]:
    """Name of a field -> the string below it, behind a colon."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    found = {}
    for field, below in itertools.pairwise(typing.cast("ast.ClassDef", tree).body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = ": " + " ".join(str(below.value.value).replace("``", "`").split())
    return found


def _type(hint: Any) -> str:
    """As it is written; of a choice, the values."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(repr(each) for each in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(_type(each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is np.ndarray:
        return "ndarray"
    return "None" if hint is type(None) else re.sub(r"\b(\w+\.)+", "", inspect.formatannotation(hint))


def _to_build_on(module: str, name: str) -> Iterator[str]:
    """A class with what a subclass has to give, or a function."""
    what: Any = resolve_name(f"{module}:{name}")
    yield f"### {name}\n"
    yield f"    from {module} import {name}\n"
    if inspect.isfunction(what):
        yield from _function(name, what)
        return
    doc, fields = inspect.getdoc(what) or "", _fields(what)
    yield _prose(doc, fields)
    if "Attributes:" not in doc:
        words = _words(what)
        fields = fields or {field: hint for field, hint in _annotations(what).items() if field in words}
        if fields:
            yield "".join(f"- `{field}: {hint}`{words.get(field, '')}\n" for field, hint in fields.items())
    members = sorted(getattr(what, "__abstractmethods__", ()))
    if name in CALLED:
        members = sorted(member for member in vars(what) if not member.startswith("_") and member not in fields)
    for member in members:
        method = inspect.getattr_static(what, member)
        if isinstance(method, property):
            yield f"    {member}\n"
            yield _prose(inspect.getdoc(method) or "")
        else:
            yield from _function(member, method)


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


def _prose(doc: str, fields: dict[str, str] | None = None) -> str:
    """A docstring as Markdown: lists of arguments and errors become lists, double ticks single ones.

    Where it lists ``fields``, their types and defaults stand there too.
    """
    lines: list[str] = []
    listing = False
    for line in doc.replace("``", "`").split("\n"):
        if head := re.fullmatch(r"((Args|Attributes|Raises|Returns|Yields)\b.*):", line):
            listing = head[2] not in ("Returns", "Yields")
            lines += [line, ""]
        elif listing and (entry := re.fullmatch(r"    (\**\w[\w.]*): (.*)", line)):
            kind = (fields or {}).get(entry[1])
            lines.append(f"- `{entry[1]}{f': {kind}' if kind else ''}`: {entry[2]}")
        elif listing and line.startswith("        "):
            lines[-1] += f" {line.strip()}"
        else:
            listing = listing and not line
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    for page, content in pages().items():
        (DOCS / page).write_text(content, encoding="utf-8")
