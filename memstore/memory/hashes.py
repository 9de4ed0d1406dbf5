"""The hashes that histories are made of, without tensors: see ``history.py``, which stores and finds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from memstore.memory.spec import Fingerprint
from memstore.store.contract import Bytes

# Nothing here imports tensors: the child process of `verify` starts in a tenth of the time.
HASH_BYTES = 16
HASHES_PER_RUN = 240
"""So that a run, which every append rewrites, takes one page of 4 KiB."""


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
