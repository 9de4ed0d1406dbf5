"""Search a memory from outside a model: by vectors, or by the landmark of a block.

Every complete block is scored exactly, as an index would. Its score is the best inner product of a query with its keys.
Several heads or queries search together, and the score is the mean over them. Models search in their own ways, see
``search`` of the result of ``memstore.attach`` and of the readers. All of them return the same kind of match.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index.contract import check_numbers, check_tensor
from memstore.json_checks import check_whole
from memstore.memory.document import Container, Document
from memstore.memory.spec import MemorySpec

AT_ONCE = 1 << 22
"""Most scores in memory at a time, 4 bytes each: the landmark of a block can have many keys, and each is a query."""


@dataclass(frozen=True)
class Match:
    """A retrieved block."""

    document: str
    block: int
    score: float


def search_vectors(documents: Sequence[Document], queries: Tensor, top_k: int, *, layer: int) -> list[Match]:
    """Return the ``top_k`` blocks of ``documents`` for ``queries [H, T, D]`` in ``layer``, best first.

    ``D`` is the size of a key and ``H`` a multiple of the key heads: head ``h`` uses key head ``h * G // H``. The score
    is the mean over heads and ``T``. Raises ``InvalidArgument`` and ``DamagedError``.
    """
    for document in documents:
        _check(document.memory.spec, queries, top_k)
    return best(((document, *_scored(document, queries.float(), layer)) for document in documents), top_k)


def search_block(document: Document, block: int, top_k: int, *, layer: int, among: Sequence[Document]) -> list[Match]:
    """Return the ``top_k`` blocks in ``among`` for the landmark of a block in ``layer``: its neighbours, best first.

    The block itself is left out. Raises ``NotFound``, ``InvalidArgument`` and ``DamagedError``.
    """
    landmark = document.layer(layer).landmarks(range(block, block + 1))[0]  # [G, P, D]
    found = search_vectors(among, landmark, top_k + 1, layer=layer)
    return [match for match in found if (match.document, match.block) != (document.name, block)][:top_k]


def best(scored: Iterable[tuple[Document, Tensor, Tensor]], top_k: int) -> list[Match]:
    """Return the ``top_k`` best matches from documents, their blocks ``[N]`` and these blocks' scores ``[N]``."""
    found: list[Match] = []
    for document, blocks, scores in scored:
        values, at = scores.topk(min(top_k, len(scores)))
        pairs = zip(blocks[at].tolist(), values.tolist(), strict=True)
        found += [Match(document.name, block, score) for block, score in pairs]
    return sorted(found, key=lambda match: -match.score)[:top_k]


def check_layer(memory: Container, layer: int | None) -> int:
    """Return ``layer``, by default the last one with landmarks. Raises ``InvalidArgument`` for one without."""
    layers = memory.spec.index_layers
    if not layers:
        raise InvalidArgument("no layer of this memory has landmarks, so it cannot be searched.")
    if layer is not None and (isinstance(layer, bool) or layer not in layers):
        listed = ", ".join(map(str, layers))
        raise InvalidArgument(f"layer {layer!r} has no landmarks to search; layers with landmarks: {listed}.")
    return layers[-1] if layer is None else layer


def _check(spec: MemorySpec, queries: Tensor, top_k: int) -> None:
    check_tensor("queries", queries)
    if queries.dim() != 3 or queries.shape[-1] != spec.key_dim or not len(queries) or len(queries) % spec.key_heads:
        raise InvalidArgument(
            f"expected queries [H, T, {spec.key_dim}] with H a multiple of {spec.key_heads} (the key heads of the "
            f"memory), got {list(queries.shape)}."
        )
    if not queries.shape[1]:
        raise InvalidArgument("queries must hold at least one vector.")
    check_numbers("queries", queries)
    check_whole("top_k", top_k, 1, 2**31 - 1)


def _scored(document: Document, queries: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return all complete blocks ``[N]``, and their mean scores over heads and queries ``[N]``."""
    view, there = document.layer(layer), document.complete_blocks
    total, blocks = torch.zeros(len(there)), torch.empty(0, dtype=torch.int64)
    for piece in queries.split(max(1, AT_ONCE // max(1, len(queries) * len(there))), dim=1):
        scores, blocks = view.score(piece, allowed=there)  # fixed, because another thread may append meanwhile
        total[blocks - there.start] += scores.sum(1).mean(0)
    return blocks, total[blocks - there.start] / queries.shape[1]
