"""Search in its plainest form: all scores, and the largest of them."""

from __future__ import annotations

import torch
from torch import Tensor


def search_blocks(queries: Tensor, landmarks: Tensor, k: int, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take ``queries [H, T, D]``, ``landmarks [G, N, P, D]``, ``wanted [N]``: see the public function."""
    heads, tokens, _ = queries.shape
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys = landmarks.repeat_interleave(heads // len(landmarks), 0).to(dtype)
    scores = torch.einsum("htd,hnpd->htnp", queries.to(dtype), keys).amax(-1)  # [H, T, N]
    if wanted is not None:
        scores = scores.masked_fill(~wanted, -torch.inf)
    # A stable sort puts the smaller of equal blocks first.
    best, blocks = scores.sort(dim=-1, descending=True, stable=True)
    best, blocks = best[..., :k], blocks[..., :k]
    missing = k - best.shape[-1]
    best = torch.cat([best, best.new_full((heads, tokens, missing), -torch.inf)], -1)
    blocks = torch.cat([blocks, blocks.new_full((heads, tokens, missing), -1)], -1)
    return best, blocks.masked_fill(best == -torch.inf, -1)
