"""What the caches of all models here share: their owner, and the methods that transformers calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from memstore.attention.layers import States
from memstore.errors import InvalidArgument
from memstore.memory.trace_file import Array, Look
from memstore.models.packing import Packing
from memstore.readers.observer import Choice, Observer, Origin

OnError = Literal["raise", "miss"]
"""How a stored block that cannot be read is handled: raise an error, or leave it out of the list."""


def of_rows(layers: Sequence[States | None], rows: Tensor) -> list[States | None]:
    """Return the states of all layers, with row ``b`` taken from row ``rows[b]``."""
    return [
        None if both is None else (both[0][rows.to(both[0].device)], both[1][rows.to(both[1].device)])
        for both in layers
    ]


def behind_zeros(x: Tensor, zeros: int, at: Tensor) -> Tensor:
    """Return the places ``at [B, n]`` of ``x [B, G, m, D]``, as if ``zeros`` zeros came before it."""
    index = at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return F.pad(x, (0, 0, zeros, 0)).gather(2, index)


def larger(old: Tensor | None, new: Tensor, dim: int) -> Tensor:
    """Return ``new`` with ``old``, which is shorter along ``dim``, at its beginning."""
    if old is not None:
        new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new


def ranked_look(
    layer: int,
    row: int,
    origin: Origin,
    blocks: Array,
    scores: Array,
    weights: Array,
    tiers: Array,
    spent: tuple[float, float],
) -> Look:
    """Return the look of lists ``blocks, scores, tiers [X, K]`` in any order, best first, with ``weights [H, K]``.

    ``spent``: microseconds of searching and of gathering.
    """
    order = np.lexsort((-scores, blocks < 0))  # those without a score after the others, unused ones last
    blocks, scores, tiers = (np.take_along_axis(x, order, 1) for x in (blocks, scores, tiers))
    return Look(
        layer=layer,
        row=row,
        documents=origin.names,
        document=origin.documents(blocks),
        blocks=blocks,
        scores=scores,
        weights=np.take_along_axis(weights, order.repeat(len(weights) // len(blocks), 0), 1),
        tiers=np.where(blocks < 0, -1, tiers),
        search_us=spent[0],
        gather_us=spent[1],
    )


class ModelCache:
    """Base of all ``past_key_values``. One serves one generation of one model. To branch, make another."""

    # `generate` reads these from a cache. Without linear or other layers, it leaves it to the model which tokens of a
    # prompt are new.
    is_compileable = False
    is_croppable = False
    is_linear: tuple[bool, ...] = ()

    def __init__(self, config: Any, rows: int) -> None:
        self.config = config
        self.rows = rows
        self.given = 0
        """Tokens that came in through the model, padding included. ``generate`` leaves them out of a prompt."""
        self.owner: weakref.ref[nn.Module] | None = None
        """The model that computed the states in this cache; None while it is empty."""
        self.observers: list[Observer] = []
        """Called with each choice. They watch the cache, not the model: it is one generation and knows its document."""
        self.origin = Origin()
        """The origin of its blocks."""

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature of transformers
        """Return the tokens given so far, without those of a document."""
        return self.given

    def tell_begin(self, ids: Tensor) -> None:
        """Tell the observers that a forward pass over ``ids [B, T]`` begins."""
        for observer in self.observers:
            observer.begin(ids[0], fresh=not self.given)

    def tell(self, choice: Choice) -> None:
        """Tell the observers what a layer has retrieved and attends to."""
        for observer in self.observers:
            observer.choice(choice)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``b`` continue from row ``beam_idx[b]``. Rows may be dropped or repeated.

        Raises ``InvalidArgument`` if rows would change places under an observer, who knows rows by number.
        """
        if self.observers and beam_idx.tolist() != list(range(self.rows)):
            raise InvalidArgument(
                "a traced cache keeps the order of its rows: generate without beams, or without a trace"
            )
        self.rows = len(beam_idx)

    def fits(self, config: PreTrainedConfig) -> bool:
        """Return whether a model of this configuration may continue with this cache."""
        return self.config is config or bool(self.config.to_dict() == config.to_dict())

    def belong_to(self, model: nn.Module) -> None:
        """Make ``model`` the owner. Raise ``InvalidArgument`` if another model has begun."""
        if self.owner is not None and self.owner() is not model:
            raise InvalidArgument("past_key_values was computed by another model: use one cache for each model")
        self.owner = weakref.ref(model)

    def crop(self, max_length: int) -> None:
        """Refuse: states that have left the window cannot be brought back."""
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be cut to {max_length} tokens, because states outside its window are "
            "gone. Assisted generation and prompt look-up do not work with it"
        )


class CountedCache(ModelCache):
    """A cache of a model with blocks. It counts the tokens of each row."""

    def __init__(self, config: Any, rows: int, tokens: int = 0) -> None:
        """Start after a document of ``tokens`` tokens, which each row continues."""
        super().__init__(config, rows)
        self.counts = [tokens] * rows
        """Tokens of each row, including those of the document."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows} rows of {max(self.counts)} tokens)"

    @property
    def offsets(self) -> list[int]:
        """Return how many tokens wait in the incomplete block of each row."""
        return [count % self.config.tokens_per_block for count in self.counts]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.counts = [self.counts[row] for row in beam_idx.tolist()]

    def count(self, packing: Packing) -> None:
        """Count the tokens of a segment that has been processed."""
        self.counts = [count + new for count, new in zip(self.counts, packing.counts, strict=True)]
