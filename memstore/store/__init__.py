"""Block stores: typed, checksummed records under ordered keys, written in atomic batches.

``contract.py`` says what a store is. ``ram.py``, ``lmdb/`` and ``zarr/`` implement it, and ``encrypted.py`` wraps them.
``docs/format.md`` has the bytes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOMES = {"LmdbStore": "lmdb.store", "RamStore": "ram", "ZarrStore": "zarr"}


def __getattr__(name: str) -> Any:
    """Import a store on first use, because each brings libraries of its own."""
    if name in _HOMES:
        return getattr(import_module(f"memstore.store.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
