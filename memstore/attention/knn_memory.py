"""The memory of a kNN layer in training: the last tokens of each row, first in, first out, in plain tensors.

A row streams one document; ``clear`` forgets it before the next one. Tokens lie in a ring. So nothing moves when it is
full, and a token that left cannot be found. Search is exact. One pass finds the largest score of each run of ``RUN``
tokens. The best ``k`` tokens lie in the ``k`` runs with the largest of these scores, so only those runs are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.attention.knn import Neighbours
from memstore.errors import InvalidArgument

RUN = 64
"""Tokens of a run, which are compared before any are sorted."""
SCORES = 1 << 22
"""Scores that are computed at once."""
SCORES_OF_A_GPU = 1 << 28
"""The same on a GPU, which waits for the host between products."""


class RecentTokens:
    """Keys and values of the last ``capacity`` tokens of each row."""

    def __init__(
        self,
        rows: int,
        groups: int,
        capacity: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make a memory for ``groups`` key-value heads of size ``dim``."""
        if min(rows, groups, capacity, dim) < 1:
            raise InvalidArgument(
                f"rows, groups, capacity and dim must each be at least 1, not {(rows, groups, capacity, dim)}"
            )
        self.keys = torch.zeros(rows, groups, capacity, dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.added = [0] * rows
        """Tokens that each row was given since it was cleared. Number ``n`` lies in slot ``n % capacity``."""

    def __repr__(self) -> str:
        return f"RecentTokens({len(self.added)} rows of {[len(self.numbers(row)) for row in range(len(self.added))]})"

    @property
    def capacity(self) -> int:
        """Tokens that a row keeps."""
        return self.keys.shape[2]

    def numbers(self, row: int) -> range:
        """Return the numbers of a row's tokens, counted from the beginning of its document."""
        return range(max(0, self.added[row] - self.capacity), self.added[row])

    @torch.no_grad()
    def append(self, tokens: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Add the first ``len(tokens[b])`` of ``keys, values [B, G, T, D]`` to row ``b``; the oldest ones leave.

        The token ids are not kept.
        """
        rows, groups, _, dim = self.keys.shape
        check_states(tokens, keys, values, rows, groups, dim)
        for row, length in enumerate(map(len, tokens)):
            kept = slice(max(0, length - self.capacity), length)
            slots = torch.arange(self.added[row] + kept.start, self.added[row] + length, device=self.keys.device)
            for ring, states in ((self.keys, keys), (self.values, values)):
                ring[row].index_copy_(1, slots % self.capacity, states[row, :, kept].to(ring.dtype))
            self.added[row] += length

    def clear(self, row: int) -> None:
        """Forget one row; the others do not change. Raises ``InvalidArgument`` if the row does not exist."""
        check_row(row, len(self.added))
        self.added[row] = 0

    @torch.no_grad()
    def search(self, queries: Tensor, top_k: int) -> Neighbours:
        """Find the ``top_k`` largest inner products for each of ``queries [B, H, T, D]``: their tokens, best first."""
        check_queries(queries, len(self.keys), self.keys.shape[1], self.keys.shape[3])
        queries = queries.to(self.keys.dtype)
        held = [keys[:, : len(self.numbers(row))] for row, keys in enumerate(self.keys)]
        ids = [nearest(asked, keys, top_k) for asked, keys in zip(queries, held, strict=True)]
        return Neighbours(self.keys, self.values, torch.stack(ids))

    def numbers_of(self, ids: Tensor) -> Tensor:
        """Return numbers ``[B, H, T, K]`` of found tokens, counted from the beginning of the document; -1 for none."""
        added = torch.tensor(self.added, device=ids.device).view(-1, 1, 1, 1)
        age = (added - 1 - ids) % self.capacity
        return torch.where(ids < 0, -1, added - 1 - age)

    def reorder(self, rows: Tensor) -> None:
        """Let row ``b`` be the former row ``rows[b]``."""
        self.keys, self.values = (x[rows.to(x.device)] for x in (self.keys, self.values))
        self.added = [self.added[row] for row in rows.tolist()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to resume from, as tensors."""
        return {"keys": self.keys, "values": self.values, "added": torch.tensor(self.added)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take a state of ``state_dict``. Raises ``InvalidArgument`` if it has another size."""
        if state["keys"].shape != self.keys.shape or len(state["added"]) != len(self.added):
            raise InvalidArgument(
                f"expected the state of a memory of shape {list(self.keys.shape)}, got "
                f"{list(state['keys'].shape)}; use the batch size and memory size that the training began with"
            )
        self.keys.copy_(state["keys"])
        self.values.copy_(state["values"])
        self.added = state["added"].tolist()


def check_states(tokens: Sequence[Tensor], keys: Tensor, values: Tensor, rows: int, groups: int, dim: int) -> None:
    """Raise ``InvalidArgument`` unless each of ``tokens`` has keys and values ``[rows, groups, T, dim]``."""
    given, longest = keys.shape, max(map(len, tokens), default=0)
    fits = keys.dim() == 4 and values.shape == given and (given[0], given[1], given[3]) == (rows, groups, dim)
    if not fits or len(tokens) != rows or longest > given[2]:
        raise InvalidArgument(
            f"expected keys and values [{rows}, {groups}, T, {dim}], and at most T tokens for each row. Got keys "
            f"{list(given)}, values {list(values.shape)} and {list(map(len, tokens))} tokens for {rows} rows"
        )


def check_queries(queries: Tensor, rows: int, groups: int, dim: int) -> None:
    """Raise ``InvalidArgument`` unless the shape is ``[rows, H, T, dim]``, with heads a multiple of ``groups``."""
    given = queries.shape
    if len(given) != 4 or (given[0], given[3]) != (rows, dim) or given[1] % groups:
        raise InvalidArgument(
            f"expected queries [{rows}, H, T, {dim}] with H a multiple of {groups}, got {list(given)}: pass one "
            "row for each document of the memory"
        )


def check_row(row: int, rows: int) -> None:
    """Raise ``InvalidArgument`` if the row does not exist."""
    if not 0 <= row < rows:
        raise InvalidArgument(f"row {row} does not exist: rows are numbered from 0 to {rows - 1}")


def nearest(queries: Tensor, keys: Tensor, top_k: int) -> Tensor:
    """Return rows of ``keys [G, N, D]`` with the ``top_k`` largest products for each of ``queries [H, T, D]``.

    They are ``[H, T, top_k]`` int64, the best first, then -1.
    """
    heads, tokens, dim = queries.shape
    groups, held, _ = keys.shape
    ids = torch.full((groups, heads // groups * tokens, top_k), -1, dtype=torch.int64, device=queries.device)
    step = max(1, (SCORES if keys.device.type == "cpu" else SCORES_OF_A_GPU) // max(1, held))
    few = min(top_k, held)
    for group, asked in enumerate(queries.reshape(groups, -1, dim) if held else ()):
        ids[group, :, :few] = torch.cat([largest(part @ keys[group].T, few) for part in asked.split(step)])
    return ids.view(heads, tokens, top_k)


def largest(scores: Tensor, top_k: int) -> Tensor:
    """Return columns of the ``top_k`` largest of ``scores [R, N]``, the largest first: ``[R, top_k]``. Exact."""
    rows, count = scores.shape
    runs = count // RUN
    if runs <= 2 * top_k:
        return scores.topk(top_k, dim=1).indices
    whole = scores[:, : runs * RUN].view(rows, runs, RUN)
    chosen = whole.amax(2).topk(top_k, dim=1, sorted=False).indices  # [R, k]
    columns = (chosen.unsqueeze(2) * RUN + torch.arange(RUN, device=scores.device)).flatten(1)
    rest = torch.arange(runs * RUN, count, device=scores.device).expand(rows, -1)
    columns = torch.cat([columns, rest], 1)
    return columns.gather(1, scores.gather(1, columns).topk(top_k, dim=1).indices)
