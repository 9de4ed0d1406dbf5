"""Codecs: the states of a block in fewer bytes. Pure functions of tensors; ``docs/format.md`` has the formulas.

The last two axes of a field are rows (tokens) and channels. Each channel has one scale for all rows of a block (with
int4, for at most 32 rows). Keys without positions have channels far from zero and from each other; a shared scale would
spend most of its levels on these distances. So a codec stores two tensors for a field: codes of one or half a byte, and
scales in bfloat16, which has the exponents of float32.

A number is decoded as ``code * step``, for int4 as ``low + code * step``, in float32 and rounded once to the type of
the field. The product is exact, so every machine decodes to the same bits. No finite number becomes infinite. A channel
of zeros stays zero; with int8 and fp8 every zero stays zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.store.records import Layout

PIECE = 2**18
"""Numbers decoded at a time: few enough to stay in the processor's cache between two passes."""

_SMALLEST_STEP = torch.finfo(torch.bfloat16).tiny
_LARGEST = {torch.float16: 65280.0}  # the largest number of bfloat16 that is finite in the type of the field
_HALF_BYTE = 4
_TO_FLOAT16 = 256.0  # exponents of e4m3 and of float16 are biased by 7 and by 15


class Codec(ABC):
    """One way to store a floating point field; see ``LOSSY``."""

    @abstractmethod
    def layouts(self, dtype: str, shape: tuple[int, ...]) -> tuple[Layout, ...]:
        """Return the layouts that are stored for a field of ``dtype`` and ``shape`` of one block."""

    @abstractmethod
    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """Encode finite ``states [n, *shape]``: a tensor ``[n, ...]`` for each of ``layouts``."""

    @abstractmethod
    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return states ``[n, *shape]`` of ``dtype`` from the tensors that ``encode`` made."""


class _ScaledCodec(Codec):
    """Codes ``[n, *lead, rows, channels]``, and bfloat16 scales ``[n, count, *lead, groups, channels]``, steps first.

    The rows are split into ``groups`` of equal length, each with its own scales. The last group may be shorter.
    """

    stored: str
    """Element type of the codes."""
    count = 1
    """Scales of each channel and group."""
    most_rows: int | None = None
    """Rows of a group; None: all."""

    def layouts(self, dtype: str, shape: tuple[int, ...]) -> tuple[Layout, ...]:
        del dtype
        *lead, rows, channels = _rows_and_channels(shape)
        groups, length = self._groups(rows)
        codes = (*lead, self._code_rows(groups * length), channels)
        return Layout(self.stored, codes), Layout("bfloat16", (self.count, *lead, groups, channels))

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        limit = _LARGEST.get(states.dtype, torch.finfo(torch.bfloat16).max)
        numbers = states.reshape(len(states), *_rows_and_channels(states.shape[1:])).float()
        groups, length = self._groups(numbers.shape[-2])
        if missing := groups * length - numbers.shape[-2]:  # repeating the last row changes no range
            numbers = torch.cat([numbers, numbers[..., -1:, :].expand(*numbers.shape[:-2], missing, -1)], -2)
        codes, *scales = self._encode(numbers.unflatten(-2, (groups, length)), limit)
        return codes, torch.stack([scale.squeeze(-2) for scale in scales], 1)

    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        codes, scales = stored
        *lead, rows, channels = _rows_and_channels(shape)
        out = torch.empty(len(codes), *lead, *self._groups(rows), channels, dtype=dtype, device=codes.device)
        blocks = max(1, PIECE // out[:1].numel()) if len(out) else 1
        for part, code, scale in zip(out.split(blocks), codes.split(blocks), scales.split(blocks), strict=True):
            self._decode(part, code, *(each.unsqueeze(-2) for each in scale.unbind(1)))
        return out.flatten(-3, -2)[..., :rows, :].reshape(len(out), *shape)

    def _groups(self, rows: int) -> tuple[int, int]:
        """Return the number of groups for ``rows`` rows, and the rows of a group."""
        groups = 1 if self.most_rows is None else -(-rows // self.most_rows)
        return groups, -(-rows // groups)

    def _code_rows(self, rows: int) -> int:
        """Return the rows of codes for ``rows`` rows of numbers."""
        return rows

    @abstractmethod
    def _encode(self, numbers: Tensor, limit: float) -> tuple[Tensor, ...]:
        """Encode float32 ``numbers [.., groups, length, channels]``: codes, scales ``[.., groups, 1, channels]``."""

    @abstractmethod
    def _decode(self, out: Tensor, codes: Tensor, *scales: Tensor) -> None:
        """Fill ``out [.., groups, length, channels]``; scales are ``[.., groups, 1, channels]``."""


class _Int8(_ScaledCodec):
    """One byte per number, from -127 to 127, and a step."""

    stored = "int8"
    largest = 127.0

    def _encode(self, numbers: Tensor, limit: float) -> tuple[Tensor, ...]:
        numbers, step = _stepped(numbers, self.largest, limit)
        return numbers.round_().clamp_(-self.largest, self.largest).to(torch.int8).flatten(-3, -2), step

    def _decode(self, out: Tensor, codes: Tensor, *scales: Tensor) -> None:
        # float16 cannot hold every step; bfloat16 and float32 hold codes and steps, and multiply with one rounding.
        work = out if out.dtype != torch.float16 else torch.empty_like(out, dtype=torch.float32)
        work.copy_(codes.view(out.shape)).mul_(scales[0])
        if work is not out:
            out.copy_(work)


class _Fp8(_ScaledCodec):
    """One byte per number, with the bits of e4m3fn (three of precision), and a step."""

    stored = "uint8"
    largest = 448.0

    def _encode(self, numbers: Tensor, limit: float) -> tuple[Tensor, ...]:
        numbers, step = _stepped(numbers, self.largest, limit)
        codes = numbers.clamp_(-self.largest, self.largest).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).flatten(-3, -2), step

    def _decode(self, out: Tensor, codes: Tensor, *scales: Tensor) -> None:
        # Sign, exponent and fraction are moved to their places in float16: 20 times faster than PyTorch's conversion.
        bits = codes.view(out.shape).view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.copy_(bits.view(torch.float16).float().mul_(scales[0].float() * _TO_FLOAT16))


class _Int4(_ScaledCodec):
    """Half a byte per number, 0 to 15, a step and a low end. Row ``i`` is beside row ``i + half of the rows``."""

    stored = "uint8"
    count = 2
    most_rows = 32
    largest = 15.0

    def _code_rows(self, rows: int) -> int:
        return (rows + 1) // 2

    def _encode(self, numbers: Tensor, limit: float) -> tuple[Tensor, ...]:
        low = _floor(numbers.amin(-2, keepdim=True)).clamp_(-limit, limit)
        # Each is divided by itself, because the difference of two large numbers can be infinite.
        least, most = low.float() / self.largest, numbers.amax(-2, keepdim=True) / self.largest
        step = _step(most - least, limit / self.largest - least)
        numbers = numbers.mul(0.5).sub_(0.5 * low.float()).mul_(2 * _inverse(step))
        codes = numbers.round_().clamp_(0, self.largest).to(torch.uint8).flatten(-3, -2)
        first = self._code_rows(codes.shape[-2])
        packed, second = codes[..., :first, :].contiguous(), codes[..., first:, :]
        packed[..., : second.shape[-2], :].bitwise_or_(second << _HALF_BYTE)
        return packed, step, low

    def _decode(self, out: Tensor, codes: Tensor, *scales: Tensor) -> None:
        work = out if out.dtype != torch.float16 else torch.empty_like(out, dtype=torch.float32)
        first, flat = codes.shape[-2], work.flatten(-3, -2)
        flat[..., :first, :] = codes & 15
        flat[..., first:, :] = (codes >> _HALF_BYTE)[..., : flat.shape[-2] - first, :]
        step, low = (scale.to(work.dtype) for scale in scales)
        torch.addcmul(low, work, step, out=work)
        if work is not out:
            out.copy_(work)


# Every channel of a block has its own scale: keys without positions have channels far from zero. int4 on SmolLM2's keys
# loses 0.7% of the variance with scales of channels over 64 tokens, 8.8% with scales of tokens over 64 channels, 3.7%
# after a Hadamard rotation. Scales are bfloat16: no finite state is too large or too small, and code times step is
# exact in float32. An incomplete block is stored unencoded, and encoded once when it is complete: encoding decoded
# states again would add an error each time.
LOSSY: dict[str, Codec] = {"int8": _Int8(), "fp8": _Fp8(), "int4": _Int4()}
"""Codecs by their names in a spec; with "none" states are stored unencoded."""


def _rows_and_channels(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with an axis of channels; a field with one axis has one channel."""
    return tuple(shape) if len(shape) > 1 else (*shape, 1)


def _stepped(numbers: Tensor, largest: float, limit: float) -> tuple[Tensor, Tensor]:
    """Divide numbers by the step of their channel, so the largest becomes ``largest``; return both."""
    most = numbers.abs().amax(-2, keepdim=True) / largest
    step = _step(most, torch.full_like(most, limit / largest))
    return numbers * _inverse(step), step


def _step(wanted: Tensor, most: Tensor) -> Tensor:
    """Return ``wanted`` in bfloat16, at most ``most``; 0 where it is too small to have an inverse."""
    step = torch.minimum(wanted.to(torch.bfloat16), _floor(most))
    return torch.where(step < _SMALLEST_STEP, 0.0, step)


def _inverse(step: Tensor) -> Tensor:
    """Return ``1 / step`` in float32; 0 where the step is 0."""
    return torch.where(step > 0, step.float().reciprocal(), 0.0)


def _floor(numbers: Tensor) -> Tensor:
    """Return the largest bfloat16 numbers that are not above ``numbers``."""
    nearest = numbers.to(torch.bfloat16)
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    return torch.where(nearest > numbers, below, nearest)
