"""Reading a text into a memory: segment by segment, each one transaction, resumable at any of them.

A segment is a fixed stretch of the document, ``[i * segment, (i + 1) * segment)``. Its tokens see the sink, the window
before the segment, the segment up to themselves, and blocks chosen by the last tokens before the segment. All of that
depends on the position in the document alone: reading in one go, in pieces, or one token at a time, with or without
closing the memory in between, computes the same states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention import sub_block_means
from memstore.memory.tensors import as_stored
from memstore.readers.reader import Job
from memstore.readers.stock.call import Call
from memstore.readers.stock.recent import RecentCodes, RecentStates
from memstore.readers.stock.visible import Source, as_blocks, as_tokens, visible

if TYPE_CHECKING:
    from memstore.readers.stock.attached import StockReader


class Made(NamedTuple):
    """What a segment adds to the document."""

    tokens: Tensor
    blocks: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, ``[n, G, S, D]``, from the incomplete last block on."""
    landmarks: dict[int, Tensor]


class SegmentReading:
    """The state of reading one document."""

    def __init__(self, attached: StockReader, job: Job) -> None:
        self.attached, self.job, self.document = attached, job, job.document
        self.spec = attached.memories[0].spec
        self.selection = attached.selection
        self.tokens = len(job.document)
        self._last_logits: Tensor | None = None
        sliding = [plan.sliding or 0 for plan in attached.architecture.layers if plan.local]
        span = self.selection.retrieval.span
        keep = max([attached.window, span, *sliding]) + attached.segment + self.spec.block_size
        self.states = RecentStates(job.document, self.spec.block_size, keep=keep)
        self.codes = {
            layer: RecentCodes(keep=keep, bits=self.spec.key_dtype == "bit")
            for layer in ([] if self.selection.by_layer else self.selection.index_layers)
        }
        if self.tokens:
            self._load()

    def _load(self) -> None:
        size = self.spec.block_size
        for layer in range(self.spec.layers):
            self.states.load(layer, self.tokens)
        first = next(iter(self.states.start.values()))
        blocks = range(first // size, -(-self.tokens // size))
        for layer, codes in self.codes.items():
            stored = self.document.layer(layer).landmarks(blocks)  # [n, 1, S, dim]
            codes.extend(stored[:, 0].flatten(0, 1)[: self.tokens - first], at=first)

    def compute(self, tokens: Tensor) -> Made:
        """Read the next ``tokens [T]``, which lie within one segment."""
        tokens = tokens.long()
        begin = self.tokens // self.attached.segment * self.attached.segment
        seen = visible(
            [Source(self.document, 0)],
            self.spec.block_size,
            tokens=self.tokens,
            start=begin,
            sink=self.attached.sink,
            window=self.attached.window,
        )
        call = Call(
            self.selection, seen, self.states.read, reading=True, retrieve=self.job.retrieve, trace=self.attached.trace
        )
        if call.routed and not self.selection.by_layer:
            self._choose(call, begin)
        logits = self.attached.forward(call, tokens, logits=self._scores(len(tokens)))
        self._score(tokens, logits)
        self._keep(call)
        call.release()
        blocks, landmarks = self._blocks(len(tokens))
        self._settle(blocks, len(tokens))
        self.tokens += len(tokens)
        return Made(tokens, blocks, landmarks)

    # Lists come from the tokens before the segment, not from its own: strictly causal, so a perplexity measured while
    # reading is honest, and a text gives the same states however it is cut. Layers that choose for themselves have no
    # stored queries and use the segment's own.
    def _choose(self, call: Call, begin: int) -> None:
        layer = self.selection.index_layers[0]
        queries = self.codes[layer].read(range(begin - self.selection.retrieval.span, begin))
        chosen = self.selection.route(call.candidates, layer, [queries[:, None]])
        call.set_chosen(chosen, from_layer=self.selection.first_layer)

    def _keep(self, call: Call) -> None:
        """Keep the states of the segment, rounded to what is stored of them."""
        dtype = getattr(torch, self.spec.dtype)
        for layer, states in enumerate(call.layers):
            assert states.fresh is not None
            keys, values = (x[0].detach().to("cpu", dtype) for x in states.fresh)
            self.states.extend(layer, keys, values, at=self.tokens)
        for layer, recent in self.codes.items():
            recent.extend(call.codes[layer][0, :, 0], at=self.tokens)

    def _blocks(self, new: int) -> tuple[list[tuple[Tensor, Tensor]], dict[int, Tensor]]:
        """States of all layers as blocks, and landmarks, from the incomplete last block on."""
        size = self.spec.block_size
        tokens = range(self.tokens // size * size, self.tokens + new)
        states = [self.states.read(layer, tokens) for layer in range(self.spec.layers)]
        blocks = [(as_blocks(keys, size).contiguous(), as_blocks(values, size).contiguous()) for keys, values in states]
        if self.selection.by_layer:
            means = {i: sub_block_means(blocks[i][0], self.spec.keys_per_block) for i in self.spec.index_layers}
            return blocks, means
        return blocks, {layer: as_blocks(codes.read(tokens)[None], size) for layer, codes in self.codes.items()}

    # With a codec reading goes on with what the memory gives back of complete blocks, so a text that was interrupted
    # between segments ends in the same states, bit for bit. One that is read in pieces that end within a segment has
    # states that differ by what the codec loses.
    def _settle(self, blocks: list[tuple[Tensor, Tensor]], new: int) -> None:
        """Go on with what the memory will give back of complete blocks: who resumes here has nothing else."""
        if self.spec.codec == "none":
            return
        first = self.tokens // self.spec.block_size
        complete = (self.tokens + new) // self.spec.block_size - first
        for layer, (keys, values) in enumerate(blocks if complete else []):
            stored = as_stored(self.spec, {"k": keys[:complete], "v": values[:complete]})
            at = first * self.spec.block_size
            self.states.replace(layer, as_tokens(stored["k"]), as_tokens(stored["v"]), at=at)

    def commit(self, made: Made) -> None:
        """Store it, in one transaction."""
        options, self.job.options = self.job.options, None
        with self.document.append(made.tokens, reading=options) as batch:
            for layer, (keys, values) in enumerate(made.blocks):
                batch.put(layer, landmarks=made.landmarks.get(layer), k=keys, v=values)

    def _scores(self, new: int) -> bool:
        return (
            self.job.score_from is not None and self.tokens + new >= self.job.score_from
        )  # its last logits predict the first token after it

    def _score(self, tokens: Tensor, logits: Tensor | None) -> None:
        if logits is None or self.job.score_from is None:
            return
        before, self._last_logits = self._last_logits, logits[-1:]
        predicted = logits[:-1] if before is None else torch.cat((before, logits[:-1]))
        nll = F.cross_entropy(
            predicted.float(), tokens[len(tokens) - len(predicted) :].to(logits.device), reduction="none"
        )
        first = self.tokens + len(tokens) - len(nll)
        self.job.nll.append(nll[max(0, self.job.score_from - first) :].cpu())
