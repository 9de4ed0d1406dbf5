"""Vector indexes: landmarks of blocks, searched by inner product. Others plug in by the entry point group below."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument
from memstore.index.contract import Found, IndexCapabilities, VectorIndex

if TYPE_CHECKING:
    from memstore.index.exact import ExactIndex

__all__ = ["ENTRY_POINTS", "ExactIndex", "Found", "IndexCapabilities", "VectorIndex", "open_index"]

ENTRY_POINTS = "memstore.indexes"
"""Entry point group of other packages' indexes: name -> a class with the constructor of ``ExactIndex``."""


def open_index(name: str, *, key_heads: int, key_dim: int, keys_per_block: int, **options: Any) -> VectorIndex:
    """A new, empty index of the kind ``name``: ``"exact"``, or one that another package provides.

    ``options`` (``dtype``, ``device``, ...) go to its constructor. Raises ``InvalidArgument`` for an unknown name.
    """
    options |= {"key_heads": key_heads, "key_dim": key_dim, "keys_per_block": keys_per_block}
    if name == "exact":
        from memstore.index.exact import ExactIndex

        return ExactIndex(**options)
    plugins = entry_points(group=ENTRY_POINTS)
    if name not in plugins.names:
        known = ", ".join(sorted({"exact", *plugins.names}))
        raise InvalidArgument(f"There is no index {name!r}; there is: {known}.")
    index: VectorIndex = plugins[name].load()(**options)
    return index


def __getattr__(name: str) -> Any:
    if name == "ExactIndex":
        from memstore.index.exact import ExactIndex

        return ExactIndex
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
