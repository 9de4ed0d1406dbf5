"""Slots of landmark attention, checked against counting by hand; rotations, and the jumps of the paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from memstore.attention.positions import Rotary, final_slots, local_slot, positional_jumps, searching_slots
from memstore.errors import InvalidArgument

DATA = Path(__file__).parents[1] / "data"


def test_searching_puts_older_blocks_into_one_slot_as_in_figure_2() -> None:
    five, two = torch.tensor(5), 2
    assert searching_slots(torch.arange(5), five, two).tolist() == [0, 0, 0, 1, 2]
    assert int(local_slot(five, two)) == 3


@pytest.mark.parametrize(
    ("chosen", "slots"),
    [([3, 4], [1, 2]), ([0, 2], [0, 1]), ([1, 3], [0, 2]), ([0, 4], [0, 2]), ([-1, 4], [0, 2]), ([-1, 1], [0, 0])],
)
def test_chosen_blocks_are_placed_with_an_empty_slot_between_old_and_recent(
    chosen: list[int], slots: list[int]
) -> None:
    placed = final_slots(torch.tensor(chosen), torch.tensor(5), 2)
    there = [slot for block, slot in zip(chosen, placed.tolist(), strict=True) if block >= 0]
    expected = [slot for block, slot in zip(chosen, slots, strict=True) if block >= 0]
    assert there == expected


@pytest.mark.parametrize("count", range(7))
def test_while_there_are_no_more_blocks_than_are_retrieved_slots_are_true(count: int) -> None:
    blocks, top_k = torch.arange(count), 6
    for slots in (searching_slots, final_slots):
        assert torch.equal(slots(blocks, torch.tensor(count), top_k), blocks)
    assert int(local_slot(torch.tensor(count), top_k)) == count


@pytest.mark.parametrize("count", [1, 5, 6, 7, 8, 40])
def test_recent_blocks_keep_their_distance_from_the_local_tokens(count: int) -> None:
    top_k = 6
    blocks, total = torch.arange(max(0, count - top_k), count), torch.tensor(count)
    for slots in (searching_slots, final_slots):
        distance = local_slot(total, top_k) - slots(blocks, total, top_k)
        assert torch.equal(distance, count - blocks)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_of_rotated_vectors_depend_on_the_distance_alone(interleaved: bool) -> None:
    rotary = Rotary(6, 100.0, interleaved=interleaved)
    q, k = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at = [rotary.turns(torch.tensor(position), torch.float64) for position in (-3, 0, 7, 1_000_000, 1_000_010)]
    near = rotary.rotate(q, at[2]) @ rotary.rotate(k, at[0])
    far = rotary.rotate(q, at[4]) @ rotary.rotate(k, at[3])
    torch.testing.assert_close(near, far)
    assert torch.equal(rotary.rotate(q, at[1]), q)


def test_both_orders_of_pairs_are_one_rotation_of_other_dimensions() -> None:
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    halves, neighbours = Rotary(8), Rotary(8, interleaved=True)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    rotated = halves.rotate(x, halves.turns(torch.arange(5), x.dtype))
    other = neighbours.rotate(x[:, order], neighbours.turns(torch.arange(5), x.dtype))
    torch.testing.assert_close(rotated[:, order], other)


def test_half_types_are_rotated_in_float32() -> None:
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    rotary, positions = Rotary(16), torch.arange(40)
    rotated = rotary.rotate(x, rotary.turns(positions, x.dtype))
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotary.rotate(x.float(), rotary.turns(positions)).bfloat16())


def test_jumped_positions_turn_keys_as_the_published_code_does() -> None:
    given = np.load(DATA / "landmark_posjump.npz")
    jumps = F.pad(torch.from_numpy(given["jumps"]), (1, 0))
    positions = torch.arange(112) + jumps
    rotary = Rotary(16, interleaved=True)
    rotated = rotary.rotate(torch.from_numpy(given["k"]), rotary.turns(positions))
    # Its angles are of float32: at position 800 that is an error of 5e-5.
    torch.testing.assert_close(rotated, torch.from_numpy(given["k_rot"]), rtol=0, atol=5e-4)


def test_positions_jump_after_landmarks_and_nowhere_else() -> None:
    is_landmark = torch.zeros(3, 50, dtype=torch.bool)
    is_landmark[:, 6::7] = True
    positions = positional_jumps(is_landmark, 30, generator=torch.Generator().manual_seed(3))
    steps = positions.diff(dim=1)
    assert positions[:, 0].tolist() == [0, 0, 0]
    assert (steps[~is_landmark[:, :-1]] == 1).all()
    behind = steps[is_landmark[:, :-1]]
    assert behind.min() >= 1
    assert behind.max() <= 30
    assert behind.unique().numel() > 10
    assert torch.equal(positional_jumps(is_landmark, 1), torch.arange(50).expand(3, -1))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="even head size, not 5"):
        Rotary(5)
    with pytest.raises(InvalidArgument, match="at least 1, not 0"):
        positional_jumps(torch.zeros(1, 4, dtype=torch.bool), 0)
