"""Approximate search by FAISS: Flat, SQ, IVF and HNSW behind one contract.

Every block is also in the chunks of an exact index: FAISS only proposes candidates, which are scored in float32. So
every score is true, a filter that leaves few blocks is exact, and ``score`` is as in an exact index. The price is a
second copy of the keys. The FAISS structure is a base (see ``rebuilt.py``); the tail is searched exactly. When the
tail, or the removed part, grows to a quarter of the base, the next base is made.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import contract
from memstore.index.chunks import PLACES
from memstore.index.contract import IndexCapabilities, SearchResult
from memstore.index.exact import BestBlocks, ExactIndex, choose, merge
from memstore.index.rebuilt import BaseBlocks, Rebuild, library

FEWEST_KEYS = 4096
"""With fewer keys of a head exact search is as fast, and FAISS is not used."""
LARGEST_TAIL = 4
"""A base is replaced when one block in so many is missing from it, or was removed."""
FEWEST_WANTED = 16
"""If a filter leaves fewer blocks of a base than this times the candidates, all of them are scored."""
ADDED_KEYS = 1 << 16
"""Keys that are converted and added at a time."""
TRAINING_KEYS = 39
"""Least keys for each list for training, as FAISS wants."""
MOST_TRAINING_KEYS = 64
"""Most keys for each list: k-means over a million keys and 4,096 lists takes minutes. FAISS's own limit is 256."""
LARGEST_NUMBER = 1 << 22
"""Limit for lists, links and candidates: FAISS allocates all of them before there are keys."""
FEWEST_LINKS = 2
"""Least links of a key in HNSW: with fewer, FAISS ends the process."""
Array = npt.NDArray[Any]

_log = logging.getLogger("memstore.index")


class FaissIndex(ExactIndex):
    """``settings`` is a factory string of FAISS with options after semicolons: see ``Settings``.

    ``score`` is as in an exact index.
    """

    capabilities = IndexCapabilities(exact=False, dense=True)
    kind = "faiss"

    def _prepare(self, settings: str) -> None:
        super()._prepare("")
        self.settings = parse(settings or "Flat")
        made = make(self.settings.factory, self.key_dim)
        needed = TRAINING_KEYS * lists(made)
        self._fewest = -(-max(FEWEST_KEYS, needed) // self.keys_per_block)
        self._base: _FaissBase | None = None
        self._covered = 0
        """The place after the blocks in the base."""
        self._rebuild: Rebuild[_FaissBase] = Rebuild()
        self._covered_next = 0
        """The same for the base being made."""
        self._refused = 0

    def __repr__(self) -> str:
        return f"FaissIndex({self.settings.factory}, {len(self)} blocks, {self._known} of them in FAISS)"

    @property
    def _known(self) -> int:
        return 0 if self._base is None else len(self._base)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._base is None else self._base.nbytes)

    def add(self, ids: Tensor, keys: Tensor) -> None:
        super().add(ids, keys)
        self._adopt()
        if not self._rebuild.running and len(self) >= max(self._fewest, 2 * self._refused) and self._outdated():
            self._begin()

    def remove(self, ids: Tensor) -> None:
        super().remove(ids)
        self._rebuild.note_removed(ids)
        # Rows at the end are free again. Blocks written there next are not in the base being made.
        self._covered_next = min(self._covered_next, self._chunks.end)
        if self._base is not None:
            self._base.drop(ids)
            self._covered = min(self._covered, self._chunks.end)

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        contract.check_top_k(k)
        contract.check_allowed(allowed)
        self._adopt()
        base, count = self._base, k * self.settings.refine * min(self.keys_per_block, 4)
        filtered = None if base is None else base.filter(allowed)
        left = 0 if base is None else len(base) if filtered is None else int(filtered.sum())
        if base is None or left < FEWEST_WANTED * count:
            return super().search(queries, k, allowed=allowed)
        heads = []
        for head, (rows, best) in enumerate(self._tails(queries, k, allowed)):
            if len(rows):
                places = base.candidates(rows, head, count, filtered, self.settings)
                scores, _ = self._chunks.score(places, rows, head)
                best = merge(best, choose(scores, self._chunks.ids_at(places), places, k), k)
            heads.append(self._settle(best, rows, head))
        return SearchResult.of_heads(heads, queries)

    def _tails(self, queries: Tensor, k: int, allowed: range | Tensor | None) -> Iterator[tuple[Tensor, BestBlocks]]:
        """Return the queries ``[R, D]`` of each key head with the best blocks that the base does not cover."""
        grouped = self._grouped(queries)
        if self._way(k) == "c":
            keys = self._chunks.in_c(allowed, grouped.shape[1], self._covered)
            return zip(grouped, self._best_in_c(keys, grouped, k), strict=True)
        scans = self._scans(allowed, self._covered)
        return ((rows, self._search_rows(scans, rows, head, k)) for head, rows in enumerate(grouped))

    @property
    def base(self) -> _FaissBase | None:
        """Return the FAISS structure; each build gives another object."""
        self._adopt()
        return self._base

    def finish(self) -> None:
        self._adopt(wait=True)
        stale = self._base is None or self._base.removed or self._covered < self._chunks.end
        if len(self) >= self._fewest and stale:
            self._begin()
            self._adopt(wait=True)

    def close(self) -> None:
        self._rebuild.wait()

    def facts(self) -> Mapping[str, Any]:
        counts = {"blocks_in_faiss": self._known, "blocks_searched_exactly": len(self) - self._known}
        return {"kind": self.kind, **self.settings._asdict(), **counts}

    @property
    def _about(self) -> dict[str, Any]:
        return super()._about | {"factory": self.settings.factory}

    def _tensors(self) -> dict[str, Tensor]:
        tensors, base = super()._tensors(), self._base
        if base is None or not len(self):
            return tensors
        places = self._chunks.places()
        rows = torch.searchsorted(places, base.places)
        rows[~base.alive] = -1
        covered = torch.searchsorted(places, torch.tensor([self._covered]))
        heads = {f"faiss_{head}": each for head, each in enumerate(base.serialized())}
        return tensors | heads | {"base_rows": rows, "base_ids": base.ids, "covered": covered}

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self._adopt(wait=True)
        first = self._chunks.next_number * PLACES
        super()._take(tensors)
        self._base, self._covered, self._refused = None, 0, 0
        if "base_rows" in tensors:
            # FAISS does not check what it reads; the file's checksums were checked.
            heads = [library().deserialize_index(tensors[f"faiss_{head}"].numpy()) for head in range(self.key_heads)]
            rows = tensors["base_rows"]
            self._base = _FaissBase(heads, tensors["base_ids"], rows + first, self.keys_per_block)
            self._base.alive &= rows >= 0
            self._base.removed = int((rows < 0).sum())
            self._covered = first + int(tensors["covered"])

    def _outdated(self) -> bool:
        if self._base is None:
            return True
        changed = max(len(self) - len(self._base), self._base.removed)
        return changed * LARGEST_TAIL > len(self._base.ids)

    def _begin(self) -> None:
        """Let a thread make a base of the current blocks."""
        chunks = self._chunks.by_number.values()
        # Copies would take as much memory again. Rows are overwritten only after ``_covered_next``, and only after
        # their blocks were removed. Whatever the thread reads there is dropped when its base is adopted.
        keys = [(chunk.keys[:, : chunk.used], chunk.alive[: chunk.used].clone()) for chunk in chunks]
        ids, places = torch.cat([chunk.live() for chunk in chunks]), self._chunks.places()
        work = partial(_make_base, self.settings.factory, keys, ids, places, self.keys_per_block)
        self._covered_next = self._chunks.end
        self._rebuild.begin(work)

    def _adopt(self, *, wait: bool = False) -> None:
        """Take the next base if it is ready."""
        try:
            base = self._rebuild.take(wait=wait)
        except (RuntimeError, MemoryError) as error:
            self._refused = len(self)
            _log.warning("FAISS could not build %s; search stays exact: %s", self.settings.factory, error)
            return
        if base is not None:
            self._base, self._covered = base, self._covered_next


def _make_base(
    factory: str, keys: Sequence[tuple[Tensor, Tensor]], ids: Tensor, places: Tensor, keys_per_block: int
) -> _FaissBase:
    """Train and fill one structure for each head, on one thread: searches need the others."""
    library().omp_set_num_threads(1)
    pieces = [piece if bool(alive.all()) else piece[:, alive] for piece, alive in keys]
    heads = [trained(factory, pieces, head) for head in range(len(pieces[0]))]
    return _FaissBase(heads, ids, places, keys_per_block)


class Settings(NamedTuple):
    """The part after the colon: a factory string, and options after semicolons (``IVF1024,SQ8;nprobe=32``)."""

    factory: str
    nprobe: int | None = None
    """Inverted lists that a search reads; None: one in sixteen, and at least eight."""
    ef_search: int = 64
    """Length of the queue of a search in HNSW."""
    refine: int = 4
    """Candidates for each wanted block; these are scored in float32."""


def parse(text: str) -> Settings:
    """Parse the settings. Raises ``InvalidArgument``, naming what is wrong."""
    if any(int(number) > LARGEST_NUMBER for number in re.findall(r"\d+", text)):
        raise InvalidArgument(f"faiss:{text}: numbers must be at most {LARGEST_NUMBER:,}.")
    factory, *options = text.split(";")
    values: dict[str, int] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in Settings._fields[1:] or not value.isdecimal() or int(value) < 1:
            known = ", ".join(f"{field}=N" for field in Settings._fields[1:])
            raise InvalidArgument(f"faiss:{text}: {option!r} is not an option; options are {known}, with N at least 1.")
        values[name] = int(value)
    return Settings(factory, **values)


def make(factory: str, dim: int) -> Any:
    """Make an empty FAISS index for inner products. Raises ``InvalidArgument`` for unusable factory strings."""
    faiss = library()
    if any(int(links) < FEWEST_LINKS for links in re.findall(r"HNSW(\d+)", factory)):
        raise InvalidArgument(f"faiss:{factory}: each key needs at least {FEWEST_LINKS} links; HNSW32 gives it 32.")
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1]
        raise InvalidArgument(f"FAISS cannot make {factory!r} for keys of {dim} numbers ({reason}).") from error
    usable = (faiss.IndexFlat, faiss.IndexScalarQuantizer, faiss.IndexIVF, faiss.IndexHNSW)
    if not isinstance(index, usable) or isinstance(index, faiss.IndexIVFFastScan):
        raise InvalidArgument(
            f"faiss:{factory} ({type(index).__name__}) cannot filter or remove. Use Flat, SQ8, HNSW32, "
            "IVF1024,Flat, IVF1024,SQ8 or IVF1024,PQ16np; memstore scores the best keys again in float32."
        )
    if isinstance(index, faiss.IndexIVF) and index.nlist < 1:
        raise InvalidArgument(
            f"faiss:{factory}: the number of lists must be at least 1; write IVF1024 for 1,024 lists."
        )
    return index


def lists(index: Any) -> int:
    """Return the number of inverted lists of an index; 0 if it has none."""
    return int(getattr(index, "nlist", 0))


class _FaissBase(BaseBlocks):
    """One FAISS structure for each key head, over the blocks ``ids [n]`` at ``places [n]``; ``P`` keys each.

    Blocks are never added. Removed blocks are taken out of inverted lists, and filtered out of other structures.
    """

    def __init__(self, heads: Sequence[Any], ids: Tensor, places: Tensor, keys_per_block: int) -> None:
        super().__init__(ids)
        self._faiss = library()
        self.heads = list(heads)
        self.places = places
        self._keys_per_block = keys_per_block
        self._removes = all(isinstance(index, self._faiss.IndexIVF) for index in heads)

    @property
    def nbytes(self) -> int:
        return sum(_bytes(self._faiss, index) for index in self.heads)

    def drop(self, ids: Tensor) -> Tensor:
        rows = super().drop(ids)
        if self._removes and len(rows):
            numbers = self._numbers(rows)
            for index in self.heads:
                if index.direct_map.type != self._faiss.DirectMap.Hashtable:
                    index.set_direct_map_type(self._faiss.DirectMap.Hashtable)
                index.remove_ids(self._faiss.IDSelectorArray(numbers))
        return rows

    def filter(self, allowed: range | Tensor | None) -> Tensor | None:
        """Return which rows ``[n]`` may be found; None if FAISS needs no filter."""
        if allowed is None and (self._removes or not self.removed):
            return None
        return self.wanted(allowed)

    def candidates(self, queries: Tensor, head: int, count: int, wanted: Tensor | None, settings: Settings) -> Tensor:
        """Return places ``[R, count]`` of the blocks of the best ``count`` keys; -1 for none and for repeated ones."""
        rows = np.ascontiguousarray(queries.numpy(), dtype=np.float32)
        index, count = self.heads[head], min(count, max(1, self.heads[head].ntotal))
        parameters, keep = self._parameters(index, count, wanted, settings)
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        found = torch.from_numpy(index.search(rows, count, params=parameters)[1])
        del keep
        blocks = found.div(self._keys_per_block, rounding_mode="floor").sort(dim=1).values
        bad = torch.nn.functional.pad(blocks[:, 1:] == blocks[:, :-1], (1, 0)) | (blocks < 0)
        return torch.where(bad, -1, self.places[blocks.clamp(min=0)])

    def _parameters(self, index: Any, count: int, wanted: Tensor | None, settings: Settings) -> tuple[Any, Any]:
        """Return search parameters, and objects that must not be collected while FAISS uses them."""
        chosen: dict[str, Any] = {}
        bits = None
        if wanted is not None:
            bits = np.packbits(wanted.repeat_interleave(self._keys_per_block).numpy(), bitorder="little")
            chosen["sel"] = self._faiss.IDSelectorBitmap(bits)
        if (nprobe := _probes(index, settings)) is not None:
            return self._faiss.SearchParametersIVF(nprobe=nprobe, **chosen), bits
        if isinstance(index, self._faiss.IndexHNSW):
            return self._faiss.SearchParametersHNSW(efSearch=max(settings.ef_search, count), **chosen), bits
        return self._faiss.SearchParameters(**chosen), bits

    def _numbers(self, rows: Tensor) -> Array:
        numbers = rows.unsqueeze(1) * self._keys_per_block + torch.arange(self._keys_per_block)
        return numbers.flatten().numpy()

    def serialized(self) -> list[Tensor]:
        """Return the structure of each head as bytes ``[m]`` uint8."""
        return [torch.from_numpy(self._faiss.serialize_index(index)) for index in self.heads]


def _probes(index: Any, settings: Settings) -> int | None:
    """Return how many inverted lists a search reads; None if there are none."""
    if not lists(index):
        return None
    return min(settings.nprobe or max(8, lists(index) // 16), lists(index))


def _bytes(faiss: ModuleType, index: Any) -> int:
    size = int(index.ntotal) * int(index.sa_code_size() if not isinstance(index, faiss.IndexHNSW) else 0)
    if lists(index):
        size += 8 * int(index.ntotal) + lists(index) * index.d * 4
    if isinstance(index, faiss.IndexHNSW):
        size += 4 * int(index.hnsw.neighbors.size()) + _bytes(faiss, faiss.downcast_index(index.storage))
    return size


def _quieten(index: Any) -> None:
    """Keep FAISS from warning of few keys on standard error: their effect is measured and reported as recall."""
    if (clustering := getattr(index, "cp", None)) is not None:
        clustering.min_points_per_centroid = 1


def trained(factory: str, keys: Sequence[Tensor], head: int) -> Any:
    """Train a structure for one head of ``keys``, pieces of ``[G, n, P, D]``.

    Keys of a model share a large mean, which costs scalar quantisers precision and makes clusters useless, so it is
    subtracted. This changes every score of a query by the same amount.
    """
    flat = [piece[head].flatten(0, 1) for piece in keys]
    total = sum(len(piece) for piece in flat)
    mean = sum(piece.float().sum(0) for piece in flat) / total
    index = make(factory, flat[0].shape[1])
    if not index.is_trained:
        most = max(1 << 16, MOST_TRAINING_KEYS * lists(index))
        step = -(-total // most)
        sample = torch.cat([piece[::step] for piece in flat]).float() - mean
        _quieten(index)
        index.train(np.ascontiguousarray(sample.numpy()))
    for piece in flat:
        for part in piece.split(ADDED_KEYS):
            index.add(np.ascontiguousarray((part.float() - mean).numpy()))
    return index
