"""Attention over gathered blocks, and the exact merge of partial results.

In the reference, grouped heads are packed: the ``R = H / G`` query heads of a key-value head become rows of one matrix
product, so keys and values are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import check_grouped, check_known

Backend = Literal["auto", "reference", "torch"]
FORM = "q [B, H, T, D] and k, v [B, G, N, D]"


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend to gathered blocks; also return the log-sum-exp, to merge the result with other partial results.

    Args:
        q: queries ``[B, H, T, D]``.
        k: keys ``[B, G, N, D]``, or blocks of keys ``[B, G, K, S, D]``; ``H`` is a multiple of ``G``.
        v: values, shaped like ``k`` (the last dimension may differ).
        mask: boolean, True where a query sees a key, or floating point, added to the scores; broadcasts to
            ``[B, H, T, N]``.
        scale: factor on the scores; ``D ** -0.5`` if None.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        sinks: ``[H]`` logits of a virtual key with value 0 (gpt-oss).
        backend: ``"reference"``; ``"torch"``, PyTorch's flash attention, which never holds all scores (heads of one
            size, a mask of the queries' type, no softcap, no gradients); or ``"auto"``: ``"torch"`` if it can and pays,
            on a CPU for more than one token.

    Returns:
        The output ``[B, H, T, Dv]`` and the log-sum-exp of the scores ``[B, H, T]`` (float32).

    Raises:
        InvalidArgument: shapes do not fit, or the back end is unknown or does not support them.
    """
    k, v = _flat(k), _flat(v)
    check_grouped(q, k, v, FORM)
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise InvalidArgument(f"mask must be boolean or floating point, got {mask.dtype}")
    from memstore.kernels.block_attention import fused

    check_known(backend, Backend)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    problem = fused.lse_problem(q, k, v, mask, softcap)
    if backend == "torch" and problem:
        raise InvalidArgument(f"backend 'torch' {problem}; use 'auto' or 'reference'")
    worth = q.device.type != "cpu" or q.shape[2] > 1
    if backend == "torch" or (backend == "auto" and worth and not problem):
        return fused.attend_with_lse(q, k, v, mask=mask, scale=scale, sinks=sinks)
    return _reference(q, k, v, mask=mask, scale=scale, softcap=softcap, sinks=sinks)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return only the output of ``block_attention``; without log-sum-exp PyTorch is several times faster.

    ``mask`` is additive here, ``[B or 1, 1 or G or H, T, M]``, and for the last ``M`` keys; earlier keys are visible to
    all. The reference serves a softcap and sinks, which PyTorch does not support.
    """
    from memstore.kernels.block_attention import fused

    k, v = _flat(k), _flat(v)
    check_grouped(q, k, v, FORM)
    if mask is not None and mask.shape[-1] > k.shape[2]:
        raise InvalidArgument(f"the mask covers {mask.shape[-1]} keys, but there are {k.shape[2]} keys")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is None and sinks is None:
        return fused.attend(q, k, v, mask=mask, scale=scale)
    mask = None if mask is None else fused.whole_mask(mask, q.shape[1], k.shape[2])

    def part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return _reference(q, k, v, mask=mask, scale=scale, softcap=softcap, sinks=sinks)[0]

    return fused.by_rows(part, q, k, v, mask)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial attention results over disjoint sets of keys; exact, because weights are exp(lse_i - lse).

    Args:
        outs: partial outputs ``[B, H, T, D]``.
        lses: their log-sum-exps ``[B, H, T]``.

    Returns:
        The output and log-sum-exp over all keys.
    """
    if not outs or len(outs) != len(lses):
        raise InvalidArgument(
            f"expected one log-sum-exp for each output, and at least one output; got {len(outs)} and {len(lses)}"
        )
    stacked = torch.stack(list(lses))  # [parts, B, H, T]
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.nan_to_num(lse, neginf=0.0))
    merged = sum(w.unsqueeze(-1) * out.to(w.dtype) for w, out in zip(weights, outs, strict=True))
    return torch.as_tensor(merged).to(outs[0].dtype), lse


def _flat(x: Tensor) -> Tensor:
    """Return ``[B, G, K, S, D]`` as ``[B, G, K * S, D]``."""
    return x.flatten(2, 3) if x.dim() == 5 else x


def _reference(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend with ``q [B, H, T, D]`` to ``k, v [B, G, N, D]``; float32 inside (float64 for float64 inputs).

    A query that sees no key gets output 0 and log-sum-exp -inf.
    """
    scores = masked_scores(q, k, mask=mask, scale=scale, softcap=softcap)  # [B, H, T, N]
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(scores.dtype).view(1, -1, 1))
    weights = torch.exp(scores - torch.nan_to_num(lse, neginf=0.0).unsqueeze(-1))
    out = _per_group(weights, v.to(weights.dtype))
    return out.to(q.dtype), lse


def masked_scores(q: Tensor, k: Tensor, *, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Return scaled, capped and masked scores ``[B, H, T, N]`` in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = _per_group(q.to(dtype), k.to(dtype).transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, float("-inf"))
    return scores + mask


def _per_group(x: Tensor, y: Tensor) -> Tensor:
    """Multiply ``x [B, H, T, n]`` by ``y [B, G, n, m]``; head ``h`` uses group ``h // (H / G)``."""
    batch, heads, tokens, inner = x.shape
    groups = y.shape[1]
    packed = x.reshape(batch, groups, heads // groups * tokens, inner)
    return (packed @ y).reshape(batch, heads, tokens, y.shape[-1])
