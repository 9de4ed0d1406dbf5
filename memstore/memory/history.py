"""The history of a document: a chain of hashes over its tokens, one for each complete block.

The hash before the first block says which model computed the states, and how it read: ``h = H(fingerprint, reading)``.
That of a block says everything up to its end: ``h[i] = H(h[i - 1], tokens of block i)``. So where the hashes of two
blocks are equal, their whole histories are, and with them their states: blocks are found by hash and shared.

The digest of a tokenizer is for the fingerprint that a history begins with.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from memstore.errors import DamagedError
from memstore.memory.entry import HASH_BYTES, DocumentState, Places
from memstore.memory.spec import Fingerprint, MemorySpec
from memstore.store.contract import Bytes

MOST_HELD = 64 << 20
"""Bytes of histories that are held, so that texts are compared with documents that were compared before."""

if TYPE_CHECKING:  # no tensors are imported here: the child process of `verify` starts in a tenth of the time
    from memstore.memory.runs import Runs


def beginning(fingerprint: Fingerprint, reading: Mapping[str, Any] | None) -> bytes:
    """The hash before the first block."""
    return hashed(json.dumps([fingerprint.to_dict(), reading], sort_keys=True).encode())


def following(start: bytes, tokens: Bytes) -> Iterator[bytes]:
    """The hashes of complete blocks that come after hash ``start``: ``tokens [n, bytes]`` are their ids as int32."""
    for row in tokens:
        start = hashed(start + row.tobytes())
        yield start


def broken(blocks: range, stored: Iterable[bytes], tokens: Bytes, start: bytes | None) -> Iterator[int]:
    """The ``blocks`` of which the stored hash does not follow from the one before it and ``tokens [n, bytes]``.

    ``start`` is the hash before the first of them; None, where it is not known, passes the first block.
    """
    for block, found, row in zip(blocks, stored, tokens, strict=True):
        if start is not None and hashed(start + row.tobytes()) != found:
            yield block
        start = found


def hashed(content: bytes) -> bytes:
    """BLAKE2b of 16 bytes."""
    return blake2b(content, digest_size=HASH_BYTES).digest()


def digest_of_tokenizer(tokenizer: Any) -> str:
    """xxh3-128 over what turns text into ids; padding and truncation, which callers change, do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = sorted(tokenizer.get_vocab().items())
    else:
        content = json.loads(backend.to_str())
        content.pop("padding", None)
        content.pop("truncation", None)
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def chain(start: bytes, tokens: Bytes) -> Bytes:
    """Hashes uint8 ``[n, HASH_BYTES]`` of complete blocks ``tokens [n, bytes]`` that come after hash ``start``."""
    hashes = bytearray().join(following(start, tokens))
    return np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)


def hash_before(history: Runs, places: Places, state: DocumentState, block: int, fingerprint: Fingerprint) -> bytes:
    """The stored hash of everything before ``block``. Raises ``DamagedError``."""
    return _row(history, places, block - 1) if block else beginning(fingerprint, state.reading)


def digest_at(history: Runs, places: Places, state: DocumentState, block: int, spec: MemorySpec) -> str | None:
    """The digest of a document that is cut before ``block``; None where it is not known any more.

    Hashes of blocks that have left may be gone with them. Raises ``DamagedError``.
    """
    if state.digest is None or block == state.tokens // spec.block_size:
        return state.digest
    if 0 < block <= state.first:
        return None
    return hash_before(history, places, state, block, spec.fingerprint).hex()


def _row(history: Runs, places: Places, block: int) -> bytes:
    ((_, row),) = history.read(places, range(block, block + 1))
    return row.numpy().tobytes()


class Histories:
    """The documents of a store in the order of their histories: one that begins as a text does stands beside it.

    So a text is compared with a few documents, however many there are: with none where no other has its first block,
    else with those that a search by halves meets. Documents whose first blocks have left, or that have no digest, are
    not among them.
    """

    def __init__(
        self,
        state: Callable[[int], DocumentState | None],
        places: Callable[[int, DocumentState], Places],
    ) -> None:
        """``state`` and ``places`` are those of a document as it is now."""
        self._state, self._places = state, places
        self._changed: dict[int, None] = {}
        self._first: dict[int, bytes] = {}
        self._groups: dict[bytes, list[int]] = {}
        """Hash of the first block -> documents that begin with it, in the order of their histories."""
        self._held: dict[int, bytes] = {}
        """Histories that were read, of documents that others begin like."""

    def changed(self, documents: Iterable[int]) -> None:
        """These documents are new, others than they were, or gone."""
        self._changed.update(dict.fromkeys(documents))

    def find(self, history: Runs, hashes: Bytes, size: int) -> tuple[int, int] | None:
        """A document that has most first blocks of the history ``hashes [n, HASH_BYTES]``, and how many.

        None where none has the first. ``size`` is the number of tokens in a block; damaged documents are left out.
        """
        for document in self._changed:
            self._remove(document)
        while self._changed:
            self._add(self._changed.popitem()[0], history, size)
        text = hashes.tobytes()
        group = self._groups.get(text[:HASH_BYTES], [])
        count, document = self._place(group, text, history, size)[1]
        return (-document, count) if count else None

    def _add(self, document: int, history: Runs, size: int) -> None:
        try:
            state = self._state(document)
            if state is None or state.digest is None or state.first or state.tokens < size:
                return
            one = state.tokens < 2 * size
            first = bytes.fromhex(state.digest) if one else _row(history, self._places(document, state), 0)
            place = 0
            if group := self._groups.get(first):
                place = self._place(group, self._history(document, history, size), history, size)[0]
            # Not into ``group``: where all in it were damaged, it is no more.
            self._groups.setdefault(first, []).insert(place, document)
        except DamagedError:
            return  # verify names it; here it only means that nothing of this document is used
        self._first[document] = first

    def _remove(self, document: int) -> None:
        self._held.pop(document, None)
        first = self._first.pop(document, None)
        if first is not None:
            self._groups[first].remove(document)
            if not self._groups[first]:
                del self._groups[first]

    def _place(self, group: list[int], text: bytes, history: Runs, size: int) -> tuple[int, tuple[int, int]]:
        """Where the history ``text`` stands in ``group``; and the most blocks that any has, and minus that document."""
        low, high, best = 0, len(group), (0, 0)
        while low < high:
            middle = (low + high) // 2
            document = group[middle]
            try:
                other = self._history(document, history, size)
            except DamagedError:
                self._remove(document)
                high -= 1
                continue
            count = _agreeing(text, other)
            best = max(best, (count, -document))
            stop = (count + 1) * HASH_BYTES
            low, high = (middle + 1, high) if other[:stop] < text[:stop] else (low, middle)
        return low, best

    def _history(self, document: int, history: Runs, size: int) -> bytes:
        """The hashes of all complete blocks of a document, one after the other. Raises ``DamagedError``."""
        if document not in self._held:
            if sum(map(len, self._held.values())) > MOST_HELD:
                self._held.clear()
            state = self._state(document) or DocumentState(name="")
            parts = history.read(self._places(document, state), range(state.tokens // size))
            self._held[document] = b"".join(rows.numpy().tobytes() for _, rows in parts)
        return self._held[document]


def _agreeing(one: bytes, other: bytes) -> int:
    """How many first blocks two histories have in common: each hash says everything before it."""

    def differs(block: int) -> bool:
        part = slice(block * HASH_BYTES, (block + 1) * HASH_BYTES)
        return one[part] != other[part]

    return bisect_left(range(min(len(one), len(other)) // HASH_BYTES), True, key=differs)
