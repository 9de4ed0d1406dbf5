"""The common parts of one open memory: the store, the entry of each document, and named values.

Named values are arrays and facts of the memory itself; they lie in the table META after the header.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, NotFound, ReadOnlyMemory
from memstore.index import capabilities_of, lies_on_devices, open_index
from memstore.json_checks import anything, array, check_whole, fit, storable, table, text
from memstore.lazy import device_copies, torch
from memstore.memory.entry import (
    FIRST_NAMED,
    NAMED_VALUE,
    NEXT_DOCUMENT,
    NEXT_DOCUMENT_VALUE,
    Catalog,
    DocumentState,
    Places,
    catalog_of,
    stored_state,
)
from memstore.memory.index_files import IndexFiles, folder_of
from memstore.memory.rules import Retention
from memstore.memory.spec import (
    HistoryRuns,
    LandmarkRuns,
    MemorySpec,
    Room,
    block_layouts,
    from_record,
    index_dtype,
    read_header,
    to_record,
)
from memstore.store.cache import BlockCache
from memstore.store.contract import BlockStore
from memstore.store.records import MAX_ITEM, Batch, Key, Layout, Record, Table

if TYPE_CHECKING:  # opening, listing and changing a memory work without PyTorch, which takes seconds to load
    from torch import Tensor

    from memstore.index import IndexCapabilities, VectorIndex

INFO = table(value=anything)
_LAST_NAMED = Key(Table.META, item=MAX_ITEM)
ARRAYS = table(arrays=array(text(1000), 254))

CHAT = "chat/"
"""Prefix in the name of a conversation's document."""
IMPORTING = "importing/"
"""Prefix in the name of a JSON value that marks a document as an unfinished import; copies do not take it."""
OF_DOCUMENT = ("file/", "reading/", IMPORTING)
"""Prefixes for the names of JSON values about a document; its name follows."""

_locks: WeakKeyDictionary[BlockStore, threading.RLock] = WeakKeyDictionary()
_guard = threading.Lock()


@dataclass(frozen=True, eq=False)
class SharedStore:
    """A store, the settings for reading it, and the lock for writers of this process."""

    store: BlockStore
    spec: MemorySpec
    url: str
    mode: str
    index: str
    """The kind of the vector indexes."""
    run_length: int
    """Blocks whose landmarks are stored together."""
    folder: Path | None
    """The folder of its files, if it has any."""
    blocks: BlockCache
    """Reads blocks, from its cache in memory if possible."""
    catalog: Catalog
    """Names and numbers of the documents."""
    device: torch.device | None
    """The device of indexes that can lie on an accelerator; None: the CPU."""
    forgotten: list[Callable[[Sequence[str]], None]] = field(default_factory=list)
    """Functions called with the names of documents that the rules have forgotten."""

    @classmethod
    def opened(
        cls, store: BlockStore, url: str, mode: str, index: str, folder: Path | None, budgets: Mapping[str, Any]
    ) -> SharedStore:
        """Return the shared parts for ``store``, whose files lie in ``folder``; ``budgets`` as for ``BlockCache``.

        Raises the errors of ``read_header``, and ``InvalidArgument``.
        """
        header, catalog = read_header(store, url), catalog_of(store, url)
        blocks = BlockCache(store, block_layouts(header.spec), **budgets)
        device = budgets.get("device")
        if device is not None:
            device = device_copies.device_of(device)
        return cls(store, header.spec, url, mode, index, header.blocks_per_run, folder, blocks, catalog, device)

    def __reduce__(self) -> NoReturn:
        # This refuses both pickle and copy: two memories on one store would close it for each other.
        raise InvalidArgument(
            f"the open memory {self.url} cannot be copied or sent to another process; send its url, and open it "
            "there: memstore.open(url, mode='r')",
            memory=self.url,
        )

    @property
    def writing(self) -> threading.RLock:
        """Lock to hold while a batch is composed and written; one for all memories on the same store."""
        with _guard:
            return _locks.setdefault(self.store, threading.RLock())

    @cached_property
    def retention(self) -> Retention:
        """Commits appends and applies the memory's rules."""
        return Retention(self.store, self.url, self.catalog, self.blocks, self.forgotten)

    @cached_property
    def index_files(self) -> IndexFiles:
        """Indexes that are kept beside the store."""
        return IndexFiles(folder_of(self.folder), self.spec, self.index, writable=not self.read_only)

    def places(self, number: int, state: DocumentState) -> Places:
        """Return the places of a document's blocks. Raises ``DamagedError``."""
        return self.catalog.places(number, state)

    @property
    def block_layouts(self) -> list[Layout]:
        """Layout of each field of a block, in the order of the records."""
        return block_layouts(self.spec)

    def runs(self, layer: int) -> LandmarkRuns:
        """Return the stored landmarks of one layer."""
        return LandmarkRuns(self.store, self.spec, layer, self.run_length)

    @cached_property
    def history(self) -> HistoryRuns:
        """The stored hashes of the histories of documents."""
        return HistoryRuns(self.store)

    @cached_property
    def named(self) -> NamedValues:
        """Arrays and facts of the memory itself."""
        return NamedValues(self)

    @cached_property
    def index_device(self) -> torch.device:
        """The device for indexes: a requested GPU, if they can lie there."""
        cpu = torch.device("cpu")
        device = cpu if self.device is None else self.device
        return device if device.type != "cuda" or lies_on_devices(self.index) else cpu

    def new_index(self) -> VectorIndex:
        """Return an empty index for one layer of a document."""
        from memstore.kernels.best_signs import problem

        spec, name, dtype = self.spec, self.index, index_dtype(self.spec.key_dtype)
        if spec.key_dtype == "bit" and self.index_device.type != "cpu" and name in ("exact", "auto"):
            dtype = torch.bool
        elif spec.key_dtype == "bit" and name == "exact" and problem() is None:
            name = "signs"
        return open_index(
            name,
            key_heads=spec.key_heads,
            key_dim=spec.key_dim,
            keys_per_block=spec.keys_per_block,
            dtype=dtype,
            **({} if self.index_device.type == "cpu" else {"device": self.index_device}),
        )

    @cached_property
    def capabilities(self) -> IndexCapabilities:
        """The abilities of its indexes. Raises ``InvalidArgument`` for an unknown kind."""
        known = capabilities_of(self.index)
        if known is None:
            index = self.new_index()
            index.close()
            known = index.capabilities
        return known

    def state(self, document: int) -> DocumentState | None:
        """Return the DOCUMENTS entry of a document. Raises ``DamagedError``."""
        # Between the two reads a writer may have forgotten it and erased its bytes.
        for look in (self.catalog.state, partial(stored_state, self.store)):
            state = look(document)
            if state is None or self._room.holds(state):
                return state
        assert state is not None
        raise DamagedError(
            f"the entry of document {state.name!r} is damaged: {state.tokens:,} tokens in {state.blocks:,} blocks "
            "are more than the whole memory has. Run verify",
            memory=self.url,
        )

    @cached_property
    def _room(self) -> Room:
        return Room(self.store, self.spec)

    def commit(self, batch: Batch, changed: Mapping[int, DocumentState | None] | None = None) -> None:
        """Write ``batch``, and update the catalog. The caller holds ``writing``.

        ``changed`` maps document numbers to new entries, or None if they are gone.
        """
        with self.catalog.committing() as told:
            self.store.write(batch)
            told.update(changed or {})

    def next_document(self) -> int:
        """Return the number for the next new document. Raises ``DamagedError``."""
        records = self.store.get(NEXT_DOCUMENT)
        if records is not None:
            told = fit(records[0].to_json(), NEXT_DOCUMENT_VALUE, "the number of the next document")
            return int(told["next_document"])
        if self.catalog.numbers():
            raise DamagedError(f"memory {self.url} has lost the number of its next document; run repair")
        return 1

    @property
    def read_only(self) -> bool:
        """Whether nothing may be written: because of its mode, or because its files are read-only."""
        return self.mode == "r" or self.store.read_only

    def check_writable(self) -> None:
        """Raise ``ReadOnlyMemory`` if nothing may be written."""
        if self.read_only:
            raise ReadOnlyMemory.opened(self.url)

    def changing(self) -> threading.RLock:
        """Return the lock ``writing``, to be held for a change. Raises ``ReadOnlyMemory`` if nothing may be written."""
        self.check_writable()
        return self.writing

    def check_layer(self, layer: int) -> None:
        """Raise ``InvalidArgument`` for a layer that the memory does not have."""
        check_whole("layer", layer, 0, self.spec.layers - 1)


def next_document_record(number: int) -> Record:
    """Return the record to store under ``NEXT_DOCUMENT``."""
    return Record.from_json({"next_document": number})


def not_found(name: str, url: str, names: list[str]) -> NotFound:
    """Return the error for a missing document. Of ``names``, those that contain its name come first."""
    names = sorted(names, key=lambda known: name.lower() not in known.lower())
    shown = ", ".join(repr(known) for known in names[:10]) + (f" and {len(names) - 10:,} more" * (len(names) > 10))
    return NotFound(f"memory {url} has no document {name!r}; it has {shown or 'none'}.")


class Handle:
    """Keeps the number of a document once it has one, and reads its entry again after every commit."""

    def __init__(self, shared: SharedStore, name: str, number: int | None = None) -> None:
        self.shared = shared
        self.name = name
        self.id = shared.catalog.find(name) if number is None else number
        """Number of the document; None before its first append."""
        self._seen: tuple[int, DocumentState] | None = None
        """The store's version at the last read of its entry, and that entry."""

    @property
    def places(self) -> Places:
        """The places of its values; only for a stored document."""
        state = self.current()
        assert self.id is not None
        return self.shared.places(self.id, state)

    def current(self) -> DocumentState:
        """Return the state at the last commit of any writer. The store is read only after a new commit.

        Raises ``NotFound`` if the document was forgotten, and ``DamagedError``.
        """
        # The version is read first: a commit between the two reads only makes the next call read again.
        version = self.shared.store.version()
        seen = self._seen
        if seen is None or seen[0] != version:
            seen = self._seen = version, self._load()
        return seen[1]

    def committed(self, number: int, state: DocumentState) -> None:
        """Take over the state that this process has just written; the caller has the right to write."""
        self.id = number
        # The catalog has the changes of the commit, and nobody else can have committed since. So nothing is read back.
        self._seen = self.shared.catalog.version, state

    def _load(self) -> DocumentState:
        number = self.id if self.id is not None else self.shared.catalog.find(self.name)
        if number is None:
            return DocumentState(name=self.name)
        self.id = number  # never back to None, which another thread may have found a moment ago
        state = self.shared.state(number)
        if state is None:
            raise NotFound(
                f"document {self.name!r} of memory {self.shared.url} was forgotten; get the document from the "
                "memory again."
            )
        return state


def owner_of(fact: str) -> str | None:
    """Return the document that a JSON value is about and is forgotten with, from the value's name; None without one.

    ``file/DOCUMENT`` is its file, ``reading/DOCUMENT`` the options of its reading (from earlier versions),
    ``importing/DOCUMENT`` a mark, and ``said/SESSION/NUMBER`` a turn of the conversation ``chat/SESSION``.
    """
    kind, slash, name = fact.partition("/")
    if kind == "said":
        session, _, number = name.rpartition("/")
        return CHAT + session if session and number.isdecimal() else None
    return name if kind + slash in OF_DOCUMENT and name else None


def about(fact: str, document: str) -> str | None:
    """Return the name of ``fact`` with ``document`` in place of its owner; the same name if it has no owner.

    None for a turn of a conversation if ``document`` is not one.
    """
    if owner_of(fact) is None:
        return fact
    kind, _, name = fact.partition("/")
    if kind != "said":
        return f"{kind}/{document}"
    number = name.rpartition("/")[2]
    return f"said/{document.removeprefix(CHAT)}/{number}" if document.startswith(CHAT) else None


class NamedValues:
    """Named values. The first record of each is JSON ``{"kind", "name", ...}``; tensors follow it.

    Their numbers are never used twice, or an open memory would confuse a new value with an old one. So if the last one
    is deleted, a value without a name takes its place.
    """

    def __init__(self, shared: SharedStore) -> None:
        self._shared = shared
        self._known: dict[tuple[str, str], Key] = {}
        """Kind and name -> key of the values below ``_next``."""
        self._next = FIRST_NAMED.item
        self._unread: dict[Key, DamagedError] = {}
        """Damaged values below ``_next``, whose names are unknown."""
        self._lock = threading.Lock()

    def put_arrays(self, name: str, arrays: dict[str, Tensor]) -> None:
        """Store tensors under ``name``, replacing older ones, in one transaction."""
        from memstore.index.contract import check_tensor  # imports PyTorch, needed only to write arrays

        if not isinstance(arrays, dict):
            raise InvalidArgument(f"arrays must be a dict of tensors by name, not {type(arrays).__name__}.")
        for key, tensor in arrays.items():
            check_tensor(f"the array {key!r}", tensor)
        records = [to_record(tensor) for tensor in arrays.values()]
        self._put("arrays", name, {"arrays": list(arrays)}, records)

    def get_arrays(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors under ``name``, or None."""
        found = self._find("arrays", name)
        return None if found is None else _arrays(head_of(found[1]), found[1])

    def put_info(self, name: str, value: Any) -> None:
        """Store a small JSON value under ``name``, replacing an older one; None removes it."""
        if value is None:
            with self._shared.writing:
                batch = Batch()
                self._remove(batch, [name])
                if batch.deletes:
                    self._shared.commit(batch)
            return
        self._put("info", name, {"value": value}, [])

    def get_info(self, name: str) -> Any:
        """Return the JSON value under ``name``, or None."""
        found = self._find("info", name)
        return None if found is None else head_of(found[1])["value"]

    def infos(self, beginning: str) -> dict[str, Any]:
        """Return all JSON values whose names begin with this prefix, by name."""
        keys = [key for name, key in self._infos().items() if name.startswith(beginning)]
        if self._unread:  # one of these may have the prefix
            raise next(iter(self._unread.values()))
        heads = [head_of(records) for key in keys if (records := self._shared.store.get(key)) is not None]
        return {head["name"]: head["value"] for head in heads if head["name"]}

    def forget(self, batch: Batch, document: str) -> None:
        """Let ``batch`` delete the facts about a document; see ``owner_of``."""
        said = [name for name in self._infos() if owner_of(name) == document] if document.startswith(CHAT) else []
        self._remove(batch, [*(kind + document for kind in OF_DOCUMENT), *said])

    def all(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Return all JSON values and all arrays, by their names."""
        info: dict[str, Any] = {}
        arrays: dict[str, dict[str, Tensor]] = {}
        for key in self._keys():
            records = self._shared.store.get(key)
            if records is None:
                continue
            head = head_of(records)
            if not head["name"]:
                continue
            if head["kind"] == "info":
                info[head["name"]] = head["value"]
            else:
                arrays[head["name"]] = _arrays(head, records)
        return info, arrays

    def put_missing(self, info: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        """Store the ``info`` and ``arrays`` from ``source`` whose names are missing here.

        All in one transaction. Raises ``ForeignMemory`` if a name has other arrays.
        """
        if not info and not arrays:
            return
        kept = (item for item in info.items() if not item[0].startswith(IMPORTING))
        facts = [(_head("info", name, {"value": value}),) for name, value in kept]
        tensors = (
            (_head("arrays", name, {"arrays": list(each)}), *map(to_record, each.values()))
            for name, each in arrays.items()
        )
        with self._shared.writing:
            self._read_new()
            batch, item = Batch(), self._next
            for records in chain(facts, tensors):
                head = head_of(records)
                key = self._known.get((head["kind"], head["name"]))
                if key is None:
                    batch.put(Key(Table.META, item=item), *records)
                    item += 1
                elif head["kind"] == "arrays" and _contents(self._shared.store.get(key) or ()) != _contents(records):
                    raise ForeignMemory(
                        f"memory {self._shared.url} has other arrays under the name {head['name']!r} than "
                        f"{source}, so their states do not fit together. Copy to a new memory."
                    )
            if batch.puts:
                self._shared.commit(batch)

    def _put(self, kind: str, name: str, facts: dict[str, Any], records: list[Record]) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"the name of a fact must be a non-empty text, not {name!r}.")
        # An unreadable value would block access to all the others.
        for check in (NAMED_VALUE, INFO if kind == "info" else ARRAYS):
            storable({"kind": kind, "name": name, **facts}, check, f"the value under the name {reprlib.repr(name)}")
        head = _head(kind, name, facts)
        with self._shared.writing:
            found = self._find(kind, name)
            batch = Batch()
            batch.put(Key(Table.META, item=self._next) if found is None else found[0], head, *records)
            self._shared.commit(batch)

    def _infos(self) -> dict[str, Key]:
        self._read_new()
        with self._lock:
            return {name: key for (kind, name), key in self._known.items() if kind == "info" and name}

    def _remove(self, batch: Batch, names: Iterable[str]) -> None:
        """Let ``batch`` delete the JSON values with these names, if they exist."""
        self._read_new()
        gone = [key for name in names if (key := self._known.get(("info", name))) is not None]
        if not gone:
            return
        last = Key(Table.META, item=self._next - 1)
        if (place := self._known.get(("info", ""))) is not None:
            gone.append(place)
        for key in gone:
            batch.delete(key)
        if last in gone:
            batch.put(last, _head("info", "", {"value": None}))

    def _find(self, kind: str, name: str) -> tuple[Key, tuple[Record, ...]] | None:
        self._read_new()
        key = self._known.get((kind, name))
        records = None if key is None else self._shared.store.get(key)
        if key is not None and records is not None and head_of(records)["name"] == name:
            return key, records
        if self._unread:  # it may be one of these
            raise next(iter(self._unread.values()))
        return None

    def _read_new(self) -> None:
        """Read the names of new values, which lie after all others."""
        with self._lock:
            try:
                for key, records in self._shared.store.walk(Key(Table.META, item=self._next), _LAST_NAMED):
                    self._note(key, head_of(records))
                unread = list(self._unread)
            except DamagedError:  # reading one by one shows which
                unread = [*self._unread, *self._keys(self._next)]
            for key in unread:
                try:
                    records_of_it = self._shared.store.get(key)
                    self._note(key, None if records_of_it is None else head_of(records_of_it))
                except DamagedError as error:
                    self._unread[key] = error
                    self._next = max(self._next, key.item + 1)

    def _note(self, key: Key, head: Mapping[str, Any] | None) -> None:
        self._unread.pop(key, None)
        self._next = max(self._next, key.item + 1)
        if head is not None:
            self._known[head["kind"], head["name"]] = key

    def _keys(self, first: int = FIRST_NAMED.item) -> list[Key]:
        return self._shared.store.keys(Key(Table.META, item=first), _LAST_NAMED)


def head_of(records: tuple[Record, ...]) -> dict[str, Any]:
    """Return the head of a named value. Raises ``DamagedError``."""
    head: dict[str, Any] = fit(records[0].to_json(), NAMED_VALUE, "a named value")
    if head["kind"] == "info":
        return fit(head, INFO, f"the value under the name {head['name']!r}")  # type: ignore[no-any-return]
    names = fit(head, ARRAYS, f"the value under the name {head['name']!r}")["arrays"]
    if len(names) != len(records) - 1 or any(record.layout.dtype == "json" for record in records[1:]):
        raise DamagedError(f"the arrays under the name {head['name']!r} are damaged; restore them from a copy")
    return head


def _arrays(head: dict[str, Any], records: tuple[Record, ...]) -> dict[str, Tensor]:
    return dict(zip(head["arrays"], map(from_record, records[1:]), strict=True))


def _head(kind: str, name: str, facts: Mapping[str, Any]) -> Record:
    return Record.from_json({"kind": kind, "name": name, **facts})


def _contents(records: tuple[Record, ...]) -> list[tuple[Layout, bytes]]:
    return [(record.layout, record.payload.tobytes()) for record in records]
