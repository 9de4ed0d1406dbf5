"""The first look of an exact search: what it leaves out holds nothing, and of a model's keys that is nearly all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memstore.index import ExactIndex, sieve
from memstore.index.sieve import LARGEST_TURNED_DIM, Frame, QueryGroups, Sieve
from memstore.testing.indexes import brute_force


@pytest.fixture(autouse=True)
def codes_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys have codes also where comparing them is no faster, which is where 8-bit products are slow."""
    monkeypatch.setattr(sieve, "fastest", lambda _: "native")


def like_a_model(n: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys ``[n, 1, 1, dim]`` with a large mean and long directions, and queries ``[1, 40, dim]`` with outliers."""
    generator = torch.Generator().manual_seed(seed)
    turned, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
    lengths = torch.logspace(1, -1, dim)
    keys = (torch.randn(n, dim, generator=generator) * lengths) @ turned + 20 * torch.randn(dim, generator=generator)
    queries = torch.randn(1, 40, dim, generator=generator) / lengths @ turned
    queries[..., 3] *= 6
    return keys.view(n, 1, 1, dim), queries


def looked(index: ExactIndex, queries: Tensor, k: int) -> Sieve:
    scans = index._scans(None, k, coded=True)
    return Sieve([scan.groups for scan in scans if scan.groups is not None], queries, 0)


@pytest.mark.parametrize("shape", [(2, 500, 24), (1, 7, 8), (3, 50, 9)])
def test_a_frame_keeps_products_but_for_what_is_the_same_for_all_keys(shape: tuple[int, int, int]) -> None:
    keys = torch.randn(shape) * torch.arange(1, shape[2] + 1) + 5
    frame, queries = Frame.of(keys), torch.randn(6, shape[2])
    for head in range(shape[0]):
        truth = (keys[head] - frame.centre[head]).double() @ queries.double().T
        found = frame.keys(keys)[head].double() @ frame.queries(queries, head).double().T
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-4)
        apart = (keys[head] - frame.centre[head]).norm(dim=1) / frame.keys(keys)[head].norm(dim=1)
        assert float(apart.max()) <= float(frame.stretch[head]) * 1.0001


def test_equal_keys_and_very_long_ones_have_a_frame_too() -> None:
    frame = Frame.of(torch.ones(1, 40, 8))
    assert torch.equal(frame.keys(torch.ones(1, 3, 8)), torch.zeros(1, 3, 8))
    long = torch.randn(1, 10, LARGEST_TURNED_DIM + 1)
    frame = Frame.of(long)
    torch.testing.assert_close(frame.keys(long), long - long.mean(1))
    assert torch.equal(frame.queries(long[0], 0), long[0])


def test_keys_like_those_of_a_model_are_nearly_all_left_out_and_the_true_best_are_found() -> None:
    keys, queries = like_a_model(40_000, 64)
    index = ExactIndex(1, 64, 1)
    index.add(torch.arange(40_000), keys)
    truth = brute_force(torch.arange(40_000), keys, queries, 8)
    found = index.search(queries, 8)
    assert torch.equal(found.ids, truth.ids)
    torch.testing.assert_close(found.scores, truth.scores, rtol=1e-5, atol=1e-3)
    look = looked(index, queries[0], 8)
    left, helped = look.left(truth.scores[0, :, -1], QueryGroups(torch.empty(0).long(), torch.empty(0).long()))
    assert bool(helped.all())
    assert len(left.group) / 40 < int(look.starts[-1]) / 40


@pytest.mark.parametrize("reach", [0.5, 1.0, 3.0])
def test_a_group_that_is_left_out_holds_nothing_of_the_limit_or_more(reach: float) -> None:
    keys, queries = like_a_model(20_000, 24, seed=1)
    index = ExactIndex(1, 24, 1)
    index.add(torch.arange(20_000), keys)
    look = looked(index, queries[0], 1)
    first = 4096  # the first chunk has no codes
    per_group = 32
    groups = int(look.starts[-1])
    scores = keys[first : first + groups * per_group, 0, 0].double() @ queries[0].double().T
    best = scores.view(groups, per_group, -1).amax(1)  # [groups, R]
    limit = scores.mean(0) + reach * (scores.amax(0) - scores.mean(0)) / 3
    none = torch.empty(0, dtype=torch.int64)
    left, helped = look.left(limit.float(), QueryGroups(none, none))
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept[left.group, left.query] = True
    assert bool((kept | (best < limit))[:, helped].all())
    assert bool(helped.any()) or reach < 3


def test_groups_that_were_looked_at_already_are_not_named_again() -> None:
    keys, queries = like_a_model(20_000, 24, seed=2)
    index = ExactIndex(1, 24, 1)
    index.add(torch.arange(20_000), keys)
    look = looked(index, queries[0], 4)
    first = look.best(4)
    assert torch.equal(first.query, torch.arange(40).repeat_interleave(4))
    left, _ = look.left(torch.full((40,), 3e38), first)
    assert left.group.numel() == 0
    again = looked(index, queries[0], 4)
    limit = (keys[:, 0, 0] @ queries[0].T).topk(4, dim=0).values[-1]
    second, helped = again.left(limit, first)
    assert bool(helped.all())
    pairs = torch.cat((torch.stack(first), torch.stack(second)), 1)
    assert len(pairs.unique(dim=1).T) == len(pairs.T)
