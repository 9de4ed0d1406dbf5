"""One writer per memory: a file lock, and a small file that says who holds it.

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

from memstore.errors import MemoryInUse, ReadOnlyMemory
from memstore.store import paths
from memstore.store.space import shortage

LOCK_NAME = "writer.lock"
HOLDER_NAME = "writer.json"


class WriterLock:
    """The right to write one memory, held from construction to ``release``.

    Raises ``MemoryInUse``, which names the process that holds it, or ``ReadOnlyMemory``.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._holder = folder / HOLDER_NAME
        self._lock = FileLock(folder / LOCK_NAME, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            if not _is_soft(self._lock):
                raise MemoryInUse(_in_use(folder), memory=folder) from None
        except OSError as error:
            if short := shortage(error.errno, folder):
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
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return " ".join([program, *sys.argv[1:]])[:200]


def _in_use(folder: Path) -> str:
    try:
        facts: dict[str, Any] = json.loads(paths.read(folder, HOLDER_NAME))
        mine = " (this one)" if facts["pid"] == os.getpid() else ""
        since = datetime.fromisoformat(facts["started"]).astimezone()
        today = since.date() == datetime.now().astimezone().date()
        holder = f"process {facts['pid']}{mine} ({facts['command']}) since {since:%H:%M}"
        holder += "" if today else f" on {since:%Y-%m-%d}"
    except (OSError, ValueError, KeyError, TypeError):
        holder = "another process"
    return f"memory {folder} is being written by {holder}; wait for it, or open with mode='r'"
