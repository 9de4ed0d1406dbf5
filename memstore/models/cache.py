"""What the caches of all models here share: whom they belong to, and what transformers asks of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from memstore.errors import InvalidArgument
from memstore.models.packing import Packing
from memstore.readers.observer import Choice, Observer, Origin

OnError = Literal["raise", "miss"]
"""What becomes of a stored block that cannot be read: an error, or a list without it."""
States = tuple[Tensor, Tensor]
"""Keys and values of a layer, ``[B, G, n, D]`` each."""


def of_rows(layers: Sequence[States | None], rows: Tensor) -> list[States | None]:
    """The states of all layers, where row ``b`` is what row ``rows[b]`` was."""
    return [
        None if both is None else (both[0][rows.to(both[0].device)], both[1][rows.to(both[1].device)])
        for both in layers
    ]


def behind_zeros(x: Tensor, zeros: int, at: Tensor) -> Tensor:
    """Places ``at [B, n]`` of ``x [B, G, m, D]`` with so many ``zeros`` before it."""
    index = at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return F.pad(x, (0, 0, zeros, 0)).gather(2, index)


class ModelCache:
    """Base of all ``past_key_values``. One serves one generation of one model: to branch, make another."""

    # What ``generate`` asks of a cache. Where no layer is said to be linear or to be another, it leaves it to the model
    # which tokens of a prompt are new.
    is_compileable = False
    is_croppable = False
    is_linear: tuple[bool, ...] = ()

    def __init__(self, config: Any, rows: int) -> None:
        self.config = config
        self.rows = rows
        self.given = 0
        """Tokens that came in through the model, with their padding: what ``generate`` leaves out of a prompt."""
        self.owner: weakref.ref[nn.Module] | None = None
        """The model that computed what is in here; None as long as nothing is."""
        self.observers: list[Observer] = []
        """Told what is retrieved. The cache is watched, not the model: it is one generation, and knows its document."""
        self.origin = Origin()
        """Where its blocks are from."""

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature is that of transformers
        """Tokens given so far, those of a document not counted."""
        return self.given

    def tell_begin(self, ids: Tensor) -> None:
        """A forward pass over ``ids [B, T]`` begins."""
        for observer in self.observers:
            observer.begin(ids[0], fresh=not self.given)

    def tell(self, choice: Choice) -> None:
        """A layer attends to what it has retrieved."""
        for observer in self.observers:
            observer.choice(choice)

    def check_order(self, rows: list[int]) -> None:
        """Raise ``InvalidArgument`` where ``rows`` would change places under an observer, who knows them by number."""
        if self.observers and rows != list(range(self.rows)):
            raise InvalidArgument("a cache that is traced keeps its rows in order; generate without beams, or untraced")

    def fits(self, config: PreTrainedConfig) -> bool:
        """Whether a model of this configuration may go on with it."""
        return self.config is config or bool(self.config.to_dict() == config.to_dict())

    def belong_to(self, model: nn.Module) -> None:
        """Raise ``InvalidArgument`` where another model than ``model`` has begun; else it has now."""
        if self.owner is not None and self.owner() is not model:
            raise InvalidArgument(
                "past_key_values was computed by another model than this one: each model needs a cache of its own"
            )
        self.owner = weakref.ref(model)

    def crop(self, max_length: int) -> None:
        """Refused: what has left the window cannot be brought back."""
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be cut to {max_length} tokens, for what has left its window is gone; "
            "assisted generation and prompt look-up do not work with it"
        )


class CountedCache(ModelCache):
    """A cache of a model with blocks, which counts the tokens of each row."""

    def __init__(self, config: Any, rows: int, tokens: int = 0) -> None:
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

    def count(self, packing: Packing) -> None:
        """The tokens of a segment have been processed."""
        self.counts = [count + new for count, new in zip(self.counts, packing.counts, strict=True)]
