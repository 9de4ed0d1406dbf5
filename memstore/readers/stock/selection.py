"""Which blocks a call attends to: the options and the routers, for one attached model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstore.attention import Router, choose, late_interaction, pooled, slots_by_score
from memstore.attention.retrieval import Retrieval
from memstore.attention.routing import best_inherited, inherited
from memstore.readers.stock.architecture import Architecture, LayerPlan
from memstore.readers.stock.short import ShortDocuments
from memstore.readers.stock.visible import Candidates
from memstore.readers.stock.words import DocumentWords
from memstore.transfer import to_host

SAMPLE_TOKENS = 2048
"""Tokens of the document, and as many of general text: a document that repeats itself must not decide alone."""


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """The lists that are attended to: one for each row of the batch, or one for all."""

    numbers: Tensor
    """``[B or 1, lists, K]`` numbers of candidates, ascending in each list."""
    slots: Tensor
    """``[B or 1, lists, K]``: the slot that each takes with stingy positions."""
    scores: Tensor
    """``[B or 1, lists, K]`` float32: by what they were chosen; NaN where nobody had to choose."""

    def same(self, other: CandidateLists) -> bool:
        """True if ``other`` is the same blocks in the same slots."""
        return torch.equal(self.numbers, other.numbers) and torch.equal(self.slots, other.slots)

    def without(self, lost: Tensor) -> CandidateLists:
        """Lists without the candidates ``lost [n]``; those that lose fewer also give up their lowest slots.

        So all lists have one length. The slots that are left stay where they are.
        """
        bad = torch.isin(self.numbers, lost)
        most = int(bad.sum(-1).max())
        order = torch.where(bad, -1, self.slots).argsort(-1)[..., most:].sort(-1).values
        return CandidateLists(*(each.gather(-1, order) for each in (self.numbers, self.slots, self.scores)))

    def rows(self, rows: Tensor) -> CandidateLists:
        """Those of the given rows; itself where it serves all rows."""
        if len(self.numbers) == 1:
            return self
        return CandidateLists(*(each.index_select(0, rows) for each in (self.numbers, self.slots, self.scores)))


@dataclass(eq=False)
class FetchedList:
    """What a layer has of a list, once it has fetched the states."""

    chosen: CandidateLists
    """What could be read of it."""
    start: int
    """The key at which the retrieved blocks begin, which follow each other."""
    tiers: dict[int, str] | None
    """Where each candidate was when it was chosen; None where nobody was watching."""
    gather_seconds: float
    """Time it took."""
    void: Tensor | None = None
    """``[B or 1, lists, K]``: True where a list was filled up with what it does not attend to."""


class Selection:
    """Chooses candidates by number; knows nothing of states and positions."""

    def __init__(
        self,
        architecture: Architecture,
        retrieval: Retrieval,
        block_size: int,
        index_layers: Sequence[int],
        tokenizer: Any = None,
    ) -> None:
        self.architecture, self.retrieval, self.block_size = architecture, retrieval, block_size
        self.index_layers = tuple(index_layers)
        self.routers: dict[int, list[Router]] = {}
        """Of each routing layer, one for each memory."""
        self.words = DocumentWords(tokenizer)
        self.short = ShortDocuments()
        self.search_seconds = 0.0
        """Time spent on choosing since a layer told who watches what it chose."""
        self.ended = False
        """The memory has been taken out of the model."""

    @property
    def by_layer(self) -> bool:
        """True if every layer chooses for itself."""
        return self.retrieval.share != "model"

    @property
    def first_layer(self) -> int:
        """The first layer that attends to a routed list: the layers before the routing one see sink and window only."""
        return self.index_layers[0]

    @property
    def position_limit(self) -> int:
        """The last clamped position at which local tokens may start: a quarter of the trained range is left to them."""
        return self.architecture.max_positions * 3 // 4

    def slots(self, candidates: Candidates) -> int:
        """Blocks in a list over ``candidates``."""
        top_k = self.retrieval.top_k
        return len(candidates) if top_k == "all" else min(top_k, len(candidates))

    def everything(self, candidates: Candidates) -> CandidateLists | None:
        """All candidates as one list if a list holds them all, else None: then somebody has to choose."""
        if self.slots(candidates) < len(candidates):
            return None
        numbers = torch.arange(len(candidates))[None, None]
        return CandidateLists(numbers, numbers, torch.full(numbers.shape, float("nan")))

    def encode(self, layer: int, hidden: Tensor) -> Tensor:
        """Codes ``[B, T, memories, dim]`` of hidden states ``[B, T, hidden]``."""
        return torch.stack([router.encode(hidden.detach()) for router in self.routers[layer]], dim=2)

    def route(
        self, candidates: Candidates, layer: int, rows: Sequence[Tensor], query: Tensor | None = None
    ) -> CandidateLists:
        """One list for all layers from each row's query codes ``[t, memories, dim]``.

        ``query [n]``: the tokens, where they are words that somebody asks with; see ``Retrieval.words``.
        """
        begun = time.perf_counter()
        lists = [self._route_row(candidates, layer, codes, query) for codes in rows]
        return self._chosen(lists, begun)

    def _chosen(self, lists: list[tuple[Tensor, Tensor]], begun: float) -> CandidateLists:
        (numbers, scores), wait = to_host([torch.stack(parts) for parts in zip(*lists, strict=True)])
        wait()
        by_time = torch.arange(numbers.shape[-1]).expand(numbers.shape)
        self.search_seconds += time.perf_counter() - begun
        return CandidateLists(numbers, slots_by_score(scores) if self.retrieval.order == "score" else by_time, scores)

    def _route_row(
        self, candidates: Candidates, layer: int, codes: Tensor, query: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # Words may lift any block, so where they vote every block is scored.
        found = None if query is not None and self.retrieval.words else self._pruned(candidates, layer, codes)
        if found is None:
            found = choose(self.routed(candidates, layer, codes, query), self.slots(candidates))
        numbers, best = found
        return numbers[None], best[None]

    # Two looks choose 0.96 of the eight blocks that all scores choose among a million codes: another answer now and
    # then, so it is asked for by name (`codes:pruned`). The heirs of the best k blocks are the only heirs that can be
    # among the best k. Several documents are scored in full, since mean and deviation are taken over all.
    def _pruned(self, candidates: Candidates, layer: int, codes: Tensor) -> tuple[Tensor, Tensor] | None:
        """As ``choose`` of ``routed``, by an index that need not score every block; None where that cannot be.

        Such an index knows one run of full blocks and one group of query tokens.
        """
        parts = [(source, blocks) for source, blocks in candidates.parts if blocks]
        asking = self._asking(codes)
        if len(parts) != 1 or candidates.incomplete or len(asking) > self.retrieval.span:
            return None
        (source, blocks), top_k = parts[0], self.slots(candidates)
        document = source.document
        if not document.memory.index_capabilities.routes:
            return None
        scores, ids = document.layer(layer).route(asking[:, source.memory], top_k, allowed=blocks)
        return best_inherited(scores, ids - blocks.start, len(blocks), top_k)

    def _asking(self, codes: Tensor) -> Tensor:
        """Those of the query codes ``[t, ...]`` that choose."""
        return codes if self.retrieval.query == "all" else codes[-self.retrieval.span :]

    def routed(self, candidates: Candidates, layer: int, codes: Tensor, query: Tensor | None = None) -> Tensor:
        """Scores ``[N]`` of the candidates for query codes ``[t, memories, dim]``, and the words ``query [n]``."""
        options, codes = self.retrieval, self._asking(codes)
        scores = candidates.score(layer, [each[None] for each in codes.unbind(1)], self.short)[0]  # [t, N]
        blocks = late_interaction(scores, span=options.span, pool=options.pool)
        by_states = inherited(blocks, candidates.consecutive(blocks.device))
        if query is None or not options.words:
            return by_states
        return by_states + options.words * self.words.score(candidates, query).to(by_states.device)

    def choose_in_layer(
        self, candidates: Candidates, plan: LayerPlan, rows: Sequence[Tensor], *, whole: bool
    ) -> CandidateLists:
        """The layer's own lists from each row's queries ``[H, t, D]``.

        ``whole`` lets all query tokens choose; otherwise the options say which do.
        """
        options, begun = self.retrieval, time.perf_counter()
        lists = {"none": plan.heads, "group": plan.key_heads, "layer": 1}[options.share]
        chosen = []
        for queries in rows:
            queries = queries if whole or options.query == "all" else queries[:, -options.span :]
            one_for_all = [queries.detach().float()] * candidates.memories
            scores = candidates.score(plan.index, one_for_all, self.short)  # [H, t, N]
            numbers, best = choose(pooled(scores, pool=options.pool, lists=lists), self.slots(candidates))
            chosen.append((numbers, best))
        return self._chosen(chosen, begun)


def router_samples(tokens: Tensor, tokenizer: Any, vocabulary: int) -> list[Tensor]:
    """What a router is fitted to, each ``[n]``: the beginning of the document ``tokens``, and general text."""
    general = general_sample(tokenizer, vocabulary)
    # A shorter beginning would make the router depend on how the text is cut into calls.
    return [tokens[:SAMPLE_TOKENS], general] if len(tokens) >= SAMPLE_TOKENS else [general]


def general_sample(tokenizer: Any, vocabulary: int) -> Tensor:
    """Tokens of English prose that every Python carries, its language reference; random ids without a tokenizer."""
    text = "" if tokenizer is None else _language_reference()
    if not text:
        return torch.randint(vocabulary, (SAMPLE_TOKENS,), generator=torch.Generator().manual_seed(0))
    ids: Tensor = torch.as_tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:SAMPLE_TOKENS])
    return ids


def _language_reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions of Python leave it out
        return ""
    return "\n".join(str(topics[name]) for name in sorted(topics))[:40_000]
