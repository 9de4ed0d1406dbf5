"""For tests that fork a process which has computed."""

from __future__ import annotations

import os
import time


def alone() -> None:
    """Wait for threads to be gone: one that is ending holds a lock of MKL, which a fork would keep for ever."""
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < until:  # noqa: PTH208 - names are enough
        time.sleep(0.01)
