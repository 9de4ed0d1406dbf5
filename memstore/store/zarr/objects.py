"""Where shards lie: a folder, or any store of the ``zarr`` library (object storage, memory).

An object is written whole, under its final name, or not at all.
"""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memstore import paths
from memstore.errors import NotAMemory
from memstore.paths import shortage
from memstore.store.zarr.extents import OBJECT

if TYPE_CHECKING:
    from zarr.abc.store import Store

_OPEN_FILES = 256
_MOST_PARTS = 512  # buffers of one system call; the limit is 1,024


@dataclass(frozen=True)
class RangeRead:
    """Consecutive bytes of an object, and where they go."""

    path: str
    start: int
    """Offset in bytes."""
    parts: tuple[memoryview, ...]
    """Filled one after the other."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return sum(part.nbytes for part in self.parts)


class Objects(ABC):
    """Named byte strings that never change once anybody may read them. Names are paths with slashes."""

    elsewhere = True
    """Whether they lie apart from their tail, so that somebody may bring the wrong ones together."""
    joined = False
    """Whether all fields of a block shall lie side by side."""
    doubtful = False
    """Whether something may lie there that nothing will ever name: a bucket is looked through for it later."""

    @abstractmethod
    def put(self, path: str, parts: Sequence[memoryview | bytes], *, durable: bool = True) -> None:
        """Write ``parts`` as one object, replacing what was there; on disk when it returns, if ``durable``.

        Raises ``OSError``.
        """

    @abstractmethod
    def read(self, reads: Sequence[RangeRead]) -> list[str | None]:
        """Fill the parts of all reads. For each read None, or why it could not be read."""

    @abstractmethod
    def names(self, folder: str) -> Iterator[str]:
        """Every object below ``folder``."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object. That it does not exist is no error. Raises ``OSError``."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Delete all objects below ``folder``. That there are none is no error. Raises ``OSError``."""

    @abstractmethod
    def close(self) -> None:
        """Release what is open."""


class FileObjects(Objects):
    """Objects in a folder."""

    # Not through the Zarr library: its ``LocalStore`` does not sync, and opens the file anew for each range. A path is
    # never used for two contents, so open files need no second look.

    def __init__(self, folder: Path, *, elsewhere: bool = False) -> None:
        self._folder = folder
        self.elsewhere = elsewhere
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, path: str, parts: Sequence[memoryview | bytes], *, durable: bool = True) -> None:
        """Write ``parts`` to a file beside its place, sync it, and move it there. Raises ``NotAMemory`` for links."""
        paths.write(self._folder, path, parts, durable=durable)

    def read(self, reads: Sequence[RangeRead]) -> list[str | None]:
        """Announce all ranges to the kernel, then copy them one by one, without the interpreter's lock."""
        files = [self._file(read.path) for read in reads]
        if len(reads) > 1:
            for file, read in zip(files, reads, strict=True):
                if isinstance(file, _File):
                    os.posix_fadvise(file.handle, read.start, read.nbytes, os.POSIX_FADV_WILLNEED)
        return [_fill(file, read) if isinstance(file, _File) else file for file, read in zip(files, reads, strict=True)]

    def names(self, folder: str) -> Iterator[str]:
        for place, _, files, _ in paths.walk(self._folder, folder):
            yield from (f"{place}/{name}" for name in files)

    def delete(self, path: str) -> None:
        with self._lock:
            self._files.pop(path, None)
        paths.remove(self._folder, path)

    def delete_folder(self, folder: str) -> None:
        with self._lock:
            for path in [path for path in self._files if path.startswith(f"{folder}/")]:
                del self._files[path]
        for place, folders, files, handle in paths.walk(self._folder, folder, bottom_up=True):
            for name in files:
                if OBJECT.fullmatch(f"{place}/{name}"):
                    os.unlink(name, dir_fd=handle)
            for name in folders:
                with suppress(OSError):
                    os.rmdir(name, dir_fd=handle)
        above, _, last = folder.rpartition("/")
        with suppress(OSError), paths.opened_folder(self._folder, above) as handle:
            os.rmdir(last, dir_fd=handle)

    def close(self) -> None:
        """Forget the open files; each is closed when the last read of it ends."""
        with self._lock:
            self._files.clear()

    def _file(self, path: str) -> _File | str:
        """The open file, or why it cannot be opened."""
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
                return self._files[path]
        try:
            file = _File(paths.open_file(self._folder, path, os.O_RDONLY))
        except FileNotFoundError:
            return absent(path)
        except OSError as error:
            if short := shortage(error.errno, self._folder):
                raise short from error
            return f"its shard {path} cannot be opened ({error.strerror})"
        except NotAMemory as error:
            return f"its shard {path} cannot be opened ({error})"
        with self._lock:
            self._files[path] = file
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return file


class _File:
    """An open file; closed when nobody refers to it, for another thread may still read what the table has dropped."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self) -> None:
        os.close(self.handle)


def _fill(file: _File, read: RangeRead) -> str | None:
    start = read.start
    for first in range(0, len(read.parts), _MOST_PARTS):
        parts = read.parts[first : first + _MOST_PARTS]
        expected = sum(part.nbytes for part in parts)
        try:
            found = os.preadv(file.handle, parts, start)
        except OSError as error:
            return f"its shard {read.path} cannot be read ({error.strerror})"
        if found != expected:
            return f"its shard {read.path} is truncated: {found} of {expected} bytes at offset {start}"
        start += expected
    return None


class ZarrObjects(Objects):
    """Objects in a store of the ``zarr`` library, which must put objects whole and durably, as object storage does."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, path: str, parts: Sequence[memoryview | bytes], *, durable: bool = True) -> None:  # noqa: ARG002
        from zarr.core.buffer import default_buffer_prototype

        whole = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
        _checked(self._store.set(path, default_buffer_prototype().buffer.from_array_like(whole)))

    def read(self, reads: Sequence[RangeRead]) -> list[str | None]:
        from zarr.abc.store import RangeByteRequest
        from zarr.core.buffer import default_buffer_prototype

        prototype = default_buffer_prototype()
        ranges = [RangeByteRequest(read.start, read.start + read.nbytes) for read in reads]
        work = [self._store.get(read.path, prototype, r) for read, r in zip(reads, ranges, strict=True)]
        return [_taken(read, found) for read, found in zip(reads, _wait(*work), strict=True)]

    def names(self, folder: str) -> Iterator[str]:
        async def collect() -> list[str]:
            return [name async for name in self._store.list_prefix(f"{folder}/")]

        yield from _checked(collect())

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            _checked(self._store.delete(path))

    def delete_folder(self, folder: str) -> None:
        for result in _wait(*(self._store.delete(name) for name in self.names(folder) if OBJECT.fullmatch(name))):
            _raise_os_error(result)

    def close(self) -> None:
        """The store is the caller's."""


def _wait(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run ``work`` on the event loop of the ``zarr`` library: results, or the exceptions that came instead."""
    from zarr.core.sync import sync

    async def run() -> list[Any]:
        return await asyncio.gather(*work, return_exceptions=True)

    return sync(run())


def _checked(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work``. Whatever goes wrong is an ``OSError``: every storage has exceptions of its own."""
    (result,) = _wait(work)
    _raise_os_error(result)
    return result


def _raise_os_error(result: Any) -> None:
    if isinstance(result, Exception) and not isinstance(result, OSError):
        raise OSError(f"{type(result).__name__}: {result}") from result
    if isinstance(result, BaseException):
        raise result


def _taken(read: RangeRead, found: Any) -> str | None:
    """Copy what a store has ``found`` to where it goes; why not, where it cannot be read."""
    if isinstance(found, BaseException):
        return f"its shard {read.path} cannot be read ({found})".splitlines()[0]
    return absent(read.path) if found is None else spread(read, memoryview(found.to_bytes()))


def spread(read: RangeRead, raw: memoryview) -> str | None:
    """Copy what was read to where it goes; why not, where it is too short."""
    if raw.nbytes != read.nbytes:
        return f"its shard {read.path} is truncated: {raw.nbytes} of {read.nbytes} bytes at offset {read.start}"
    start = 0
    for part in read.parts:
        part[:] = raw[start : start + part.nbytes]
        start += part.nbytes
    return None


def absent(path: str) -> str:
    """What a read says of an object that does not exist."""
    return f"its shard {path} is not there"
