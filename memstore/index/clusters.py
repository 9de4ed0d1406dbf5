"""Clusters of the keys of one head, made in the metric of its queries: what an attention-aware index searches.

Attention's queries come from another distribution than its keys, and what k-means on keys takes apart is often not what
queries tell apart. RetrievalAttention (Liu et al. 2024) and RoarGraph (Chen et al. 2024) mend that with logged queries.
They keep lists of keys for clusters of queries, which takes copies of keys and loses those that no logged query asked
for. Here queries enter as a metric, so their second moment is enough and every key is in one list: with the second
moment ``C`` of logged queries, the mean squared error of a key's score when a centre stands for it is
``(key - centre)^T C (key - centre)``, so k-means runs on ``key W`` with ``W W^T = C``.

A list is worth looking into if its best key may be good, not if its mean is. The product with the centre is raised by
``SPREAD`` times what a deviation within the list can do to it, ``|W^-1 q|`` times the list's root mean square distance.
``docs/notes/index.md`` has what this is worth on real keys, and the variants that were worse.

FAISS (``pip install 'torch-memstore[faiss]'``) keeps the lists, and scans them where that is not done in C.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index.best_blocks import order
from memstore.kernels.search_blocks.api import LARGEST_K, KeyLists, lists_problem

SPREAD = 3.0
SMALLEST_VARIANCE = 1e-4
"""Share of the largest variance that directions are given which queries hardly have: they still count."""
ITERATIONS = 8
KEYS_PER_LIST = 64
"""Keys that k-means sees, for each list that it makes."""
STEP = 1 << 16


def require_faiss() -> Any:
    """The library. Raises ``InvalidArgument`` where it is missing."""
    try:
        import faiss
    except ImportError as error:
        raise InvalidArgument(
            "an index of clusters needs FAISS, which is not installed: pip install 'torch-memstore[faiss]', or use "
            "index='exact'"
        ) from error
    return faiss


class Clusters:
    """Lists of keys of one head. A key's number is its place among those given. Read only, so threads may share it."""

    def __init__(self, keys: Tensor, lists: Tensor, centres: Tensor, radii: Tensor, inverse: Tensor) -> None:
        """``keys [n, D]``, the list of each ``[n]``, ``centres [C, D]``, ``radii [C]`` and ``inverse [D, D]``."""
        faiss = require_faiss()
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
        """``count`` clusters of ``keys [n, D]``, in the metric of the queries ``logged [m, D]``."""
        root, inverse = _metric(logged)
        mean = keys[:: max(1, len(keys) // STEP)].mean(0)
        centres = _kmeans((keys[_some(len(keys), KEYS_PER_LIST * count)] - mean) @ root, count)
        lists = torch.empty(len(keys), dtype=torch.int64)
        squares, sizes, sums = torch.zeros(count), torch.zeros(count), torch.zeros(count, keys.shape[1])
        half = centres.square().sum(1) / 2
        for start in range(0, len(keys), STEP):
            rows = keys[start : start + STEP]
            white = (rows - mean) @ root
            near = torch.cat([(piece @ centres.T - half).argmax(1) for piece in white.split(4096)])
            lists[start : start + STEP] = near
            sizes += torch.bincount(near, minlength=count)
            sums.index_add_(0, near, rows)
            squares.index_add_(0, near, (white - centres[near]).square().sum(1))
        sizes = sizes.clamp(min=1)
        # A deviation of this length in one direction of D: the mean square over all of them.
        radii = (squares / sizes / keys.shape[1]).sqrt()
        return cls(keys, lists, sums / sizes[:, None], radii, inverse)

    def search(
        self, queries: Tensor, k: int, probes: int, allowed: range | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers ``[R, k]`` of the best keys in the ``probes`` most promising lists for ``queries [R, D]``.

        Best first, of equal keys the smaller number first; -inf and -1 where there are fewer. ``allowed``: the numbers
        that may be found, a range or ``[n]`` bool; None: all.
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
        """The lists where FAISS keeps them, which never move."""
        invlists = self._index.invlists
        sizes = [invlists.list_size(number) for number in range(len(self.centres))]
        addresses = [
            (int(invlists.get_codes(number)), int(invlists.get_ids(number)), size) if size else (0, 0, 0)
            for number, size in enumerate(sizes)
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
        """The keys ``[n, D]`` float32 and the list of each ``[n]``, as they were given."""
        keys, lists = torch.empty(self.count, self.centres.shape[1]), torch.empty(self.count, dtype=torch.int64)
        for number, members, stored in self._lists():
            keys[members], lists[members] = stored, number
        return keys, lists

    def keys(self, numbers: Tensor) -> Tensor:
        """The keys ``[..., D]`` with the ``numbers [...]``. The first call makes a table of where each one lies."""
        if self._index.direct_map.no():
            self._index.make_direct_map()
        wanted, places = numbers.unique(return_inverse=True)
        return torch.from_numpy(self._index.reconstruct_batch(wanted.numpy()))[places]

    def score(self, queries: Tensor, dtype: torch.dtype) -> Tensor:
        """Scores ``[R, n]`` float32 of all keys for ``queries [R, D]``, products in ``dtype``."""
        scores = torch.empty(len(queries), self.count)
        for _, members, stored in self._lists():
            scores[:, members] = (queries.to(dtype) @ stored.to(dtype).T).float()
        return scores

    def _lists(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each list that is not empty, the numbers ``[m]`` of its keys, and these ``[m, D]``: as FAISS holds them."""
        faiss, invlists, dim = self._faiss, self._index.invlists, self.centres.shape[1]
        for number in range(len(self.centres)):
            size = invlists.list_size(number)
            if size:
                members = faiss.rev_swig_ptr(invlists.get_ids(number), size)
                stored = faiss.rev_swig_ptr(invlists.get_codes(number), size * dim * 4)
                rows = stored.view(np.float32).reshape(size, dim)
                yield number, torch.from_numpy(members), torch.from_numpy(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, their numbers, the table of their places and centres."""
        each = 4 * self.centres.shape[1] + (8 if self._index.direct_map.no() else 16)
        return self.count * each + self.centres.nbytes + self.radii.nbytes


def _selector(faiss: Any, allowed: range | Tensor | None) -> Any:
    """FAISS's filter for the numbers that may be found; None for all."""
    if isinstance(allowed, range):
        return faiss.IDSelectorRange(allowed.start, max(allowed.start, allowed.stop))
    return None if allowed is None else faiss.IDSelectorBitmap(np.packbits(allowed.numpy(), bitorder="little"))


def _metric(queries: Tensor) -> tuple[Tensor, Tensor]:
    """``W [D, D]`` with ``W W^T`` the second moment of ``queries``, and what turns a query ``q`` into ``W^-1 q``."""
    moment = (queries.double().T @ queries.double()) / len(queries)
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=max(float(values[-1]) * SMALLEST_VARIANCE, 1e-12))
    return (vectors * values.sqrt()).float(), (vectors * values.rsqrt()).float()


def _kmeans(sample: Tensor, count: int) -> Tensor:
    """``count`` centres ``[C, D]`` of ``sample [m, D]``; a cluster that loses all its members begins anew elsewhere."""
    generator = torch.Generator().manual_seed(0)
    centres = sample[torch.randperm(len(sample), generator=generator)[:count]].clone()
    for _ in range(ITERATIONS):
        half = centres.square().sum(1) / 2
        near = torch.cat([(piece @ centres.T - half).argmax(1) for piece in sample.split(4096)])
        sizes = torch.bincount(near, minlength=count)
        centres = torch.zeros_like(centres).index_add_(0, near, sample) / sizes.clamp(min=1)[:, None]
        lonely = (sizes == 0).nonzero().squeeze(1)
        centres[lonely] = sample[torch.randint(len(sample), (len(lonely),), generator=generator)]
    return centres


def _some(n: int, at_most: int) -> Tensor:
    """Numbers below ``n``, at most so many, from everywhere."""
    return torch.linspace(0, n - 1, min(n, at_most), dtype=torch.float64).long()
