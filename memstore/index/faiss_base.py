"""What FAISS knows of an index: for each key head one trained structure over the keys of one moment.

It is never added to. A block that leaves is taken out of inverted lists, and hidden from everything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import faiss_gpu
from memstore.index.checks import allows

ADDED_KEYS = 1 << 16
"""Keys that are converted and added at a time."""
TRAINING_KEYS = 39
"""Keys for each list that FAISS wants to train with, at least."""
MOST_TRAINING_KEYS = 64
"""Of more it does not get, for k-means over a million keys and 4,096 lists takes minutes; FAISS itself takes 256."""
LARGEST_NUMBER = 1 << 22
"""Of lists, links and candidates: FAISS makes room for as many as it is told to, before there are keys."""
FEWEST_LINKS = 2
"""Of a key in HNSW: with fewer FAISS ends the process."""
Array = npt.NDArray[Any]


class Settings(NamedTuple):
    """What follows the colon: a factory string, and options behind semicolons (``IVF1024,SQ8;nprobe=32``)."""

    factory: str
    nprobe: int | None = None
    """Inverted lists that a search reads; None: one of sixteen, and at least eight."""
    ef_search: int = 64
    """Length of the queue of a search in HNSW."""
    refine: int = 4
    """Candidates for each block wanted, which are scored in float32."""


def parse(text: str) -> Settings:
    """Raises ``InvalidArgument``, naming what is wrong."""
    if any(int(number) > LARGEST_NUMBER for number in re.findall(r"\d+", text)):
        raise InvalidArgument(f"faiss:{text}: no number in it may be larger than {LARGEST_NUMBER:,}.")
    factory, *options = text.split(";")
    values: dict[str, int] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in Settings._fields[1:] or not value.isdecimal() or int(value) < 1:
            known = ", ".join(f"{field}=N" for field in Settings._fields[1:])
            raise InvalidArgument(f"faiss:{text}: {option!r} is no option; options are {known}, N at least 1.")
        values[name] = int(value)
    return Settings(factory, **values)


def library() -> ModuleType:
    """FAISS. Raises ``InvalidArgument`` where it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise InvalidArgument(
            f"The index faiss needs FAISS ({error}). Install it with: pip install 'torch-memstore[faiss]'"
        ) from error
    return faiss


def make(factory: str, dim: int) -> Any:
    """An empty FAISS index for inner products. Raises ``InvalidArgument`` for what cannot be used here."""
    faiss = library()
    if any(int(links) < FEWEST_LINKS for links in re.findall(r"HNSW(\d+)", factory)):
        raise InvalidArgument(f"faiss:{factory}: a key needs at least {FEWEST_LINKS} links; HNSW32 gives it 32.")
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1]
        raise InvalidArgument(f"FAISS cannot make {factory!r} for keys of {dim} numbers ({reason}).") from error
    usable = (faiss.IndexFlat, faiss.IndexScalarQuantizer, faiss.IndexIVF, faiss.IndexHNSW)
    if not isinstance(index, usable) or isinstance(index, faiss.IndexIVFFastScan):
        raise InvalidArgument(
            f"faiss:{factory} ({type(index).__name__}) cannot filter or remove. Use Flat, SQ8, HNSW32, IVF1024,Flat, "
            "IVF1024,SQ8 or IVF1024,PQ16np; winners are always scored again in float32."
        )
    if isinstance(index, faiss.IndexIVF) and index.nlist < 1:
        raise InvalidArgument(f"faiss:{factory}: there must be at least one list; write IVF1024 for 1,024 of them.")
    return index


def lists(index: Any) -> int:
    """Inverted lists of an index; 0 where it has none."""
    return int(getattr(index, "nlist", 0))


class Base:
    """Blocks at ``places [n]`` of the index that they were taken from, with ``ids [n]``; ``P`` keys each."""

    def __init__(self, heads: Sequence[Any], ids: Tensor, places: Tensor, keys_per_block: int) -> None:
        self._faiss = library()
        self.heads = list(heads)
        self.ids = ids
        self.places = places
        self.alive = torch.ones(len(ids), dtype=torch.bool)
        self._keys_per_block = keys_per_block
        self._by_id = ids.argsort()
        self._removes = all(isinstance(index, self._faiss.IndexIVF) for index in heads)
        self._gpu = faiss_gpu.copies(self._faiss, self.heads)

    @property
    def nbytes(self) -> int:
        """Bytes of the structures, nearly."""
        return sum(_bytes(self._faiss, index) for index in self.heads)

    @property
    def where(self) -> str:
        """Where searches among all blocks run, for people: "GPU 0", or why it is the CPU."""
        return self._gpu.where if self._gpu.heads is None or not self.hidden else "CPU: blocks have left since"

    @property
    def hidden(self) -> int:
        """Blocks that have left since."""
        return len(self.alive) - int(self.alive.sum())

    def drop(self, ids: Tensor) -> None:
        """Those of ``ids [n]`` that are here are not found any more."""
        if len(self.ids):
            held = self.ids[self._by_id]
            at = torch.searchsorted(held, ids).clamp(max=len(held) - 1)
            self.hide(self._by_id[at[held[at] == ids]])

    def hide(self, rows: Tensor) -> None:
        """The blocks in these rows are not found any more."""
        rows = rows[self.alive[rows]]
        self.alive[rows] = False
        if self._removes and len(rows):
            numbers = self._numbers(rows)
            for index in self.heads:
                if index.direct_map.type != self._faiss.DirectMap.Hashtable:
                    index.set_direct_map_type(self._faiss.DirectMap.Hashtable)
                index.remove_ids(self._faiss.IDSelectorArray(numbers))

    def wanted(self, allowed: range | Tensor | None) -> Tensor | None:
        """Which rows ``[n]`` may be found; None where FAISS needs no filter for that."""
        if allowed is None:
            return None if self._removes or not self.hidden else self.alive
        return self.alive & allows(allowed, self.ids)

    def candidates(self, queries: Tensor, head: int, count: int, wanted: Tensor | None, settings: Settings) -> Tensor:
        """Places ``[R, count]`` of the blocks of the best ``count`` keys; -1 for none and for what repeats."""
        rows = np.ascontiguousarray(queries.numpy(), dtype=np.float32)
        found = torch.from_numpy(self._numbers_of_best(rows, head, count, wanted, settings))
        blocks = found.div(self._keys_per_block, rounding_mode="floor").sort(dim=1).values
        repeated = torch.nn.functional.pad(blocks[:, 1:] == blocks[:, :-1], (1, 0))
        return torch.where((blocks < 0) | repeated, -1, self.places[blocks.clamp(min=0)])

    def _numbers_of_best(self, rows: Array, head: int, count: int, wanted: Tensor | None, settings: Settings) -> Array:
        """Numbers ``[R, count]`` of the best keys, on a GPU where there is one that can; -1 for none."""
        index, count = self.heads[head], min(count, max(1, self.heads[head].ntotal))
        nprobe = _probes(index, settings)
        everything = not self.hidden and (wanted is None or bool(wanted.all()))
        if self._gpu.heads is not None and everything and max(count, nprobe or 0) <= faiss_gpu.MOST:
            return faiss_gpu.search(self._gpu.heads[head], rows, count, nprobe)
        parameters, keep = self._parameters(index, count, wanted, settings)
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        numbers: Array = index.search(rows, count, params=parameters)[1]
        del keep
        return numbers

    def _parameters(self, index: Any, count: int, wanted: Tensor | None, settings: Settings) -> tuple[Any, Any]:
        """How to search, and what FAISS reads meanwhile, which must not be collected."""
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
        """Numbers of the keys of blocks."""
        numbers = rows.unsqueeze(1) * self._keys_per_block + torch.arange(self._keys_per_block)
        return numbers.flatten().numpy()

    def tensors(self) -> dict[str, Tensor]:
        """The structures, to be saved."""
        return {
            f"faiss_{head}": torch.from_numpy(self._faiss.serialize_index(index))
            for head, index in enumerate(self.heads)
        }


def _probes(index: Any, settings: Settings) -> int | None:
    """Inverted lists that a search reads; None where there are none."""
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


def read(tensors: Sequence[Tensor]) -> list[Any]:
    """Structures from what ``Base.tensors`` gave, which must be whole: FAISS does not check."""
    return [library().deserialize_index(tensor.numpy()) for tensor in tensors]


def _quieten(index: Any) -> None:
    """Few keys make few lists poor, which is measured and told as recall; FAISS would say it on standard error."""
    if (clustering := getattr(index, "cp", None)) is not None:
        clustering.min_points_per_centroid = 1


def trained(factory: str, keys: Sequence[Tensor], head: int) -> Any:
    """A structure over ``keys``, pieces of ``[G, n, P, D]``, of one head.

    Keys of a model share a large mean, which costs scalar quantisers their precision and clusters their sense; it is
    taken off. That adds the same to every score of a query.
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
