"""kNN attention: every query attends to tokens retrieved for it, and a gate mixes the result with local attention.

Wu, Rabe, Hutchins & Szegedy 2022, *Memorizing Transformers*, section 3.1: each query of each head attends to the (key,
value) pairs that were retrieved for it, ``V_m = softmax(scale Q K^T) V``. A gate of the head mixes the result with
local attention, ``V_a = V_m g + V_c (1 - g)`` with ``g = sigmoid(b)``. Deliberate deviation: the paper does not define
the case of a query that found nothing, as at the beginning of a document. Here its gate counts as closed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import INTEGERS, Backend, check_device, check_grouped, pick, shapes, triton_problem


def knn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    scale: float | Tensor | None = None,
    local: Tensor | None = None,
    gate: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend to the tokens that were retrieved for each query.

    There are two forms. With ``ids``, pass the keys and values of a memory once; they are looked up, without copies on
    a GPU:

    Args:
        q: queries ``[B, H, T, D]``.
        k: keys ``[B, G, N, D]``; ``H`` is a multiple of ``G``. A constant: the memory gets no gradient.
        v: values ``[B, G, N, Dv]``, a constant too.
        ids: tokens retrieved for each query ``[B, H, T, K]``, int32 or int64 below ``N``; -1 for none.
        valid: only without ``ids``.
        scale: factor on the scores, a number, or a learnable factor for each head ``[H]``; ``D ** -0.5`` if None.
        local: ``[B, H, T, Dv]``: the result of local attention, to be mixed in; requires ``gate``.
        gate: ``[H]``: ``sigmoid(gate)`` is the part of the memory, ``1 - sigmoid(gate)`` the part of ``local``. If a
            query found nothing, its gate counts as closed.
        backend: ``"reference"``, ``"torch"`` (any device), ``"triton"`` (a GPU, or Triton's interpreter), or
            ``"auto"``: ``"triton"`` on a GPU if it can, else ``"torch"``.

    Without ``ids``, pass the retrieved states themselves: ``k, v [B, H, T, K, D]``, and ``valid [B, H, T, K]`` (all if
    None).

    Returns:
        ``[B, H, T, Dv]``, 0 for a query that found nothing and has no ``local``; differentiable in ``q``, ``scale``,
        ``local`` and ``gate``.

    Raises:
        InvalidArgument: shapes, types or devices do not fit, a token does not exist, or the back end is not available.
            On a GPU, missing tokens are not checked beforehand, because this would wait for the device. ``"triton"``
            gives their queries NaN; PyTorch's own operations may fail later.
    """
    more: dict[str, Any] = {"valid": valid, "scale": scale, "local": local, "gate": gate, "backend": backend}
    return knn_attention_with_lse(q, k, v, ids, **more)[0]


def knn_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    scale: float | Tensor | None = None,
    local: Tensor | None = None,
    gate: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return ``knn_attention`` and the log-sum-exp of the scores ``[B, H, T]``, -inf if nothing was found.

    Both are differentiable; without ``local``, ``merge_attention`` joins them with local attention in one softmax.
    """
    if (local is None) != (gate is None):
        raise InvalidArgument("pass local and gate together: the gate sets the share of local in the output")
    if ids is None:
        k, v, ids = _looked_up(q, k, v, valid)
    elif valid is not None:
        raise InvalidArgument("pass valid only without ids; with ids, mark missing entries by -1")
    factors = _factors(q, scale)
    _check(q, k, v, ids, factors, local, gate)
    k, v = k.detach(), v.detach()
    given, largest = (q, k, v), max(q.shape[-1], v.shape[-1])
    backend = pick(backend, q, lambda: triton_problem(*given, largest=largest, mixed=True), products=False)
    if not k.shape[2]:  # an empty memory: nothing to look up, for any ids
        k, v, ids = k.new_zeros((*k.shape[:2], 1, k.shape[3])), v.new_zeros((*v.shape[:2], 1, v.shape[3])), ids[..., :0]
    if not ids.shape[-1]:
        ids = ids.new_full((*ids.shape[:-1], 1), -1)
    match backend:
        case "triton":
            from memstore.kernels.knn_attention import triton

            return triton.knn_attention(q, k, v, ids, factors, local, gate)
        case "torch":
            from memstore.kernels.knn_attention import fused

            return fused.knn_attention(q, k, v, ids, factors, local, gate)
        case _:
            return _reference(q, k, v, ids, factors, local, gate)


def _looked_up(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Turn states passed for each query into one memory for each head; also return their places in it."""
    if q.dim() != 4 or k.dim() != 5 or v.dim() != 5 or k.shape[:3] != q.shape[:3] or v.shape[:4] != k.shape[:4]:
        raise InvalidArgument(
            "expected q [B, H, T, D] and k, v [B, H, T, K, D] (or ids, and k, v [B, G, N, D]), "
            f"got {shapes(q=q, k=k, v=v)}"
        )
    tokens, chosen = k.shape[2:4]
    ids = torch.arange(tokens * chosen, device=q.device).view(tokens, chosen).expand(*q.shape[:2], -1, -1)
    if valid is not None:
        if valid.dtype != torch.bool or valid.shape != ids.shape:
            raise InvalidArgument(f"valid must be boolean {list(ids.shape)}, got {valid.dtype} of {list(valid.shape)}")
        ids = ids.masked_fill(~valid, -1)
    return k.flatten(2, 3), v.flatten(2, 3), ids


def _factors(q: Tensor, scale: float | Tensor | None) -> Tensor:
    heads = q.shape[1] if q.dim() == 4 else 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    if isinstance(scale, Tensor):
        if scale.shape != (heads,):
            raise InvalidArgument(
                f"a learned scale has one number for each of the {heads} heads, got {list(scale.shape)}"
            )
        return scale
    return torch.full((heads,), q.shape[-1] ** -0.5 if scale is None else scale, dtype=dtype, device=q.device)


def _check(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor, local: Tensor | None, gate: Tensor | None
) -> None:
    check_grouped(q, k, v, "q [B, H, T, D] and k, v [B, G, N, D]")
    if ids.dtype not in INTEGERS or ids.dim() != 4 or ids.shape[:3] != q.shape[:3]:
        raise InvalidArgument(
            f"ids must be int32 or int64 [B, H, T, K] with B, H, T = {tuple(q.shape[:3])}, "
            f"got {ids.dtype} of {tuple(ids.shape)}"
        )
    if local is not None and gate is not None:
        if local.shape != (*q.shape[:3], v.shape[-1]):
            raise InvalidArgument(f"local must be {[*q.shape[:3], v.shape[-1]]}, got {list(local.shape)}")
        if gate.shape != (q.shape[1],):
            raise InvalidArgument(f"gate must have one number for each of {q.shape[1]} heads, got {list(gate.shape)}")
    check_device(q=q, k=k, v=v, ids=ids, scale=scale, local=local, gate=gate)
    if ids.device.type == "cpu" and ids.numel() and k.shape[2] and int(ids.max()) >= k.shape[2]:
        raise InvalidArgument(f"token {int(ids.max())} does not exist; there are {k.shape[2]} tokens")


def _reference(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor, local: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend by the definition: gather, score, softmax, sum, mix."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    per_group = q.shape[1] // k.shape[1]
    rows = torch.arange(len(q), device=q.device)[:, None, None, None]
    groups = torch.arange(q.shape[1], device=q.device)[:, None, None] // per_group
    there = ids >= 0
    keys, values = (
        torch.where(there.unsqueeze(-1), x[rows, groups, ids.clamp(min=0)], 0).to(dtype)  # [B, H, T, K, D]
        for x in (k, v)
    )
    scores = torch.einsum("bhtd,bhtkd->bhtk", q.to(dtype), keys) * scale.to(dtype)[:, None, None]
    scores = scores.masked_fill(~there, -torch.inf)
    found = there.any(-1, keepdim=True)
    weights = torch.where(found, scores, 0).softmax(-1) * found
    out = torch.einsum("bhtk,bhtkd->bhtd", weights, values)
    if local is not None and gate is not None:
        opened = torch.where(found, gate.to(dtype).sigmoid()[:, None, None], 0)
        out = out * opened + local.to(dtype) * (1 - opened)
    lse = torch.where(found, scores, 0).logsumexp(-1).masked_fill(~found.squeeze(-1), -torch.inf)
    return out.to(q.dtype), lse
