"""The most recent states of a document that is being read, kept at hand so that the store is not asked for them."""

from __future__ import annotations

import torch
from torch import Tensor

from memstore.memory import Document
from memstore.readers.stock.visible import DocumentStates, States


class RecentStates(DocumentStates):
    """States of the last tokens of a document; what is older comes from the store."""

    def __init__(self, document: Document, block_size: int, *, keep: int) -> None:
        super().__init__(document, block_size)
        self.keep = keep
        self.start: dict[int, int] = {}
        self.runs: dict[int, States] = {}
        self._older: dict[tuple[int, range], States] = {}

    def read(self, layer: int, tokens: range) -> States:
        """Keys and values ``[G, n, D]`` of ``tokens``."""
        if layer in self.runs and tokens.start >= self.start[layer]:
            first = tokens.start - self.start[layer]
            keys, values = self.runs[layer]
            return keys[:, first : first + len(tokens)], values[:, first : first + len(tokens)]
        if (layer, tokens) not in self._older:
            # What is asked for again and again is the sink; anything else here is asked for once, after reopening.
            self._older = {key: states for key, states in self._older.items() if key[0] != layer}
            self._older[layer, tokens] = super().read(layer, tokens)
        return self._older[layer, tokens]

    def load(self, layer: int, tokens: int) -> None:
        """Fetch the states of the last tokens of a document of ``tokens`` tokens."""
        first = max(self.document.blocks.start, (tokens - self.keep) // self.block_size) * self.block_size
        if first < tokens:
            self.start[layer], self.runs[layer] = first, super().read(layer, range(first, tokens))

    def extend(self, layer: int, keys: Tensor, values: Tensor, *, at: int) -> None:
        """Add states ``[G, n, D]`` of the tokens from ``at`` on; only the most recent ones are kept."""
        if layer in self.runs:
            before = self.runs[layer]
            keys, values = torch.cat((before[0], keys), 1), torch.cat((before[1], values), 1)
            at = self.start[layer]
        excess = max(0, keys.shape[1] - self.keep) // self.block_size * self.block_size
        self.start[layer] = at + excess
        self.runs[layer] = (keys[:, excess:].contiguous(), values[:, excess:].contiguous())

    def replace(self, layer: int, keys: Tensor, values: Tensor, *, at: int) -> None:
        """Put states ``[G, n, D]`` in the place of those of the tokens from ``at`` on."""
        first = at - self.start[layer]
        after = first + keys.shape[1]
        old_keys, old_values = self.runs[layer]
        self.runs[layer] = (
            torch.cat((old_keys[:, :first], keys, old_keys[:, after:]), 1),
            torch.cat((old_values[:, :first], values, old_values[:, after:]), 1),
        )


class RecentCodes:
    """The routing codes of the last tokens, rounded to what the memory stores, so that reopening changes nothing."""

    def __init__(self, *, keep: int, bits: bool) -> None:
        self.keep, self.bits = keep, bits
        self.start = 0
        self.codes: Tensor | None = None

    def extend(self, codes: Tensor, *, at: int) -> None:
        """Add codes ``[n, dim]`` of the tokens from ``at`` on."""
        if self.bits:
            codes = torch.where(codes > 0, 1.0, -1.0)
        if self.codes is None:
            self.start = at
        else:
            codes = torch.cat((self.codes, codes))
        excess = max(0, len(codes) - self.keep)
        self.start, self.codes = self.start + excess, codes[excess:]

    def read(self, tokens: range) -> Tensor:
        """Codes ``[n, dim]`` of ``tokens``, as far as they are kept."""
        first = max(0, tokens.start)  # the beginning of a document has fewer tokens than choose together
        assert self.codes is not None
        assert first >= self.start, "codes were asked for that are not kept"
        return self.codes[first - self.start : tokens.stop - self.start]
