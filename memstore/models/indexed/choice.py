"""What a layer's index has chosen for the last token of a row, for traces, searches and audits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from memstore.memory import Document
from memstore.memory.trace_file import Array, Look
from memstore.models.indexed.family import IndexedLayer
from memstore.readers.observer import Choice, Draft, Looks, Origin, as_array


class ChosenFrom(Protocol):
    """What the layer chose from: ``call.IndexedCall``."""

    document: Document
    tokens: int
    """Those of the document; what follows is the row's own."""
    origin: Origin

    def logits(self, layer: IndexedLayer, row: int, query: Tensor) -> Tensor:
        """Scaled products of a query with all tokens, chosen or not."""


@dataclass(eq=False)
class IndexChoice(Choice):
    """See above. Tokens that are always seen are among those chosen, with a score of NaN."""

    layer: int
    rows: Sequence[int]
    described: IndexedLayer
    call: ChosenFrom
    query: Tensor
    """``[H, D]``"""
    ids: Tensor
    """``[lists, K]``: tokens, from the document's first on; -1 for unused."""
    scores: Tensor | None
    """``[lists, K]``; None where the choice is another layer's."""
    weights: Tensor
    """``[H, K]``: the part of the layer's attention that went to each."""
    tiers: Array | None
    spent: float
    """Microseconds of choosing."""

    @property
    def searched(self) -> bool:  # type: ignore[override]  # nobody sets it
        """See ``Choice``."""
        return self.scores is not None

    def draft(self) -> Draft:
        """See ``Choice``: tokens, best score first."""
        size = self.call.document.memory.spec.block_size
        ids, weights = as_array(self.ids), as_array(self.weights)
        scores = np.full(ids.shape, np.nan, np.float32) if self.scores is None else as_array(self.scores)
        order = np.argsort(np.where(ids < 0, np.inf, -np.nan_to_num(scores, nan=-1e30)), axis=1, kind="stable")
        lists = np.arange(len(weights)) * len(ids) // len(weights)
        weights = np.take_along_axis(weights, order[lists], 1)
        ids, scores = (np.take_along_axis(each, order, 1) for each in (ids, scores))
        tiers = np.full(ids.shape, -1) if self.tiers is None else np.take_along_axis(self.tiers, order, 1)
        blocks = np.where(ids < 0, -1, ids // size)
        stored = (ids >= 0) & (ids < self.call.tokens)
        look = Look(
            layer=self.layer,
            row=self.rows[0],
            documents=self.call.origin.names,
            document=np.where(stored, 0, -1).astype(np.int16),
            blocks=blocks,
            offsets=np.where(ids < 0, -1, ids % size),
            scores=np.where(ids < 0, -np.inf, scores).astype(np.float32),
            weights=weights.astype(np.float32),
            tiers=tiers.astype(np.int8),
            search_us=self.spent,
        )
        return Looks([look])
