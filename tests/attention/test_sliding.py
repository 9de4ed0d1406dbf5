"""Sliding-window attention against plain masked attention, which is written out here with every pair of tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memstore.attention.sliding import Window, alibi_slopes
from tests.pairs import each, pairs

TOLERANCE = 1e-12  # float64: what remains is the order of sums of some hundred terms


def plain(
    q: Tensor, k: Tensor, v: Tensor, past: int, size: int, empty: list[int] | None, slopes: Tensor | None
) -> Tensor:
    """``q [B, H, M, D]``, ``k, v [B, G, P + M, D]``: every score, masked."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    distance = past + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None]
    if slopes is not None:
        scores = scores - slopes.double()[None, :, None, None] * distance
    hidden = ((distance < 0) | (distance >= size)).expand(len(q), 1, -1, -1).clone()
    for row, missing in enumerate(empty or []):
        hidden[row, :, :, :missing] = True
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def inputs(tokens: int, past: int, *, rows: int = 2, heads: int = 4, groups: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(heads, tokens), (groups, past + tokens), (groups, past + tokens)]
    return [torch.randn(rows, count, length, 6, dtype=torch.float64, requires_grad=True) for count, length in shapes]


def assert_same(
    tokens: int, past: int, size: int, *, empty: list[int] | None = None, alibi: bool = False, **more: Any
) -> Window:
    q, k, v = inputs(tokens, past, **more)
    slopes = alibi_slopes(q.shape[1]) if alibi else None
    missing = None if empty is None else torch.tensor(empty)
    window = Window(tokens, past, size, empty=missing, slopes=slopes, dtype=q.dtype)
    out, expected = window.attend(q, k, v), plain(q, k, v, past, size, empty, slopes)
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), direction)
    theirs = torch.autograd.grad(expected, (q, k, v), direction)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=10 * TOLERANCE, rtol=0)
    return window


@pairs(tokens=[1, 63, 64, 111], size=[1, 11, 64], alibi=[False, True])
def test_it_equals_plain_masked_attention_without_a_past_with_half_of_one_and_with_a_whole_one(
    tokens: int, size: int, alibi: bool
) -> None:
    for past in sorted({0, (size - 1) // 2, size - 1}):
        assert_same(tokens, past, size, alibi=alibi)


@each(tokens=[1, 9, 44, 45, 111], alibi=[False, True, True, False])
def test_rows_may_lack_different_parts_of_the_past(tokens: int, alibi: bool) -> None:
    assert_same(tokens, 10, 11, empty=[0, 4, 10], rows=3, alibi=alibi)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 1), (4, 4), (6, 3)])
@pytest.mark.parametrize("tokens", [5, 70])
def test_query_heads_share_key_heads(tokens: int, heads: int, groups: int) -> None:
    assert_same(tokens, 3, 7, heads=heads, groups=groups)


@pytest.mark.parametrize("rows", [1, 2])
def test_long_segments_are_folded_and_short_ones_are_not(rows: int) -> None:
    assert assert_same(22, 0, 11, rows=rows).tile == 0
    assert assert_same(23, 0, 11, rows=rows).tile == 16


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, in elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it in part
        self.elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                # A view has the elements of what it shows, not of how often it shows them.
                self.elements = max(self.elements, int(tensor.untyped_storage().nbytes()) // tensor.element_size())
        return out


def largest_tensor(tokens: int, *, alibi: bool, past: int = 0) -> int:
    size = 16
    q, k, v = (x.float() for x in inputs(tokens, past))
    with Largest() as seen:
        window = Window(tokens, past, size, slopes=alibi_slopes(4) if alibi else None)
        window.attend(q, k, v).sum().backward()
    return int(seen.elements)


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
def test_no_tensor_grows_faster_than_the_segment(alibi: bool) -> None:
    short, long = largest_tensor(1_024, alibi=alibi), largest_tensor(4_096, alibi=alibi)
    assert long <= 4.1 * short
    assert long < 4_096 * 4_096 / 8


def test_what_is_added_to_the_scores_does_not_grow_with_the_segment() -> None:
    """Only the first tile can see less than the others; their bias is one for all."""
    sizes = []
    for tokens in (1_024, 65_536):
        with Largest() as seen:
            Window(tokens, 0, 16, slopes=alibi_slopes(4))
        sizes.append(seen.elements)
    assert sizes[0] == sizes[1]


def test_what_lies_outside_the_window_has_no_influence_at_all() -> None:
    q, k, v = inputs(90, 0, rows=1)
    out = Window(90, 0, 11, dtype=q.dtype).attend(q, k, v)
    gradient = torch.autograd.grad(out[:, :, 50].sum(), (k, v))
    for part in gradient:
        seen = part.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
        assert seen == list(range(40, 51))


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        # Where heads are no power of two: those of 8 heads, then every other one of 16 heads.
        (12, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_are_those_of_press_and_others(heads: int, expected: list[float]) -> None:
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(expected), atol=0, rtol=1e-7)
