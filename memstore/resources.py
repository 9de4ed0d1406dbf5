"""Peak memory of a process in two parts: its own allocations, and pages of mapped files that the kernel keeps."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

STATUS = Path("/proc/self/status")
INTERVAL = 0.02


class PeakMemory:
    """Watches the memory of this process from its own thread during a ``with`` block."""

    def __init__(self) -> None:
        self.anonymous_bytes = 0
        """Highest anonymous memory seen (Linux; elsewhere the same as ``rss_bytes``)."""
        self.rss_bytes = 0
        """Highest resident memory seen, pages of mapped files included."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._sample()

    def _sample(self) -> None:
        anonymous, resident = memory_in_use()
        self.anonymous_bytes = max(self.anonymous_bytes, anonymous)
        self.rss_bytes = max(self.rss_bytes, resident)


def memory_in_use() -> tuple[int, int]:
    """Return the anonymous and resident bytes of this process."""
    if not STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return _kilobytes(fields["RssAnon"]), _kilobytes(fields["VmRSS"])


def _kilobytes(field: str) -> int:
    return int(field.split()[0]) * 1024


def disk_bytes(folder: Path) -> int:
    """Return the bytes that the files in ``folder`` take on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def hardware() -> dict[str, object]:
    """Return the hardware that a measurement ran on."""
    import platform

    import torch

    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
