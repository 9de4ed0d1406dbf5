"""Every error that memstore raises on purpose, and how messages show names from outside.

All have one base class; each subclass is also the natural built-in.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from typing import ClassVar, Literal, Self

Remedy = Literal["restore", "repair", "verify", "limit"]


class MemstoreError(Exception):
    """Base of all memstore errors. The message says what was expected, what came, and what to do.

    Programs look at attributes, never at the message:

    Attributes:
        code: the kind of error, a word that stays the same, such as ``"damaged"``.
        memory: path or url of the memory that the error is about; None if it is about none, or unknown.
        remedy: ``"restore"``: only a copy helps. ``"repair"``: the message names its own command. ``"verify"``: it
            cannot be read now, but may be intact. ``"limit"``: the limit of the memory is reached, not that of the
            disk. None: see the kind of error.
    """

    code: ClassVar[str] = "failed"
    __str__ = Exception.__str__  # errors of the system would show their first argument as a number

    def __init__(self, *args: object, memory: str | PathLike[str] | None = None, remedy: Remedy | None = None) -> None:
        super().__init__(*args)
        self.memory = None if memory is None else fspath(memory)
        self.remedy = remedy

    def facts(self) -> dict[str, str]:
        """Return ``code``, and ``memory`` and ``remedy`` if they are known, for programs."""
        told = {"code": self.code, "memory": self.memory, "remedy": self.remedy}
        return {name: value for name, value in told.items() if value is not None}

    def reworded(self, message: str) -> Self:
        """Return the same error with another message."""
        return type(self)(message, memory=self.memory, remedy=self.remedy)


class InvalidArgument(MemstoreError, ValueError):
    """An argument has a value that cannot work."""

    code = "invalid"


class NotFound(MemstoreError, FileNotFoundError):
    """No such memory, document or block."""

    code = "not-found"


class NotAMemory(MemstoreError, ValueError):
    """The path exists, but it does not hold a memory."""

    code = "not-a-memory"


class ForeignMemory(MemstoreError, ValueError):
    """The memory belongs to another model, another layout or a newer format. Its states are not used."""

    code = "foreign"

    @classmethod
    def newer(cls, what: str, unknown: Iterable[str]) -> Self:
        """Return the error for ``unknown`` names, which only a newer version writes; ``what`` says what has them."""
        return cls(f"a newer memstore wrote this memory: {what} {on_one_line(unknown)}; upgrade memstore")


class WrongKey(MemstoreError, PermissionError):
    """The memory is encrypted and the key is missing or wrong; or a key was given for a memory without encryption."""

    code = "wrong-key"


class DamagedError(MemstoreError, OSError):
    """A stored value has changed since it was written, or cannot be read. None of it was used."""

    code = "damaged"


class MemoryInUse(MemstoreError, BlockingIOError):
    """Another process holds the memory for writing."""

    code = "in-use"


class ReadOnlyMemory(MemstoreError, PermissionError):
    """The memory, or its folder, cannot be written."""

    code = "read-only"

    @classmethod
    def opened(cls, memory: str | PathLike[str]) -> Self:
        """Return the error for writing to a ``memory`` that this process has open for reading."""
        return cls(f"memory {memory} is open for reading; open it with mode='a' to write", memory=memory)


class StoreFull(MemstoreError, OSError):
    """The disk or the quota is full. Everything committed before is safe."""

    code = "full"


class UnsupportedModel(MemstoreError, TypeError):
    """A memory cannot be attached to this model."""

    code = "unsupported-model"


class CancelledError(MemstoreError):
    """The work was cancelled, because nobody waits for its result. Commits made so far stay."""


class DifferentRun(MemstoreError, FileExistsError):
    """The folder holds a training run with other settings. Nothing in it was changed."""

    code = "different-run"


class TrainingDiverged(MemstoreError, ArithmeticError):
    """The loss or the weights are no longer finite; training has stopped."""

    code = "diverged"


@contextmanager
def opening(memory: str | PathLike[str]) -> Iterator[None]:
    """Let errors inside name ``memory``, whichever of its parts they name. Errors about bad arguments name none."""
    try:
        yield
    except MemstoreError as error:
        if not isinstance(error, InvalidArgument):
            error.memory = fspath(memory)
        raise


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, shortened to fit; its kind if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def printable(text: str) -> str:
    """Return foreign ``text`` with control, format and other invisible characters escaped as in Python.

    Spaces, newlines and tabs stay. The result never moves, reverses, hides or breaks the text around it, neither on a
    terminal nor on a page.
    """
    return text if text.isprintable() else "".join(c if _shows(c) else _spelled(c) for c in text)


def on_one_line(names: Iterable[str]) -> str:
    """Return foreign names, ``printable`` and on one line."""
    return ", ".join(printable(name).translate(_BREAKS) for name in sorted(names))


def _shows(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()


_BREAKS = {ord(each): _spelled(each) for each in "\n\t"}
