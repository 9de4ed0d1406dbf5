from __future__ import annotations

import pytest

pytest.importorskip("faiss", reason="FAISS is not installed: pip install 'torch-memstore[faiss]'")

from memstore.index import VectorIndex, faiss, open_index
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
