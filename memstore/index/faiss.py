"""Approximate search by FAISS: Flat, SQ, IVF and HNSW behind one contract.

Every block lies in the chunks of an exact index too. FAISS proposes candidates among the blocks of one moment (the
base); those added since are searched exactly (the tail); all winners are scored in float32. When the tail or what has
left grows to a quarter of the base, a thread builds the next base, while searches go on with this one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import checks, faiss_base
from memstore.index.best import PLACES, choose, merge
from memstore.index.contract import Found, IndexCapabilities
from memstore.index.exact import ExactIndex
from memstore.index.faiss_base import TRAINING_KEYS, Base

FEWEST_KEYS = 4096
"""Below as many keys of a head exact search is as fast, and FAISS is not asked."""
LARGEST_TAIL = 4
"""A base is replaced when one of so many blocks is not in it, or has left it."""
FEWEST_WANTED = 16
"""Where a filter leaves fewer of a base than this times the candidates, they are all scored instead."""

_log = logging.getLogger("memstore.index")


class FaissIndex(ExactIndex):
    """``settings`` is a factory string of FAISS with options: see ``faiss_base.Settings``.

    Searches may miss blocks; what is found is there, allowed, and has its true score. ``score`` is that of an exact
    index. Like it, not safe for a search in one thread beside an addition in another.
    """

    capabilities = IndexCapabilities(exact=False, dense=True)

    def __init__(
        self,
        key_heads: int,
        key_dim: int,
        keys_per_block: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        settings: str = "Flat",
    ) -> None:
        super().__init__(key_heads, key_dim, keys_per_block, dtype, device)
        if self.device.type != "cpu":
            raise InvalidArgument(f"The index faiss lies in host memory, not on {self.device}; use 'exact' there.")
        self.settings = faiss_base.parse(settings or "Flat")
        needed = TRAINING_KEYS * faiss_base.lists(faiss_base.make(self.settings.factory, key_dim))
        self._fewest = -(-max(FEWEST_KEYS, needed) // keys_per_block)
        self._base: Base | None = None
        self._covered = 0
        """Place behind the blocks that the base knows."""
        self._building: _Building | None = None
        self._refused = 0

    def __repr__(self) -> str:
        known = 0 if self._base is None else len(self._base.ids) - self._base.hidden
        return f"FaissIndex({self.settings.factory}, {len(self)} blocks, {known} of them in FAISS)"

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, codes and ids, and those of FAISS."""
        return super().nbytes + (0 if self._base is None else self._base.nbytes)

    def add(self, ids: Tensor, keys: Tensor) -> None:
        """Add blocks ``ids [n]`` (int64, new, ascending) with ``keys [n, G, P, D]``. Raises ``InvalidArgument``."""
        super().add(ids, keys)
        self._adopt()
        self._start()

    def remove(self, ids: Tensor) -> None:
        """Remove blocks ``ids [n]``. Raises ``InvalidArgument``, with nothing removed, where one does not exist."""
        super().remove(ids)
        if self._building is not None:
            self._building.end = min(self._building.end, self._end)
        if self._base is not None:
            self._base.drop(ids)
            self._covered = min(self._covered, self._end)

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> Found:
        """Top ``k`` blocks for each of ``queries [H, T, D]``, as far as FAISS proposes them: see ``Found``."""
        checks.check_top_k(k)
        checks.check_allowed(allowed)
        self._adopt()
        base, count = self._base, k * self.settings.refine * min(self.keys_per_block, 4)
        wanted = None if base is None else base.wanted(allowed)
        if base is None or _few(base, wanted, count):
            return super().search(queries, k, allowed=allowed)
        scans = self._scans(allowed, k, self._covered)

        def search(rows: Tensor, head: int) -> Found:
            best = self._search_rows(scans, rows, head, k)
            if len(rows):
                places = base.candidates(rows, head, count, wanted, self.settings)
                scores, _ = self._score_places(places, rows, head)
                best = merge(best, choose(scores, self._ids_at(places), places, k), k)
            return self._settle(best, rows, head)

        return self._each_head(queries, k, search)

    @property
    def base(self) -> Base | None:
        """What FAISS knows; another one each time that it was built."""
        self._adopt()
        return self._base

    def finish(self) -> None:
        """Let FAISS learn every block that it does not know, and wait for it."""
        self._wait()
        stale = self._base is None or self._base.hidden or self._covered < self._end
        if len(self) >= self._fewest and stale:
            self._building = self._build()
            self._wait()

    def close(self) -> None:
        """Wait for the thread, if there is one."""
        self._wait()

    def facts(self) -> Mapping[str, Any]:
        """Its kind and settings, and what FAISS knows of its blocks."""
        known = 0 if self._base is None else len(self._base.ids) - self._base.hidden
        settings = self.settings._asdict() | {"blocks_in_faiss": known, "blocks_searched_exactly": len(self) - known}
        where = {} if self._base is None else {"searched_on": self._base.where}
        return {"kind": "faiss", **settings, **where}

    @property
    def _about(self) -> dict[str, Any]:
        return super()._about | {"index": "faiss", "factory": self.settings.factory}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = super()._tensors()
        if self._base is None or not self._chunks:
            return tensors
        places = torch.cat([_alive_places(number, chunk.alive[: chunk.used]) for number, chunk in self._chunks.items()])
        rows = torch.searchsorted(places, self._base.places)
        rows[~self._base.alive] = -1
        covered = torch.searchsorted(places, torch.tensor([self._covered]))
        return tensors | self._base.tensors() | {"base_rows": rows, "base_ids": self._base.ids, "covered": covered}

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self._wait()
        number = self._next
        super()._take(tensors)
        self._base, self._covered, self._refused = None, 0, 0
        if "base_rows" in tensors:
            heads = faiss_base.read([tensors[f"faiss_{head}"] for head in range(self.key_heads)])
            rows = tensors["base_rows"]
            self._base = Base(heads, tensors["base_ids"], rows + number * PLACES, self.keys_per_block)
            self._base.alive &= rows >= 0
            self._covered = number * PLACES + int(tensors["covered"])

    @property
    def _end(self) -> int:
        """Place behind the last block."""
        if not self._chunks:
            return 0
        number = max(self._chunks)
        return number * PLACES + self._chunks[number].used

    def _ids_at(self, places: Tensor) -> Tensor:
        ids = torch.full_like(places, -1)
        for number, chunk in self._chunks.items():
            here = places.div(PLACES, rounding_mode="floor") == number
            ids[here] = chunk.ids[places[here] % PLACES]
        return ids

    def _outdated(self) -> bool:
        if self._base is None:
            return True
        known = len(self._base.ids) - self._base.hidden
        return max(len(self) - known, self._base.hidden) * LARGEST_TAIL > len(self._base.ids)

    def _start(self) -> None:
        """Let a thread build the next base if it is time to."""
        if self._building is None and len(self) >= max(self._fewest, 2 * self._refused) and self._outdated():
            self._building = self._build()

    def _build(self) -> _Building:
        pieces = [(number, chunk, chunk.alive[: chunk.used].clone()) for number, chunk in self._chunks.items()]
        places = torch.cat([_alive_places(number, alive) for number, _, alive in pieces])
        ids = torch.cat([chunk.ids[: len(alive)][alive] for _, chunk, alive in pieces])
        keys = [(chunk.keys[:, : len(alive)], alive) for _, chunk, alive in pieces]
        return _Building(self.settings.factory, ids, places, keys, self._end)

    def _wait(self) -> None:
        if self._building is not None:
            self._building.join()
            self._adopt()

    def _adopt(self) -> None:
        """Take the next base if it is ready, without the blocks that have left meanwhile."""
        building = self._building
        if building is None or building.is_alive():
            return
        self._building = None
        if building.heads is None:
            self._refused = len(self)
            _log.warning("FAISS could not build %s; search stays exact: %s", self.settings.factory, building.problem)
            return
        base = Base(building.heads, building.ids, building.places, self.keys_per_block)
        there = base.places < building.end
        for number in base.places.div(PLACES, rounding_mode="floor").unique().tolist():
            here = base.places.div(PLACES, rounding_mode="floor") == number
            chunk = self._chunks.get(number)
            rows = base.places[here & there] % PLACES
            there[here & there] = False if chunk is None else chunk.alive[rows]
        base.hide((~there).nonzero().squeeze(1))
        self._base, self._covered = base, building.end


class _Building(threading.Thread):
    """Builds a base of blocks as they were when it was started.

    Rows are written again only behind ``end``, which falls when blocks leave there: what is read there may be of any
    moment, and is not used.
    """

    def __init__(
        self, factory: str, ids: Tensor, places: Tensor, keys: Sequence[tuple[Tensor, Tensor]], end: int
    ) -> None:
        super().__init__(name="memstore-faiss")
        self.ids, self.places, self.end = ids, places, end
        self.heads: list[Any] | None = None
        self.problem = ""
        self._factory, self._keys = factory, keys
        self.start()

    def run(self) -> None:
        """Train and fill one structure for each head, on one thread: the others belong to whoever searches."""
        faiss_base.library().omp_set_num_threads(1)
        try:
            pieces = [keys if bool(alive.all()) else keys[:, alive] for keys, alive in self._keys]
            heads = range(pieces[0].shape[0])
            self.heads = [faiss_base.trained(self._factory, pieces, head) for head in heads]
        except (RuntimeError, MemoryError) as error:
            self.problem = str(error)
        self._keys = ()


def _few(base: Base, wanted: Tensor | None, count: int) -> bool:
    """Whether so few blocks of the base may be found that scoring them all is cheaper, and certain."""
    left = len(base.ids) if wanted is None else int(wanted.sum())
    return left < FEWEST_WANTED * count


def _alive_places(number: int, alive: Tensor) -> Tensor:
    return alive.nonzero().squeeze(1) + number * PLACES
