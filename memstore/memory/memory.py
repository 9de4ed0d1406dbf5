"""A memory: all documents of one model, on one store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from memstore.errors import ForeignMemory, InvalidArgument, MemstoreError, ReadOnlyMemory, StoreFull, opening
from memstore.memory import verify
from memstore.memory.document import Container, Document
from memstore.memory.entry import LONGEST_NAME
from memstore.memory.rules import Rules, WhenFull, utc
from memstore.memory.shared import CHAT, SharedStore, not_found, owner_of
from memstore.memory.spec import (
    MemorySpec,
    beginning,
    blank,
    byte_rows,
    chain,
    kept_recurrent,
    plain_layouts,
    run_layout,
)
from memstore.memory.traces import Traces, traces_of
from memstore.memory.urls import Mode, OpenStore, folder, on_disk, open_store
from memstore.memory.usage import Deletion, Usage
from memstore.memory.verify import Finding
from memstore.paths import FULL
from memstore.store.contract import Compaction, Progress
from memstore.store.encrypted import EncryptedStore
from memstore.store.encryption_keys import KeySource, read_key

if TYPE_CHECKING:  # opening, listing and changing a memory work without PyTorch, which takes seconds to load
    import torch
    from torch import Tensor

    from memstore.index import IndexCapabilities
    from memstore.memory.append import Tokens
    from memstore.memory.repair import RepairOutcome

_log = logging.getLogger("memstore.index")


def open_memory(
    url: str | Path,
    *,
    spec: MemorySpec | None = None,
    mode: Mode = "a",
    index: str = "exact",
    host_bytes: int | None = None,
    device_bytes: int = 0,
    device: str | torch.device | None = None,
    max_bytes: int | None = None,
    when_full: WhenFull | None = None,
    key: KeySource | None = None,
) -> Memory:
    """Open the memory at ``url``, or create it; this is ``memstore.open``.

    ``url`` is a path, ``zarr:PATH`` (a folder whose old blocks are Zarr arrays), ``ram:`` (gone when closed) or
    ``ram:NAME`` (one memory per name, until the process ends). The ``mode`` is "a" (open, or create if there is a
    spec), "r" (must exist, only read) or "x" (must not exist). The vector ``index`` finds blocks: "exact",
    "faiss:IVF1024,Flat", "auto", ...; see docs/indexes.md.

    Blocks that are used often are cached in ``host_bytes`` of host memory (by default 64 MiB for a memory on disk; 0
    for none), and in ``device_bytes`` on the accelerator ``device``. Indexes lie there too if they can ("exact",
    "auto"). Without ``device`` they are searched on the CPU. If ``max_bytes`` and
    ``when_full`` are given, they become the memory's: see ``Memory.limit``.

    The ``key`` opens an encrypted memory, and encrypts a new one: a file, or a function that returns 32 bytes. Without
    it, the file in the environment variable ``MEMSTORE_KEY_FILE`` is used, for an encrypted memory, or a new one other
    than ``ram:``.

    Raises ``NotFound``, ``NotAMemory``, ``ForeignMemory`` (a model or layout other than ``spec``, or a newer format),
    ``WrongKey``, ``MemoryInUse`` (another process writes), ``ReadOnlyMemory``, ``InvalidArgument`` or ``DamagedError``.
    """
    opened = open_store(url, mode, None if spec is None else blank(spec), key)
    try:
        budgets = {"host_bytes": host_bytes, "device_bytes": device_bytes, "device": device}
        kept = None if isinstance(opened.store, EncryptedStore) else folder(url)  # indexes are not encrypted
        with opening(url):
            shared = SharedStore.opened(opened.store, str(url), mode, index, kept, budgets)
        memory = Memory(shared, opened)
        if memory.encrypted and index.partition(":")[0] == "milvus":
            raise InvalidArgument(
                f"memory {url} is encrypted, but Milvus would keep its landmarks unencrypted in files of its own; "
                "choose another index."
            )
        if index != "exact":
            shared.new_index().close()  # so that an unusable index is an error now, not at the first search
        if spec is not None:
            check_same(spec, shared)
        if max_bytes is not None or when_full is not None:
            rules = shared.retention.rules()
            memory.limit(rules.max_bytes if max_bytes is None else max_bytes, when_full or rules.when_full)
        return memory
    except BaseException:
        _close(opened)
        raise


class Memory:
    """Documents of one model. Made by ``memstore.open``; closed by ``close`` or at the end of ``with``."""

    def __init__(self, shared: SharedStore, opened: OpenStore) -> None:
        self._shared = shared
        self._opened = opened
        identity = shared.store.table.identity if isinstance(shared.store, EncryptedStore) else None
        self._traces = traces_of(shared.store, folder(shared.url), shared.url, identity=identity)
        shared.forgotten.append(self._forget_traces)
        self._documents: dict[str, Document] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Memory({self.url!r}, mode={self.mode!r}, {self.spec.fingerprint.architecture})"

    def __reduce__(self) -> NoReturn:
        self._shared.__reduce__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def spec(self) -> MemorySpec:
        """The layout of this memory."""
        return self._shared.spec

    @property
    def url(self) -> str:
        """Its path or url."""
        return self._shared.url

    @property
    def mode(self) -> str:
        """The mode it was opened with: "a", "r" or "x"."""
        return self._shared.mode

    @property
    def version(self) -> int:
        """A number that grows with every commit of any process."""
        return self._shared.store.version()

    @property
    def index(self) -> str:
        """The kind of its vector indexes, as given to ``memstore.open``."""
        return self._shared.index

    @property
    def index_capabilities(self) -> IndexCapabilities:
        """The abilities of its vector indexes."""
        return self._shared.capabilities

    @property
    def traces(self) -> Traces:
        """Records of generations, kept beside the memory; see ``Reader.record`` and others."""
        return self._traces

    def documents(self) -> list[Document]:
        """Return all stored documents, in the order they were made."""
        return [self._document(name, number) for number, name in self._shared.catalog.names().items()]

    def document(self, name: str) -> Document:
        """Return the document ``name``. If it is missing, return a new one, stored at its first append.

        Raises ``InvalidArgument`` for a bad name, and ``NotFound`` if it is missing and cannot be made (mode "r").
        """
        check_name(name)
        document = self._document(name)
        if self._shared.read_only and document.id is None:
            with self._lock:
                self._documents.pop(name, None)
            raise self._no_document(name)
        return document

    def forget(self, name: str) -> None:
        """Delete a document, its blocks that no fork uses, and the facts about it, in one transaction.

        Those facts are its file, and the turns of a conversation (``chat/SESSION``). Its indexes and traces are deleted
        afterwards. If that fails, ``compact`` deletes them later.

        Raises ``NotFound``, ``ReadOnlyMemory``, ``DamagedError``, and the errors of ``Traces.remove``.
        """
        with self._shared.changing():
            number = self._shared.catalog.find(name)
            if number is None:
                raise self._no_document(name)
            self._shared.commit(Deletion(self._shared).forget([number]), {number: None})
            failed = _failures(self._sweep)
        with self._lock:
            document = self._documents.pop(name, None)
        for view in () if document is None else document.views():
            if view.index is not None:
                view.index.drop()
        self._report(f"document {name!r} is forgotten", failed + _failures(lambda: self._forget_traces([name])))

    def _forget_traces(self, documents: Iterable[str]) -> None:
        """Delete the traces of forgotten conversations. Raises as ``Traces.remove``, and ``DamagedError``."""
        chats = [name for name in documents if name.startswith(CHAT)]
        self._traces.remove(*(trace.number for name in chats for trace in self._traces.of_conversation(name)))

    def _forget_old_traces(self) -> None:
        """Delete the traces of conversations that are gone."""
        told = (trace.info.get("conversation") for trace in self._traces.list())
        names = {str(of.get("document")) for of in told if isinstance(of, dict)}
        # The words of a new conversation are stored before its document.
        alive = {*self._shared.catalog.names().values(), *map(owner_of, self.infos("said/"))}
        self._forget_traces(names - alive)

    def _report(self, done: str, failed: Sequence[Exception]) -> None:
        """Raise one error for all clean-ups that ``failed`` after something was ``done``."""
        if failed:
            kind = next((type(each) for each in failed if isinstance(each, MemstoreError)), MemstoreError)
            raise kind(
                f"{done}, but its indexes or traces are left: {'; '.join(map(str, failed))}. Mend that, and run "
                "memstore compact, which removes them",
                memory=self.url,
            ) from failed[0]

    def prefetch(self, document: str, blocks: Mapping[int, Sequence[int]]) -> None:
        """Let a thread bring blocks of a document into host memory: layer -> blocks. See ``LayerView.prefetch``."""
        for layer, wanted in blocks.items():
            self.document(document).layer(layer).prefetch(wanted)

    def known(self, tokens: Tokens, *, reading: Mapping[str, Any] | None = None) -> tuple[Document, int] | None:
        """Return the document that shares most first blocks with ``tokens [t]``, and their number, or None.

        It is found by the hashes of histories: it was computed with the same ``reading``, and its first blocks hold
        these tokens. Documents whose first blocks have left are skipped. Raises ``InvalidArgument``.
        """
        from memstore.memory.append import as_tokens

        ids, size = as_tokens(tokens), self.spec.block_size
        full = len(ids) // size
        hashes = chain(beginning(self.spec.fingerprint, reading), byte_rows(ids[: full * size].view(full, size)))
        found = self._shared.catalog.beginnings().find(self._shared.history.hashes, hashes, size) if full else None
        state = None if found is None else self._shared.state(found[0])
        return None if found is None or state is None else (self._document(state.name), found[1])

    def limit(self, max_bytes: int | None, when_full: WhenFull | None = None) -> None:
        """Cap the memory at ``max_bytes`` (compare ``stats()["used_bytes"]``); None removes the cap.

        It is stored with the memory and applies to every append of every writer. ``when_full`` says what happens to an
        append that does not fit. "refuse" raises ``StoreFull``. "evict-oldest-document" and "evict-least-read" forget
        whole documents, starting with the oldest or the least gathered, and log it. They never forget pinned documents
        or the one being appended to. The evictions are part of the append's transaction: if all of them are not enough,
        none happens. None keeps the current setting. Stored data stays until the next append. Raises
        ``InvalidArgument``, ``ReadOnlyMemory``.
        """
        with self._shared.changing():
            self._shared.retention.change(lambda rules: rules.limited(max_bytes, when_full or rules.when_full))

    def spare(self, documents: Collection[str]) -> None:
        """Let no append of this object evict these documents, written together, or each would evict the one before."""
        self._shared.retention.spared = documents

    def rules(self) -> Rules[str]:
        """Return limit, pins and times to live, by document name."""
        return self._shared.retention.rules().renamed(self._shared.catalog.names())

    def take_rules(
        self, rules: Rules[str], made: Collection[str], copied: Collection[str], *, complete: bool = True
    ) -> None:
        """Apply rules of another memory here too, once all documents ``copied`` from it are here (``complete``).

        They apply to documents that were ``made`` here; others keep their own rules. If this memory never had rules and
        holds only copied documents, it is a copy as a whole and takes all rules, including the limit. Before it is
        complete, such a memory takes none, and others take only times to live that are not over.
        """
        self._shared.check_writable()
        if not complete:
            made = {name for name in made if name in rules.pinned or rules.expires.get(name, 0.0) > utc()}
            if not made:
                return
        with self._shared.writing:
            names = self._shared.catalog.names()
            whole = not self._shared.retention.ruled and set(names.values()) <= set(copied)
            # In any other memory, the limit would evict documents unexpectedly.
            taken = rules if whole else rules.only(made).limited(None, "refuse")
            if taken != Rules[str]() and (complete or not whole):
                numbers = {name: number for number, name in names.items()}
                self._shared.retention.change(lambda mine: mine.joined(taken.renamed(numbers)))

    def expire(self) -> list[str]:
        """Forget every unpinned document whose time to live is over, in one transaction; return their names.

        Appends do the same, but only while the clock is plausible: not before the last append, nor more than 30 days
        after it. This call trusts the clock. Raises ``ReadOnlyMemory``.
        """
        with self._shared.changing():
            return self._shared.retention.expire(Deletion(self._shared).forget)

    def compact(self, progress: Progress | None = None) -> Compaction:
        """Erase forgotten and truncated data, and blocks that have left, and give the space back to the disk.

        Also deletes indexes and traces of forgotten documents.
        Works in place, beside readers; appends wait. ``progress`` takes the bytes done and the total. Returns the bytes
        taken before and after. Raises ``MemoryInUse`` if a reader still uses data to be erased, ``DamagedError`` if any
        detail of the file is unknown, ``ReadOnlyMemory``.
        """
        with self._shared.changing():
            failed = _failures(self._sweep, self._forget_old_traces)
            done = self._shared.store.compact(progress)
        self._report("the forgotten data is erased", failed)
        return done

    @property
    def encrypted(self) -> bool:
        """Whether its values are encrypted at rest."""
        return isinstance(self._shared.store, EncryptedStore)

    def change_key(self, key: KeySource) -> bool:
        """Wrap the keys of all documents with another key of the memory, whole or not at all; no value is rewritten.

        Returns False if the memory uses this key already: then there is no old key that may be destroyed.
        ``key`` as for ``memstore.open``. Raises ``InvalidArgument`` for a memory without encryption,
        ``ReadOnlyMemory``, ``StoreFull`` and ``DamagedError``.
        """
        self._shared.check_writable()
        store = self._shared.store
        if not isinstance(store, EncryptedStore):
            raise InvalidArgument(f"memory {self.url} is not encrypted; make an encrypted copy with memstore copy.")
        with self._shared.writing:
            return store.table.change_key(read_key(key))

    def build_indexes(self, progress: Progress | None = None) -> None:
        """Build the indexes of every document, for each layer with landmarks, and keep them beside the store.

        The next opening with the same ``index`` finds them and can search at once. The recall of an approximate index
        is measured and shown in ``stats``. ``progress`` takes the layers done and the total. Raises ``ReadOnlyMemory``,
        ``DamagedError``, ``StoreFull``.
        """
        self._shared.check_writable()
        layers = [(each, layer) for each in self.documents() for layer in self.spec.index_layers]
        for done, (document, layer) in enumerate(layers):
            if progress is not None:
                progress(done, len(layers))
            index = document.layer(layer).index
            assert index is not None
            try:
                index.build()
            except OSError as error:
                if isinstance(error, MemstoreError):
                    raise
                kind = StoreFull if error.errno in FULL else ReadOnlyMemory
                raise kind(
                    f"the indexes of memory {self.url} cannot be written ({error.strerror}); the memory itself is "
                    "intact. Free some space, or make its folder 'index' writable, and build the indexes again",
                    memory=self.url,
                ) from error
        if progress is not None:
            progress(len(layers), len(layers))

    def put_arrays(self, name: str, arrays: dict[str, Tensor]) -> None:
        """Store tensors of the memory itself under ``name``, replacing older ones, in one transaction."""
        self._shared.check_writable()
        self._shared.named.put_arrays(name, arrays)

    def get_arrays(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors from ``put_arrays``, or None."""
        return self._shared.named.get_arrays(name)

    def put_info(self, name: str, value: Any) -> None:
        """Store a small JSON value of the memory itself under ``name``, replacing an older one; None removes it.

        Values under ``file/DOCUMENT`` and ``said/SESSION/NUMBER`` are deleted with their document: see ``forget``.
        """
        self._shared.check_writable()
        self._shared.named.put_info(name, value)

    def model_info(self) -> dict[str, Any]:
        """Return the facts about the model that read: the object named "model", empty if it is missing."""
        told = self.get_info("model")
        return told if isinstance(told, dict) else {}

    def get_info(self, name: str) -> Any:
        """Return the value from ``put_info``, or None."""
        return self._shared.named.get_info(name)

    def infos(self, beginning: str = "") -> dict[str, Any]:
        """Return the values from ``put_info`` whose names begin with this prefix, by name."""
        return self._shared.named.infos(beginning)

    def facts(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Return everything from ``put_info`` and ``put_arrays``, by name."""
        return self._shared.named.all()

    def put_facts(self, info: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        """Store those JSON values and arrays, by name, that the memory lacks; they come from ``source``.

        Raises ``ForeignMemory`` if it has other arrays under a name: states belong to the arrays of their memory, such
        as its router.
        """
        self._shared.check_writable()
        self._shared.named.put_missing(info, arrays, source)

    def verify(self) -> list[Finding]:
        """Read and check every stored value, and check that all of them fit together. Nothing is changed.

        Returns the faults; an empty list means a clean memory. A child process reads a memory on disk, so damage that
        makes LMDB crash is an ordinary finding.
        """
        if on_disk(self.url):
            store = self._shared.store
            return verify.in_child(self.url, store.table.key if isinstance(store, EncryptedStore) else None)
        return verify.check(self._shared.store)

    def repair(self, *, dry_run: bool = False, drop_blocks: bool = False) -> RepairOutcome:
        """Repair the findings of ``verify``, and verify again.

        Return the repairs of each document, and remaining faults.

        A document with damaged values is truncated to its longest sound prefix. Values without a reference are removed.
        A lost entry of a document is rebuilt from its token ids. With ``drop_blocks`` a document loses only its damaged
        blocks: see ``repair.py``. ``dry_run`` changes nothing and reports the first round of repairs. Raises
        ``ReadOnlyMemory``, and ``DamagedError`` if the tree around the values is damaged, so that no repair in place is
        possible. Then ``memstore repair --to`` saves all readable data.
        """
        from memstore.memory.repair import Repair

        with self._shared.changing():
            try:
                return Repair(self._shared, self._document, self.verify).run(dry_run=dry_run, drop_blocks=drop_blocks)
            finally:
                self._shared.catalog.clear()

    def stats(self) -> dict[str, Any]:
        """Return sizes, without reading any states. ``bytes`` are payloads before headers and rounding to pages.

        Blocks that documents share count for each of them, but once in ``bytes``.
        """
        numbers, usage = self._shared.catalog.numbers(), Usage()
        states = {number: state for number in numbers if (state := self._shared.state(number)) is not None}
        live = [(state, state.present()) for state in states.values()]
        for number, state in states.items():
            usage.put(number, self._shared.catalog.homes.of(number, state), state.present())
        blocks = sum(len(part) for _, parts in live for part in parts)
        tokens = sum(state.readable(self.spec.block_size) for state in states.values())
        stored = sum(len(part) for owner in usage.owners() for part in usage.used(owner))
        incomplete = sum(1 for state, parts in live if parts and state.tokens % self.spec.block_size)
        disk = self._shared.store.size_bytes()
        nbytes = self._bytes(tokens - (blocks - stored) * self.spec.block_size, stored, incomplete)
        if self.spec.recurrent:
            each = sum(layout.nbytes for layout in self.spec.recurrent)
            places = [kept_recurrent(self._shared.store, number, state.tokens) for number, state in states.items()]
            nbytes["recurrent"] = each * sum(map(len, places))
        with self._lock:
            views = [view for document in self._documents.values() for view in document.views()]
        return {
            "url": self.url,
            "documents": len(live),
            "tokens": tokens,
            "blocks": blocks,
            "bytes": nbytes,
            "disk_bytes": disk,
            "disk_bytes_per_token": disk / tokens if tokens else None,
            "used_bytes": self._shared.store.used_bytes(),
            "index_bytes": sum(view.nbytes for view in views),
            "indexes": self._indexes(),
            "tiers": self._shared.blocks.stats(),
            "rules": self._rules(),
        }

    def close(self) -> None:
        """Release the store. Closing twice is allowed."""
        with self._lock:
            views = [view for document in self._documents.values() for view in document.views()]
        try:
            for index in (view.index for view in views if view.index is not None):
                try:
                    index.close()
                except (MemstoreError, OSError) as error:  # the index can always be built again
                    _log.warning("An index of memory %s was not saved: %s", self.url, error)
        finally:  # the lock is released even if a foreign index raises
            self._shared.blocks.close()
            _close(self._opened)

    def _sweep(self) -> None:
        """Remove index files whose documents are gone."""
        self._shared.index_files.sweep(self._shared.state)

    def _indexes(self) -> list[dict[str, Any]]:
        """Return the facts about each index, both in this process and on disk."""
        with self._lock:
            built = [
                {"document": document.name, "index": self._shared.index, **facts}
                for document in self._documents.values()
                for view in document.views()
                if view.index is not None and (facts := view.index.facts()) is not None
            ]
        known = {(each["document"], each["layer"], each["index"]) for each in built}
        kept = [
            {name: told[name] for name in ("index", "layer", "file_bytes")}
            | {"document": told["name"], "blocks": told["stop"] - told["first"]}
            | told["facts"]
            for told in self._shared.index_files.told()
            if (told["name"], told["layer"], told["index"]) not in known
        ]
        return built + kept

    def _rules(self) -> dict[str, Any]:
        rules, names = self._shared.retention.rules(), self._shared.catalog.names()
        until = {names[n]: datetime.fromtimestamp(when, UTC) for n, when in rules.expires.items() if n in names}
        return {
            "max_bytes": rules.max_bytes,
            "when_full": rules.when_full,
            "pinned": [name for number, name in names.items() if number in rules.pinned],
            "expires": {name: when.isoformat(timespec="seconds") for name, when in until.items()},
            "evicted": self._shared.retention.evicted,
            "expired": self._shared.retention.expired,
        }

    def _bytes(self, tokens: int, blocks: int, incomplete: int) -> dict[str, int]:
        spec = self.spec
        complete = sum(layout.nbytes for layout in self._shared.block_layouts)
        plain = sum(layout.nbytes for layout in plain_layouts(spec))
        return {
            "tokens": 4 * tokens,
            "blocks": spec.layers * ((blocks - incomplete) * complete + incomplete * plain),
            "landmarks": blocks * len(spec.index_layers) * run_layout(spec, 1).nbytes,
        }

    def _document(self, name: str, number: int | None = None) -> Document:
        """Return the document; ``number`` means that it exists under this number."""
        with self._lock:
            document = self._documents.get(name)
            # After another process forgot a document, another one may have the same name.
            if document is None or (document.gone if number is None else not document.is_number(number)):
                document = self._documents[name] = Document(self._shared, name, self, number)
            return document

    def _no_document(self, name: str) -> Exception:
        return not_found(name, self.url, list(self._shared.catalog.names().values()))


def _failures(*clean_ups: Callable[[], object]) -> list[Exception]:
    """Run all of ``clean_ups``, and return the errors of those that failed."""
    failed: list[Exception] = []
    for clean_up in clean_ups:
        try:
            clean_up()
        except (MemstoreError, OSError) as error:
            failed.append(error)
    return failed


def check_name(name: object) -> None:
    """Raise ``InvalidArgument`` for a name that no document can have."""
    try:
        good = isinstance(name, str) and 1 <= len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        good = False
    if not good:
        found = repr(name) if len(repr(name)) <= LONGEST_NAME else f"one that begins with {repr(name)[:50]}"
        raise InvalidArgument(
            f"the name of a document must be a text of 1 to {LONGEST_NAME} bytes in UTF-8, not {found}."
        )


def check_same(spec: MemorySpec, memory: SharedStore | Container) -> None:
    """Raise ``ForeignMemory`` unless ``memory`` was made for ``spec``."""
    if differences := spec.differences(memory.spec):
        raise ForeignMemory(
            f"memory {memory.url} does not fit this model or these settings: {'; '.join(differences)}. Its states "
            "are not used. Open it with the model and settings that it was made with, or make a new memory at "
            "another path.",
            memory=memory.url,
        )


def _close(opened: OpenStore) -> None:
    if opened.own:
        opened.store.close()
