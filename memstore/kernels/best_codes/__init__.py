"""The largest product of each block's codes with each query, for stored codes of 8 bits or one, on a GPU too.

Late interaction needs the best of each block's codes for every token of a question (Khattab & Zaharia 2020, equation
3). Its further work on these scores (``memstore.attention.routing``) is small beside the codes. On a CPU ``best_signs``
and ``best_products`` are faster, with tables and instructions that a GPU does not have.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import check_device, check_known, triton_problem

Backend = Literal["auto", "reference", "triton"]
LARGEST = 127
"""Largest code in 8 bits."""
BYTE = 8
STEP_NUMBERS, STEP_NUMBERS_THERE = 1 << 20, 1 << 28
"""Numbers of codes or products at a time, on a CPU and on other devices."""


def best_codes(codes: Tensor, queries: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return the largest inner product of each block's codes with each query.

    Args:
        codes: keys encoded by ``hold``: ``[n, P, D]`` int8 or ``[n, P, ceil(D / 8)]`` uint8, with strides between
            blocks and between keys.
        queries: ``[R, D]`` floating point, finite.
        backend: ``"reference"``, in PyTorch, which converts some blocks to floats at a time; ``"triton"`` (a GPU, or
            Triton's interpreter), which reads stored codes; or ``"auto"``: Triton on a GPU if it can.

    Returns:
        ``[R, n]`` float32. ``"triton"`` rounds queries to 22 bits of their largest number and sums whole numbers: exact
        for whole numbers up to 2,000,000 whose sum has 24 bits, with the same bits in any order.

    Raises:
        InvalidArgument: shapes, types or devices do not fit, or the back end is not available.
    """
    check_known(backend, Backend)
    check_device(codes=codes, queries=queries)
    width = {torch.int8: queries.shape[-1], torch.uint8: -(-queries.shape[-1] // BYTE)}.get(codes.dtype)
    if queries.dim() != 2 or not queries.is_floating_point() or codes.dim() != 3 or codes.shape[2] != width:
        raise InvalidArgument(
            "expected codes [n, P, D] int8 or [n, P, ceil(D / 8)] uint8 and queries [R, D] floating point, got "
            f"{codes.dtype} {list(codes.shape)} and {queries.dtype} {list(queries.shape)}"
        )
    if not codes.shape[1]:
        raise InvalidArgument(f"expected at least one key in a block, got {list(codes.shape)}")
    reason = triton_problem(queries, largest=queries.shape[1], instead="reference")
    if backend == "triton" and reason is not None:
        raise InvalidArgument(f"backend 'triton' {reason}")
    if not codes.numel() or not len(queries):
        return queries.new_empty(len(queries), len(codes), dtype=torch.float32)
    if backend == "triton" or (backend == "auto" and queries.device.type == "cuda" and reason is None):
        from memstore.kernels.best_codes import triton

        return triton.best_codes(codes, queries.detach().float())
    return reference(codes, queries.detach())


def reference(codes: Tensor, queries: Tensor) -> Tensor:
    """Compute ``best_codes`` by the definition; products are in float64 for queries in float64."""
    wide = queries.to(torch.promote_types(queries.dtype, torch.float32))
    rows, dim = queries.shape
    most = STEP_NUMBERS if codes.device.type == "cpu" else STEP_NUMBERS_THERE
    step = max(1, most // (codes.shape[1] * max(dim, rows)))
    pieces = (numbers(piece, dim).to(wide.dtype) for piece in codes.split(step))
    return torch.cat(
        [(piece.flatten(0, 1) @ wide.T).unflatten(0, piece.shape[:2]).amax(1) for piece in pieces]
    ).T.float()


def hold(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode ``keys [..., D]``: int8 for ``torch.int8``, and uint8 ``[..., ceil(D / 8)]`` for ``torch.bool``.

    ``torch.bool`` stores only the sign, in one bit: 1 is +1, 0 is -1. Bit 0 of byte 0 is the first number. Raises
    ``InvalidArgument`` unless the keys are whole numbers from -127 to 127, or +1 and -1.
    """
    if dtype == torch.int8:
        if bool((keys != keys.round()).any()) or (keys.numel() and float(keys.abs().max()) > LARGEST):
            raise InvalidArgument(
                "keys stored as int8 must be whole numbers from -127 to 127; store other keys as bfloat16"
            )
        return keys.to(torch.int8)
    if bool((keys.abs() != 1).any()):
        raise InvalidArgument("keys stored as one bit must be +1 or -1 in every number; store other keys as bfloat16")
    bits = torch.nn.functional.pad(keys > 0, (0, -keys.shape[-1] % BYTE)).unflatten(-1, (-1, BYTE))
    packed: Tensor = (bits << torch.arange(BYTE, dtype=torch.uint8, device=keys.device)).sum(-1, dtype=torch.uint8)
    return packed


def numbers(codes: Tensor, dim: int) -> Tensor:
    """Decode what ``hold`` encoded: ``[..., D]`` float32, of ``dim`` numbers each."""
    if codes.dtype == torch.int8:
        return codes.float()
    bits = codes.unsqueeze(-1) >> torch.arange(BYTE, dtype=torch.uint8, device=codes.device) & 1
    return bits.flatten(-2)[..., :dim].float().mul_(2).sub_(1)
