"""The tail of a memory in a bucket, as other computers see it: pieces named by their hash, and a manifest last.

A version of the tail is the pages of its data file, cut into pieces. A piece that did not change is in the bucket
already. When all are uploaded, ``manifest.json`` names them, with a put that succeeds only for the writer who saw the
manifest before. So two writers cannot lose each other's versions, and readers find the last whole version. Pieces that
a version no longer needs are deleted with the next version, because a reader may still be fetching them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

from memstore import paths
from memstore.errors import DamagedError, ForeignMemory, MemoryInUse, NotFound
from memstore.json_checks import array, fit, parse, table, text, whole
from memstore.store.lmdb.environment import DATA_NAME
from memstore.store.zarr.extents import HEXADECIMAL, hexadecimal
from memstore.store.zarr.objects import BucketObjects, LostRace, Tag

MANIFEST = "manifest.json"
NOTE = "published.json"
"""A file beside the tail: the version that its writer has put, and whether the bucket's content is known."""
PIECE_BYTES = 4 << 20
HELD = 16
"""Pieces held in memory at a time."""
PATIENCE = 30.0
"""Seconds after which commits are published while writing goes on."""

_FORMAT = 1
_MOST_BYTES = 64 << 20  # of a manifest, enough to name a million pieces
_ATTEMPTS = 5  # to fetch a version while newer ones are published

logger = logging.getLogger(__name__)


_MANIFEST = table(
    format=whole(1, _FORMAT),
    owner=hexadecimal,
    number=whole(),
    nbytes=whole(0, 2**50),
    piece_bytes=whole(1, 2**31),
    pieces=array(hexadecimal, 2**21),
    stale=array(hexadecimal, 2**21),
)
_NOTE = table(number=whole(), commit=whole(), next=text(32), swept=whole(0, 1))


@dataclass(frozen=True, kw_only=True)
class Version:
    """The content of a manifest."""

    owner: str
    """Random name of the memory."""
    number: int = 0
    """Grows by one with each version; 0 before the first."""
    nbytes: int = 0
    """Bytes of the data file."""
    piece_bytes: int = PIECE_BYTES
    pieces: tuple[str, ...] = ()
    """Hashes of the pieces of the data file, in order."""
    stale: tuple[str, ...] = ()
    """Pieces of earlier versions that this one does not need."""
    tag: Tag = field(default_factory=dict)
    """Tag of the manifest's object."""

    def encoded(self) -> bytes:
        """Encode the version as it is stored in the bucket."""
        facts = {name: value for name, value in vars(self).items() if name != "tag"}
        return json.dumps({"format": _FORMAT, **facts}).encode()

    @property
    def digest(self) -> str:
        """Return the hash of the content."""
        return _digest(self.encoded())


def last_version(bucket: BucketObjects) -> Version | None:
    """Return the version that was put last; None if none exists. Raises ``OSError`` and ``DamagedError``."""
    found = bucket.get(MANIFEST)
    if found is None:
        return None
    told = fit(parse(found.content, MANIFEST, _MOST_BYTES), _MANIFEST, MANIFEST)
    told = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    del told["format"]
    return Version(**told, tag=found.tag)


def piece_path(name: str) -> str:
    """Return the path of a piece."""
    return f"tail/{name}"


class Publisher:
    """Puts versions of the tail in ``folder``; for the only process that writes it."""

    def __init__(self, folder: Path, bucket: BucketObjects) -> None:
        self._folder = folder
        self._bucket = bucket
        self._version: Version | None = None
        self._unanswered: tuple[Version, int] | None = None
        """A version whose put was not answered, so it may exist, and its commit."""
        self._published = -1
        self._when = time.monotonic()

    def claim(self, owner: str) -> None:
        """Claim an empty place in the bucket for this memory. Raises ``ForeignMemory`` and ``OSError``."""
        first = Version(owner=owner)
        try:
            self._version = self._put(first)
        except LostRace:
            raise ForeignMemory("these shards belong to another memory; choose an empty place") from None

    def found(self, version: Version | None, owner: str) -> None:
        """Go on after the version in the bucket. Raises ``MemoryInUse`` if this tail is older."""
        note = self._note()
        # A killed process may have put a version without noting it.
        if version is not None and version.number != note["number"] and version.digest != note["next"]:
            raise MemoryInUse(
                f"another writer has published version {version.number} of this memory, but the tail in "
                f"{self._folder} has published only {note['number']}: it is an older copy. Write with the newer "
                "tail, or read with mode='r'"
            )
        self._version = Version(owner=owner) if version is None else version
        if version is not None and version.number == note["number"]:
            self._published = note["commit"]

    def swept(self) -> bool:
        """Return whether the last writer left only named objects in the bucket.

        From now on this is unknown, until ``close``.
        """
        swept = self._note()["swept"]
        self._write_note()
        return bool(swept)

    def due(self, commit: int) -> bool:
        """Return whether the commits should be published by now."""
        return commit != self._published and time.monotonic() - self._when > PATIENCE

    def publish(self, commit: int, *, prune: bool = False) -> None:
        """Put the tail as of ``commit``, unless that was put before; nobody may change it meanwhile.

        ``prune`` also deletes pieces that only the previous version needed. Raises ``MemoryInUse`` if another writer
        has published, and ``OSError``.
        """
        self._look_for_unanswered()
        before = self._version
        assert before is not None
        if commit == self._published and not (prune and before.stale):
            return
        data, there = self._folder / "tail" / DATA_NAME, {*before.pieces, *before.stale}
        names: list[str] = []
        waiting: list[tuple[str, bytes]] = []
        for piece in _pieces(data, PIECE_BYTES):
            names.append(_digest(piece))
            if names[-1] not in there:
                there.add(names[-1])
                waiting.append((piece_path(names[-1]), piece))
            if len(waiting) == HELD:
                self._bucket.put_all(waiting)
                waiting = []
        self._bucket.put_all(waiting)
        after = Version(
            owner=before.owner,
            number=before.number + 1,
            nbytes=data.stat().st_size,
            pieces=tuple(names),
            stale=() if prune else tuple(sorted(set(before.pieces) - set(names))),
        )
        self._write_note(coming=after.digest)
        self._unanswered = after, commit
        try:
            put = self._put(after, instead=before.tag or None)
        except LostRace:
            self._unanswered = None
            raise MemoryInUse(
                f"another writer has published a version of this memory. Version {after.number} was not "
                "published, and nothing in the bucket was replaced. Your commits are safe in this tail; write "
                "with only one of the two"
            ) from None
        self._version, self._published, self._when = put, commit, time.monotonic()
        self._unanswered = None
        self._write_note()
        try:
            self._bucket.delete_all([piece_path(name) for name in sorted(there - {*names, *after.stale})])
        except OSError as error:
            self._bucket.doubtful = True
            logger.warning("memory %s: some pieces that no version needs were not deleted: %s", self._folder, error)

    def _put(self, version: Version, instead: Tag | None = None) -> Version:
        """Put a manifest; return it with its tag. Raises ``LostRace`` and ``OSError``."""
        try:
            return replace(version, tag=self._bucket.put_new(MANIFEST, version.encoded(), instead=instead))
        except LostRace:  # lost to this writer itself, if the answer to a first try was lost
            there = last_version(self._bucket)
            if there is None or there.digest != version.digest:
                raise
            return there

    def _look_for_unanswered(self) -> None:
        """Find out whether the previous, unanswered version was put. Raises ``OSError``."""
        if self._unanswered is None:
            return
        version, commit = self._unanswered
        there = last_version(self._bucket)
        if there is not None and there.digest == version.digest:
            self._version, self._published = there, commit
            self._bucket.doubtful = True  # pieces that it made unnecessary were not deleted
        self._unanswered = None

    def close(self) -> None:
        """Note that the manifest names all objects in the bucket."""
        if not self._bucket.doubtful and self._version is not None:
            self._write_note(swept=1)

    def strays(self, names: Iterator[str]) -> list[str]:
        """Return those of the object ``names`` below ``tail`` that are no pieces of the last two versions."""
        assert self._version is not None
        known = {piece_path(name) for name in (*self._version.pieces, *self._version.stale)}
        return [name for name in names if name not in known and HEXADECIMAL.fullmatch(name.removeprefix("tail/"))]

    def _note(self) -> dict[str, Any]:
        with suppress(OSError, DamagedError, ValueError):
            raw = paths.read(self._folder, NOTE, 1000)
            return fit(parse(raw, NOTE, 1000), _NOTE, NOTE)  # type: ignore[no-any-return]
        return {"number": 0, "commit": 0, "next": "", "swept": 0}

    def _write_note(self, *, coming: str = "", swept: int = 0) -> None:
        number = 0 if self._version is None else self._version.number
        note = {"number": number, "commit": max(self._published, 0), "next": coming, "swept": swept}
        paths.write(self._folder, NOTE, [json.dumps(note).encode()])


def _pieces(data: Path, nbytes: int) -> Iterator[bytes]:
    with data.open("rb") as file:
        while piece := file.read(nbytes):
            yield piece


def fetch(bucket: BucketObjects, folder: Path, url: str, *, doubted: bool = False) -> Path:
    """Fetch the last published version into a memory folder below ``folder``, for reading; only missing pieces.

    A copy that was fetched before is used. If it was changed since, or is ``doubted``, it is compared first.

    Raises ``NotFound``, ``OSError``, and ``DamagedError`` for pieces that do not match the manifest.
    """
    place = folder / "published"
    for _ in range(_ATTEMPTS):
        version = last_version(bucket)
        if version is None or not version.pieces:
            raise NotFound(f"there is no memory at {url}: nothing was published there. Check the bucket and the prefix")
        target = place / f"{version.owner}-{version.number}-{version.digest}"
        place.mkdir(parents=True, exist_ok=True)
        with paths.opened_folder(place) as handle:
            with suppress(OSError):  # a file system without locks keeps what a killed process left
                fcntl.flock(handle, fcntl.LOCK_EX)
                for left in place.glob(".*.part"):
                    shutil.rmtree(left, ignore_errors=True)
            if _is_whole(target, version, doubted=doubted) or _fetched(bucket, version, target):
                return target
    raise DamagedError(
        f"the published version of {url} lacks pieces; publish it again from the computer that writes it", memory=url
    )


def _is_whole(target: Path, version: Version, *, doubted: bool) -> bool:
    """Return whether a version was fetched before; moves a copy that was damaged later out of the way."""
    data = target / "tail" / DATA_NAME
    with suppress(FileNotFoundError):
        unchanged = not doubted and data.stat().st_mtime_ns <= (target / "pieces.json").stat().st_mtime_ns
        if unchanged or [_digest(piece) for piece in _pieces(data, version.piece_bytes)] == [*version.pieces]:
            return True
        target.rename(target.with_name(f".{uuid4().hex}.part"))
    return False


def _fetched(bucket: BucketObjects, version: Version, target: Path) -> bool:
    """Assemble the pieces of a version; return whether all were found."""
    times: dict[Path, float] = {}
    for path in target.parent.glob("[!.]*/pieces.json"):  # not the hidden folders that other processes now fill
        with suppress(FileNotFoundError):  # another process has removed it
            times[path] = path.stat().st_mtime
    earlier = sorted(times, key=times.__getitem__)
    part = target.with_name(f".{uuid4().hex}.part")
    (part / "tail").mkdir(parents=True)
    try:
        with (part / "tail" / DATA_NAME).open("wb") as data:
            places: dict[str, list[int]] = {}
            for number, name in enumerate(version.pieces):
                places.setdefault(name, []).append(number * version.piece_bytes)
            copied = set[str]()
            for name, piece in _known_pieces(earlier[-1]) if earlier else ():
                if name in places:
                    _write(data, places[name], piece)
                    copied.add(name)
            wanted = [name for name in places if name not in copied]
            for start in range(0, len(wanted), HELD):
                some = wanted[start : start + HELD]
                for name, stored in zip(some, bucket.get_all([piece_path(name) for name in some]), strict=True):
                    if stored is None:
                        return False
                    if _digest(stored.content) != name:
                        raise DamagedError(f"piece {name} of the published tail is damaged; publish the memory again")
                    _write(data, places[name], stored.content)
            data.truncate(version.nbytes)
            data.flush()
            os.fsync(data.fileno())
        (part / "pieces.json").write_text(json.dumps([version.piece_bytes, version.pieces]))
        with suppress(OSError):  # another process was first
            part.rename(target)
        for path in earlier[:-1]:  # the last one may be open in another process
            shutil.rmtree(path.parent, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return True


def _known_pieces(told: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the pieces of a version fetched before, with their names, until another process removes it."""
    with suppress(OSError, ValueError, TypeError):
        length, _ = json.loads(told.read_text())
        for piece in _pieces(told.parent / "tail" / DATA_NAME, length):
            yield _digest(piece), piece


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _write(data: Any, places: list[int], piece: bytes) -> None:
    for place in places:
        data.seek(place)
        data.write(piece)
