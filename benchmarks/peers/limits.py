"""What memory, processor and disk can do at most, for the figures of peers to be held against."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

NUMBERS = 1 << 26
"""Bytes that are copied."""
SIDE = 1024
"""Of the matrices that are multiplied."""
DISK_BYTES = 256 << 20
REPEATS = 7


def limits(threads: int, dtype: str) -> dict[str, float]:
    """GB/s of a copy (read and written), TFLOP/s of a matrix product, MB/s of a synced file.

    A copy and a product are the best of some, in seconds of the processor as the peers are; the disk is by the clock.
    """
    torch.set_num_threads(threads)
    source = torch.ones(NUMBERS, dtype=torch.uint8)
    target = torch.empty_like(source)
    square = torch.randn(SIDE, SIDE).to(getattr(torch, dtype))
    copied, multiplied = _best(lambda: target.copy_(source)), _best(lambda: square @ square)
    with tempfile.TemporaryDirectory() as folder:
        written, read = _disk(Path(folder) / "file")
    return {
        "copy_gb_per_s": round(2 * NUMBERS / copied / 1e9, 2),
        "product_tflop_per_s": round(2 * SIDE**3 / multiplied / 1e12, 3),
        "disk_written_mb_per_s": round(DISK_BYTES / written / 1e6),
        "disk_read_mb_per_s": round(DISK_BYTES / read / 1e6),
    }


def _best(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        begun = time.process_time()
        call()
        seconds.append(time.process_time() - begun)
    return min(seconds)


def _disk(file: Path) -> tuple[float, float]:
    """Seconds to write and sync a file, and to read it when its pages have left memory."""
    content = os.urandom(DISK_BYTES)
    begun = time.perf_counter()
    with file.open("wb") as handle:
        handle.write(content)
        os.fsync(handle.fileno())
        written = time.perf_counter() - begun
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    file.read_bytes()
    return written, time.perf_counter() - begun
