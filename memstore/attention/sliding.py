"""Sliding-window self-attention in linear time, over segments that continue one another.

A query sees itself and the ``size - 1`` tokens before it. A segment of ``M`` tokens comes with the ``P`` keys before it
(``P`` is 0, or ``size - 1`` of which the first ``empty`` do not exist). Short segments are one product; long ones are
folded into tiles of queries, each with the keys it can see, so that time and memory grow with ``M * size``.

Key ``j`` of the ``P + M`` keys and query ``i`` of the ``M`` queries are ``P + i - j`` tokens apart: whatever the position
in the document, so nothing here grows with it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TILES_BEFORE_FOLDING = 4


class Window:
    """What the queries of one segment see. Made once for a segment, used by every layer."""

    def __init__(
        self,
        tokens: int,
        past: int,
        size: int,
        *,
        empty: Tensor | None = None,
        slopes: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """``empty [B]``: how many of the ``past`` keys of each row do not exist. ``slopes [H]``: those of ALiBi."""
        self.tokens = tokens
        self.past = past
        self.size = size
        self.tile = 0 if tokens <= TILES_BEFORE_FOLDING * size else size
        self.bias = self._bias(empty, slopes, dtype, torch.device(device))
        """Added to the scores: ``[B or 1, H or 1, M, P + M]``, or folded ``[B * n or 1, H or 1, tile, tile + size - 1]``."""

    @property
    def _missing(self) -> int:
        """Keys that are put before the first one when folding, so that every tile sees equally many."""
        return self.size - 1 - self.past

    def _bias(
        self, empty: Tensor | None, slopes: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        if not self.tile:
            queries, keys = self.tokens, self.past + self.tokens
            past = self.past
        else:
            queries, keys = self.tile, self.tile + self.size - 1
            past = self.size - 1
        if self.tokens == 1 and slopes is None and empty is None and keys <= self.size:
            return None
        distance = past + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)[None]
        visible = ((distance >= 0) & (distance < self.size))[None, None]
        if not self.tile:
            if empty is not None:
                visible = visible & (torch.arange(keys, device=device) >= empty[:, None])[:, None, None]
        elif empty is not None or self._missing:
            visible = self._first_tile(visible, empty)
        bias = torch.zeros((), dtype=dtype, device=device)
        if slopes is not None:
            bias = -slopes.to(dtype)[None, :, None, None] * distance.abs().to(dtype)
        return torch.where(visible, bias, -math.inf)

    def _first_tile(self, visible: Tensor, empty: Tensor | None) -> Tensor:
        """The first tile sees fewer keys than the others: ``[1, 1, t, k]`` -> ``[B * n or n, 1, t, k]``."""
        missing = torch.tensor([self._missing], device=visible.device) if empty is None else empty + self._missing
        tiles = -(-self.tokens // self.tile)
        first = visible & (torch.arange(visible.shape[-1], device=visible.device) >= missing[:, None])[:, None, None]
        every = visible.expand(len(missing), tiles, -1, -1).clone()
        every[:, 0] = first[:, 0]
        return every.unsqueeze(2).flatten(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [B, H, M, D]`` over ``k, v [B, G, P + M, D]`` -> ``[B, H, M, D]``."""
        if not self.tile:
            return _attend(q, k, v, self.bias)
        batch, _, tokens, _ = q.shape
        tiles = -(-tokens // self.tile)
        right = tiles * self.tile - tokens
        q = F.pad(q, (0, 0, 0, right)).unflatten(2, (tiles, self.tile)).transpose(1, 2).flatten(0, 1)
        k, v = (self._folded(F.pad(x, (0, 0, self._missing, right))) for x in (k, v))
        bias = self.bias
        if bias is not None and len(bias) == tiles and batch > 1:
            bias = bias.repeat(batch, 1, 1, 1)
        out = _attend(q, k, v, bias)
        return out.unflatten(0, (batch, tiles)).transpose(1, 2).flatten(2, 3)[:, :, :tokens]

    def _folded(self, x: Tensor) -> Tensor:
        """``[B, G, size - 1 + n * tile, D]`` -> ``[B * n, G, tile + size - 1, D]``, each with the keys of one tile."""
        return x.unfold(2, self.tile + self.size - 1, self.tile).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1])


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """``[H]`` slopes of Press et al. 2022: ``2 ** (-8 h / H)``, interleaved where ``H`` is no power of two."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return torch.tensor(slopes, device=device)
