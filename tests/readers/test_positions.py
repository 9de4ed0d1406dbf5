"""Where sink, retrieved blocks, direct and local tokens are placed, checked against counting by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.readers.stock.selection import place

S = 4
LIMIT = 100


def lists(*blocks: list[list[int]]) -> Tensor:
    """``[B, heads, K]`` from a list of lists for each row."""
    return torch.tensor(blocks)


def in_order(blocks: Tensor) -> Tensor:
    """Slots for blocks that stay in the order of their list."""
    return torch.arange(blocks.shape[-1]).expand(blocks.shape)


def tokens_of(*blocks: int) -> list[int]:
    """Numbers of the tokens in ``blocks``."""
    return [block * S + i for block in blocks for i in range(S)]


def around(blocks: Tensor, **more: Any) -> dict[str, Any]:
    """Arguments for ``blocks`` between a sink of 8 tokens and a window of 12 that ends after token 399."""
    options = {"slots": in_order(blocks), "sink": range(8), "direct": range(388, 400)}
    return {"blocks": blocks, **options, "block_size": S, "limit": LIMIT, **more}


def test_stingy_positions_are_consecutive_from_nought_on() -> None:
    placed = place("stingy", **around(lists([[5, 17, 90]])))
    direct = torch.arange(placed.local_start - 12, placed.local_start)
    everything = torch.cat((placed.sink.flatten(), placed.retrieved.flatten(), direct))
    assert everything.tolist() == list(range(8 + 3 * S + 12))


def test_stingy_positions_do_not_grow_with_the_document() -> None:
    near, far = lists([[5, 17]]), lists([[5_000_000, 17_000_000]])
    a = place("stingy", **around(near))
    b = place("stingy", **around(far, direct=range(99_999_988, 100_000_000)))
    assert torch.equal(a.retrieved, b.retrieved)
    assert a.local_start == b.local_start


def test_every_row_and_head_has_stingy_slots_of_its_own() -> None:
    blocks = lists([[1, 2], [3, 9]], [[4, 5], [4, 5]])
    slots = lists([[0, 1], [1, 0]], [[1, 0], [0, 1]])
    placed = place("stingy", **around(blocks, slots=slots))
    first, second = list(range(8, 12)), list(range(12, 16))
    assert placed.retrieved.tolist() == [[first + second, second + first], [second + first, first + second]]
    assert placed.local_start == 8 + 2 * S + 12


def test_every_row_and_head_has_true_positions_of_its_own() -> None:
    placed = place("true", **around(lists([[5, 17], [6, 90]], [[2, 3], [4, 96]])))
    assert placed.retrieved.tolist() == [
        [tokens_of(5, 17), tokens_of(6, 90)],
        [tokens_of(2, 3), tokens_of(4, 96)],
    ]
    assert placed.sink.flatten().tolist() == list(range(8))
    assert placed.local_start == 400


def test_true_positions_know_no_slots_and_no_limit() -> None:
    blocks = lists([[5, 17]])
    a = place("true", **around(blocks))
    b = place("true", **around(blocks, slots=in_order(blocks).flip(-1), limit=1))
    assert torch.equal(a.retrieved, b.retrieved)
    assert a.local_start == b.local_start


@pytest.mark.parametrize("limit", [400, 401, 10_000])
def test_clamped_is_true_where_the_local_tokens_start_within_the_limit(limit: int) -> None:
    blocks = lists([[5, 17], [6, 90]])
    clamped, true = place("clamped", **around(blocks, limit=limit)), place("true", **around(blocks))
    assert torch.equal(clamped.retrieved, true.retrieved)
    assert torch.equal(clamped.sink, true.sink)
    assert clamped.local_start == true.local_start


def test_clamped_moves_all_down_to_the_limit_and_leaves_nothing_below_nought() -> None:
    placed = place("clamped", **around(lists([[5, 80]], [[74, 90]])))  # 300 positions down
    assert placed.local_start == LIMIT
    assert placed.sink.flatten().tolist() == [0] * 8
    assert placed.retrieved.tolist() == [
        [[0] * S + [20, 21, 22, 23]],
        [[0, 0, 0, 0, 60, 61, 62, 63]],
    ]
    straddling = place("clamped", **around(lists([[75]]), direct=range(390, 402)))  # 302 positions down
    assert straddling.retrieved.tolist() == [[[0, 0, 0, 1]]]


@pytest.mark.parametrize("kind", ["stingy", "true", "clamped"])
def test_an_empty_list_takes_no_room(kind: Any) -> None:
    empty = torch.empty(1, 1, 0, dtype=torch.long)
    placed = place(kind, **around(empty, sink=range(0), direct=range(50, 50)))
    assert placed.sink.shape == placed.retrieved.shape == (1, 1, 0)
    assert placed.local_start == (0 if kind == "stingy" else 50)
