"""Where the tokens of a call stand, where blocks are placed beside them, and what of each other they see.

States are stored without positions; positions are applied when blocks are fetched. What a query sees is, in this order,

    sink | retrieved blocks | direct tokens (the window) | local tokens (the segment itself)

``stingy`` gives these consecutive positions from 0 on, however long the document is (after section 3.2.1 of Mohtashami
& Jaggi 2023), one slot of ``block_size`` positions for each retrieved block. ``true`` gives every token its place in
the document; it is exact while the document is shorter than what the model was trained for. ``clamped`` is ``true``,
moved down so that the local tokens start at ``limit`` at most, with everything that would come before 0 at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.readers.kinds import Positions
from memstore.readers.stock.architecture import CosSin, LayerRotary
from memstore.readers.stock.selection import CandidateLists, FetchedList, Selection
from memstore.readers.stock.visible import Candidates, Visible
from memstore.transfer import to_device

MEMOS = 1024
"""Positions and rotations of lists of blocks kept before all are made anew; a small ``every`` alone makes that many."""


@dataclass(frozen=True)
class Placement:
    """Positions of everything that comes before the local tokens."""

    sink: Tensor
    """``[1, 1, sink tokens]``"""
    retrieved: Tensor
    """``[B or 1, heads or 1, K * S]``"""
    local_start: int
    """Position of the first local token; direct tokens are placed right before it."""


def place(
    kind: Positions,
    *,
    sink: range,
    direct: range,
    blocks: Tensor,
    slots: Tensor,
    block_size: int,
    limit: int,
) -> Placement:
    """Place ``sink`` and ``direct`` (ranges of token numbers) and the retrieved ``blocks [B, heads, K]``.

    ``slots [B, heads, K]`` says which of the K slots each block takes (stingy positions only).
    ``limit`` is the highest position that the local tokens may start at, for ``clamped``.
    """
    device = slots.device
    within = torch.arange(block_size, device=device)
    if kind == "stingy":
        taken = len(sink) + slots.unsqueeze(-1) * block_size + within
        start = len(sink) + blocks.shape[-1] * block_size + len(direct)
        return Placement(torch.arange(len(sink), device=device)[None, None], taken.flatten(-2), start)
    shift = max(0, direct.stop - limit) if kind == "clamped" else 0
    true = blocks.unsqueeze(-1) * block_size + within
    return Placement(
        (torch.arange(sink.start, sink.stop, device=device) - shift).clamp(min=0)[None, None],
        (true - shift).clamp(min=0).flatten(-2),
        direct.stop - shift,
    )


class LocalTokens:
    """The local tokens of a call: how many there are, their positions, and their masks. All layers share them."""

    def __init__(self, selection: Selection, seen: Visible, candidates: Candidates) -> None:
        self.selection, self.seen, self.candidates = selection, seen, candidates
        self.slots = selection.slots(candidates)
        self.device = torch.device("cpu")
        self.clock: Tensor | None = None
        """See ``Steps``: what ``length`` is, on the device."""
        self.start_again()

    def start_again(self) -> None:
        """Stand without local tokens."""
        self.length = 0
        self.tokens = 0
        self.padding: Tensor | None = None
        self.memo: dict[object, Any] = {}
        """What is known of a list of blocks; it holds the list, so that its id is not used again."""
        self._step_memo: dict[object, Any] = {}

    def stand(self, tokens: int, padding: Tensor | None, device: torch.device) -> None:
        """Take the places of ``tokens`` new tokens; ``padding [B, local tokens]`` is True on real tokens."""
        self.tokens, self.padding, self.device = tokens, padding, device
        self._step_memo.clear()
        if len(self.memo) > MEMOS:
            self.memo.clear()
        self.positions = self._local_positions()
        self._check_positions()

    def placement(self, chosen: CandidateLists | None) -> Placement:
        """The positions of what is seen of the memory, with the list ``chosen``."""
        key = ("placement", id(chosen))
        if key not in self.memo:
            blocks = slots = torch.zeros(1, 1, self.slots, dtype=torch.long, device=self.device)
            if chosen is not None:
                blocks, slots = self._where(chosen)
            placement = place(
                self.selection.retrieval.positions,
                sink=self.seen.sink,
                direct=self.seen.direct,
                blocks=blocks,
                slots=slots,
                block_size=self.selection.block_size,
                limit=self.selection.position_limit,
            )
            self.memo[key] = (chosen, placement)  # holding the tensor keeps its id from being used again
        placement = self.memo[key][1]
        assert isinstance(placement, Placement)
        return placement

    def _where(self, chosen: CandidateLists) -> list[Tensor]:
        """Blocks and slots of a list on the device."""
        key = ("where", id(chosen))
        if key not in self.memo:
            self.memo[key] = (chosen, *to_device(self.numbered(chosen), self.device))
        return list(self.memo[key][1:])

    def numbered(self, chosen: CandidateLists) -> list[Tensor]:
        """Blocks and slots of a list, in host memory."""
        return [self.candidates.blocks[chosen.numbers], chosen.slots]

    @property
    def start(self) -> int:
        """Position of the first local token."""
        return self.placement(None).local_start

    def _local_positions(self) -> Tensor:
        """Positions of the new tokens, ``[B or 1, T]``; padding is skipped over."""
        if self.clock is not None:
            return (self.start + self.clock)[None]
        return self._all_local_positions()[:, -self.tokens :]

    def _all_local_positions(self, count: int | None = None) -> Tensor:
        """Of all local tokens ``[B or 1, n]``, or of the first ``count``, which need not be there yet."""
        if self.padding is None:
            count = self.length + self.tokens if count is None else count
            return torch.arange(self.start, self.start + count, device=self.device)[None]
        return self.start + (self.padding.long().cumsum(-1) - 1).clamp(min=0)

    def _check_positions(self) -> None:
        architecture = self.selection.architecture
        if not architecture.learned_positions:
            return
        alone = self.start + self.length + self.tokens - 1
        last = alone if self.padding is None else int(self.positions.max())
        if last >= architecture.max_positions:
            raise InvalidArgument(
                f"{architecture.name} has learned positions for {architecture.max_positions} tokens, and this call "
                f"needs position {last}: use a smaller window, sink or top_k, or a shorter text"
            )

    def prefix_cos_sin(self, rotary: LayerRotary, positions: Tensor, rows: int) -> CosSin | None:
        """Cosines and sines for ``positions [B or 1, heads or 1, n]``, shared by the layers that have the same table.

        Where heads differ, rows and heads become one dimension.
        """
        key = ("prefix", rotary.table, id(positions))
        if key not in self.memo:
            rows = rows if positions.shape[1] > 1 else 1
            flat = positions.expand(max(rows, len(positions)), -1, -1).flatten(0, 1)
            self.memo[key] = (positions, rotary.cos_sin(flat))
        cos_sin: CosSin | None = self.memo[key][1]
        return cos_sin

    def local_cos_sin(self, rotary: LayerRotary) -> CosSin | None:
        """Cosines and sines of the new tokens."""
        if rotary.table not in self._step_memo:
            self._step_memo[rotary.table] = rotary.cos_sin(self.positions)
        cos_sin: CosSin | None = self._step_memo[rotary.table]
        return cos_sin

    def mask(
        self, dtype: torch.dtype, sliding: int | None, fetched: FetchedList | None, prefix: Tensor, room: int
    ) -> Tensor | None:
        """Additive mask ``[B or 1, heads or 1, T, M]`` for the last ``M`` keys of a layer; None where all are visible.

        The memory is visible to every token, unless a sliding window ends within it or a block is not full. The layer
        attends to the list ``fetched``, among keys at the positions ``prefix [B or 1, heads or 1, P]``, with which its
        ``room`` keys begin.
        """
        empty = self._empty(fetched)
        alone = self.clock is None
        if alone and self.tokens == 1 and self.padding is None and sliding is None and empty is None:
            return None
        # By the clock keys beyond the token are there too, and are not seen: as many as the buffer holds.
        count = self.length + self.tokens if alone else room - prefix.shape[-1]
        whole = sliding is not None or empty is not None or not alone
        key = ("mask", sliding, count, id(prefix) if whole else None, id(empty))
        if key not in self._step_memo:
            visible = self._visible_local(count)
            if whole:
                visible = torch.nn.functional.pad(visible, (prefix.shape[-1], 0), value=True)
            if sliding is not None:
                visible = visible & self._within(prefix, sliding, count)
            if empty is not None:
                visible = visible & ~torch.nn.functional.pad(empty, (0, visible.shape[-1] - empty.shape[-1]))
            self._step_memo[key] = torch.zeros(visible.shape, dtype=dtype, device=self.device).masked_fill_(
                ~visible, float("-inf")
            )
        mask: Tensor = self._step_memo[key]
        return mask

    def _empty(self, fetched: FetchedList | None) -> Tensor | None:
        """``[B or 1, lists, 1, n]``: where the first ``n`` keys of a layer have no token, or None."""
        if fetched is None or not (self.candidates.incomplete or fetched.void is not None):
            return None
        chosen, start, void = fetched.chosen, fetched.start, fetched.void
        key = ("empty", id(chosen), start)
        if key not in self.memo:
            empty = self.candidates.empty(chosen.numbers, self.selection.block_size)
            if void is not None:
                filled = void[..., None].expand(*void.shape, self.selection.block_size)
                empty = filled if empty is None else empty | filled
            if empty is not None:
                empty = torch.nn.functional.pad(empty.flatten(-2)[:, :, None], (start, 0)).to(self.device)
            self.memo[key] = (chosen, empty)
        empty_keys: Tensor | None = self.memo[key][1]
        return empty_keys

    def _visible_local(self, count: int) -> Tensor:
        """``[B or 1, 1, T, count]``: causal, without padding (a token always sees itself, so that no row is empty)."""
        rows = torch.arange(self.length, self.length + self.tokens, device=self.device)
        rows = (rows if self.clock is None else self.clock)[:, None]
        columns = torch.arange(count, device=self.device)
        causal = (columns <= rows)[None, None]
        if self.padding is None:
            return causal
        return (causal & self.padding[:, None, None, :]) | (columns == rows)

    def _within(self, prefix: Tensor, sliding: int, count: int) -> Tensor:
        """``[B or 1, heads or 1, T, P + count]``: less than ``sliding`` positions back."""
        local = self._all_local_positions(count)
        batch = max(len(local), len(prefix))
        keys = torch.cat((prefix.expand(batch, -1, -1), local[:, None].expand(batch, prefix.shape[1], -1)), dim=-1)
        return self.positions[:, None, :, None] - keys[:, :, None, :] < sliding
