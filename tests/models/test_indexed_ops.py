"""Choosing by an index and attending to what was chosen: against plain formulas, with ties, in slices and parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memstore.kernels.latent_attention import attend_rows
from memstore.models.indexed.call import _distinct
from memstore.models.indexed.ops import Chosen, choose


def plainly(scores: Tensor, k: int) -> list[list[int]]:
    """The ``k`` best of each row, of equal ones the first, ascending."""
    rows = []
    for row in scores.tolist():
        seen = [place for place, score in enumerate(row) if score > float("-inf")]
        rows.append(sorted(sorted(seen, key=lambda place: (-row[place], place))[:k]))
    return rows


def packed(chosen: Chosen) -> list[list[int]]:
    return [[place for place in row if place >= 0] for row in chosen.ids.tolist()]


def states(queries: int, heads: int, keys: int, *, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones; whole numbers, so that many scores tie and are exact."""
    generator = torch.Generator().manual_seed(queries + keys)
    sizes = ((queries, heads, 4), (queries, heads), (keys, 4))
    made = [torch.randn(size, generator=generator) for size in sizes]
    return tuple(each.round() if whole else each for each in made)  # type: ignore[return-value]  # three of them


@pytest.mark.parametrize("whole", [True, False])
def test_of_equal_scores_the_smallest_place_comes_first(whole: bool) -> None:
    for queries, keys, k in ((5, 40, 7), (3, 4, 7), (1, 33, 33), (2, 0, 3)):
        asked, weights, index = states(queries, 3, keys, whole=whole)
        limit = torch.arange(queries) * 9 + 1
        products = torch.einsum("shd,td->sht", asked, index).mul(0.5).relu()
        for given in (weights, None):
            scores = (products * (1 if given is None else given[..., None])).sum(1)
            scores = scores.masked_fill(torch.arange(keys) >= limit[:, None], -torch.inf)
            found = choose(asked, given, index, 0.5, limit, k)
            assert packed(found) == plainly(scores.round(decimals=4), k) or not whole
            chosen = [scores[row, ids].sort().values for row, ids in enumerate(packed(found))]
            best = [scores[row, ids].sort().values for row, ids in enumerate(plainly(scores, k))]
            for one, other in zip(chosen, best, strict=True):
                torch.testing.assert_close(one, other)


def test_parts_that_follow_each_other_are_chosen_from_as_one() -> None:
    asked, weights, index = states(4, 3, 50, whole=True)
    whole = choose(asked, weights, index, 0.5, None, 9)
    for cut in (0, 1, 9, 30, 49):
        together = choose(asked, weights, [index[:cut], index[cut:]], 0.5, None, 9)
        assert torch.equal(together.ids, whole.ids)
        assert torch.equal(together.scores, whole.scores)


def test_runs_are_chosen_by_their_best_product() -> None:
    asked, _, index = states(6, 1, 29, whole=True)
    limit = torch.tensor([1, 5, 8, 9, 29, 17])
    products = (asked[:, 0] @ index.T).masked_fill(torch.arange(29) >= limit[:, None], -torch.inf)
    blocks = torch.nn.functional.pad(products, (0, 3), value=-torch.inf).unflatten(1, (8, 4)).amax(2)
    assert packed(choose(asked, None, index, 1.0, limit, 3, "max", 4)) == plainly(blocks, 3)


def test_attention_is_that_of_the_rows_that_were_chosen() -> None:
    generator = torch.Generator().manual_seed(1)
    latent, rope, table = (torch.randn(size, generator=generator) for size in ((5, 3, 6), (5, 3, 2), (20, 8)))
    ids = torch.stack([torch.randperm(20, generator=generator)[:7] for _ in range(5)])
    ids[2, 3:], sinks, rows = -1, torch.randn(3, generator=generator), table[:, None]
    for each in (None, sinks):
        found = attend_rows(torch.cat([latent, rope], -1), rows, rows[..., :6], ids, scale=0.3, sinks=each)[0]
        for row in range(5):
            keys = table[ids[row][ids[row] >= 0]]
            scores = torch.cat([latent[row], rope[row]], -1) @ keys.T * 0.3
            logits = scores if each is None else torch.cat([scores, each[:, None]], 1)
            expected = logits.softmax(-1)[:, : len(keys)] @ keys[:, :6]
            torch.testing.assert_close(found[row], expected)
    values = torch.randn(20, 4, generator=generator)
    apart = attend_rows(latent, rows[..., :6], values[:, None], ids, scale=0.3)[0]
    assert apart.shape == (5, 3, 4)
    weights = (latent[0] @ table[ids[0]][:, :6].T * 0.3).softmax(-1)
    torch.testing.assert_close(apart[0], weights @ values[ids[0]])


@pytest.mark.parametrize("ids", [[[3, 1, -1], [1, 7, 3]], [[3, 1], [1, 7]], [[-1, -1]], [[5]], [[]]])
@pytest.mark.parametrize("far", [0, 1 << 20])  # marked, and sorted
def test_distinct_ids_keep_their_places(ids: list[list[int]], far: int) -> None:
    given = torch.tensor(ids, dtype=torch.int64)
    given = torch.where(given < 0, -1, given + far)
    found, places = _distinct(given)
    assert found.tolist() == sorted({each for row in given.tolist() for each in row} - {-1})
    assert torch.equal(torch.where(places < 0, -1, found[places.clamp(min=0)]) if len(found) else places, given)
