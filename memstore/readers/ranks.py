"""A memory that several processes search together: each holds the landmarks of its blocks, and fetches those blocks.

All ranks run the same model on the same tokens, and open the same memory to read. Blocks are dealt in runs of ``DEAL``.
Each rank names the best of its own blocks. The best of these are the best of the whole memory. Models with their own
caches get a ``SharedDocument``. All ranks receive what one of its layers finds, and the states of these blocks. The
result is the same as in one process. Stock models attend to their own part (``readers/stock/sharded.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.routing import Moments, choose
from memstore.device_copies import own_types
from memstore.errors import InvalidArgument, MemstoreError
from memstore.index import VectorIndex
from memstore.memory import Document
from memstore.memory.view import Hits, LayerView

DEAL = 64
"""Consecutive blocks that go to one rank. Neighbours are retrieved together, and lie together in storage."""
PATIENCE = timedelta(seconds=60)
"""A rank that is silent for longer counts as lost."""

# Our own groups, since others may wait for half an hour. All attachments share them: a group's sockets and threads
# stay.
_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The groups by the group that the caller passed."""


class Ranks:
    """The processes of a group, and what they exchange."""

    def __init__(self, group: Any) -> None:
        """``group``: a process group of ``torch.distributed``, or a ``DeviceMesh`` of one dimension."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument("process_group needs torch.distributed: call init_process_group, or use torchrun")
        group = group.get_group() if hasattr(group, "get_group") else group
        self._given = dist.group.WORLD if group is None else group
        if (own := _groups.get(self._given)) is None:
            members = dist.get_process_group_ranks(self._given)
            with self._answering():
                own = _groups[self._given] = dist.new_group(members, timeout=PATIENCE, use_local_synchronization=True)
        self._group = own
        self.size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        kinds = [each.partition(":")[0] for each in str(dist.get_backend_config(self._group)).split(",")]
        self._device = (
            None if "cpu" in kinds else torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
        )
        """The device on which tensors are exchanged, as NCCL needs it; None: where they are."""

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the ``tensor`` of each rank; all have one shape. Raises ``MemstoreError`` if a rank is lost."""
        import torch.distributed as dist

        told = tensor.to(self._device or tensor.device).contiguous()
        found = [torch.empty_like(told) for _ in range(self.size)]
        with self._answering():
            dist.all_gather(found, told, group=self._group)
        return [each.to(tensor.device) for each in found]

    def joined(self, tensor: Tensor) -> Tensor:
        """Return ``gathered`` as one tensor ``[ranks, ...]``. Each rank gets the gradient of its own part.

        The gradient is the sum over all ranks' losses, so all of them have to run backward.
        """
        joined: Tensor = _Join.apply(tensor, self)  # type: ignore[no-untyped-call]  # torch annotates it in part
        return joined

    def summed(self, parts: Tensor) -> Tensor:
        """Return this rank's part of ``parts [ranks, n, ...]``, summed over all ranks: ``[n, ...]``.

        Raises like ``gathered``.
        """
        import torch.distributed as dist

        told = parts.to(self._device or parts.device).flatten(0, 1).contiguous()
        own = torch.empty_like(told[: parts.shape[1]])
        with self._answering():
            dist.reduce_scatter_tensor(own, told, group=self._group)
        return own.to(parts.device)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Explain the failure of a collective inside the block."""
        try:
            yield
        except RuntimeError as error:
            _groups.pop(self._given, None)  # a failed group stays failed
            raise MemstoreError(
                f"a rank of the process group was lost, or did not answer within {PATIENCE.seconds} s "
                f"({' '.join(str(error).split())[:120]}). The memory is intact: start the ranks again, in any "
                "number"
            ) from error

    def agree(self, *numbers: int) -> None:
        """Raise ``MemstoreError``, on all ranks, unless all pass the same ``numbers``."""
        told = [each.tolist() for each in self.gathered(torch.tensor(numbers))]
        if any(each != told[0] for each in told):
            raise MemstoreError(
                f"the ranks see different memories or prompts (blocks, tokens: {told}): another process writes to "
                "the memory, or the inputs differ. Open the memory again on all ranks"
            )

    def moments(self, scores: Tensor) -> Moments:
        """Return mean and deviation ``[..., 1]`` of the ``scores [..., n]`` of all ranks."""
        wide = scores.double()
        count = wide.new_full((*wide.shape[:-1], 1), scores.shape[-1])  # a rank may have no scores
        sums = torch.cat([count, wide.sum(-1, keepdim=True), wide.square().sum(-1, keepdim=True)], -1)
        count, total, squares = torch.stack(self.gathered(sums)).sum(0).split(1, -1)
        mean = total / count
        return Moments(mean.to(scores.dtype), (squares / count - mean.square()).clamp(min=0).sqrt().to(scores.dtype))

    def best(self, scores: Tensor, numbers: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return, like ``choose``, the ``top_k`` best of all ranks, by ``scores [..., n]`` of ``numbers [n]``."""
        places, values = choose(scores, top_k)
        told = scores.new_full((2, *scores.shape[:-1], top_k), -torch.inf, dtype=torch.float64)
        own = values.shape[-1]
        told[0, ..., :own], told[1, ..., :own] = values, numbers[places]
        values, where = torch.cat(self.gathered(told), -1)
        where, order = where.sort(dim=-1)
        places, values = choose(values.gather(-1, order), top_k)
        return where.gather(-1, places).long(), values.to(scores.dtype)


class _Join(torch.autograd.Function):
    """The gradient of ``Ranks.joined``."""

    @staticmethod
    def forward(context: Any, own: Tensor, ranks: Ranks) -> Tensor:
        context.ranks = ranks
        return torch.stack(ranks.gathered(own))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.ranks.summed(gradient), None


@dataclass(eq=False)
class _HeldLandmarks:
    """Landmarks of some blocks of one layer of a document."""

    index: VectorIndex
    edits: int
    """The edits of the document when the landmarks were read."""
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """``[n]``, ascending: the blocks whose landmarks it holds."""

    def add(self, document: Document, layer: int, ids: Tensor) -> None:
        """Add the blocks ``ids [n]``, ascending."""
        if torch.equal(ids, self.ids):
            return
        new = ids[~torch.isin(ids, self.ids)]
        breaks = (new[1:] != new[:-1] + 1).nonzero().squeeze(1) + 1
        for run in torch.tensor_split(new, breaks.tolist()) if len(new) else ():
            blocks = range(int(run[0]), int(run[-1]) + 1)
            self.index.add(run, document.layer(layer).landmarks(blocks))
        self.ids = torch.cat([self.ids, new]).sort().values


class Share:
    """This rank's share of the blocks, and the landmarks that it holds."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._held: dict[tuple[str, int, int], _HeldLandmarks] = {}
        """Memory, document, layer -> landmarks."""

    @property
    def landmarks(self) -> int:
        """Blocks whose landmarks this rank holds, over all layers."""
        return sum(len(each.index) for each in self._held.values())

    def owners(self, document: Document, blocks: Tensor) -> Tensor:
        """Return the rank of each of ``blocks [n]``."""
        # The rank also depends on the document: else many short ones would all belong to the first rank.
        return (blocks.div(DEAL, rounding_mode="floor") + (document.id or 0)) % self.ranks.size

    def mine(self, document: Document, blocks: Tensor) -> Tensor:
        """Return which of ``blocks [n]`` belong to this rank."""
        return self.owners(document, blocks) == self.ranks.rank

    def index(self, document: Document, layer: int, ids: Tensor) -> VectorIndex:
        """Return an index that holds the full blocks ``ids [n]``, ascending, of a document, and perhaps others."""
        name, edits = (document.memory.url, document.id or 0, layer), document.state.edits
        held = self._held.get(name)
        if held is None or held.edits != edits:
            held = self._held[name] = _HeldLandmarks(document._shared.new_index(), edits)
        held.add(document, layer, ids)
        return held.index


class SharedDocument(Document):
    """A document that the ranks search and fetch together. All of them must make the same calls in the same order."""

    def __init__(self, whole: Document, share: Share) -> None:
        super().__init__(whole._shared, whole.name, whole.memory, whole.id)
        self._whole, self._share = whole, share

    def layer(self, layer: int) -> LayerView:
        return _SharedLayer(self._whole, layer, self._share)

    def gather_each(
        self, layers: Sequence[int], lists: Sequence[Sequence[int]], *, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        parts = [self.layer(layer).gather(blocks, device=device) for layer, blocks in zip(layers, lists, strict=True)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class _SharedLayer(LayerView):
    """A layer of a ``SharedDocument``: every rank gets what all ranks have found or fetched."""

    def __init__(self, document: Document, layer: int, share: Share) -> None:
        super().__init__(document._handle, layer)
        self._document, self._share = document, share

    def search(self, queries: Tensor, top_k: int, *, allowed: range | Tensor | None = None) -> Hits:
        """See ``LayerView``. Among blocks with equal scores, the first ones win."""
        own = self._candidates(allowed)
        own = own[self._share.mine(self._document, own)]
        with own_types():
            index = self._share.index(self._document, self._layer, own)
            found = index.search(queries, top_k, allowed=own)
        told = torch.stack([part.double() for part in found])  # numbers below 2^53 are exact
        told = torch.cat(self._share.ranks.gathered(told), -1)
        told = told.gather(-1, told[1].argsort(dim=-1, stable=True).expand_as(told))
        best = told[0].argsort(dim=-1, descending=True, stable=True)[..., :top_k]
        scores, ids, offsets = told.gather(-1, best.expand(3, *best.shape))
        return Hits(scores.float(), ids.long(), offsets.long())

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        ids = self._candidates(allowed)
        owners = self._share.owners(self._document, ids)
        own = ids[owners == self._share.ranks.rank]
        scores = queries.new_empty(*queries.shape[:2], 0, dtype=torch.float32)
        if len(own):
            with own_types():
                scores, _ = self._share.index(self._document, self._layer, own).score(queries, allowed=own)
        (together,) = self._together([scores.permute(2, 0, 1)], owners)
        return together.permute(1, 2, 0), ids

    def gather(self, blocks: Tensor | Sequence[int], *, device: torch.device | None = None) -> dict[str, Tensor]:
        """See ``LayerView``. Each rank reads its own part of ``blocks``."""
        ids = torch.as_tensor(blocks, dtype=torch.int64).cpu()
        owners = self._share.owners(self._document, ids)
        own = super().gather(ids[owners == self._share.ranks.rank], device=device)
        return dict(zip(own, self._together(list(own.values()), owners), strict=True))

    def _candidates(self, allowed: range | Tensor | None) -> Tensor:
        """Return the complete blocks ``[n]`` that exist and are ``allowed``."""
        complete = self._document.complete_blocks
        if isinstance(allowed, range):
            complete = range(max(complete.start, allowed.start), min(complete.stop, allowed.stop))
        parts = [torch.arange(piece.start, piece.stop) for piece in self._document.present(complete) if piece]
        ids = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        return ids[torch.isin(ids, allowed.cpu())] if isinstance(allowed, Tensor) else ids

    def _together(self, own: list[Tensor], owners: Tensor) -> list[Tensor]:
        """Gather every rank's rows ``[n, ...]`` of some tensors, in the order of the ``owners [N]``: ``[N, ...]``."""
        if not len(owners):
            return own
        size, device = self._share.ranks.size, own[0].device
        places = torch.zeros_like(owners)
        for rank in range(size):
            places[owners == rank] = torch.arange(int((owners == rank).sum()))
        most = int(places.max()) + 1
        # As bytes, so one collective is enough for all dtypes.
        rows = [each.contiguous().flatten(1).view(torch.uint8) for each in own]
        told = self._share.ranks.gathered(F.pad(torch.cat(rows, 1), (0, 0, 0, most - len(rows[0]))))
        found = torch.stack(told)[owners.to(device), places.to(device)]
        parts = found.split([each.shape[1] for each in rows], 1)
        return [
            part.contiguous().view(each.dtype).view(len(owners), *each.shape[1:])
            for part, each in zip(parts, own, strict=True)
        ]
