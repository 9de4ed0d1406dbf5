"""Stores by the url of a memory: a path, ``zarr:PATH``, ``zarr+s3://...``, ``ram:``, or another package's.

The shards of a memory in object storage (``zarr+s3://bucket/prefix``, and all others that ``obstore`` supports) lie at
the url. Documents, tokens, landmarks, recent blocks and the manifest change with every commit, so they stay in a folder
of a local disk, the *tail*. ``?tail=PATH`` after the url names it. By default it lies among the user's data, under a
hash of the url. The two belong together; neither is a memory without the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast
from urllib.parse import parse_qs, urlsplit

from xxhash import xxh3_128_hexdigest

from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemstoreError,
    NotAMemory,
    NotFound,
    StoreFull,
    WrongKey,
    opening,
)
from memstore.paths import FULL, user_folder
from memstore.store.contract import BlockStore
from memstore.store.encrypted import OVERHEAD, EncryptedStore, sealed
from memstore.store.encryption_keys import (
    KEYS_NAME,
    VARIABLE,
    KeySource,
    KeyTable,
    MasterKey,
    key_of_environment,
    read_key,
)
from memstore.store.ram import RamStore
from memstore.store.records import Batch, Key, Table

if TYPE_CHECKING:
    from memstore.store.lmdb.store import LmdbStore
    from memstore.store.zarr import ZarrStore
    from memstore.store.zarr.objects import BucketObjects


SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")
"""Schemes allowed after ``zarr+``."""


class _Remote(NamedTuple):
    """The two places of a memory in object storage."""

    shards: str
    """Url for ``obstore``."""
    tail: Path
    """Folder on a local disk."""


def is_remote(url: str | Path) -> bool:
    """Whether a url means object storage."""
    return str(url).startswith("zarr+")


def remote_places(url: str) -> _Remote:
    """Return the places of the memory at ``url``. Raises ``InvalidArgument``."""
    parts = urlsplit(url.removeprefix("zarr+"))
    options = parse_qs(parts.query, keep_blank_values=True)
    if parts.scheme not in SCHEMES or not (parts.netloc or parts.path.strip("/")) or parts.fragment:
        known = ", ".join(f"zarr+{scheme}://..." for scheme in SCHEMES)
        raise InvalidArgument(f"cannot open {url!r}: expected one of {known}, such as zarr+s3://bucket/prefix")
    if set(options) - {"tail"} or options.get("tail") == [""]:
        raise InvalidArgument(f"cannot open {url!r}: after the question mark, only tail=PATH is allowed")
    shards = parts._replace(query="").geturl().rstrip("/")
    if "tail" in options:
        return _Remote(shards, Path(options["tail"][-1]))
    return _Remote(shards, user_folder("data") / "tails" / xxh3_128_hexdigest(shards.encode()))


def open_shards(remote: _Remote, *, read_only: bool) -> BucketObjects | Path:
    """Return the shards as a folder, or as objects in a bucket, for which ``obstore`` finds the credentials.

    Raises ``InvalidArgument``.
    """
    if remote.shards.startswith("file:"):
        folder = Path(urlsplit(remote.shards).path)
        try:
            if not read_only:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"the folder {folder} cannot be created: {error.strerror}") from None
        return folder
    try:
        import obstore  # noqa: F401 - whether it is there

        from memstore.store.zarr.objects import from_url
    except ImportError:
        raise InvalidArgument("memories in Zarr need a package: pip install 'torch-memstore[zarr]'") from None
    try:
        return from_url(remote.shards)
    except OSError as error:
        raise InvalidArgument(f"the storage of zarr+{remote.shards} cannot be opened: {error}") from None


ENTRY_POINTS = "memstore.stores"
"""Entry point group of other packages' stores: scheme -> a callable ``(url, mode, blank) -> OpenStore``."""

Mode = Literal["a", "r", "x"]

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):")
_named: dict[str, BlockStore] = {}


class NewMemory(NamedTuple):
    """The data that makes a store a new memory."""

    batch: Batch
    """The first batch, committed as a whole or not at all."""
    block_bytes: int
    """Bytes of one block of one layer, a hint for packing small blocks."""
    token_bytes: int = 0
    """Bytes of the token ids of one block, for the same purpose; 0 if unknown."""
    key: MasterKey | None = None
    """The key of an encrypted memory; None: no encryption. For memstore's own stores."""

    def first(self, folder: Path) -> Batch:
        """Return the first batch as a memory in ``folder`` stores it; the keys of an encrypted one are put there."""
        return self.batch if self.key is None else sealed(self.batch, KeyTable.create(folder, self.key))


class OpenStore(NamedTuple):
    """A store that holds a memory."""

    store: BlockStore
    own: bool = True
    """Whether closing the memory closes the store."""


def open_store(url: str | Path, mode: Mode, blank: NewMemory | None, key: KeySource | None = None) -> OpenStore:
    """Open the store at ``url``, or make one from ``blank`` if ``mode`` and ``blank`` allow it.

    ``key`` opens an encrypted memory; the default is the environment's key, if set. Raises ``NotFound``,
    ``NotAMemory``, ``InvalidArgument``, ``WrongKey`` and the errors of the store.
    """
    given = None if key is None else read_key(key)
    if blank is not None and (given or on_disk(url)):
        blank = blank._replace(key=given or key_of_environment())
    with opening(url):
        found = _open(url, mode, blank)
    try:
        return found._replace(store=_unlocked(found.store, url, given))
    except BaseException:
        if found.own:
            found.store.close()
        raise


def _unlocked(store: BlockStore, url: str | Path, key: MasterKey | None) -> BlockStore:
    """Return ``store`` for reading: through its keys, if it is encrypted. Raises ``WrongKey``."""
    if isinstance(store, EncryptedStore):  # a named one in host memory
        store.table.check(key)
        return store
    place = folder(url)
    if not _is_encrypted(store, place):
        if key is not None:
            raise _needs_no_key(url)
        return store
    key = key or key_of_environment()
    if key is None:
        raise WrongKey(
            f"memory {url} is encrypted: pass its key file (--key-file FILE, or {VARIABLE}=FILE; in Python "
            "memstore.open(..., key=FILE))",
            memory=str(url),
        )
    assert place is not None
    with opening(url):
        return EncryptedStore(store, KeyTable.open(place, key))


def _is_encrypted(store: BlockStore, folder: Path | None) -> bool:
    """Whether the values of ``store`` are ciphertext, which its header, the first value of META, shows."""
    try:
        header = store.get(Key(Table.META))
    except DamagedError:
        return folder is not None and os.path.lexists(folder / KEYS_NAME)
    return header is not None and header[0].layout.dtype != "json"


def check_key_used(urls: Sequence[str | Path]) -> None:
    """Raise ``WrongKey`` if all ``urls`` have memories without encryption: a key would have no effect."""
    if urls and all(map(_is_plain, urls)):
        raise _needs_no_key(urls[0])


def _is_plain(url: str | Path) -> bool:
    """Whether a memory without encryption exists there. Errors of opening are left to the later use."""
    place = folder(url)
    if place is None or os.path.lexists(place / KEYS_NAME):
        return False
    try:
        store = open_locked(url)
    except MemstoreError:
        return False
    try:
        return not _is_encrypted(store, place)
    finally:
        store.close()


def _needs_no_key(url: str | Path) -> WrongKey:
    return WrongKey(
        f"memory {url} is not encrypted, but a key was given: open it without a key. memstore copy makes an "
        "encrypted copy",
        memory=str(url),
    )


def _open(url: str | Path, mode: Mode, blank: NewMemory | None, **options: Any) -> OpenStore:
    """``options`` are for our own stores on disk."""
    if mode not in ("a", "r", "x"):
        raise InvalidArgument(f"mode must be 'a' (open or create), 'r' (read) or 'x' (create), not {mode!r}.")
    if not isinstance(url, str | os.PathLike) or "\0" in str(url):
        raise InvalidArgument(f"the url of a memory must be a text or a Path without NUL, not {url!r}.")
    if mode == "x" and blank is None:
        raise InvalidArgument("mode 'x' creates a memory, which needs a spec; pass spec=MemorySpec(...).")
    if url in ("", "zarr:"):  # pathlib would read it as the working directory
        raise InvalidArgument(f"the path of the memory is empty: {str(url)!r}. Name a folder; ./ is the current one")
    scheme = _SCHEME.match(url) if isinstance(url, str) else None
    if scheme is None:
        return _open_lmdb(Path(url), mode, blank, **options)
    if scheme[1] == "ram":
        return _open_ram(str(url)[4:], mode, blank)
    if scheme[1] == "zarr":
        from memstore.store.zarr import ZarrStore

        place = Path(str(url)[5:])
        return _open_folder(ZarrStore, place, f"zarr:{place}", mode, blank, exists=lambda: _has_tail(place), **options)
    if is_remote(url):
        return _open_remote(str(url), mode, blank, **options)
    if blank is not None and blank.key is not None:
        raise InvalidArgument(
            f"{url} cannot be encrypted: encryption works for memories on disk, in buckets and in ram:"
        )
    found = _plugin(scheme[1], str(url))(str(url), mode, blank)
    if not isinstance(found, OpenStore):
        raise InvalidArgument(
            f"the package that opens {scheme[1]}: returned a {type(found).__name__} instead of an OpenStore. "
            "Report this to its authors; docs/stores.md says what is expected."
        )
    return found


def opened(store: BlockStore, url: str, mode: Mode, blank: NewMemory | None) -> OpenStore:
    """Return a store of another package, which creates missing parts when opened, as a memory in every mode.

    If ``store.version()`` is 0, nothing was ever committed. The store is closed before ``NotFound`` or
    ``InvalidArgument`` is raised.
    """
    with ExitStack() as refused:
        refused.callback(store.close)
        if mode == "x" and store.version():
            raise InvalidArgument(f"a memory exists already at {url}; open it with mode 'a', or choose another path.")
        if not store.version():
            if mode == "r" or blank is None:
                raise _missing(url, mode)
            store.write(blank.batch)
        refused.pop_all()
    return OpenStore(store)


def open_unchecked(url: str | Path, key: MasterKey | None = None) -> BlockStore:
    """Return the store at ``url``, for reading even if the tree around its values is damaged: that may end the process.

    Raises the errors of ``open_store``.
    """
    return _unlocked(open_locked(url), url, key)


def open_locked(url: str | Path) -> BlockStore:
    """Return the store without decryption: ciphertext, if the memory is encrypted."""
    with opening(url):
        return _open(url, "r", None, check=False).store


def is_path(url: str | Path) -> bool:
    """Whether ``url`` names a folder."""
    return not isinstance(url, str) or _SCHEME.match(url) is None


def on_disk(url: str | Path) -> bool:
    """Whether other processes of this machine can open ``url`` for reading, with memstore's own stores."""
    return is_path(url) or str(url).startswith("zarr:") or is_remote(url)


def folder(url: str | Path) -> Path | None:
    """Return the folder of a memory on disk, or the tail's for object storage; None without one."""
    if is_remote(url):
        return remote_places(str(url)).tail
    return Path(str(url).removeprefix("zarr:")) if on_disk(url) else None


class OpenFolder:
    """The folder of an open memory. If another folder takes its place later, that is another memory."""

    def __init__(self, url: str) -> None:
        self._folder = folder(url)
        self._open: int | None = None
        if self._folder is not None and self._folder.is_dir():  # a reader of object storage may have no folder
            self._open = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def check(self) -> None:
        """Raise ``NotFound`` if the memory's folder is gone, before a new one is made in its place."""
        if self._folder is None or self._open is None:
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.fstat(self._open), self._folder.stat()):
                return
        raise NotFound(
            f"the memory that was opened at {self._folder} was removed or replaced: put it back, or open the "
            "memory again",
            memory=str(self._folder),
        )


def _plugin(scheme: str, url: str) -> Callable[[str, Mode, NewMemory | None], object]:
    plugins = entry_points(group=ENTRY_POINTS)
    if scheme not in plugins.names:
        others = "".join(f", {name}:..." for name in sorted(plugins.names))
        here = f"a path (write ./{url} for a folder of this name), zarr:PATH, zarr+s3://BUCKET/PREFIX, ram:, ram:NAME"
        raise InvalidArgument(f"cannot open {url!r}: supported are {here}{others}.")
    try:
        return cast("Callable[[str, Mode, NewMemory | None], object]", plugins[scheme].load())
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(
            f"cannot open {url!r}: {plugins[scheme].value}, which another package provides, cannot be loaded "
            f"({error}). Repair or remove that package."
        ) from error


def _open_ram(name: str, mode: Mode, blank: NewMemory | None) -> OpenStore:
    if name in _named:
        if mode == "x":
            raise InvalidArgument(
                f"the memory ram:{name} exists already; open it with mode 'a', or choose another name."
            )
        return OpenStore(_named[name], own=False)
    if mode == "r" or blank is None:
        raise _missing(f"ram:{name}", mode)
    store: BlockStore = RamStore()
    if blank.key is not None:
        store = EncryptedStore(store, KeyTable.create(None, blank.key))
    store.write(blank.batch)
    if name:
        _named[name] = store
    return OpenStore(store, own=not name)


def _open_lmdb(folder: Path, mode: Mode, blank: NewMemory | None, **options: Any) -> OpenStore:
    from memstore.store.lmdb.store import LmdbStore

    if _has_tail(folder):
        raise NotAMemory(f"{folder} holds a memory in Zarr; open it as zarr:{folder}")
    return _open_folder(LmdbStore, folder, str(folder), mode, blank, exists=(folder / "data.mdb").exists, **options)


def _open_remote(url: str, mode: Mode, blank: NewMemory | None, *, doubted: bool = False, **options: Any) -> OpenStore:
    """``doubted`` says that the copy of a published memory could not be opened: it may be damaged."""
    from memstore.store.zarr import ZarrStore

    where = remote_places(url)
    tail = where.tail
    shards = options["shards"] = open_shards(where, read_only=mode == "r")
    try:
        if not _has_tail(tail):
            mode, tail = _elsewhere(url, mode, blank, shards, tail, doubted=doubted)
        return _open_folder(ZarrStore, tail, url, mode, blank, exists=lambda: _has_tail(tail), **options)
    except (DamagedError, NotAMemory):
        if doubted or tail == where.tail:
            raise
        return _open_remote(url, mode, blank, doubted=True, **options)
    except OSError as error:
        if isinstance(error, MemstoreError):
            raise
        if error.errno in FULL:
            raise StoreFull(f"{tail} has no room for a copy of {url}: free some space there", memory=url) from error
        raise MemstoreError(
            f"the storage of {url} cannot be used ({' '.join(str(error).split())[:200]}); nothing was changed. "
            "Check the address and its credentials"
        ) from error


def _elsewhere(
    url: str, mode: Mode, blank: NewMemory | None, shards: BucketObjects | Path, tail: Path, *, doubted: bool
) -> tuple[Mode, Path]:
    """Return how, and in which folder, to open the published form of a memory whose tail is on another computer."""
    if isinstance(shards, Path):
        if mode == "r" or blank is None:
            raise NotFound(
                f"there is no memory at {url}: its tail should be in {tail}. Check the url and its ?tail=PATH, or "
                "create the memory"
            )
        return mode, tail
    from memstore.store.zarr.published import fetch, last_version

    if mode == "r" or blank is None:
        return "r", fetch(shards, tail, url, doubted=doubted)
    if last_version(shards) is not None:
        raise ForeignMemory(
            f"another computer writes the memory at {url}, or its tail is not in {tail}. Open it with mode='r' to "
            "read it. To write here, copy it to another place"
        )
    return mode, tail


def _open_folder(
    kind: type[LmdbStore] | type[ZarrStore],
    folder: Path,
    url: str,
    mode: Mode,
    blank: NewMemory | None,
    *,
    exists: Callable[[], bool],
    **options: Any,
) -> OpenStore:
    """Open a store in a folder, or make one; ``exists`` says whether the folder has one, finished or not.

    ``options`` are for ``kind``.
    """
    if mode == "r":
        return OpenStore(kind.open(folder, read_only=True, url=url, **options))
    if mode == "a" and exists():
        try:
            return OpenStore(kind.open(folder, url=url, **options))
        except NotFound:  # its creation was interrupted
            if blank is None:
                raise
    if blank is None:
        if folder.exists():
            return OpenStore(kind.open(folder, url=url, **options))  # its error says what the path is instead
        raise _missing(url, mode)
    more = 0 if blank.key is None else OVERHEAD
    # LMDB rounds values up to pages of 4 KiB. So small blocks share values of 32 to 64 KiB.
    options["blocks_per_value"] = max(1, (48 << 10) // (blank.block_bytes + more))
    options["tokens_per_value"] = _tokens_per_value(blank.token_bytes and blank.token_bytes + more)
    return OpenStore(kind.create(folder, batch=partial(blank.first, folder), url=url, **options))


def _has_tail(folder: Path) -> bool:
    # Not Path.exists: the store reports names that are too long.
    return os.path.exists(folder / "tail" / "data.mdb")  # noqa: PTH110


def _tokens_per_value(token_bytes: int) -> int:
    # One page of 4 KiB beside the tree. Small values lie in the tree itself. There, token ids would be most of it, and
    # opening a memory reads all of it. With more than a page, an append of one block would rewrite them all.
    from memstore.store.records import HEADER_BYTES, padding

    return max(1, (4096 - 16) // (HEADER_BYTES + token_bytes + padding(token_bytes))) if token_bytes else 1


def _missing(url: str, mode: Mode) -> NotFound:
    way_out = (
        "create it first (mode 'a' with a spec), or check the path"
        if mode == "r"
        else "check the path, or pass a spec to create it"
    )
    return NotFound(f"there is no memory at {url}; {way_out}.")
