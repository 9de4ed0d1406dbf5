"""A document: one token sequence inside a memory, with the states of its blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument, MemstoreError, NotFound, ReadOnlyMemory
from memstore.memory.append import Append, Tokens, as_tokens, delete_blocks
from memstore.memory.handle import Handle
from memstore.memory.layouts import token_layout
from memstore.memory.shared import Shared, next_document_record
from memstore.memory.state import NEXT_DOCUMENT, Address, DocumentState
from memstore.memory.tensors import Rows, from_record
from memstore.memory.view import LayerView
from memstore.store.contract import Batch


class Document:
    """Made by ``Memory.document(name)``. Everything here sees what other threads and processes have committed.

    One thread may append while others search and gather. Raises ``NotFound`` once the document was forgotten.
    """

    def __init__(self, shared: Shared, name: str, find: Callable[[str], int | None]) -> None:
        self.name = name
        self._shared = shared
        self._handle = Handle(shared, name, find)
        self._views: dict[int, LayerView] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        try:
            return f"Document({self.name!r}, {len(self)} tokens in {self.n_blocks} blocks)"
        except MemstoreError:  # closed, forgotten or damaged; whoever uses it will hear which
            return f"Document({self.name!r}, not available)"

    def __len__(self) -> int:
        return self._handle.current().tokens

    def __bool__(self) -> bool:
        # A document without tokens is a document all the same.
        return True

    @property
    def id(self) -> int | None:
        """Its number in the memory; None before its first append."""
        self._handle.current()
        return self._handle.id

    @property
    def forgotten(self) -> bool:
        """Whether it was there once, and whoever writes has forgotten it since."""
        try:
            self._handle.current()
        except NotFound:
            return True
        return False

    @property
    def n_blocks(self) -> int:
        """One more than the last block, incomplete or not; blocks that have left are counted."""
        return self._handle.current().blocks

    @property
    def blocks(self) -> range:
        """Live blocks."""
        return self._handle.current().live()

    @property
    def complete_blocks(self) -> range:
        """Live blocks that are full: those that can be found."""
        return self._handle.current().complete(self._shared.spec.block_size)

    def append(self, tokens: Tokens) -> Append:
        """Add ``tokens [t]`` and their states, in one transaction when the body of ``with`` is left.

        See ``Append``. An exception in the body writes nothing. Without tokens there is nothing to put or to write.
        Raises ``InvalidArgument``, ``ReadOnlyMemory``, and on leaving also ``StoreFull`` and ``DamagedError``.
        """
        self._check_writable()
        return Append(self._shared, self._handle.current(), as_tokens(tokens), self._commit)

    def tokens(self, block: int | None = None) -> Tensor:
        """Token ids ``[n]`` int64 of one block, or of all live blocks. Raises ``NotFound``, ``DamagedError``."""
        while True:
            state = self._handle.current()
            live = state.live()
            if block is not None and block not in live:
                there = f"blocks {live.start} to {live.stop - 1}" if live else "no blocks"
                raise NotFound(f"document {self.name!r} has no block {block}; it has {there}.")
            try:
                tokens = self._read_tokens(state, live if block is None else range(block, block + 1)).long()
                # Several reads are several moments; whole blocks change by truncations only, and those are counted.
                if self._handle.current().edits == state.edits:
                    return tokens
            except (NotFound, DamagedError) as error:
                # Another thread or process may have changed the document in between.
                if self._handle.current() == state:
                    raise DamagedError(f"document {self.name!r}, tokens: {error}. Run verify.") from error

    def layer(self, layer: int) -> LayerView:
        """One layer of this document. Raises ``InvalidArgument``."""
        self._shared.check_layer(layer)
        with self._lock:
            if layer not in self._views:
                self._views[layer] = LayerView(self._handle, layer)
            return self._views[layer]

    def views(self) -> list[LayerView]:
        """The layers that were asked for so far."""
        with self._lock:
            return list(self._views.values())

    def truncate(self, n_blocks: int) -> None:
        """Keep only blocks below ``n_blocks``, in one transaction. Their numbers will be used again.

        An incomplete last block goes with ``truncate(len(document) // block_size)``.
        """
        self._check_writable()
        with self._shared.writing:
            before = self._handle.current()
            if not 0 <= n_blocks <= before.blocks:
                raise InvalidArgument(f"n_blocks must be from 0 to {before.blocks}, not {n_blocks}.")
            if n_blocks == before.blocks or self._handle.id is None:
                return
            after = before.cut(n_blocks, self._shared.spec.block_size)
            self._shared.store.write(self._truncation(Address(self._handle.id), after, before.first))
        for view in self.views():
            if view.index:
                view.index.cut(before, after)

    def _truncation(self, address: Address, after: DocumentState, first_live: int) -> Batch:
        batch = Batch()
        delete_blocks(batch, address, self._shared.spec.layers, after.blocks)
        for layer in self._shared.spec.index_layers:
            self._shared.runs(address.id, layer).cut(batch, after.blocks, first_live)
        batch.put(address.entry, after.to_record())
        return batch

    def _commit(self, append: Append) -> None:
        with self._shared.writing:
            now = self._handle.current()
            if now != append.before:
                raise InvalidArgument(
                    f"document {self.name!r} changed while this append was open ({append.before.tokens} tokens then, "
                    f"{now.tokens} now); nothing was written. Append again."
                )
            last = range(append.blocks.start, now.blocks)  # the incomplete last block, or nothing
            number = self._shared.next_document() if self._handle.id is None else self._handle.id
            batch = append.compose(number, self._read_tokens(now, last))
            if self._handle.id is None:
                batch.put(NEXT_DOCUMENT, next_document_record(number + 1))
            self._shared.store.write(batch)
            self._handle.id = number

    def _read_tokens(self, state: DocumentState, blocks: range) -> Tensor:
        """Token ids ``[n]`` int32 of ``blocks``, of which only the document's last may be incomplete."""
        if not blocks or self._handle.id is None:
            return torch.empty(0, dtype=torch.int32)
        size = self._shared.spec.block_size
        full = range(blocks.start, min(blocks.stop, state.tokens // size))
        layout = token_layout(size)
        rows = Rows(len(full), [layout])
        address = Address(self._handle.id)
        self._shared.store.read([address.tokens(block) for block in full], [layout], rows.out)
        parts = [rows.tensors()[0].flatten()]
        if full.stop < blocks.stop:
            records = self._shared.store.get(address.tokens(full.stop))
            if records is None:
                raise NotFound(f"document {self.name!r}: the tokens of block {full.stop} are gone; run verify.")
            parts.append(from_record(records[0])[: state.tokens - full.stop * size])
        return torch.cat(parts)

    def _check_writable(self) -> None:
        if self._shared.mode == "r" or self._shared.store.read_only:
            raise ReadOnlyMemory(f"memory {self._shared.url} is open for reading; open it with mode 'a' to write.")
