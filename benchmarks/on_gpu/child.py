"""What runs one piece of a part, and how rows are made: printed at once, whatever happens afterwards."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

HOMES = {
    "about": "ceilings", "ceilings": "ceilings", "compile": "compiled", "parity": "parity", "attach": "attached",
    "models": "models", "kernels": "kernels", "speed": "speed", "tiers": "tiers", "tune": "kernels",
}  # fmt: skip
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
"""Relative errors against float64; gradients may have twice as much."""
L2_BYTES = 150 << 20
"""Inputs rotate over more than this, so that no cache has them."""


class Piece:
    """One piece of a part, and the seconds that it has."""

    def __init__(self, part: str, piece: str, seconds: float, *, tiny: bool) -> None:
        self.part, self.piece, self.tiny = part, piece, tiny
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def row(self, name: str, **fields: Any) -> None:
        """Print a row."""
        shown = {key: rounded(value) for key, value in fields.items() if value is not None}
        sys.stdout.write(json.dumps({"part": self.part, "name": name, **shown}, default=str) + "\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def attempt(self, name: str, least: float = 0) -> Iterator[None]:
        """Go on after an error, which becomes a row; nothing at all without ``least`` seconds."""
        try:
            if self.left < least:
                raise TimeoutError(f"{self.left:.0f} s left, it needs {least:.0f}")
            yield
        except Exception as error:  # noqa: BLE001 - the others shall run
            lines = traceback.format_exc(limit=-6).splitlines()
            self.row(name, ok=False, error="\n".join([*lines[-14:-1], f"{type(error).__name__}: {error}"[:500]]))

    def size(self, real: int, tiny: int) -> int:
        """A length, and what it is on a pretended device."""
        return tiny if self.tiny else real

    def times(self, calls: Sequence[Callable[[], object]], *, warmups: int = 10, repeats: int = 30) -> list[float]:
        """Median milliseconds of each call by the clock of the device, taking turns."""
        return [median(found) for found in self.spread(calls, warmups=warmups, repeats=repeats)]

    def spread(
        self, calls: Sequence[Callable[[], object]], *, warmups: int = 10, repeats: int = 30
    ) -> list[list[float]]:
        """All milliseconds of each call, taking turns."""
        if self.tiny:
            warmups, repeats = 1, 2
        for call in list(calls) * warmups:
            call()
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for call, times in zip(calls, found, strict=True):
                times.append(milliseconds(call))
        return found


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, by the clock of the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def rounded(value: Any) -> Any:
    """Four digits of a number; NaN as text, for JSON has none."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def relative(x: Tensor, truth: Tensor) -> float:
    """``||x - truth|| / ||truth||``."""
    truth = truth.double()
    return float((x.double() - truth).norm() / truth.norm().clamp(min=1e-30))


def run(part: str, piece: str, seconds: float, *, tiny: bool) -> None:
    """Run one piece, on the GPU or a pretended one."""
    torch.set_num_threads(1)
    here = Piece(part, piece, seconds, tiny=tiny)
    module = importlib.import_module(f"benchmarks.on_gpu.{HOMES[part]}")
    with contextlib.ExitStack() as stack:
        if tiny and part != "compile":
            from tests.pretended import pretended

            stack.enter_context(pretended())
        elif not torch.cuda.is_available() and part != "compile":
            raise SystemExit("torch sees no GPU")
        torch.backends.cuda.matmul.allow_tf32 = False
        getattr(module, part)(here)
