"""What a writer has: the right to write, which one process holds, and room on the disk that is kept for deleting.

The lock is the operating system's, so it is gone when its process is, however it died. ``writer.json`` is only there to
be read by people and error messages; nothing depends on it.

LMDB needs new pages also to delete: it never overwrites those of the last commit. On a disk that others have filled a
memory could then not even be made smaller. So a file beside the data, ``reserve``, holds some space; it is given up for
a batch that deletes, and taken back after it.
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

from memstore import stored
from memstore.errors import DamagedError, MemoryInUse, NotAMemory, ReadOnlyMemory
from memstore.store import paths

LOCK_NAME = "writer.lock"
HOLDER_NAME = "writer.json"
RESERVE_NAME = "reserve"

_LEAST, _MOST = 256 << 10, 64 << 20  # bytes
_MOST_TOLD = 4096  # bytes
_HOLDER = stored.table(pid=stored.whole(), command=stored.text(_MOST_TOLD), started=stored.text(64))
_PAGE_BYTES = 4096
_SHARE = 256  # of what the values take; a deleted page of 4 KiB is noted with 8 bytes


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
    return f"memory {folder} is being written by {holder}; wait for it, or open with mode='r'"


class Reserve:
    """The file ``reserve`` of a memory that this process writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes = 0

    def keep(self, used_bytes: int) -> None:
        """Make the file, or let it grow with what the values take; on a disk that is nearly full, as far as it goes."""
        wanted = min(max(_LEAST, used_bytes // _SHARE), _MOST)
        if wanted <= self._bytes:
            return
        with suppress(OSError, NotAMemory):  # a link was refused when the memory was opened
            handle = paths.open_file(self._folder, RESERVE_NAME, os.O_RDWR | os.O_CREAT)
            try:
                if os.fstat(handle).st_size < wanted:
                    _allocate(handle, min(2 * wanted, _MOST) if self._bytes else wanted)
                self._bytes = os.fstat(handle).st_size
            finally:
                os.close(handle)

    def give(self) -> bool:
        """Give the space to the file system; whether there was some."""
        self._bytes = 0
        try:
            (self._folder / RESERVE_NAME).unlink()
        except OSError:
            return False
        return True


def _allocate(handle: int, nbytes: int) -> None:
    """Give a file disk space, as much as there is of ``nbytes``."""
    while nbytes >= _PAGE_BYTES:
        try:
            os.posix_fallocate(handle, 0, nbytes)
        except OSError:
            nbytes = nbytes * 7 // 8
        else:
            return
