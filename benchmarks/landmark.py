"""Time and memory of landmark attention, forward and backward, by length.

    python benchmarks/landmark.py

Without a GPU: the PyTorch form and the reference, which keeps all weights, on the CPU, each length in a process of its
own, whose largest memory is reported; the time of PyTorch's causal attention on the same shape is beside them. On a
GPU: the Triton kernels beside PyTorch's flash attention, which take turns; ratios of one run are what counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.landmark_attention import landmark_attention
from memstore.report import Page
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "landmark.json"
LONGEST_DENSE = 4096
"""Tokens up to which the reference is measured on a CPU: it needs gigabytes beyond."""


def main() -> None:
    """Measure, print a table, and write the JSON file."""
    options = _options()
    if options.one:
        sys.stdout.write(json.dumps(_cpu(options.one[0], int(options.one[1]), options.block[0])))
        return
    gpu = torch.cuda.is_available()
    lengths = options.lengths or ([4096, 8192] if gpu else [1024, 2048, 4096, 8192, 16384])
    if gpu:
        rows = [_gpu(tokens, block, heads) for tokens in lengths for block in options.block for heads in (16, 8)]
    else:
        rows = [_child(backend, tokens, options.block[0]) for tokens in lengths for backend in _backends(tokens)]
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **hardware()}
    options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    page = Page()
    page.facts(about)
    page.line()
    page.table([*rows[0]], [[*row.values()] for row in rows])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, help="in tokens")
    parser.add_argument("--block", nargs="+", type=int, default=[64, 50], help="tokens; a CPU takes the first")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file to write")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "TOKENS"), help="one row, on a CPU, as JSON")
    return parser.parse_args()


def _backends(tokens: int) -> list[str]:
    return ["torch", "reference"] if tokens <= LONGEST_DENSE else ["torch"]


def _child(backend: str, tokens: int, block: int) -> dict[str, Any]:
    """One row, in a process of its own."""
    command = [sys.executable, __file__, "--one", backend, str(tokens), "--block", str(block)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # type: ignore[no-any-return]


def _cpu(backend: Any, tokens: int, block: int) -> dict[str, Any]:
    """One thread, 4 heads of 16: seconds of its processor, and how much the memory of the process grew, in MB."""
    torch.set_num_threads(1)
    tensors, dout, is_landmark = _inputs(1, 4, tokens, 16, block, "cpu", torch.float32)
    q, k, v = tensors
    plain = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), tensors, dout)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = _seconds(lambda: landmark_attention(q, k, v, is_landmark, backend=backend), tensors, dout)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "backend": backend,
        "tokens": tokens,
        "block": block,
        "seconds": round(seconds, 3),
        "causal_seconds": round(plain, 3),
        "ratio": round(seconds / plain, 2),
        "grown_mb": round(grown, 1),
    }


def _seconds(call: Any, tensors: list[Tensor], dout: Tensor) -> float:
    """Of the processor, for the faster of two passes in both directions."""
    times = []
    for _ in range(2):
        begun = time.process_time()
        torch.autograd.grad(call(), tensors, dout)
        times.append(time.process_time() - begun)
    return min(times)


def _gpu(tokens: int, block: int, groups: int) -> dict[str, Any]:
    """16 heads of 128 in bfloat16, two rows: milliseconds of both directions, and memory in MB beside the inputs."""
    tensors, dout, is_landmark = _inputs(2, 16, tokens, 128, block, "cuda", torch.bfloat16, groups)
    q, k, v = tensors

    def flash() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups != 16)

    calls = {"landmark": lambda: landmark_attention(q, k, v, is_landmark, backend="triton"), "flash": flash}
    times: dict[str, list[float]] = {name: [] for name in calls}
    memory = {}
    for turn in range(25):
        for name, call in calls.items():
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.autograd.grad(call(), tensors, dout)
            end.record()
            end.synchronize()
            memory[name] = (torch.cuda.max_memory_allocated() - held) / 2**20
            if turn >= 5:  # kernels are tuned before
                times[name].append(begin.elapsed_time(end))
    ms = {name: median(found) for name, found in times.items()}
    return {
        "tokens": tokens,
        "block": block,
        "key_value_heads": groups,
        "ms": round(ms["landmark"], 3),
        "flash_ms": round(ms["flash"], 3),
        "ratio": round(ms["landmark"] / ms["flash"], 2),
        "memory_mb": round(memory["landmark"], 1),
        "flash_memory_mb": round(memory["flash"], 1),
    }


def _inputs(
    rows: int, heads: int, tokens: int, dim: int, block: int, device: str, dtype: torch.dtype, groups: int | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """``q, k, v``, which want gradients, the gradient of the output, and where landmarks are."""
    gen = torch.Generator(device).manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(rows, count, tokens, dim, generator=gen, device=device).to(dtype)

    is_landmark = (torch.arange(1, tokens + 1, device=device) % block == 0).repeat(rows, 1)
    tensors = [normal(count).requires_grad_() for count in (heads, groups or heads, groups or heads)]
    return tensors, normal(heads), is_landmark


if __name__ == "__main__":
    main()
