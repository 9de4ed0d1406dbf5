"""Codes of tokens: the conformance suite, and late interaction against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention import late_interaction
from memstore.errors import InvalidArgument
from memstore.index import VectorIndex, lies_on_devices, open_index
from memstore.index import codes as code_index
from memstore.index.codes import CodeIndex
from memstore.kernels.best_products import native, torch_int
from memstore.testing.indexes import IndexTests


class TestCodes(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return open_index("codes", key_heads=key_heads, key_dim=key_dim, keys_per_block=keys_per_block)


class TestCodesInManySmallPieces(IndexTests):
    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(code_index, "CHUNK_KEYS", 20)
        monkeypatch.setattr(torch_int, "TILE_PRODUCTS", 9)
        monkeypatch.setattr(native, "problem", lambda: "is left out here")

    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return CodeIndex(key_heads, key_dim, keys_per_block)


def signs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


def topical(blocks: int, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Codes ``[blocks, 1, size, dim]`` of blocks with a topic each, and 32 codes of the topic of blocks 70 to 77."""
    generator = torch.Generator().manual_seed(0)
    topics = torch.randn(blocks, 1, 1, dim, generator=generator)
    topics[70:78] = topics[77]
    codes = F.normalize(topics + torch.randn(blocks, 1, size, dim, generator=generator), dim=-1)
    asked = topics[77, 0] + torch.randn(32, dim, generator=generator)
    return codes, F.normalize(asked, dim=-1)


def by_definition(codes: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best = torch.einsum("nsd,td->tns", codes[:, 0].double(), queries.double()).amax(-1)
    top = late_interaction(best, queries.norm(dim=-1)).topk(k)
    return top.values, top.indices


@pytest.mark.parametrize("tokens", [1, 5, 32])
@pytest.mark.parametrize("blocks", [1, 63, 500])
def test_few_blocks_are_routed_by_the_definition(blocks: int, tokens: int) -> None:
    index, codes, queries = CodeIndex(1, 24, 7), signs(blocks, 1, 7, 24), signs(tokens, 24, seed=1)
    index.add(3 * torch.arange(blocks), codes)
    scores, ids = index.route(queries, 8)
    want, _ = by_definition(codes, queries, min(8, blocks))
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-4)
    rows = ids // 3
    every = late_interaction(index.score(queries[None])[0][0], queries.norm(dim=-1))
    torch.testing.assert_close(every[rows], scores, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [1, 8])
def test_of_many_blocks_the_best_are_found(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_index, "CANDIDATES", 128)
    monkeypatch.setattr(code_index, "SAMPLE", 512)
    floats, queries = topical(2_000, 8, 64)
    codes = torch.where(floats >= 0, 1.0, -1.0) if bits == 1 else (floats * 225).round().clamp(-127, 127)
    index = CodeIndex(1, 64, 8)
    index.add(torch.arange(2_000), codes)
    scores, ids = index.route(queries, 8)
    want, blocks = by_definition(codes, queries, 8)
    assert set(ids.tolist()) == set(blocks.tolist()) == set(range(70, 78))
    assert float(scores.sum() / want.sum()) == pytest.approx(1, abs=0.03)


def test_codes_as_queries_are_scored_exactly() -> None:
    index, codes, queries = CodeIndex(2, 24, 7), signs(90, 2, 7, 24), 5 * signs(4, 3, 24, seed=1)
    index.add(torch.arange(90), codes)
    exact = torch.einsum("ngsd,grtd->grtns", codes, queries.view(2, 2, 3, 24)).amax(-1).flatten(0, 1)
    assert torch.equal(index.score(queries)[0], exact)


def test_other_queries_are_scored_as_precisely_as_eight_bits_allow() -> None:
    index, codes = CodeIndex(1, 256, 16), signs(90, 1, 16, 256)
    index.add(torch.arange(90), codes)
    queries = F.normalize(torch.randn(1, 32, 256, generator=torch.Generator().manual_seed(1)), dim=-1)
    exact = torch.einsum("nsd,td->tns", codes[:, 0], queries[0]).amax(-1)
    # Each of 256 roundings is off by at most half a step; together they are off by a few times sqrt(256 / 12) steps.
    step = queries.abs().amax(-1)[0, :, None] / 127
    assert ((index.score(queries)[0][0] - exact).abs() <= 5 * (256 / 12) ** 0.5 * step).all()


def test_more_blocks_can_be_routed_to_than_are_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_index, "CANDIDATES", 4)
    monkeypatch.setattr(code_index, "SAMPLE", 8)
    index = CodeIndex(1, 24, 7)
    index.add(torch.arange(90), signs(90, 1, 7, 24))
    for k, found in ((3, 3), (20, 20), (90, 90), (99, 90)):
        scores, ids = index.route(signs(4, 24, seed=1), k)
        assert len(ids.unique()) == found
        assert torch.equal(scores, scores.sort(descending=True).values)


def test_only_a_pruned_index_is_asked_to_route() -> None:
    for settings, routes in (("", False), (":pruned", True)):
        index = open_index(f"codes{settings}", key_heads=1, key_dim=8, keys_per_block=1)
        assert index.capabilities.routes == index.facts()["pruned"] == routes


def test_blocks_that_are_not_allowed_are_not_routed_to() -> None:
    index, codes = CodeIndex(1, 24, 7), signs(50, 1, 7, 24)
    index.add(torch.arange(50), codes)
    assert set(index.route(signs(4, 24, seed=1), 8, allowed=range(10, 15))[1].tolist()) == set(range(10, 15))
    assert index.route(signs(4, 24, seed=1), 8, allowed=range(0))[1].numel() == 0


def test_room_of_blocks_that_left_is_used_again() -> None:
    index = CodeIndex(1, 8, 64)
    for start in range(0, 40_000, 4_000):
        index.add(torch.arange(start, start + 4_000), signs(4_000, 1, 64, 8))
        index.remove(torch.arange(start, start + 3_990))
    assert len(index) == 100
    assert index.nbytes < 2 * (1 << 18) * 11


@pytest.mark.parametrize(("keys", "message"), [(0.5, "whole numbers"), (128.0, "from -127 to 127")])
def test_keys_that_are_no_codes_are_refused(keys: float, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CodeIndex(1, 8, 1).add(torch.arange(1), torch.full((1, 1, 1, 8), keys))


def test_routing_needs_one_key_head() -> None:
    with pytest.raises(InvalidArgument, match="one key head"):
        CodeIndex(2, 8, 1).route(torch.ones(1, 8), 1)


def test_what_the_index_cannot_be_is_said() -> None:
    with pytest.raises(InvalidArgument, match="write 'codes' or 'codes:pruned'"):
        open_index("codes:8", key_heads=1, key_dim=8, keys_per_block=1)
    with pytest.raises(InvalidArgument, match="on the CPU"):
        CodeIndex(1, 8, 1, device="meta")
    assert not lies_on_devices("codes:pruned")  # a memory whose model is on a GPU leaves it on the host


def test_codes_may_be_long() -> None:
    keys = signs(40, 1, 2, 1500)
    index = CodeIndex(1, 1500, 2)
    index.add(torch.arange(40), keys)
    found = index.search(keys[:5, :, 1].transpose(0, 1), 1)
    assert found.ids.flatten().tolist() == [0, 1, 2, 3, 4]
    assert found.scores.flatten().tolist() == [1500] * 5
