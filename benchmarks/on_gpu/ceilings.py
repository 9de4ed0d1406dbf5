"""What the machine is, and what it can do at most: everything else is told as a share of it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu.child import Piece


def about(here: Piece) -> None:
    """One row: versions, device, and room."""
    found: dict[str, Any] = {}
    for name in ("torch", "triton", "transformers", "numpy", "lmdb", "pytest"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    properties = torch.cuda.get_device_properties(0)
    found |= {
        "device": properties.name,
        "memory": properties.total_memory,
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": None if here.tiny else torch.backends.cudnn.version(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"),
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "cores": os.cpu_count(),
        "free_disk": shutil.disk_usage(tempfile.gettempdir()).free,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    here.row("about", **found)


def _said(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def ceilings(here: Piece) -> None:
    """Copies, products, launches, waits, and the disk."""
    with here.attempt("copy of 4 GiB"):
        numbers = here.size(1 << 31, 1 << 12)
        source = torch.empty(numbers, dtype=torch.bfloat16, device="cuda").normal_()  # zeros would be compressed
        target = torch.empty_like(source)
        (ms,) = here.times([lambda: target.copy_(source)], repeats=10)
        here.row("copy of 4 GiB", ms=ms, value=2 * numbers * 2 / ms / 1e9, unit="TB/s")
    side = here.size(8192, 32)
    for name, dtype, tf32 in (
        ("bf16", torch.bfloat16, False), ("fp32", torch.float32, False), ("tf32", torch.float32, True)
    ):  # fmt: skip
        with here.attempt(f"product {name}"):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            x, y = (torch.randn(side, side, device="cuda").to(dtype) for _ in range(2))
            (ms,) = here.times([lambda x=x, y=y: x @ y], warmups=5, repeats=15)  # type: ignore[misc]
            here.row(f"product {name}", ms=ms, value=2 * side**3 / ms / 1e9, unit="TFLOP/s")
    torch.backends.cuda.matmul.allow_tf32 = False
    for megabytes in (1, 16, 256):
        for pinned in (True, False):
            name = f"{megabytes} MB, {'pinned' if pinned else 'pageable'}"
            with here.attempt(name):
                numbers = here.size(megabytes << 18, 64)
                host = torch.randn(numbers).pin_memory() if pinned else torch.randn(numbers)
                there = torch.empty(numbers, device="cuda")
                up, down = here.times(
                    [lambda: there.copy_(host, non_blocking=True), lambda: host.copy_(there, non_blocking=True)],  # noqa: B023
                    warmups=3, repeats=10,
                )  # fmt: skip
                here.row(f"to the device, {name}", ms=up, value=4 * numbers / up / 1e6, unit="GB/s")
                here.row(f"to the host, {name}", ms=down, value=4 * numbers / down / 1e6, unit="GB/s")
    one = torch.zeros(1, device="cuda")
    with here.attempt("launches"):
        from benchmarks.on_gpu.thirty import launch

        for name, call in (
            ("launch of an operation", lambda: one.add_(1)),
            ("launch of a Triton kernel with 30 arguments", lambda: launch(one)),
            ("item()", one.item),
        ):
            here.row(name, value=_host_microseconds(call, here.size(1000, 3)), unit="us of the host")
    with here.attempt("64 MB to disk"), tempfile.TemporaryDirectory() as folder:
        data = os.urandom(here.size(64 << 20, 1 << 10))
        begun = time.perf_counter()
        with (Path(folder) / "written").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        here.row("64 MB written and synced", value=1000 * (time.perf_counter() - begun), unit="ms")


def _host_microseconds(call: Any, count: int) -> float:
    for _ in range(count // 10 + 1):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - begun
    torch.cuda.synchronize()
    return 1e6 * spent / count
