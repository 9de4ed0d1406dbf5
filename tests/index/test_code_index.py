"""Codes of tokens: the conformance suite, and late interaction against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


def test_what_the_index_cannot_be_is_said() -> None:
    with pytest.raises(InvalidArgument, match="has no settings"):
        open_index("codes:8", key_heads=1, key_dim=8, keys_per_block=1)
    with pytest.raises(InvalidArgument, match="on the CPU"):
        CodeIndex(1, 8, 1, device="meta")
    assert not lies_on_devices("codes")  # a memory whose model is on a GPU leaves it on the host


def test_codes_may_be_long() -> None:
    keys = signs(40, 1, 2, 1500)
    index = CodeIndex(1, 1500, 2)
    index.add(torch.arange(40), keys)
    found = index.search(keys[:5, :, 1].transpose(0, 1), 1)
    assert found.ids.flatten().tolist() == [0, 1, 2, 3, 4]
    assert found.scores.flatten().tolist() == [1500] * 5
