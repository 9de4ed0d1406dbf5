"""Landmarks in Milvus, with the embedded engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memstore.errors import InvalidArgument, MemstoreError
from memstore.index import VectorIndex, open_index
from memstore.testing.indexes import IndexTests

pytest.importorskip("milvus_lite", reason="the embedded engine of Milvus is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Milvus's own, and of what it needs
]


class TestMilvus(IndexTests):
    @pytest.fixture(autouse=True)
    def collections(self, tmp_path: Path) -> Iterator[None]:
        self.path, self.made = tmp_path / "landmarks.db", list[VectorIndex]()
        yield
        for index in self.made:
            index.close()

    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        name = f"milvus:{self.path}"
        self.made.append(open_index(name, key_heads=key_heads, key_dim=key_dim, keys_per_block=keys_per_block))
        return self.made[-1]


def test_two_indexes_in_one_file_do_not_see_each_other(tmp_path: Path) -> None:
    sizes = {"key_heads": 1, "key_dim": 4, "keys_per_block": 1}
    one, two = (open_index(f"milvus:{tmp_path}/both.db", **sizes) for _ in range(2))
    one.add(torch.arange(3), torch.ones(3, 1, 1, 4))
    assert two.search(torch.ones(1, 1, 4), 1).ids.item() == -1
    two.close()
    assert one.search(torch.ones(1, 1, 4), 3).ids.tolist() == [[[0, 1, 2]]]
    one.close()
    with pytest.raises(InvalidArgument, match="closed"):
        one.search(torch.ones(1, 1, 4), 1)


def test_where_must_be_a_file_or_a_server() -> None:
    with pytest.raises(InvalidArgument, match=r"milvus:landmarks\.db or"):
        open_index("milvus:somewhere", key_heads=1, key_dim=4, keys_per_block=1)


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(MemstoreError, match="no Milvus server answers at http://127"):
        open_index("milvus:http://127.0.0.1:9", key_heads=1, key_dim=4, keys_per_block=1)


@pytest.mark.parametrize("library", ["pymilvus", "milvus_lite"])
def test_a_missing_library_is_named(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InvalidArgument, match=rf"{library}.*torch-memstore\[milvus\]"):
        open_index(f"milvus:{tmp_path}/a.db", key_heads=1, key_dim=4, keys_per_block=1)


def test_importing_memstore_imports_no_library_of_an_index() -> None:
    program = "import sys, memstore, memstore.index; print({'faiss', 'pymilvus', 'milvus_lite'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_file_that_another_process_has_is_told(tmp_path: Path) -> None:
    where = tmp_path / "landmarks.db"
    sizes = "key_heads=1, key_dim=8, keys_per_block=1"
    code = f"from memstore.index import open_index; open_index('milvus:{where}', {sizes})"
    index = open_index(f"milvus:{where}", key_heads=1, key_dim=8, keys_per_block=1)
    second = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert "one process can open such a file" in second.stderr
    index.add(torch.tensor([3]), torch.ones(1, 1, 1, 8))
    assert index.search(torch.ones(1, 1, 8), 1).ids.item() == 3
    index.close()
