"""What the page may change, with ``--allow-write``: pins, whole documents, traces. Nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument
from memstore.memory import open_memory
from memstore.tools.inspector.data import document_of

if TYPE_CHECKING:
    from memstore.memory import Memory


# The page reads with mode "r", and a change opens the memory for that moment alone: a page that held the lock would
# keep models from reading texts into the memory for as long as a tab is open.
def pin(memory: Memory, asked: Mapping[str, Any]) -> None:
    """Pin a document."""
    memory.document(_name(memory, asked)).pin()


def unpin(memory: Memory, asked: Mapping[str, Any]) -> None:
    """Undo ``pin``."""
    memory.document(_name(memory, asked)).unpin()


def forget(memory: Memory, asked: Mapping[str, Any]) -> None:
    """Forget a document."""
    memory.forget(_name(memory, asked))


def remove_trace(memory: Memory, asked: Mapping[str, Any]) -> None:
    """Remove a trace."""
    memory.traces.remove(_number(asked, "trace"))


ACTIONS: dict[str, Callable[[Memory, Mapping[str, Any]], None]] = {
    "pin": pin,
    "unpin": unpin,
    "forget": forget,
    "remove-trace": remove_trace,
}


def change(url: str, action: str, asked: Mapping[str, Any]) -> None:
    """Do one of ``ACTIONS``; ``asked`` names its ``document`` or ``trace`` by number.

    The memory is open for writing for this moment alone, so that another process can write at all other times. Raises
    ``InvalidArgument``, ``NotFound``, ``MemoryInUse``, ``ReadOnlyMemory``.
    """
    if action not in ACTIONS:
        raise InvalidArgument(f"there is no action {action!r}; there are {', '.join(ACTIONS)}.")
    with open_memory(url, host_bytes=0) as memory:
        ACTIONS[action](memory, asked)


def _name(memory: Memory, asked: Mapping[str, Any]) -> str:
    return document_of(memory, _number(asked, "document")).name


def _number(asked: Mapping[str, Any], what: str) -> int:
    number = asked.get(what)
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidArgument(f"name the {what} by its number, not {number!r}.")
    return number
