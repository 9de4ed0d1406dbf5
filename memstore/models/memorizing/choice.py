"""What a Memorizing Transformer retrieves, as an observer is told of it.

One layer looks up single tokens, each head for itself: a list for every query head, whose entries are a block and the
place of the token in it. A weight is the gate times the softmax over what was found; for a model with one softmax over
everything (``joint``) it is the token's part of that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from memstore.attention.knn import Neighbours
from memstore.attention.knn_stored import StoredTokens
from memstore.memory.trace_file import TIERS, Array, Look
from memstore.readers.observer import Choice, Draft, Looks, Origin, numbers

OWN = TIERS.index("own")


class Tokens(Protocol):
    """Tokens of a document, then those of a cache: ``reader.DocumentTokens``."""

    stored: StoredTokens
    begun: float
    """When the last search began, by ``time.perf_counter``."""

    def numbers_of(self, ids: Tensor) -> Tensor:
        """The place of each in the text, -1 for nothing."""


class LookupLayer(Protocol):
    """A layer that looks tokens up: ``KNNAttention``, or the one of a stock model."""

    def weights_of(self, q: Tensor, k: Tensor, mask: Tensor, found: Neighbours) -> tuple[Tensor, Tensor]:
        """Scores and weights ``[B, H, T, K]`` of what was found."""


@dataclass(eq=False)
class KNNChoice(Choice):
    """The tokens that the layer with the memory found for one segment."""

    layer: int
    rows: Sequence[int]
    last: Sequence[int]
    """Where the last token of each row stands in the segment."""
    attention: LookupLayer
    queries: Tensor
    """``[B, H, T, D]``, of length 1."""
    keys: Tensor
    """``[B, G, n, D]``: those of the window."""
    mask: Tensor
    """``[B or 1, H, T, n]``: the bias of the window."""
    found: Neighbours
    memory: Tokens
    origin: Origin
    searched = True

    def places(self) -> Tensor:
        """``[B, H, T, K]``: the places in the text of what was found, -1 for nothing."""
        return self.memory.numbers_of(self.found.ids)

    def draft(self) -> Draft:
        """See ``Choice``."""
        now = time.perf_counter()
        asked = self.memory.stored.asked
        spent = (1e6 * (asked - self.memory.begun), 1e6 * (now - asked))
        places = numbers(self.places())
        return Looks(
            [
                self._look(row, places[row, :, self.last[row]], *spent)
                for row in self.rows
                if (places[row, :, self.last[row]] >= 0).any()
            ]
        )

    def _look(self, row: int, places: Array, search_us: float, gather_us: float) -> Look:
        """Of tokens at ``places [H, K]`` of the text, -1 for none, best first."""
        one, token = slice(row, row + 1), slice(self.last[row], self.last[row] + 1)
        mine = Neighbours(self.found.keys[one], self.found.values[one], self.found.ids[one, :, token])
        mask = self.mask[one if len(self.mask) > 1 else slice(None), :, token]
        told = self.attention.weights_of(self.queries[one, :, token], self.keys[one], mask, mine)
        scores, weights = (numbers(x)[0, :, 0] for x in told)
        stored = self.memory.stored
        size, tokens = stored.spec.block_size, len(stored.documents[row])
        there, theirs = places >= 0, (places >= 0) & (places < tokens)
        blocks = np.where(there, places // size, -1)
        before = {} if stored.tiers is None else stored.tiers[row]
        names = [before.get(block) for block in blocks.flatten().tolist()]
        tiers = np.array([OWN if name is None else TIERS.index(name) for name in names]).reshape(blocks.shape)
        return Look(
            layer=self.layer,
            row=row,
            documents=self.origin.names,
            document=np.where(theirs, 0, -1).astype(np.int16),
            blocks=blocks,
            offsets=np.where(there, places % size, -1),
            scores=scores,
            weights=weights,
            tiers=np.where(theirs, tiers, np.where(there, OWN, -1)).astype(np.int8),
            search_us=search_us,
            gather_us=gather_us,
        )
