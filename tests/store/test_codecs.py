from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstore.store.codecs import LOSSY, PIECE
from tests.pairs import pairs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

# Largest error, in steps between the levels of a channel that runs from its least to its largest number: half of one
# for rounding, and as much again for the scale, which is in bfloat16. Three bits of e4m3fn leave 1/16 of the number.
STEPS = {"int8": 254, "int4": 15, "fp8": 2 * 14}


def round_trip(codec: str, states: Tensor) -> Tensor:
    chosen, shape = LOSSY[codec], tuple(states.shape[1:])
    stored = chosen.encode(states)
    layouts = chosen.layouts(NAMES[states.dtype], shape)
    assert [(NAMES.get(part.dtype, str(part.dtype)[6:]), tuple(part.shape[1:])) for part in stored] == [
        (layout.dtype, layout.shape) for layout in layouts
    ]
    decoded = chosen.decode(stored, states.dtype, shape)
    assert (decoded.dtype, decoded.shape) == (states.dtype, states.shape)
    return decoded


def random_states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers; every channel has a mean and a spread of its own, as those of keys have."""
    made = torch.Generator().manual_seed(seed)
    spread, mean = (torch.randn(shape[-1], generator=made) * scale for scale in (1.0, 4.0))
    return (torch.randn(shape, generator=made) * spread.exp() + mean).to(dtype)


def channel_range(states: Tensor, codec: str) -> Tensor:
    """Range that the levels of each channel cover ``[n, .., 1, channels]``: symmetric about 0 for all but int4."""
    numbers = states.double()
    if codec == "int4":
        return numbers.amax(-2, keepdim=True) - numbers.amin(-2, keepdim=True)
    return 2 * numbers.abs().amax(-2, keepdim=True)


@pairs(
    codec=sorted(LOSSY),
    dtype=DTYPES,
    shape=[(5, 2, 64, 16), (2, 2, 67, 3), (3, 7, 4), (1, 1, 1), (2, 1, 9, 3), (2, 2, 2, 5, 3)],
)
def test_the_error_is_at_most_a_step(codec: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    states = random_states(*shape, dtype=dtype)
    error = (round_trip(codec, states).double() - states.double()).abs()
    rounding = torch.finfo(dtype).eps * states.double().abs() + 2**-8 / 15 * states.double().abs()
    assert (error <= channel_range(states, codec) / STEPS[codec] + rounding).all()


@pytest.mark.parametrize("codec", LOSSY)
def test_the_error_is_small_on_average(codec: str) -> None:
    states = random_states(16, 4, 64, 32)
    error = (round_trip(codec, states) - states).square().mean((0, 1, 2))
    about = states - states.mean((0, 1, 2)) if codec == "int4" else states
    assert float((error / about.square().mean((0, 1, 2))).max()) < {"int8": 1e-4, "fp8": 1e-3, "int4": 1e-2}[codec]


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(codec: str, dtype: torch.dtype) -> None:
    states = random_states(3, 2, 8, 4, dtype=dtype)
    states[1] = 0
    states[2, :, :, 2] = 0
    decoded = round_trip(codec, states)
    assert not decoded[1].any()
    assert not decoded[2, :, :, 2].any()


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_zeros_between_other_numbers_stay_zeros(codec: str) -> None:
    states = random_states(4, 2, 8, 4)
    states[:, :, 5:] = 0
    assert not round_trip(codec, states)[:, :, 5:].any()


@pairs(codec=sorted(LOSSY), dtype=DTYPES, number=[1.0, -3.0, 0.1, 1e-30, 1e-40, 60000.0, torch.inf])
def test_a_constant_comes_back_within_the_precision_of_a_scale(codec: str, dtype: torch.dtype, number: float) -> None:
    largest = torch.finfo(dtype).max
    for sign in (1, -1):
        states = torch.full((2, 3, 4), sign * min(number, largest)).to(dtype)
        decoded = round_trip(codec, states).double()
        exact = states.double()
        assert decoded.isfinite().all()
        assert ((decoded - exact).abs() <= exact.abs() * 2**-6 + 1e-36).all()


@pytest.mark.parametrize("codec", LOSSY)
def test_there_may_be_nothing(codec: str) -> None:
    assert round_trip(codec, torch.empty(0, 2, 8, 4)).numel() == 0


@pytest.mark.parametrize("codec", LOSSY)
def test_a_field_of_one_axis_is_one_channel(codec: str) -> None:
    states = random_states(3, 40, 1)[..., 0]
    assert (round_trip(codec, states) - states).abs().max() <= (states.amax() - states.amin()) / 7


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_do_not_depend_on_each_other(codec: str, dtype: torch.dtype) -> None:
    """Not on how many there are either: what is decoded piece by piece is what one block alone gives."""
    shape = (4, 64, 64)
    states = random_states(2 * PIECE // math.prod(shape) + 3, *shape, dtype=dtype)
    decoded = round_trip(codec, states)
    for number in (0, len(states) // 2, len(states) - 1):
        assert torch.equal(decoded[number], round_trip(codec, states[number : number + 1])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_formulas_are_those_of_the_format(dtype: torch.dtype) -> None:
    """In float32, rounded once; e4m3fn as PyTorch converts it."""
    states = random_states(6, 3, 10, 8, dtype=dtype)
    codes, scales = LOSSY["int8"].encode(states)
    expected = codes.float() * scales[:, 0].float()
    assert torch.equal(round_trip("int8", states), expected.to(dtype))
    codes, scales = LOSSY["fp8"].encode(states)
    expected = codes.view(torch.float8_e4m3fn).float() * scales[:, 0].float()
    assert torch.equal(round_trip("fp8", states), expected.to(dtype))
    codes, scales = LOSSY["int4"].encode(states)
    step, low = scales.float().unbind(1)
    expected = low + torch.cat([codes & 15, codes >> 4], -2).float() * step
    assert torch.equal(round_trip("int4", states), expected.to(dtype))


def test_every_code_of_fp8_is_decoded_as_pytorch_does() -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)  # 127 is NaN
    decoded = LOSSY["fp8"].decode((codes[None, :, None], torch.ones(1, 1, 1, 1).bfloat16()), torch.float32, (254, 1))
    assert torch.equal(decoded.flatten(), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("codec", LOSSY)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_whatever_is_finite_stays_finite_and_near(codec: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    largest = float(torch.finfo(dtype).max)
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 3)))
    number = st.one_of(
        st.floats(-largest, largest, width=32),
        st.sampled_from([0.0, -0.0, largest, -largest, 1e-45, 1e-38, 1.0, -1e-5]),
    )
    numbers = data.draw(st.lists(number, min_size=math.prod(shape), max_size=math.prod(shape)))
    states = torch.tensor(numbers, dtype=torch.float64).clamp(-largest, largest).reshape(shape).to(dtype)
    decoded = round_trip(codec, states)
    assert decoded.isfinite().all()
    exact = states.double()
    nothing = 448 * torch.finfo(torch.bfloat16).tiny  # steps below the smallest are 0, and so is the channel
    allowed = channel_range(states, codec) / STEPS.get(codec, 15) + exact.abs() * 2**-6 + nothing
    assert ((decoded.double() - exact).abs() <= allowed).all()
