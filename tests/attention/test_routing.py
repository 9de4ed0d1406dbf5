"""Codes and scores, against loops that follow the words of the module."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention import Router, choose, late_interaction, pooled, slots_by_score, sub_block_means
from memstore.attention.routing import FLOOR, INHERITED, inherited

HIDDEN = 24


def correlated(n: int, seed: int = 0) -> Tensor:
    """Hidden states ``[n, 24]`` that are alike in some directions and far from the origin."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(99))
    return torch.randn(n, HIDDEN, generator=generator) @ mixing + 5.0


def random_scores(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# Routers


@pytest.mark.parametrize("dim", [1, 8, 23])
def test_codes_before_they_are_normalised_have_the_identity_as_covariance(dim: int) -> None:
    hidden = correlated(2_000)
    router = Router.fit(hidden, dim)
    codes = (F.normalize(hidden, dim=-1) - router.mean).double() @ router.basis.double()
    covariance = codes.T @ codes / len(codes)
    torch.testing.assert_close(covariance, torch.eye(dim, dtype=torch.double), rtol=0, atol=1e-3)
    torch.testing.assert_close(codes.mean(0), torch.zeros(dim, dtype=torch.double), rtol=0, atol=1e-3)


def test_the_directions_are_those_of_most_variance() -> None:
    hidden = correlated(500)
    unit = F.normalize(hidden.double(), dim=-1)
    deviations = torch.linalg.svdvals(unit - unit.mean(0)) / math.sqrt(len(unit))
    lengths = Router.fit(hidden, 5).basis.double().norm(dim=0)
    torch.testing.assert_close(1 / lengths.flip(0), deviations[:5], rtol=1e-4, atol=0)


def test_codes_are_whitened_unit_vectors() -> None:
    router, hidden = Router.fit(correlated(500), 8), correlated(30, seed=1)
    want = torch.stack([F.normalize((h / h.norm() - router.mean) @ router.basis, dim=0) for h in hidden])
    torch.testing.assert_close(router.encode(hidden), want)
    torch.testing.assert_close(router.encode(hidden.unflatten(0, (5, 6))), want.unflatten(0, (5, 6)))


def test_the_length_of_a_hidden_state_does_not_count() -> None:
    router, hidden = Router.fit(correlated(500), 8), correlated(30, seed=1)
    torch.testing.assert_close(router.encode(hidden * 1_000), router.encode(hidden))


@pytest.mark.parametrize("n", [1, 2, 3, 16])
def test_a_short_sample_gives_finite_codes_of_unit_length(n: int) -> None:
    sample = correlated(n)
    router = Router.fit(sample, 16)
    assert router.encode(sample).isfinite().all()
    codes = router.encode(correlated(50, seed=1))
    assert codes.isfinite().all()
    torch.testing.assert_close(codes.norm(dim=-1), torch.ones(50))


def test_a_sample_that_repeats_one_token_gives_finite_codes() -> None:
    router = Router.fit(correlated(1).expand(300, -1), 8)
    assert router.encode(correlated(50, seed=1)).isfinite().all()


def test_a_code_of_a_query_is_as_long_as_its_token_counts() -> None:
    hidden, weight = correlated(30, seed=1), torch.randn(HIDDEN)
    fitted = Router.fit(correlated(500), 8)
    router = Router(fitted.mean, fitted.basis, weight)
    counts = [2 / (1 + math.exp(-float((h / h.norm() - router.mean) @ weight))) for h in hidden]
    assert router.ask(hidden).norm(dim=-1).tolist() == pytest.approx(counts, rel=1e-5)
    torch.testing.assert_close(F.normalize(router.ask(hidden), dim=-1), router.encode(hidden))
    assert torch.equal(fitted.ask(hidden), router.encode(hidden))


def test_a_router_made_again_from_its_arrays_is_the_same() -> None:
    hidden, fitted = correlated(30, seed=1), Router.fit(correlated(500), 8)
    for router in (fitted, Router(fitted.mean, fitted.basis, torch.randn(HIDDEN))):
        again = Router.from_arrays(router.to_arrays(), HIDDEN, 8)
        assert torch.equal(again.ask(hidden), router.ask(hidden))


# Scores of blocks


def late_interaction_by_hand(scores: Tensor, weights: Tensor) -> list[float]:
    """What the words say: standardise over blocks, at least 1 each, sum over the tokens as much as each counts."""
    sums = [0.0] * scores.shape[1]
    for token, weight in zip(scores.double().tolist(), weights.tolist(), strict=True):
        mean = sum(token) / len(token)
        deviation = math.sqrt(sum((score - mean) ** 2 for score in token) / len(token))
        for block, score in enumerate(token):
            sums[block] += weight * max(FLOOR, (score - mean) / max(deviation, 1e-6))
    return sums


@pytest.mark.parametrize("tokens", [1, 31, 111])
def test_late_interaction_is_the_loop(tokens: int) -> None:
    for blocks in (1, 2, 63):
        scores, weights = random_scores(tokens, blocks), torch.rand(tokens)
        wanted = late_interaction_by_hand(scores, weights)
        assert late_interaction(scores, weights).tolist() == pytest.approx(wanted, rel=1e-4)
        assert torch.allclose(late_interaction(scores), late_interaction(scores, torch.ones(tokens)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert late_interaction(scores, weights).tolist() == pytest.approx(wanted, rel=1e-4)


def test_tokens_for_which_no_block_stands_out_do_not_choose() -> None:
    indifferent = torch.zeros(20, 50)
    pointing = F.one_hot(torch.tensor([7]), 50).float()
    blocks = late_interaction(torch.cat((indifferent, pointing)))
    assert blocks.argmax() == 7
    assert blocks[blocks != blocks[7]].unique().tolist() == [21 * FLOOR]


def test_a_block_inherits_from_the_one_before_it_in_its_document() -> None:
    scores = torch.tensor([10.0, 1.0, 9.9, 2.0, 1.0])
    follows = torch.tensor([False, True, True, False, True])
    got = inherited(scores, follows)
    assert got.tolist() == pytest.approx([10.0, 10 * INHERITED, 9.9, 2.0, 2 * INHERITED])


def test_nothing_is_inherited_twice() -> None:
    got = inherited(torch.tensor([10.0, 0.0, 0.0]), torch.tensor([False, True, True]))
    assert got.tolist() == pytest.approx([10.0, 10 * INHERITED, 0.0])


def pooled_by_hand(scores: Tensor, pool: str, lists: int) -> Tensor:
    """Best or mean token of each head, standardised over blocks, mean over the heads of a list."""
    heads = []
    for head in scores:
        blocks = head.max(0).values if pool == "max" else head.sum(0) / len(head)
        heads.append((blocks - blocks.mean()) / blocks.std(correction=0))
    size = len(heads) // lists
    return torch.stack([sum(heads[i * size : (i + 1) * size], torch.zeros(())) / size for i in range(lists)])


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize(("tokens", "lists"), [(1, 2), (31, 1), (31, 6)])
def test_lists_of_heads_are_the_loop(tokens: int, lists: int, pool: Any) -> None:
    scores = random_scores(6, tokens, 11)
    torch.testing.assert_close(pooled(scores, pool=pool, lists=lists), pooled_by_hand(scores, pool, lists))


def test_no_head_outvotes_the_others_by_its_scale() -> None:
    scores = random_scores(4, 5, 11)
    louder = scores * torch.tensor([1.0, 1_000.0, 1.0, 1.0])[:, None, None]
    torch.testing.assert_close(pooled(louder, pool="max", lists=2), pooled(scores, pool="max", lists=2))


# Lists


def test_the_best_blocks_are_chosen_in_the_order_of_the_document() -> None:
    scores = torch.tensor([[3.0, 9.0, 1.0, 5.0], [8.0, 0.0, 7.0, -1.0]])
    numbers, best = choose(scores, 2)
    assert numbers.tolist() == [[1, 3], [0, 2]]
    assert best.tolist() == [[9.0, 5.0], [8.0, 7.0]]


def test_no_more_blocks_are_chosen_than_there_are() -> None:
    assert choose(torch.tensor([2.0, 1.0]), 8)[0].tolist() == [0, 1]
    assert choose(torch.empty(3, 0), 8)[0].shape == (3, 0)


def test_the_best_block_takes_the_last_slot() -> None:
    scores = torch.tensor([[[3.0, 9.0, 1.0]], [[1.0, 2.0, 3.0]]])
    assert slots_by_score(scores).tolist() == [[[1, 2, 0]], [[0, 1, 2]]]


def test_blocks_of_one_score_keep_their_order() -> None:
    assert slots_by_score(torch.ones(5)).tolist() == [0, 1, 2, 3, 4]


# Landmarks of layers that choose for themselves


@pytest.mark.parametrize("keys_per_block", [1, 2, 4, 12])
def test_landmarks_are_means_of_consecutive_keys(keys_per_block: int) -> None:
    keys = random_scores(3, 2, 12, 5).bfloat16()
    got = sub_block_means(keys, keys_per_block)
    size = 12 // keys_per_block
    want = [keys[:, :, i * size : (i + 1) * size].float().sum(2) / size for i in range(keys_per_block)]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.stack(want, dim=2))


def test_as_many_landmarks_as_tokens_are_the_keys() -> None:
    keys = random_scores(3, 2, 12, 5)
    assert torch.equal(sub_block_means(keys, 12), keys)
