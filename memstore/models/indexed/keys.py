"""Index keys: a document's keys in a mapped file, and the keys of later tokens.

The landmarks, which the store keeps and verifies, are the authoritative copy of a document's keys. For every token, the
index scans another copy in its own form, with one key for each unit. This copy is in a temporary file without a name,
so the system may drop its pages. It grows with the document. With ``index_dtype="int8"`` codes in RAM stand beside it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels.index_scores import PASS, IndexCodes, encode
from memstore.memory import Document
from memstore.models.indexed.family import IndexedLayer

AT_ONCE = 128
"""Blocks whose landmarks are read together."""
ROOM = 1024
"""Initial number of rows of a buffer."""


class Rows:
    """Rows ``[n, width]`` that grow at their end: in host memory or, if ``mapped``, in a file."""

    def __init__(self, width: int, like: Tensor, *, mapped: bool = False, coded: bool = False) -> None:
        """``like`` has their dtype and device. ``coded``: they are keys, and have codes."""
        self._like, self._width = like.new_empty(0), width
        self._file: int | None = None
        if mapped and like.device.type == "cpu":
            self._file, name = tempfile.mkstemp()
            Path(name).unlink()
            weakref.finalize(self, os.close, self._file)
        self._count = 0
        self._buffer = self._like.new_empty(0, width)
        self._codes = [Rows(each.shape[1], each) for each in encode(self._buffer)] if coded else None

    def __len__(self) -> int:
        return self._count

    @property
    def view(self) -> Tensor:
        """All rows."""
        return self._buffer[: self._count]

    @property
    def codes(self) -> IndexCodes | None:
        """Codes of all keys but the last few, if they are coded."""
        return None if self._codes is None else IndexCodes(*(each.view for each in self._codes))

    def append(self, rows: Tensor) -> None:
        """Add rows at the end."""
        needed = self._count + len(rows)
        if needed > len(self._buffer):
            self._grow(max(needed, 2 * len(self._buffer), ROOM))
        self._buffer[self._count : needed] = rows
        self._count = needed
        if self._codes is not None:
            some = self.view[len(self._codes[0]) * PASS : needed - needed % PASS]
            for codes, more in zip(self._codes, encode(some), strict=True):
                codes.append(more)

    def copy(self) -> Rows:
        """Return a copy in host memory that continues independently."""
        other = Rows(self._width, self._like)
        other.append(self.view)
        return other

    def _grow(self, size: int) -> None:
        if self._file is None:
            buffer = self._like.new_empty(size, self._width)
            buffer[: self._count] = self.view
            self._buffer = buffer
            return
        # The file grows with empty pages, and the old map shares its pages with the new one.
        nbytes = max(1, size * self._width) * self._like.element_size()
        os.ftruncate(self._file, nbytes)
        mapped = np.frombuffer(mmap.mmap(self._file, nbytes), np.uint8)
        self._buffer = torch.from_numpy(mapped).view(self._like.dtype)[: size * self._width].view(size, self._width)


class _UnitKeys:
    """The keys of whole units, and the states of tokens of the incomplete unit."""

    def __init__(self, layer: IndexedLayer, like: Tensor, *, first: int = 0, **stored: bool) -> None:
        """``first``: the first unit; ``stored``: how ``Rows`` keep the keys."""
        self.layer, self.first = layer, first
        self.per_unit = 1 if layer.pooled else layer.unit
        self.keys = Rows(layer.index_dim, like, **stored)
        self.tail = like.new_empty(0, layer.key_width)
        """``[less than unit, key_width]``"""

    @property
    def units(self) -> int:
        """Number of whole units."""
        return len(self.keys) // self.per_unit

    @property
    def stop(self) -> int:
        """The token after the last whole unit."""
        return (self.first + self.units) * self.layer.unit

    def extend(self, raw: Tensor) -> None:
        """Add the states of the next tokens, ``[n, key_width]``."""
        unit = self.layer.unit
        raw = torch.cat([self.tail, raw.to(self.tail)])
        whole = len(raw) // unit
        if whole:
            of_units = raw[: whole * unit].unflatten(0, (whole, unit))
            if self.layer.pooled:
                first = torch.arange(whole, device=raw.device) * unit + self.stop
                self.keys.append(self.layer.pool(of_units, first))
            else:
                self.keys.append(of_units.flatten(0, 1))
        self.tail = raw[whole * unit :].clone()

    def behind(self) -> _UnitKeys:
        """Return an empty continuation, whose first unit begins with the tail of these keys."""
        after = _UnitKeys(self.layer, self.tail, first=self.first + self.units)
        after.tail = self.tail.clone()
        return after

    def copy(self) -> _UnitKeys:
        """Return a copy that continues independently."""
        other = _UnitKeys(self.layer, self.tail, first=self.first)
        other.keys, other.tail = self.keys.copy(), self.tail.clone()
        return other


class DocumentKeys:
    """The index keys of a document at some moment, in every layer that has an index."""

    coded = False
    """Whether keys have codes in 8 bits."""

    def __init__(
        self, document: Document, layers: Mapping[int, IndexedLayer], like: Tensor, *, stop: int | None = None
    ) -> None:
        """``layers``: by the number under which their landmarks are stored; ``stop``: the first token to ignore."""
        self.document, self.like, self._layers, self._stop = document, like, layers, stop
        self._edits = -1
        self.tokens = 0
        self.of: dict[int, _UnitKeys] = {}

    def catch_up(self) -> None:
        """Add newly committed keys. Raises ``DamagedError``, and ``InvalidArgument`` if blocks are missing."""
        state = self.document.state
        if state.first or state.dropped:
            raise InvalidArgument(
                f"document {self.document.name!r} has lost blocks, but this model may choose any of its tokens: "
                "read the text under another name"
            )
        if state.edits != self._edits or state.tokens < self.tokens:
            self._edits, self.tokens = state.edits, 0
            stored = {"mapped": True, "coded": self.coded}
            self.of = {slot: _UnitKeys(layer, self.like, **stored) for slot, layer in self._layers.items()}
        size, tokens = self.document.memory.spec.block_size, state.tokens
        tokens = tokens if self._stop is None else min(tokens, self._stop)
        if tokens == self.tokens:
            return
        self._edits = -1  # until the end: an interruption leaves keys that do not fit together
        for slot, keys in self.of.items():
            view, layer = self.document.layer(slot), self._layers[slot]
            at, stop = self.tokens, tokens
            if layer.raw_width:  # a unit has no key before it is whole
                at, stop = keys.stop, tokens - tokens % layer.unit
            while at < stop:
                first = at // size
                blocks = range(first, min(first + AT_ONCE, -(-stop // size)))
                raw = view.landmarks(blocks).flatten(0, 2)[at - first * size : stop - first * size]
                keys.extend(raw[:, : layer.key_width].to(self.like.device))
                at += len(raw)
        if self.document.state.edits != state.edits:
            self.catch_up()  # the layers are of different moments
        else:
            self._edits, self.tokens = state.edits, tokens

    def settle(self, tokens: int, behind: Mapping[int, _UnitKeys]) -> None:
        """Add the keys ``behind`` those of each layer, which were just committed; the document now has ``tokens``."""
        edits, self._edits = self._edits, -1  # as in ``catch_up``
        for slot, keys in behind.items():
            self.of[slot].keys.append(keys.keys.view)
            self.of[slot].tail = keys.tail
        self._edits, self.tokens = edits, tokens
