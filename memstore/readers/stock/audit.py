"""The audit of an attached stock model: the true attention of each layer and query head to every stored block.

The keys come from the store and are exact. A retrieved block stands where it was attended to. Any other block is placed
where it would have been. True and clamped positions put it in its own place. Stingy positions could put it in any slot,
so it gets the mean over all slots. (Attention falls with the distance, so a single slot would count for or against
missed blocks, whatever they contain. With the mean, random lists capture ``K / N``.)

Queries come from the model's run with the retrieved blocks. So an audit says what a layer missed, given what the
layers below had retrieved. (A second pass with everything retrieved would answer another question, and cost a full
forward pass.) If everything is retrieved, the audit shows the model's own attention, and with true positions the first
layer has full attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels.block_attention import masked_scores
from memstore.memory import Document
from memstore.progress import progress_bar
from memstore.readers.attachment import changed
from memstore.readers.audit import Auditor, index_recall, pieces
from memstore.readers.observer import Choice
from memstore.readers.stock.call import Call, LayerStates, StockChoice
from memstore.readers.stock.reader import StockReader
from memstore.readers.stock.visible import Candidates, as_tokens

READ = 256
"""Blocks whose states are read at once."""
ASKED = 8
"""Most query tokens for measuring the index."""
POSITIONS = {
    "stingy": "retrieved blocks keep their slots; every other block gets the mean over all slots",
    "true": "all blocks keep their positions in the document",
    "clamped": "all blocks keep their order in the document, moved down into the trained range",
}


class _LastToken(NamedTuple):
    """The last token of one layer at one step."""

    states: LayerStates
    query: Tensor
    """``[H, D]`` without position."""
    position: int
    numbers: Tensor
    """``[H, K]``: the candidates in each head's list."""
    chosen: Tensor
    """``[H, K]``: log-sum-exp of their scores, as the model attended to them."""
    rest: Tensor
    """``[H]``: log-sum-exp of the scores of all other keys that it attended to."""
    options: dict[str, Any]
    asked: Tensor | None
    """The queries of the layer's own index: position-free, ``[H, t, D]``."""


class StockAuditor(Auditor):
    """The auditor of an attached stock model. It reads every block, so it refuses ``on_error="miss"``."""

    mechanism = "attach"

    def __init__(self, attached: StockReader, top_k: int | None) -> None:
        super().__init__(attached.model)
        self._attached, retrieval = attached, attached.retrieval
        if retrieval.on_error == "miss":
            raise InvalidArgument("an audit reads every block. Use Retrieval(on_error='raise')")
        self.positions = POSITIONS[retrieval.positions]
        self.top_k = retrieval.top_k if top_k is None else top_k
        self._seen: dict[int, list[_LastToken]] = {}

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        selection, observers = self._attached.selection, self._attached.observers
        observers.append(self)
        try:
            with changed(selection, retrieval=replace(selection.retrieval, top_k=self.top_k)):
                yield {}
        finally:
            observers.remove(self)

    def choice(self, choice: Choice) -> None:
        assert isinstance(choice, StockChoice)
        self._seen.setdefault(choice.layer, []).append(_seen(choice))

    def finish(self, *, progress: bool) -> None:
        """See ``Auditor``. Every block is read once, for all steps of a layer."""
        if not self._seen:
            return
        call = self._call
        whole = len(self._seen) * len(call.candidates) * self._attached.block_size
        with progress_bar("every block", 0, whole, progress, "auditing") as advance:
            for layer, seen in self._seen.items():
                missed = _block_scores(call, seen, advance)  # [H, T, N]
                for step, each in enumerate(seen):
                    scores = missed[:, step].scatter(1, each.numbers, each.chosen)
                    whole_sum = torch.logaddexp(scores.logsumexp(-1), each.rest)
                    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, each.numbers, value=True)
                    self.tally.add(layer, (scores - whole_sum[:, None]).exp(), chosen, scores)
                recall = _index_recall(self._attached, call, layer, seen[0])
                self.tally.add_index_recall(layer, recall)

    @property
    def _call(self) -> Call:
        return next(iter(self._seen.values()))[0].states.call

    @property
    def documents(self) -> list[str]:  # type: ignore[override]  # known once something was retrieved
        return list(dict.fromkeys(source.document.name for source, _ in self._call.candidates.parts))

    def nothing(self, tokens: int) -> str:  # noqa: ARG002 - more of them would not help
        sink, window = self._attached.sink, self._attached.window
        return (
            f"nothing could be retrieved: the stored tokens fit into sink and window ({sink} and {window} "
            "tokens), or no layer looks further; read a longer text"
        )

    def locate(self, number: int) -> tuple[Document, int]:
        return self._call.candidates.locate(number)


def _seen(choice: StockChoice) -> _LastToken:
    """Return what a layer attends to with its last token."""
    states, options, scores = choice.states, choice.options, _last_scores(choice)
    call, chosen = states.call, choice.fetched.chosen
    sink, size, numbers = choice.fetched.start, call.selection.block_size, chosen.numbers[0]
    kept = numbers.shape[-1] * size
    rest = torch.cat([scores[:, :sink], scores[:, sink + kept :]], -1)
    if options["sinks"] is not None:
        rest = torch.cat([rest, options["sinks"].to(rest)[:, None]], -1)
    return _LastToken(
        states,
        choice.queries[0, :, -1],
        int(call.positions[0, -1]),
        numbers.repeat_interleave(len(scores) // len(numbers), 0),
        scores[:, sink : sink + kept].unflatten(-1, (-1, size)).logsumexp(-1).cpu(),
        rest.logsumexp(-1).cpu(),
        options,
        choice.queries[0, :, -ASKED:].float() if call.selection.by_layer else None,
    )


def _last_scores(choice: StockChoice) -> Tensor:
    """Scores ``[H, n]`` of the last token with all keys of its layer."""
    scores = _scores(choice.turned[0, :, -1:], choice.keys[0], choice.options)[:, 0]
    if choice.mask is not None:
        mask = choice.mask[0, :, -1]
        scores[:, scores.shape[1] - mask.shape[-1] :] += mask.repeat_interleave(len(scores) // len(mask), 0)
    return scores


def _scores(queries: Tensor, keys: Tensor, options: dict[str, Any]) -> Tensor:
    """Scores ``[H, T, M]`` of ``queries [H, T, D]`` and ``keys [heads, M, D]``, in float32 at least."""
    scale = queries.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    return masked_scores(queries[None], keys[None], mask=None, scale=scale, softcap=options["softcap"])[0]


def _block_scores(call: Call, seen: list[_LastToken], advance: Callable[[int], None]) -> Tensor:
    """Log-sum-exp ``[H, T, N]`` of the scores of each candidate's tokens, at the place it would have, for T steps."""
    plan, options, candidates = seen[0].states.plan, seen[0].options, call.candidates
    queries, now = _from_every_slot(call, seen)  # [H, T * V, D], [T * V]
    found = []
    for piece in pieces(range(len(candidates)), READ):
        places = _places(call, candidates, piece).to(queries.device)  # [n * S]
        keys = _keys(candidates, piece, plan.index).to(queries)  # [G, n * S, D]
        keys = plan.rotary.rotate(keys[None], plan.rotary.cos_sin(places[None]))[0]
        scores = _scores(queries, keys, options)
        if plan.sliding is not None:
            scores = scores.masked_fill(now[:, None] - places >= plan.sliding, -torch.inf)
        empty = candidates.empty(torch.arange(piece.start, piece.stop), call.selection.block_size)
        if empty is not None:
            scores = scores.masked_fill(empty.flatten().to(scores.device), -torch.inf)
        by_slot = scores.unflatten(-1, (len(piece), -1)).logsumexp(-1).unflatten(1, (len(seen), -1))
        # With the first slot alone, lists captured up to three times as much as with the mean of all slots.
        found.append((by_slot.logsumexp(2) - math.log(by_slot.shape[2])).cpu())
        advance(len(places))
    return torch.cat(found, -1)


def _from_every_slot(call: Call, seen: list[_LastToken]) -> tuple[Tensor, Tensor]:
    """Return queries ``[H, T * V, D]`` at ``V`` positions each, and these positions ``[T * V]``.

    All keys are in the first slot. A query that is moved down by whole slots sees them as if they were in other slots,
    because rotary positions are relative. If positions are not stingy, there is one slot.
    """
    plan, selection = seen[0].states.plan, call.selection
    slots = call.slots if selection.retrieval.positions == "stingy" else 1
    free = torch.stack([each.query for each in seen], 1)  # [H, T, D]
    now = torch.tensor([each.position for each in seen], device=free.device)[:, None]
    now = (now - selection.block_size * torch.arange(slots, device=free.device)).flatten()
    queries = free.repeat_interleave(slots, 1)
    return plan.rotary.rotate_pair(queries[None], queries[None], plan.rotary.cos_sin(now[None]))[0][0], now


def _places(call: Call, candidates: Candidates, numbers: range) -> Tensor:
    """Positions ``[n * S]`` of candidates that were not retrieved; stingy ones are all in the first slot."""
    blocks = candidates.blocks[numbers.start : numbers.stop][None, None]
    return call.placed(blocks, torch.zeros_like(blocks)).retrieved[0, 0]


def _keys(candidates: Candidates, numbers: range, layer: int) -> Tensor:
    """Keys ``[G, n * S, D]`` without positions."""
    located = candidates.located(torch.arange(numbers.start, numbers.stop))
    return as_tokens(torch.cat([document.layer(layer).gather(blocks)["k"] for document, blocks in located]))


def _index_recall(attached: StockReader, call: Call, layer: int, seen: _LastToken) -> float | None:
    """Mean recall, over the documents, of the index that chose for ``layer``; it holds only full blocks."""
    top_k = seen.numbers.shape[-1]
    recalls = []
    for source, blocks in call.candidates.parts:
        if seen.asked is not None:
            queries, index_layer = seen.asked, layer
        else:
            index_layer = attached.selection.index_layers[-1]
            if index_layer not in call.codes:
                return None  # no choice was needed
            queries = call.codes[index_layer][0, -ASKED:, source.memory][None]
        full = range(blocks.start, min(blocks.stop, source.document.complete_blocks.stop))
        recalls.append(index_recall(source.document.layer(index_layer), queries, top_k, [full]))
    known = [each for each in recalls if each is not None]
    return sum(known) / len(known) if known else None
