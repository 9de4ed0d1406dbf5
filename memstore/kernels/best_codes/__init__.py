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
from memstore.kernels.best_codes.reference import BYTE, hold, numbers

__all__ = ["best_codes", "hold", "numbers"]

Backend = Literal["auto", "reference", "triton"]


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
    from memstore.kernels.best_codes import reference

    return reference.best_codes(codes, queries.detach())
