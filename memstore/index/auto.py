"""``index="auto"``: exact while that is fast, and clusters where they were shown to find enough.

No approximation is used on trust. When an index has grown large, its clusters (``cluster_index.py``) are made in a
thread, from its keys and the queries that were really asked, while searches stay exact. They take over with the fewest
lists that find the share asked for, on queries that were put aside; and not at all where that takes so many lists that
exact search is as fast. Of all kinds that were measured on keys of attention, on landmarks and on clustered keys, they
take the least time for the same recall: ``docs/notes/index.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument
from memstore.index.cluster_index import ENOUGH, Base, ClusterIndex
from memstore.index.contract import Found, IndexCapabilities, VectorIndex
from memstore.index.exact import ExactIndex

LARGE = 1 << 24
"""Numbers in the keys of one head (262,144 keys of 64) from which on exact search takes longer than it should."""
RECALL = 0.95
LARGEST_SHARE = 16
"""Reading more than one of so many lists is no faster than exact search."""


class AutoIndex(VectorIndex):
    """``settings`` is empty or ``recall=0.99``: the share of the true best eight that a search has to find."""

    capabilities = IndexCapabilities(exact=False, dense=True)

    def __init__(
        self,
        key_heads: int,
        key_dim: int,
        keys_per_block: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        settings: str = "",
    ) -> None:
        self.recall = _recall(settings)
        self._why = self._obstacle(torch.device(device))
        self._index: ExactIndex | ClusterIndex = ExactIndex(key_heads, key_dim, keys_per_block, dtype, device)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of whatever it has picked."""
        return self._index.nbytes

    def add(self, ids: Tensor, keys: Tensor) -> None:
        """Add blocks; see ``VectorIndex``."""
        self._index.add(ids, keys)
        self._grow()

    def remove(self, ids: Tensor) -> None:
        """Remove blocks; see ``VectorIndex``."""
        self._index.remove(ids)

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> Found:
        """Top ``k`` blocks, exactly or by what was shown to find enough of them; see ``VectorIndex``."""
        return self._index.search(queries, k, allowed=allowed)

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score of every block; see ``VectorIndex``."""
        return self._index.score(queries, allowed=allowed)

    def finish(self) -> None:
        """Make clusters now, if there are enough keys and queries, and wait for them."""
        self._index.finish()

    def close(self) -> None:
        """Wait for the thread, if there is one."""
        self._index.close()

    def facts(self) -> Mapping[str, Any]:
        """What it has picked, and why."""
        picked = "exact" if self._base is None else f"clusters:{self.recall:g}"
        return {**self._index.facts(), "kind": "auto", "picked": picked, "why": self._reason()}

    def save(self, path: Path) -> None:
        """Write the index to the file ``path``, with its clusters where it has some."""
        (self._exact if self._base is None else self._index).save(path)

    def load(self, path: Path) -> None:
        """Replace the content by what ``save`` wrote. Raises ``NotFound`` or ``DamagedError``, with nothing changed."""
        exact = self._exact
        index = ExactIndex(exact.key_heads, exact.key_dim, exact.keys_per_block, exact.dtype, exact.device)
        made: ExactIndex | ClusterIndex = index if self._why else self._clusters(index)
        try:
            made.load(path)
        except DamagedError:  # or there are no clusters in it
            made = index
            made.load(path)
        self._index.close()
        self._index = made
        self._grow()

    @property
    def _base(self) -> Base | None:
        return self._index.base if isinstance(self._index, ClusterIndex) else None

    @property
    def _exact(self) -> ExactIndex:
        """What is searched exactly: everything, where there are no clusters."""
        return self._index.tail if isinstance(self._index, ClusterIndex) else self._index

    def _clusters(self, index: ExactIndex) -> ClusterIndex:
        return ClusterIndex.around(index, f"{self.recall:g}", largest_share=LARGEST_SHARE)

    def _grow(self) -> None:
        """Let clusters be made once there are many keys."""
        index = self._index
        large = len(index) * index.keys_per_block * index.key_dim >= LARGE
        if large and not self._why and isinstance(index, ExactIndex):
            self._index = self._clusters(index)

    def _reason(self) -> str:
        if self._why or isinstance(self._index, ExactIndex):
            return self._why or f"{len(self):,} blocks: exact search is fast"
        base, refused = self._base, self._index.refused
        if base is not None:
            return f"recall {base.recall:.3f} on queries put aside, {_looked(base)}; {self.recall:g} is asked for"
        if refused is not None:
            return f"recall {refused.recall:.3f} was reached {_looked(refused)}, which is no faster than exact search"
        return f"clusters are made of the keys once there were {ENOUGH} different queries to make them for"

    def _obstacle(self, device: torch.device) -> str:
        if self.recall >= 1:
            return "a recall of 1 was asked for"
        if device.type != "cpu":
            return f"keys on {device} are searched exactly"
        return "" if find_spec("faiss") else "FAISS is not installed: pip install 'torch-memstore[faiss]'"


def _looked(base: Base) -> str:
    return f"looking into {base.probes} of {len(base.heads[0].centres)} lists"


def _recall(settings: str) -> float:
    name, _, value = settings.partition("=")
    try:
        recall = float(value) if settings else RECALL
    except ValueError:
        recall = -1.0
    if (settings and name != "recall") or not 0 < recall <= 1:
        raise InvalidArgument(f"auto:{settings}: write auto, or auto:recall=0.99 with a number above 0, 1 at most.")
    return recall
