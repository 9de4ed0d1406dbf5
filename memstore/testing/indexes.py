"""Conformance suite of vector indexes: subclass ``IndexTests`` and override ``make``."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.index.contract import SearchResult, VectorIndex


def brute_force(ids: Tensor, keys: Tensor, queries: Tensor, k: int) -> SearchResult:
    """Define a search: sort all blocks by score, then by id. ``ids [n]``, ``keys [n, G, P, D]``."""
    heads, length, _ = queries.shape
    keys = keys.repeat_interleave(heads // keys.shape[1], 1).double()
    best, offsets = torch.einsum("htd,nhpd->htnp", queries.double(), keys).max(-1)
    by_id = ids.argsort()
    order = by_id[best[..., by_id].argsort(dim=-1, descending=True, stable=True)][..., :k]
    missing = k - order.shape[-1]
    pad = (heads, length, missing)
    return SearchResult(
        torch.cat([best.gather(-1, order).float(), torch.full(pad, -torch.inf)], -1),
        torch.cat([ids[order], torch.full(pad, -1)], -1),
        torch.cat([offsets.gather(-1, order), torch.full(pad, -1)], -1),
    )


def small_integers(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers with exact products in every type, so that results must be equal and ties are common."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def assert_found(found: SearchResult, expected: SearchResult) -> None:
    """Check for equal scores and ids. Offsets may point at any key with the best score, so they are not compared."""
    torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=0)
    assert torch.equal(found.ids, expected.ids)
    assert found.scores.dtype == torch.float32
    assert found.ids.dtype == found.offsets.dtype == torch.int64
    assert torch.equal(found.offsets == -1, expected.offsets == -1)


class IndexTests(ABC):
    """The contract of every index. An approximate index only runs checks that do not depend on its recall."""

    @abstractmethod
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        """Make a new, empty index."""

    def keys(self, *shape: int, seed: int = 0) -> Tensor:
        """Make keys of a ``shape`` that the index takes, of whole numbers."""
        return small_integers(*shape, seed=seed)

    def best_keys(self, *shape: int) -> Tensor:
        """Make keys of a ``shape`` that score higher than any of ``keys`` for a query of ones."""
        return torch.full(shape, 27.0)

    def filled(self, n: int, *, heads: int = 2, dim: int = 8, per_block: int = 3) -> tuple[VectorIndex, Tensor, Tensor]:
        """Make an index with blocks ``2, 4, ..., 2n``; return it with their ids and their keys."""
        index = self.make(key_heads=heads, key_dim=dim, keys_per_block=per_block)
        ids, keys = 2 * torch.arange(1, n + 1), self.keys(n, heads, per_block, dim)
        index.add(ids, keys)
        return index, ids, keys

    def check(self, index: VectorIndex, ids: Tensor, keys: Tensor, queries: Tensor, k: int) -> None:
        """Check a search over all blocks: true results, and all of them if the index is exact."""
        found, expected = index.search(queries, k), brute_force(ids, keys, queries, k)
        if index.capabilities.exact:
            assert_found(found, expected)
        assert set(found.ids.flatten().tolist()) <= {-1, *ids.tolist()}

    @pytest.mark.parametrize(("k", "query_heads"), [(1, 2), (5, 6), (63, 2), (64, 6)])
    def test_a_search_finds_the_best_blocks_for_every_query_head(self, k: int, query_heads: int) -> None:
        index, ids, keys = self.filled(63)
        self.check(index, ids, keys, small_integers(query_heads, 7, 8, seed=1), k)

    def test_offsets_name_the_key_that_matched(self) -> None:
        index, ids, keys = self.filled(30)
        queries = small_integers(4, 5, 8, seed=1)
        found = index.search(queries, 3)
        for head in range(4):
            rows = torch.searchsorted(ids, found.ids[head].clamp(min=2))
            matched = keys[rows, head // 2, found.offsets[head].clamp(min=0)]
            scores = torch.einsum("tkd,td->tk", matched, queries[head])
            assert torch.equal(scores[found.ids[head] >= 0], found.scores[head][found.ids[head] >= 0])

    def test_a_block_is_found_as_soon_as_it_is_added(self) -> None:
        index, _, _ = self.filled(20)
        index.add(torch.tensor([41, 50]), self.best_keys(2, 2, 3, 8))
        found = index.search(torch.ones(2, 1, 8), 2)
        assert sorted(found.ids[0, 0].tolist()) == [41, 50]

    def test_many_small_additions_equal_one(self) -> None:
        index = self.make(key_heads=1, key_dim=4, keys_per_block=2)
        ids, keys = torch.arange(700), self.keys(700, 1, 2, 4)
        for start in range(0, 700, 13):
            index.add(ids[start : start + 13], keys[start : start + 13])
        assert len(index) == 700
        self.check(index, ids, keys, small_integers(1, 3, 4, seed=1), 9)

    def test_equal_scores_are_ordered_by_id(self) -> None:
        index = self.make(key_heads=1, key_dim=4, keys_per_block=1)
        index.add(torch.arange(10, 60), torch.ones(50, 1, 1, 4))
        index.add(torch.arange(10), torch.ones(10, 1, 1, 4))
        if index.capabilities.exact:
            assert index.search(torch.ones(1, 1, 4), 4).ids.tolist() == [[[0, 1, 2, 3]]]

    def test_fewer_blocks_than_asked_for_leave_empty_places(self) -> None:
        index, ids, _ = self.filled(3)
        found = index.search(torch.ones(2, 1, 8), 5)
        assert found.ids[0, 0, 3:].tolist() == found.offsets[0, 0, 3:].tolist() == [-1, -1]
        assert found.scores[0, 0, 3:].tolist() == [-torch.inf, -torch.inf]
        assert sorted(found.ids[1, 0, :3].tolist()) == ids.tolist()

    def test_an_empty_index_finds_nothing(self) -> None:
        index = self.make(key_heads=2, key_dim=8, keys_per_block=3)
        assert index.search(torch.ones(4, 2, 8), 2).ids.unique().tolist() == [-1]
        assert len(index) == 0

    def test_no_queries_find_nothing(self) -> None:
        index, _, _ = self.filled(3)
        assert index.search(torch.ones(2, 0, 8), 2).ids.shape == (2, 0, 2)

    @pytest.mark.parametrize(
        "allowed",
        [
            range(6, 31),
            range(4, 60, 6),
            range(40, 5, -4),
            range(-6, 1000, 8),
            range(9, 9),
            range(-3, 1000),
            torch.tensor([40, 4, 4, 6, 77]),
            torch.tensor([1]),
        ],
        ids=["range", "steps", "backwards", "steps from before", "empty", "everything", "ids", "none of them"],
    )
    def test_only_allowed_blocks_are_found(self, allowed: range | Tensor) -> None:
        index, ids, keys = self.filled(30)
        queries = small_integers(2, 5, 8, seed=1)
        kept = torch.tensor([i for i, block in enumerate(ids.tolist()) if block in allowed], dtype=torch.int64)
        found, expected = index.search(queries, 4, allowed=allowed), brute_force(ids[kept], keys[kept], queries, 4)
        if index.capabilities.exact:
            assert_found(found, expected)
        assert set(found.ids.flatten().tolist()) <= {-1, *ids[kept].tolist()}

    def test_removed_blocks_are_never_found_again(self) -> None:
        index, ids, keys = self.filled(60)
        gone = torch.cat([torch.arange(20), torch.arange(30, 50, 3), torch.tensor([59])])
        index.remove(ids[gone])
        rest = torch.tensor([row for row in range(60) if row not in gone.tolist()])
        assert len(index) == len(rest)
        self.check(index, ids[rest], keys[rest], small_integers(4, 5, 8, seed=1), 60)

    def test_a_removed_id_can_be_added_with_other_keys(self) -> None:
        index, ids, keys = self.filled(20)
        index.remove(ids[5:8])
        keys[5:8] = self.keys(3, 2, 3, 8, seed=9)
        index.add(ids[5:8], keys[5:8])
        self.check(index, ids, keys, small_integers(2, 5, 8, seed=1), 20)

    def test_removing_everything_leaves_an_empty_index_that_works(self) -> None:
        index, ids, keys = self.filled(20)
        index.remove(ids)
        assert len(index) == 0
        index.add(ids[:4], keys[:4])
        self.check(index, ids[:4], keys[:4], small_integers(2, 2, 8, seed=1), 5)

    def test_removing_what_is_not_there_changes_nothing(self) -> None:
        index, ids, keys = self.filled(10)
        with pytest.raises(InvalidArgument, match="7"):
            index.remove(torch.tensor([4, 7]))
        self.check(index, ids, keys, small_integers(2, 2, 8, seed=1), 10)

    def test_adding_what_is_there_already_changes_nothing(self) -> None:
        index, ids, keys = self.filled(10)
        with pytest.raises(InvalidArgument, match="4"):
            index.add(torch.tensor([4, 99]), torch.zeros(2, 2, 3, 8))
        self.check(index, ids, keys, small_integers(2, 2, 8, seed=1), 10)

    def test_scoring_every_block_agrees_with_searching(self) -> None:
        index, ids, keys = self.filled(40)
        if not index.capabilities.dense:
            pytest.skip("this index cannot score every block")
        queries = small_integers(4, 5, 8, seed=1)
        scores, blocks = index.score(queries)
        assert torch.equal(blocks, ids)
        found = brute_force(ids, keys, queries, 40)
        assert torch.equal(scores, torch.empty_like(scores).scatter_(-1, found.ids // 2 - 1, found.scores))
        scores, blocks = index.score(queries, allowed=range(10, 20))
        assert blocks.tolist() == [10, 12, 14, 16, 18]
        assert scores.shape == (4, 5, 5)

    def test_a_saved_index_is_loaded_as_it_was(self, tmp_path: Path) -> None:
        index, ids, keys = self.filled(40)
        index.remove(ids[3:9])
        index.save(tmp_path / "index")
        other, _, _ = self.filled(2)
        other.load(tmp_path / "index")
        rest = torch.tensor([*range(3), *range(9, 40)])
        assert len(other) == len(index)
        self.check(other, ids[rest], keys[rest], small_integers(2, 5, 8, seed=1), 6)

    def test_what_is_loaded_goes_on_as_before(self, tmp_path: Path) -> None:
        index, ids, keys = self.filled(40)
        index.finish()
        index.save(tmp_path / "index")
        other = self.make(key_heads=2, key_dim=8, keys_per_block=3)
        other.load(tmp_path / "index")
        other.remove(ids[30:])
        other.add(ids[30:35], keys[:5])
        other.finish()
        now = torch.cat([keys[:30], keys[:5]])
        self.check(other, ids[:35], now, small_integers(2, 5, 8, seed=1), 6)
        self.check(index, ids, keys, small_integers(2, 5, 8, seed=1), 6)

    def test_a_window_that_moves_on_is_always_what_was_added_last(self) -> None:
        index = self.make(key_heads=2, key_dim=8, keys_per_block=3)
        keys = self.keys(400, 2, 3, 8)
        for start in range(0, 400, 25):
            index.add(torch.arange(start, start + 25), keys[start : start + 25])
            if start >= 100:
                index.remove(torch.arange(start - 100, start - 75))
            if start == 200:
                index.finish()
        assert len(index) == 100
        self.check(index, torch.arange(300, 400), keys[300:], small_integers(4, 3, 8, seed=1), 7)

    def test_finishing_changes_no_answer_but_an_approximate_one(self) -> None:
        index, ids, keys = self.filled(63)
        index.finish()
        index.finish()
        self.check(index, ids, keys, small_integers(4, 5, 8, seed=1), 9)
        index.add(torch.tensor([1, 3]), self.best_keys(2, 2, 3, 8))
        assert sorted(index.search(torch.ones(2, 1, 8), 2).ids[0, 0].tolist()) == [1, 3]
        index.close()

    def test_scores_are_true_and_no_block_is_found_twice(self) -> None:
        index, ids, keys = self.filled(63)
        index.finish()
        queries = small_integers(4, 5, 8, seed=1)
        found, truth = index.search(queries, 9), brute_force(ids, keys, queries, 63)
        scores = torch.zeros(4, 5, 127).scatter_(-1, truth.ids, truth.scores)
        here = found.ids >= 0
        assert torch.equal(scores.gather(-1, found.ids.clamp(min=0))[here], found.scores[here])
        for row in found.ids.flatten(0, 1).tolist():
            blocks = [block for block in row if block >= 0]
            assert len(set(blocks)) == len(blocks)

    def test_its_facts_are_json(self) -> None:
        assert json.loads(json.dumps(dict(self.filled(5)[0].facts())))["kind"]

    def test_an_empty_index_can_be_saved(self, tmp_path: Path) -> None:
        self.make(key_heads=2, key_dim=8, keys_per_block=3).save(tmp_path / "index")
        index, _, _ = self.filled(4)
        index.load(tmp_path / "index")
        assert len(index) == 0

    def test_an_index_that_has_become_empty_can_be_saved(self, tmp_path: Path) -> None:
        index, ids, keys = self.filled(40)
        index.finish()
        index.remove(ids)
        index.save(tmp_path / "index")
        other, _, _ = self.filled(4)
        other.load(tmp_path / "index")
        assert len(other) == 0
        other.add(ids[:4], keys[:4])
        self.check(other, ids[:4], keys[:4], small_integers(2, 2, 8, seed=1), 5)

    def test_a_damaged_or_foreign_file_is_refused_and_changes_nothing(self, tmp_path: Path) -> None:
        index, ids, keys = self.filled(40)
        index.save(tmp_path / "index")
        (tmp_path / "short").write_bytes((tmp_path / "index").read_bytes()[:-100])
        (tmp_path / "text").write_text("something else")
        content = bytearray((tmp_path / "index").read_bytes())
        content[-200] ^= 1
        (tmp_path / "flipped").write_bytes(content)
        self.filled(4, dim=16)[0].save(tmp_path / "foreign")
        for name in ("short", "text", "foreign", "flipped"):
            with pytest.raises(DamagedError):
                index.load(tmp_path / name)
        with pytest.raises(NotFound):
            index.load(tmp_path / "nothing")
        self.check(index, ids, keys, small_integers(2, 5, 8, seed=1), 6)

    def test_bad_arguments_are_refused(self) -> None:
        index, _, _ = self.filled(4)
        queries, keys = torch.ones(2, 1, 8), torch.ones(1, 2, 3, 8)
        bad_queries = [torch.ones(3, 1, 8), torch.ones(2, 1, 7), torch.ones(2, 8), queries.long(), queries * torch.nan]
        for bad in (*bad_queries, queries * 1e20):
            with pytest.raises(InvalidArgument):
                index.search(bad, 1)
        with pytest.raises(InvalidArgument):
            index.search(queries, 0)
        with pytest.raises(InvalidArgument):
            index.search(queries, 1, allowed=torch.ones(3))
        with pytest.raises(InvalidArgument):
            index.search(queries, 1, allowed=range(1 << 70))
        for bad in (keys[:, :1], keys[..., :7], keys[0], keys.long(), keys * torch.nan, keys * torch.inf, keys * 1e20):
            with pytest.raises(InvalidArgument):
                index.add(torch.tensor([100]), bad)
        for ids in ([5, 3], [5, 5], [-1, 3]):
            with pytest.raises(InvalidArgument):
                index.add(torch.tensor(ids), torch.ones(2, 2, 3, 8))

    def test_its_size_grows_with_its_keys(self) -> None:
        index, _, _ = self.filled(3)
        small = index.nbytes
        index.add(torch.arange(1000, 4000), torch.ones(3000, 2, 3, 8))
        assert index.nbytes > small > 0
