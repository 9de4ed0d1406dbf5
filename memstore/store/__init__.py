"""Block stores: typed, checksummed records under ordered keys, written in atomic batches.

``contract.py`` says what a store is. ``ram.py``, ``lmdb/`` and ``zarr/`` implement it, and ``encrypted.py`` wraps them.
``docs/format.md`` has the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.lazy import lazy
from memstore.store.contract import BlockStore as BlockStore
from memstore.store.contract import Capabilities as Capabilities
from memstore.store.records import Batch as Batch
from memstore.store.records import Key as Key
from memstore.store.records import Layout as Layout
from memstore.store.records import Record as Record
from memstore.store.records import ScannedValue as ScannedValue
from memstore.store.records import Table as Table

if TYPE_CHECKING:
    from memstore.store.lmdb.store import LmdbStore as LmdbStore
    from memstore.store.ram import RamStore as RamStore
    from memstore.store.zarr import ZarrStore as ZarrStore

# Imported on first use, because each brings libraries of its own.
__getattr__ = lazy(__name__, {"lmdb.store": "LmdbStore", "ram": "RamStore", "zarr": "ZarrStore"})
