"""``index="auto"``: exact while that is fast, and FAISS where it was shown to find enough.

No approximation is used on trust. When an index has grown large, FAISS learns its keys in a thread, while searches
stay exact; then the last queries that were really asked are searched both ways. FAISS takes over with the fewest
inverted lists that reach the recall asked for, and never where none of the settings does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index.contract import Found, IndexCapabilities, VectorIndex
from memstore.index.exact import ExactIndex
from memstore.index.faiss import FaissIndex
from memstore.index.faiss_base import Base

LARGE = 1 << 24
"""Numbers in the keys of one head (262,144 keys of 64) from which on exact search takes longer than it should."""
RECALL = 0.95
TOP_K = 8
LOGGED = 64
"""Queries of each head that are remembered; a quarter of them is enough to judge by."""
LARGEST_SHARE = 4
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
        self._sizes = (key_heads, key_dim, keys_per_block)
        self._why = self._obstacle(torch.device(device))
        self._index: ExactIndex = ExactIndex(*self._sizes, dtype, device)
        self._queries: deque[Tensor] = deque(maxlen=LOGGED)
        self._judged: Base | None = None
        self._measured: float | None = None

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
        index = self._index
        if isinstance(index, FaissIndex):
            if index.base is not self._judged and len(self._queries) >= LOGGED // 4:
                self._judge(index)
            if index.base is not self._judged or self._measured is None or self._measured < self.recall:
                found = ExactIndex.search(index, queries, k, allowed=allowed)
            else:
                found = index.search(queries, k, allowed=allowed)
        else:
            found = index.search(queries, k, allowed=allowed)
        self._log(queries)
        return found

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score of every block; see ``VectorIndex``."""
        return self._index.score(queries, allowed=allowed)

    def finish(self) -> None:
        """Wait for FAISS, and judge it if there were queries to judge it by."""
        self._index.finish()
        if isinstance(self._index, FaissIndex) and self._queries:
            self._judge(self._index)

    def close(self) -> None:
        """Wait for the thread, if there is one."""
        self._index.close()

    def facts(self) -> Mapping[str, Any]:
        """What it has picked, and why."""
        return {**self._index.facts(), "kind": "auto", "picked": self._picked, "why": self._reason()}

    def save(self, path: Path) -> None:
        """Write the keys to the file ``path``: what FAISS knows is learned and judged again."""
        ExactIndex.save(self._index, path)

    def load(self, path: Path) -> None:
        """Replace the content by what ``save`` wrote. Raises ``NotFound`` or ``DamagedError``, with nothing changed."""
        index = ExactIndex(*self._sizes, self._index.dtype, self._index.device)
        index.load(path)
        self._index.close()
        self._index, self._judged, self._measured = index, None, None
        self._grow()

    def _grow(self) -> None:
        """Let FAISS learn the keys once there are many."""
        _, dim, keys_per_block = self._sizes
        keys = len(self) * keys_per_block
        if not self._why and not isinstance(self._index, FaissIndex) and keys * dim >= LARGE:
            lists = 1 << max(4, round(keys**0.5).bit_length())
            self._index = FaissIndex.around(self._index, f"IVF{lists},SQ8")

    @property
    def _picked(self) -> str:
        if isinstance(self._index, FaissIndex) and self._measured is not None and self._measured >= self.recall:
            return f"faiss:{self._index.settings.factory}"
        return "exact"

    def _reason(self) -> str:
        if self._why:
            return self._why
        if not isinstance(self._index, FaissIndex):
            return f"{len(self):,} blocks: exact search is fast"
        if self._measured is None:
            return "FAISS is learning, or there were not enough queries to judge it by"
        lists = f"reading {self._index.settings.nprobe} lists of {self._index.settings.factory}"
        return f"recall {self._measured:.3f} on the last queries by {lists}; {self.recall:g} is asked for"

    def _obstacle(self, device: torch.device) -> str:
        if self.recall >= 1:
            return "a recall of 1 was asked for"
        if device.type != "cpu":
            return f"keys on {device} are searched exactly"
        return "" if find_spec("faiss") else "FAISS is not installed: pip install 'torch-memstore[faiss]'"

    def _log(self, queries: Tensor) -> None:
        """Remember the last query of each head, grouped by key heads: ``[G, H / G, D]``."""
        if queries.shape[1]:
            self._queries.append(queries[:, -1].detach().cpu().float().reshape(self._sizes[0], -1, self._sizes[1]))

    def _judge(self, index: FaissIndex) -> None:
        """Find the fewest lists that reach the recall asked for, on the queries that were asked last."""
        self._judged, self._measured = index.base, None
        if index.base is None:
            return
        queries = torch.cat(list(self._queries), 1)  # [G, R, D]
        truth = ExactIndex.search(index, queries, TOP_K).scores
        lists = index.lists
        nprobe = max(1, lists // 64)
        while nprobe <= lists // LARGEST_SHARE:
            index.settings = index.settings._replace(nprobe=nprobe)
            found = index.search(queries, TOP_K).scores
            # Equal blocks are equally right, so the last score decides.
            self._measured = float((found >= truth[..., -1:]).float().mean())
            if self._measured >= self.recall:
                return
            nprobe *= 2


def _recall(settings: str) -> float:
    name, _, value = settings.partition("=")
    try:
        recall = float(value) if settings else RECALL
    except ValueError:
        recall = -1.0
    if (settings and name != "recall") or not 0 < recall <= 1:
        raise InvalidArgument(f"auto:{settings}: write auto, or auto:recall=0.99 with a number above 0, 1 at most.")
    return recall
