"""A document: one token sequence inside a memory, with the states of its blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from memstore.errors import DamagedError, InvalidArgument, MemstoreError, NotFound
from memstore.json_checks import check_whole
from memstore.lazy import later, torch
from memstore.memory.entry import NEXT_DOCUMENT, Address, DocumentState, Places
from memstore.memory.rules import Rules
from memstore.memory.shared import Handle, SharedStore, next_document_record
from memstore.memory.spec import MemorySpec, from_record, kept_recurrent, read_recurrent, read_rows, token_layout
from memstore.memory.usage import Deletion
from memstore.store.records import MAX_ITEM, Batch

if TYPE_CHECKING:  # listing and forgetting work without PyTorch, which takes seconds to load
    from torch import Tensor

    from memstore.index import IndexCapabilities
    from memstore.memory import append as appends
    from memstore.memory import view as views
    from memstore.memory.append import Append, Tokens
    from memstore.memory.view import LayerView
else:
    appends, views = later("memstore.memory.append"), later("memstore.memory.view")


class Container(Protocol):
    """The part of a memory that a document needs. ``Memory`` implements it."""

    @property
    def spec(self) -> MemorySpec:
        """Its layout."""

    @property
    def url(self) -> str:
        """Its path or url."""

    @property
    def index_capabilities(self) -> IndexCapabilities:
        """The abilities of its vector indexes."""

    def document(self, name: str) -> Document:
        """Return a document of it."""

    def known(self, tokens: Tokens, *, reading: Mapping[str, Any] | None = None) -> tuple[Document, int] | None:
        """Return the document that shares most first blocks with ``tokens``, and their number."""

    def facts(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Return everything that is stored in it by name: JSON values, and arrays."""


class Document:
    """A document, made by ``Memory.document(name)``. It sees the commits of other threads and processes.

    One thread may append while others search and gather. Raises ``NotFound`` once the document was forgotten.
    """

    def __init__(self, shared: SharedStore, name: str, memory: Container, number: int | None = None) -> None:
        """Pass the ``number`` of a document that is known to exist."""
        self.name = name
        self._shared = shared
        self._memory = memory
        self._handle = Handle(shared, name, number)
        self._views: dict[int, LayerView] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        try:
            return f"Document({self.name!r}, {len(self)} tokens in {self.n_blocks} blocks)"
        except MemstoreError:  # closed, forgotten or damaged; using it raises the error
            return f"Document({self.name!r}, not available)"

    def __len__(self) -> int:
        return self._handle.current().tokens

    def __bool__(self) -> bool:
        # A document without tokens is still a document.
        return True

    @property
    def memory(self) -> Container:
        """The memory that contains it."""
        return self._memory

    @property
    def id(self) -> int | None:
        """Its number in the memory; None before its first append."""
        self._handle.current()
        return self._handle.id

    @property
    def state(self) -> DocumentState:
        """Its entry at the last commit: lengths, cuts and drops."""
        return self._handle.current()

    def is_number(self, number: int) -> bool:
        """Whether its number is, or was, ``number``."""
        return self._handle.id == number

    @property
    def gone(self) -> bool:
        """Whether any writer has forgotten it."""
        if self._handle.id is None:
            return False
        try:
            self._handle.current()
        except NotFound:
            return True
        return False

    @property
    def pinned(self) -> bool:
        """Whether no rule may forget it."""
        return self._handle.id in self._shared.retention.rules().pinned

    @property
    def expires(self) -> datetime | None:
        """The time after which it may be forgotten, in UTC; None: never."""
        when = self._shared.retention.rules().expires.get(self._handle.id or 0)
        return None if when is None else datetime.fromtimestamp(when, UTC)

    @property
    def n_blocks(self) -> int:
        """One more than the last block, complete or not; blocks that have left are counted."""
        return self._handle.current().blocks

    @property
    def blocks(self) -> range:
        """Live blocks."""
        return self._handle.current().live()

    @property
    def complete_blocks(self) -> range:
        """Live blocks that are full."""
        return self._handle.current().complete(self._shared.spec.block_size)

    @property
    def dropped(self) -> list[range]:
        """Damaged blocks that a repair has dropped: they cannot be found or gathered any more."""
        return self._handle.current().gaps

    def present(self, blocks: range) -> list[range]:
        """Return ``blocks`` without dropped ones, as a list of ranges."""
        return self._handle.current().present(blocks)

    @property
    def digest(self) -> str | None:
        """Hash of the model, ``reading``, and the tokens of all complete blocks, in hexadecimal digits.

        Documents with the same digest have the same complete blocks. None before anything was read, and for a document
        that began in a version of memstore without digests.
        """
        return self._handle.current().digest

    @property
    def reading(self) -> dict[str, Any] | None:
        """The ``reading`` of the first ``append``: how the states were computed."""
        return deepcopy(self._handle.current().reading)

    def append(self, tokens: Tokens, *, reading: Mapping[str, Any] | None = None) -> Append:
        """Add ``tokens [t]`` and their states in one transaction, committed when the body of ``with`` ends.

        See ``Append``. After an exception in the body nothing is written. Without tokens there is nothing to put or to
        write. The JSON object ``reading`` holds everything else that the states depend on, such as options. It is
        stored with the document, and a later append must pass the same one: see ``reuse``. Raises ``InvalidArgument``,
        ``ReadOnlyMemory``, and when the body ends also ``StoreFull`` and ``DamagedError``.
        """
        self._shared.check_writable()
        return appends.Append(self._shared, self._handle.current(), appends.as_tokens(tokens), reading, self._commit)

    def tokens(self, block: int | range | None = None) -> Tensor:
        """Return token ids ``[n]`` int64 of one block, or of a range of blocks.

        Without a block, return those of all live blocks, with -1 in dropped ones.

        Raises ``NotFound`` for a missing block, ``InvalidArgument`` unless ``block`` is a whole number or a range of
        step 1, and ``DamagedError``.
        """
        if isinstance(block, bool) or not isinstance(block, int | range | None) or getattr(block, "step", 1) != 1:
            raise InvalidArgument(f"block must be a whole number, a range of step 1 or None, not {block!r}.")
        while True:
            state = self._handle.current()
            wanted = state.live()
            if block is not None:
                wanted = block if isinstance(block, range) else range(block, block + 1)
                views.check_present(state, wanted)
            try:
                tokens = self._read_tokens(state, wanted).long()
                # The reads happen at different moments. Whole blocks change only by truncations, which are counted.
                if self._handle.current().edits == state.edits:
                    return tokens
            except (NotFound, DamagedError) as error:
                # Another thread or process may have changed the document in between.
                if self._handle.current() == state:
                    raise DamagedError(f"document {self.name!r}, tokens: {error}. Run verify.") from error

    def layer(self, layer: int) -> LayerView:
        """Return one layer of this document. Raises ``InvalidArgument``."""
        self._shared.check_layer(layer)
        with self._lock:
            if layer not in self._views:
                self._views[layer] = views.LayerView(self._handle, layer)
            return self._views[layer]

    def gather(self, layers: Sequence[int], blocks: Sequence[int], *, device: torch.device) -> list[dict[str, Tensor]]:
        """Return the states of ``blocks [K]`` in each of ``layers``, in one copy: see ``LayerView.gather``."""
        return views.gathered([self.layer(layer) for layer in layers], blocks, device)

    def gather_each(
        self, layers: Sequence[int], lists: Sequence[Sequence[int]], *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Return the states of each layer's own complete blocks, layer after layer, in one copy.

        See ``LayerView.gather``.
        """
        return views.gathered_each([self.layer(layer) for layer in layers], lists, device)

    def at_hand(self, layers: Sequence[int], blocks: Sequence[int]) -> bool:
        """Whether ``blocks [K]`` in each of ``layers`` are in host memory, so a gather does not wait."""
        return views.at_hand([self.layer(layer) for layer in layers], blocks)

    def prefetch(self, layers: Sequence[int], blocks: Sequence[int]) -> None:
        """Let a thread bring ``blocks [K]`` in each of ``layers`` into host memory: see ``LayerView.prefetch``."""
        views.prefetch([self.layer(layer) for layer in layers], blocks)

    def recurrent_places(self, first: int = 0) -> list[int]:
        """Return the token counts after which a recurrent state is kept, at least ``first``, ascending."""
        state = self._handle.current()
        if self._handle.id is None or not self._shared.spec.recurrent:
            return []
        return kept_recurrent(self._shared.store, self._handle.id, state.tokens, first=first)

    def recurrent(self, tokens: int) -> list[Tensor]:
        """Return the recurrent states after the first ``tokens`` tokens, which must be one of ``recurrent_places``.

        Their layout is ``spec.recurrent``. Raises ``NotFound`` if they are not kept, and ``DamagedError``.
        """
        if self._handle.id is None or not 0 < tokens <= self._handle.current().tokens:
            raise NotFound(f"document {self.name!r} has no recurrent state after {tokens} tokens.")
        return read_recurrent(self._shared.store, self._shared.spec.recurrent, self._handle.id, tokens)

    @property
    def reads_ahead(self) -> int:
        """Best number of reads to run at once: 1, or more if each waits for a network."""
        return self._shared.store.capabilities.reads_ahead

    def views(self) -> list[LayerView]:
        """Return the layers used so far."""
        with self._lock:
            return list(self._views.values())

    def truncate(self, n_blocks: int) -> None:
        """Keep only blocks below ``n_blocks``, in one transaction. Their numbers will be used again.

        An incomplete last block goes with ``truncate(len(document) // block_size)``.
        """
        with self._shared.changing():
            before = self._handle.current()
            check_whole("n_blocks", n_blocks, 0, before.blocks)
            if n_blocks == before.blocks or self._handle.id is None:
                return
            fresh = self._shared.next_document()
            batch, after = appends.truncation(self._shared, self._handle.id, before, n_blocks, fresh)
            if after.home == fresh:
                batch.put(NEXT_DOCUMENT, next_document_record(fresh + 1))
            self._shared.commit(batch, {self._handle.id: after})
        for view in self.views():
            if view.index:
                view.index.cut(before, after)

    def fork(self, name: str, n_blocks: int | None = None) -> Document:
        """Make a new document ``name`` that begins with all current blocks of this one, or those below ``n_blocks``.

        Whole blocks are shared and only an incomplete last one is copied, so a fork takes the same short time at any
        size. From then on the two are independent: appending to, truncating or forgetting one leaves the other
        unchanged. The new document is not pinned and has no time to live, even if this one has. Raises
        ``InvalidArgument``, ``ReadOnlyMemory``, ``StoreFull``, ``NotFound`` and ``DamagedError``.
        """
        with self._shared.changing():
            state, child = self._handle.current(), self._memory.document(name)
            blocks = state.blocks if n_blocks is None else n_blocks
            check_whole("n_blocks", blocks, 0, state.blocks)
            if child.id is not None:
                raise InvalidArgument(
                    f"a document {name!r} exists already; choose another name, or forget the old one first."
                )
            number = self._shared.next_document()
            batch, fork = appends.forking(self._shared, self._stored(), state, name, blocks, number)
            batch.put(NEXT_DOCUMENT, next_document_record(number + 1))
            self._shared.commit(batch, {number: fork})
        return child

    def begin(self, first: int, reading: Mapping[str, Any] | None) -> None:
        """Store a new empty document whose blocks below ``first`` count as having left.

        Raises ``InvalidArgument``, also if it is stored already, and ``ReadOnlyMemory``.
        """
        with self._shared.changing():
            check_whole("first", first, 0, MAX_ITEM)
            if self.id is not None:
                raise InvalidArgument(f"document {self.name!r} is stored already.")
            kept = None if reading is None else appends.checked_reading(self.state, reading)
            number = self._shared.next_document()
            tokens = first * self._shared.spec.block_size
            state = DocumentState(name=self.name, tokens=tokens, blocks=first, first=first, reading=kept)
            batch = Batch()
            batch.put(Address(number).entry, state.to_record())
            batch.put(NEXT_DOCUMENT, next_document_record(number + 1))
            self._shared.commit(batch, {number: state})

    def pass_over(self, blocks: int) -> None:
        """Skip ``blocks`` blocks (one or more), dropped in the document that this one is copied from.

        Raises ``InvalidArgument`` if the last block is incomplete or the document is not stored yet,
        ``ReadOnlyMemory``.
        """
        with self._shared.changing():
            state, places = self.located()
            if places is None or state.tokens % self._shared.spec.block_size:
                raise InvalidArgument(f"document {self.name!r} does not end with a complete block.")
            check_whole("blocks", blocks, 1, MAX_ITEM - state.blocks)
            batch = Batch()
            after = state.passed_over(blocks, self._shared.spec.block_size)
            batch.put(places.entry, after.to_record())
            self._shared.commit(batch, {places.number: after})

    def located(self) -> tuple[DocumentState, Places | None]:
        """Return its entry and the places of its blocks; None as places before its first append."""
        state = self._handle.current()
        return state, None if self._handle.id is None else self._shared.places(self._handle.id, state)

    def reuse(self, tokens: Tokens, *, reading: Mapping[str, Any] | None = None, step: int = 1) -> int:
        """Let a new document begin with blocks of ``tokens [t]`` that the memory holds already, under any name.

        The document becomes a fork of the one that ``Memory.known`` finds, at a multiple of ``step`` blocks. Returns
        the number of tokens that it has now and that need not be read. It is 0 if no block is known or the document is
        not new. Raises ``InvalidArgument``, ``ReadOnlyMemory``, ``StoreFull`` and ``DamagedError``.
        """
        with self._shared.changing():
            check_whole("step", step, 1, MAX_ITEM)
            found = None if self.id is not None else self._memory.known(tokens, reading=reading)
            if found is None or not (blocks := found[1] // step * step):
                return 0
            return len(found[0].fork(self.name, blocks))

    def pin(self) -> None:
        """Keep it from being evicted or expired; ``Memory.forget`` still works. Stored with the memory.

        Raises ``NotFound`` if it is not stored yet, ``ReadOnlyMemory``.
        """
        self._change(lambda rules, number: replace(rules, pinned=rules.pinned | {number}))

    def unpin(self) -> None:
        """Undo ``pin``. If its time to live is over by now, the next append may forget it."""
        self._change(lambda rules, number: replace(rules, pinned=rules.pinned - {number}))

    def expire(self, seconds: float | None) -> None:
        """Allow it to be forgotten ``seconds`` from now; None: never. Stored with the memory.

        That happens with the first append to another document after that time, or with ``Memory.expire``. Until then
        the document stays unchanged, also for readers. Raises ``NotFound`` if it is not stored yet,
        ``InvalidArgument``, ``ReadOnlyMemory``.
        """
        self._change(lambda rules, number: rules.expiring(number, seconds))

    def _change(self, change: Callable[[Rules[int], int], Rules[int]]) -> None:
        with self._shared.changing():
            number = self._stored()
            self._shared.retention.change(lambda rules: change(rules, number))

    def _stored(self) -> int:
        """Return its number. Raises ``NotFound`` before its first append, and once it was forgotten."""
        if (number := self.id) is None:
            raise NotFound(f"document {self.name!r} does not exist yet; append to it first.")
        return number

    def _commit(self, append: Append) -> None:
        with self._shared.writing:
            now = self._handle.current()
            if now != append.before:
                raise InvalidArgument(
                    f"document {self.name!r} changed during this append (from {append.before.tokens} to "
                    f"{now.tokens} tokens); nothing was written. Append again."
                )
            incomplete = range(append.blocks.start, now.blocks)
            last = self._read_tokens(now, incomplete) if incomplete else None
            number = self._shared.next_document() if self._handle.id is None else self._handle.id
            batch = append.compose(number, last)
            if self._handle.id is None:
                batch.put(NEXT_DOCUMENT, next_document_record(number + 1))
            with self._shared.catalog.committing() as changed:
                after = {number: append.after}
                self._shared.retention.write(batch, number, lambda: Deletion(self._shared, after).forget)
                changed[number] = append.after
            self._handle.committed(number, append.after)

    def _read_tokens(self, state: DocumentState, blocks: range) -> Tensor:
        """Return token ids ``[n]`` int32 of ``blocks``; only the document's last block may be incomplete."""
        if not blocks or self._handle.id is None:
            return torch.empty(0, dtype=torch.int32)
        size = self._shared.spec.block_size
        full = range(blocks.start, min(blocks.stop, state.tokens // size))
        layout = token_layout(size)
        places = self._shared.places(self._handle.id, state)
        there = state.present(full)
        keys = [key for part in there for key in places.all_tokens(part)]
        ids = read_rows(self._shared.store, keys, [layout])[0]
        if len(ids) < len(full):
            offsets = torch.tensor([block - full.start for part in there for block in part], dtype=torch.int64)
            ids = torch.full((len(full), size), -1, dtype=torch.int32).index_copy_(0, offsets, ids)
        parts = [ids.flatten()]
        if full.stop < blocks.stop:
            records = self._shared.store.get(places.tokens(full.stop))
            if records is None:
                raise NotFound(f"document {self.name!r}: the token ids of block {full.stop} are missing. Run verify.")
            parts.append(from_record(records[0])[: state.tokens - full.stop * size])
        return torch.cat(parts)
