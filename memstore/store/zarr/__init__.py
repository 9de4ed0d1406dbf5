"""Memories whose old blocks are Zarr arrays."""

from memstore.store.zarr.store import ZarrStore

__all__ = ["ZarrStore"]
