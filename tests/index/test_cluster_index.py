"""The attention-aware index: the conformance suite, what it finds, and how it changes while it is used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import VectorIndex, cluster_index, open_index
from memstore.index.cluster_index import ClusterIndex, Clusters
from memstore.testing.indexes import IndexTests, brute_force, small_integers

pytest.importorskip("faiss", reason="a cluster index needs FAISS")


@pytest.fixture(autouse=True)
def clusters_of_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_index, "SMALLEST", 1_000)


class TestClusters(IndexTests):
    """All in the tail."""

    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return open_index("clusters", key_heads=key_heads, key_dim=key_dim, keys_per_block=keys_per_block)


class TestClustersFromTheBeginning(IndexTests):
    """So few keys make clusters that every seam between them and the tail is crossed."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cluster_index, "SMALLEST", 24)
        monkeypatch.setattr(cluster_index, "ENOUGH", 8)

    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return ClusterIndex(key_heads, key_dim, keys_per_block)

    def filled(self, n: int, *, heads: int = 2, dim: int = 8, per_block: int = 3) -> tuple[VectorIndex, Tensor, Tensor]:
        index, ids, keys = super().filled(n, heads=heads, dim=dim, per_block=per_block)
        for number in range(10):
            index.search(small_integers(heads, 1, dim, seed=number), 1)
        index.finish()
        return index, ids, keys


def mismatched(n: int, dim: int = 32) -> tuple[Tensor, Tensor]:
    """Keys that differ most where queries hardly look, and queries: ``[n, 1, 1, dim]`` and ``[1, 600, dim]``."""
    generator = torch.Generator().manual_seed(0)
    variance = torch.linspace(0.05, 3, dim)
    keys = torch.randn(n, 1, 1, dim, generator=generator) * variance
    return keys, torch.randn(1, 600, dim, generator=generator) * variance.flip(0) ** 2


def trained(keys: Tensor, queries: Tensor, settings: str = "") -> ClusterIndex:
    index = ClusterIndex(1, keys.shape[-1], 1, settings=settings)
    index.add(torch.arange(len(keys)), keys)
    for query in queries[0]:  # as they come: of a long run only a few would be kept
        index.search(query[None, None], 1)
    index.finish()
    return index


def recall(index: VectorIndex, keys: Tensor, queries: Tensor) -> float:
    truth = brute_force(torch.arange(len(keys)), keys, queries, 8).ids
    return float((truth.unsqueeze(-1) == index.search(queries, 8).ids.unsqueeze(-2)).any(-1).float().mean())


def test_what_was_asked_for_is_found_and_reported() -> None:
    keys, queries = mismatched(4_000)
    index = trained(keys, queries[:, :400], "0.9")
    facts = index.facts()
    assert facts["exact_blocks"] == 0
    assert facts["learned_from_queries"] == 400
    assert facts["recall"] >= 0.9
    assert facts["probes"] < facts["lists"] / 3
    assert recall(index, keys, queries[:, 400:]) == pytest.approx(facts["recall"], abs=0.06)


def test_every_block_is_scored_in_clusters_and_in_the_tail() -> None:
    keys, queries = mismatched(4_000)
    index = trained(keys, queries)
    index.remove(torch.arange(0, 4_000, 3))
    index.add(torch.arange(5_000, 5_010), keys[:10])
    alive = torch.tensor([*(block for block in range(4_000) if block % 3), *range(5_000, 5_010)])
    rows = torch.cat((keys, keys[:1_000], keys[:10]))[alive, 0, 0]
    scores, ids = index.score(queries[:, :5])
    assert torch.equal(ids, alive)
    torch.testing.assert_close(scores, queries[:, :5] @ rows.T)
    scores, ids = index.score(queries[:, :5], allowed=range(3_990, 5_002))
    assert ids.tolist() == [block for block in alive.tolist() if 3_990 <= block < 5_002]
    torch.testing.assert_close(scores, queries[:, :5] @ rows[(alive >= 3_990) & (alive < 5_002)].T)


def of_random_blocks(blocks: int, size: int, *, queries: int, settings: str) -> tuple[ClusterIndex, Tensor, Tensor]:
    """An index of random blocks of ``size`` keys that has seen all the queries, the keys, and the queries."""
    keys = torch.randn(blocks, 1, size, 16, generator=torch.Generator().manual_seed(0))
    asked = torch.randn(1, queries, 16, generator=torch.Generator().manual_seed(1))
    index = ClusterIndex(1, 16, size, settings=settings)
    index.add(torch.arange(blocks), keys)
    for query in asked[0]:
        index.search(query[None, None], 1)
    index.finish()
    return index, keys, asked


def test_one_means_all_lists_and_all_keys_of_a_block() -> None:
    index, keys, queries = of_random_blocks(800, 8, queries=400, settings="1")
    facts = index.facts()
    assert (facts["probes"], facts["exact_blocks"], facts["recall"]) == (facts["lists"], 0, 1.0)
    assert torch.equal(index.search(queries, 8).ids, brute_force(torch.arange(800), keys, queries, 8).ids)


def test_the_metric_of_the_queries_finds_more_in_as_many_lists() -> None:
    keys, queries = mismatched(4_000)
    rows, seen, asked = keys[:, 0, 0], queries[0, :400], queries[0, 400:]
    truth = (asked @ rows.T).topk(8).indices
    found = [
        (truth[:, :, None] == Clusters.learn(rows, logged, 128).search(asked, 8, 6)[1][:, None]).any(2).float().mean()
        for logged in (seen, torch.eye(32))
    ]
    assert found[0] > found[1] + 0.05


def test_the_largest_keys_and_queries_make_the_same_clusters() -> None:
    keys, queries = mismatched(400)
    made = []
    for scale in (1.0, 2.0**46):  # below LARGEST
        clusters = Clusters.learn(keys[:, 0, 0] * scale, queries[0] * scale, 16)
        made.append(clusters.search(queries[0, :4] * scale, 5, 2)[1])
    assert torch.equal(*made)


def test_every_score_is_true_and_every_list_in_order() -> None:
    keys, queries = mismatched(4_000)
    index = trained(keys, queries)
    found = index.search(queries, 8)
    true = torch.einsum("tkd,td->tk", keys[found.ids[0], 0, 0], queries[0])
    torch.testing.assert_close(found.scores[0], true)
    assert torch.equal(found.scores, found.scores.sort(dim=-1, descending=True).values)


def test_a_block_has_the_score_of_its_best_key_wherever_that_lies() -> None:
    index, keys, queries = of_random_blocks(1_000, 4, queries=500, settings="0.5")
    assert index.facts()["probes"] < index.facts()["lists"] / 4
    found = index.search(queries, 5)
    scores = torch.einsum("tkpd,td->tkp", keys[found.ids[0], 0], queries[0])
    torch.testing.assert_close(found.scores[0], scores.amax(2))
    torch.testing.assert_close(scores.gather(2, found.offsets[0].unsqueeze(2)).squeeze(2), found.scores[0])


def test_new_blocks_are_found_before_and_after_new_clusters() -> None:
    keys, queries = mismatched(4_000)
    index = trained(keys, queries)
    best = queries[0, :1].mT.reshape(1, 1, 1, -1) * 100
    index.add(torch.tensor([99_999]), best)
    assert index.search(queries[:, :1], 1).ids.item() == 99_999
    index.finish()
    assert index.facts()["exact_blocks"] == 0
    assert index.search(queries[:, :1], 1).ids.item() == 99_999


def test_clusters_are_made_beside_searches_additions_and_removals() -> None:
    keys, queries = mismatched(8_000)
    index = ClusterIndex(1, 32, 1)
    alive = torch.zeros(8_000, dtype=torch.bool)
    for start in range(0, 8_000, 250):
        index.add(torch.arange(start, start + 250), keys[start : start + 250])
        alive[start : start + 250] = True
        gone = torch.arange(start, start + 250, 7)
        index.remove(gone)
        alive[gone] = False
        found = index.search(queries[:, start // 14 : start // 14 + 20], 5)
        assert alive[found.ids].all()
    assert len(index) == int(alive.sum())
    index.finish()
    index.close()
    assert len(index) == int(alive.sum())
    ids = alive.nonzero().squeeze(1)
    truth = brute_force(ids, keys[ids], queries, 8).ids
    last = index.search(queries, 8).ids
    assert float((truth.unsqueeze(-1) == last.unsqueeze(-2)).any(-1).float().mean()) > 0.94


def test_queries_that_are_all_alike_are_not_learned_from() -> None:
    keys, queries = mismatched(4_000)
    index = trained(keys, queries[:, :4].repeat(1, 150, 1))
    assert index.facts() == {"kind": "clusters", "exact_blocks": 4_000}
    assert recall(index, keys, queries[:, :100]) == 1


def test_blocks_outside_of_what_is_allowed_are_never_found() -> None:
    keys, queries = mismatched(4_000)
    index = trained(keys, queries)
    index.remove(torch.arange(0, 4_000, 3))
    for allowed in (range(1_000, 2_000), range(0, 4_000, 5), torch.tensor([7, 8, 9])):
        found = index.search(queries[:, :50], 8, allowed=allowed).ids.unique()
        assert {block for block in found.tolist() if block >= 0} <= {
            block for block in [*map(int, allowed)] if block % 3
        }


def test_an_index_that_was_saved_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = mismatched(4_000)
    index = trained(keys, queries)
    index.remove(torch.arange(100))
    index.add(torch.arange(9_000, 9_010), keys[:10])
    index.save(tmp_path / "index")
    monkeypatch.setattr(Clusters, "learn", None)
    other = ClusterIndex(1, 32, 1)
    other.load(tmp_path / "index")
    assert other.facts() == index.facts()
    for one, two in zip(other.search(queries, 8), index.search(queries, 8), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("settings", ["many", "0", "1.5", "-1", "nan"])
def test_other_settings_are_refused(settings: str) -> None:
    with pytest.raises(InvalidArgument, match=r"such as clusters:0\.99"):
        open_index(f"clusters:{settings}", key_heads=1, key_dim=8, keys_per_block=1)


def test_without_faiss_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InvalidArgument, match=r"torch-memstore\[faiss\]"):
        ClusterIndex(1, 8, 1)


def test_clusters_are_made_again_only_for_new_keys_or_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_index, "SMALLEST", 24)
    index = ClusterIndex(1, 8, 1)
    index.add(torch.arange(300), torch.randn(300, 1, 1, 8))
    index.search(torch.randn(1, 300, 8), 3)
    index.finish()
    made = index.base
    index.finish()
    assert index.base is made is not None
    index.search(torch.randn(1, 3, 8), 3)
    index.finish()
    assert index.base is not made
    made = index.base
    index.remove(torch.arange(3))
    index.finish()
    assert index.base is not made
