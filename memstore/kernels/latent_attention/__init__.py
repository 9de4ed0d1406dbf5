"""Attention over rows chosen for each query: MLA latents, which are keys and values at once, or keys and values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import (
    INTEGERS,
    LARGEST_HEAD,
    check_device,
    check_known,
    first_able,
    shapes,
    triton_problem,
)
from memstore.kernels.latent_attention import fused, native

Backend = Literal["auto", "reference", "torch", "native", "triton"]
LARGEST = 512
"""Most numbers of a value, and of a key beyond it, that Triton's kernel holds in registers; fewer in float32."""


def attend(
    q_latent: Tensor,
    q_rope: Tensor,
    table: Tensor,
    ids: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute multi-head latent attention in absorbed form, over the rows chosen for each query.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1.2): a token is stored as one latent and one rotated key for all heads.
    With the key half of the up-projection absorbed into the queries, the latent is key and value:
    ``out[s, h] = sum_j softmax_j(scale * (q_latent[s, h] . c_j + q_rope[s, h] . r_j)) c_j`` over the rows
    ``[c_j, r_j] = table[ids[s, j]]``. The caller applies the value half of the up-projection afterwards.

    Args:
        q_latent: ``[S, H, C]``: queries times the key half of the up-projection.
        q_rope: ``[S, H, R]``: the rotated part of queries; ``R`` may be 0.
        table: ``[N, C + R]``: a latent and a rotated key in each row.
        ids: ``[S, k]`` int32 or int64 below ``N``; -1 for unused places. A row that is named twice counts twice.
        scale: factor on the products.
        sinks: ``[H]`` logits of a virtual key with value 0 (gpt-oss, Hy4).
        backend: ``"reference"``; ``"torch"``, a few queries at a time; ``"native"``, in C, compiled at the first use (a
            CPU); ``"triton"`` (a GPU, or Triton's interpreter); or ``"auto"``: the last of them that works here.

    Returns:
        ``[S, H, C]`` in the type of the queries; 0 for a query whose places are all unused. Sums are in float32. NaN in
        a row only reaches the queries that chose it. No gradient.

    Raises:
        InvalidArgument: shapes, types or devices do not fit, a row does not exist, or the back end is not available. On
            a GPU, missing rows are not checked beforehand, because this would wait for the device.
    """
    latent, rope = q_latent.shape[-1], q_rope.shape[-1]
    fit = q_latent.dim() == 3 and q_rope.shape[:-1] == q_latent.shape[:-1] and table.dim() == 2
    if not fit or table.shape[1] != latent + rope:
        raise InvalidArgument(
            "expected q_latent [S, H, C], q_rope [S, H, R] and table [N, C + R], "
            f"got {shapes(q_latent=q_latent, q_rope=q_rope, table=table)}"
        )
    if ids.dim() != 2:
        raise InvalidArgument(f"expected ids [S, k], got {shapes(ids=ids)}")
    rows = table.unsqueeze(1)
    q = torch.cat([q_latent, q_rope], -1)
    return attend_rows(q, rows, rows[..., :latent], ids, scale=scale, sinks=sinks, backend=backend)[0]


def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend to the rows of keys and values that were chosen for each query.

    Args:
        q: ``[S, H, D]``.
        keys: ``[N, G, D]``; ``H`` is a multiple of ``G``, and head ``h`` uses key head ``h // (H // G)``.
        values: ``[N, G, Dv]``. If they are the first numbers of the keys in memory, rows are read once.
        ids: ``[S, k]``, or ``[S, G, k]`` with a choice for each key head; otherwise as for ``attend``.
        scale: factor on the products.
        sinks: ``[H]``, as for ``attend``.
        backend: as for ``attend``.

    Returns:
        The output ``[S, H, Dv]`` and the log-sum-exp of the scores ``[S, H]`` in float32 (float64 for queries in
        float64), sinks included: with it ``merge_attention`` joins the result with others in one softmax. -inf if
        nothing was chosen and there are no sinks.

    Raises:
        InvalidArgument: as for ``attend``.
    """
    if ids.dim() == 2:
        ids = ids.unsqueeze(1)
    _check(q, keys, values, ids, sinks)
    q, keys, values = q.detach(), keys.detach(), values.detach()
    check_known(backend, Backend)
    # Not measured yet: do three products in TF32 for each one in float32 pay?
    slow = q.device.type == "cuda" and keys.dtype == torch.float32
    choices: tuple[Backend, ...] = ("torch",) if slow else ("native" if q.device.type == "cpu" else "triton", "torch")
    backend = first_able(backend, choices, lambda each: _problem(each, q, keys, values))
    if not len(keys):  # nothing to look up, for any ids
        keys, values, ids = keys.new_zeros(1, *keys.shape[1:]), values.new_zeros(1, *values.shape[1:]), ids[..., :0]
    if not ids.shape[2]:
        ids = ids.new_full((*ids.shape[:2], 1), -1)
    match backend:
        case "triton" if len(q):
            from memstore.kernels.latent_attention import triton

            return triton.attend_rows(q, keys, values, ids, scale, sinks)
        case "native" if len(q):
            return native.attend_rows(q, keys, values, ids, scale, sinks)
        case "torch":
            return fused.attend_rows(q, keys, values, ids, scale, sinks)
        case _:
            return _reference(q, keys, values, ids, scale, sinks)


def _problem(backend: Backend, q: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """Say why a back end cannot take these, and what to do; None if it can."""
    match backend:
        case "triton":
            most = max(values.shape[2], keys.shape[2] - values.shape[2] * fused.inside(keys, values))
            limit = LARGEST_HEAD if keys.dtype == torch.float32 else LARGEST
            if most > limit:
                return f"takes rows of at most {limit} numbers in {keys.dtype}, got {most}; use 'auto' or 'torch'"
            if keys.dtype != values.dtype:
                return f"takes keys and values of one dtype, got {keys.dtype} and {values.dtype}; use 'torch'"
            return triton_problem(q, keys, largest=1, mixed=True)
        case "native":
            if q.device.type != "cpu" or q.dtype == torch.float64:
                return f"takes queries of at most 32 bits on the CPU, got {q.dtype} on {q.device}; use 'torch'"
            if keys.shape[2] > native.LARGEST or values.shape[2] > native.LARGEST:
                found = shapes(keys=keys, values=values)
                return f"takes rows of at most {native.LARGEST} numbers, got {found}; use 'torch'"
            return native.problem(keys.dtype) or native.problem(values.dtype)
        case _:
            return None


def _check(q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, sinks: Tensor | None) -> None:
    found = shapes(q=q, keys=keys, values=values)
    if q.dim() != 3 or keys.dim() != 3 or values.dim() != 3:
        raise InvalidArgument(f"expected q [S, H, D], keys [N, G, D] and values [N, G, Dv], got {found}")
    if keys.shape[2] != q.shape[2] or keys.shape[:2] != values.shape[:2] or q.shape[1] % max(1, keys.shape[1]):
        raise InvalidArgument(f"H must be a multiple of G, and the shapes must agree; got {found}")
    if not keys.shape[1] or not values.shape[2]:
        raise InvalidArgument(f"expected at least one head and values of at least one number, got {found}")
    if not all(each.is_floating_point() for each in (q, keys, values)):
        raise InvalidArgument(f"expected floating-point tensors, got {q.dtype}, {keys.dtype} and {values.dtype}")
    heads = ids.shape[1] if ids.dim() == 3 else 0
    if ids.dtype not in INTEGERS or heads not in (1, keys.shape[1]) or len(ids) != len(q):
        raise InvalidArgument(
            f"ids must be int32 or int64 [S, k] or [S, G, k] with S, G = {len(q)}, {keys.shape[1]}, "
            f"got {ids.dtype} of {list(ids.shape)}"
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise InvalidArgument(f"sinks must be one number for each of {q.shape[1]} heads, got {list(sinks.shape)}")
    check_device(q=q, keys=keys, values=values, ids=ids, sinks=sinks)
    if ids.device.type == "cpu" and ids.numel() and len(keys) and int(ids.max()) >= len(keys):
        raise InvalidArgument(f"row {int(ids.max())} does not exist; there are {len(keys)} rows")


def _reference(
    q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend by the definition: gather, score, softmax, sum. ``ids`` are ``[S, 1 or G, k]``."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, groups = q.shape[1], keys.shape[1]
    group = torch.arange(heads, device=q.device) // (heads // groups)  # of each head
    chosen = ids.expand(-1, groups, -1)[:, group]  # [S, H, k]
    there = chosen >= 0
    k, v = (
        torch.where(there.unsqueeze(-1), x[chosen.clamp(min=0), group[:, None]], 0).to(dtype)  # [S, H, k, D]
        for x in (keys, values)
    )
    scores = torch.einsum("shd,shkd->shk", q.to(dtype), k) * scale
    lse = scores.masked_fill(~there, -torch.inf).logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype))
    weights = torch.where(there, (scores - lse.unsqueeze(-1)).exp(), 0)
    return torch.einsum("shk,shkd->shd", weights, v).to(q.dtype), lse
