"""The opening of a prompt: what a chat template and a system prompt say before every question, computed once.

It says nothing of what is wanted, so it attends to the sink and to itself, and not to what is retrieved. Its states are
then the same for every question, and are kept until something is committed: of the prompt of a short question they are
more than half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from memstore.readers.stock.call import Call
    from memstore.readers.stock.hooks import Hooks
    from memstore.readers.stock.visible import States


@dataclass(frozen=True, eq=False)
class Opening:
    """The first tokens of prompts, and their states."""

    tokens: Tensor
    """``[n]``"""
    states: list[States]
    """Of each layer: keys, at the positions that they are attended at, and values ``[1, G, n, D]``."""

    @classmethod
    def computed(cls, hooks: Hooks, call: Call, tokens: Tensor) -> Opening:
        """That of the prompts that begin with ``tokens [n]``, by ``call``, which is released."""
        call.observers, call.routed = (), False
        try:
            hooks.forward(call, tokens, logits=True)
            return cls(tokens, [layer.local() for layer in call.layers])
        finally:
            call.release()

    def begin(self, call: Call) -> None:
        """Let ``call`` go on after it."""
        call.length, call.opening = len(self.tokens), self.tokens
        for layer, (keys, values) in zip(call.layers, self.states, strict=True):
            layer.keys, layer.values, layer.is_initialized = keys, values, True
