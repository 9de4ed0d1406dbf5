"""Signs as bits: the conformance suite, and scores beside those of the exact index."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import VectorIndex, open_index
from memstore.index.exact import ExactIndex
from memstore.kernels.best_signs import problem
from memstore.testing.indexes import IndexTests

if reason := problem():
    pytest.skip(f"an index of signs {reason}", allow_module_level=True)


def signs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


class TestSigns(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return open_index("signs", key_heads=key_heads, key_dim=key_dim, keys_per_block=keys_per_block)

    def keys(self, *shape: int, seed: int = 0) -> Tensor:
        keys = signs(*shape, seed=seed)
        keys[..., 0] = -1
        return keys

    def best_keys(self, *shape: int) -> Tensor:
        return torch.ones(shape)


def test_a_search_finds_what_the_exact_index_finds_among_scores_that_lie_close() -> None:
    index = open_index("signs", key_heads=2, key_dim=256, keys_per_block=16)
    other = ExactIndex(2, 256, 16, torch.bfloat16)
    keys, ids = signs(700, 2, 16, 256), 3 * torch.arange(700)
    keys[1::2] = keys[::2]
    keys[1::2, :, :, -1] *= -1  # blocks that differ in the last number alone
    queries = torch.nn.functional.normalize(torch.randn(4, 9, 256, generator=torch.Generator().manual_seed(1)), dim=-1)
    for each in (index, other):
        each.add(ids, keys)
    found, true = index.search(queries, 20), other.search(queries, 20)
    torch.testing.assert_close(found.scores, true.scores)
    same = (found.ids == true.ids) | torch.isclose(found.scores, true.scores, rtol=1e-6)
    assert same.all()
    assert (found.ids == true.ids).float().mean() > 0.99


def test_a_score_is_closer_than_that_of_products_in_bfloat16() -> None:
    index = open_index("signs", key_heads=1, key_dim=256, keys_per_block=64)
    other = ExactIndex(1, 256, 64, torch.bfloat16)
    keys, queries = signs(200, 1, 64, 256), torch.randn(1, 22, 256, generator=torch.Generator().manual_seed(1))
    truth = torch.einsum("nsd,td->tns", keys[:, 0].double(), queries[0].double()).amax(-1)
    for each in (index, other):
        each.add(torch.arange(200), keys)
    near, far = ((each.score(queries)[0][0] - truth).abs().max() for each in (index, other))
    assert near < far / 3
    assert index.nbytes < other.nbytes / 10


def test_a_document_that_loses_its_oldest_blocks_holds_room_for_no_more_than_it_has() -> None:
    index = open_index("signs", key_heads=1, key_dim=8, keys_per_block=64)
    for start in range(0, 40_000, 4_000):
        index.add(torch.arange(start, start + 4_000), signs(4_000, 1, 64, 8))
        index.remove(torch.arange(start, start + 3_990))
        index.remove(torch.arange(start + 3_990, start + 4_000))
    assert len(index) == 0
    assert index.nbytes < 3 * 4_000 * 2 * 64 * 2


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"\+1 or -1"):
        open_index("signs", key_heads=1, key_dim=8, keys_per_block=1).add(torch.arange(1), torch.zeros(1, 1, 1, 8))
    with pytest.raises(InvalidArgument, match="no settings"):
        open_index("signs:x", key_heads=1, key_dim=8, keys_per_block=1)
