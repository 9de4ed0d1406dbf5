"""What the items of a whole stream see, without a cache: what training does, and evaluation of short texts.

Positions are true: the place of an item in its row's stream, landmarks counted. Rows are filled up at their end, where
causal attention does not look, so no attention here needs a padding mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.positions import positional_jumps
from memstore.attention.sliding import Window
from memstore.kernels import landmark_attention
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.context_miss import gated_attention
from memstore.models.packing import Packing


class WholeStream:
    """Attention of one kind over the streams ``[B, M]`` of a batch. Made once, used by every layer."""

    def __init__(
        self, config: LandmarkConfig, packing: Packing, like: Tensor, *, ramp: float = 1.0, training: bool = False
    ) -> None:
        """``like`` has the type and the device of hidden states; ``ramp`` is that of ``landmark_attention``."""
        self.config = config
        self.ramp = ramp
        self.controlled: Tensor | None = None
        """``[B, M]``: landmarks under the context-miss token."""
        rows, items = packing.rows, packing.items
        positions = torch.arange(items, device=like.device)[None]
        if config.attention == "landmark":
            # Where a row is filled up it may have landmarks too: nothing real looks there.
            at = torch.arange(items, device=like.device) % config.block_size == config.block_size - 1
            self.is_landmark = at.expand(rows, -1)
            if training and config.position_jump > 1:
                positions = positional_jumps(self.is_landmark, config.position_jump)
            if training and config.context_miss:
                self.controlled = self.is_landmark & (torch.rand(rows, items, device=like.device) < self._share)
        elif config.attention == "window":
            self.window = Window(items, 0, config.window, dtype=like.dtype, device=like.device)
        self.rotary = config.rotary
        self.turns = self.rotary.turns(positions.unsqueeze(1), like.dtype)  # [B or 1, 1, M, D]
        self.before = self.rotary.turns(torch.tensor(-1, device=like.device), like.dtype)

    @property
    def _share(self) -> float:
        return self.config.context_miss_share

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:  # noqa: ARG002 - all layers are alike here
        """``q [B, H, M, D]``, ``k, v [B, G, M, D]`` without positions -> ``[B, H, M, D]``."""
        q, k = self.rotary.rotate(q, self.turns), self.rotary.rotate(k, self.turns)
        match self.config.attention:
            case "landmark" if context_miss is not None:
                gate = self.rotary.rotate(context_miss, self.before)
                return gated_attention(q, k, v, self.is_landmark, gate, self.controlled, ramp=self.ramp)
            case "landmark":
                return landmark_attention(q, k, v, self.is_landmark, ramp=self.ramp)
            case "full":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            case "window":
                return self.window.attend(q, k, v)
            case _:
                return beside_one_another(q, k, v, self.config.window)


def beside_one_another(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Transformer-XL (Dai et al. 2019): tokens see their window and, without gradient, the one before.

    ``q [B, H, M, D]``, ``k, v [B, G, M, D]`` -> ``[B, H, M, D]``. Memory grows with ``M * window``.
    """
    batch, _, items, _ = q.shape
    count = -(-items // window)
    q, k, v = (F.pad(x, (0, 0, 0, count * window - items)).unflatten(2, (count, window)) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x[:, :, :-1].detach(), (0, 0, 0, 0, 1, 0)), x], 3) for x in (k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    place = torch.arange(window, device=q.device)
    visible = torch.arange(2 * window, device=q.device) <= window + place[:, None]
    exists = (torch.arange(count, device=q.device) > 0).repeat(batch)[:, None, None, None]
    visible = visible & (exists | (torch.arange(2 * window, device=q.device) >= window))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1])
    joined: Tensor = out.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)
    return joined[:, :, :items]
