"""Searching by vectors and by blocks, compared with every inner product computed at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.memory import Document, Memory
from memstore.memory import search as searching
from memstore.memory.search import Match, check_layer, search_block, search_vectors
from tests.memory.helpers import KEY_DIM, G, P, S, append, make_spec, random_tokens


@pytest.fixture
def memory() -> Memory:
    """Two documents, of nine blocks and a part of one, and of three."""
    memory = memstore.open("ram:", spec=make_spec())
    append(memory.document("whale"), random_tokens(9 * S + 1, seed=1))
    append(memory.document("ship"), random_tokens(3 * S, seed=2))
    return memory


def by_hand(document: Document, queries: Tensor, layer: int) -> list[Match]:
    """Every complete block, best first: the mean over heads and queries of the best product with its keys."""
    keys = document.layer(layer).landmarks(document.complete_blocks).double()  # [n, G, P, D]
    each = queries.double().unflatten(0, (G, -1)).flatten(1, 2)  # [G, h * T, D]
    products = torch.einsum("gtd,ngpd->ngtp", each, keys).amax(-1).mean((1, 2))
    found = [Match(document.name, block, float(score)) for block, score in enumerate(products)]
    return sorted(found, key=lambda match: -match.score)


def same(found: list[Match], expected: list[Match]) -> None:
    assert [match.score for match in found] == pytest.approx([match.score for match in expected], rel=1e-5)
    best = {(match.document, match.block): match.score for match in expected}
    assert all(match.score == pytest.approx(best[match.document, match.block], rel=1e-5) for match in found)


@pytest.mark.parametrize(("heads", "count"), [(G, 1), (2 * G, 3)])
@pytest.mark.parametrize("layer", [0, 2])
def test_vectors_find_the_blocks_with_the_best_mean_product(memory: Memory, heads: int, count: int, layer: int) -> None:
    queries = torch.randn(heads, count, KEY_DIM, generator=torch.Generator().manual_seed(3))
    expected = [match for document in memory.documents() for match in by_hand(document, queries, layer)]
    expected.sort(key=lambda match: -match.score)
    same(search_vectors(memory.documents(), queries, 5, layer=layer), expected[:5])
    same(search_vectors(memory.documents(), queries, 99, layer=layer), expected)


def test_many_queries_are_scored_a_few_at_a_time(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, whale = torch.randn(G, 7, KEY_DIM), memory.document("whale")
    at_once = search_vectors([whale], queries, 9, layer=0)
    monkeypatch.setattr(searching, "AT_ONCE", 2 * G * 9)
    same(search_vectors([whale], queries, 9, layer=0), at_once)


def test_a_block_finds_its_neighbours_and_not_itself(memory: Memory) -> None:
    whale = memory.document("whale")
    found = search_block(whale, 4, 3, layer=2, among=[whale])
    expected = [match for match in by_hand(whale, whale.layer(2).landmarks(range(4, 5))[0], 2) if match.block != 4]
    same(found, expected[:3])
    assert all(match.block != 4 for match in found)


def test_nothing_is_found_where_no_block_is_complete() -> None:
    memory = memstore.open("ram:", spec=make_spec())
    append(memory.document("short"), random_tokens(S - 1))
    queries = torch.ones(G, 1, KEY_DIM)
    assert search_vectors(memory.documents(), queries, 3, layer=0) == []
    assert search_vectors([], queries, 3, layer=0) == []


def test_blocks_that_have_left_are_not_found() -> None:
    memory = memstore.open("ram:", spec=make_spec(capacity=4))
    append(memory.document("long"), random_tokens(9 * S))
    found = search_vectors(memory.documents(), torch.ones(G, 1, KEY_DIM), 9, layer=0)
    assert sorted(match.block for match in found) == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("queries", "top_k"),
    [
        (torch.ones(KEY_DIM), 3),
        (torch.ones(G, 1, KEY_DIM + 1), 3),
        (torch.ones(G + 1, 1, KEY_DIM), 3),
        (torch.ones(G, 0, KEY_DIM), 3),
        (torch.full((G, 1, KEY_DIM), torch.nan), 3),
        (torch.ones(G, 1, KEY_DIM), 0),
    ],
)
def test_queries_that_cannot_be_compared_are_refused(memory: Memory, queries: Tensor, top_k: int) -> None:
    with pytest.raises(InvalidArgument):
        search_vectors(memory.documents(), queries, top_k, layer=0)


def test_layers_without_landmarks_and_blocks_that_are_not_there_are_refused(memory: Memory) -> None:
    assert (check_layer(memory, None), check_layer(memory, 0)) == (2, 0)
    with pytest.raises(InvalidArgument, match="layers with landmarks: 0, 2"):
        check_layer(memory, 1)
    with pytest.raises(NotFound, match="no block 99"):
        search_block(memory.document("whale"), 99, 3, layer=0, among=memory.documents())
    assert P == 2  # what the comparison by hand takes the best of
