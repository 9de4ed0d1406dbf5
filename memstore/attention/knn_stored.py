"""The memory of a kNN layer in a ``Memory``: any store, any index, a document for each row.

Each token's key is a landmark of its block, so ``keys_per_block`` is ``block_size``. An index finds blocks by the best
of their keys. The ``k`` best tokens lie in the ``k`` best blocks, so these blocks are gathered and their tokens
compared. With an exact index the result is exact. Tokens of an incomplete last block are not in the index; they are
always compared. The spec's ``capacity`` is the size of the memory in blocks. The oldest blocks leave, and no number is
used again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.knn import Neighbours
from memstore.attention.knn_memory import check_queries, check_states, nearest
from memstore.device_copies import on_host
from memstore.errors import InvalidArgument
from memstore.memory import Document, Fingerprint, MemorySpec

FIELDS = ("k", "v")


def token_spec(
    groups: int,
    dim: int,
    *,
    fingerprint: Fingerprint,
    capacity: int | None = None,
    block_size: int = 64,
    dtype: str = "float32",
) -> MemorySpec:
    """Return the layout of a memory for one layer with ``groups`` key-value heads of size ``dim``.

    ``capacity`` is the size of a document in tokens, a multiple of ``block_size``; None means no limit.
    """
    if capacity is not None and capacity % block_size:
        raise InvalidArgument(f"capacity must be a multiple of block_size {block_size}, not {capacity}")
    return MemorySpec(
        layers=1,
        fields=dict.fromkeys(FIELDS, (groups, block_size, dim)),
        index_layers=(0,),
        key_heads=groups,
        key_dim=dim,
        block_size=block_size,
        keys_per_block=block_size,
        dtype=dtype,
        capacity=None if capacity is None else capacity // block_size,
        fingerprint=fingerprint,
    )


class StoredTokens:
    """The tokens of documents as the memory of a kNN layer, one document for each row of a batch."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Raises ``InvalidArgument`` if a memory was not made with ``token_spec``."""
        if not documents:
            raise InvalidArgument("a memory of tokens needs one document for each row of the batch, got no document")
        self.documents = list(documents)
        self.gathered: list[list[int]] = [[] for _ in documents]
        """The blocks that the last search gathered, for each row."""
        self.tiers: list[dict[int, str]] | None = None
        """The tiers of the gathered blocks before the last search, for each row; None if nobody asks for them."""
        self.asked = 0.0
        """The time, by ``time.perf_counter``, when the last search had found blocks and began to gather them."""
        self.spec = documents[0].memory.spec
        if self.spec.layers != 1 or set(self.spec.fields) != set(FIELDS):
            raise InvalidArgument(
                f"expected a memory of single tokens, made with token_spec; got one of {self.spec.layers} layers "
                f"with the fields {list(self.spec.fields)}"
            )

    @torch.no_grad()
    def search(self, queries: Tensor, top_k: int) -> Neighbours:
        """Find the ``top_k`` tokens with the largest inner products for each of ``queries [B, H, T, D]``, best first.

        Raises ``InvalidArgument`` for queries that do not fit, and the errors of ``LayerView.search`` and ``gather``.
        """
        groups, _, dim = self.spec.fields["k"]
        check_queries(queries, len(self.documents), groups, dim)
        rows = [self._search_row(row, q, top_k) for row, q in enumerate(queries)]
        longest = max(row.keys.shape[1] for row in rows)
        keys, values = (
            torch.stack([F.pad(row[part], (0, 0, 0, longest - row[part].shape[1])) for row in rows])
            for part in range(2)
        )
        return Neighbours(keys, values, torch.stack([row.ids for row in rows]))

    def numbers_of(self, ids: Tensor) -> Tensor:
        """Return numbers ``[B, H, T, K]`` of the last found tokens, from the document's beginning; -1 for none."""
        size, most = self.spec.block_size, max(1, *map(len, self.gathered))
        blocks = torch.tensor([[*row, *[-1] * (most - len(row))] for row in self.gathered])  # [B, most]
        rows = torch.arange(len(blocks))[:, None, None, None]
        ids = ids.cpu()
        return torch.where(ids < 0, -1, blocks[rows, ids.clamp(min=0) // size] * size + ids % size)

    @torch.no_grad()
    def append(self, tokens: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Add ``tokens[b] [t_b]`` to row ``b`` with the first ``t_b`` of ``keys, values [B, G, T, D]``, and commit.

        Raises ``InvalidArgument`` for states that do not fit the tokens, before any commit, and the errors of
        ``Document.append``. If one row fails, the rows before it are committed.
        """
        groups, _, dim = self.spec.fields["k"]
        check_states(tokens, keys, values, len(self.documents), groups, dim)
        for row, (document, ids) in enumerate(zip(self.documents, tokens, strict=True)):
            states = torch.stack([keys[row, :, : len(ids)], values[row, :, : len(ids)]])  # [2, G, t, D]
            states, ids = on_host([states, ids.to(states.device)])
            with document.append(ids) as batch:
                if batch.blocks:
                    k, v = self._in_blocks(document, states, len(batch.blocks))
                    batch.put(0, landmarks=k, k=k, v=v)

    def _in_blocks(self, document: Document, states: Tensor, count: int) -> Tensor:
        """Put states ``[2, G, t, D]`` behind the incomplete last block: ``[2, n, G, S, D]``, padded with zeros."""
        size = self.spec.block_size
        if waiting := len(document) % size:
            last = document.layer(0).gather([document.n_blocks - 1])
            before = torch.stack([last[name][0, :, :waiting] for name in FIELDS])
            states = torch.cat([before.to(states.dtype), states], 2)
        padded = F.pad(states, (0, 0, 0, count * size - states.shape[2]))
        blocks: Tensor = padded.unflatten(2, (count, size))
        return blocks.transpose(1, 2)

    def _search_row(self, row: int, queries: Tensor, top_k: int) -> Neighbours:
        document = self.documents[row]
        groups, size, dim = self.spec.fields["k"]
        view, device = document.layer(0), queries.device
        queries = queries.detach().to(torch.device("cpu") if view.index is None else view.index.device).float()
        found = view.search(queries, top_k).blocks.cpu()
        blocks = found[found >= 0].unique().tolist()
        waiting = len(document) % size
        if waiting:
            blocks.append(document.n_blocks - 1)
        self.gathered[row] = blocks
        if not row:
            self.asked = time.perf_counter()
        if self.tiers is not None:  # before gathering, which moves them to a faster tier
            self.tiers[row] = dict(zip(blocks, view.tiers(blocks), strict=True))
        if not blocks:
            none = torch.zeros(groups, 0, dim, device=device)
            return Neighbours(none, none, nearest(queries.to(device), none, top_k))
        states = view.gather(blocks, device=device)
        held = len(blocks) * size - (size - waiting if waiting else 0)
        keys, values = (states[name].transpose(0, 1).flatten(1, 2)[:, :held].float() for name in FIELDS)
        return Neighbours(keys, values, nearest(queries.to(device), keys, top_k))
