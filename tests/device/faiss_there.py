"""A stand-in for what FAISS has in a build for GPUs alone: no machine without one can install that.

It searches copies of the structures with FAISS itself, and takes what a GPU takes: no filter, 2,048 candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import faiss
import numpy as np

MOST = 2048


class Resources:
    """``faiss.StandardGpuResources``."""

    def setTempMemory(self, size: int) -> None:  # noqa: N802 - that is its name
        """Room for searches."""
        assert size > 0


class There:
    """An index on a GPU."""

    searches = 0

    def __init__(self, resources: Resources, device: int, index: Any) -> None:
        assert isinstance(resources, Resources)
        assert device == 0
        if isinstance(index, faiss.IndexHNSW):
            raise RuntimeError("This index type is not implemented on GPU.")
        self._index = faiss.clone_index(index)

    def search(self, rows: Any, count: int, *, params: Any = None) -> tuple[Any, Any]:
        """Scores and numbers."""
        There.searches += 1
        assert isinstance(rows, np.ndarray)
        assert 0 < count <= MOST
        assert params is None or (type(params) is faiss.SearchParametersIVF and params.sel is None)
        assert params is None or 0 < params.nprobe <= MOST
        found: tuple[Any, Any] = self._index.search(rows, count, params=params)
        return found


@contextmanager
def faiss_there() -> Iterator[type[There]]:
    """FAISS as in a build for GPUs, on a machine with one."""
    given: dict[str, Any] = {
        "StandardGpuResources": Resources,
        "index_cpu_to_gpu": There,
        "get_num_gpus": lambda: 1,
    }
    There.searches = 0
    with mock.patch.multiple(faiss, create=True, **given):
        yield There
