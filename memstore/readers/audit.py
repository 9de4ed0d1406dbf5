"""Audits, which compare retrieved blocks with all blocks, and the half of an audit that all kinds of models share.

A step is the last token of a question, or a token generated after it. An audit computes exactly the attention that
*every* block would get, for each step, layer and query head. It reads the store, a run of blocks at a time. Then

- ``memory``: the share of all attention (to blocks and to the local tokens) that falls on blocks,
- ``captured``: the share of that attention that falls on the retrieved blocks: the captured mass,
- ``recall``: the share of the true best ``k`` blocks that were retrieved, if ``k`` blocks were.

A mechanism may choose well and still miss: one list for many heads serves each of them a little. So an approximate
index has its own number, ``index_recall``. It compares the index with exact search for the same queries.

The other half is the ``Auditor`` of a mechanism, in the file ``audit.py`` beside its reader. It is an observer that
computes the attention that every block would have got.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.readers.observer import Choice, Observer

if TYPE_CHECKING:
    from memstore.memory import Document, LayerView

PIECE = 4096
"""Blocks whose landmarks are read at once."""
ALIKE = 1e-5
"""Scores with a smaller relative difference count as equal: sums in another order differ by so much."""
WORST = 5
"""How many missed blocks are named, and how many missed tokens of each step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerAudit:
    """What one layer retrieved, compared with the best blocks, over all steps."""

    layer: int
    """Its number; for a DRT, the number of the group of upper layers."""
    captured: Tensor
    """``[H]``: the share of the attention on blocks that falls on the retrieved ones. NaN if no attention falls on
    blocks."""
    recall: Tensor
    """``[H]``: share of the true best blocks that were retrieved."""
    memory: Tensor | None
    """``[H]``: share of all attention that falls on blocks; None if the mechanism has no such share (GCA)."""
    margin: float | None
    """The score of the worst retrieved block minus the score of the best other block: the median over steps and heads.
    Below 0, a better block was left out. None if all were retrieved."""
    index_recall: float | None
    """Share of the best blocks by exact search that the index found; None for a layer without landmarks."""


@dataclass(frozen=True, kw_only=True)
class MissedBlock:
    """A block that was not retrieved, although the model would have attended to it."""

    document: str
    block: int
    weight: float
    """Share of all attention that it would have had: the mean over steps, layers and heads. Lists that retrieved it
    count as 0."""
    layer: int
    """The layer that would have attended to it most."""
    head: int
    """The head of this layer."""


class MissedToken(NamedTuple):
    """A token, or an entry of several, that was not retrieved for a step, although it would have had attention."""

    step: int
    document: str
    block: int
    offset: int
    """The token of the block; the first one of an entry."""
    weight: float
    """Share of all attention that it would have had: the mean over layers and heads, as in ``MissedBlock``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Audit:
    """The result of an audit."""

    mechanism: str
    """``"attach"``, ``"landmark"``, ``"drt"`` or ``"knn"``."""
    positions: str
    """A sentence that says where blocks stand that were not retrieved. The true attention depends on it."""
    documents: list[str]
    blocks: int
    """Blocks that could have been retrieved, at the last step."""
    top_k: int
    """Blocks of a list at most, or tokens if single tokens are retrieved."""
    steps: int
    tokens: list[int]
    """The generated tokens."""
    layers: list[LayerAudit]
    """The layers that retrieve."""
    missed: list[MissedBlock]
    """The most missed blocks, most missed first."""
    stored_tokens: int | None = None
    """Tokens that could have been retrieved at the last step, if single tokens are retrieved; else None."""
    missed_tokens: Sequence[MissedToken] = ()
    """The most missed stored tokens of each step, most missed first, if single tokens are retrieved."""

    @property
    def captured(self) -> float | None:
        """Captured mass over all layers and heads. Heads that look more at blocks count more."""
        if any(layer.memory is None for layer in self.layers):
            return _mean([float(layer.captured.nanmean()) for layer in self.layers])
        # The share of the attention on blocks, not of all attention: else a head that does not look at its memory would
        # seem badly served. The attention on blocks is a separate number, which weighs the heads here.
        memory = torch.stack([layer.memory for layer in self.layers if layer.memory is not None])
        held = memory * torch.stack([layer.captured for layer in self.layers]).nan_to_num()
        return float(held.sum() / memory.sum()) if bool(memory.sum() > 0) else None

    @property
    def recall(self) -> float | None:
        """Mean recall over layers and heads."""
        return _mean([float(layer.recall.mean()) for layer in self.layers])

    @property
    def memory(self) -> float | None:
        """Mean share of attention that falls on blocks."""
        return _mean([float(layer.memory.mean()) for layer in self.layers if layer.memory is not None])

    @property
    def chance(self) -> float:
        """What random blocks (or tokens) would capture and recall: the share of all blocks that is retrieved."""
        return min(1.0, self.top_k / (self.stored_tokens or self.blocks))

    @property
    def index_recall(self) -> float | None:
        """Mean recall of the index over the layers with an index."""
        return _mean([layer.index_recall for layer in self.layers if layer.index_recall is not None])

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as a dict for JSON."""
        names = ("mechanism", "positions", "documents", "blocks", "stored_tokens", "top_k", "steps")
        shares = ("captured", "recall", "memory", "chance", "index_recall")
        facts: dict[str, Any] = {name: getattr(self, name) for name in names + shares}
        facts |= {name: [vars(each) for each in getattr(self, name)] for name in ("layers", "missed")}
        facts["missed_tokens"] = [each._asdict() for each in self.missed_tokens]
        return {name: _rounded(value) for name, value in facts.items()}


class Auditor(Observer, ABC):
    """The half of an audit that depends on the mechanism: ``choice`` compares, or notes what ``finish`` compares."""

    mechanism: str
    positions: str
    """A sentence that says where blocks stand that were not retrieved."""
    shares = True
    """Whether weights are shares of all attention."""
    documents: list[str]
    _document: Document
    top_k: int | Literal["all"]
    """Blocks of a list, or tokens if single tokens are retrieved."""
    tokens = 8
    """Tokens to generate by default. The question's last token is the first step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tally = _Tally()

    @abstractmethod
    def watching(self) -> AbstractContextManager[dict[str, Any]]:
        """Observe the tokens that are generated inside the block; yield options for ``model.generate``."""

    @abstractmethod
    def choice(self, choice: Choice) -> None:
        """See ``Observer``."""

    def finish(self, *, progress: bool) -> None:
        """Compare the noted choices, if that is cheaper for all steps at once; ``progress`` shows a bar."""

    def nothing(self, tokens: int) -> str:  # noqa: ARG002 - more of them rarely help
        """Say why nothing was retrieved for a question and ``tokens`` after it, and what to do."""
        return "the memory is empty: first read a text of at least one token"

    def locate(self, number: int) -> tuple[Document, int]:
        """Return document and block of a number of the tally. By default all blocks belong to one document."""
        return self._document, number

    @torch.no_grad()
    def audit(self, token_ids: Sequence[int] | Tensor, tokens: int | None = None, *, progress: bool = False) -> Audit:
        """Let the model read ``token_ids [n]``, a question, and generate ``tokens``; audit each step.

        Raises ``InvalidArgument`` if there is no question or nothing is retrieved, and ``DamagedError``.
        """
        ids, tokens = torch.as_tensor(token_ids).flatten(), self.tokens if tokens is None else tokens
        if not len(ids) or tokens < 1 or (self.top_k != "all" and self.top_k < 1):
            raise InvalidArgument(
                "an audit needs a question of at least one token, at least one step and a top_k of at least 1"
            )
        with self.watching() as options:
            out = self.model.generate(
                ids[None].to(self.model.device), max_new_tokens=tokens, do_sample=False, **options
            )
        self.finish(progress=progress)
        if not self.tally.steps:
            raise InvalidArgument(self.nothing(tokens))
        blocks, stored_tokens = self.tally.blocks, self.tally.stored_tokens
        most = blocks if stored_tokens is None else stored_tokens
        return Audit(
            mechanism=self.mechanism,
            positions=self.positions,
            documents=self.documents,
            blocks=blocks,
            stored_tokens=stored_tokens,
            top_k=most if self.top_k == "all" else min(most, self.top_k),
            steps=self.tally.steps,
            tokens=out[0, len(ids) :].tolist(),
            layers=self.tally.layers(memory=self.shares),
            missed=self.tally.missed(self.locate),
            missed_tokens=[] if stored_tokens is None else self.tally.missed_tokens(self._document),
        )


class _Tally:
    """The sums over the steps of one audit, layer by layer."""

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks that could be retrieved at the last step."""
        self.stored_tokens: int | None = None
        """Tokens that could be retrieved, if single tokens are."""
        self._layers: dict[int, list[tuple[Tensor, ...]]] = {}
        """For each step of a layer, each ``[H]``: attention on blocks, on the retrieved ones, recall and margin."""
        self._index: dict[int, list[float]] = {}
        self._tokens: list[tuple[Tensor, Tensor]] = []
        """What the most missed tokens lost at each step that has ended, and their places; if tokens are retrieved."""
        self._now, self._lists_now = torch.zeros(0), 0  # the same of all tokens in this step, summed over lists
        self._lost = torch.zeros(0)  # [N], summed over steps, layers and heads
        self._most = torch.zeros(0)
        self._where = torch.zeros(0, 2, dtype=torch.int64)
        self._lists = 0

    def add(
        self,
        layer: int,
        weights: Tensor,
        chosen: Tensor,
        scores: Tensor,
        *,
        places: Tensor | None = None,
        size: int = 1,
        unit: int = 1,
        end: int | None = None,
    ) -> None:
        """Add one step of ``layer``: attention shares ``weights [H, N]`` of all blocks, and the ``chosen [H, N]``.

        ``scores [H, N]`` give the margin. If single tokens are retrieved, ``N`` counts tokens at ``places [N]``, in
        blocks of ``size``; ``unit`` of them are missed together. Those from ``end`` on are never named.
        """
        self.blocks = weights.shape[1]
        if places is not None:
            self.stored_tokens, self.blocks = self.blocks, len((places // size).unique())
        held = (weights * chosen).sum(-1)
        best, taken = scores.masked_fill(chosen, -torch.inf), scores.masked_fill(~chosen, torch.inf)
        margin = taken.amin(-1) - best.amax(-1)
        recall = best_chosen(weights, chosen)
        self._layers.setdefault(layer, []).append((weights.sum(-1), held, recall, margin))
        lost = weights.masked_fill(chosen, 0.0)
        if places is not None:
            if len(self._layers[layer]) - 1 > len(self._tokens):
                self._end_step()
            now = torch.bincount(places // unit * unit, lost.sum(0), len(self._now))[:end]
            now[: len(self._now)] += self._now
            self._now, self._lists_now = now, self._lists_now + len(lost)
            lost = lost.new_zeros(len(lost), int(places.max()) // size + 1).index_add_(1, places // size, lost)
        self._note_missed(layer, lost)

    def _end_step(self) -> None:
        """Keep the most missed tokens of a step: a number for each stored token and step would be too much."""
        best = self._now.topk(min(WORST, len(self._now)))
        self._tokens.append((best.values / max(1, self._lists_now), best.indices))
        self._now, self._lists_now = self._now[:0], 0

    @property
    def steps(self) -> int:
        return max(map(len, self._layers.values()), default=0)

    def add_index_recall(self, layer: int, recall: float | None) -> None:
        """Add the index recall of the layer for one step; None adds nothing."""
        self._index.setdefault(layer, []).extend([] if recall is None else [recall])

    def _note_missed(self, layer: int, lost: Tensor) -> None:
        count = lost.shape[1]
        missing = count - len(self._lost)
        if missing > 0:  # blocks that were added since
            self._lost, self._most = (torch.cat([x, x.new_zeros(missing)]) for x in (self._lost, self._most))
            self._where = torch.cat([self._where, self._where.new_zeros(missing, 2)])
        self._lost[:count] += lost.sum(0).float()
        self._lists += len(lost)
        most, head = lost.max(0)
        more = (most > self._most[:count]).nonzero().flatten()
        self._most[more] = most[more].float()
        self._where[more] = torch.stack([torch.full_like(head[more], layer), head[more]], -1)

    def layers(self, *, memory: bool = True) -> list[LayerAudit]:
        """Return the result of each layer, in order; ``memory`` says whether weights are shares of attention."""
        found = []
        for layer, steps in sorted(self._layers.items()):
            mass, held, recall, margins = (torch.stack(parts) for parts in zip(*steps, strict=True))
            finite = margins[margins.isfinite()]
            found.append(
                LayerAudit(
                    layer=layer,
                    captured=held.sum(0) / mass.sum(0),  # 0 / 0 is NaN: no attention fell on blocks
                    recall=recall.mean(0),
                    memory=mass.mean(0) if memory else None,
                    margin=float(finite.median()) if len(finite) else None,
                    index_recall=_mean(self._index.get(layer, [])),
                )
            )
        return found

    def missed(self, locate: Callable[[int], tuple[Document, int]]) -> list[MissedBlock]:
        """Return the most missed blocks; ``locate`` finds document and block of a number ``0..N-1``."""
        best = self._lost.topk(min(WORST, len(self._lost)))
        found = []
        for lost, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if lost > 0:
                document, block = locate(number)
                layer, head = self._where[number].tolist()
                weight = lost / self._lists
                found.append(MissedBlock(document=document.name, block=block, weight=weight, layer=layer, head=head))
        return found

    def missed_tokens(self, document: Document) -> list[MissedToken]:
        """Return the most missed tokens of each step; places count in ``document``."""
        self._end_step()
        size = document.memory.spec.block_size
        return [
            MissedToken(step, document.name, place // size, place % size, weight)
            for step, found in enumerate(self._tokens)
            for weight, place in zip(*(each.tolist() for each in found), strict=True)
            if weight > 0
        ]


def best_chosen(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the share ``[...]`` of the best ``k`` of ``scores [..., N]`` among the ``k`` that are ``chosen [..., N]``.

    Equal scores are equally good. An empty list has recall 1.
    """
    count = chosen.sum(-1, keepdim=True)
    ordered = scores.sort(-1, descending=True).values
    last = ordered.gather(-1, (count - 1).clamp(min=0))
    good = chosen & (scores >= last - ALIKE * last.abs())
    return torch.where(count > 0, good.sum(-1, keepdim=True) / count.clamp(min=1), 1.0).squeeze(-1)


def exact_scores(view: LayerView, queries: Tensor, blocks: range, *, piece: int = PIECE) -> Tensor:
    """Best inner product of ``queries [H, T, D]`` with the landmarks of each of ``blocks``: ``[H, T, n]`` float32.

    It reads the store, ``piece`` blocks at a time, whatever index the layer has.
    """
    parts = [queries.new_empty(*queries.shape[:2], 0, dtype=torch.float32)]
    for some in pieces(blocks, piece):
        keys = view.landmarks(some)  # [n, G, P, D]
        heads = keys.repeat_interleave(len(queries) // keys.shape[1], 1)
        parts.append(torch.einsum("htd,nhpd->htnp", queries.float().cpu(), heads).amax(3))
    return torch.cat(parts, 2)


def index_recall(
    view: LayerView, queries: Tensor, top_k: int, parts: Sequence[range], *, piece: int = PIECE
) -> float | None:
    """Share of the true best ``top_k`` blocks that the layer's index finds for ``queries [H, T, D]``.

    The search covers ``parts``, which are ranges of blocks, and reads ``piece`` blocks at a time. None if nothing can
    be found.
    """
    hits = there = 0
    for blocks in parts:
        if not blocks or not queries.numel():
            continue
        truth = exact_scores(view, queries, blocks, piece=piece)
        found = view.search(queries.float().cpu(), min(top_k, len(blocks)), allowed=blocks).blocks
        chosen = torch.zeros(*truth.shape[:2], len(blocks) + 1, dtype=torch.bool)
        chosen.scatter_(2, torch.where(found >= 0, found - blocks.start, len(blocks)), value=True)
        last = truth.topk(min(top_k, len(blocks)), -1).values[..., -1:]
        hits += int((chosen[..., :-1] & (truth >= last - ALIKE * last.abs())).sum())
        there += found.numel()
    return hits / there if there else None


def pieces(blocks: range, size: int = PIECE) -> Iterator[range]:
    """Cut ``blocks`` into runs of ``size``."""
    for start in range(blocks.start, blocks.stop, size):
        yield range(start, min(start + size, blocks.stop))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rounded(value: Any) -> Any:
    """Return a value for JSON: its numbers are rounded, and a NaN is null."""
    match value:
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case Tensor() | list():
            return [_rounded(each) for each in (value.tolist() if isinstance(value, Tensor) else value)]
        case float():
            return None if math.isnan(value) else round(value, 6)
    return value
