"""The largest product of each group of keys with each query, in 8 bits: the first step of searches of many keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import first_able

Backend = Literal["auto", "reference", "torch", "native"]
LARGEST_DIM = 1024
"""Beyond 1,040 numbers a sum of products no longer fits into the 24 bits of a float32, and is rounded."""
LARGEST_SUMMED_DIM = 1 << 16
"""Beyond that a sum no longer fits into its 32 bits."""


def best_products(
    codes: Tensor,
    queries: Tensor,
    *,
    chosen: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the largest inner product of each group's keys with each query.

    Args:
        codes: ``[n, P, D]`` int8 on the CPU: ``n`` groups of ``P`` keys, of at most 65,536 numbers.
        queries: ``[R, D]`` int8.
        chosen: ``[m]`` int64: the wanted groups. All if None, and then ``m`` is ``n``.
        out: ``[m, R]`` float32, contiguous: the output. A new tensor if None.
        backend: ``"reference"``; ``"torch"``, by PyTorch's product of int8 matrices (Linux on a processor with AVX-512
            VNNI); ``"native"``, in C, compiled at the first use (Linux on a processor with AVX2, faster with AVX-512
            VNNI, still faster with AMX); or ``"auto"``: the last of them that works here.

    Returns:
        ``[m, R]`` float32: exact for keys of up to 1,024 numbers, else rounded to that type.

    Raises:
        InvalidArgument: shapes, types or devices do not fit, a group does not exist, or the back end is not available.
    """
    _check(codes, queries, chosen)
    shape = (len(codes) if chosen is None else len(chosen), len(queries))
    out = torch.empty(shape, dtype=torch.float32, device="cpu") if out is None else out
    if out.shape != shape or out.dtype != torch.float32 or not out.is_cpu or not out.is_contiguous():
        raise InvalidArgument(
            f"out must be contiguous float32 {list(shape)} on the CPU, got {out.dtype} {list(out.shape)}, {out.device}"
        )
    choices: tuple[Backend, ...] = ("native", "torch", "reference")
    match first_able(backend, choices, lambda each: backend_problem(each, codes.shape[2])):
        case _ if not out.numel():
            pass
        case "native":
            from memstore.kernels.best_products import native

            native.best_products(codes.contiguous(), queries.contiguous(), chosen, out)
        case "torch":
            from memstore.kernels.best_products import torch_int

            torch_int.best_products(codes, queries, chosen, out)
        case _:
            from memstore.kernels.best_codes import reference as best_codes

            wide = queries.to(torch.float32 if codes.shape[2] <= LARGEST_DIM else torch.float64)
            out.copy_(best_codes(codes if chosen is None else codes[chosen], wide).T)
    return out


def backend_problem(backend: str, dim: int) -> str | None:
    """Say why a back end cannot multiply vectors of ``dim`` numbers, and what to do; None if it can."""
    match backend:
        case "native" if dim % 4:
            return f"takes vectors of a multiple of 4 numbers, got {dim}; use 'auto' or 'torch'"
        case "native":
            from memstore.kernels.best_products import native

            return native.problem()
        case "torch" if dim == 1:  # PyTorch 2.13 computes this case wrongly
            return "takes vectors of at least 2 numbers, got 1; use 'auto' or 'reference'"
        case "torch":
            from memstore.kernels.best_products import torch_int

            return torch_int.problem()
        case "reference":
            return None
        case _:
            return "must be one of 'auto', 'reference', 'torch' and 'native'"


def _check(codes: Tensor, queries: Tensor, chosen: Tensor | None) -> None:
    shapes = f"codes {tuple(codes.shape)}, queries {tuple(queries.shape)}"
    if codes.dim() != 3 or queries.dim() != 2 or codes.shape[2] != queries.shape[1]:
        raise InvalidArgument(f"expected codes [n, P, D] and queries [R, D], got {shapes}")
    if not codes.shape[1] or not 1 <= codes.shape[2] <= LARGEST_SUMMED_DIM:
        raise InvalidArgument(
            f"expected at least one key per group and 1 to {LARGEST_SUMMED_DIM} numbers per key, got {shapes}"
        )
    if codes.dtype != torch.int8 or queries.dtype != torch.int8:
        raise InvalidArgument(f"codes and queries must be int8, got {codes.dtype} and {queries.dtype}")
    if codes.device.type != "cpu" or queries.device.type != "cpu":
        raise InvalidArgument(f"codes and queries must be on the CPU, got {codes.device} and {queries.device}")
    if chosen is None:
        return
    if chosen.dtype != torch.int64 or chosen.dim() != 1 or not chosen.is_contiguous() or chosen.device.type != "cpu":
        raise InvalidArgument(
            f"chosen must be contiguous int64 [m] on the CPU, got {chosen.dtype} {list(chosen.shape)}"
        )
    if chosen.numel() and (int(chosen.min()) < 0 or int(chosen.max()) >= len(codes)):
        span = f"{int(chosen.min())} to {int(chosen.max())}"
        raise InvalidArgument(f"chosen must be group numbers from 0 to {len(codes) - 1}, got {span}")
