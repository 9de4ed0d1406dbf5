"""The state of a DRT between segments: windows, the incomplete block, complete blocks, and the last lists."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.gca import ListStates
from memstore.attention.layers import States
from memstore.device_copies import numbers
from memstore.kernels.grouped_cross_attention import Ready
from memstore.models.cache import CountedCache, behind_zeros, of_rows
from memstore.models.drt.configuration import DRTConfig
from memstore.models.drt.retrieval import BlockTable, DRTPacking, GroupSearch, ListsInUse


class DRTCache(CountedCache):
    """The ``past_key_values`` of a DRT: a fixed size per row, and one entry per block.

    The model makes one if none is given. ``Reader.cache`` makes one that continues a document of a memory. A cache
    serves one generation. To branch, make another.
    """

    config: DRTConfig

    def __init__(self, config: DRTConfig, rows: int, table: BlockTable | None = None, tokens: int = 0) -> None:
        """Start after ``tokens`` tokens, which the table's blocks stand for."""
        super().__init__(config, rows, tokens)
        self.table = BlockTable(rows) if table is None else table
        self.windows: list[States | None] = [None] * config.num_hidden_layers
        self.past = 0
        """Stream items that the windows hold."""
        self.empty: Tensor | None = None
        """``[B]``: how many of these items do not exist; None if all exist in all rows."""
        self.partial: list[Tensor] = []
        """Pieces ``[B, p, hidden]`` of the incomplete block: hidden states after the lower layers."""
        self.partial_ids: list[Tensor] = []
        """Pieces ``[B, p, 1]`` of the incomplete block: its tokens, if an external retriever will need them."""
        self.lists: list[ListStates | None] = [None] * len(config.upper_layers)
        """For each group, the list that the next tokens of each row use, with the states of its blocks only."""
        self.prepared: list[list[Ready] | None] = [None] * len(config.upper_layers)
        """The same lists, prepared for single tokens, for each layer; None until they are needed."""
        self.in_use: ListsInUse | None = None
        """Tracks which list each row uses, while it has observers."""

    @property
    def blocks(self) -> list[int]:
        """Return the number of complete blocks of each row."""
        return [count // self.config.tokens_per_block for count in self.counts]

    @property
    def positions(self) -> list[int]:
        """Return the stream position of the next item of each row."""
        return [count + blocks for count, blocks in zip(self.counts, self.blocks, strict=True)]

    def advance(self, packing: DRTPacking, given: int) -> None:
        """Count the tokens of a processed segment; ``given`` counts their padding too."""
        self.count(packing)
        self.given += given

    def slide(self, packing: DRTPacking, layers: dict[int, States], device: torch.device) -> None:
        """Keep the part of the keys and values ``[B, G, past + M, D]`` of each layer that the next segment can see."""
        keep = self.config.window - 1
        if packing.uniform and self.empty is None:
            total = self.past + packing.items
            for number, (keys, values) in layers.items():
                self.windows[number] = (_last(keys, keep), _last(values, keep))
            self.past = min(total, keep)
            return
        lengths = numbers(packing.lengths, device)
        empty = torch.zeros_like(lengths) if self.empty is None else self.empty
        # Indices into [keep zeros, past, segment], right-aligned at the end of each row.
        at = self.past + lengths[:, None] + torch.arange(keep, device=device)
        for number, (keys, values) in layers.items():
            self.windows[number] = (behind_zeros(keys, keep, at), behind_zeros(values, keep, at))
        self.empty = (keep - (self.past - empty + lengths)).clamp(min=0)
        self.past = keep
        if not bool(self.empty.any()):
            self.empty = None

    def combined(self, group: int, fresh: ListStates, numbers: Tensor) -> ListStates:
        """Return the lists that a segment's items use: number 0 is the previous one, ``1 + j`` is fresh list ``j``.

        ``numbers`` are ``[B or 1, C]``.
        """
        last = self.lists[group]
        keys, values, blocks, weights = fresh
        top_k = blocks.shape[-1]
        if last is None:
            blocks, weights = F.pad(blocks, (0, 0, 1, 0), value=-1), F.pad(weights, (0, 0, 1, 0))
        else:
            held, missing = last.blocks.shape[2], top_k - last.blocks.shape[2]
            blocks = torch.where(blocks >= 0, blocks + held, -1)
            blocks = torch.cat([F.pad(last.blocks, (0, missing), value=-1), blocks], 1)
            weights = torch.cat([F.pad(last.weights, (0, missing)), weights], 1)
            keys, values = torch.cat([last.keys, keys], 1), torch.cat([last.values, values], 1)
        at = numbers.clamp(max=blocks.shape[1] - 1).expand(len(blocks), -1).unsqueeze(-1).expand(-1, -1, top_k)
        return ListStates(keys, values, blocks.gather(1, at), weights.gather(1, at))

    def keep_last(self, group: int, packing: DRTPacking, fresh: ListStates) -> None:
        """Keep each row's last list for the tokens to come. Rows that completed no block keep the list they have."""
        keys, values, blocks, weights = fresh
        last, before = fresh, self.lists[group]
        if not blocks.shape[1] == min(packing.blocks) == 1:
            top_k, device = blocks.shape[-1], blocks.device
            at = numbers(packing.blocks, device) - 1
            rows, picked = torch.arange(len(at), device=device), at.clamp(min=0)
            places = torch.arange(top_k, device=device)
            columns = (picked * top_k)[:, None] + places
            there = (at[:, None] >= 0) & (blocks[rows, picked] >= 0)
            keys, values = keys[rows[:, None], columns], values[rows[:, None], columns]
            last = ListStates(keys, values, torch.where(there, places, -1)[:, None], weights[rows, picked][:, None])
            if before is not None and min(packing.blocks) == 0:
                last = _mixed(at >= 0, last, before)
        self.lists[group], self.prepared[group] = last, None

    def tell_lists(self, group: int, packing: DRTPacking, lookup: GroupSearch | None) -> None:
        """Tell the observers which lists ``group`` uses in a segment. ``lookup`` is its choice there, if any."""
        if self.observers and self.in_use is None:
            self.in_use = ListsInUse(self.config, self.rows, self.origin)
        if self.in_use is not None:
            self.tell(self.in_use.choice(group, packing, lookup))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.table.reorder(beam_idx)
        pick = beam_idx.to
        self.windows = of_rows(self.windows, beam_idx)
        self.empty = None if self.empty is None else self.empty[pick(self.empty.device)]
        longest = max(self.offsets, default=0)
        self.partial, self.partial_ids = (
            [torch.cat(pieces, 1)[pick(pieces[0].device), :longest]] if pieces and longest else []
            for pieces in (self.partial, self.partial_ids)
        )
        self.lists = [None if last is None else ListStates(*(x[pick(x.device)] for x in last)) for last in self.lists]
        self.prepared = [None] * len(self.lists)


def _last(x: Tensor, keep: int) -> Tensor:
    """Return the last ``keep`` of ``[B, G, n, D]``, copied if that lets a longer tensor be freed."""
    start = max(0, x.shape[2] - keep)
    return x[:, :, start:].clone() if start > keep else x[:, :, start:]


def _mixed(new: Tensor, last: ListStates, before: ListStates) -> ListStates:
    """Return for each row ``last`` where ``new [B]`` is set, and ``before`` elsewhere."""
    width = max(last.blocks.shape[2], before.blocks.shape[2])
    one, other = _widened(last, width), _widened(before, width)
    return ListStates(*(torch.where(new.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(one, other, strict=True)))


def _widened(last: ListStates, width: int) -> ListStates:
    missing = width - last.blocks.shape[2]
    if not missing:
        return last
    keys, values = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, missing)) for x in (last.keys, last.values))
    return ListStates(keys, values, F.pad(last.blocks, (0, missing), value=-1), F.pad(last.weights, (0, missing)))
