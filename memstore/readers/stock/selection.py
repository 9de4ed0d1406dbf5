"""The blocks that a call attends to, and their positions: options, routers and words of one attached model.

States find meanings, words find names and numbers: on people's questions they fail at different ones. So for a query in
words, a block's score has two parts. The score of its states is added to ``Retrieval.words`` times a BM25 score of the
common words. Only the part above a fifth of the worth of all query words counts. A question in other words may share
only "which" and "her" with some block. It is left to the states.

States are stored without positions; positions are applied when blocks are fetched. A query sees, in this order,

    sink | retrieved blocks | direct tokens (the window) | local tokens (the segment itself)

``stingy`` gives these consecutive positions from 0 on, however long the document is. Each retrieved block has one slot
of ``block_size`` positions (after section 3.2.1 of Mohtashami & Jaggi 2023). ``true`` gives every token its place in
the document. It is exact while the document is shorter than the model's training length. ``clamped`` is ``true``, moved
down so that the local tokens start at ``limit`` at most. Tokens that would come before 0 are at position 0.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention import Router, choose, late_interaction, pooled, slots_by_score
from memstore.attention.routing import inherited
from memstore.device_copies import to_device, to_host
from memstore.errors import InvalidArgument
from memstore.index.words import STEM, WordIndex, asked_words, words_of
from memstore.readers.asking import Query
from memstore.readers.kinds import Positions, Retrieval
from memstore.readers.stock.architecture import Architecture, CosSin, LayerPlan, LayerRotary
from memstore.readers.stock.visible import AttachedDocument, Candidates, ShortDocuments, VisibleParts

if TYPE_CHECKING:
    from memstore.memory import Document

LEAST = 0.2
"""A block's words must have more than this share of the worth of all query words."""
OWN = 0.25
"""Share of the vote for a block's own words. The rest is for the better pair with a neighbour."""
RANKS = 20
"""In reciprocal ranks: a higher number makes the first few places more alike."""
UNKNOWN = -1
"""A word that no block has."""
AT_ONCE = 1024
"""Blocks that are decoded at a time."""
MEMOS = 1024
"""Most positions and rotations of lists that are kept. Then all are made again. Only a small ``every`` makes so
many."""
_NO_WORDS = torch.empty(0, dtype=torch.int64)
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """The lists of blocks that layers attend to: one for each row of the batch, or one for all."""

    numbers: Tensor
    """``[B or 1, lists, K]`` numbers of candidates, ascending in each list."""
    slots: Tensor
    """``[B or 1, lists, K]``: the slot of each block with stingy positions."""
    scores: Tensor
    """``[B or 1, lists, K]`` float32: the scores of the choice; NaN if no choice was needed."""

    def same(self, other: CandidateLists) -> bool:
        """Whether ``other`` has the same blocks in the same slots."""
        return torch.equal(self.numbers, other.numbers) and torch.equal(self.slots, other.slots)

    def without(self, lost: Tensor) -> CandidateLists:
        """Return lists without the candidates ``lost [n]``. Lists that lose fewer also give up their lowest slots.

        So all lists have one length. The other slots stay where they are.
        """
        bad = torch.isin(self.numbers, lost)
        most = int(bad.sum(-1).max())
        order = torch.where(bad, -1, self.slots).argsort(-1)[..., most:].sort(-1).values
        return CandidateLists(*(each.gather(-1, order) for each in (self.numbers, self.slots, self.scores)))

    def rows(self, rows: Tensor) -> CandidateLists:
        """Return the lists of the given rows, or itself if it serves all rows."""
        if len(self.numbers) == 1:
            return self
        return CandidateLists(*(each.index_select(0, rows) for each in (self.numbers, self.slots, self.scores)))


@dataclass(eq=False)
class FetchedList:
    """A list in a layer, after its states are fetched."""

    chosen: CandidateLists
    """The readable part of the list."""
    start: int
    """The key at which the retrieved blocks begin; they are consecutive."""
    tiers: dict[int, str] | None
    """The tier of each candidate when it was chosen; None without observers."""
    gather_seconds: float
    """Seconds that fetching took."""
    void: Tensor | None = None
    """``[B or 1, lists, K]``: True where a list was filled up with blocks that it does not attend to."""


class Selection:
    """The choice of candidates by number. It does not use states and positions."""

    def __init__(
        self,
        architecture: Architecture,
        retrieval: Retrieval,
        block_size: int,
        index_layers: Sequence[int],
        words: DocumentWords,
    ) -> None:
        self.architecture, self.retrieval, self.block_size = architecture, retrieval, block_size
        self.index_layers = tuple(index_layers)
        self.routers: dict[int, list[Router]] = {}
        """For each routing layer, one router for each memory."""
        self.words = words
        self.short = ShortDocuments()
        self.likelihood: Callable[[Candidates, Tensor, Tensor], Tensor] | None = None
        """Returns how likely a query is after each of some candidates."""
        self._last: tuple[Retrieval, ReferenceType[Candidates], list[Tensor], Tensor] | None = None
        """For the last query of words: options, candidates, its codes and the tokens of its parts, and the scores."""
        self.search_seconds = 0.0
        """Time spent on choosing since a layer last reported to the observers."""
        self.ended = False
        """Whether the memory has been taken out of the model."""

    @property
    def by_layer(self) -> bool:
        """Whether every layer chooses for itself."""
        return self.retrieval.share != "model"

    @property
    def first_layer(self) -> int:
        """The first layer that attends to a routed list. Layers before the routing layer see sink and window only."""
        return self.index_layers[0]

    @property
    def position_limit(self) -> int:
        """The last clamped position where local tokens may start. A quarter of the trained range is left to them."""
        return self.architecture.max_positions * 3 // 4

    def slots(self, candidates: Candidates) -> int:
        """Return the number of blocks in a list over ``candidates``."""
        top_k = self.retrieval.top_k
        return len(candidates) if top_k == "all" else min(top_k, len(candidates))

    def everything(self, candidates: Candidates) -> CandidateLists | None:
        """Return all candidates as one list if they fit into one, else None: then a choice is needed."""
        if self.slots(candidates) < len(candidates):
            return None
        numbers = torch.arange(len(candidates))[None, None]
        return CandidateLists(numbers, numbers, torch.full(numbers.shape, float("nan")))

    def encode(self, layer: int, hidden: Tensor) -> Tensor:
        """Return codes ``[B, T, memories, dim]`` of hidden states ``[B, T, hidden]``, to be stored."""
        return torch.stack([router.encode(hidden.detach()) for router in self.routers[layer]], dim=2)

    def ask(self, layer: int, hidden: Tensor) -> Tensor:
        """Return codes of a query. The length of a code is the weight of its token."""
        return torch.stack([router.ask(hidden.detach()) for router in self.routers[layer]], dim=2)

    def route(
        self, candidates: Candidates, layer: int, rows: Sequence[Tensor], query: Query | None = None
    ) -> CandidateLists:
        """Choose one list for all layers from each row's query codes ``[t, memories, dim]``, which choose together.

        ``query``: its tokens, if somebody asks in words; see ``Retrieval.words``.
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
        self, candidates: Candidates, layer: int, codes: Tensor, query: Query | None
    ) -> tuple[Tensor, Tensor]:
        numbers, best = choose(self.routed(candidates, layer, codes, query), self.slots(candidates))
        return numbers[None], best[None]

    def routed(self, candidates: Candidates, layer: int, codes: Tensor, query: Query | None = None) -> Tensor:
        """Score the candidates by query codes ``[t, memories, dim]``, and by the words of ``query``: ``[N]``."""
        options = self.retrieval
        asked = [] if query is None else [codes, *(tokens for tokens, _ in query.parts)]
        if asked and self._last is not None:  # an answer repeats the query of its quote
            how, among, same, found = self._last
            alike = how == options and among() is candidates and len(same) == len(asked)
            if alike and all(map(torch.equal, same, asked)):
                return found
        units, weights = units_and_weights(codes, candidates)
        scores = candidates.score(layer, units, self.short)[0]  # [t, N]
        blocks = late_interaction(scores, weights)
        by_states = inherited(blocks, candidates.consecutive(blocks.device))
        if query is None:
            return by_states
        if options.words:
            by_states = by_states + options.words * self.words.score(candidates, query).to(by_states.device)
        found = self._reranked(candidates, by_states, query.tokens) if options.rerank else by_states
        self._last = options, ref(candidates), asked, found
        return found

    def _reranked(self, candidates: Candidates, scores: Tensor, query: Tensor) -> Tensor:
        """Replace the best scores ``[N]`` by reciprocal ranks, see ``Retrieval.rerank``; the others stay below."""
        assert self.likelihood is not None, "a reader sets the likelihood"
        best = scores.topk(min(self.retrieval.rerank, len(scores))).indices
        numbers, order = best.cpu().sort()
        likely = self.likelihood(candidates, numbers, query).to(scores.device)[order.argsort()]
        places = torch.arange(len(best), device=scores.device)
        votes = 1 / (RANKS + places) + 1 / (RANKS + likely.argsort(descending=True, stable=True).argsort())
        return (scores - scores.amax()).index_copy(0, best, votes.to(scores.dtype))

    def choose_in_layer(
        self, candidates: Candidates, plan: LayerPlan, rows: Sequence[Tensor], *, whole: bool
    ) -> CandidateLists:
        """Choose the layer's own lists from each row's queries ``[H, t, D]``.

        ``whole`` lets all query tokens choose; otherwise the last ``span`` do.
        """
        options, begun = self.retrieval, time.perf_counter()
        lists = {"none": plan.heads, "group": plan.key_heads, "layer": 1}[options.share]
        asked = [queries if whole else queries[:, -options.span :] for queries in rows]
        one_for_all = [[queries.detach().float()] * candidates.memories for queries in asked]
        return self._chosen([self._layer_row(candidates, plan.index, each, lists) for each in one_for_all], begun)

    def _layer_row(
        self, candidates: Candidates, layer: int, queries: Sequence[Tensor], lists: int
    ) -> tuple[Tensor, Tensor]:
        """Choose so many ``lists`` by the queries ``[H, t, D]`` for each memory."""
        scores = candidates.score(layer, queries, self.short)  # [H, t, N]
        return choose(pooled(scores, pool=self.retrieval.pool, lists=lists), self.slots(candidates))


def units_and_weights(codes: Tensor, candidates: Candidates) -> tuple[list[Tensor], Tensor]:
    """Return a query's codes with length 1, ``[1, t, dim]`` for each memory, and their lengths ``[t]``.

    ``codes`` are ``[t, memories, dim]``. Routers of several memories may differ. Then a token's weight is the mean over
    the memories of the candidates.
    """
    lengths = codes.norm(dim=-1, keepdim=True)
    units = codes / lengths.clamp(min=1e-12)
    asked = sorted({source.memory for source, blocks in candidates.parts if blocks})
    weights = torch.stack([lengths[:, memory, 0] for memory in asked]).mean(0)  # indexing with a list would copy
    return [each[None] for each in units.unbind(1)], weights


_State = tuple[ReferenceType[Any], int | None, int, int]
"""A document of an open memory, its edits, and its first block."""


class _DocumentRun(NamedTuple):
    """The words of a document."""

    state: _State
    digest: str | None
    """The digest of the document in this state; None if it is unknown."""
    stop: int
    """The first incomplete block."""
    words: Tensor
    """The words of the complete blocks."""
    of: Tensor
    """The block of each word."""
    tokens: int
    last: Tensor
    """The words of the incomplete block, when the document had so many ``tokens``."""

    def goes_on(self, state: _State, digest: str | None) -> bool:
        """Whether a document in ``state`` begins with these words: it has grown, or was opened again unchanged."""
        same = digest is not None and (self.digest, self.state[-1]) == (digest, state[-1])
        return self.state == state or same


class DocumentWords:
    """The words of the documents that a reader sees. One thread at a time, like the reader.

    An answer often stands in the block beside the block with the question's words. So most of the vote is that of a
    block together with its neighbour. Words count by their first letters, because "settlers" should also find
    "settled".

    Token ids are stored with the blocks, so nothing else is stored. The words of a document are decoded when the first
    query comes, in about a second for a million tokens. Words of new blocks are decoded as they come. After an edit,
    all words of the document are decoded again. Decoded words are kept when a memory is closed, because a chat opens it
    for each turn. But they count only for the same complete blocks. An index is kept as long as its candidates.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Without a tokenizer, every token is a word of its own."""
        self._tokenizer = tokenizer
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)
        self._runs: dict[tuple[int, str], _DocumentRun] = {}
        self._indexes: WeakKeyDictionary[Candidates, tuple[WordIndex, WordIndex]] = WeakKeyDictionary()

    def score(self, candidates: Candidates, query: Query) -> Tensor:
        """Return what the words of ``query`` add to the scores of the candidates: ``[N]``, at least 0."""
        return sum((weight * self._score(candidates, tokens) for tokens, weight in query.parts), torch.zeros(()))

    def _score(self, candidates: Candidates, tokens: Tensor) -> Tensor:
        own, pairs = self._index(candidates)  # first, because it learns words
        words = self._words(tokens)
        after = pairs.score(words, least=LEAST)
        before = F.pad(after[:-1], (1, 0)).where(candidates.consecutive(), 0)
        return OWN * own.score(words, least=LEAST) + (1 - OWN) * torch.maximum(after, before)

    def _words(self, tokens: Tensor) -> Tensor:
        if self._tokenizer is None:
            return tokens
        words = asked_words(str(self._tokenizer.decode(tokens)))
        return torch.tensor([self._numbers.get(word[:STEM], UNKNOWN) for word in words], dtype=torch.int64)

    def _index(self, candidates: Candidates) -> tuple[WordIndex, WordIndex]:
        """Return an index of the candidates, and one of each candidate together with the next one in its document."""
        index = self._indexes.get(candidates)
        if index is None:
            words, of, first = [_NO_WORDS], [_NO_WORDS], 0
            for source, blocks in candidates.parts:
                first += len(blocks)
                run, places = self._run(source, blocks)
                words.append(run)
                of.append(places - blocks.stop + first)
            own, at = torch.cat(words), torch.cat(of)
            follow = candidates.consecutive()[at]
            pairs = torch.cat((own, own[follow])), torch.cat((at, at[follow] - 1))
            index = WordIndex(own, at, len(candidates)), WordIndex(*pairs, len(candidates))
            self._indexes[candidates] = index
        return index

    def _run(self, source: AttachedDocument, blocks: range) -> tuple[Tensor, Tensor]:
        """Return the words of ``blocks``, in order, and the block of each word."""
        if not blocks:
            return _NO_WORDS, _NO_WORDS
        document, entry = source.document, source.state
        (whole,) = (run for run in entry.present() if blocks.start in run)
        complete = min(whole.stop, entry.complete(document.memory.spec.block_size).stop)
        key, state = (source.memory, document.name), (ref(document.memory), document.id, entry.edits, whole.start)
        held = self._runs.get(key)
        if held is None or not held.goes_on(state, entry.digest):
            held = _DocumentRun(state, entry.digest, whole.start, _NO_WORDS, _NO_WORDS, 0, _NO_WORDS)
        words, of, last = held.words, held.of, held.last
        same = (held.state, held.tokens) == (state, entry.tokens)  # the digest is that of complete blocks
        if held.stop < complete or (complete < whole.stop and not same):
            new, places = self._read(document, range(held.stop, whole.stop))
            full = int(torch.searchsorted(places, complete))
            words, of, last = torch.cat((words, new[:full])), torch.cat((of, places[:full])), new[full:]
        stop = max(held.stop, complete)
        self._runs[key] = _DocumentRun(state, entry.digest, stop, words, of, entry.tokens, last)
        if blocks.stop > complete:
            words, of = torch.cat((words, last)), torch.cat((of, torch.full((len(last),), complete)))
        first, end = torch.searchsorted(of, torch.tensor([blocks.start, blocks.stop])).tolist()
        return words[first:end], of[first:end]

    def _read(self, document: Document, blocks: range) -> tuple[Tensor, Tensor]:
        size = document.memory.spec.block_size
        if self._tokenizer is None:
            tokens = document.tokens(blocks)
            return tokens, torch.arange(blocks.start, blocks.stop).repeat_interleave(size)[: len(tokens)]
        found: list[int] = []
        counts: list[int] = []
        for start in range(blocks.start, blocks.stop, AT_ONCE):
            some = range(start, min(start + AT_ONCE, blocks.stop))
            for text in self._tokenizer.batch_decode(document.tokens(some).split(size)):
                words = words_of(text)
                found += [self._numbers[word[:STEM]] for word in words]
                counts.append(len(words))
        of = torch.arange(blocks.start, blocks.stop).repeat_interleave(torch.tensor(counts))
        return torch.tensor(found, dtype=torch.int64), of


@dataclass(frozen=True)
class _Placement:
    """Positions of all tokens before the local tokens."""

    sink: Tensor
    """``[1, 1, sink tokens]``"""
    retrieved: Tensor
    """``[B or 1, heads or 1, K * S]``"""
    local_start: int
    """Position of the first local token. Direct tokens are placed right before it."""


def place(
    kind: Positions, *, sink: range, direct: range, blocks: Tensor, slots: Tensor, block_size: int, limit: int
) -> _Placement:
    """Place ``sink`` and ``direct`` (ranges of token numbers) and the retrieved ``blocks [B, heads, K]``.

    ``slots [B, heads, K]`` says which of the K slots each block takes (stingy positions only).
    ``limit`` is the highest position where the local tokens may start, for ``clamped``.
    """
    device = slots.device
    within = torch.arange(block_size, device=device)
    if kind == "stingy":
        taken = len(sink) + slots.unsqueeze(-1) * block_size + within
        start = len(sink) + blocks.shape[-1] * block_size + len(direct)
        return _Placement(torch.arange(len(sink), device=device)[None, None], taken.flatten(-2), start)
    shift = max(0, direct.stop - limit) if kind == "clamped" else 0
    true = blocks.unsqueeze(-1) * block_size + within
    return _Placement(
        (torch.arange(sink.start, sink.stop, device=device) - shift).clamp(min=0)[None, None],
        (true - shift).clamp(min=0).flatten(-2),
        direct.stop - shift,
    )


class LocalTokens:
    """The local tokens of a call: their number, their positions, and their masks. All layers share them."""

    def __init__(self, selection: Selection, seen: VisibleParts, candidates: Candidates) -> None:
        self.selection, self.seen, self.candidates = selection, seen, candidates
        self.slots = selection.slots(candidates)
        self.device = torch.device("cpu")
        self.start_again()

    def start_again(self) -> None:
        """Drop all local tokens."""
        self.length = 0
        self.tokens = 0
        self.padding: Tensor | None = None
        self.memo: dict[tuple[object, ...], tuple[object, Any]] = {}
        """See ``kept``."""
        self._step_memo: dict[object, Any] = {}

    def kept(self, key: tuple[object, ...], of: object, make: Callable[[], T]) -> T:
        """Return the result of ``make`` for a list or positions, made once. It holds them, so that their id stays."""
        if (*key, id(of)) not in self.memo:
            self.memo[*key, id(of)] = (of, make())
        return self.memo[*key, id(of)][1]  # type: ignore[no-any-return]  # what make has returned

    def stand(self, tokens: int, padding: Tensor | None, device: torch.device, positions: Tensor | None = None) -> None:
        """Take the places of ``tokens`` new tokens; ``padding [B, local tokens]`` is True on real tokens.

        ``positions [B or 1, tokens]`` are counted from the first local token. Without them, each token comes one after
        the token before it.
        """
        self.tokens, self.padding, self.device = tokens, padding, device
        self._step_memo.clear()
        if len(self.memo) > MEMOS:
            self.memo.clear()
        self.positions = self._local_places() if positions is None else self.start + positions.to(device)
        self._check_last(counted=padding is None and positions is None)

    def placement(self, chosen: CandidateLists | None) -> _Placement:
        """Return the positions of the visible memory, with the list ``chosen``."""

        def found() -> _Placement:
            blocks = slots = torch.zeros(1, 1, self.slots, dtype=torch.long, device=self.device)
            if chosen is not None:
                blocks, slots = self.kept(("where",), chosen, lambda: to_device(self.numbered(chosen), self.device))
            return self.placed(blocks, slots)

        return self.kept(("placement",), chosen, found)

    def placed(self, blocks: Tensor, slots: Tensor) -> _Placement:
        """Return the positions of the visible memory, with retrieved ``blocks [B, heads, K]``; see ``place``."""
        return place(
            self.selection.retrieval.positions,
            sink=self.seen.sink,
            direct=self.seen.direct,
            blocks=blocks,
            slots=slots,
            block_size=self.selection.block_size,
            limit=self.selection.position_limit,
        )

    def numbered(self, chosen: CandidateLists) -> list[Tensor]:
        """Return blocks and slots of a list, in host memory."""
        return [self.candidates.blocks[chosen.numbers], chosen.slots]

    @property
    def start(self) -> int:
        """Position of the first local token."""
        return self.placement(None).local_start

    def _local_places(self) -> Tensor:
        """Return the places of the new tokens, ``[B or 1, T]``."""
        return self._all_local_places(self.length + self.tokens)[:, -self.tokens :]

    def _all_local_places(self, count: int) -> Tensor:
        """Return the places of the first ``count`` local tokens ``[B or 1, n]``, which may still be missing.

        A row begins at its first real token, so rows of a batch stand as they would alone. Tokens that are masked after
        it keep their place, as in transformers.
        """
        places = torch.arange(count, device=self.device)[None]
        if self.padding is not None:
            places = (places - self.padding.int().argmax(-1, keepdim=True)).clamp(min=0)
        return self.start + places

    def _check_last(self, *, counted: bool) -> None:
        """Raise ``InvalidArgument`` if the model has no such positions; ``counted``: they are consecutive."""
        architecture = self.selection.architecture
        learned, border = architecture.learned_positions, architecture.rotary_border
        border = architecture.max_positions if learned else border
        # Without a memory any rotation is allowed: the model alone would rotate the same way.
        if border is None or not (learned or self.start or self.candidates):
            return
        # Positions that are not consecutive have to be fetched from the device.
        last = self.start + self.length + self.tokens - 1 if counted else int(self.positions.max())
        if last < border:
            return
        reason = f"has learned positions for only {border} tokens"
        if not learned:
            reason = f"rotates all tokens differently beyond {border} tokens, also the stored ones"
        raise InvalidArgument(
            f"{architecture.name} {reason}, but this call needs position {last}: use a smaller window, sink or "
            "top_k, a shorter text, or Retrieval(positions='stingy')"
        )

    def prefix_cos_sin(self, rotary: LayerRotary, positions: Tensor, rows: int) -> CosSin | None:
        """Return cosines and sines for ``positions [B or 1, heads or 1, n]``, shared by layers with the same table.

        If heads differ, rows and heads become one dimension.
        """
        rows = rows if positions.shape[1] > 1 else 1
        flat = positions.expand(max(rows, len(positions)), -1, -1)
        return self.kept(("prefix", rotary.table), positions, lambda: rotary.cos_sin(flat.flatten(0, 1)))

    def local_cos_sin(self, rotary: LayerRotary) -> CosSin | None:
        """Return cosines and sines of the new tokens."""
        if rotary.table not in self._step_memo:
            self._step_memo[rotary.table] = rotary.cos_sin(self.positions)
        cos_sin: CosSin | None = self._step_memo[rotary.table]
        return cos_sin

    def mask(
        self, dtype: torch.dtype, sliding: int | None, fetched: FetchedList | None, prefix: Tensor
    ) -> Tensor | None:
        """Additive mask ``[B or 1, heads or 1, T, M]`` for the last ``M`` keys of a layer; None if all are visible.

        Every token sees the memory, unless a sliding window ends within it or a block is not full. The layer attends to
        the list ``fetched``. Its keys begin with those at the positions ``prefix [B or 1, heads or 1, P]``.
        """
        empty = self._empty(fetched)
        if self.tokens == 1 and self.padding is None and sliding is None and empty is None:
            return None
        count = self.length + self.tokens
        whole = sliding is not None or empty is not None
        key = ("mask", sliding, count, id(prefix) if whole else None, id(empty))
        if key not in self._step_memo:
            visible = self._visible_local(count)
            if whole:
                visible = F.pad(visible, (prefix.shape[-1], 0), value=True)
            if sliding is not None:
                visible = visible & self._within(prefix, sliding, count)
            if empty is not None:
                visible = visible & ~F.pad(empty, (0, visible.shape[-1] - empty.shape[-1]))
            nothing = torch.zeros(visible.shape, dtype=dtype, device=self.device)
            self._step_memo[key] = nothing.masked_fill_(~visible, float("-inf"))
        mask: Tensor = self._step_memo[key]
        return mask

    def _empty(self, fetched: FetchedList | None) -> Tensor | None:
        """``[B or 1, lists, 1, n]``: where the first ``n`` keys of a layer have no token; None if all have one."""
        if fetched is None or not (self.candidates.incomplete or fetched.void is not None):
            return None
        chosen, start, void = fetched.chosen, fetched.start, fetched.void

        def found() -> Tensor | None:
            empty = self.candidates.empty(chosen.numbers, self.selection.block_size)
            if void is not None:
                filled = void[..., None].expand(*void.shape, self.selection.block_size)
                empty = filled if empty is None else empty | filled
            return None if empty is None else F.pad(empty.flatten(-2)[:, :, None], (start, 0)).to(self.device)

        return self.kept(("empty", start), chosen, found)

    def _visible_local(self, count: int) -> Tensor:
        """``[B or 1, 1, T, count]``: causal, without padding. A token always sees itself, so no row is empty."""
        rows = torch.arange(self.length, self.length + self.tokens, device=self.device)[:, None]
        columns = torch.arange(count, device=self.device)
        causal = (columns <= rows)[None, None]
        if self.padding is None:
            return causal
        return (causal & self.padding[:, None, None, :]) | (columns == rows)

    def _within(self, prefix: Tensor, sliding: int, count: int) -> Tensor:
        """``[B or 1, heads or 1, T, P + count]``: less than ``sliding`` places back, even if positions were given."""
        local = self._all_local_places(count)
        batch = max(len(local), len(prefix))
        keys = torch.cat((prefix.expand(batch, -1, -1), local[:, None].expand(batch, prefix.shape[1], -1)), dim=-1)
        return self._local_places()[:, None, :, None] - keys[:, :, None, :] < sliding
