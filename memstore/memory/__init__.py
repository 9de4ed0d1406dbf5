"""Memories: documents of blocks on a store, with an index for each layer that has landmarks.

``memory.py`` is the way in; ``append.py`` writes, ``view.py`` searches and gathers, ``verify.py`` checks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memstore.memory.append import Append as Append
    from memstore.memory.document import Document as Document
    from memstore.memory.memory import Memory as Memory
    from memstore.memory.memory import open_memory as open_memory
    from memstore.memory.spec import Fingerprint as Fingerprint
    from memstore.memory.spec import MemorySpec as MemorySpec
    from memstore.memory.trace_file import Look as Look
    from memstore.memory.trace_file import Step as Step
    from memstore.memory.traces import Recorder as Recorder
    from memstore.memory.traces import Trace as Trace
    from memstore.memory.traces import Traces as Traces
    from memstore.memory.verify import Finding as Finding
    from memstore.memory.view import Hits as Hits
    from memstore.memory.view import LayerView as LayerView

_HOMES = {
    "Append": "append",
    "Document": "document",
    "Finding": "verify",
    "Fingerprint": "spec",
    "Hits": "view",
    "LayerView": "view",
    "Look": "trace_file",
    "Memory": "memory",
    "MemorySpec": "spec",
    "Recorder": "traces",
    "Step": "trace_file",
    "Trace": "traces",
    "Traces": "traces",
    "open_memory": "memory",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"memstore.memory.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
