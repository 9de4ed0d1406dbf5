"""``index="auto"``: exact search while it is fast, then clusters that were measured to find enough.

No approximation is used unmeasured. When an index has become large, a thread makes its clusters (``cluster_index.py``)
from its keys and from real queries, while searches stay exact. Clusters take over with the fewest lists that reach the
requested recall on held-out queries. They do not take over if this needs so many lists that exact search is as fast.
Among all kinds measured on attention keys, landmarks and clustered keys, clusters take the least time for the same
recall: ``docs/notes/index.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument
from memstore.index import files
from memstore.index.cluster_index import ENOUGH, ClusterBase, ClusterIndex
from memstore.index.contract import SearchResult

LARGE = 1 << 24
"""Numbers in the keys of one head (262,144 keys of 64) above which exact search takes too long."""
RECALL = 0.95
LARGEST_SHARE = 16
"""Reading more than one in so many lists is no faster than exact search."""


class AutoIndex(ClusterIndex):
    """``settings`` is empty or ``recall=0.99``: the share of the true best eight blocks that a search must find."""

    capabilities = replace(ClusterIndex.capabilities, devices=True)

    def _prepare(self, settings: str) -> None:
        recall = _recall(settings)
        self._start(self._new_tail(), recall)
        self._obstacle = _obstacle(recall, self.device)
        self._large = False
        self._refused: ClusterBase | None = None

    def add(self, ids: Tensor, keys: Tensor) -> None:
        super().add(ids, keys)
        self._grow()

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        """Return the top ``k`` blocks, exactly or by clusters measured to find enough; see ``VectorIndex``."""
        # A small index does not learn, so it keeps no queries.
        if not self._large:
            return self._tail.search(queries, k, allowed=allowed)
        return super().search(queries, k, allowed=allowed)

    def facts(self) -> Mapping[str, Any]:
        picked = "exact" if self._base is None else f"clusters:{self.wanted_recall:g}"
        return {**super().facts(), "kind": "auto", "picked": picked, "why": self._reason()}

    def save(self, path: Path) -> None:
        """Write the index to the file ``path``: as an exact index, or with its clusters, which take minutes to make."""
        self._adopt(wait=True)
        if self._base is None:
            self._tail.save(path)
        else:
            super().save(path)

    def load(self, path: Path) -> None:
        sizes = {name: value for name, value in self._about.items() if name != "index"}
        content = files.load(path, sizes)
        match content.facts.get("index"):
            case "clusters" if not self._obstacle:
                self._take(content)
            case "exact":
                self._adopt(wait=True)
                self._start(self._new_tail(), self.wanted_recall)
                self._tail.take(content)
            case other:
                raise DamagedError(
                    f"{path} belongs to another index: its index is {other!r}, not 'exact'. Rebuild the index."
                )
        self._large, self._refused = self._base is not None, None
        self._grow()

    def _grow(self) -> None:
        """Allow clusters once there are many keys."""
        large = len(self) * self.keys_per_block * self.key_dim >= LARGE
        self._large |= large and not self._obstacle

    def _consider(self) -> None:
        if self._large:
            super()._consider()

    def _refuses(self, base: ClusterBase) -> bool:
        refused = self._base is None and base.probes * LARGEST_SHARE > len(base.heads[0].centres)
        self._refused = base if refused else self._refused
        return refused

    def _reason(self) -> str:
        if not self._large:
            return self._obstacle or f"{len(self):,} blocks: exact search is fast"
        base, refused = self._base, self._refused
        if base is not None:
            return (
                f"the recall on held-out queries was {base.recall:.3f}, {_looked(base)}; the setting asks for "
                f"{self.wanted_recall:g}"
            )
        if refused is not None:
            return (
                f"the recall of {refused.recall:.3f} was reached {_looked(refused)}, which is no faster than "
                "exact search"
            )
        return f"clusters are built once there were {ENOUGH} different queries"


def _obstacle(recall: float, device: torch.device) -> str:
    """Return why no clusters may be made; empty if they may."""
    if recall >= 1:
        return "the setting asks for a recall of 1"
    if device.type != "cpu":
        return f"keys on {device} are searched exactly"
    return "" if find_spec("faiss") else "FAISS is not installed: pip install 'torch-memstore[faiss]'"


def _looked(base: ClusterBase) -> str:
    return f"looking into {base.probes} of {len(base.heads[0].centres)} lists"


def _recall(settings: str) -> float:
    name, _, value = settings.partition("=")
    try:
        recall = float(value) if settings else RECALL
    except ValueError:
        recall = -1.0
    if (settings and name != "recall") or not 0 < recall <= 1:
        raise InvalidArgument(f"auto:{settings}: write auto, or auto:recall=0.99 with a number above 0 and at most 1.")
    return recall
