"""A kNN layer finds in a stored memory what it finds in tensors: from any store, after reopening, when it is full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import memstore
from memstore.attention.knn import Neighbours
from memstore.attention.knn_memory import RecentTokens
from memstore.attention.knn_stored import StoredTokens, token_spec
from memstore.errors import InvalidArgument
from tests.memory.helpers import make_fingerprint

SIZE = 4


def states(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, tokens, 8, generator=gen), torch.randn(2, 2, tokens, 8, generator=gen)


def pairs(found: Neighbours) -> list[Tensor]:
    """What was found, in order: keys and values ``[B, H, T, K, D]``, zeros for nothing."""
    rows = torch.arange(len(found.ids))[:, None, None, None]
    groups = (torch.arange(found.ids.shape[1]) // 2)[:, None, None]
    there = (found.ids >= 0).unsqueeze(-1)
    both = [torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (found.keys, found.values)]  # the last row is nothing
    return [torch.where(there, x[rows, groups, found.ids], 0) for x in both]


def opened(url: str | Path, capacity: int | None = None) -> memstore.Memory:
    return memstore.open(url, spec=token_spec(2, 8, fingerprint=make_fingerprint(), capacity=capacity, block_size=SIZE))


@pytest.mark.parametrize("where", ["ram:", "lmdb"])
def test_segments_of_any_length_are_found_as_in_tensors(where: str, tmp_path: Path) -> None:
    recent = RecentTokens(2, 2, 100, 8)
    with opened(where if where == "ram:" else tmp_path / "m") as memory:
        stored = StoredTokens([memory.document("a"), memory.document("b")])
        for seed, lengths in enumerate([(3, 1), (1, 0), (7, 9), (2, 3), (12, 4)]):
            queries = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(seed + 99))
            torch.testing.assert_close(pairs(stored.search(queries, 5)), pairs(recent.search(queries, 5)))
            keys, values = states(12, seed)
            for either in (recent, stored):
                either.append([torch.arange(length) for length in lengths], keys, values)
        assert not memory.verify()


def test_a_full_memory_has_the_last_blocks_and_no_others() -> None:
    with opened("ram:", capacity=3 * SIZE) as memory:
        stored, everything = StoredTokens([memory.document("a"), memory.document("b")]), []
        for seed in range(9):
            keys, values = states(5, seed)
            stored.append([torch.arange(5)] * 2, keys, values)
            everything.append((keys, values))
        keys, values = (torch.cat(parts, 2) for parts in zip(*everything, strict=True))
        first = memory.document("a").blocks.start * SIZE
        kept = RecentTokens(2, 2, 100, 8)
        kept.append([torch.arange(45 - first)] * 2, keys[:, :, first:], values[:, :, first:])
        queries = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(1))
        assert len(keys[0, 0]) - first <= 3 * SIZE
        torch.testing.assert_close(pairs(stored.search(queries, 4)), pairs(kept.search(queries, 4)))


def test_another_process_would_find_the_same(tmp_path: Path) -> None:
    queries = torch.randn(1, 4, 3, 8, generator=torch.Generator().manual_seed(1))
    with opened(tmp_path / "m") as memory:
        stored = StoredTokens([memory.document("a")])
        stored.append([torch.arange(11)], *(x[:1] for x in states(11, 0)))
        before = pairs(stored.search(queries, 6))
    with memstore.open(tmp_path / "m", mode="r") as memory:
        torch.testing.assert_close(pairs(StoredTokens([memory.document("a")]).search(queries, 6)), before)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="multiple of block_size 4, not 6"):
        token_spec(2, 8, fingerprint=make_fingerprint(), capacity=6, block_size=4)
    with pytest.raises(InvalidArgument, match="one document for each row"):
        StoredTokens([])
    with opened("ram:") as memory:
        stored, (keys, values) = StoredTokens([memory.document("a"), memory.document("b")]), states(5, 0)
        with pytest.raises(InvalidArgument, match=r"at most T tokens for each row.* \[5, 6\] tokens for 2 rows"):
            stored.append([torch.arange(5), torch.arange(6)], keys, values)  # never zeros for what was not given
        with pytest.raises(InvalidArgument, match=r"\[5\] tokens"):
            stored.append([torch.arange(5)], keys, values)
        assert not len(memory.document("a"))
        with pytest.raises(InvalidArgument, match=r"expected queries \[2, H, T, 8\] with H a multiple of 2"):
            stored.search(torch.ones(1, 4, 3, 8), 3)


@pytest.mark.parametrize("index", ["clusters", "faiss:IVF4,Flat;nprobe=1", "faiss:HNSW8"])
def test_whatever_an_approximate_index_finds_is_true_and_has_not_left(index: str) -> None:
    spec = token_spec(2, 8, fingerprint=make_fingerprint(), capacity=100 * SIZE, block_size=SIZE)
    with memstore.open("ram:", spec=spec, index=index) as memory:
        stored = StoredTokens([memory.document("a"), memory.document("b")])
        given = [states(97, seed) for seed in range(10)]
        for keys, values in given:
            stored.append([torch.arange(97), torch.arange(41)], keys, values)
        found = stored.search(torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(1)), 4)
        numbers = stored.numbers_of(found.ids)
        assert bool((numbers >= 0).any(-1).all())
        for row, length in enumerate((97, 41)):
            true = [torch.cat([each[part][row, :, :length] for each in given], 1) for part in range(2)]
            assert bool((numbers[row][found.ids[row] >= 0] >= stored.documents[row].blocks.start * SIZE).all())
            for head, query, rank in (found.ids[row] >= 0).nonzero().tolist():
                number, place = numbers[row, head, query, rank], found.ids[row, head, query, rank]
                assert torch.equal(found.keys[row, head // 2, place], true[0][head // 2, number])
                assert torch.equal(found.values[row, head // 2, place], true[1][head // 2, number])
