"""The keys of an encrypted memory: its own, from a file or a function, and one for each owner of values.

The file ``keys`` in the folder of a memory is a header of 64 bytes and entries of 64 bytes. Each document number (0 is
the memory itself) has one entry: its key of 32 bytes, wrapped (RFC 3394) under the memory's key. ``docs/format.md`` has
the table of offsets. An entry never crosses a sector, and is written in place. It is added and synced before the first
value under it is committed, and overwritten with zeros after the last value is deleted. So after a kill there may be a
key without values, which the next writer destroys, but never a value without its key. A half-written entry fails its
checksum and is ignored.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xxhash import xxh3_64_intdigest as checksum

from memstore import paths
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, MemstoreError, NotFound, StoreFull, WrongKey

KEYS_NAME = "keys"
VARIABLE = "MEMSTORE_KEY_FILE"
"""Environment variable that names the file of the memory's key, if no key is passed."""
KEY_BYTES = 32
KeySource = str | Path | Callable[[], bytes]
"""A file that holds the key, or a function that gives it."""

_MAGIC, _VERSION = b"MSKY", 1
_HEADER = struct.Struct("<4sI16s24s8x")  # magic, version, identity of the memory, the identity wrapped: 56 bytes
_ENTRY = struct.Struct("<II40s8x")  # owner, 1, the wrapped key: 56 bytes; a checksum follows both
_SUM = struct.Struct("<Q")
_SLOT = 64
_FREE = bytes(_SLOT)
_MOST_CIPHERS = 4096
_MOST_READ = 200  # bytes of a key file: more than any key file has


class MasterKey:
    """The key of a memory, 32 bytes that are never shown."""

    __slots__ = ("raw",)

    def __init__(self, raw: object) -> None:
        if not isinstance(raw, bytes) or len(raw) != KEY_BYTES:
            found = f"{len(raw)} bytes" if isinstance(raw, bytes) else type(raw).__name__
            raise InvalidArgument(f"the key of a memory must have {KEY_BYTES} bytes; the key function returned {found}")
        self.raw = raw

    def __repr__(self) -> str:
        return "MasterKey()"


def read_key(source: KeySource) -> MasterKey:
    """Read the key from ``source``.

    A file has 32 bytes or 64 hexadecimal digits, and only its owner may be able to read it. Raises ``NotFound`` and
    ``InvalidArgument``.
    """
    if callable(source):
        return MasterKey(source())
    path = Path(source)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NotFound(f"there is no key file {path}; check the path") from None
    except OSError as error:
        raise InvalidArgument(f"the key file {path} cannot be read: {error.strerror}") from None
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        raise InvalidArgument(f"the key file {path} is not a regular file")
    with os.fdopen(handle, "rb") as file:
        if facts.st_mode & 0o077 or (os.geteuid() and facts.st_uid not in (0, os.geteuid())):
            mode = stat.S_IMODE(facts.st_mode)
            raise InvalidArgument(
                f"the key file {path} must belong to you, and only you may read it (mode {mode:04o}, user "
                f"{facts.st_uid}): change its owner, and chmod 600 it"
            )
        raw = file.read(_MOST_READ)
    if len(raw) != KEY_BYTES:
        try:
            raw = bytes.fromhex(raw.decode("ascii"))
        except ValueError:
            raw = b""
    if len(raw) != KEY_BYTES:
        raise InvalidArgument(f"the key file {path} must hold {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal digits")
    return MasterKey(raw)


def key_of_environment() -> MasterKey | None:
    """Read the key from the file in ``MEMSTORE_KEY_FILE``; None if it is not set. Raises like ``read_key``."""
    named = os.environ.get(VARIABLE)
    return read_key(named) if named else None


def library() -> Any:
    """Import the used parts of the package ``cryptography``. Raises ``InvalidArgument`` if it is not installed."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives import keywrap
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise InvalidArgument("encrypted memories need a package: pip install 'torch-memstore[encryption]'") from None
    return SimpleNamespace(
        cipher=AESGCM,
        wrap=keywrap.aes_key_wrap,
        unwrap=keywrap.aes_key_unwrap,
        unwrap_failed=keywrap.InvalidUnwrap,
        failed=InvalidTag,
    )


class KeyTable:
    """The keys of one open memory; made by ``create`` or ``open``. Safe to use from several threads."""

    def __init__(self, folder: Path | None, key: MasterKey, raw: bytes) -> None:
        self._folder = folder
        self._key = key
        self._library = library()
        self.failed: type[Exception] = self._library.failed
        """Raised by a cipher for bytes that were not encrypted this way."""
        self._lock = threading.RLock()
        self._ciphers: dict[int, Any] = {}
        self._wrapped: dict[int, bytes] = {}
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        """Places of destroyed entries."""
        self._slots = 0
        self._read(raw)

    @classmethod
    def create(cls, folder: Path | None, key: MasterKey) -> KeyTable:
        """Make keys of a new memory; they replace leftovers. With ``folder`` None they are not stored."""
        raw = _header(os.urandom(16), key)
        _replace(folder, raw)
        return cls(folder, key, raw)

    @classmethod
    def open(cls, folder: Path, key: MasterKey) -> KeyTable:
        return cls(folder, key, _content(folder))

    @property
    def key(self) -> MasterKey:
        return self._key

    def check(self, key: MasterKey | None) -> None:
        if key is None or key.raw != self._key.raw:
            raise _wrong(self._folder)

    def __contains__(self, owner: int) -> bool:
        return owner in self._wrapped

    def owners(self) -> set[int]:
        with self._lock:
            return set(self._wrapped)

    def cipher(self, owner: int) -> Any:
        """Return the cipher for the values of a number. Raises ``DamagedError`` if its key is missing."""
        found = self._ciphers.get(owner)
        if found is not None:
            return found
        with self._lock:
            if owner not in self._wrapped:
                self._look()  # another process may have added the key since then
            wrapped = self._wrapped.get(owner)
            if wrapped is None:
                raise lacks_key(owner)
            try:
                secret = self._library.unwrap(self._key.raw, wrapped)
            except self._library.unwrap_failed:
                raise lacks_key(owner) from None
            if len(self._ciphers) >= _MOST_CIPHERS:
                self._ciphers.clear()
            found = self._ciphers[owner] = self._library.cipher(secret)
        return found

    def renewed(self, owner: int) -> bool:
        """Return whether a number has another key than before; a number never committed gets a new key."""
        with self._lock:
            before = self._wrapped.get(owner)
            self._look()
            return self._wrapped.get(owner) != before

    def add(self, owners: Iterable[int]) -> None:
        """Make and sync keys for owners that have none. Raises ``StoreFull`` and ``ReadOnlyMemory``."""
        with self._lock:
            new = [owner for owner in dict.fromkeys(owners) if owner not in self._wrapped]
            made = {owner: self._library.wrap(self._key.raw, os.urandom(KEY_BYTES)) for owner in new}
            places = [*self._free[: len(new)], *range(self._slots, self._slots + len(new))][: len(new)]
            self._write(dict(zip(places, itertools.starmap(_entry, made.items()), strict=True)))
            self._wrapped |= made
            self._places |= zip(new, places, strict=True)
            self._free = self._free[len(new) :]
            self._slots = max([self._slots, *(place + 1 for place in places)])

    def destroy(self, owners: Iterable[int]) -> None:
        """Overwrite the keys of ``owners`` on disk. Raises ``MemstoreError``."""
        with self._lock:
            gone = [owner for owner in owners if owner in self._wrapped]
            self._write({self._places[owner]: _FREE for owner in gone})
            for owner in gone:
                del self._wrapped[owner]
                self._free.append(self._places.pop(owner))
                self._ciphers.pop(owner, None)

    def change_key(self, key: MasterKey) -> bool:
        """Wrap all keys under another key of the memory: the whole file is replaced, or stays as it was.

        Returns False for the same key, which stays the only one.
        """
        with self._lock:
            if key.raw == self._key.raw:
                return False
            unwrap, wrap = self._library.unwrap, self._library.wrap
            wrapped = {owner: wrap(key.raw, unwrap(self._key.raw, old)) for owner, old in self._wrapped.items()}
            raw = _header(self.identity, key) + b"".join(_entry(owner, each) for owner, each in wrapped.items())
            _replace(self._folder, raw)
            self._key = key
            self._read(raw)
            return True

    def _look(self) -> None:
        if self._folder is not None:
            self._read(_content(self._folder))

    def _read(self, raw: bytes) -> None:
        identity, check = _checked_header(raw, self._folder)
        try:
            if self._library.unwrap(self._key.raw, check) != identity:
                raise _wrong(self._folder)
        except self._library.unwrap_failed:
            raise _wrong(self._folder) from None
        self.identity = identity
        """16 bytes that identify the memory."""
        before, found = self._wrapped, entries(raw)
        self._wrapped = {owner: wrapped for owner, (_, wrapped) in found.items()}
        self._places = {owner: place for owner, (place, _) in found.items()}
        self._slots = (len(raw) - 1) // _SLOT
        self._free = [place for place in range(self._slots) if _slot(raw, place) == _FREE]
        for owner in [each for each in self._ciphers if self._wrapped.get(each) != before.get(each)]:
            del self._ciphers[owner]

    def _write(self, slots: dict[int, bytes]) -> None:
        if self._folder is None or not slots:
            return
        try:
            paths.check_single(self._folder, KEYS_NAME)
            with os.fdopen(paths.open_file(self._folder, KEYS_NAME, os.O_WRONLY), "wb") as file:
                for place, entry in slots.items():
                    if os.pwrite(file.fileno(), entry, _SLOT * (1 + place)) < len(entry):
                        raise OSError(paths.FULL[0], os.strerror(paths.FULL[0]))
                os.fsync(file.fileno())
        except OSError as error:
            raise _failure(error, self._folder) from error


def owners_told(folder: Path) -> set[int]:
    """Return the numbers that have keys in ``folder``; this needs no key of the memory. Raises ``DamagedError``."""
    raw = _content(folder)
    _checked_header(raw, folder)
    return set(entries(raw))


def keys_of_documents(folder: Path) -> bool:
    """Return whether ``folder`` has keys of documents: then a memory was here. An interrupted creation leaves none."""
    return os.path.lexists(folder / KEYS_NAME) and any(entries(_content(folder)))


def entries(raw: bytes) -> dict[int, tuple[int, bytes]]:
    """Return owner -> place and wrapped key of every valid entry."""
    found: dict[int, tuple[int, bytes]] = {}
    for place in range((len(raw) - 1) // _SLOT):
        slot = _slot(raw, place)
        if len(slot) == _SLOT and slot != _FREE and slot[-_SUM.size :] == _sum(slot[: -_SUM.size]):
            owner, _, wrapped = _ENTRY.unpack_from(slot)
            found[owner] = place, wrapped
    return found


def lacks_key(owner: int) -> DamagedError:
    """Return the error for values whose key is missing."""
    return DamagedError(
        f"the wrapped key of number {owner} is missing or damaged in the file {KEYS_NAME}, so its values cannot "
        f"be read. Restore {KEYS_NAME} from a copy",
        remedy="restore",
    )


def _slot(raw: bytes, place: int) -> bytes:
    return raw[_SLOT * (1 + place) : _SLOT * (2 + place)]


def _sum(content: bytes) -> bytes:
    return _SUM.pack(checksum(content))


def _header(identity: bytes, key: MasterKey) -> bytes:
    content = _HEADER.pack(_MAGIC, _VERSION, identity, library().wrap(key.raw, identity))
    return content + _sum(content)


def _entry(owner: int, wrapped: bytes) -> bytes:
    content = _ENTRY.pack(owner, 1, wrapped)
    return content + _sum(content)


def _content(folder: Path) -> bytes:
    try:
        return paths.read(folder, KEYS_NAME)
    except FileNotFoundError:
        raise DamagedError(
            f"memory {folder} is encrypted, but its file {KEYS_NAME} is missing, so nothing can be read. Restore "
            "the file from a copy. For a memory in a bucket, copy it from the folder that writes there",
            memory=folder,
            remedy="restore",
        ) from None
    except OSError as error:
        raise _failure(error, folder) from error


def _replace(folder: Path | None, raw: bytes) -> None:
    """Write the whole file; without a folder keys are not stored."""
    if folder is not None:
        try:
            paths.write(folder, KEYS_NAME, [raw])
        except OSError as error:
            raise _failure(error, folder) from error


def _checked_header(raw: bytes, folder: Path | None) -> tuple[bytes, bytes]:
    header = raw[:_SLOT]
    if len(header) < _SLOT or header[-_SUM.size :] != _sum(header[: -_SUM.size]):
        raise DamagedError(
            f"the header of the file {KEYS_NAME} of memory {folder} is damaged; restore it from a copy",
            memory=folder,
            remedy="restore",
        )
    magic, version, identity, check = _HEADER.unpack_from(header)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ForeignMemory(
            f"the file {KEYS_NAME} of memory {folder} was written by a newer memstore; upgrade memstore"
        )
    return identity, check


def _wrong(folder: Path | None) -> WrongKey:
    return WrongKey(
        f"memory {folder or 'ram:'} is encrypted with another key: pass the key of this memory", memory=folder
    )


def _failure(error: OSError, folder: Path) -> MemstoreError:
    if isinstance(error, MemstoreError):
        return error
    what = f"the file {KEYS_NAME} of memory {folder}"
    if error.errno in paths.FULL:
        return StoreFull(f"there is no room for {what}: nothing of this batch was stored", memory=folder)
    return paths.shortage(error.errno, folder) or MemstoreError(
        f"{what} cannot be used ({error.strerror}); open the memory again", memory=folder
    )
