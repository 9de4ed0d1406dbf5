"""Reading a text into a memory, with one transaction per segment; and the opening of a prompt, read once.

A segment is a fixed stretch of the document, ``[i * segment, (i + 1) * segment)``. Its tokens see the sink, the window
before the segment, the segment up to themselves, and blocks chosen by the last tokens before the segment. All of that
depends only on the position in the document. So reading computes the same states in one go, in pieces, or one token at
a time, even if the memory is closed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention import sub_block_means
from memstore.device_copies import along, own_types, to_device, to_host
from memstore.errors import InvalidArgument
from memstore.memory import Document
from memstore.memory.spec import as_stored
from memstore.readers.attachment import Job, last_states, segments
from memstore.readers.stock.call import Call
from memstore.readers.stock.hooks import Hooks
from memstore.readers.stock.visible import AttachedDocument, DocumentStates, States, as_blocks, as_tokens, visible


class _SegmentStates(NamedTuple):
    """The states that a segment adds to the document."""

    tokens: Tensor
    blocks: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, ``[n, G, S, D]``, from the incomplete last block on."""
    landmarks: dict[int, Tensor]
    recurrent: Sequence[Tensor]
    """States of layers without attention after the segment, if they are to be stored."""
    arrived: Callable[[], None]
    """Waits until all states are in host memory."""


class SegmentReading:
    """The state of reading one document."""

    def __init__(
        self, hooks: Hooks, job: Job, after: _RecurrentStates, *, window: int, sink: int, segment: int
    ) -> None:
        """``after``: the states of layers without attention to continue from, usually at the document's end."""
        hooks.weights.check()
        self.hooks, self.job, self.document, self.spec = hooks, job, job.document, job.document.memory.spec
        self.window, self.sink, self.segment = window, sink, segment
        self.selection = hooks.selection
        self.tokens, self.recurrent = after
        self.kept_at = (job.document.recurrent_places() or [0])[-1]
        self._last_logits: Tensor | None = None
        sliding = [plan.sliding or 0 for plan in hooks.architecture.layers if plan.local]
        span = self.selection.retrieval.span
        # A segment sees the tokens of a window before it, and of the sink if nothing lies between the two.
        before = -(-(max([window, span, *sliding]) + sink) // self.spec.block_size) * self.spec.block_size
        keep, device = before + segment, hooks.model.device
        self.states = _RecentStates(job.document, device, before=before, segment=segment)
        self.codes = {
            layer: _RecentCodes(keep=keep, bits=self.spec.key_dtype == "bit")
            for layer in ([] if self.selection.by_layer else self.selection.index_layers)
        }
        if self.tokens:
            self._load()

    def _load(self) -> None:
        size = self.spec.block_size
        first = self.states.load(self.tokens)
        blocks = range(first // size, -(-self.tokens // size))
        for layer, codes in self.codes.items():
            stored = self.document.layer(layer).landmarks(blocks)  # [n, 1, S, dim]
            kept = stored[:, 0].flatten(0, 1)[: self.tokens - first]
            codes.extend(to_device([kept], self.hooks.model.device)[0], at=first)

    def compute(self, tokens: Tensor, *, last: bool = True) -> _SegmentStates:
        """Read the next ``tokens [T]``, which lie within one segment; ``last``: no other segment follows now."""
        self._read(tokens.long())
        made = self._made(tokens.long(), last=last)
        self.tokens += len(tokens)
        return made

    def _read(self, tokens: Tensor) -> None:
        begin = self.tokens // self.segment * self.segment
        own = [AttachedDocument(self.document, 0)]
        seen = visible(own, tokens=self.tokens, start=begin, sink=self.sink, window=self.window)
        options: dict[str, Any] = {"reading": True, "retrieve": self.job.retrieve, "recurrent": self.recurrent}
        call = Call(self.selection, seen, self.states.read, **options)
        with along([tokens], self.hooks.model.device) as there:  # along with the data of the index, before the search
            if call.routed and not self.selection.by_layer:
                self._choose(call, begin)
        logits = self.hooks.forward(call, there()[0], logits=self._scores(len(tokens)))
        self._score(tokens, logits)
        self._keep(call)
        self.recurrent = call.recurrent
        call.release()

    # Lists come from the tokens before the segment, not from its own. This is strictly causal, so a perplexity measured
    # while reading is honest. A text gives the same states however it is cut. Layers that choose for themselves have no
    # stored queries and use the segment's own.
    def _choose(self, call: Call, begin: int) -> None:
        layer = self.selection.index_layers[0]
        queries = F.normalize(self.codes[layer].read(range(begin - self.selection.retrieval.span, begin)), dim=-1)
        chosen = self.selection.route(call.candidates, layer, [queries[:, None]])
        call.set_chosen(chosen, from_layer=self.selection.first_layer)

    def _keep(self, call: Call) -> None:
        """Keep the states of the segment, rounded to what is stored."""
        fresh = [states.fresh for states in call.layers if states.fresh is not None]
        self.states.extend([(keys[0].detach(), values[0].detach()) for keys, values in fresh], at=self.tokens)
        for layer, recent in self.codes.items():
            recent.extend(call.codes[layer][0, :, 0], at=self.tokens)

    def _made(self, tokens: Tensor, *, last: bool) -> _SegmentStates:
        """Return states of all layers as blocks, and landmarks, from the incomplete last block on."""
        size, layers = self.spec.block_size, self.spec.index_layers
        stretch = range(self.tokens // size * size, self.tokens + len(tokens))
        states = [self.states.read(layer, stretch) for layer in range(self.spec.layers)]
        blocks = [(as_blocks(keys, size), as_blocks(values, size)) for keys, values in states]
        if self.selection.by_layer:
            landmarks = [sub_block_means(blocks[layer][0], self.spec.keys_per_block) for layer in layers]
        else:
            landmarks = [as_blocks(self.codes[layer].read(stretch)[None], size) for layer in layers]
        recurrent, end = self.recurrent or [], self.tokens + len(tokens)
        if recurrent and (last or end - self.kept_at >= self.spec.recurrent_step):
            self.kept_at = end
        else:
            recurrent = []
        copies, arrived = to_host([*chain(*blocks), *landmarks, *recurrent])
        count, marks = 2 * len(blocks), 2 * len(blocks) + len(landmarks)
        of_layers = list(zip(copies[:count:2], copies[1:count:2], strict=True))
        self._settle(blocks, len(tokens))
        of_index = dict(zip(layers, copies[count:marks], strict=True))
        return _SegmentStates(tokens, of_layers, of_index, copies[marks:], arrived)

    # With a codec, reading continues with complete blocks as the memory returns them. So a text that was interrupted
    # between segments ends in the same states, bit for bit. A text that is read in pieces that end within a segment has
    # states that differ by the codec's loss.
    def _settle(self, blocks: list[tuple[Tensor, Tensor]], new: int) -> None:
        """Replace complete blocks by what the memory will return: a resumed reading has nothing else."""
        if self.spec.codec == "none":
            return
        first = self.tokens // self.spec.block_size
        complete = (self.tokens + new) // self.spec.block_size - first
        for layer, (keys, values) in enumerate(blocks if complete else []):
            stored = as_stored(self.spec, {"k": keys[:complete], "v": values[:complete]})
            at = first * self.spec.block_size
            self.states.replace(layer, as_tokens(stored["k"]), as_tokens(stored["v"]), at=at)

    def commit(self, made: _SegmentStates) -> None:
        """Store the segment in one transaction."""
        options, self.job.options = self.job.options, None
        made.arrived()
        with self.document.append(made.tokens, reading=options) as batch:
            for layer, (keys, values) in enumerate(made.blocks):
                batch.put(layer, landmarks=made.landmarks.get(layer), k=keys, v=values)
            if made.recurrent:
                batch.put_recurrent(made.recurrent)

    def _scores(self, new: int) -> bool:
        # The last logits predict the next token.
        return self.job.score_from is not None and self.tokens + new >= self.job.score_from

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


class _RecurrentStates(NamedTuple):
    """States of layers without attention after the first tokens of a document."""

    tokens: int
    states: Sequence[Tensor] | None
    """In the form of ``LinearLayers``. None if they have read nothing, or if there are no such layers."""


def recurrent_at_end(hooks: Hooks, document: Document, **sizes: int) -> _RecurrentStates:
    """Return the states of layers without attention at a document's end, as stored, or computed from the last stored.

    Raises ``InvalidArgument`` if blocks needed for this are lost.
    """
    tokens = len(document)
    if hooks.architecture.linear is None:
        return _RecurrentStates(tokens, None)
    after = _RecurrentStates(*last_states(document, tokens, hooks.model.device))
    if after.tokens == tokens:
        return after
    size = document.memory.spec.block_size
    begin = after.tokens // size
    behind = range(begin, document.n_blocks)
    if document.blocks.start > begin or document.present(behind) != [behind]:
        raise InvalidArgument(
            f"document {document.name!r} has lost blocks after token {after.tokens}, and with them the states of "
            "layers that do not attend: read the text under another name"
        )
    job = Job(document, None, (document.reading or {}).get("retrieve", True))
    reading = SegmentReading(hooks, job, after, **sizes)
    rest = document.tokens(behind)[after.tokens - begin * size :]
    with own_types():  # the caller may use other dtypes
        for segment in segments(iter([rest]), after.tokens, reading.segment):
            reading.compute(segment)
    return _RecurrentStates(tokens, reading.recurrent)


def ending(segments: Iterator[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Yield each of ``segments``, and whether it is the last one. Before an error, a segment counts as the last."""
    before: Tensor | None = None
    try:
        for segment in segments:
            if before is not None:
                yield before, False
            before = segment
    except Exception:
        if before is not None:
            yield before, True
        raise
    if before is not None:
        yield before, True


class _RecentStates(DocumentStates):
    """States of the segment that is read and of the tokens before it, on the model's device. Others are in the store.

    The buffers have room for no more. When one is full, the tokens before its segment move to its front.
    """

    def __init__(self, document: Document, device: torch.device, *, before: int, segment: int) -> None:
        super().__init__(document, device)
        self.before, self.segment, self.dtype = before, segment, getattr(torch, document.memory.spec.dtype)
        self.kept = range(0)
        """The tokens whose states are kept."""
        self.buffers: list[States] = []
        """For each layer."""

    def read(self, layer: int, tokens: range) -> States:
        if self.kept and tokens.start >= self.kept.start:
            return self._piece(layer, tokens)
        # Only the sink is read again and again. Anything else is read once here, after reopening.
        if tokens not in self._there and len(self._there) > 1:
            self._there.clear()
        return super().read(layer, tokens)

    def load(self, tokens: int) -> int:
        """Load the states of the last tokens of a document of ``tokens`` tokens; return the first of them."""
        first = max(self.document.blocks.start * self.block_size, self._needed(tokens))
        if first < tokens:
            self.extend(self._read(range(first, tokens)), at=first)
        return first

    def extend(self, states: Sequence[States], *, at: int) -> None:
        """Add the states ``[G, n, D]`` of each layer, of the tokens from ``at`` on, rounded to what is stored."""
        if not self.kept:
            self.kept = range(at, at)
            self.buffers = [(self._buffer(keys), self._buffer(values)) for keys, values in states]
        stop = at + states[0][0].shape[1]
        if stop - self.kept.start > self.before + self.segment:
            first = self._needed(at)
            for buffer in chain(*self.buffers):  # old and new place may overlap
                buffer[:, : at - first] = buffer[:, first - self.kept.start : at - self.kept.start].clone()
            self.kept = range(first, at)
        self.kept = range(self.kept.start, stop)
        for layer, (keys, values) in enumerate(states):
            self.replace(layer, keys, values, at=at)

    def replace(self, layer: int, keys: Tensor, values: Tensor, *, at: int) -> None:
        """Replace the states of the tokens from ``at`` on by ``[G, n, D]``."""
        for piece, new in zip(self._piece(layer, range(at, at + keys.shape[1])), (keys, values), strict=True):
            piece.copy_(new)

    def _piece(self, layer: int, tokens: range) -> States:
        keys, values = self.buffers[layer]
        piece = slice(tokens.start - self.kept.start, tokens.stop - self.kept.start)
        return keys[:, piece], values[:, piece]

    def _needed(self, tokens: int) -> int:
        """Return the first token, of a whole block, that the segment sees after ``tokens`` tokens."""
        return max(0, tokens // self.segment * self.segment - self.before)

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_empty(len(like), self.before + self.segment, like.shape[2], dtype=self.dtype)


class _RecentCodes:
    """The routing codes of the last tokens, rounded to what the memory stores, so that reopening changes nothing."""

    def __init__(self, *, keep: int, bits: bool) -> None:
        self.keep, self.bits = keep, bits
        self.stop = 0
        self.codes: Tensor | None = None

    def extend(self, codes: Tensor, *, at: int) -> None:
        """Add codes ``[n, dim]`` of the tokens from ``at`` on."""
        self.stop = at + len(codes)
        if self.bits:
            codes = torch.where(codes > 0, 1.0, -1.0)
        self.codes = (codes if self.codes is None else torch.cat((self.codes, codes)))[-self.keep :]

    def read(self, tokens: range) -> Tensor:
        """Return the codes ``[n, dim]`` of ``tokens`` that are kept."""
        first = max(0, tokens.start)  # at the beginning of a document there are fewer tokens than choose together
        assert self.codes is not None
        start = self.stop - len(self.codes)
        assert first >= start, "these codes were dropped already"
        return self.codes[first - start : tokens.stop - start]


@dataclass(frozen=True, eq=False)
class Opening:
    """The first tokens of prompts, and their states: the template and system prompt before every question.

    They say nothing about the question, so they attend to the sink and to themselves, and not to retrieved blocks.
    Their states are then the same for every question, and are kept until the next commit. They are more than half of
    the prompt of a short question.
    """

    tokens: Tensor
    """``[n]``"""
    states: list[tuple[Tensor, Tensor, Tensor]]
    """For each layer: keys, at their positions, and values ``[1, G, P + n, D]``, after those of the sink; and the
    sink's positions ``[1, 1, P]``."""

    @classmethod
    def computed(cls, hooks: Hooks, call: Call, tokens: Tensor) -> Opening:
        """Compute the opening of prompts that begin with ``tokens [n]``, by ``call``, which is released."""
        call.observers, call.routed = (), False
        try:
            with own_types():  # the next caller may use other dtypes
                hooks.forward(call, tokens, whole=True)
            return cls(tokens, [layer.all_states() for layer in call.layers])
        finally:
            call.release()

    def begin(self, call: Call) -> None:
        """Let ``call`` continue after the opening."""
        call.length, call.opening = len(self.tokens), self.tokens
        for layer, states in zip(call.layers, self.states, strict=True):
            layer.begin(*states)
