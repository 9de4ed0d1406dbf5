"""Memories: documents of blocks on a store, with an index for each layer that has landmarks.

``memory.py`` is the way in; ``append.py`` writes, ``view.py`` searches and gathers, ``verify.py`` checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.lazy import lazy

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

__getattr__ = lazy(
    __name__,
    {
        "append": "Append",
        "document": "Document",
        "memory": "Memory, open_memory",
        "spec": "Fingerprint, MemorySpec",
        "trace_file": "Look, Step",
        "traces": "Recorder, Trace, Traces",
        "verify": "Finding",
        "view": "Hits, LayerView",
    },
)
