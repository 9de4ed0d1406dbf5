"""What the caches of all models here share: whom they belong to, and what transformers asks of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig

from memstore.errors import InvalidArgument

if TYPE_CHECKING:
    from memstore.models.tracing import Tracing


class ModelCache:
    """Base of all ``past_key_values``. One serves one generation of one model: to branch, make another."""

    is_compileable = False

    def __init__(self, config: Any, rows: int) -> None:
        self.config = config
        self.rows = rows
        self.given = 0
        """Tokens that came in through the model, with their padding: what ``generate`` leaves out of a prompt."""
        self.owner: weakref.ref[nn.Module] | None = None
        """The model that computed what is in here; None as long as nothing is."""
        self.trace: Tracing | None = None
        """What writes down what is retrieved, where a reader was asked for that."""

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature is that of transformers
        """Tokens given so far, those of a document not counted."""
        return self.given

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
