"""memstore gives a transformer a searchable memory that outlives the process.

``memstore.open`` opens a memory, ``memstore.attach`` attaches one to a model. Importing this package loads nothing
heavy: every name is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memstore._version import __version__
from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    NotFound,
    ReadOnlyMemory,
    StoreFull,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from memstore.memory.copy import copy_memory as copy
    from memstore.memory.document import Document
    from memstore.memory.memory import Memory
    from memstore.memory.memory import open_memory as open  # noqa: A004 - `memstore.open` is the name that users expect
    from memstore.memory.spec import Fingerprint, MemorySpec
    from memstore.readers.kinds import Retrieval
    from memstore.readers.many import read_many
    from memstore.readers.reader import Reader, attach

_HOMES = {
    "Document": ("memstore.memory.document", "Document"),
    "Fingerprint": ("memstore.memory.spec", "Fingerprint"),
    "Memory": ("memstore.memory.memory", "Memory"),
    "MemorySpec": ("memstore.memory.spec", "MemorySpec"),
    "Retrieval": ("memstore.readers.kinds", "Retrieval"),
    "Reader": ("memstore.readers.reader", "Reader"),
    "attach": ("memstore.readers.reader", "attach"),
    "copy": ("memstore.memory.copy", "copy_memory"),
    "open": ("memstore.memory.memory", "open_memory"),
    "read_many": ("memstore.readers.many", "read_many"),
}

__all__ = [
    "DamagedError",
    "Document",
    "Fingerprint",
    "ForeignMemory",
    "InvalidArgument",
    "Memory",
    "MemoryInUse",
    "MemorySpec",
    "MemstoreError",
    "NotAMemory",
    "NotFound",
    "ReadOnlyMemory",
    "Reader",
    "Retrieval",
    "StoreFull",
    "UnsupportedModel",
    "__version__",
    "attach",
    "copy",
    "open",
    "read_many",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
