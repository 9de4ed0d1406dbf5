"""Objects in a bucket of object storage, through ``obstore``: S3 and what speaks like it, Google, Azure.

Every request has a deadline and is tried again where the storage is busy or away. A shard is put only where nothing
lies, so that nobody's is ever replaced; what differs there is somebody else's. Errors are ``OSError`` of one line.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from memstore.store.zarr.extents import OBJECT
from memstore.store.zarr.objects import Objects, RangeRead, absent, spread

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")
AT_ONCE = 64
"""Requests under way at a time."""
READS_AHEAD = 32
"""Reads, each of a list in one layer, under way at a time: about as many as a model has layers that retrieve."""
GAP_BYTES = 256 << 10
"""Ranges of an object that lie no further apart are one request: so much comes in the time that another would take."""
RETRIES: RetryConfig = {
    "max_retries": 5,
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    "retry_timeout": timedelta(seconds=60),
}
"""How often ``obstore`` tries again before a storage counts as not reached, and for how long."""
CLIENT: ClientConfig = {"timeout": timedelta(seconds=30), "connect_timeout": timedelta(seconds=5)}


def from_url(url: str) -> BucketObjects:
    """The objects at ``url``. ``obstore`` looks for address and keys in the usual places. Raises ``OSError``."""
    from obstore.store import from_url as found

    client = CLIENT.copy()
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true":  # which options given here would hide
        client["allow_http"] = True
    with told(url):
        return BucketObjects(found(url, retry_config=RETRIES, client_options=client))


_LATE = re.compile(r"kind: Timeout")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d+ [\w ]+)")
_AROUND = re.compile(r"Error performing \w+ \S+ in \S+ - |,? ?(Debug )?source:.*", re.DOTALL)


class LostRace(OSError):
    """Another writer was first."""


class NoAnswer(OSError):
    """There was no answer in time: what was asked for may have been done."""


class StoredObject(NamedTuple):
    """An object and its version."""

    content: bytes
    tag: Tag


Tag = Mapping[str, str]
"""What names a version of an object, in the words of its storage: ``e_tag``, ``version``, or both."""


class BucketObjects(Objects):
    """Objects in the bucket, and below the prefix, of ``store``."""

    joined = True

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._workers = ThreadPoolExecutor(AT_ONCE, "memstore-bucket")

    def put(self, path: str, parts: Sequence[memoryview | bytes], *, durable: bool = True) -> None:
        """One request. What is ``durable`` is put only where nothing lies, or the same. Raises ``OSError``."""
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
                raise LostRace(f"{path} lies in the bucket already, and another writer put other content") from None
        except OSError:
            self.doubtful |= durable
            raise

    def put_new(self, path: str, content: bytes, *, instead: Tag | None = None) -> Tag:
        """Put an object where nothing lies, or ``instead`` of the version of this tag; its tag.

        Raises ``LostRace``, also where an earlier try of this call was not answered and did put it: compare the two.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: Any = "create" if instead is None else dict(instead)
        try:
            return _tag(_repeated(path, lambda: self._store.put(path, content, mode=mode, use_multipart=False)))
        except OSError as error:
            if isinstance(error.__cause__, AlreadyExistsError | PreconditionError):
                raise LostRace(f"{path} was put by another writer") from None
            raise

    def get(self, path: str) -> StoredObject | None:
        """An object, whole; None where there is none. Raises ``OSError``, also where there is no such bucket."""
        try:
            with told(path):
                found = self._store.get(path)
                return StoredObject(bytes(found.bytes()), _tag(found.meta))
        except OSError as error:
            if isinstance(error.__cause__, FileNotFoundError) and "NoSuchBucket" not in str(error):
                return None
            raise

    def get_all(self, paths: Sequence[str]) -> Iterator[StoredObject | None]:
        """Several objects, in order, some at a time. Raises ``OSError``."""
        return self._workers.map(self.get, paths)

    def put_all(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Several objects, some at a time. Raises ``OSError``."""
        for _ in self._workers.map(lambda each: self.put(each[0], [each[1]]), objects):
            pass

    def read(self, reads: Sequence[RangeRead]) -> list[str | None]:
        """All ranges at once; those of one object that lie close together are one request."""
        by_path: dict[str, list[int]] = {}
        for number, read in enumerate(reads):
            by_path.setdefault(read.path, []).append(number)
        problems: list[str | None] = [None] * len(reads)
        done = self._workers.map(lambda numbers: self._read([reads[n] for n in numbers]), by_path.values())
        for numbers, found in zip(by_path.values(), done, strict=True):
            for number, problem in zip(numbers, found, strict=True):
                problems[number] = problem
        return problems

    def _read(self, reads: Sequence[RangeRead]) -> list[str | None]:
        """Ranges of one object."""
        path = reads[0].path
        starts, ends = [read.start for read in reads], [read.start + read.nbytes for read in reads]
        try:
            with told(path):
                found = self._store.get_ranges(path, starts=starts, ends=ends, coalesce=GAP_BYTES)
        except OSError as error:
            gone = isinstance(error.__cause__, FileNotFoundError)
            return [absent(path) if gone else f"its shard {path} cannot be read ({error})"] * len(reads)
        return [spread(read, memoryview(raw)) for read, raw in zip(reads, found, strict=True)]

    def names(self, folder: str) -> Iterator[str]:
        with told(folder):
            for some in self._store.list(f"{folder}/"):
                yield from (each["path"] for each in some)

    def delete(self, path: str) -> None:
        self.delete_all([path])

    def delete_folder(self, folder: str) -> None:
        self.delete_all([name for name in self.names(folder) if OBJECT.fullmatch(name)])

    def delete_all(self, paths: Sequence[str]) -> None:
        """Delete keys, a thousand in a request where the storage can. Raises ``OSError``."""
        if not paths:
            return
        try:
            _repeated(paths[0], lambda: self._store.delete(paths))
        except OSError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    def close(self) -> None:
        self._workers.shutdown()


def _repeated(path: str, ask: Callable[[], T]) -> T:
    """What ``ask`` answers, asked again where no answer comes. Raises ``OSError``.

    Of a request that may have been done ``obstore`` asks again only where it knows that twice is as good as once, which
    it does not of conditional puts and bulk deletes.
    """
    until = time.monotonic() + RETRIES.get("retry_timeout", timedelta()).total_seconds()
    for tries in range(RETRIES["max_retries"], -1, -1):
        try:
            with told(path):
                return ask()
        except NoAnswer:
            if not tries or time.monotonic() > until:
                raise
    raise AssertionError("the last try returns or raises")


@contextmanager
def told(path: str) -> Iterator[None]:
    """What goes wrong inside, of whatever library, as an ``OSError`` of one line that names the object."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        kind = NoAnswer if _LATE.search(str(error)) else OSError
        raise kind(f"{path}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What a storage said, in a few words and without the address of anything."""
    said = str(error)
    words = [found[1] for pattern in (_CODE, _STATUS) if (found := pattern.search(said))]
    words += ["no answer in time"] if _LATE.search(said) else []
    return ", ".join(words) or " ".join(_AROUND.sub("", said).split())[:160]


def _tag(facts: Mapping[str, Any]) -> Tag:
    return {name: str(facts[name]) for name in ("e_tag", "version") if facts.get(name) is not None}
