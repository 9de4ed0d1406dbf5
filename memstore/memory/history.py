"""The history of a document: a chain of hashes over its tokens, one for each complete block.

The hash before the first block says which model computed the states, and how it read: ``h = H(fingerprint, reading)``.
That of a block says everything up to its end: ``h[i] = H(h[i - 1], tokens of block i)``. So where the hashes of two
blocks are equal, their whole histories are, and with them their states: blocks are found by hash and shared.

Digests of weights and tokenizers, for the fingerprint that a history begins with.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from memstore.errors import DamagedError
from memstore.memory.entry import HASH_BYTES, DocumentState
from memstore.memory.places import Places
from memstore.memory.spec import Fingerprint, MemorySpec
from memstore.store.contract import Bytes

if TYPE_CHECKING:  # no tensors are imported here: the child process of `verify` starts in a tenth of the time
    from torch import nn

    from memstore.memory.tensors import Runs


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


def digest_of_weights(model: nn.Module) -> str:
    """xxh3-128 over the names, dtypes, shapes and bytes of all weights."""
    from memstore.memory.tensors import byte_rows

    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(byte_rows(tensor.reshape(1, -1)).data)
    return digest.hexdigest()


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


def agreeing(history: Runs, places: Places, state: DocumentState, hashes: Bytes, least: int, size: int) -> int:
    """How many first blocks have the history that ``hashes [n, HASH_BYTES]`` say, if more than ``least``; else 0.

    ``size`` is the number of tokens in a block. Raises ``DamagedError``.
    """
    if state.digest is None or state.first:
        return 0

    def differs(block: int) -> bool:
        return _row(history, places, block) != bytes(hashes[block])

    most = min(len(hashes), state.tokens // size)
    if least >= most or differs(least):  # most documents have nothing in common with the text: one look at each
        return 0
    return bisect_left(range(most), True, least, most, key=differs)


# Documents whose first blocks have left, or that have no digest, are not found for reuse.
def known_prefix(
    candidates: Iterable[tuple[DocumentState, Places]], history: Runs, hashes: Bytes, size: int
) -> tuple[str, int] | None:
    """The document, by name, that has most blocks of the history ``hashes``, and how many; None if none has any."""
    found: tuple[str, int] | None = None
    for state, places in candidates:
        try:
            count = agreeing(history, places, state, hashes, found[1] if found else 0, size)
        except DamagedError:
            continue  # verify names it; here it only means that nothing of this document is used
        if count:
            found = state.name, count
    return found


def _row(history: Runs, places: Places, block: int) -> bytes:
    ((_, row),) = history.read(places, range(block, block + 1))
    return row.numpy().tobytes()
