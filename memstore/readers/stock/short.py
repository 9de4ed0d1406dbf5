"""Documents of few blocks, scored together: their landmarks lie side by side, so that one product scores them all.

Each document has an index of its own, which is asked once for a question. For thousands of short notes that would be
thousands of products of a few rows. What is held here is the landmarks that those indexes would hold; a document that
has changed is read again, the others are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from memstore.kernels.best_signs import PackedSigns, best_signs, pack
from memstore.kernels.best_signs.api import problem
from memstore.memory.tensors import index_dtype

if TYPE_CHECKING:
    from memstore.memory import Document

SHORT = 64
"""Blocks of a document up to which it is scored with others."""


class Short(NamedTuple):
    """Blocks of a document at one commit."""

    document: Document
    edits: int
    """Number of truncations: while it stays the same, the landmarks of full blocks do."""
    blocks: range
    tokens: int | None
    """How many the last block has, where it is not full."""


ShortParts = tuple[Short, ...]
Key = tuple[int | None, int, range, int | None]
"""While it stays the same, the landmarks of a document do."""


class ShortDocuments:
    """The landmarks of the short documents that a reader sees. One thread at a time, as the reader."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, bool], tuple[ShortParts, tuple[Key, ...], Tensor]] = {}

    def score(self, memory: int, layer: int, parts: ShortParts, queries: Tensor) -> Tensor:
        """Best inner product ``[H, T, n]`` of ``queries [H, T, D]`` with the landmarks of each block of ``parts``.

        ``memory`` is the number of the one that they are in. As the exact index does, in the type that it keeps.
        """
        spec = parts[0].document.memory.spec
        # Of a token each, so that those of a block that is not full are signs too.
        alone = spec.key_dtype == "bit" and spec.keys_per_block == spec.block_size
        signs = alone and queries.device.type == "cpu" and problem() is None
        keys = self._keys(memory, layer, parts, signs=signs).to(queries.device)
        grouped = queries.float().reshape(len(keys), -1, queries.shape[-1])
        if signs:
            packed = (PackedSigns(words, spec.keys_per_block, spec.key_dim) for words in keys)
            heads = [best_signs(of_head, rows).T for of_head, rows in zip(packed, grouped, strict=True)]
            return torch.stack(heads).reshape(*queries.shape[:2], -1)
        products = keys.flatten(1, 2) @ grouped.to(keys.dtype).transpose(1, 2)  # [G, n * P, R]
        best: Tensor = products.float().unflatten(1, keys.shape[1:3]).amax(2).transpose(1, 2)
        return best.reshape(*queries.shape[:2], -1)

    def _keys(self, memory: int, layer: int, parts: ShortParts, *, signs: bool) -> Tensor:
        """``[G, n, P, D]``, or with ``signs`` the words ``[G, n, ...]`` of ``PackedSigns``."""
        of, known, keys = self._held.get((memory, layer, signs), ((), (), torch.empty(0)))
        if of is not parts:
            names = tuple((each.document.id, each.edits, each.blocks, each.tokens) for each in parts)
            if known != names:
                starts = dict(zip(known, _starts([len(blocks) for _, _, blocks, _ in known]), strict=True))
                read = [
                    keys[:, starts[name] : starts[name] + len(each.blocks)]
                    if name in starts
                    else _read(each, layer, signs=signs)
                    for name, each in zip(names, parts, strict=True)
                ]
                keys = torch.cat(read, dim=1)
            self._held[memory, layer, signs] = parts, names, keys
        return keys


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where runs of these lengths begin that follow each other."""
    stops = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    starts: list[int] = (stops - torch.tensor(lengths, dtype=torch.int64)).tolist()
    return starts


def _read(part: Short, layer: int, *, signs: bool) -> Tensor:
    """Landmarks of a document's blocks, as an index keeps them: see ``ShortDocuments._keys``."""
    spec = part.document.memory.spec
    keys = part.document.layer(layer).landmarks(part.blocks)  # [n, G, P, D]
    if part.tokens is not None:
        keys = torch.cat([keys[:-1], incomplete_landmarks(keys[-1], part.tokens, spec.block_size)[None]])
    if signs:
        return torch.stack([pack(of_head).words for of_head in keys.unbind(1)])
    return keys.transpose(0, 1).to(index_dtype(spec.key_dtype))


def incomplete_landmarks(landmarks: Tensor, tokens: int, block_size: int) -> Tensor:
    """Landmarks ``[G, P, D]`` of a block of which there are ``tokens`` tokens.

    A landmark is the mean of a part of its block, taken over the places without tokens too, which are zeros. A part
    without any token has the landmark of the first.
    """
    size = block_size // landmarks.shape[1]
    filled = (tokens - size * torch.arange(landmarks.shape[1])).clamp(0, size)
    means = landmarks * (size / filled.clamp_min(1)).unsqueeze(-1)
    return torch.where((filled > 0).unsqueeze(-1), means, means[:, :1])
