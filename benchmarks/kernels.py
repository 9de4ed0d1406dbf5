"""Speed of the kernels, beside what the device can do at most, in one run.

    python -m benchmarks.kernels

On a GPU: the Triton kernels of grouped cross attention, forward, backward and decoding, beside the PyTorch form, with
the share they reach of a large copy's bandwidth and of a large matrix product's operations per second, both measured
in the same run. Without a GPU: the PyTorch form beside the reference, on the CPU; what the Triton kernels reach needs a
GPU. Implementations take turns, medians are reported, and ratios of one run are what counts.

Counted are the bytes that have to be moved at least (queries, output, each chosen block once, and their gradients),
and the operations of two products forward and five backward, as usual, however many a kernel makes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.on_gpu import child
from memstore.kernels._backends import Backend
from memstore.kernels.grouped_cross_attention import grouped_cross_attention
from memstore.report import Page
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "kernels.json"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one call, with the letters of the public function."""

    b: int
    c: int
    h: int
    g: int
    t: int
    d: int
    s: int
    k: int
    n: int


GPU_SHAPES = {
    "train": Shape(b=4, c=64, h=16, g=16, t=64, d=64, s=64, k=8, n=64),
    "train, grouped heads": Shape(b=4, c=64, h=32, g=8, t=64, d=128, s=64, k=8, n=64),
    "decode": Shape(b=32, c=1, h=32, g=8, t=1, d=128, s=64, k=64, n=1024),
    "decode, one sequence": Shape(b=1, c=1, h=32, g=8, t=1, d=128, s=64, k=64, n=1024),
}
CPU_SHAPES = {
    "train": Shape(b=8, c=16, h=4, g=4, t=32, d=16, s=32, k=4, n=16),
    "train, grouped heads": Shape(b=2, c=8, h=8, g=2, t=64, d=64, s=64, k=8, n=16),
    "decode": Shape(b=1, c=1, h=8, g=2, t=1, d=64, s=64, k=16, n=64),
}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What the device reaches at most, measured."""

    copy_gb_per_s: float
    """Read and written, of a large copy."""
    matmul_tflop_per_s: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pass over one shape."""

    name: str
    phase: str
    dtype: str
    backend: str
    ms: float
    baseline: str
    baseline_ms: float
    ratio: float
    """Time of the baseline against that of the back end."""
    gb_per_s: float
    of_copy: float
    tflop_per_s: float
    of_matmul: float


def main() -> None:
    """Measure, print a table, and write the JSON file."""
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(options.threads)
    rows, ceilings = [], {}
    for name in options.dtypes or (["bfloat16", "float32"] if device == "cuda" else ["float32"]):
        dtype = getattr(torch, name)
        ceilings[name] = ceiling(device, dtype)
        for label, shape in (GPU_SHAPES if device == "cuda" else CPU_SHAPES).items():
            rows += measured(label, shape, device, dtype, ceilings[name])
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "triton": _triton(), **hardware()}
    if device == "cpu":
        about["note"] = "no GPU here: the PyTorch form beside the reference; figures of the Triton kernels need a GPU"
    report = {
        "about": about,
        "ceilings": {name: asdict(found) for name, found in ceilings.items()},
        "shapes": {label: asdict(shape) for label, shape in (GPU_SHAPES if device == "cuda" else CPU_SHAPES).items()},
        "rows": [asdict(row) for row in rows],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        print(json.dumps(report))
        return
    page = Page()
    page.facts(about)
    page.line()
    page.table(
        ["dtype", *asdict(next(iter(ceilings.values())))], [[n, *asdict(c).values()] for n, c in ceilings.items()]
    )
    page.line()
    page.table([*asdict(rows[0])], [[*asdict(row).values()] for row in rows])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, where there is no GPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file to write")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def _triton() -> str | None:
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None


def ceiling(device: str, dtype: torch.dtype) -> Ceiling:
    """A copy and a matrix product, large for the device."""
    numbers, side = (2**28, 8192) if device == "cuda" else (2**24, 1024)
    source = torch.zeros(numbers, dtype=dtype, device=device)
    target = torch.empty_like(source)
    square = torch.randn(side, side, device=device).to(dtype)
    copy_ms, matmul_ms = alternating([lambda: target.copy_(source), lambda: square @ square], device)
    return Ceiling(
        copy_gb_per_s=_rounded(2 * source.nbytes / copy_ms / 1e6),
        matmul_tflop_per_s=_rounded(2 * side**3 / matmul_ms / 1e9),
    )


def measured(label: str, shape: Shape, device: str, dtype: torch.dtype, top: Ceiling) -> list[Row]:
    """Rows of one shape: decoding is forward without gradients, training is both directions."""
    backends: tuple[Backend, Backend] = ("triton", "torch") if device == "cuda" else ("torch", "reference")
    tensors, blocks, dout = inputs(shape, device, dtype)
    q, k, v, weights = tensors
    products = 2 * shape.b * shape.c * shape.h * shape.t * shape.k * shape.s * shape.d
    chosen = sum(len(row.unique()) for row in blocks.flatten(1)) * shape.g * shape.s * 2 * shape.d * k.element_size()
    queries = 2 * q.nbytes

    def forward(backend: Backend) -> Callable[[], Tensor]:
        return lambda: grouped_cross_attention(q, k, v, weights, blocks, backend=backend)

    def backward(backend: Backend) -> Callable[[], object]:
        out = forward(backend)()
        return lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True)

    def row(phase: str, times: list[float], moved: int, operations: int) -> Row:
        gb, tflop = moved / times[0] / 1e6, operations / times[0] / 1e9
        return Row(
            name=label,
            phase=phase,
            dtype=str(dtype).removeprefix("torch."),
            backend=backends[0],
            ms=_rounded(times[0]),
            baseline=backends[1],
            baseline_ms=_rounded(times[1]),
            ratio=_rounded(times[1] / times[0]),
            gb_per_s=_rounded(gb),
            of_copy=_rounded(gb / top.copy_gb_per_s),
            tflop_per_s=_rounded(tflop),
            of_matmul=_rounded(tflop / top.matmul_tflop_per_s),
        )

    if shape.t == 1:
        with torch.no_grad():
            times = alternating([forward(backend) for backend in backends], device)
        return [row("decode", times, queries + chosen, 2 * products)]
    gradients = 2 * queries + chosen + k.nbytes + v.nbytes
    return [
        row("forward", alternating([forward(b) for b in backends], device), queries + chosen, 2 * products),
        row("backward", alternating([backward(b) for b in backends], device), gradients, 5 * products),
    ]


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """``q, k, v, weights``, which want gradients, the chosen blocks, and the gradient of the output."""
    gen = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=gen, device=device).to(dtype)

    q, dout = (normal(shape.b, shape.c, shape.h, shape.t, shape.d) for _ in range(2))
    k, v = (normal(shape.b, shape.n, shape.g, shape.s, shape.d) for _ in range(2))
    weights = normal(shape.b, shape.c, shape.k).softmax(-1)
    scores = torch.rand(shape.b, shape.c, shape.n, generator=gen, device=device)
    return [x.requires_grad_() for x in (q, k, v, weights)], scores.topk(shape.k).indices, dout


def alternating(calls: list[Callable[[], object]], device: str, repeats: int = 20) -> list[float]:
    """Median milliseconds of each call, taking turns, after a warm-up in which kernels are tuned."""
    for call in calls * 3:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, found in zip(calls, times, strict=True):
            found.append(milliseconds(call, device))
    return [median(found) for found in times]


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Of one call; on a GPU by its own clock."""
    if device != "cpu":
        return child.milliseconds(call)
    begun = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begun)


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")


if __name__ == "__main__":
    main()
