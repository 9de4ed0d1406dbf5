"""Storage for shards: a folder, or a bucket of object storage.

An object is written whole, under its final name, or not at all.

A bucket is used through ``obstore``: S3 and compatible storage, Google, Azure. Every request has a deadline, and is
tried again if the storage is busy or not reachable. A shard is put only under a free name, so no other memory's shard
is ever replaced; a different object there belongs to another memory. Errors are ``OSError`` of one line.
"""

from __future__ import annotations

import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from memstore import paths
from memstore.errors import InvalidArgument, NotAMemory
from memstore.paths import shortage
from memstore.store.records import Unreadable
from memstore.store.zarr.extents import OBJECT

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_OPEN_FILES = 256
_MOST_PARTS = 512  # buffers of one system call; the limit is 1,024


@dataclass(frozen=True)
class RangeRead:
    """Consecutive bytes of an object, and the buffers to fill."""

    path: str
    start: int
    """Offset in bytes."""
    parts: tuple[memoryview, ...]
    """Buffers, filled one after the other."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return sum(part.nbytes for part in self.parts)


class Objects(ABC):
    """Named byte strings that never change once they can be read. Names are paths with slashes."""

    elsewhere = True
    """Whether the objects lie apart from their tail, so that wrong pairs are possible."""
    joined = False
    """Whether all fields of a block are stored side by side."""
    doubtful = False
    """Whether objects may exist that nothing will ever name; a bucket is searched for them later."""

    @abstractmethod
    def put(self, path: str, parts: Sequence[memoryview | bytes], *, durable: bool = True) -> None:
        """Write ``parts`` as one object, which replaces an older one; if ``durable``, it is on disk on return.

        Raises ``OSError``.
        """

    @abstractmethod
    def read(self, reads: Sequence[RangeRead]) -> list[str | None]:
        """Fill the parts of all reads. For each read return None, or why it failed: ``Unreadable`` if not by damage."""

    @abstractmethod
    def names(self, folder: str) -> Iterator[str]:
        """Yield every object below ``folder``."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object; it may be missing. Raises ``OSError``."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Delete all objects below ``folder``, if any. Raises ``OSError``."""

    @abstractmethod
    def close(self) -> None:
        """Release all open resources."""


class FileObjects(Objects):
    """Objects in a folder."""

    # Not through the Zarr library: its ``LocalStore`` does not sync, and opens the file again for each range. A path
    # never changes its content, so open files need no second check.

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
        """Forget the open files; each is closed after its last read."""
        with self._lock:
            self._files.clear()

    def _file(self, path: str) -> _File | str:
        """Return the open file, or why it cannot be opened."""
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
            return Unreadable(f"its shard {path} cannot be opened ({error.strerror})")
        except NotAMemory as error:
            return Unreadable(f"its shard {path} cannot be opened ({error})")
        with self._lock:
            self._files[path] = file
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return file


class _File:
    """An open file; closed when nothing refers to it, because other threads may read it after the table dropped it."""

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
            return Unreadable(f"its shard {read.path} cannot be read ({error.strerror})")
        if found != expected:
            return f"its shard {read.path} is truncated: it has {found} of {expected} bytes at offset {start}"
        start += expected
    return None


def spread(read: RangeRead, raw: memoryview) -> str | None:
    """Copy the bytes ``raw`` to the buffers of ``read``; return the error if they are too short."""
    if raw.nbytes != read.nbytes:
        return f"its shard {read.path} is truncated: it has {raw.nbytes} of {read.nbytes} bytes at offset {read.start}"
    start = 0
    for part in read.parts:
        part[:] = raw[start : start + part.nbytes]
        start += part.nbytes
    return None


def absent(path: str) -> str:
    """Return the error of a read whose object does not exist."""
    return f"its shard {path} is missing"


P = TypeVar("P")
T = TypeVar("T")
AT_ONCE = 64
"""Concurrent requests."""
READS_AHEAD = 32
"""Concurrent reads, each of a list in one layer: about as many as a model has layers that retrieve."""
GAP_BYTES = 256 << 10
"""Ranges of an object with smaller gaps are one request: reading the gap is faster than another request."""
RETRIES: RetryConfig = {
    "max_retries": 5,
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    "retry_timeout": timedelta(seconds=60),
}
"""How often, and for how long, ``obstore`` tries again before a storage counts as unreachable."""
CLIENT: ClientConfig = {"timeout": timedelta(seconds=30), "connect_timeout": timedelta(seconds=5)}


def from_url(url: str) -> BucketObjects:
    """Open the objects at ``url``. ``obstore`` finds address and keys in the usual places. Raises ``OSError``."""
    from obstore.store import from_url as found

    client = CLIENT.copy()
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true":  # options passed here would hide it
        client["allow_http"] = True
    with told(url):
        return BucketObjects(found(url, retry_config=RETRIES, client_options=client))


_LATE = re.compile(r"kind: Timeout")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d+ [\w ]+)")
_AROUND = re.compile(r"Error performing \w+ \S+ in \S+ - |,? ?(Debug )?source:.*", re.DOTALL)


class LostRace(OSError):
    """Another writer was first."""


class _NoAnswer(OSError):
    """There was no answer in time: the request may have been carried out."""


class _StoredObject(NamedTuple):
    """An object and its version."""

    content: bytes
    tag: Tag


Tag = Mapping[str, str]
"""The name of an object's version, in the terms of its storage: ``e_tag``, ``version``, or both."""


class BucketObjects(Objects):
    """Objects in the bucket, and below the prefix, of ``store``."""

    joined = True

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._workers = ThreadPoolExecutor(AT_ONCE, "memstore-bucket")

    def put(self, path: str, parts: Sequence[memoryview | bytes], *, durable: bool = True) -> None:
        """Put an object in one request. A ``durable`` one never replaces a different object. Raises ``OSError``."""
        whole = b"".join(parts)
        try:
            if durable:
                self.put_new(path, whole)
            else:
                with told(path):
                    self._store.put(path, whole, use_multipart=False)
        except LostRace:
            stored = self.get(path)
            if stored is None or stored.content != whole:
                raise LostRace(
                    f"{path} already exists in the bucket, and another writer put other content there"
                ) from None
        except OSError:
            self.doubtful |= durable
            raise

    def put_new(self, path: str, content: bytes, *, instead: Tag | None = None) -> Tag:
        """Put an object under a free name, or ``instead`` of the version with this tag; return its tag.

        Raises ``LostRace``, also if an earlier unanswered try of this call did put it: compare the two.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: Any = "create" if instead is None else dict(instead)
        try:
            return _tag(_repeated(path, lambda: self._store.put(path, content, mode=mode, use_multipart=False)))
        except OSError as error:
            if isinstance(error.__cause__, AlreadyExistsError | PreconditionError):
                raise LostRace(f"{path} was put by another writer") from None
            raise

    def get(self, path: str) -> _StoredObject | None:
        """Return a whole object; None if it is missing. Raises ``OSError``, also if the bucket does not exist."""
        try:
            with told(path):
                found = self._store.get(path)
                return _StoredObject(bytes(found.bytes()), _tag(found.meta))
        except OSError as error:
            if _is_missing(error):
                return None
            raise

    def get_all(self, paths: Sequence[str]) -> Iterator[_StoredObject | None]:
        """Get several objects in order, some of them at a time. Raises ``OSError``."""
        return self._at_once(self.get, paths)

    def put_all(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Put several objects, some of them at a time. Raises ``OSError``."""
        for _ in self._at_once(lambda each: self.put(each[0], [each[1]]), objects):
            pass

    def read(self, reads: Sequence[RangeRead]) -> list[str | None]:
        """Read all ranges at once; nearby ranges of one object are one request."""
        by_path: dict[str, list[int]] = {}
        for number, read in enumerate(reads):
            by_path.setdefault(read.path, []).append(number)
        problems: list[str | None] = [None] * len(reads)
        done = self._at_once(lambda numbers: self._read([reads[n] for n in numbers]), by_path.values())
        for numbers, found in zip(by_path.values(), done, strict=True):
            for number, problem in zip(numbers, found, strict=True):
                problems[number] = problem
        return problems

    def _read(self, reads: Sequence[RangeRead]) -> list[str | None]:
        """Read ranges of one object."""
        path = reads[0].path
        starts, ends = [read.start for read in reads], [read.start + read.nbytes for read in reads]
        try:
            with told(path):
                found = self._store.get_ranges(path, starts=starts, ends=ends, coalesce=GAP_BYTES)
        except OSError as error:
            return [self._problem(path, max(ends), error)] * len(reads)
        return [spread(read, memoryview(raw)) for read, raw in zip(reads, found, strict=True)]

    def _problem(self, path: str, end: int, error: OSError) -> str:
        """Return why bytes before ``end`` of an object could not be read."""
        if _is_missing(error):
            return absent(path)
        with suppress(OSError), told(path):  # storages report a range after the end in different words
            if (found := self._store.head(path)["size"]) < end:
                return f"its shard {path} is truncated: it has only {found} of {end} bytes"
        return Unreadable(f"its shard {path} cannot be read ({error})")

    def names(self, folder: str) -> Iterator[str]:
        with told(folder):
            for some in self._store.list(f"{folder}/"):
                yield from (each["path"] for each in some)

    def delete(self, path: str) -> None:
        self.delete_all([path])

    def delete_folder(self, folder: str) -> None:
        self.delete_all([name for name in self.names(folder) if OBJECT.fullmatch(name)])

    def delete_all(self, paths: Sequence[str]) -> None:
        """Delete keys, a thousand in a request if the storage can do that. Raises ``OSError``."""
        if not paths:
            return
        try:
            _repeated(paths[0], lambda: self._store.delete(paths))
        except OSError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    def _at_once(self, work: Callable[[P], T], each: Iterable[P]) -> Iterator[T]:
        try:
            return self._workers.map(work, each)
        except RuntimeError as error:  # of workers that are shut down
            raise InvalidArgument("this store was closed during use; open the memory again") from error

    def close(self) -> None:
        self._workers.shutdown()


def _is_missing(error: OSError) -> bool:
    """Whether an error of ``told`` says that there is no such object, in a bucket that exists."""
    return isinstance(error.__cause__, FileNotFoundError) and "NoSuchBucket" not in str(error)


def _repeated(path: str, ask: Callable[[], T]) -> T:
    """Return the answer of ``ask``, and ask again if no answer comes. Raises ``OSError``.

    After a lost answer, ``obstore`` repeats only requests that it knows to be idempotent. Conditional puts and bulk
    deletes are not among them.
    """
    until = time.monotonic() + RETRIES.get("retry_timeout", timedelta()).total_seconds()
    for tries in range(RETRIES["max_retries"], -1, -1):
        try:
            with told(path):
                return ask()
        except _NoAnswer:
            if not tries or time.monotonic() > until:
                raise
    raise AssertionError("the last try returns or raises")


@contextmanager
def told(path: str) -> Iterator[None]:
    """Translate errors of any library into an ``OSError`` of one line that names the object."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        kind = _NoAnswer if _LATE.search(str(error)) else OSError
        raise kind(f"{path}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the message of a storage in a few words, without any address."""
    said = str(error)
    words = [found[1] for pattern in (_CODE, _STATUS) if (found := pattern.search(said))]
    words += ["no answer in time"] if _LATE.search(said) else []
    return ", ".join(words) or " ".join(_AROUND.sub("", said).split())[:160]


def _tag(facts: Mapping[str, Any]) -> Tag:
    return {name: str(facts[name]) for name in ("e_tag", "version") if facts.get(name) is not None}
