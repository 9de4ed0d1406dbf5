from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memstore.errors import DamagedError, InvalidArgument
from memstore.index import VectorIndex, cluster_index, open_index
from memstore.testing.indexes import IndexTests, brute_force


class TestAuto(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return open_index("auto", key_heads=key_heads, key_dim=key_dim, keys_per_block=keys_per_block)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few thousand blocks are a large index, and a tenth of their lists are few."""
    monkeypatch.setattr(cluster_index, "LARGE", 1 << 14)
    monkeypatch.setattr(cluster_index, "LARGEST_SHARE", 10)
    monkeypatch.setattr(cluster_index, "SMALLEST", 512)


def filled(settings: str, keys: torch.Tensor) -> VectorIndex:
    index = open_index(f"auto{settings}", key_heads=1, key_dim=16, keys_per_block=1)
    index.add(torch.arange(len(keys)), keys)
    return index


def clustered(n: int) -> torch.Tensor:
    torch.manual_seed(0)
    return 8 * torch.randn(16, 16)[torch.arange(n) % 16].view(n, 1, 1, 16) + torch.randn(n, 1, 1, 16)


def test_a_small_index_is_exact_and_says_so() -> None:
    facts = filled("", clustered(100)).facts()
    assert (facts["picked"], facts["why"]) == ("exact", "100 blocks: exact search is fast")


def found_share(index: VectorIndex, keys: torch.Tensor, queries: torch.Tensor) -> float:
    truth = brute_force(torch.arange(len(keys)), keys, queries, 8)
    return float((index.search(queries, 8).scores >= truth.scores[..., -1:] - 1e-3).float().mean())


def asked(index: VectorIndex, queries: torch.Tensor) -> VectorIndex:
    """After searches for ``queries [1, R, D]``, and with whatever that started done."""
    for some in queries.split(64, dim=1):
        index.search(some, 1)
    index.finish()
    return index


def test_a_large_one_is_exact_until_real_queries_have_shown_that_clusters_find_enough(large: None) -> None:
    pytest.importorskip("faiss", reason="FAISS is not installed")
    keys = clustered(20_000)
    index = filled("", keys)
    index.finish()
    facts = index.facts()
    assert facts["picked"] == "exact"
    assert "256 different queries" in str(facts["why"])
    queries = keys[:400].view(1, -1, 16)
    assert found_share(index, keys, queries[:, :9]) == 1
    facts = asked(index, queries).facts()
    assert facts["picked"] == "clusters:0.95"
    assert str(facts["why"]).startswith(
        ("the recall on held-out queries was 0.9", "the recall on held-out queries was 1")
    )
    assert str(facts["why"]).endswith("asks for 0.95")
    assert found_share(index, keys, queries) >= 0.95


def test_it_stays_exact_and_says_why_where_clusters_would_not_be_faster(
    large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss", reason="FAISS is not installed")
    monkeypatch.setattr(cluster_index, "LARGEST_SHARE", 10_000)
    keys = clustered(3000)
    index = asked(filled("", keys), keys[:400].view(1, -1, 16))
    facts = index.facts()
    assert facts["picked"] == "exact"
    assert "no faster than exact search" in str(facts["why"])
    assert found_share(index, keys, torch.randn(1, 9, 16)) == 1


def test_clusters_are_kept_in_its_file_and_need_no_learning_when_it_is_opened_again(
    large: None, tmp_path: Path
) -> None:
    pytest.importorskip("faiss", reason="FAISS is not installed")
    keys = clustered(20_000)
    index = filled("", keys)
    for picked in ("exact", "clusters:0.95"):
        index.save(tmp_path / "index")
        again = open_index("auto", key_heads=1, key_dim=16, keys_per_block=1)
        again.load(tmp_path / "index")
        assert (again.facts()["picked"], len(again)) == (picked, len(keys))
        index = asked(again, keys[:400].view(1, -1, 16))
    assert found_share(index, keys, keys[:40].view(1, -1, 16)) >= 0.95


def test_it_stays_exact_where_a_recall_of_one_is_asked_for(large: None) -> None:
    keys = clustered(3000)
    index = filled(":recall=1", keys)
    queries = torch.randn(1, 9, 16)
    found, truth = index.search(queries, 4), brute_force(torch.arange(len(keys)), keys, queries, 4)
    assert torch.equal(found.ids, truth.ids)
    assert index.facts()["why"] == "the setting asks for a recall of 1"


def test_it_stays_exact_and_says_how_to_change_that_where_faiss_is_missing(
    large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_index, "find_spec", lambda name: None)
    facts = filled("", clustered(3000)).facts()
    assert facts["picked"] == "exact"
    assert "pip install 'torch-memstore[faiss]'" in str(facts["why"])


@pytest.mark.parametrize("settings", ["recall=2", "recall=0", "recall=x", "speed=1", "0.9"])
def test_what_it_does_not_understand_is_refused(settings: str) -> None:
    with pytest.raises(InvalidArgument, match=r"auto:recall=0\.99"):
        open_index(f"auto:{settings}", key_heads=1, key_dim=4, keys_per_block=1)


def test_the_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="FAISS is not installed")
    other = open_index("faiss:Flat", key_heads=1, key_dim=16, keys_per_block=1)
    other.save(tmp_path / "index")
    index = filled("", clustered(10))
    with pytest.raises(DamagedError, match="another index"):
        index.load(tmp_path / "index")
    assert len(index) == 10
