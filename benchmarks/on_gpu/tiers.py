"""Blocks from disk, host and device, and the index on the device, beside what copies reach."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.on_gpu.child import Piece
from memstore.index import open_index
from memstore.memory.spec import Fingerprint, MemorySpec


def tiers(here: Piece) -> None:
    """Gathers of a few blocks, and an index of a million keys."""
    with here.attempt("blocks"):
        _blocks(here)
    for keys, dim, queries in ((1 << 20, 64, 8), (1 << 18, 64, 256)):
        with here.attempt(f"index of {keys} x {dim}", least=here.size(5, 0)):
            _index(here, here.size(keys, 200), dim, here.size(queries, 2))


def _blocks(here: Piece) -> None:
    """Blocks of 64 tokens: 48 KiB (a small model's layer) and 256 KiB (one of 8B)."""
    for groups, dim in ((3, 64), (8, 128)):
        shape = (groups, 64, dim)
        count = here.size(512, 20)
        names = dict.fromkeys(("architecture", "weights", "tokenizer", "positions", "layout"), "benchmark")
        spec = MemorySpec(
            layers=1, fields={"k": shape, "v": shape}, index_layers=(), key_heads=1, key_dim=128, keys_per_block=1,
            block_size=64, dtype="bfloat16", fingerprint=Fingerprint(**names, dtype="bfloat16", block_size=64),
        )  # fmt: skip
        nbytes = 2 * 2 * groups * 64 * dim
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "memory")
            with (
                memstore.open(path, spec=spec) as memory,
                memory.document("d").append(torch.zeros(64 * count, dtype=torch.int32)) as batch,
            ):
                batch.put(0, k=torch.randn(count, *shape).bfloat16(), v=torch.randn(count, *shape).bfloat16())
            for name, options in {
                "disk": {"host_bytes": 0},
                "host": {"host_bytes": 1 << 30},
                "device": {"host_bytes": 1 << 30, "device_bytes": 1 << 30, "device": "cuda"},
            }.items():
                with here.attempt(f"blocks from {name}"):
                    _gathers(here, path, name, options, nbytes, count)


def _gathers(here: Piece, path: str, name: str, options: Any, nbytes: int, count: int) -> None:
    with memstore.open(path, **options) as memory:
        layer = memory.document("d").layer(0)
        for chosen in (8, 32)[: here.size(2, 1)]:
            blocks = torch.randperm(count)[: min(chosen, count)]

            def gather(blocks: torch.Tensor = blocks) -> None:
                layer.gather(blocks, device=torch.device("cuda"))
                torch.cuda.synchronize()

            seconds = _seconds(gather, here.size(20, 2))
            here.row(
                f"{len(blocks)} blocks of {nbytes >> 10} KiB from {name}", ms=1000 * seconds,
                value=len(blocks) * nbytes / seconds / 1e9, unit="GB/s",
            )  # fmt: skip


def _index(here: Piece, count: int, dim: int, queries: int) -> None:
    keys = torch.randn(count, 1, 1, dim)
    made = open_index("exact", key_heads=1, key_dim=dim, keys_per_block=1, device="cuda")
    begun = time.perf_counter()
    made.add(torch.arange(count), keys)
    torch.cuda.synchronize()
    here.row(f"index of {count} x {dim}: add", value=time.perf_counter() - begun, unit="s")
    asked = torch.randn(1, queries, dim, device="cuda")
    for name, call in (("search", lambda: made.search(asked, 16)), ("score", lambda: made.score(asked))):

        def once(call: Callable[[], object] = call) -> None:
            call()
            torch.cuda.synchronize()

        seconds = _seconds(once, here.size(20, 2))
        here.row(
            f"index of {count} x {dim}: {name} of {queries} queries", ms=1000 * seconds,
            value=keys.nbytes / seconds / 1e12, unit="TB/s of keys",
        )  # fmt: skip


def _seconds(call: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        call()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begun) / repeats
