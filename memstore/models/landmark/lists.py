"""Lists of blocks: which ways there are to choose them, how they are fetched and attended to, and their counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstore.attention.landmark import attend
from memstore.attention.positions import Rotary
from memstore.errors import InvalidArgument
from memstore.kernels import grouped_cross_attention
from memstore.kernels._backends import Backend, triton_problem
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.tables import LayerBlocks
from memstore.readers.attachment import check_retrieval
from memstore.readers.kinds import LANDMARK, Retrieval
from memstore.transfer import to_device

GATHERED = 1 << 22
"""Numbers of keys that are laid out at once for lists of single tokens."""


def default_retrieval(config: LandmarkConfig) -> Retrieval:
    """The paper's most permissive scheme: each head and token chooses for itself."""
    return Retrieval(top_k=config.retrieval_top_k, every=1, share="none", share_tokens=False)


def check_capacity(retrieval: Retrieval, capacity: int | None) -> None:
    """Raise ``InvalidArgument`` for a capacity that does not hold the blocks of a list."""
    if capacity is None:
        return
    if retrieval.top_k == "all" or retrieval.positions == "true":
        raise InvalidArgument(
            "a capacity is for retrieval of a few blocks in stingy or clamped positions: with top_k='all' or "
            "positions='true' every block counts"
        )
    if capacity < retrieval.top_k:
        raise InvalidArgument(f"a capacity of {capacity} blocks does not hold the {retrieval.top_k} of a list")


def check_lists(config: LandmarkConfig, retrieval: Retrieval) -> None:
    """Raise ``InvalidArgument`` for what a landmark model cannot do."""
    if config.attention != "landmark":
        raise InvalidArgument(f"a model with attention={config.attention!r} has no landmarks and retrieves nothing")
    if retrieval.share == "model":
        raise InvalidArgument(
            "every layer of a landmark model chooses for itself: Retrieval.share must be 'none', 'group' or 'layer', "
            "not 'model'"
        )
    check_retrieval(LANDMARK, retrieval)
    every = retrieval.every
    if isinstance(every, int) and config.segment_tokens % every:
        raise InvalidArgument(
            f"Retrieval.every must divide the {config.segment_tokens} tokens of a segment, or be 'segment', not {every}"
        )
    if retrieval.threshold is not None and not config.context_miss:
        raise InvalidArgument("Retrieval.threshold is for models with a context-miss token; this one has none")


class Lists(NamedTuple):
    """Lists ``[B, X, R, K]`` of blocks, and the states of all of them."""

    blocks: Tensor
    """``[B, X, R, K]``, in host memory; -1 where there is none."""
    there: Tensor
    """``[B, X, R, K]``, in host memory: where there is one that could be read."""
    missing: Tensor | None
    """``[B, X, R, K]``: where there is none; None where all are there."""
    at: Tensor
    """``[B, X, R, K]``: which of the states are its."""
    keys: Tensor
    """``[n, G, S, D]``, turned to where they are attended at."""
    values: Tensor
    """``[n, G, S - 1, D]``"""
    fetched: int
    """Blocks that were fetched."""
    rows: int
    """Rows they were fetched for."""

    @property
    def heads(self) -> int:
        """``Y``: heads for which states have to be laid out, key-value heads where query heads share lists."""
        return max(self.blocks.shape[1], self.keys.shape[1])


class ListLayout(NamedTuple):
    """The states of lists, laid out for ``attend``."""

    keys: Tensor
    """``[B, Y, R, K, S, D]``"""
    values: Tensor
    """``[B, Y, R, K, S - 1, D]``"""
    bias: Tensor | None


def fetch(table: LayerBlocks, blocks: Tensor, slots: Tensor, rotary: Rotary, size: int) -> Lists:
    """``blocks [B, X, R, K]``, each placed in one of ``slots [B, X, R, K]`` of ``size`` positions; in host memory."""
    there = blocks >= 0
    rows = torch.arange(len(blocks))[:, None, None, None].expand_as(blocks)
    count, most = int(blocks.max()) + 1, int(slots.max()) + 1
    # A block may stand in several slots: each of them is an entry, but the block is fetched once.
    named, entry = (rows * count + blocks)[there].unique(return_inverse=True)
    places, at_there = (entry * most + slots[there]).unique(return_inverse=True)
    row, block = named.div(count, rounding_mode="floor"), named % count
    found, which = table.states(row, block)
    source = which[places.div(most, rounding_mode="floor")]
    at = torch.zeros_like(blocks).masked_scatter(there, at_there)
    if found.sound is not None:
        there = there & found.sound[source][at]
    positions = (places % most)[:, None, None] * size + torch.arange(size)
    missing = [] if bool(there.all()) else [~there]
    source, positions, at, *missing = to_device([source, positions, at, *missing], found.keys.device)
    keys = rotary.rotate(found.keys[source], rotary.turns(positions, found.keys.dtype))
    values = found.values[source][..., :-1, :]
    gone = missing[0] if missing else None
    return Lists(blocks, there, gone, at, keys, values, len(named), int(row.unique().numel()))


def show(lists: Lists, which: slice) -> ListLayout:
    """The states of some of the R lists, laid out."""
    at = lists.at[:, :, which]
    groups, heads = lists.keys.shape[1], lists.heads
    group = (torch.arange(heads, device=at.device) // (heads // groups))[None, :, None, None]
    at = at.expand(-1, heads, -1, -1)
    bias = None
    if lists.missing is not None:
        missing = lists.missing[:, :, which]
        bias = torch.zeros((), device=at.device).masked_fill(missing, -math.inf)[:, :, :, None, None, :, None]
    return ListLayout(lists.keys[at, group], lists.values[at, group], bias)


def attend_each(q: Tensor, lists: Lists, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of ``q [B, H, M, D]``, each token to a list of its own: ``[B, H, M, D]`` and log-sum-exps."""
    if q.device.type == "cuda" and q.dtype != torch.float32 and triton_problem(q, largest=q.shape[-1]) is None:
        return attend_in_place(q, lists, scale)
    numbers = q.shape[0] * lists.heads * lists.blocks.shape[3] * lists.keys.shape[2] * q.shape[3]
    step = max(1, GATHERED // max(1, numbers))
    outs = []
    for start in range(0, q.shape[2], step):
        which = slice(start, start + step)
        outs.append(attend_shown(q[:, :, which].unsqueeze(3), show(lists, which), scale))
    out, lse = (torch.cat(parts, 2) for parts in zip(*outs, strict=True))
    return out.squeeze(3), lse.squeeze(3)


def attend_in_place(q: Tensor, lists: Lists, scale: float, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """As ``attend_each``, by a kernel that reads the states of lists where they lie: grouped cross attention.

    A block's weight is what its landmark has of the softmax over the list; its ordinary tokens share that weight.
    """
    batch, heads, tokens, dim = q.shape
    groups = lists.keys.shape[1]
    at = lists.at.repeat_interleave(heads // lists.at.shape[1], 1)  # [B, H, M, K]

    def by_group(x: Tensor) -> Tensor:
        """``[B, H, M, n]`` as ``[G, B * H / G * M, n]``: lists of a key-value head."""
        grouped: Tensor = x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 3)
        return grouped

    asked, entries = by_group(q), by_group(at)
    marks = lists.keys[:, :, -1].transpose(0, 1)  # [G, n, D]
    chosen = marks.gather(1, entries.flatten(1).unsqueeze(-1).expand(-1, -1, dim)).unflatten(1, entries.shape[1:])
    scores = (chosen @ asked.unsqueeze(-1)).squeeze(-1).float() * scale  # [G, lists, K]
    if lists.missing is not None:
        missing = by_group(lists.missing.repeat_interleave(heads // lists.missing.shape[1], 1))
        scores, entries = scores.masked_fill(missing, -math.inf), entries.masked_fill(missing, -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    keys, values = (x.transpose(0, 1).unsqueeze(2) for x in (lists.keys[:, :, :-1], lists.values))
    given: dict[str, Any] = {"scale": scale, "off_by_one": False, "backend": backend}
    out = grouped_cross_attention(asked[:, :, None, None], keys, values, weights.to(q.dtype), entries, **given)

    def by_head(x: Tensor) -> Tensor:
        """``[G, B * H / G * M, ...]`` as ``[B, H, M, ...]``."""
        alone: Tensor = x.unflatten(1, (batch, heads // groups, tokens)).transpose(0, 1).flatten(1, 2)
        return alone

    return by_head(out[:, :, 0, 0]).float(), by_head(lse)


def attend_shown(q: Tensor, shown: ListLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of ``q [B, H, R, n, D]`` to lists that are laid out."""
    return attend(q, shown.keys, shown.values, scale=scale, bias=shown.bias)


@dataclass
class SearchCounts:
    """What was asked of the memory; a segment here is a forward pass, for each row by itself."""

    queries: int = 0
    """Times a query head of a token had blocks in memory."""
    dropped: int = 0
    """Times the context-miss token's weight was below the threshold, so that nothing was retrieved."""
    searches: list[int] = field(default_factory=list)
    """Lists that were chosen, in each layer."""
    segments: list[int] = field(default_factory=list)
    """Segments for which blocks were fetched, in each layer."""
    fetched: list[int] = field(default_factory=list)
    """Blocks that were fetched, in each layer; within a segment each counts once."""

    @classmethod
    def of(cls, config: LandmarkConfig) -> SearchCounts:
        """Nothing was asked yet."""
        return cls(0, 0, *([0] * config.num_hidden_layers for _ in range(3)))

    @property
    def drop_rate(self) -> float:
        """The part of queries for which nothing was retrieved (the paper's appendix D)."""
        return self.dropped / self.queries if self.queries else 0.0

    def unique_blocks(self, layer: int) -> float:
        """Blocks fetched per segment in ``layer`` (the paper's appendix C); 0 where nothing was."""
        return self.fetched[layer] / self.segments[layer] if self.segments[layer] else 0.0
