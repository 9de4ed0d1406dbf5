"""Room on the disk: looked for before a commit, and kept for deleting.

LMDB needs new pages also to delete: it never overwrites those of the last commit. On a disk that others have filled a
memory could then not even be made smaller. So a file beside the data, ``reserve``, holds some space; it is given up for
a batch that deletes, and taken back after it.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from memstore.errors import MemstoreError, NotAMemory
from memstore.store import paths

RESERVE_NAME = "reserve"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers that say that there is no room."""

_LEAST, _MOST = 256 << 10, 64 << 20  # bytes
_PAGE_BYTES = 4096
_SHARE = 256  # of what the values take; a deleted page of 4 KiB is noted with 8 bytes


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


def shortage(code: int | None, folder: Path) -> MemstoreError | None:
    """The error for an error number that says that this process lacks something, and nothing of the disk; else None."""
    match code:
        case errno.EMFILE | errno.ENFILE:
            what, remedy = "too many files are open", "close some, or raise the limit (ulimit -n)"
        case errno.ENOMEM:
            what, remedy = "the system gives no more memory", "end other processes, or raise the limit (ulimit -v)"
        case _:
            return None
    return MemstoreError(
        f"memory {folder} cannot be used now: {what} in this process or on this machine. Nothing is damaged; {remedy}, "
        "and try again",
        memory=folder,
    )


def _allocate(handle: int, nbytes: int) -> None:
    """Give a file disk space, as much as there is of ``nbytes``."""
    while nbytes >= _PAGE_BYTES:
        try:
            os.posix_fallocate(handle, 0, nbytes)
        except OSError:
            nbytes = nbytes * 7 // 8
        else:
            return


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write to the file system of ``folder``, a quota included where it says so."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize
