"""The right to write a memory, which one process holds.

The lock is the operating system's, so it is gone when its process is, however it died. ``writer.json`` is only there to
be read by people and error messages; nothing depends on it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from memstore import paths, stored
from memstore.errors import DamagedError, MemoryInUse, ReadOnlyMemory

LOCK_NAME = "writer.lock"
HOLDER_NAME = "writer.json"
RESERVE_NAME = "reserve"

_MOST_TOLD = 4096  # bytes
_HOLDER = stored.table(pid=stored.whole(), command=stored.text(_MOST_TOLD), started=stored.text(64))


class WriterLock:
    """The right to write one memory, held from construction to ``release``.

    Raises ``MemoryInUse``, which names the process that holds it, or ``ReadOnlyMemory``.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._holder = folder / HOLDER_NAME
        # Before the lock, whose file is emptied when it is opened.
        paths.check_single(folder, LOCK_NAME, "data.mdb", "lock.mdb", RESERVE_NAME)
        self._lock = FileLock(folder / LOCK_NAME, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            if not _is_soft(self._lock):
                raise MemoryInUse(_in_use(folder), memory=folder) from None
        except OSError as error:
            if short := paths.shortage(error.errno, folder):
                raise short from error
            raise ReadOnlyMemory(
                f"memory {folder} cannot be written ({error.strerror}); open it with mode='r', or change that",
                memory=folder,
            ) from None
        # Without locks of the system filelock takes it for locked when the file is there, which it always is.
        if _is_soft(self._lock):
            self._lock.release()
            raise ReadOnlyMemory(
                f"the file system of memory {folder} has no file locks (flock), which keep two processes from "
                "writing at once; copy the memory to another disk, or open it with mode='r'",
                memory=folder,
            )
        _announce(self._holder)

    def release(self) -> None:
        """Let others write. In a forked child it does nothing: the lock is the parent's."""
        if os.getpid() != self._pid or not self._lock.is_locked:
            return
        with suppress(OSError):
            self._holder.unlink()
        self._lock.release()


def _is_soft(lock: BaseFileLock) -> bool:
    """Whether filelock has made something else of it, because ``flock`` is not there."""
    return isinstance(lock, SoftFileLock)


def _announce(holder: Path) -> None:
    """Write who we are, whole or not at all. A full disk must not keep anybody from deleting, so failure is allowed."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    words = json.dumps({"pid": os.getpid(), "command": _command_line(), "started": now})
    with suppress(OSError):
        paths.write(holder.parent, holder.name, [f"{words}\n".encode()], durable=False)


def _command_line() -> str:
    """This process's command, shortened: enough to recognise it."""
    program = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python")
    if program.name == "__main__.py":  # python -m PACKAGE
        program = program.absolute().parent
    # Of the rest no more than our verb: questions and names are not to lie in the open beside an encrypted memory.
    return " ".join([program.name, *(sys.argv[1:2] if program.name == "memstore" else [])])[:200]


def _in_use(folder: Path) -> str:
    try:
        told = stored.parse(paths.read(folder, HOLDER_NAME, _MOST_TOLD), HOLDER_NAME, _MOST_TOLD)
        facts: dict[str, Any] = stored.fit(told, _HOLDER, HOLDER_NAME)
        command = repr(facts["command"])[1:-1]  # what a terminal would obey is spelled out
        mine = " (this one)" if facts["pid"] == os.getpid() else ""
        since = datetime.fromisoformat(facts["started"]).astimezone()
        today = since.date() == datetime.now().astimezone().date()
        holder = f"process {facts['pid']}{mine} ({command}) since {since:%H:%M}"
        holder += "" if today else f" on {since:%Y-%m-%d}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, DamagedError):
        holder = "another process"
    return f"memory {folder} is being written by {holder}; wait for it; meanwhile the memory can be read"
