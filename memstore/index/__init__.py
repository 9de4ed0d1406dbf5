"""Vector indexes: landmarks of blocks, searched by inner product.

Other packages add theirs through the entry point group below.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument
from memstore.lazy import lazy

if TYPE_CHECKING:  # nothing here needs PyTorch before an index is made
    from memstore.index.contract import IndexCapabilities, SearchResult, VectorIndex
    from memstore.index.exact import ExactIndex

__all__ = ["ENTRY_POINTS", "ExactIndex", "IndexCapabilities", "SearchResult", "VectorIndex", "open_index"]

ENTRY_POINTS = "memstore.indexes"
"""Entry point group of other packages' indexes: kind -> a class with the constructor of ``VectorIndex``."""

_HOMES = {
    "auto": "memstore.index.cluster_index:AutoIndex",
    "clusters": "memstore.index.cluster_index:ClusterIndex",
    "codes": "memstore.index.codes:CodeIndex",
    "exact": "memstore.index.exact:ExactIndex",
    "faiss": "memstore.index.faiss:FaissIndex",
    "milvus": "memstore.index.milvus:MilvusIndex",
    "signs": "memstore.index.signs:SignIndex",
}
BUILT_IN = frozenset(_HOMES)
"""Kinds that come with memstore."""


def open_index(name: str, *, key_heads: int, key_dim: int, keys_per_block: int, **options: Any) -> VectorIndex:
    """Make an empty index. ``name`` is a kind, with its settings after a colon: ``"faiss:IVF1024,Flat"``.

    Kinds are ``exact``, ``faiss``, ``clusters``, ``codes``, ``signs``, ``milvus``, ``auto`` and the kinds of other
    packages. ``options`` (``dtype``, ``device``) go to the constructor. Raises ``InvalidArgument`` for an unknown kind,
    for settings that it does not understand, and if a required library is missing.
    """
    kind, _, settings = name.partition(":")
    index: VectorIndex = _class(kind)(
        key_heads=key_heads, key_dim=key_dim, keys_per_block=keys_per_block, settings=settings, **options
    )
    return index


def capabilities_of(name: str) -> IndexCapabilities | None:
    """Return the capabilities of an index of this name, None if only its objects know. Raises ``InvalidArgument``."""
    return getattr(_class(name.partition(":")[0]), "capabilities", None)


def lies_on_devices(name: str) -> bool:
    """Return whether an index of this name can be on an accelerator. Raises ``InvalidArgument`` for an unknown kind."""
    known = capabilities_of(name)
    return known is not None and known.devices


def _class(kind: str) -> Any:
    if kind in _HOMES:
        return resolve_name(_HOMES[kind])
    plugins = entry_points(group=ENTRY_POINTS)
    if kind not in plugins.names:
        known = ", ".join(sorted({*_HOMES, *plugins.names}))
        raise InvalidArgument(
            f"There is no index {kind!r}; choose from {known}. Settings follow a colon: faiss:HNSW32."
        )
    return plugins[kind].load()


__getattr__ = lazy(__name__, {"contract": "IndexCapabilities, SearchResult, VectorIndex", "exact": "ExactIndex"})
