"""Erasing what deleted values have left in a data file, once nobody reads it any more: see ``pages.py``."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import lmdb

from memstore.errors import DamagedError, MemoryInUse, MemstoreError, ReadOnlyMemory
from memstore.store import lmdb_format as layout
from memstore.store import paths
from memstore.store.contract import Progress
from memstore.store.environment import DATA_NAME
from memstore.store.pages import erase_unused


def wait_for_readers(env: lmdb.Environment, folder: Path, oldest: int, patience: float) -> None:
    """Return when nobody reads a commit before ``oldest``. Raises ``MemoryInUse`` after ``patience`` seconds."""
    until = time.monotonic() + patience
    while late := _readers_before(env, oldest):
        if time.monotonic() > until:
            raise MemoryInUse(
                f"nothing was erased: process {late[0]} has been reading an older state of memory {folder} for "
                f"more than {patience:g} seconds; let it finish, then compact again",
                memory=folder,
            )
        time.sleep(0.01)
        env.reader_check()


def _readers_before(env: lmdb.Environment, oldest: int) -> list[int]:
    """Processes that read a commit before ``oldest``."""
    lines = [line.split() for line in env.readers().splitlines()]
    rows = [line for line in lines if len(line) == 3 and line[0].isdigit() and line[2].isdigit()]
    return [int(pid) for pid, _, commit in rows if int(commit) < oldest]


def check_known(folder: Path) -> None:
    """Raise ``MemstoreError`` where the LMDB in use may lay out its pages in another way than is known here."""
    if not layout.is_known():
        raise MemstoreError(
            f"memory {folder} was not compacted: this is LMDB {layout.version()}, and only the pages of LMDB 0.9 are "
            "known well enough to erase in them. Nothing was erased; a copy of the memory leaves behind what "
            "was deleted",
            memory=folder,
        )


def erase(folder: Path, progress: Progress | None) -> None:
    """Erase, and give the space back. Nothing may write meanwhile. Raises ``ReadOnlyMemory`` or ``DamagedError``."""
    try:
        handle = paths.open_file(folder, DATA_NAME, os.O_RDWR)
        try:
            erase_unused(handle, progress)
        finally:
            os.close(handle)
    except OSError as error:
        if isinstance(error, DamagedError):
            raise
        kept = "what is stored is whole, but bytes of what was deleted are still in the file"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ReadOnlyMemory(
                f"memory {folder} may not be written to any more ({error.strerror}); {kept}. Give the right back, then "
                "compact again",
                memory=folder,
            ) from error
        raise DamagedError(
            f"memory {folder} could not be compacted ({error.strerror}); {kept}. Check the disk, then compact again"
        ) from error
