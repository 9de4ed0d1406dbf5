"""C code as a processor with narrower vectors compiles it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from memstore.kernels.native import Library, lanes


def narrower(native: Any, features: Collection[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the library of the module ``native`` for a processor that has only these of Linux's features."""
    monkeypatch.setattr("memstore.kernels.native.processor", lambda: frozenset(features))
    monkeypatch.setattr(native, "LANES", lanes())
    monkeypatch.setattr(native, "_library", Library(native.__file__, native._library.load))
