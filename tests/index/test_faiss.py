from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("faiss", reason="FAISS is not installed: pip install 'torch-memstore[faiss]'")

from memstore.index import VectorIndex, faiss, faiss_base, faiss_gpu, open_index
from memstore.testing.indexes import IndexTests


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks are enough for FAISS to be asked."""
    monkeypatch.setattr(faiss, "FEWEST_KEYS", 8)
    monkeypatch.setattr(faiss, "TRAINING_KEYS", 2)
    monkeypatch.setattr(faiss, "FEWEST_WANTED", 1)


class FaissTests(IndexTests):
    settings: str

    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        name = f"faiss:{self.settings}"
        return open_index(name, key_heads=key_heads, key_dim=key_dim, keys_per_block=keys_per_block)


class TestFlat(FaissTests):
    settings = "Flat"


class TestIvf(FaissTests):
    settings = "IVF4,Flat"


class TestIvfSq(FaissTests):
    settings = "IVF4,SQ8"


class TestHnsw(FaissTests):
    settings = "HNSW8"


del FaissTests


def filled(settings: str = "IVF4,Flat;nprobe=4", n: int = 60) -> VectorIndex:
    index = open_index(f"faiss:{settings}", key_heads=1, key_dim=8, keys_per_block=1)
    index.add(torch.arange(n), torch.randn(n, 1, 1, 8, generator=torch.Generator().manual_seed(0)))
    index.finish()
    return index


class OnGpu:
    """A structure in host memory in the place of its copy on a GPU; counts the searches that it is asked."""

    asked = 0

    def __init__(self, index: Any) -> None:
        self._index = index
        self.nprobe = 1

    def search(self, rows: Any, count: int) -> Any:
        OnGpu.asked += 1
        if hasattr(self._index, "nprobe"):
            self._index.nprobe = self.nprobe
        return self._index.search(rows, count)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = faiss_base.library()
    monkeypatch.setattr(library, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(library, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(library, "index_cpu_to_gpu", lambda _, device, index: OnGpu(index), raising=False)
    monkeypatch.setattr(OnGpu, "asked", 0)


def test_where_there_is_no_gpu_the_processor_searches_and_facts_say_why() -> None:
    library = faiss_base.library()
    reason = "finds no GPU" if hasattr(library, "StandardGpuResources") else "built without GPUs"
    if library.get_num_gpus():
        reason = "GPU 0"
    assert reason in filled().facts()["searched_on"]


@pytest.mark.parametrize("settings", ["Flat", "IVF4,Flat;nprobe=4"])
def test_a_gpu_searches_among_all_blocks_and_finds_the_same(settings: str, a_gpu: None) -> None:
    index, queries = filled(settings), torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    assert index.facts()["searched_on"] == "GPU 0"
    exact = open_index("exact", key_heads=1, key_dim=8, keys_per_block=1)
    exact.add(torch.arange(60), torch.randn(60, 1, 1, 8, generator=torch.Generator().manual_seed(0)))
    for allowed in (None, range(60)):
        assert torch.equal(index.search(queries, 3, allowed=allowed).ids, exact.search(queries, 3).ids)
    assert OnGpu.asked == 2
    assert torch.equal(
        index.search(queries, 3, allowed=range(5, 50)).ids, exact.search(queries, 3, allowed=range(5, 50)).ids
    )
    assert OnGpu.asked == 2, "a GPU knows no filter"


def test_a_gpu_is_not_asked_where_blocks_have_left_until_the_next_base(a_gpu: None) -> None:
    index, queries = filled(), torch.randn(1, 5, 8)
    index.remove(torch.arange(4))
    assert index.facts()["searched_on"] == "CPU: blocks have left since"
    assert index.search(queries, 60).ids.max() == 59
    assert set(index.search(queries, 3).ids.flatten().tolist()) <= set(range(4, 60))
    assert OnGpu.asked == 0
    index.finish()
    index.search(queries, 3)
    assert OnGpu.asked == 1


def test_a_gpu_is_not_asked_for_more_than_it_can_find(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_gpu, "MOST", 20)
    index, queries = filled(), torch.randn(1, 5, 8)
    for k, asked in ((5, 1), (6, 1)):  # four candidates for each block wanted
        index.search(queries, k)
        assert OnGpu.asked == asked


def test_what_no_gpu_can_hold_is_searched_by_the_processor(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("Error in clone: This index type is not implemented on GPU.")

    monkeypatch.setattr(faiss_base.library(), "index_cpu_to_gpu", refuses)
    index = filled("HNSW8")
    assert "not implemented on GPU" in index.facts()["searched_on"]
    assert index.search(torch.randn(1, 2, 8), 3).ids.shape == (1, 2, 3)
