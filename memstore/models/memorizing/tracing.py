"""What a Memorizing Transformer retrieves, step by step, as a trace has it.

One layer looks up single tokens, each head for itself: a list for every query head, whose entries are a block and the
place of the token in it. A weight is the gate times the softmax over what was found; for a model with one softmax over
everything (``joint``) it is the token's part of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from memstore.attention.knn import KNNAttention, Neighbours
from memstore.attention.knn_stored import StoredTokens
from memstore.memory import Document
from memstore.memory.look import Array, Look
from memstore.memory.recorder import Recorder
from memstore.models.tracing import OWN, Tracing, numbers

Watch = Callable[[KNNAttention, Tensor, Tensor, Tensor, Neighbours], None]


class Tokens(Protocol):
    """Tokens of a document, then those of a cache: ``reader.DocumentTokens``."""

    stored: StoredTokens
    watch: Watch | None
    begun: float
    """When the last search began."""

    def numbers_of(self, ids: Tensor) -> Tensor:
        """The place of each in the text, -1 for nothing."""


class KNNTracing(Tracing):
    """Follows what the layer number ``layer`` looks up; of a call's segments each row's last one counts."""

    def __init__(
        self, recorder: Recorder, document: Document, memory: Tokens, layer: int, device: torch.device
    ) -> None:
        super().__init__(recorder, document, device)
        self.stored = document.n_blocks  # an incomplete block is searched too
        self._tokens = len(document)
        self._memory, self._layer = memory, layer
        self._looks: dict[int, Look] = {}
        self._last: list[int] = []
        self._tiers: dict[int, dict[int, int]] = {}
        self._asked = 0.0
        memory.stored.asking, memory.watch = self._ask, self.watch

    def begin(self, ids: Tensor) -> None:
        """See ``Tracing``."""
        super().begin(ids)
        self._looks.clear()

    def end(self) -> None:
        """See ``Tracing``."""
        for _, look in sorted(self._looks.items()):
            self.recorder.look(look)

    def segment(self, remaining: Sequence[int]) -> None:
        """A segment of the call comes, where row ``b`` has ``remaining[b]`` tokens left."""
        self._last = list(remaining)
        self._tiers.clear()
        self._looks = {row: look for row, look in self._looks.items() if remaining[row] <= 0}

    def watch(self, layer: KNNAttention, q: Tensor, k: Tensor, mask: Tensor, found: Neighbours) -> None:
        """See ``KNNAttention``."""
        now = time.perf_counter()
        gather_us = (now - self._asked) * 1e6
        search_us = (self._asked - self._memory.begun) * 1e6
        places = numbers(self._memory.numbers_of(found.ids))
        for row, left in enumerate(self._last):
            last = min(left, q.shape[2]) - 1
            if last < 0 or not (places[row, :, last] >= 0).any():
                continue
            one, token = slice(row, row + 1), slice(last, last + 1)
            mine = Neighbours(found.keys[one], found.values[one], found.ids[one, :, token])
            seen = mask[one if len(mask) > 1 else slice(None), :, token]
            scores, weights = layer.weights_of(q[one, :, token], k[one], seen, mine)
            at = places[row, :, last]
            values = [numbers(x)[0, :, 0] for x in (scores, weights)]
            self._looks[row] = self._look(row, at, values[0], values[1], search_us, gather_us)

    def _look(self, row: int, places: Array, scores: Array, weights: Array, search_us: float, gather_us: float) -> Look:
        """Of tokens at ``places [H, K]`` of the text, -1 for none, best first."""
        size = self._memory.stored.spec.block_size
        there, theirs = places >= 0, (places >= 0) & (places < self._tokens)
        blocks = np.where(there, places // size, -1)
        known = self._tiers.get(row, {})
        tiers = [known.get(block, OWN) for block in blocks.flatten().tolist()]
        return Look(
            layer=self._layer,
            row=row,
            documents=self.names,
            document=np.where(theirs, 0, -1).astype(np.int16),
            blocks=blocks,
            offsets=np.where(there, places % size, -1),
            scores=scores,
            weights=weights,
            tiers=np.where(theirs, np.array(tiers).reshape(blocks.shape), np.where(there, OWN, -1)).astype(np.int8),
            search_us=search_us,
            gather_us=gather_us,
        )

    def _ask(self, row: int, blocks: list[int]) -> None:
        """``blocks`` of the document are about to be gathered."""
        if not row:
            self._asked = time.perf_counter()
        found = np.array(blocks, np.int64)
        self._tiers[row] = dict(zip(blocks, self.tiers_of(0, found).tolist(), strict=True))
