"""The first look of an exact search: what it leaves out holds nothing, and of a model's keys that is nearly all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memstore.index import ExactIndex
from memstore.index.sieve import LARGEST_TURNED_DIM, Codes, Frame, usable
from memstore.testing.indexes import brute_force


def like_a_model(n: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys ``[n, 1, 1, dim]`` with a large mean and long directions, and queries ``[1, 40, dim]`` with outliers."""
    generator = torch.Generator().manual_seed(seed)
    turned, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
    lengths = torch.logspace(1, -1, dim)
    keys = (torch.randn(n, dim, generator=generator) * lengths) @ turned + 20 * torch.randn(dim, generator=generator)
    queries = torch.randn(1, 40, dim, generator=generator) / lengths @ turned
    queries[..., 3] *= 6
    return keys.view(n, 1, 1, dim), queries


@pytest.mark.parametrize("shape", [(2, 500, 24), (1, 7, 8), (3, 50, 9)])
def test_a_frame_keeps_products_but_for_what_is_the_same_for_all_keys(shape: tuple[int, int, int]) -> None:
    keys = torch.randn(shape) * torch.arange(1, shape[2] + 1) + 5
    frame, queries = Frame.of(keys), torch.randn(6, shape[2])
    for head in range(shape[0]):
        truth = (keys[head] - frame.centre[head]).double() @ queries.double().T
        found = frame.keys(keys)[head].double() @ (queries.double() @ frame.back[head]).T
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-4)
        apart = (keys[head] - frame.centre[head]).norm(dim=1) / frame.keys(keys)[head].norm(dim=1)
        assert float(apart.max()) <= float(frame.stretch[head]) * 1.0001


def test_equal_keys_and_very_long_ones_have_a_frame_too() -> None:
    frame = Frame.of(torch.ones(1, 40, 8))
    assert torch.equal(frame.keys(torch.ones(1, 3, 8)), torch.zeros(1, 3, 8))
    long = torch.randn(1, 10, LARGEST_TURNED_DIM + 1)
    frame = Frame.of(long)
    torch.testing.assert_close(frame.keys(long), long - long.mean(1))
    assert not frame.back.numel()


@pytest.mark.parametrize("dim", [24, 64])
def test_keys_like_those_of_a_model_are_found(dim: int) -> None:
    keys, queries = like_a_model(20_000, dim)
    index = ExactIndex(1, dim, 1)
    index.add(torch.arange(20_000), keys)
    truth = brute_force(torch.arange(20_000), keys, queries, 8)
    found = index.search(queries, 8)
    assert torch.equal(found.ids, truth.ids)
    torch.testing.assert_close(found.scores, truth.scores, rtol=1e-5, atol=1e-3)


def test_a_code_loses_no_more_than_its_group_says() -> None:
    keys, _ = like_a_model(4096, 24, seed=1)
    codes = Codes(4096, (1, 1, 24), Frame.of(keys.transpose(0, 1).flatten(1, 2)))
    codes.extend(keys.transpose(0, 1), 4096)
    turned = codes.frame.keys(keys.transpose(0, 1))[0].view(-1, 32, 24)
    values = codes.values[0].float() * codes.scales[0, :, None, None]
    assert bool(((turned - values).norm(dim=2).amax(1) <= codes.lost[0] * 1.0001).all())
    assert bool((values.norm(dim=2).amax(1) <= codes.longest[0] * 1.0001).all())
    frame = codes.frame.of_head(0, [codes])
    assert frame.reach >= float((codes.lost + codes.longest).max())
    assert frame.apart >= float(keys.norm(dim=3).max())


@pytest.mark.skipif(not usable(torch.device("cpu"), 16), reason="codes are searched in C")
def test_keys_get_codes_after_some_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.index.chunks.CODED_AFTER", 10)
    index, asked = ExactIndex(1, 16, 1), torch.randn(1, 4, 16)
    index.add(torch.arange(9000), torch.randn(9000, 1, 1, 16))
    coded = []
    for _ in range(4):
        index.search(asked, 3)
        coded.append(index._chunks.in_c(None, 0).groups)
    assert coded == [0, 0, 9000 // 32, 9000 // 32]
    index.add(torch.arange(9000, 9100), torch.randn(100, 1, 1, 16))
    index.search(asked, 3)
    assert index._chunks.in_c(None, 0).groups == 9000 // 32


@pytest.mark.parametrize("share", [1, 8, 1 << 40])
def test_if_too_many_groups_are_left_all_keys_are_read(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.index.sieve.LARGEST_SHARE", share)
    keys = torch.randint(-2, 3, (9000, 1, 1, 16)).float()
    keys[100:] = keys[0]  # all groups but a few are equal
    index = ExactIndex(1, 16, 1)
    index.add(torch.arange(9000), keys)
    queries = torch.cat((keys[:1, :, 0], torch.randint(-2, 3, (5, 1, 16)).float(), torch.zeros(1, 1, 16))).view(
        1, 7, 16
    )
    found = index.search(queries, 12)
    truth = brute_force(torch.arange(9000), keys, queries, 12)
    assert torch.equal(found.ids, truth.ids)
    assert torch.equal(found.scores, truth.scores)


@pytest.mark.skipif(not usable(torch.device("cpu"), 64), reason="codes are searched in C")
@pytest.mark.parametrize("queries", [1, 40])
def test_keys_of_groups_that_are_ruled_out_are_not_read(queries: int) -> None:
    keys = torch.randn(9000, 1, 1, 64)
    keys[:100] *= 100
    index, asked = ExactIndex(1, 64, 1), torch.randn(1, 80, 64)
    index.add(torch.arange(9000), keys)
    index.search(asked, 8)  # after so many queries, keys have codes
    found = index.search(asked[:, :queries], 8)
    index._chunks.by_number[0].keys[:, 1000:] *= 1e6  # the best now, for all who look
    assert all(map(torch.equal, index.search(asked[:, :queries], 8), found))
