"""What a process takes, told apart into its own memory and pages of mapped files."""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memstore.resources import PeakMemory, disk_bytes, hardware, memory_in_use

MB = 1 << 20
PATIENCE = 60  # seconds
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the kinds of memory apart")


def until(seen: Callable[[], bool]) -> None:
    """Return when the thread that watches has seen something."""
    end = time.monotonic() + PATIENCE
    while not seen() and time.monotonic() < end:
        time.sleep(0.01)


@linux
def test_the_peak_sees_what_was_allocated_and_freed_again() -> None:
    anonymous, resident = memory_in_use()
    with PeakMemory() as peak:
        held = np.ones(200 * MB, np.uint8)
        until(lambda: peak.anonymous_bytes - anonymous > 190 * MB)
        del held
    assert 190 * MB < peak.anonymous_bytes - anonymous < 300 * MB
    assert 190 * MB < peak.rss_bytes - resident < 300 * MB
    assert memory_in_use()[0] - anonymous < 100 * MB


@linux
def test_pages_of_a_mapped_file_are_not_anonymous(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (64 * MB))
    anonymous, resident = memory_in_use()
    with path.open("rb") as file, PeakMemory() as peak, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[i] for i in range(0, len(mapped), 4096)) > 0
        until(lambda: peak.rss_bytes - resident > 60 * MB)
    assert peak.rss_bytes - resident > 60 * MB
    assert peak.anonymous_bytes - anonymous < 32 * MB


def test_the_peak_holds_what_an_exception_leaves() -> None:
    with pytest.raises(ZeroDivisionError), PeakMemory() as peak:
        _ = 1 / 0
    assert 0 < peak.anonymous_bytes <= peak.rss_bytes


def test_holes_in_files_take_no_bytes_on_disk(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/full").write_bytes(b"x" * 3 * MB)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(50 * MB)
    assert 3 * MB <= disk_bytes(tmp_path) < 4 * MB


def test_hardware_is_told_in_json() -> None:
    told = json.loads(json.dumps(hardware()))
    assert told["cpu"]
    assert told["cores"] >= 1
    assert told["threads"] == 1
