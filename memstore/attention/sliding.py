"""Sliding-window self-attention in linear time, over segments that continue one another.

A query sees itself and the ``size - 1`` tokens before it. A segment of ``M`` tokens comes with the ``P`` keys before
it. ``P`` is 0 or ``size - 1``, and the first ``empty`` of these keys do not exist. A short segment is one product. A
long one is folded into tiles of queries, each with the keys it can see, so time and memory grow with ``M * size``.

Key ``j`` of the ``P + M`` keys and query ``i`` of the ``M`` queries are ``P + i - j`` tokens apart. This does not
depend on the position in the document, so nothing here grows with it.

On a CPU, without gradients, tiles are computed head by head without copies (``WindowTiles``).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

UNFOLDED = 2
"""A segment of at most this many windows of queries is one product."""
LEAST_TILE = 16
"""Queries. A tile of half a window computes three scores for every two that count. Smaller tiles cost more."""


class Window:
    """The keys that the queries of one segment see. Made once for a segment, used by every layer."""

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
        """``empty [B]``: how many ``past`` keys of each row do not exist. ``slopes [H]``: the slopes of ALiBi."""
        self.past = past
        self.size = size
        self.tile = 0 if tokens <= UNFOLDED * size else max(LEAST_TILE, size // 2)
        """Queries of a tile; 0 if the segment is not folded."""
        self.start = tokens if not self.tile else 0 if past == size - 1 and empty is None else size
        """Queries that are not folded: all, or the first ones if they may see less than a whole window."""
        self.start_bias = None
        self.tile_bias = None
        if self.start and (tokens > 1 or slopes is not None or empty is not None):
            self.start_bias = _bias(self.start, past, size, empty, slopes, dtype, device)
        if self.tile:
            self.tile_bias = _bias(self.tile, size - 1, size, None, slopes, dtype, device)
            self._tiles = WindowTiles(size, slopes) if torch.device(device).type == "cpu" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with ``q [B, H, M, D]`` to ``k, v [B, G, P + M, D]``: ``[B, H, M, D]``."""
        if not self.tile:
            return _attend(q, k, v, self.start_bias)
        first = self.past + self.start - (self.size - 1)
        later = q[:, :, self.start :], k[:, :, first:], v[:, :, first:]
        rest = None
        if self._tiles is not None and q.dtype == torch.float32 and not torch.is_grad_enabled():
            rest = self._tiles.attend_rows(*later)
        rest = self._attend_folded(*later) if rest is None else rest
        if not self.start:
            return rest
        seen = self.past + self.start
        return torch.cat([_attend(q[:, :, : self.start], k[:, :, :seen], v[:, :, :seen], self.start_bias), rest], 2)

    def _attend_folded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend as ``attend`` does, if all queries have ``size - 1`` keys before them."""
        batch, _, tokens, _ = q.shape
        tiles = -(-tokens // self.tile)
        right = tiles * self.tile - tokens
        q = F.pad(q, (0, 0, 0, right)).unflatten(2, (tiles, self.tile)).transpose(1, 2).flatten(0, 1)
        k, v = (self._folded(F.pad(x, (0, 0, 0, right))) for x in (k, v))
        out = _attend(q, k, v, self.tile_bias)
        joined: Tensor = out.unflatten(0, (batch, tiles)).transpose(1, 2).flatten(2, 3)
        return joined[:, :, :tokens]

    def _folded(self, x: Tensor) -> Tensor:
        """Fold ``[B, G, size - 1 + n * tile, D]`` to ``[B * n, G, tile + size - 1, D]``: the keys of each tile."""
        return x.unfold(2, self.tile + self.size - 1, self.tile).permute(0, 2, 1, 4, 3).flatten(0, 1)


class WindowTiles:
    """Windows of one row on a CPU, in two products whose operands overlap in memory: neighbouring tiles share keys.

    Nothing is copied, and head by head the scores stay in the processor's cache. Exponentials are divided by their sum,
    without a search for the largest score first, because passes over the scores take the time.
    """

    def __init__(self, size: int, slopes: Tensor | None = None) -> None:
        """``size``: items that a query sees, itself included. ``slopes [H]``: the slopes of ALiBi."""
        self.size = size
        self.tile = max(LEAST_TILE, size // 2)
        bias = _bias(self.tile, size - 1, size, None, slopes, torch.float32, "cpu")
        self._factor = F.pad(bias.exp(), (1, 0))[0]  # [H or 1, tile, size + tile], the first key never seen

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Attend with ``q [B, H, M, D]`` to ``k, v [B, G, size - 1 + M, D]`` of many rows; None as in ``attend``."""
        k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))
        rows = []
        for row in zip(q * q.shape[-1] ** -0.5, k, v, strict=True):
            if (out := self.attend(*row)) is None:
                return None
            rows.append(out)
        return torch.stack(rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, missing: int = 0) -> Tensor | None:
        """Attend with scaled ``q [H, M, D]`` to ``k, v [G, size + M, D]``: ``[H, M, D]``.

        Query ``i`` belongs to key ``size + i``. The first ``missing`` keys do not exist; key 0 is never seen. Returns
        None if exponentials of scores do not fit into the dtype. All three are contiguous except over heads.
        """
        heads, tokens, dim = q.shape
        tiles, rest = -(-tokens // self.tile), -tokens % self.tile
        if rest:
            q, k, v = (F.pad(x, (0, 0, 0, rest)) for x in (q, k, v))
        out = q.new_empty(heads, tiles * self.tile, dim)
        for head in range(heads):
            group = head * len(k) // heads
            if not self._attend_head(q[head], k[group], v[group], head, missing, out[head]):
                return None
        return out[:, :tokens]

    def _attend_head(self, q: Tensor, k: Tensor, v: Tensor, head: int, missing: int, out: Tensor) -> bool:
        tile, dim = self.tile, q.shape[1]
        tiles, seen, step = len(q) // tile, self.size + tile, tile * dim
        scores = torch.bmm(q.view(tiles, tile, dim), k.as_strided((tiles, dim, seen), (step, 1, dim)))
        scores.exp_().mul_(self._factor[head % len(self._factor)])
        for first in range(min(tiles, -(-missing // tile))):
            scores[first, :, : missing - first * tile] = 0
        total = scores.sum(-1, keepdim=True)
        overlapping = v.as_strided((tiles, seen, dim), (step, dim, 1))
        torch.bmm(scores, overlapping, out=out.view(tiles, tile, dim)).div_(total)
        return fits(total)


def fits(total: Tensor) -> bool:
    """Return whether sums of exponentials are finite and large enough to divide by."""
    least, most = total.aminmax()
    return float(least) > torch.finfo(total.dtype).tiny and float(most) < math.inf


def _bias(
    queries: int,
    past: int,
    size: int,
    empty: Tensor | None,
    slopes: Tensor | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Return the bias on scores, ``[B or 1, H or 1, M, P + M]``: -inf for unseen keys, else 0 or ALiBi's bias."""
    keys = torch.arange(past + queries, device=device)
    distance = past + torch.arange(queries, device=device)[:, None] - keys[None]
    visible = ((distance >= 0) & (distance < size))[None, None]
    if empty is not None:
        visible = visible & (keys >= empty[:, None])[:, None, None]
    bias = torch.zeros((), dtype=dtype, device=device)
    if slopes is not None:
        bias = -slopes.to(dtype)[None, :, None, None] * distance.to(dtype)
    return torch.where(visible, bias, -math.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1])


@lru_cache(maxsize=16)  # otherwise each token would need a copy to the GPU
def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return slopes ``[H]`` of Press et al. 2022: ``2 ** (-8 h / H)``, interleaved if ``H`` is no power of two."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be used in training
        return torch.tensor(slopes, device=device)
