"""What all Triton kernels share: configurations of tiles, how one is chosen, and whether the interpreter runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

SMALLEST = 16
"""Shortest side of a tile that the matrix units of all devices take."""


def config(warps: int, stages: int, **sizes: int) -> triton.Config:
    """Tiles of these ``sizes``, by the names of the kernel's arguments."""
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


def padded(length: int) -> int:
    """The side of a tile that covers ``length``."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


def tuned(
    configs: Sequence[triton.Config],
    key: Sequence[str],
    interpreted_config: triton.Config,
    admissible: Callable[..., list[triton.Config]] | None = None,
) -> Callable[[Any], Any]:
    """Choose the tiles of a kernel by measuring, once for each kind of shape (``key``); the interpreter cannot measure.

    ``admissible`` leaves out what is not worth trying.
    """

    def tune(kernel: Any) -> Any:
        if not isinstance(kernel, triton.JITFunction):
            return triton.autotune([interpreted_config], list(key))(kernel)
        pruning = {} if admissible is None else {"early_config_prune": admissible}
        return triton.autotune(list(configs), list(key), pruning)(kernel)

    return tune


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels: its variable was set when this module was imported."""
    return not isinstance(_probe, triton.JITFunction)


def _nothing() -> None:
    """The smallest kernel."""


_probe = triton.jit(_nothing)
