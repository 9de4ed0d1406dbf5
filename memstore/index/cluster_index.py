"""The attention-aware index: trained clusters for most keys, and exact search for newer keys.

The clusters are a base, see ``rebuilt.py``; the tail is an exact index. New clusters are made of all blocks and the
latest queries. Until there are enough different queries to learn from, all keys are searched exactly.

When clusters are made, the number of lists that a search reads is measured. It is the smallest that finds the wanted
share of the best keys for held-out queries. With keys as queries, the recall would look too good.

Attention's queries come from another distribution than its keys, and k-means on keys often separates keys that queries
do not. RetrievalAttention (Liu et al. 2024) and RoarGraph (Chen et al. 2024) solve that with logged queries. They keep
lists of keys for clusters of queries, which needs copies of keys and loses keys that no logged query found. Here
queries define a metric, so their second moment is enough and every key is in one list. Let ``C`` be the second moment
of logged queries. If a centre replaces a key, the mean squared error of its score is
``(key - centre)^T C (key - centre)``. So k-means runs on ``key W`` with ``W W^T = C``.

A list is worth reading if its best key may be good, not if its mean is good. So the product with the centre is raised
by ``SPREAD`` times the possible effect of a deviation within the list: ``|W^-1 q|`` times the list's root mean square
distance. ``docs/notes/index.md`` has the gain on real keys, and the variants that were worse.

FAISS (``pip install 'torch-memstore[faiss]'``) keeps the lists, and scans them if our C code does not.

``index="auto"`` is exact search while that is fast, then clusters that were measured to find enough. No approximation
is used unmeasured. When an index has become large, a thread makes its clusters from its keys and from real queries,
while searches stay exact. Clusters take over with the fewest lists that reach the requested recall on held-out queries.
They do not take over if this needs so many lists that exact search is as fast. Among all kinds measured on attention
keys, landmarks and clustered keys, clusters take the least time for the same recall: ``docs/notes/index.md``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument
from memstore.index import contract, files
from memstore.index.contract import IndexCapabilities, SearchResult, VectorIndex
from memstore.index.exact import ExactIndex, order
from memstore.index.rebuilt import BaseBlocks, Rebuild, library
from memstore.json_checks import anything, array, fit, members, number, row, table, whole
from memstore.kernels.search_blocks import LARGEST_K, KeyLists, lists_problem

SPREAD = 3.0
SMALLEST_VARIANCE = 1e-4
"""Least share of the largest variance for a direction, so directions that queries hardly use still count."""
ITERATIONS = 8
KEYS_PER_LIST = 64
"""Keys that k-means sees for each list."""
STEP = 1 << 16


class Clusters:
    """Lists of keys of one head. A key's number is its position in the input. Read only, so threads may share it."""

    def __init__(self, keys: Tensor, lists: Tensor, centres: Tensor, radii: Tensor, inverse: Tensor) -> None:
        """Store ``keys [n, D]``, the list of each ``[n]``, ``centres [C, D]``, ``radii [C]`` and ``inverse [D, D]``."""
        faiss = library()
        self.centres, self.radii, self.inverse = centres, radii, inverse
        self.count = len(keys)
        self._faiss = faiss
        dim = keys.shape[1]
        quantizer = faiss.IndexFlatIP(dim)
        quantizer.add(centres.numpy())
        self._index = faiss.IndexIVFFlat(quantizer, dim, len(centres), faiss.METRIC_INNER_PRODUCT)
        self._index.is_trained = True
        for start in range(0, len(keys), STEP):
            rows = np.ascontiguousarray(keys[start : start + STEP].float().numpy())
            numbers = np.arange(start, start + len(rows))
            which = np.ascontiguousarray(lists[start : start + STEP].numpy().astype(np.int64))
            pointers = (faiss.swig_ptr(each) for each in (rows, numbers, which))
            self._index.add_core(len(rows), *pointers)

    @classmethod
    def learn(cls, keys: Tensor, logged: Tensor, count: int) -> Clusters:
        """Learn ``count`` clusters of ``keys [n, D]``, in the metric of the queries ``logged [m, D]``."""
        root, inverse = _metric(logged)
        mean = keys[:: max(1, len(keys) // STEP)].mean(0)
        sample = torch.linspace(0, len(keys) - 1, min(len(keys), KEYS_PER_LIST * count), dtype=torch.float64).long()
        centres = _kmeans((keys[sample] - mean) @ root, count)
        lists = torch.empty(len(keys), dtype=torch.int64)
        squares, sizes, sums = torch.zeros(count), torch.zeros(count), torch.zeros(count, keys.shape[1])
        nearest = library().IndexFlatL2(keys.shape[1])
        nearest.add(centres.numpy())
        for start in range(0, len(keys), STEP):
            rows = keys[start : start + STEP]
            white = (rows - mean) @ root
            near = torch.from_numpy(nearest.search(white.numpy(), 1)[1][:, 0])
            lists[start : start + STEP] = near
            sizes += torch.bincount(near, minlength=count)
            sums.index_add_(0, near, rows)
            squares.index_add_(0, near, (white - centres[near]).square().sum(1))
        sizes = sizes.clamp(min=1)
        # A deviation of this length in one of D directions: the mean square over all of them.
        radii = (squares / sizes / keys.shape[1]).sqrt()
        return cls(keys, lists, sums / sizes[:, None], radii, inverse)

    def search(
        self, queries: Tensor, k: int, probes: int, allowed: range | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers ``[R, k]`` of the best keys for ``queries [R, D]`` in the ``probes`` best lists.

        Best first; among equal keys, the smaller number first. Missing ones are -inf and -1. ``allowed`` are the
        numbers that may be found, a range or ``[n]`` bool; None allows all.
        """
        probes = min(probes, len(self.centres))
        reach = (queries @ self.inverse).norm(dim=1, keepdim=True)
        promise = (queries @ self.centres.T).addcmul_(reach, self.radii, value=SPREAD)
        lists = promise.topk(probes, dim=1, sorted=False).indices
        if k <= LARGEST_K and lists_problem() is None:
            return self._in_c.search(queries, k, lists, range(self.count) if allowed is None else allowed)
        return self._by_faiss(queries, k, lists, allowed)

    @cached_property
    def _in_c(self) -> KeyLists:
        """Return the lists in the memory of FAISS, which never move."""
        invlists = self._index.invlists
        sizes = [invlists.list_size(place) for place in range(len(self.centres))]
        addresses = [
            (int(invlists.get_codes(place)), int(invlists.get_ids(place)), size) if size else (0, 0, 0)
            for place, size in enumerate(sizes)
        ]
        return KeyLists(addresses, self.centres.shape[1])

    def _by_faiss(
        self, queries: Tensor, k: int, lists: Tensor, allowed: range | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        faiss = self._faiss
        preassigned = np.ascontiguousarray(lists.numpy())
        rows = np.ascontiguousarray(queries.numpy())
        unused = np.zeros(preassigned.shape, np.float32)
        scores = np.empty((len(rows), k), np.float32)
        numbers = np.empty((len(rows), k), np.int64)
        selector = _selector(faiss, allowed)
        parameters = faiss.SearchParametersIVF(nprobe=lists.shape[1], **({} if selector is None else {"sel": selector}))
        arrays = (faiss.swig_ptr(each) for each in (preassigned, unused, scores, numbers))
        self._index.search_preassigned_c(len(rows), faiss.swig_ptr(rows), k, *arrays, False, parameters)
        found = torch.from_numpy(numbers)
        values = torch.from_numpy(scores).masked_fill_(found < 0, -torch.inf)
        columns = order(values, found)
        return values.gather(1, columns), found.gather(1, columns)

    def content(self) -> tuple[Tensor, Tensor]:
        """Return the keys ``[n, D]`` float32 and the list of each ``[n]``, as they were given."""
        keys, lists = torch.empty(self.count, self.centres.shape[1]), torch.empty(self.count, dtype=torch.int64)
        for place, numbers, stored in self._lists():
            keys[numbers], lists[numbers] = stored, place
        return keys, lists

    def keys(self, numbers: Tensor) -> Tensor:
        """Return the keys ``[..., D]`` with the ``numbers [...]``. The first call makes a table of their places."""
        if self._index.direct_map.no():
            self._index.make_direct_map()
        wanted, places = numbers.unique(return_inverse=True)
        return torch.from_numpy(self._index.reconstruct_batch(wanted.numpy()))[places]

    def score(self, queries: Tensor, dtype: torch.dtype) -> Tensor:
        """Return scores ``[R, n]`` float32 of all keys for ``queries [R, D]``, with products in ``dtype``."""
        scores = torch.empty(len(queries), self.count)
        for _, numbers, stored in self._lists():
            scores[:, numbers] = (queries.to(dtype) @ stored.to(dtype).T).float()
        return scores

    def _lists(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each list that is not empty, the numbers ``[m]`` of its keys, and the keys ``[m, D]``, as in FAISS."""
        faiss, invlists, dim = self._faiss, self._index.invlists, self.centres.shape[1]
        for place in range(len(self.centres)):
            size = invlists.list_size(place)
            if size:
                numbers = faiss.rev_swig_ptr(invlists.get_ids(place), size)
                stored = faiss.rev_swig_ptr(invlists.get_codes(place), size * dim * 4)
                rows = stored.view(np.float32).reshape(size, dim)
                yield place, torch.from_numpy(numbers), torch.from_numpy(rows)

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys, their numbers, the table of their places, and the centres."""
        each = 4 * self.centres.shape[1] + (8 if self._index.direct_map.no() else 16)
        return self.count * each + self.centres.nbytes + self.radii.nbytes


def _selector(faiss: Any, allowed: range | Tensor | None) -> Any:
    """Return FAISS's filter for the allowed numbers; None for all."""
    if isinstance(allowed, range):
        return faiss.IDSelectorRange(allowed.start, max(allowed.start, allowed.stop))
    return None if allowed is None else faiss.IDSelectorBitmap(np.packbits(allowed.numpy(), bitorder="little"))


def _metric(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``W [D, D]``, where ``W W^T`` is the second moment of ``queries``, and the matrix for ``W^-1 q``."""
    # Only ratios count. Times large queries, the squares of large keys would overflow, and FAISS would end the process.
    queries = queries.double() / 2.0 ** math.frexp(float(queries.abs().max()))[1]
    moment = (queries.T @ queries) / len(queries)
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=max(float(values[-1]) * SMALLEST_VARIANCE, 1e-12))
    return (vectors * values.sqrt()).float(), (vectors * values.rsqrt()).float()


def _kmeans(sample: Tensor, count: int) -> Tensor:
    """Return ``count`` centres ``[C, D]`` of ``sample [m, D]``."""
    kmeans = library().Kmeans(
        sample.shape[1],
        count,
        niter=ITERATIONS,
        seed=0,
        min_points_per_centroid=1,
        max_points_per_centroid=max(1, -(-len(sample) // count)),
    )
    kmeans.train(sample.numpy())
    return torch.from_numpy(kmeans.centroids)


SMALLEST = 16_384
"""Keys of a head below which exact search is as fast."""
GROWTH = 4
"""New clusters are made when the tail has a quarter of the keys that the clusters have."""
RECALL = 0.97
LOGGED = 4096
"""Queries of each head kept to learn from."""
ENOUGH = 256
"""Different queries needed for learning."""
MEASURED_K = 8
GATHERED_NUMBERS = 1 << 22
"""Key numbers fetched at a time to be scored again."""
MEASURED = ("probes", "recall", "learned_from", "curve")
MEASURED_VALUES = table(
    probes=whole(1, 2**31),
    recall=number(1),
    learned_from=whole(0, 2**31),
    curve=array(row(number(2**31), number(1)), 1000),
)
CLUSTER_TENSORS = ("centres", "radii", "inverse")


@dataclass(eq=False, repr=False)
class ClusterBase(BaseBlocks):
    """The clusters of all heads, over blocks ``ids [n]`` ascending."""

    heads: list[Clusters]
    probes: int
    """Lists that a search reads."""
    recall: float
    """Recall of the best 8 keys, measured on held-out queries."""
    learned_from: int
    """Number of queries of each head."""
    curve: list[list[float]]
    """Measurements: number of lists read, and the recall with so many."""


class ClusterIndex(VectorIndex):
    """Keys ``[G, D]`` of ``P`` per block, found by clusters in the metric of the queries.

    ``settings`` is the share of the best blocks that searches should find, 0.97 if empty: ``clusters:0.99``. With 1
    they read all lists. Every returned score is true. Blocks with equal scores are ordered by id, the smaller first.
    """

    capabilities = IndexCapabilities(exact=False, dense=True)
    kind = "clusters"
    typed = True

    def _prepare(self, settings: str) -> None:
        library()
        self._refuse()
        wanted = f"the setting of a cluster index is the wanted recall, such as clusters:0.99, not {settings!r}"
        self._start(self._new_tail(), _share(settings, wanted) if settings else RECALL)

    def _start(self, tail: ExactIndex, recall: float) -> None:
        """Begin with an empty ``tail``; searches should find the share ``recall`` of the best blocks."""
        self.wanted_recall = recall
        self._tail = tail
        self.base: ClusterBase | None = None
        """The clusters in use; None before the first."""
        self._log: deque[Tensor] = deque()  # each [G, m, D], the newest last
        self._kept = 0  # queries of each head in it
        self._tried = 0  # queries available when clusters were last made
        self._new_queries = False  # since then
        self._rebuild: Rebuild[ClusterBase] = Rebuild()

    def __len__(self) -> int:
        return len(self._tail) + (0 if self.base is None else len(self.base))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} blocks, {len(self._tail)} of them searched exactly)"

    @property
    def nbytes(self) -> int:
        base = 0 if self.base is None else sum(head.nbytes for head in self.base.heads) + self.base.ids.nbytes
        return base + self._tail.nbytes + sum(part.nbytes for part in self._log)

    def add(self, ids: Tensor, keys: Tensor) -> None:
        self._adopt()
        contract.check_ids(ids)
        if self.base is not None:
            contract.check_new(self.base.holds(ids), ids)
        self._tail.add(ids, keys)
        self._consider()

    def remove(self, ids: Tensor) -> None:
        self._adopt()
        contract.check_ids(ids)
        old = torch.zeros_like(ids, dtype=torch.bool) if self.base is None else self.base.holds(ids)
        self._tail.remove(ids[~old])
        if self.base is not None:
            self.base.drop(ids[old])
            self.base = self.base if len(self.base) else None
        self._rebuild.note_removed(ids)

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        self._adopt()
        contract.check_top_k(k)
        contract.check_allowed(allowed)
        grouped = self._grouped(queries).detach()
        self._keep(grouped)
        base = self.base
        if base is None:
            return self._tail.search(queries, k, allowed=allowed)
        heads = [self._search_base(base, head, grouped[head], k, allowed) for head in range(self.key_heads)]
        old = SearchResult.of_heads(heads, queries)
        if not len(self._tail):
            return old
        near = self._tail.search(queries, k, allowed=allowed)
        return _best(SearchResult(*(torch.cat(pair, -1) for pair in zip(near, old, strict=True))), k)

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the score of every block, ``([H, T, N] float32, ids [N] ascending)``, no faster than exact search."""
        self._adopt()
        scores, ids = self._tail.score(queries, allowed=allowed)
        if self.base is None:
            return scores, ids
        wanted = self.base.wanted(allowed)
        grouped = self._grouped(queries).detach()
        of_keys = [head.score(rows, self.dtype) for head, rows in zip(self.base.heads, grouped, strict=True)]
        best = torch.stack(of_keys).unflatten(2, (-1, self.keys_per_block)).amax(3)[..., wanted]
        ids, order = torch.cat((ids, self.base.ids[wanted])).sort()
        return torch.cat((scores, best.reshape(*queries.shape[:2], -1)), 2)[..., order], ids

    def finish(self) -> None:
        self._adopt(wait=True)
        stale = self.base is None or self.base.removed or len(self._tail) or self._new_queries
        if stale and len(self) * self.keys_per_block >= SMALLEST:
            self._begin()
            self._adopt(wait=True)

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"kind": self.kind, "exact_blocks": len(self._tail)}
        if self.base is not None:
            base = self.base
            facts |= {"lists": len(base.heads[0].centres), "probes": base.probes, "recall": round(base.recall, 4)}
            facts |= {"learned_from_queries": base.learned_from}
        return facts

    def close(self) -> None:
        self._rebuild.wait()

    def save(self, path: Path) -> None:
        self._adopt(wait=True)
        ids, keys = self._tail_content()
        tensors, measured = {"tail_ids": ids, "tail_keys": keys, "logged": self._logged()}, {}
        if self.base is not None:
            alive, heads = self.base.alive, self.base.heads
            rows = alive.repeat_interleave(self.keys_per_block)
            content = [head.content() for head in heads]
            tensors["ids"] = self.base.ids[alive]
            tensors["keys"] = torch.stack([keys[rows].to(self.dtype) for keys, _ in content])
            tensors["lists"] = torch.stack([lists[rows] for _, lists in content])
            for name in CLUSTER_TENSORS:
                tensors[name] = torch.stack([getattr(head, name) for head in heads])
            measured = {name: getattr(self.base, name) for name in MEASURED}
        files.save(path, self._about | {"measured": measured}, tensors)

    def load(self, path: Path) -> None:
        self._take(files.load(path, self._about))

    def _take(self, content: files.Content) -> None:
        tensors, measured = content.tensors, self._checked(content)
        base = None
        if measured:
            parts = zip(*(tensors[name] for name in ("keys", "lists", *CLUSTER_TENSORS)), strict=True)
            heads = [Clusters(*(part.clone() for part in head)) for head in parts]
            base = ClusterBase(tensors["ids"].clone(), heads, **measured)
        self._adopt(wait=True)
        self.base, self._tail = base, self._new_tail()
        self._tail.add(tensors["tail_ids"], tensors["tail_keys"])
        self._log = deque([tensors["logged"].clone()])
        self._kept = tensors["logged"].shape[1]

    def _checked(self, content: files.Content) -> dict[str, Any]:
        """Return the measurements of the clusters in a file; empty if it has none. Raises ``DamagedError``."""
        heads, size, dim, whole_number = self.key_heads, self.keys_per_block, self.key_dim, torch.int64
        content.check(
            tail_ids=(whole_number, ("n",)),
            tail_keys=(self.dtype, ("n", heads, size, dim)),
            logged=(torch.float32, (heads, "m", dim)),
        )
        measured: dict[str, Any] = fit(
            content.facts.get("measured"), members(anything, len(MEASURED)), str(content.path)
        )
        if not measured:
            return measured
        fit(measured, MEASURED_VALUES, str(content.path))
        content.check(
            ids=(whole_number, ("n",)),
            keys=(self.dtype, (heads, "k", dim)),
            lists=(whole_number, (heads, "k")),
            centres=(torch.float32, (heads, "c", dim)),
            radii=(torch.float32, (heads, "c")),
            inverse=(torch.float32, (heads, dim, dim)),
        )
        ids, lists, centres = (content.tensors[name] for name in ("ids", "lists", "centres"))
        content.require(lists.shape[1] == len(ids) * size > 0, "keys")
        content.require(int(lists.min()) >= 0 and int(lists.max()) < centres.shape[1], "lists")
        content.require(not torch.isin(ids, content.tensors["tail_ids"]).any(), "ids")
        return measured

    def _new_tail(self) -> ExactIndex:
        return ExactIndex(self.key_heads, self.key_dim, self.keys_per_block, self.dtype, self.device)

    def _tail_content(self) -> tuple[Tensor, Tensor]:
        """Return ids ``[n]`` ascending and keys ``[n, G, P, D]`` of the tail."""
        ids, keys = self._tail.content()
        ids, order = ids.sort()
        return ids, keys[:, order].transpose(0, 1)

    def _logged(self) -> Tensor:
        """Return the latest queries, ``[G, m, D]``."""
        return torch.cat([torch.empty(self.key_heads, 0, self.key_dim), *self._log], 1)[:, -LOGGED:]

    def _keep(self, queries: Tensor) -> None:
        """Keep some of the queries ``[G, R, D]``, within the limit; only a few from a long run."""
        step = max(1, queries.shape[1] // (LOGGED // 16))
        self._log.append(queries[:, ::step].clone())
        self._kept, self._new_queries = self._kept + self._log[-1].shape[1], True
        while self._kept - self._log[0].shape[1] >= LOGGED:
            self._kept -= self._log.popleft().shape[1]
        self._consider()

    def _consider(self) -> None:
        """Start making clusters if the tail has become long and there are queries to learn from."""
        base = self.base
        long = len(self._tail) * self.keys_per_block >= SMALLEST
        long &= base is None or GROWTH * len(self._tail) >= len(base.ids)
        if long and (base is not None or self._kept >= max(ENOUGH, 2 * self._tried)):
            self._begin()

    def _begin(self) -> None:
        if self._rebuild.running:
            return
        self._tried, self._new_queries, logged = self._kept, False, self._logged()
        if min(len(queries.unique(dim=0)) for queries in logged) < ENOUGH:
            return
        base = self.base
        old = None if base is None else (base.ids, base.alive.clone(), base.heads)
        self._rebuild.begin(partial(make_base, self._tail_content(), old, logged, self.wanted_recall))

    def _adopt(self, *, wait: bool = False) -> None:
        """Replace the old clusters by finished new ones; blocks removed meanwhile stay removed."""
        base = self._rebuild.take(wait=wait)
        if base is None or self._refuses(base):
            return
        newer, _ = self._tail_content()
        self._tail.remove(newer[base.holds(newer)])
        self.base = base if len(base) else None

    def _refuses(self, base: ClusterBase) -> bool:  # noqa: ARG002 - `AutoIndex` looks at it
        """Return whether new clusters are rejected."""
        return False

    def _search_base(
        self, base: ClusterBase, head: int, queries: Tensor, k: int, allowed: range | Tensor | None
    ) -> SearchResult:
        """Search the blocks of the clusters; return scores, ids and offsets ``[R, k]``."""
        size = self.keys_per_block
        numbers = _numbers(base, size, allowed)
        # Several of the best keys may be in one block; with twice as many keys, a list rarely has too few blocks.
        count = k * (size if self.wanted_recall == 1 else min(size, 2))
        step = max(1, GATHERED_NUMBERS // (count * size * self.key_dim))
        founds = [_found(base, head, rows, k, count, size, numbers) for rows in queries.split(step)]
        return founds[0] if len(founds) == 1 else SearchResult(*map(torch.cat, zip(*founds, strict=True)))


Old = tuple[Tensor, Tensor, list[Clusters]]
"""Ids ``[n]`` of blocks in clusters, which of them are alive, and the clusters of each head."""


def make_base(tail: tuple[Tensor, Tensor], old: Old | None, logged: Tensor, wanted: float) -> ClusterBase:
    """Make clusters of the blocks of a tail (``ids [n]``, ``keys [n, G, P, D]``) and of old clusters.

    They suit queries like ``logged [G, m, D]``. Every eighth of these is held out, to find how many lists must be read
    for the ``wanted`` share of the best keys.
    """
    library().omp_set_num_threads(torch.get_num_threads())
    ids, keys = tail if old is None else _joined(tail, old)
    count = min(max(16, int(4 * (len(ids) * keys.shape[2]) ** 0.5)), len(ids) * keys.shape[2])
    heads, tests = [], []
    for head, queries in enumerate(logged):
        rows, seen = keys[:, head].flatten(0, 1).float(), queries.unique(dim=0)
        aside = torch.arange(len(seen)) % 8 == 0
        heads.append(Clusters.learn(rows, seen[~aside], count))
        tests.append((seen[aside], _true_numbers(rows, seen[aside])))
    probes, curve = count if wanted == 1 else min(4, count), list[list[float]]()
    while True:
        recall = min(_recall(head, *test, probes) for head, test in zip(heads, tests, strict=True))
        curve.append([probes, recall])
        if recall >= wanted or probes == count:
            return ClusterBase(ids, heads, probes, recall, logged.shape[1], curve)
        probes = min(probes + probes // 2, count)


def _joined(tail: tuple[Tensor, Tensor], old: Old) -> tuple[Tensor, Tensor]:
    """Return ids ``[n]`` ascending and keys ``[n, G, P, D]`` of both."""
    ids, alive, heads = old
    shape = tail[1].shape[1:]
    keys = [head.content()[0].unflatten(0, (-1, shape[1]))[alive].to(tail[1].dtype) for head in heads]
    both, order = torch.cat((ids[alive], tail[0])).sort()
    return both, torch.cat((torch.stack(keys, 1), tail[1]))[order]


def _true_numbers(keys: Tensor, queries: Tensor) -> Tensor:
    """Return the best keys ``[R, k]`` for ``queries [R, D]``, by scoring all."""
    k = min(MEASURED_K, len(keys))
    best = queries.new_full((len(queries), k), -torch.inf), torch.zeros(len(queries), k, dtype=torch.int64)
    for start in range(0, len(keys), 1 << 14):
        scores = queries @ keys[start : start + (1 << 14)].T
        top = scores.topk(min(k, scores.shape[1]), dim=1)
        both = torch.cat((best[0], top.values), 1).topk(k, dim=1)
        best = both.values, torch.cat((best[1], top.indices + start), 1).gather(1, both.indices)
    return best[1]


def _recall(head: Clusters, queries: Tensor, truth: Tensor, probes: int) -> float:
    _, numbers = head.search(queries, truth.shape[1], probes)
    return float((truth[:, :, None] == numbers[:, None, :]).any(2).float().mean())


def _numbers(base: ClusterBase, size: int, allowed: range | Tensor | None) -> range | Tensor | None:
    """Return the keys of the allowed blocks, ``size`` each: a range or ``[n]`` bool; None for all."""
    if not base.removed and (allowed is None or (isinstance(allowed, range) and allowed.step == 1)):
        if allowed is None:
            return None
        first, stop = (int(torch.searchsorted(base.ids, place)) for place in (allowed.start, allowed.stop))
        return range(size * first, size * max(first, stop))
    return base.wanted(allowed).repeat_interleave(size)


def _found(
    base: ClusterBase, head: int, queries: Tensor, k: int, count: int, size: int, allowed: range | Tensor | None
) -> SearchResult:
    """Return the ``k`` best blocks ``[R, k]`` for ``queries [R, D]``, among those of the ``count`` best keys."""
    scores, numbers = base.heads[head].search(queries, count, base.probes, allowed)
    if size == 1:  # the last id stands for a missing one, until -1 does
        return SearchResult(scores, base.ids.take(numbers).masked_fill_(numbers < 0, -1), numbers.clamp(max=0))
    rows = numbers.div(size, rounding_mode="floor")
    # The best key of a block may be in a list that was not read.
    keys = base.heads[head].keys(size * rows.clamp(min=0)[..., None] + torch.arange(size))  # [R, count, P, D]
    scores, offsets = torch.einsum("rcpd,rd->rcp", keys, queries).max(2)
    none = rows < 0
    blocks = base.ids.take(rows).masked_fill(none, -1)
    return _best(SearchResult(scores.masked_fill(none, -torch.inf), blocks, offsets.masked_fill(none, -1)), k)


def _best(found: SearchResult, k: int) -> SearchResult:
    """Return the ``k`` best blocks of ``[..., m]``, each once, by its best key; equal scores by ascending id."""
    columns = order(found.scores, found.ids)
    scores, ids, offsets = (each.gather(-1, columns) for each in found)
    again = (ids[..., :, None] == ids[..., None, :]).tril(-1).any(-1) & (ids >= 0)
    scores = scores.masked_fill(again, -torch.inf)
    ids, offsets = ids.masked_fill(again, -1), offsets.masked_fill(again, -1)
    first = again.int().argsort(dim=-1, stable=True)
    return SearchResult(*(each.gather(-1, first)[..., :k] for each in (scores, ids, offsets)))


def _share(text: str, wanted: str) -> float:
    """Parse a recall; ``wanted`` is the message of the error."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidArgument(wanted)
    return share


LARGE = 1 << 24
"""Numbers in the keys of one head (262,144 keys of 64) above which exact search takes too long."""
AUTO_RECALL = 0.95
LARGEST_SHARE = 16
"""Reading more than one in so many lists is no faster than exact search."""


class AutoIndex(ClusterIndex):
    """``settings`` is empty or ``recall=0.99``: the share of the true best eight blocks that a search must find."""

    capabilities = replace(ClusterIndex.capabilities, devices=True)

    def _prepare(self, settings: str) -> None:
        value = settings.removeprefix("recall=")
        wanted = f"auto:{settings}: write auto, or auto:recall=0.99 with a number above 0 and at most 1."
        recall = _share(value if value != settings else "", wanted) if settings else AUTO_RECALL
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
        picked = "exact" if self.base is None else f"clusters:{self.wanted_recall:g}"
        return {**super().facts(), "kind": "auto", "picked": picked, "why": self._reason()}

    def save(self, path: Path) -> None:
        """Write the index to the file ``path``: as an exact index, or with its clusters, which take minutes to make."""
        self._adopt(wait=True)
        if self.base is None:
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
        self._large, self._refused = self.base is not None, None
        self._grow()

    def _grow(self) -> None:
        """Allow clusters once there are many keys."""
        large = len(self) * self.keys_per_block * self.key_dim >= LARGE
        self._large |= large and not self._obstacle

    def _consider(self) -> None:
        if self._large:
            super()._consider()

    def _refuses(self, base: ClusterBase) -> bool:
        refused = self.base is None and base.probes * LARGEST_SHARE > len(base.heads[0].centres)
        self._refused = base if refused else self._refused
        return refused

    def _reason(self) -> str:
        if not self._large:
            return self._obstacle or f"{len(self):,} blocks: exact search is fast"
        base, refused = self.base, self._refused
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
