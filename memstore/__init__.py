"""memstore gives a transformer a searchable memory that outlives the process.

``memstore.open`` opens a memory, ``memstore.attach`` attaches one to a model. Importing this package loads nothing
heavy: every name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from memstore.lazy import lazy

if TYPE_CHECKING:
    from memstore.memory.copy import copy_memory as copy
    from memstore.memory.document import Document
    from memstore.memory.memory import Memory
    from memstore.memory.memory import open_memory as open  # noqa: A004 - `memstore.open` is the name that users expect
    from memstore.memory.spec import Fingerprint, MemorySpec
    from memstore.readers.kinds import Retrieval
    from memstore.readers.many import read_many
    from memstore.readers.reader import Reader, attach

__all__ = [
    "DamagedError", "Document", "Fingerprint", "ForeignMemory", "InvalidArgument", "Memory", "MemoryInUse",
    "MemorySpec", "MemstoreError", "NotAMemory", "NotFound", "ReadOnlyMemory", "Reader", "Retrieval", "StoreFull",
    "UnsupportedModel", "__version__", "attach", "copy", "open", "read_many",
]  # fmt: skip


__getattr__ = lazy(
    __name__,
    {
        "memory.copy": "copy_memory as copy",
        "memory.document": "Document",
        "memory.memory": "Memory, open_memory as open",
        "memory.spec": "Fingerprint, MemorySpec",
        "readers.kinds": "Retrieval",
        "readers.many": "read_many",
        "readers.reader": "Reader, attach",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
