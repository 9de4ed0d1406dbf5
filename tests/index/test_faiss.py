from __future__ import annotations

import pytest

pytest.importorskip("faiss", reason="FAISS is not installed: pip install 'torch-memstore[faiss]'")

from memstore.errors import InvalidArgument
from memstore.index import VectorIndex, faiss, lies_on_devices, open_index
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


def test_on_a_device_it_is_refused_and_a_memory_keeps_it_on_the_host() -> None:
    assert not lies_on_devices("faiss:Flat")
    with pytest.raises(InvalidArgument, match="searches on the CPU, not on cuda; use 'exact' there"):
        open_index("faiss:Flat", key_heads=1, key_dim=8, keys_per_block=1, device="cuda")


del FaissTests
