"""LMDB environments of this process, and the lock that lets one process write a memory.

An environment is opened once per memory, shared by every store on it, and never used across a fork. LMDB's locks belong
to the process and are lost when *any* descriptor of ``lock.mdb`` in it is closed. So an environment must not be opened
twice, and only LMDB opens that file.

Touching a page of the map that is not in memory stops the thread until the disk has read it, one page at a time. If a
page cannot be read, the process ends (a bus error). If the system allows it, pages are requested beforehand, which
avoids both.

The operating system holds the writer's lock, so it ends with its process, however that died. ``writer.json`` only
serves people and error messages; nothing depends on it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import lmdb
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from memstore import json_checks, paths
from memstore.errors import (
    DamagedError,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    NotFound,
    ReadOnlyMemory,
    StoreFull,
)
from memstore.paths import FULL, free_bytes, shortage
from memstore.store.encryption_keys import KEYS_NAME, keys_of_documents
from memstore.store.lmdb import pages
from memstore.store.records import MAGIC

DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"
WRITER_NAME = "writer.lock"
HOLDER_NAME = "writer.json"
RESERVE_NAME = "reserve"
MANY_MAPS = 64
"""With this many open memories, address space may have run out: x86-64 gives a process 128 TiB."""
MAP_BYTES = 1 << 40
"""Size of the map: address space, not memory or disk. The same for all, because it must not change while others read.
"""

_WILL_NEED = 3
_POPULATE_READ = 22  # Linux 5.14; touches pages like a read, and reports an error where a read would crash
_IO_ERRORS = (errno.EFAULT, errno.EIO)
_WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # some systems count only for the whole process

_OWN_NAMES = (
    DATA_NAME,
    LOCK_NAME,
    WRITER_NAME,
    HOLDER_NAME,
    f".{HOLDER_NAME}",
    RESERVE_NAME,
    KEYS_NAME,
    f".{KEYS_NAME}",
)  # and these names with a suffix, while being made
_FIRST_PAGES = 2 * 4096  # bytes; a data file appears with its two meta pages, so a shorter one is truncated
_LOCK_FILE_BYTES = 64 * 1024  # room for about 1,000 read transactions at once

_ATTEMPTS = 5  # to check a tree that a writer changes
_LOOK_BYTES = 4 << 20  # the first commit put a record there, and later ones reuse its pages

_MOST_TOLD = 4096  # bytes
_HOLDER = json_checks.table(pid=json_checks.whole(), command=json_checks.text(_MOST_TOLD), started=json_checks.text(64))


@dataclass
class Environment:
    """An open LMDB environment; ``users`` counts the stores that share it, and those that use it ``with`` them.

    Closing it while another thread copies from its pages would be a segmentation fault: the last user closes it.
    """

    folder: Path
    env: lmdb.Environment
    key: tuple[int, int, int]
    read_only: bool
    data_file: int
    """A descriptor for reading the data file; it is closed with the environment."""
    users: int = 1
    _length: int = 0

    def __enter__(self) -> None:
        """Raises ``lmdb.Error`` if it is closed, ``DamagedError`` if the file was truncated."""
        with _guard:
            if not self.users:
                raise lmdb.Error("the environment is closed")
            self.users += 1
        try:
            self._check_length()
        except BaseException:
            self.release()
            raise

    def release(self, *_: object) -> None:
        """Release one use; the last one closes it. In a fork it belongs to the parent and is left alone."""
        with _guard:
            self.users -= 1
            if self.users == 0 and self.key[2] == os.getpid():
                self.env.close()
                os.close(self.data_file)
                del _open[self.key]

    __exit__ = release

    def check_process(self) -> None:
        """Raise ``MemoryInUse`` in a process forked after the opening."""
        if self.key[2] != os.getpid():
            raise _forked(self.folder, self.key[2])

    def _check_length(self) -> None:
        before = self._length  # read first, because another thread may raise it now
        length = os.lseek(self.data_file, 0, os.SEEK_END)  # a third of the time of fstat: every read comes here
        if length < before:  # LMDB never shortens it
            raise _truncated(self.folder / DATA_NAME, f"it has only {length} of {before} bytes")
        if length > before:
            _check_length(self.env, self.folder / DATA_NAME, self.data_file)
            self._length = length


# A parent's entries stay untouched in its forks: closing one there would free the parent's reader slot.
_open: dict[tuple[int, int, int], Environment] = {}
_guard = threading.RLock()  # a store may be collected, and released, while this thread holds it
# Every read takes it: without this, a fork during that of another thread would wait for it for ever.
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)


def acquire(folder: Path, *, create: bool = False) -> Environment:
    """Open the environment in ``folder``, or share the open one of this process.

    Without ``create`` its file must exist. Raises ``NotFound`` (it is missing, or was never finished), ``NotAMemory``,
    ``DamagedError``, ``ReadOnlyMemory`` or ``InvalidArgument``.
    """
    with _guard:
        data = folder / DATA_NAME
        if create:
            _prepare(data)
        key = _identity(data)
        if key in _open:
            _open[key].users += 1
            return _open[key]
        for other in list(_open):
            if other[:2] == key[:2]:
                raise _forked(folder, other[2])
        env, file = _open_lmdb(folder), -1
        try:
            file = paths.open_file(folder, DATA_NAME, os.O_RDONLY)
            # LMDB opens by path and follows links. If the file differs from before, it was replaced meanwhile.
            if _identity(data) != key or (paths.find(folder / LOCK_NAME) is None and env.flags()["lock"]):
                raise NotAMemory(
                    f"the files of {folder} were replaced while they were opened; nothing was used. Open the memory "
                    "again"
                )
            _check_length(env, data, file, fill=True)
        except BaseException as error:
            env.close()
            if file >= 0:
                os.close(file)
            if isinstance(error, OSError) and (short := shortage(error.errno, folder)):
                raise short from error
            raise
        _open[key] = Environment(folder, env, key, env.flags()["readonly"], file)
        return _open[key]


def _forked(folder: Path, parent: int) -> MemoryInUse:
    return MemoryInUse(
        f"memory {folder} was opened by process {parent}, which then forked into this process, {os.getpid()}. "
        "LMDB cannot be used across a fork: open the memory after forking, or start processes with the 'spawn' "
        "method",
        memory=folder,
    )


def _prepare(data: Path) -> None:
    """Make the files of a new environment, if they are missing."""
    try:
        # With its first pages: so a shorter file never comes from an interrupted creation, it is a truncated memory.
        _make_whole(data, lambda part, _: lmdb.open(str(part), map_size=MAP_BYTES, subdir=False, lock=False).close())
        # With its space: on a full disk a sparse page of the map would be a bus error.
        _make_whole(data.parent / LOCK_NAME, lambda _, handle: os.posix_fallocate(handle, 0, _LOCK_FILE_BYTES))
    except lmdb.Error as error:
        raise translate(error, data.parent) from error
    except OSError as error:
        if error.errno in FULL:
            raise full(data.parent, str(error)) from error
        if short := shortage(error.errno, data.parent):
            raise short from error
        raise ReadOnlyMemory(f"memory {data.parent} cannot be created ({error}); choose another folder") from None


def _make_whole(file: Path, fill: Callable[[Path, int], None]) -> None:
    """Make a file if it is missing. It appears under its name with what ``fill`` wrote, on disk, or not at all."""
    if paths.find(file):
        return
    part = paths.part_of(file)
    handle = paths.new_file(part)
    try:
        fill(part, handle)
        os.fsync(handle)
        with suppress(FileExistsError):
            os.link(part, file)
    finally:
        os.close(handle)
        part.unlink()


def _identity(data: Path) -> tuple[int, int, int]:
    """Identify the data file and this process; a path is not enough, because a folder may be deleted and made again."""
    try:
        facts = paths.find(data)
    except PermissionError:
        raise ReadOnlyMemory(
            f"{data.parent} cannot be entered: permission denied. Change the permissions of the folder",
            memory=data.parent,
        ) from None
    except OSError as error:  # a name that is too long, or a cycle of links
        raise InvalidArgument(f"{data.parent} cannot be the path of a memory: {error.strerror}") from None
    if facts is None:
        if not data.parent.exists():
            raise NotFound(
                f"there is no memory at {data.parent}: check the path, or create one (memstore read TEXT MEMORY)"
            )
        if data.parent.is_dir() and not any(data.parent.iterdir()):
            raise NotFound(
                f"{data.parent} is an empty folder, not a memory: check the path, or create one (memstore read "
                "TEXT MEMORY)"
            )
        check_not_lost(data.parent)
        if data.parent.is_dir() and not strangers(data.parent):
            raise unfinished(data.parent)
        found = f"it has no {DATA_NAME}" if data.parent.is_dir() else "it is a file. A text comes before its memory"
        raise NotAMemory(f"{data.parent} is not a memory: {found}. Check the path")
    if facts.st_size < _FIRST_PAGES:
        raise _truncated(data, f"it has only {facts.st_size} bytes")
    return facts.st_dev, facts.st_ino, os.getpid()


def strangers(folder: Path) -> list[str]:
    """Return names in ``folder`` that belong neither to a memory nor to an interrupted creation."""
    return sorted(file.name for file in folder.iterdir() if not file.name.startswith(_OWN_NAMES))


def check_exists(folder: Path) -> None:
    """Raise ``NotFound`` or ``NotAMemory`` unless the folder has the data of a memory; touch nothing.

    Raises ``NotAMemory`` also if one of our names leads out of the folder, see ``paths.py``.
    """
    _identity(folder / DATA_NAME)
    paths.check_names(folder)


def check_not_lost(folder: Path) -> None:
    """Raise ``DamagedError`` if a memory has lost its data file: a new one must not replace it."""
    # The data file is made before the reserve, so no interrupted creation leaves this: it is a half-copied folder.
    if not (folder / DATA_NAME).exists() and ((folder / RESERVE_NAME).exists() or keys_of_documents(folder)):
        raise DamagedError(
            f"memory {folder} has lost its {DATA_NAME}: it was deleted, or not copied. Nothing was changed; "
            "restore it from a copy, or delete the folder to start again",
            memory=folder,
            remedy="restore",
        )


def looks_like_ours(folder: Path) -> bool:
    """Return whether the data file starts with a record of ours or with nothing; for files with a damaged tree."""
    with os.fdopen(paths.open_file(folder, DATA_NAME, os.O_RDONLY), "rb") as data:
        start = data.read(_LOOK_BYTES)[_FIRST_PAGES:]
        return MAGIC in start or not any(start)


def unfinished(folder: Path) -> NotFound:
    """Return the error for a memory whose creation was interrupted: it is still empty."""
    return NotFound(f"the creation of memory {folder} was interrupted, so it is empty; create it again")


def _open_lmdb(folder: Path) -> lmdb.Environment:
    # Opened for writing if possible, because a store that writes may have to share it later. If even the lock file is
    # not writable, readers take no lock. A writer of another user could then reuse pages during a read, which the
    # checksums detect. Readers do not write files that also have another name, as in a backup or somebody's own copy.
    files = [folder / DATA_NAME, folder / LOCK_NAME]
    single = all(map(paths.is_single, files))
    writable = (
        single and os.access(folder, os.W_OK) and all(os.access(file, os.W_OK) for file in files if file.exists())
    )
    read_only_lock = not single or (not writable and not os.access(files[1], os.W_OK))
    try:
        # One database without a name: opening a named one writes, and a reader would wait for the writer.
        return lmdb.open(
            str(folder),
            map_size=MAP_BYTES,
            readonly=not writable,
            lock=not read_only_lock,
            create=False,
            mode=paths.RIGHTS,
        )
    except lmdb.Error as error:
        raise translate(error, folder) from error


def _check_length(env: lmdb.Environment, data: Path, file: int, *, fill: bool = False) -> None:
    """Refuse a truncated data file: a missing page would be a bus error. ``fill`` adds pages that LMDB left out."""
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    length = os.fstat(file).st_size
    if length + pages.UNWRITTEN_BYTES < needed:
        raise _truncated(data, f"it has only {length} of {needed} bytes")
    if fill and length < needed and not env.flags()["readonly"]:
        with suppress(OSError), os.fdopen(paths.open_file(data.parent, data.name, os.O_RDWR), "r+b") as whole:
            os.posix_fallocate(whole.fileno(), length, needed - length)  # never shortens, even while others write


def _truncated(data: Path, what: str) -> DamagedError:
    return DamagedError(
        f"{data} was truncated: {what}. Nothing was read from it; restore it from a copy",
        memory=data.parent,
        remedy="restore",
    )


def tree_problem(
    env: lmdb.Environment, folder: Path, key_bytes: int, checks: Callable[[Any], int | None], *, large: bool = False
) -> str | None:
    """Return what is wrong with the pages that lead to the values, or None; see ``pages.py``.

    ``checks`` reads in a transaction the expected sum of the last four bytes of all keys; None if unknown. ``large``
    also checks a page of each large value.
    """
    for _ in range(_ATTEMPTS):
        with env.begin() as txn:
            transaction = txn.id()
            try:
                data, page_bytes = folder / DATA_NAME, env.stat()["psize"]
                what, found = pages.survey(data, transaction, page_bytes, key_bytes, large=large)
            except OSError as error:
                raise shortage(error.errno, folder) or DamagedError(
                    f"{folder / DATA_NAME} cannot be read ({error.strerror}); check the disk", memory=folder
                ) from error
            if found is not None and checks(txn) not in (None, found):
                what = "they lead to other values than the last commit wrote"
        # A writer can overtake a reader that has no lock; then the check is repeated.
        with env.begin() as txn:
            if what is None or txn.id() == transaction:
                return what
    return None


def translate(error: lmdb.Error, folder: Path) -> MemstoreError:
    """Translate an LMDB error into an error of ours that says what it means for a memory."""
    match error:
        case lmdb.MapFullError() | lmdb.TxnFullError() | lmdb.DiskError():
            return full(folder, str(error))
        case lmdb.MemoryError() if len(_open) >= MANY_MAPS:
            return InvalidArgument(
                f"memory {folder} cannot be mapped: {len(_open)} memories are open in this process. Each takes "
                f"{MAP_BYTES >> 40} TiB of addresses, and a process has 128 TiB; close some"
            )
        case lmdb.MemoryError():
            return InvalidArgument(
                f"LMDB cannot map memory {folder}, because the address space is limited ({error}). It needs "
                f"{MAP_BYTES >> 40} TiB of addresses, which take no memory. Raise the limit (ulimit -v unlimited)"
            )
        case lmdb.MapResizedError():
            return InvalidArgument(
                f"memory {folder} is larger than the {MAP_BYTES >> 40} TiB that this memstore can map; upgrade memstore"
            )
        case lmdb.ReadersFullError():
            return MemoryInUse(
                f"memory {folder} has too many readers at once ({error}); close some of them", memory=folder
            )
    if error.code in FULL:
        return full(folder, str(error))
    if short := shortage(error.code, folder):
        return short
    return DamagedError(
        f"memory {folder} is damaged, or its disk fails: {error}. Run verify, or restore the memory from a copy"
    )


def failure(error: lmdb.Error, folder: Path, needed: int) -> MemstoreError:
    """Translate an error of a transaction that needed to write ``needed`` bytes, 0 if it only reads."""
    # LMDB reports an incomplete write as EIO, and a nearly full disk causes incomplete writes.
    if needed and error.code == errno.EIO and not has_room(folder, needed):
        return full(folder, "the disk stored only a part of it")
    return translate(error, folder)


def full(folder: Path, why: str) -> StoreFull:
    """Return the error for a batch that does not fit on the disk."""
    return StoreFull(
        f"there is no room for this batch in memory {folder} ({why}). Nothing of the batch was stored; earlier "
        "commits are intact. Free some space, or forget documents, and try again",
        memory=folder,
    )


def check_room(folder: Path, needed: int, used: int) -> None:
    """Raise ``StoreFull`` before writing, if free space and the file's own space show that it will not fit.

    ``needed`` is the number of bytes to write, ``used`` the number that the values take.
    """
    try:
        free = free_bytes(folder)
        spare = (folder / DATA_NAME).stat().st_blocks * 512 - used
    except OSError:
        return  # then LMDB raises the error
    if needed > free + max(spare, 0):
        raise full(folder, f"it needs {needed:,} bytes, but the disk has {free:,}")


def has_room(folder: Path, nbytes: int) -> bool:
    """Return whether a file in ``folder`` can grow by ``nbytes``: disk, quota, and file size limit of the process."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and (folder / DATA_NAME).stat().st_size + nbytes > limit:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, nbytes)
    except OSError:
        return False
    return True


def make_folder(folder: Path) -> Path:
    """Make the folder, or accept one that is empty or holds the remains of an interrupted creation.

    Raises ``NotAMemory``, ``ReadOnlyMemory``, or ``DamagedError`` if the data of a memory is missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = strangers(folder)
    except (FileExistsError, NotADirectoryError):
        what = "a broken link" if folder.is_symlink() and not folder.exists() else "a file"
        raise NotAMemory(f"{folder} is {what}; a memory is a folder. Choose another path") from None
    except OSError as error:
        raise ReadOnlyMemory(f"memory {folder} cannot be created ({error.strerror}); choose another folder") from None
    if strange:
        raise NotAMemory(f"{folder} is not empty (it contains {strange[0]}); choose an empty folder for the memory")
    paths.check_names(folder)
    check_not_lost(folder)
    return folder


def allocated(path: Path) -> int:
    """Return the bytes of a file on disk; 0 for anything else, and for files deleted since they were listed."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return 0
    return facts.st_blocks * 512 if stat.S_ISREG(facts.st_mode) else 0


def _find_madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _find_madvise()


class _Waits(threading.local):
    waits = 0


_so_far = _Waits()


def will_need(address: int, length: int) -> None:
    """Start reading ``length`` bytes of a map into memory, without waiting for them."""
    _advise(address, length, _WILL_NEED)


def bring(address: int, length: int) -> bool:
    """Wait without the interpreter lock until ``length`` bytes of a map are in memory; False if the disk fails.

    On systems without such a call, return True at once; the pages are then read when they are touched.
    """
    return _advise(address, length, _POPULATE_READ) not in _IO_ERRORS


def waited() -> bool:
    """Return whether this thread has used the disk, or waited for it, since the last call."""
    usage = resource.getrusage(_WHOSE)
    before, _so_far.waits = _so_far.waits, usage.ru_majflt + usage.ru_inblock
    return _so_far.waits != before


def _advise(address: int, length: int, advice: int) -> int:
    """Call ``madvise``; return the error number, or 0."""
    if _madvise is None:
        return 0
    start = address - address % mmap.PAGESIZE
    return ctypes.get_errno() if _madvise(start, address + length - start, advice) else 0


class WriterLock:
    """The right to write one memory, held from construction to ``release``.

    Raises ``MemoryInUse``, which names the process that holds it, or ``ReadOnlyMemory``.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._holder = folder / HOLDER_NAME
        # Before taking the lock, because opening its file empties it.
        paths.check_single(folder, WRITER_NAME, DATA_NAME, LOCK_NAME, RESERVE_NAME)
        self._lock = FileLock(folder / WRITER_NAME, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            if not _is_soft(self._lock):
                raise MemoryInUse(_in_use(folder), memory=folder) from None
        except OSError as error:
            if short := paths.shortage(error.errno, folder):
                raise short from error
            raise ReadOnlyMemory(
                f"memory {folder} cannot be written ({error.strerror}); open it with mode='r', or change the "
                "permissions",
                memory=folder,
            ) from None
        # Without system locks, filelock treats an existing file as a held lock, and this file always exists.
        if _is_soft(self._lock):
            self._lock.release()
            raise ReadOnlyMemory(
                f"the file system of memory {folder} has no file locks (flock), so two processes could write at "
                "once. Copy the memory to another disk, or open it with mode='r'",
                memory=folder,
            )
        _announce(self._holder)

    def release(self) -> None:
        """Let others write. In a forked child this does nothing: the lock belongs to the parent."""
        if os.getpid() != self._pid or not self._lock.is_locked:
            return
        with suppress(OSError):
            self._holder.unlink()
        self._lock.release()


def _is_soft(lock: BaseFileLock) -> bool:
    """Return whether filelock fell back to another kind of lock, because ``flock`` is missing."""
    return isinstance(lock, SoftFileLock)


def _announce(holder: Path) -> None:
    """Write who holds the lock, whole or not at all. Failure is allowed, because deleting must work on a full disk."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    words = json.dumps({"pid": os.getpid(), "command": _command_line(), "started": now})
    with suppress(OSError):
        paths.write(holder.parent, holder.name, [f"{words}\n".encode()], durable=False)


def _command_line() -> str:
    """Return this process's command, shortened but recognisable."""
    program = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python")
    if program.name == "__main__.py":  # python -m PACKAGE
        program = program.absolute().parent
    # Of our arguments, keep only the verb: questions and names must not be readable beside an encrypted memory.
    return " ".join([program.name, *(sys.argv[1:2] if program.name == "memstore" else [])])[:200]


def _in_use(folder: Path) -> str:
    way = "wait for it"
    try:
        told = json_checks.parse(paths.read(folder, HOLDER_NAME, _MOST_TOLD), HOLDER_NAME, _MOST_TOLD)
        facts: dict[str, Any] = json_checks.fit(told, _HOLDER, HOLDER_NAME)
        command = repr(facts["command"])[1:-1]  # escapes control characters, which a terminal would obey
        mine, way = (" (this one)", "close it there first") if facts["pid"] == os.getpid() else ("", way)
        since = datetime.fromisoformat(facts["started"]).astimezone()
        today = since.date() == datetime.now().astimezone().date()
        holder = f"process {facts['pid']}{mine} ({command}) since {since:%H:%M}"
        holder += "" if today else f" on {since:%Y-%m-%d}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, DamagedError):
        holder = "another process"
    return f"memory {folder} is being written by {holder}; {way}. Reading works meanwhile"
