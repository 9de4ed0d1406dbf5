"""Folders of this user, and safe access to our files inside a folder from anybody: no link is followed.

A memory may come from an archive, or lie in a folder that others can write to. A link in it leads wherever its maker
likes. LMDB would write its lock table over the file behind ``lock.mdb``, and a clean-up would delete the files behind
``blocks``. The folder of a memory may itself be a link, because its user chose that. Inside the folder no link is
followed. A link, a pipe, a device, or a folder in place of a file is refused, not repaired.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from memstore.errors import MemstoreError, NotAMemory, ReadOnlyMemory

CACHE_VARIABLE = "MEMSTORE_CACHE"
Purpose = Literal["cache", "data", "config"]
_LINUX = {
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "data": ("XDG_DATA_HOME", ".local/share"),
    "config": ("XDG_CONFIG_HOME", ".config"),
}

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers that mean that no room is left."""

FILES = (
    *("data.mdb", "keys", "lock.mdb", "reserve", "writer.lock", "writer.json", "zarr.json"),
    *("traces.sqlite", "traces.sqlite-wal", "traces.sqlite-shm", "traces.sqlite-journal"),
)
FOLDERS = ("tail", "blocks", "index")
_OURS = dict.fromkeys(FILES, stat.S_IFREG) | dict.fromkeys(FOLDERS, stat.S_IFDIR)
RIGHTS = 0o666
"""The mode of a new file, before the system applies the user's umask."""

_DEEPEST = 3  # levels below ``blocks``: an array, its chunks, and one to spare
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def cache_folder() -> Path:
    """Return ``$MEMSTORE_CACHE``, or memstore's folder in the user's cache directory. It need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else user_folder("cache")


def user_folder(purpose: Purpose) -> Path:
    """Return memstore's folder for a ``purpose``, at this system's usual place. It need not exist."""
    if sys.platform == "win32":
        local = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "memstore" / "memstore"
        return local / "Cache" if purpose == "cache" else local
    if sys.platform == "darwin":
        return Path.home() / "Library" / ("Caches" if purpose == "cache" else "Application Support") / "memstore"
    variable, usual = _LINUX[purpose]
    chosen = os.environ.get(variable, "").strip()
    return (Path(chosen) if chosen else Path.home() / usual) / "memstore"


def check_names(folder: Path) -> None:
    """Raise ``NotAMemory`` if a name of ours in a memory's folder is not a real file or folder.

    Raises ``ReadOnlyMemory`` if the names cannot be read.
    """
    try:
        # Each opening does this. A separate look-up of each name, most of which are missing, takes seven times as long.
        with os.scandir(folder) as entries:
            for entry in entries:
                kind = _OURS.get(entry.name)
                if kind is not None and not (entry.is_file if kind == stat.S_IFREG else entry.is_dir)(
                    follow_symlinks=False
                ):
                    find(folder / entry.name, kind)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except PermissionError:
        raise ReadOnlyMemory(
            f"the files in {folder} cannot be listed: permission denied. Change the permissions of the folder"
        ) from None
    except OSError as error:
        raise shortage(error.errno, folder) or error from None


def find(path: Path, kind: int = stat.S_IFREG) -> os.stat_result | None:
    """Return the status of ``path``, None if it is missing. Raises ``NotAMemory`` for another kind, and ``OSError``."""
    try:
        facts = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    _check(path, facts, kind)
    return facts


def check_single(folder: Path, *names: str) -> None:
    """Raise ``ReadOnlyMemory`` if one of the files, which are written in place, has other hard links."""
    for name in names:
        if not is_single(folder / name):
            raise ReadOnlyMemory(
                f"{folder / name} has several names (hard links), so writing would also change the other files, "
                f"perhaps a backup. Close the memory, make this file separate (cp {name} own && mv own {name}), "
                "and try again; mode='r' reads it as it is",
                memory=folder,
            )


def is_single(path: Path) -> bool:
    """Whether ``path`` is free, or a file without names other than those of ``part_of``."""
    while (facts := find(path)) is not None and facts.st_nlink > 1:
        with os.scandir(path.parent) as entries:
            parts = sum(is_part_of(entry.name, path.name) and entry.inode() == facts.st_ino for entry in entries)
        if (now := find(path)) is not None and now.st_nlink == facts.st_nlink:  # else a name went meanwhile
            return facts.st_nlink == 1 + parts
    return True


def part_of(file: Path) -> Path:
    """Return a new temporary name beside ``file``. The file has both for a moment, or if its writer was killed."""
    return file.with_name(f"{file.name}.{secrets.token_hex(4)}")


def is_part_of(name: str, file: str) -> bool:
    """Whether ``name`` is a temporary name that ``part_of`` gives to a file called ``file``."""
    return re.fullmatch(re.escape(file) + r"\.[0-9a-f]{8}", name) is not None


def _check(path: Path, facts: os.stat_result, kind: int) -> None:
    if (found := stat.S_IFMT(facts.st_mode)) == kind:
        return
    raise NotAMemory(
        f"{path} is {_KINDS.get(found, 'a device')}, but memstore expects {_KINDS[kind]} there. It was not "
        "followed, and nothing was changed. Put the real one in its place. For a part of a memory on another "
        "disk, mount that disk there (mount --bind), or move the whole memory"
    )


@contextmanager
def opened_folder(root: Path, name: str = "", *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of the folder ``name`` below ``root``; ``make`` creates missing folders, durably.

    Raises ``NotAMemory`` if a part of ``name`` is no folder, and ``OSError``.
    """
    # Each folder is opened relative to its parent, so nobody can replace one on the way by a link.
    handle, place = os.open(root, _FOLDER), root
    try:
        for part in filter(None, name.split("/")):
            place = place / part
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=handle)
                    os.fsync(handle)
            _check(place, os.stat(part, dir_fd=handle, follow_symlinks=False), stat.S_IFDIR)
            above, handle = handle, os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
            os.close(above)
        yield handle
    finally:
        os.close(handle)


def open_file(root: Path, name: str, flags: int) -> int:
    """Return a descriptor of the file ``name`` below ``root``.

    Raises ``NotAMemory`` for another kind, and ``OSError``.
    """
    above, _, last = name.rpartition("/")
    with opened_folder(root, above) as folder:
        # Opening a pipe can wait for ever, and opening a device can do anything. So the kind is checked first.
        with suppress(FileNotFoundError):
            _check(root / name, os.stat(last, dir_fd=folder, follow_symlinks=False), stat.S_IFREG)
        handle = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, RIGHTS, dir_fd=folder)
    try:
        _check(root / name, os.fstat(handle), stat.S_IFREG)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read(root: Path, name: str, most: int | None = None) -> bytes:
    """Return the content of the file ``name`` below ``root``, at most ``most + 1`` bytes of it.

    Raises ``NotAMemory`` and ``OSError``.
    """
    with os.fdopen(open_file(root, name, os.O_RDONLY), "rb") as file:
        return file.read(-1 if most is None else most + 1)


def write(root: Path, name: str, parts: Sequence[memoryview | bytes], *, durable: bool = True) -> None:
    """Write the file ``name`` below ``root`` as a whole, replacing an old one, or not at all.

    Makes missing folders. Raises ``NotAMemory`` and ``OSError``.
    """
    above, _, last = name.rpartition("/")
    part = f".{last}.part"
    with opened_folder(root, above, make=True) as folder:
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)  # left by a killed process; a link's target stays
        try:
            with os.fdopen(new_file(part, folder), "wb") as file:
                for piece in parts:
                    file.write(piece)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(part, last, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise
        if durable:
            os.fsync(folder)


def new_file(path: str | Path, folder: int | None = None) -> int:
    """Return a descriptor, to read and write, of a file with a new name. Raises ``OSError`` if the name is taken."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, RIGHTS, dir_fd=folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    with opened_folder(folder) as handle:
        os.fsync(handle)


def remove(root: Path, name: str) -> None:
    """Remove the file ``name`` below ``root``, if it exists. Raises ``NotAMemory`` and ``OSError``."""
    above, _, last = name.rpartition("/")
    with suppress(FileNotFoundError), opened_folder(root, above) as folder:
        os.unlink(last, dir_fd=folder)


def walk(root: Path, name: str, *, bottom_up: bool = False) -> Iterator[tuple[str, list[str], list[str], int]]:
    """Yield each folder from ``name`` on: its name below ``root``, its folders, its files, and a descriptor.

    Folders deeper than any of ours are left out. Links are listed and not followed. Yields nothing if the folder is
    missing. Raises ``NotAMemory`` and ``OSError``.
    """
    with suppress(FileNotFoundError), opened_folder(root, name.rpartition("/")[0]) as folder:
        find(root / name, stat.S_IFDIR)
        yield from _walk(folder, name, bottom_up, _DEEPEST)


# os.fwalk follows any depth of nested folders, and ends in a RecursionError.
def _walk(above: int, name: str, bottom_up: bool, levels: int) -> Iterator[tuple[str, list[str], list[str], int]]:
    handle = os.open(name.rpartition("/")[2], _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    try:
        folders, files = list[str](), list[str]()
        with os.scandir(handle) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(entry.name)
        if not bottom_up:
            yield name, folders, files, handle
        for folder in folders if levels else ():
            with suppress(OSError):  # a link, or removed meanwhile
                yield from _walk(handle, f"{name}/{folder}", bottom_up, levels - 1)
        if bottom_up:
            yield name, folders, files, handle
    finally:
        os.close(handle)


def shortage(code: int | None, folder: Path) -> MemstoreError | None:
    """Return the error if ``code`` means that this process lacks a resource other than disk space; otherwise None."""
    match code:
        case errno.EMFILE | errno.ENFILE:
            what, remedy = "too many files are open", "close some, or raise the limit (ulimit -n)"
        case errno.ENOMEM:
            what, remedy = "the system gives no more memory", "the system has no memory left"
        case _:
            return None
    return MemstoreError(
        f"memory {folder} cannot be used now: {what} in this process or on this machine. Nothing is damaged; "
        f"{remedy}, and try again",
        memory=folder,
    )


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write to the file system of ``folder``, with the quota if known."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def python_module(name: str) -> list[str]:
    """Return the beginning of a command that runs the module ``name``."""
    # With -m alone the working directory comes first in sys.path: a foreign file xxhash.py there would be run.
    return [sys.executable, "-P", "-m", name]
