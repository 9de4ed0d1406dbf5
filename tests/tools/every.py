"""Every verb of the command line, with arguments that it can be called with: found by walking the application.

A new verb is covered by itself if its arguments have names that are known here; otherwise the tests say what to add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memstore.tools.app import command_line

FILLED = {
    "MEMORY": "{memory}",
    "MEMORY...": "{memory}",
    "[OTHER]": "{memory}",
    "SOURCE": "{memory}",
    "DOCUMENT": "whale",
    "NAME": "draft",
    "BLOCK": "0",
    "QUESTION": "Call me",
    "TEXT...": "{text}",
    "TARGET": "{tmp}/target.mem",
    "OUT": "{tmp}/out",
    "FOLDER": "{export}",
    "SHELL": "bash",
    "MODEL": "smollm2",
    "KIND": "similarity",
    "[NUMBER]": "1",
    "NEW_KEY_FILE": "{key}",
}
"""What to give for an argument, by its metavar."""
OPTIONS = {"--after": "30d", "--out": "{tmp}/picture.png"}
"""What to give for an option that a verb cannot do without."""
MORE = {
    "search": ["--block", "whale:0"],
    "read": ["--model", "{model}", "--dtype", "float32", "--document", "again"],
    "diff": ["--documents", "whale", "whale"],
    "rekey": ["--key-file", "{key}"],
}
"""What a verb needs beside that."""
INSTEAD = {"import": {"MEMORY": "{tmp}/imported.mem"}, "rekey": {"MEMORY": "{encrypted}"}}
"""Where a metavar means something else."""
LONG = ("chat", "demo", "train", "eval", "mcp", "serve", "view")
"""Verbs that take minutes, or do not end by themselves: of these the help is asked for."""
MAKES = {"chat": "MEMORY", "mcp": "MEMORY", "read": "MEMORY", "import": "MEMORY"}
"""Verbs that make their memory where there is none."""


def commands() -> dict[str, Any]:
    """Every verb by its words."""

    def walk(group: Any, before: str) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, f"{before}{name} ")
            else:
                yield f"{before}{name}", command

    return dict(walk(command_line(), ""))


COMMANDS = commands()
VERBS = sorted(COMMANDS)


def arguments(verb: str) -> list[Any]:
    """The arguments of a verb, as typer knows them."""
    return [each for each in COMMANDS[verb].params if each.param_type_name == "argument"]


def is_long(verb: str) -> bool:
    """Whether nobody would wait for it in a test."""
    return verb.split()[0] in LONG


def call(verb: str, names: Mapping[str, object], **instead: str) -> list[str]:
    """A call of ``verb`` that works; ``instead`` are other values for metavars, with which it is to fail at once."""
    if is_long(verb) and not instead:
        return [*verb.split(), "--help"]
    filled, words = FILLED | INSTEAD.get(verb, {}) | instead, verb.split()
    for argument in arguments(verb):
        if argument.metavar == "[TEXT]":  # of a search, which a block is enough for
            continue
        assert argument.metavar in filled, f"{verb} has a new argument {argument.metavar}: say in every.py what to give"
        words.append(filled[argument.metavar])
    for option in COMMANDS[verb].params:
        if option.param_type_name == "option" and option.required:
            name = option.opts[0]
            assert name in OPTIONS, f"{verb} has a new required option {name}: say in every.py what to give"
            words += [name, OPTIONS[name]]
    return [word.format(**names) for word in [*words, *MORE.get(verb, [])]]


def memory_argument(verb: str) -> str | None:
    """The metavar of the memory that a verb looks into, which must exist; None where it needs none."""
    named = [each.metavar for each in arguments(verb) if each.metavar in ("MEMORY", "SOURCE")]
    return None if not named or MAKES.get(verb) == named[0] else str(named[0])


def takes_document(verb: str) -> list[str] | None:
    """What names a document that is not there to a verb; None where it does not look for one."""
    if verb in MAKES or memory_argument(verb) is None:
        return None
    if any(each.metavar == "DOCUMENT" for each in arguments(verb)):
        return []
    names = [name for each in COMMANDS[verb].params for name in getattr(each, "opts", [])]
    return ["--document", "harpoon"] if "--document" in names else None
