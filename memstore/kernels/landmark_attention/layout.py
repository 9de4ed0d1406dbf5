"""The layout of blocks, and of their tokens in the fast forms. It takes a few operations on ``[B, Tk]``.

The PyTorch form stores a block in one or several *pieces* of ``R`` slots: ``R - 1`` ordinary tokens, and the landmark
in the last slot, for any length of the block. So scores are ``[..., N, R]`` for all rows, and a softmax within blocks
runs over the last dimension. A block has several pieces if it is much longer than others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")
Rows = tuple[Tensor, Tensor | None, Tensor | None]
"""Landmarks, real tokens and documents, ``[B, Tk]`` each."""

LONGEST = 128
"""Most ordinary tokens of a piece."""
SIZES = (8, 16, 32, 64, LONGEST)
"""Sizes of pieces for blocks of very different lengths."""
WASTE = 1.5
"""Slots per token above which another size of pieces is tried."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of each row. ``X`` rows, or 1 if all are the same."""

    landmark: Tensor
    """``[X, T]``, True for landmarks that are not padding."""
    ordinary: Tensor
    """``[X, T]``, True for tokens that are neither landmarks nor padding."""
    number: Tensor
    """Number of the block of each token, ``[X, T]``, from 0."""
    document: Tensor
    """Number of the document of each token, ``[X, T]``, from 0."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """``N`` pieces of ``R`` slots for each row. Slots without a token have position ``T``."""

    count: int
    size: int
    regular: bool
    """Slots are the tokens in order."""
    ragged: bool
    """Some pieces before the last are not full."""
    split: bool
    """A block has more than one piece."""
    packed: bool
    """There are several documents in a row."""
    token: Tensor
    """Position of the token in each slot, ``[X, N * R]``."""
    slot: Tensor
    """Slot of each token, ``[X, T]``; any number for padding."""
    ordinary: Tensor
    """``[X, N, R]``: position of each ordinary token."""
    landmark: Tensor
    """Position of the landmark of the block of each piece, ``[X, N]``."""
    landmark_piece: Tensor
    """The piece that has it, ``[X, N]``."""
    block: Tensor
    """Number of the block of each piece, ``[X, N]``; -1 for none."""
    document: Tensor
    """Number of the document of each piece, ``[X, N]``; -1 for none."""


def find(is_landmark: Tensor, key_padding: Tensor | None, documents: Tensor | None) -> Blocks:
    """Find the blocks of ``is_landmark [B, T]``: each ends with its landmark, or with its document."""
    if key_padding is not None and bool(key_padding.all()):
        key_padding = None
    if all(x is None or bool((x == x[:1]).all()) for x in (is_landmark, key_padding, documents)):
        is_landmark = is_landmark[:1]
        key_padding, documents = (None if x is None else x[:1] for x in (key_padding, documents))
    real = torch.ones_like(is_landmark) if key_padding is None else key_padding
    landmark = is_landmark & real
    number, document = numbered(landmark, documents)
    return Blocks(landmark=landmark, ordinary=real & ~landmark, number=number, document=document)


def numbered(landmark: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Number the block and the document of each token, ``[B, Tk]`` each, counted from 0 along a row.

    A block ends with its landmark, or with its document; a document ends where the number in ``documents`` changes.
    """
    begins = torch.zeros_like(landmark)
    if documents is not None:
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    document = begins.cumsum(1)
    begins[:, 1:] |= landmark[:, :-1]
    return begins.cumsum(1), document


def pieces(blocks: Blocks) -> Pieces:
    """Make pieces for blocks, with the size of the longest block, or a size that needs few slots in all."""
    rows, tokens = blocks.number.shape
    position = torch.arange(tokens, device=blocks.number.device)
    many = int(blocks.number.max()) + 1
    lengths = blocks.number.new_zeros(rows, many).scatter_add_(1, blocks.number, blocks.ordinary.long())
    length = best_length(lengths, tokens)
    size = length + 1
    before = blocks.ordinary.cumsum(1) - lengths.cumsum(1).sub(lengths).gather(1, blocks.number) - 1  # in the block
    empty = blocks.landmark & (lengths.gather(1, blocks.number) == 0)
    piece = (blocks.ordinary & (before % length == 0) | empty).cumsum(1) - 1
    count = max(int(piece[:, -1].max()) + 1, 1)
    slot = piece * size + torch.where(blocks.landmark, length, before % length)
    placed = blocks.ordinary | blocks.landmark
    token = slot.new_full((rows, count * size + 1), tokens)
    token.scatter_(1, torch.where(placed, slot, count * size), torch.where(placed, position, tokens))
    token = token[:, :-1]
    table = token.view(rows, count, size)
    first = table.amin(-1)  # position of one token of the piece
    there, at = first < tokens, first.clamp(max=tokens - 1)
    ends = slot.new_full((rows, many), tokens)
    ends.scatter_reduce_(1, blocks.number, torch.where(blocks.landmark, position, tokens), "amin")
    landmark = torch.where(there, ends.gather(1, blocks.number.gather(1, at)), tokens)
    ordinary = table.clone()
    ordinary[..., -1] = tokens
    used = torch.nn.functional.pad(token, (0, max(0, tokens - count * size)), value=tokens)[:, :tokens]
    return Pieces(
        count=count,
        size=size,
        regular=bool((used == position).all()),
        ragged=bool((ordinary[:, :-1, :-1] == tokens).any()),
        split=bool((lengths > length).any()),
        packed=bool(blocks.document[:, -1].any()),
        token=token,
        slot=slot.clamp(0, count * size - 1),
        ordinary=ordinary,
        landmark=landmark,
        landmark_piece=piece.gather(1, landmark.clamp(max=tokens - 1)).clamp(min=0),
        block=torch.where(there, blocks.number.gather(1, at), -1),
        document=torch.where(there, blocks.document.gather(1, at), -1),
    )


def best_length(lengths: Tensor, tokens: int) -> int:
    """Return the ordinary tokens of a piece, for blocks of ``lengths [X, blocks]`` ordinary tokens."""

    def slots(length: int) -> int:
        return int((-(-lengths // length)).clamp(min=1).sum(1).max()) * (length + 1)

    longest = max(1, min(int(lengths.max()), LONGEST))
    if slots(longest) <= WASTE * tokens:
        return longest
    return min((longest, *SIZES), key=slots)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Blocks as runs of consecutive tokens for a kernel, in int32.

    Incomplete blocks, which only their own queries see, may have several tiles; other blocks have one tile each.
    """

    count: int
    size: int
    """Tokens of the longest tile."""
    limited: bool
    """Queries do not see all earlier tiles, because of several documents or a window."""
    regular: bool
    """Every tile begins at a multiple of ``size``, and its last place is its landmark, or empty."""
    starts: Tensor
    """``[X, N + 1]``: the first token of each tile; ``T`` for missing tiles."""
    until: Tensor
    """``[X, N]``: the first position that no longer sees the tile."""
    ordinary: Tensor
    """``[X, T]``, int8: 1 for tokens that are neither landmarks nor padding."""
    tile: Tensor
    """Number of the tile of each token, ``[X, T]``."""
    own: Tensor
    """The first tile of the block of each token, ``[X, T]``."""
    first: Tensor
    """The first tile that the query at each position sees, ``[X, T]``."""


def tiles(blocks: Blocks, window: int | None) -> Tiles:
    """Make tiles for blocks."""
    number, (rows, tokens) = blocks.number, blocks.number.shape
    position = torch.arange(tokens, device=number.device).expand(rows, -1)
    many = int(number.max()) + 1
    lengths = number.new_zeros(rows, many).scatter_add_(1, number, torch.ones_like(number))
    closed = number.new_zeros(rows, many).scatter_add_(1, number, blocks.landmark.long())
    size = int((lengths * closed).max()) or min(tokens, 64)
    offset = position - (lengths.cumsum(1) - lengths).gather(1, number)
    begins = (offset == 0) | (offset % size == 0) & (closed.gather(1, number) == 0)
    tile = begins.cumsum(1) - 1
    count = int(tile[:, -1].max()) + 1
    starts = tile.new_full((rows, count + 1), tokens)
    starts.scatter_reduce_(1, tile, position, "amin")
    document_begins = begins & (blocks.document != torch.nn.functional.pad(blocks.document, (1, 0), value=-1)[:, :-1])
    begin = torch.where(document_begins, position, 0).cummax(1).values
    lasts = starts[:, 1:] - 1  # the last token of each tile
    end = torch.where(document_begins, position, tokens).flip(1).cummin(1).values.flip(1)  # at or after
    end = torch.nn.functional.pad(end, (0, 1), value=tokens)  # end of the document of the token before
    until = end.gather(1, lasts + 1)
    first = tile.gather(1, begin)
    if window is not None:
        first = torch.maximum(first, tile.gather(1, (position - window + 1).clamp(min=0)))
        until = torch.minimum(until, lasts + window)
    return Tiles(
        count=count,
        size=size,
        limited=window is not None or bool(blocks.document[:, -1].any()),
        regular=bool(((offset == position % size) & (blocks.ordinary == (position % size < size - 1))).all()),
        starts=starts.int(),
        until=until.int(),
        ordinary=blocks.ordinary.to(torch.int8),
        tile=tile.int(),
        own=tile.gather(1, position - offset).int(),
        first=first.int(),
    )


def remembered(make: Callable[..., Made]) -> Callable[..., Made]:
    """Remember the last result, because all layers of a model need the same.

    Tensors are compared by their content, not only by identity, so writing in place is noticed.
    """
    last: list[tuple[tuple[Any, ...], dict[str, Any], Made]] = []

    def call(rows: Rows, **settings: Any) -> Made:
        if last:
            known, before, made = last[0]
            if before == settings and all(_same(x, *y) for x, y in zip(rows, known, strict=True)):
                return made
        made = make(rows, **settings)
        copies = tuple((None, None, None) if x is None else (x, x.clone(), _version(x)) for x in rows)
        last[:] = [(copies, settings, made)]
        return made

    return call


def _same(x: Tensor | None, before: Tensor | None, copy: Tensor | None, version: int | None) -> bool:
    if x is None or copy is None:
        return x is copy
    if x is before and version is not None and _version(x) == version:
        return True  # without waiting for the device
    return x.device == copy.device and x.dtype == copy.dtype and torch.equal(x, copy)


def _version(x: Tensor) -> int | None:
    """Return the number of in-place writes to a tensor; None for inference tensors, which do not count them."""
    return None if x.is_inference() else x._version
