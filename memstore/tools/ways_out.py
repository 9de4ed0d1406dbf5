"""What to type after a fault: a line under the error that says what is safe, and names the next command."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from memstore.errors import DamagedError, MemoryInUse, MemstoreError, ReadOnlyMemory, StoreFull
from memstore.memory.trace_file import NAME as TRACES
from memstore.tools.options import on_disk
from memstore.tools.verify import ONLY_A_COPY

_AGAIN = "type the same command again"


def with_way_out(error: Exception, arguments: Sequence[str]) -> Exception:
    """The error with that line, where one of ``arguments`` is the memory that it is about.

    Where only a copy helps, or the fault is in the traces, the error says so itself.
    """
    memories = [each for each in arguments[1:] if on_disk(each)]
    named = [each for each in memories if each.startswith("zarr+") or each.removeprefix("zarr:") in str(error)]
    if isinstance(error, StoreFull):
        named = named or memories  # a limit says what it is, not whose
    match error:
        case DamagedError() if memories and not _said(error):
            return DamagedError(f"{error}\n{_damaged(memories[0])}")
        case MemoryInUse() | ReadOnlyMemory() | StoreFull() if named:
            return type(error)(f"{error}\n{_refused(error, quote(named[-1]))}")
    return error


def _said(error: DamagedError) -> bool:
    return any(words in str(error) for words in ("memstore repair", ONLY_A_COPY, TRACES))


def _damaged(memory: str) -> str:
    quoted = quote(memory)
    return f"The rest is as it was. What is wrong: memstore verify {quoted}; to put it right: memstore repair {quoted}"


def _refused(error: MemstoreError, memory: str) -> str:
    """What to do where nothing is damaged; ``memory`` is quoted."""
    match error:
        case MemoryInUse():
            return (
                f"Nothing was changed here. Reading goes on, such as: memstore ls {memory}; when it is free, {_AGAIN}"
            )
        case ReadOnlyMemory():
            return (
                f"Nothing was changed. A copy that can be written: memstore copy {memory} NEW; to write here, get the "
                f"right to do so, and {_AGAIN}"
            )
    more = f"limit {memory} --max-bytes MORE" if "limit of" in str(error) else f"compact {memory}"
    return f"To make room: memstore forget {memory} DOCUMENT; memstore {more}; then {_AGAIN}"
