"""What came before, as the models of this package take it (``past_key_values``), and that of the baselines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.positions import Turns
from memstore.models.cache import ModelCache
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.packing import Packing


class Past(ModelCache, ABC):
    """Base of all caches: for each segment the model calls ``begin``, ``attend`` once for each layer, and ``end``.

    It serves one generation: to branch, make another.
    """

    config: LandmarkConfig

    def __init__(self, config: LandmarkConfig, rows: int, tokens: int = 0) -> None:
        """``tokens``: those of a document, that each row goes on after."""
        super().__init__(config, rows)
        self.counts = [tokens] * rows
        """Tokens of each row, those of the document included."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows} rows of {max(self.counts)} tokens)"

    @property
    def offsets(self) -> list[int]:
        """Tokens that wait in the incomplete block of each row."""
        return [count % self.config.tokens_per_block for count in self.counts]

    @property
    def step(self) -> int:
        """Tokens between the places where what comes is cut into forward passes."""
        return self.config.segment_tokens

    @abstractmethod
    def begin(self, packing: Packing, ending: Sequence[int] = ()) -> None:
        """A segment comes: ``packing`` says which stream items it has, ``ending`` which rows have none after it."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:
        """``q [B, H, M, D]``, ``k, v [B, G, M, D]`` of the segment, without positions -> ``[B, H, M, D]``.

        ``context_miss [1, G, 1, D]``: the key of the context-miss token, where the model has one.
        """

    @abstractmethod
    def end(self) -> None:
        """All layers have attended: the segment is past now, and its tokens are counted."""

    @abstractmethod
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``b`` be what row ``beam_idx[b]`` was; rows may be dropped or repeated."""


# Baselines are the same class without landmarks, so a table compares nothing but attention. Transformer-XL is computed
# in one pass: every window with the one before it, detached, as its cache.
class WindowCache(Past):
    """Keys and values that the baselines' next tokens can see: all, a window, or two windows side by side.

    Keys are kept rotated to their true positions. No gradient flows into it.
    """

    def __init__(self, config: LandmarkConfig, rows: int) -> None:
        super().__init__(config, rows)
        self.states: list[tuple[Tensor, Tensor] | None] = [None] * config.num_hidden_layers
        """``[B, G, P, D]`` of each layer."""
        self.places: Tensor | None = None
        """``[B, P]``: position of each of them; -1 where there is none."""
        self._packing: Packing | None = None
        self._turns: Turns | None = None
        self._visible: Tensor | None = None

    @property
    def offsets(self) -> list[int]:
        """Tokens of each row: there are no blocks, so they are those of one that never ends."""
        return self.counts

    def begin(self, packing: Packing, ending: Sequence[int] = ()) -> None:  # noqa: ARG002 - nobody is told
        """Where the segment's items stand, and what each sees."""
        device = packing.ids.device
        at = torch.tensor(self.counts, device=device)[:, None] + torch.arange(packing.items, device=device)
        here = torch.where(packing.real, at, -1)
        self._packing, self._turns = packing, self.config.rotary.turns(at.unsqueeze(1))
        self.places = here if self.places is None else torch.cat([self.places, here], 1)
        places, first = self.places[:, None], self._first(at).clamp(min=0)[..., None]
        # What only fills a row up sees itself: something that is finite.
        itself = F.pad(torch.eye(packing.items, dtype=torch.bool, device=device), (places.shape[-1] - packing.items, 0))
        self._visible = ((places >= first) & (places <= at[..., None]) | itself).unsqueeze(1)

    def _first(self, places: Tensor) -> Tensor:
        """The first position that a token at each of ``places`` sees; below 0 where it sees all."""
        match self.config.attention:
            case "window":
                return places - self.config.window + 1
            case "xl":
                return (places.div(self.config.window, rounding_mode="floor") - 1) * self.config.window
            case _:
                return torch.zeros_like(places)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:  # noqa: ARG002 - the baselines have none
        """``q [B, H, M, D]``, ``k, v [B, G, M, D]`` of the segment, without positions -> ``[B, H, M, D]``."""
        assert self._turns is not None
        rotary = self.config.rotary
        q, k = rotary.rotate(q, self._turns), rotary.rotate(k, self._turns)
        past = self.states[layer]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        self.states[layer] = (k.detach(), v.detach())
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._visible, enable_gqa=q.shape[1] != k.shape[1])

    def end(self) -> None:
        """Count the segment's tokens, and drop what nobody will see again."""
        assert self._packing is not None
        assert self.places is not None
        self.counts = [count + new for count, new in zip(self.counts, self._packing.counts, strict=True)]
        first = self._first(torch.tensor(self.counts, device=self.places.device)).clamp(min=0)
        needed = (self.places >= first[:, None]).any(0)
        if not bool(needed.all()):
            self.places = self.places[:, needed]
            self.states = [
                None if each is None else (each[0][:, :, needed], each[1][:, :, needed]) for each in self.states
            ]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``b`` be what row ``beam_idx[b]`` was; rows may be dropped or repeated."""
        self.rows = len(beam_idx)
        self.counts = [self.counts[row] for row in beam_idx.tolist()]
        self.places = None if self.places is None else self.places[beam_idx.to(self.places.device)]
        self.states = [
            None if each is None else (each[0][beam_idx.to(each[0].device)], each[1][beam_idx.to(each[1].device)])
            for each in self.states
        ]
