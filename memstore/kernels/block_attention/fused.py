"""Block attention by the fastest PyTorch operations of each device, with and without the log-sum-exp.

Measured on CPUs without matrix units for bfloat16 (256 queries, 9 heads of 64, 1,088 keys): the fused SDPA kernel takes
3.7 ms in either precision, two matrix products and a softmax take 12 ms in float32 and 1.5 ms in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ROW = 16
"""On a GPU, rows of a mask must begin at multiples of this many numbers."""
LARGEST = 1 << 23
"""Scores that are held at once. glibc returns more than 32 MB to the system after each operation, which takes time."""
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _shares_keys() -> bool:
    """Return whether PyTorch lets several query heads share keys on this device.

    In PyTorch 2.6 each head reads its own keys without a bounds check. In this test they exist, after the others.
    """
    values = torch.tensor([1.0, 2.0], device="cpu").view(1, 2, 1, 1)
    out = _CPU(torch.zeros(1, 2, 1, 1, device="cpu"), values[:, :1], values[:, :1], 0.0, False)[0]
    return bool((out == 1).all())


SHARES_KEYS = _shares_keys()


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """Compute softmax attention of ``q [B, H, T, D]`` over ``k, v [B, G, N, D]``; returns ``[B, H, T, Dv]``.

    ``mask`` is additive, in the dtype of ``q``, and broadcasts to ``[B, heads, T, M]``, heads being 1, G or H. It is
    for the last ``M`` keys; earlier keys are visible to all queries.
    """
    if q.shape[2] == 1 and mask is None:
        return _packed_sdpa(q, k, v, scale)
    cpu = q.device.type == "cpu"
    form = partial(_products if cpu and q.dtype == torch.bfloat16 and q.shape[2] > 1 else _sdpa, scale)
    return by_rows(form, q, k, v, mask) if cpu else form(q, k, v, mask)


def by_rows(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with some queries after others, each to the keys they see, so that ``LARGEST`` scores are held at most."""
    rows = max(1, LARGEST // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if q.shape[2] <= rows:
        return attend(q, k, v, mask)
    outs = []
    for begin in range(0, q.shape[2], rows):
        near, hidden = None, 0
        if mask is not None:
            near = mask[:, :, begin : begin + rows]
            seen = (near > torch.finfo(near.dtype).min).any((0, 1, 2)).nonzero()
            hidden = near.shape[-1] - int(seen[-1]) - 1 if len(seen) else 0
            near = near[..., : near.shape[-1] - hidden]
        end = k.shape[2] - hidden
        outs.append(attend(q[:, :, begin : begin + rows], k[:, :, :end], v[:, :, :end], near))
    return torch.cat(outs, 2)


def whole_mask(mask: Tensor, heads: int, keys: int) -> Tensor:
    """Expand an additive ``mask [B, 1 or G or H, T, M]`` for the last ``M`` keys to ``[B, 1 or H, T, keys]``."""
    if mask.shape[1] not in (1, heads):
        mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
    return F.pad(mask, (keys - mask.shape[-1], 0))


def _sdpa(scale: float, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    mask = None if mask is None else whole_mask(mask, q.shape[1], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _products(scale: float, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    batch, heads, tokens, dim = q.shape
    groups = k.shape[1]
    packed = (q * scale).reshape(batch, groups, heads // groups * tokens, dim)
    # Keys are the beginning of a buffer; transposed, PyTorch would copy it one number at a time.
    scores = packed @ k.contiguous().transpose(-1, -2)
    if mask is not None:
        masked = scores.view(batch, groups, heads // groups, tokens, -1)[..., k.shape[2] - mask.shape[-1] :]
        masked += mask[:, :, None] if mask.shape[1] in (1, groups) else mask.unflatten(1, (groups, -1))
    out = torch.softmax(scores, dim=-1) @ v
    return out.reshape(batch, heads, tokens, v.shape[-1])


def _packed_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with one query token: the heads of a group are the rows of one product."""
    batch, heads, _, dim = q.shape
    packed = q.reshape(batch, k.shape[1], heads // k.shape[1], dim)
    out = F.scaled_dot_product_attention(packed, k, v, scale=scale)
    return out.reshape(batch, heads, 1, v.shape[-1])


def lse_problem(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softcap: float | None) -> str | None:
    """Say why PyTorch cannot attend with the log-sum-exp; None if it can."""
    types = (torch.float32, torch.float16, torch.bfloat16, *((torch.float64,) if q.device.type == "cpu" else ()))
    if q.device.type not in ("cpu", "cuda"):
        return f"runs on a CPU and a GPU, not on {q.device}"
    if softcap is not None:
        return "does not support a softcap"
    if q.dtype not in types or not q.dtype == k.dtype == v.dtype:
        return f"takes tensors of one floating-point dtype, got {q.dtype}, {k.dtype} and {v.dtype} on {q.device}"
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        return f"takes a boolean mask or one of {q.dtype}, got {mask.dtype}"
    if q.shape[-1] != v.shape[-1] or not (q.numel() and k.numel()):
        return (
            f"takes at least one query and one key, and values as wide as the keys; got {tuple(q.shape)} and "
            f"{tuple(v.shape)}"
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask)):
        return "cannot differentiate the log-sum-exp"
    return None


# PyTorch has these operations for its own attention, and returns the log-sum-exp for the backward pass. The operation
# for GPUs takes masks, unlike its flash attention.
def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute ``reference.block_attention`` if there is no ``lse_problem``."""
    batch, heads, tokens, dim = q.shape
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.expand(batch, -1, tokens, k.shape[2])
    if q.device.type == "cpu":
        if not SHARES_KEYS:
            k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        out, lse = _CPU(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    else:
        repeats = heads // k.shape[1]
        # Heads of one group become heads of one row: its keys exist once, expanded with a stride of 0.
        rows = q.reshape(-1, repeats, tokens, dim)
        keys, values = (x.reshape(-1, 1, *x.shape[2:]).expand(-1, repeats, -1, -1) for x in (k, v))
        bias = None
        if mask is not None:  # many rows of grouped heads need a copy of it for each head
            bias = _aligned(_aligned(mask).expand(-1, heads, -1, -1).reshape(*rows.shape[:3], -1))
        there = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse = there(rows, keys, values, bias, True, scale=scale)[:2]
        out, lse = out.reshape(q.shape), lse[..., :tokens].reshape(q.shape[:3])
    if mask is not None:  # the result for a query that sees nothing differs between devices
        blind = (mask == -torch.inf).all(-1).expand(-1, heads, -1)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, -torch.inf)
    if sinks is None:
        return out, lse
    more = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    return (out * (lse - more).exp().unsqueeze(-1)).to(q.dtype), more


def _aligned(mask: Tensor) -> Tensor:
    """Return the same numbers in rows that begin at multiples of ``ROW`` numbers."""
    if mask.stride(-1) == 1 and not any(start % ROW for start in (*mask.stride()[:-1], mask.storage_offset())):
        return mask
    keys = mask.shape[-1]
    room = mask.new_empty(*mask.shape[:-1], keys + -keys % ROW)[..., :keys]
    return room.copy_(mask)
