"""Memories in one LMDB environment."""

from memstore.store.lmdb.store import LmdbStore

__all__ = ["LmdbStore"]
