"""What a segment that starts from nothing retrieves: blocks of its own, and, while training, those shared with it.

All lists are chosen at once, with gradients; ``cache.py`` is for segments that continue one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.gca import BlockKeysValues, ListStates, TopBlocks, choose
from memstore.errors import InvalidArgument
from memstore.models.drt.configuration import DRTConfig
from memstore.models.drt.packing import DRTPacking
from memstore.models.drt.tables import random_choice
from memstore.readers.ranks import Ranks


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks beside a row's own that it may retrieve while training: distractors that cost no reading.

    A block depends on a window of tokens only, so blocks of other rows, or of earlier steps, are what a row would find
    in a longer document. Whoever trains says which of them hold no answer to another row's question.
    """

    rows: Tensor | None = None
    """``[B, T]`` True for tokens whose blocks other rows may retrieve."""
    states: Tensor | None = None
    """``[P, S, hidden]``: states of further blocks, such as those of earlier steps."""
    landmarks: Tensor | None = None
    """``[P, hidden]``"""
    ranks: Ranks | None = None
    """Processes that train together, each with rows of its own: their ``rows`` may be retrieved on all of them.

    All pass it at the same step, and all run backward: the gradients of every rank's loss go back to the block.
    """

    def check(self, config: DRTConfig, input_ids: Tensor) -> None:
        """Raise ``InvalidArgument`` where these blocks cannot be retrieved for ``input_ids [B, T]``."""
        if config.retrieval in ("random", "none"):
            raise InvalidArgument(f"a model with retrieval={config.retrieval!r} does not choose; pass no shared")
        if (self.states is None) != (self.landmarks is None):
            raise InvalidArgument("shared states come with their landmarks, and landmarks with their states")
        if self.rows is not None and self.rows.shape != input_ids.shape:
            raise InvalidArgument(
                f"expected shared.rows for {list(input_ids.shape)} tokens, got {list(self.rows.shape)}"
            )


def retrieve(
    config: DRTConfig,
    block_states: BlockKeysValues,
    packing: DRTPacking,
    queries: Tensor,
    blocks: tuple[Tensor, Tensor],
    shared: SharedBlocks | None = None,
    *,
    gumbel: float = 0.0,
) -> tuple[TopBlocks, ListStates]:
    """What ``queries [B, n, e]`` choose among the blocks before their own, and what a segment's items attend to.

    Args:
        config: says how many blocks are chosen, and by what.
        block_states: makes keys and values of blocks.
        packing: of the segment.
        queries: one of each block.
        blocks: their states ``[B, n, S, hidden]`` and landmarks ``[B, n, e]``.
        shared: further blocks to choose from.
        gumbel: how much noise is added to scores.
    """
    states, landmarks = blocks
    rows, count = queries.shape[:2]
    if config.retrieval == "random":
        limits = torch.arange(count, device=queries.device).expand(rows, -1)
        chosen = random_choice(limits, config.retrieval_top_k)
    elif shared is None:
        scores = queries @ landmarks.transpose(1, 2)
        scores = scores.masked_fill(~_earlier(count, queries.device), -torch.inf)
        chosen = choose(scores, config.retrieval_top_k, gumbel=gumbel)
    else:
        scores, states = _with_shared(packing, queries, states, landmarks, shared)
        return _of_all_rows(block_states, packing, choose(scores, config.retrieval_top_k, gumbel=gumbel), states)
    keys, values = block_states(states)
    lists, weights = _shifted(chosen, packing.list_numbers(queries.device))
    return chosen, ListStates(keys, values, lists, weights.to(keys.dtype))


def with_other_ranks(shared: SharedBlocks, packing: DRTPacking, blocks: tuple[Tensor, Tensor] | None) -> SharedBlocks:
    """``shared``, with what the other ranks share of their ``blocks`` beside its further states; one collective.

    Raises ``InvalidArgument``, on all ranks, where one has no complete block.
    """
    if shared.ranks is None:
        return shared
    free = None if blocks is None else _free(packing, shared, blocks[0])
    count = -1 if free is None else int(free.sum())
    device = packing.ids.device
    counts = torch.stack(shared.ranks.gathered(torch.tensor(count, device=device))).tolist()
    if min(counts) < 0 or blocks is None or free is None:
        raise InvalidArgument(f"ranks share blocks, and rank {counts.index(-1)} has none: rows must be a block long")
    states, landmarks = (part[free].flatten(1) for part in blocks)
    own = torch.cat([states, landmarks], -1)
    # Padded even where nobody shares anything: backward waits for all, whatever each has found.
    told = shared.ranks.joined(F.pad(own, (0, 0, 0, max(*counts, 1) - count)))
    others = [each[:count] for each, count in zip(told, counts, strict=True)]
    others[shared.ranks.rank] = told[shared.ranks.rank, :0]
    states, landmarks = torch.cat(others).split([states.shape[1], landmarks.shape[1]], -1)
    states = states.unflatten(-1, blocks[0].shape[2:])
    if shared.states is not None and shared.landmarks is not None:
        states = torch.cat([states, shared.states.to(states.dtype)])
        landmarks = torch.cat([landmarks, shared.landmarks.to(landmarks.dtype)])
    return replace(shared, states=states, landmarks=landmarks, ranks=None)


def as_one_row(packing: DRTPacking) -> Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]:
    """``packing.by_list``, where all rows share their blocks and so are one row to whoever attends to them."""

    def by_list(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return packing.by_list(
            x, lambda framed: function(framed.flatten(0, 1).unsqueeze(0)).squeeze(0).unflatten(0, framed.shape[:2])
        )

    return by_list


def _with_shared(
    packing: DRTPacking, queries: Tensor, states: Tensor, landmarks: Tensor, shared: SharedBlocks
) -> tuple[Tensor, Tensor]:
    """Scores ``[B, n, N]`` of the blocks of all rows and of ``shared``, -inf where one may not be had; their states."""
    rows, count = queries.shape[:2]
    earlier = _earlier(count, queries.device)
    own = torch.eye(rows, dtype=torch.bool, device=queries.device)[:, None, :, None] & earlier[None, :, None, :]
    free = _free(packing, shared, states)
    own = own | (~torch.eye(rows, dtype=torch.bool, device=queries.device)[:, None, :, None] & free[None, None])
    scores = torch.einsum("bnd,cmd->bncm", queries, landmarks).masked_fill(~own, -torch.inf).flatten(2)
    states = states.flatten(0, 1)
    if shared.states is not None and shared.landmarks is not None:
        scores = torch.cat([scores, queries @ shared.landmarks.to(queries.dtype).T], -1)
        states = torch.cat([states, shared.states.to(states.dtype)])
    return scores, states


def _free(packing: DRTPacking, shared: SharedBlocks, states: Tensor) -> Tensor:
    """Which blocks of ``states [B, n, S, hidden]`` other rows may retrieve, ``[B, n]``."""
    count = states.shape[1]
    if shared.rows is None:
        return torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    free = packing.joined(None, _spread(packing, shared.rows))[0].squeeze(-1).all(-1)
    there = torch.tensor(packing.blocks, device=free.device)[:, None]
    return free & (torch.arange(count, device=free.device) < there)


def _of_all_rows(
    block_states: BlockKeysValues, packing: DRTPacking, chosen: TopBlocks, states: Tensor
) -> tuple[TopBlocks, ListStates]:
    """Keys and values of those of the blocks ``states [N, S, hidden]`` that anybody chose, for rows as one."""
    needed, places = chosen.blocks.clamp(min=0).unique(return_inverse=True)
    keys, values = block_states(states[needed].unsqueeze(0))
    here = chosen._replace(blocks=torch.where(chosen.blocks >= 0, places, -1))
    blocks, weights = _shifted(here, packing.list_numbers(states.device))
    lists, weights = (x.flatten(0, 1).unsqueeze(0) for x in (blocks, weights))
    return chosen, ListStates(keys, values, lists, weights.to(keys.dtype))


def _earlier(count: int, device: torch.device) -> Tensor:
    """``[n, n]``: block ``i`` may retrieve block ``j``."""
    return torch.ones(count, count, dtype=torch.bool, device=device).tril(-1)


def _shifted(chosen: TopBlocks, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Lists by their numbers: 0 is empty, ``1 + j`` is what block ``j`` chose."""
    blocks = F.pad(chosen.blocks, (0, 0, 1, 0), value=-1)
    weights = F.pad(chosen.weights, (0, 0, 1, 0))
    at = numbers[0].clamp(max=blocks.shape[1] - 1)
    return blocks[:, at], weights[:, at]


def _spread(packing: DRTPacking, tokens: Tensor) -> Tensor:
    """A flag of each token ``[B, T]`` as a stream ``[B, M, 1]``; True for landmarks."""
    stream = torch.ones(packing.rows, packing.items + 1, dtype=torch.bool, device=tokens.device)
    stream.scatter_(1, packing.slots.expand(packing.rows, -1), tokens)
    return stream[:, : packing.items].unsqueeze(-1)
