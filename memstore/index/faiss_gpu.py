"""Copies of FAISS's structures on a GPU: where FAISS was built for GPUs (``faiss-gpu-cu12``) and finds one.

FAISS searches Flat and IVF on a GPU, without a filter, and knows no removal there. So the copies only serve searches
among all blocks of a base that has lost none, for not too many candidates; everything else asks the structures in host
memory, which stay. Candidates are scored again in float32 either way. No GPU has run this yet: the tests check when it
is asked, with copies in host memory in the place of those on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy.typing as npt

MOST = 1024
"""Candidates, and inverted lists, up to which every FAISS for GPUs goes."""
Array = npt.NDArray[Any]


class Copies(NamedTuple):
    """What there is on a GPU."""

    heads: list[Any] | None
    """One structure for each key head; None where they stay in host memory."""
    resources: Any
    """The GPU's memory that they take, which must not be collected before them."""
    where: str
    """"GPU 0", or why it is the CPU: for people."""


def copies(faiss: ModuleType, heads: Sequence[Any]) -> Copies:
    """Copies of the structures ``heads`` on the first GPU, or why there are none."""
    if not hasattr(faiss, "StandardGpuResources"):
        return Copies(None, None, "CPU: this FAISS was built without GPUs")
    if not faiss.get_num_gpus():
        return Copies(None, None, "CPU: FAISS finds no GPU")
    try:
        resources = faiss.StandardGpuResources()
        return Copies([faiss.index_cpu_to_gpu(resources, 0, index) for index in heads], resources, "GPU 0")
    except (RuntimeError, MemoryError) as error:
        return Copies(None, None, f"CPU: FAISS cannot copy it to the GPU ({str(error).rsplit(': ', 1)[-1]})")


def search(copy: Any, rows: Array, count: int, nprobe: int | None) -> Array:
    """Numbers ``[R, count]`` of the best keys for ``rows [R, D]``, of a copy; ``nprobe`` lists where it has some."""
    if nprobe is not None:
        copy.nprobe = nprobe
    numbers: Array = copy.search(rows, count)[1]
    return numbers
