"""Block stores: typed, checksummed records under ordered keys, written in atomic batches.

``contract.py`` says what a store is; ``ram.py``, ``lmdb/`` and ``zarr/`` fulfil it, and ``encrypted.py`` around
them. ``docs/format.md`` has the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memstore.store.contract import BlockStore, Capabilities
from memstore.store.records import Batch, Key, Layout, Record, ScannedValue, Table

if TYPE_CHECKING:
    from memstore.store.lmdb.store import LmdbStore
    from memstore.store.ram import RamStore
    from memstore.store.zarr import ZarrStore

__all__ = [
    "Batch",
    "BlockStore",
    "Capabilities",
    "Key",
    "Layout",
    "LmdbStore",
    "RamStore",
    "Record",
    "ScannedValue",
    "Table",
    "ZarrStore",
]


def __getattr__(name: str) -> Any:
    """Import a store when it is first asked for: each brings libraries of its own."""
    match name:
        case "LmdbStore":
            from memstore.store.lmdb.store import LmdbStore

            return LmdbStore
        case "RamStore":
            from memstore.store.ram import RamStore

            return RamStore
        case "ZarrStore":
            from memstore.store.zarr import ZarrStore

            return ZarrStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
