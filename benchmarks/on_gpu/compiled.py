"""Compiles what later parts launch, before they measure: 14 processes at once take the time of the slowest kernel."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.on_gpu.child import Piece


def compile(here: Piece) -> None:  # noqa: A001 - the name of the part
    """The kernels of one operation in one type, into Triton's cache."""
    name, dtype = here.piece.rsplit(" ", 1)
    if here.tiny:  # no launch, no driver: the compiler alone
        _without_a_driver(here, name, dtype)
        return
    from benchmarks.on_gpu.kernels import SHAPES, gradients_of
    from memstore.kernels import _tiles

    rows: list[tuple[str, float, Any]] = []

    def warmed(kernel: Any, arguments: dict[str, Any], tiles: dict[str, Any]) -> None:
        begun = time.perf_counter()
        made = kernel.warmup(**arguments, **tiles, grid=(1,))
        rows.append((kernel.fn.__name__, time.perf_counter() - begun, made))

    def launch_nothing(self: Any, grid: Any) -> Any:  # noqa: ARG001
        return lambda **arguments: warmed(self.fn, arguments, self.choose(arguments).all_kwargs())

    _tiles.TiledKernel.__getitem__ = launch_nothing  # type: ignore[method-assign]
    for shape in SHAPES[name]:
        with here.attempt(f"{name} {dtype} {shape}"):
            rows.clear()
            call, tensors, dout = gradients_of(name, shape, getattr(torch, dtype))
            out = call(*tensors)
            torch.autograd.grad(out, tensors, dout)
            for kernel, seconds, made in rows:
                if made is not None and hasattr(made, "_init_handles"):
                    made._init_handles()
                used = {key: getattr(made, key, None) for key in ("n_regs", "n_spills")}
                shared = getattr(made.metadata, "shared", None)
                here.row(f"{name} {dtype} {shape} {kernel}", value=seconds, unit="s", shared=shared, **used)


def _without_a_driver(here: Piece, name: str, dtype: str) -> None:
    from tests.kernels.compiling import compiled

    if name != "gca" or dtype != "bfloat16":
        here.row(f"{name} {dtype}", note="left out: the tests compile the tables")
        return
    found = compiled("gca forward", "sm_90", "bf16", 16, 16, few=True)
    here.row(
        "gca forward for a GPU that is not there", value=found.seconds, unit="s", registers=found.registers,
        spilled=found.spilled, shared=found.shared_bytes, note="fake: compiled for sm_90, not loaded",
    )  # fmt: skip
