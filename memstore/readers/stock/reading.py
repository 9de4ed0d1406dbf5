"""Reading a text into a memory: segment by segment, each one transaction, resumable at any of them.

A segment is a fixed stretch of the document, ``[i * segment, (i + 1) * segment)``. Its tokens see the sink, the window
before the segment, the segment up to themselves, and blocks chosen by the last tokens before the segment. All of that
depends on the position in the document alone: reading in one go, in pieces, or one token at a time, with or without
closing the memory in between, computes the same states.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention import sub_block_means
from memstore.errors import InvalidArgument, ReadOnlyMemory
from memstore.memory import Document, Memory
from memstore.memory.append import as_tokens as as_token_ids
from memstore.memory.ingest import background_workers, progress_bar
from memstore.memory.tensors import as_stored, own_types
from memstore.readers.stock.call import Call
from memstore.readers.stock.recent import RecentCodes, RecentStates
from memstore.readers.stock.visible import Source, as_blocks, as_tokens, visible

if TYPE_CHECKING:
    from memstore.readers.stock.attached import Attached


@dataclass(frozen=True)
class ReadResult:
    """What a call of ``read`` did."""

    document: str
    tokens: int
    """Tokens of the document now."""
    new_tokens: int
    """Tokens read by this call."""
    reused_tokens: int
    """Tokens that were there already, in this document or in others that begin with the same text."""
    seconds: float
    nll: Tensor
    """Negative log-likelihood of each scored token, ``[n]``, in nats."""

    @property
    def tokens_per_second(self) -> float:
        """Speed of reading the new tokens."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def perplexity(self) -> float:
        """Perplexity of the scored tokens; NaN if none were scored."""
        return float(self.nll.mean().exp())


@own_types()
def read(
    attached: Attached,
    token_ids: Sequence[int] | Tensor,
    name: str,
    *,
    progress: bool,
    score: int,
    retrieve: bool,
    reuse: bool,
) -> ReadResult:
    """See ``Attached.read``."""
    tokens = checked_tokens(token_ids, attached)
    if score < 0:
        raise InvalidArgument(f"score is a number of tokens, got {score}")
    memory = attached.memories[0]
    if memory.mode == "r" and all(each.name != name for each in memory.documents()):
        raise _read_only(attached)
    document = memory.document(name)
    options = _options(attached, retrieve=retrieve)
    if reuse and memory.mode != "r":
        # The last token that is not scored predicts the first one that is.
        unscored = tokens[: max(0, len(tokens) - score - 1)] if score else tokens
        document.reuse(unscored, reading=options, step=_step(attached))
    stored = _common_part(document, tokens)
    if memory.mode == "r" and stored < len(tokens):
        raise _read_only(attached)
    _check_options(memory, document, options)
    attached.calibrate(tokens)
    reader = _Reader(attached, document, options, score_from=len(tokens) - score if score else None)
    begun = time.perf_counter()
    with progress_bar(name, stored, len(tokens), progress) as advance, reader:
        for segment in _segments(stored, len(tokens), attached.segment):
            reader.segment(tokens[segment.start : segment.stop])
            advance(len(segment))
    seconds = time.perf_counter() - begun
    new = max(0, len(tokens) - stored)
    nll = torch.cat(reader.nll) if reader.nll else torch.empty(0)
    return ReadResult(name, len(document), new, min(stored, len(tokens)), seconds, nll)


def _read_only(attached: Attached) -> ReadOnlyMemory:
    url = attached.memories[0].url
    return ReadOnlyMemory(f"the memory {url} was opened with mode='r'; open it with mode='a' to read a text into it")


def checked_tokens(token_ids: Sequence[int] | Tensor, attached: Attached) -> Tensor:
    """The tokens as int64 ``[n]``. Raises ``InvalidArgument``."""
    if isinstance(token_ids, Tensor):
        if token_ids.dtype == torch.bool:
            raise InvalidArgument("expected token ids, got a mask of True and False")
        if token_ids.dim() == 2 and len(token_ids) == 1:
            token_ids = token_ids[0]
    tokens = as_token_ids(token_ids)
    if not tokens.numel():
        raise InvalidArgument("there is nothing to read: the text has no tokens")
    last = attached.vocabulary - 1
    if int(tokens.min()) < 0 or int(tokens.max()) > last:
        raise InvalidArgument(f"token ids must be from 0 to {last}, got {int(tokens.min())}..{int(tokens.max())}")
    return tokens.to(torch.int64)


def _common_part(document: Document, tokens: Tensor) -> int:
    """How many tokens are stored already. Raises ``InvalidArgument`` if they are not the beginning of ``tokens``."""
    if document.blocks.start:
        raise InvalidArgument(f"document {document.name!r} has lost its first blocks; read the text under another name")
    stored = document.tokens()
    n = min(len(stored), len(tokens))
    different = (stored[:n] != tokens[:n]) & (stored[:n] >= 0)  # nobody knows the tokens of blocks that were dropped
    if bool(different.any()):
        first = int(different.nonzero()[0])
        raise InvalidArgument(
            f"document {document.name!r} holds another text (they differ from token {first} on): read this one under "
            "another name, or forget the document first"
        )
    return len(stored)


def _options(attached: Attached, *, retrieve: bool) -> dict[str, Any]:
    """What the states of a document depend on beside the model, its router and the tokens."""
    sizes = {"window": attached.window, "sink": attached.sink, "segment": attached.segment, "retrieve": retrieve}
    options = {**asdict(attached.retrieval), **sizes}
    # The first four concern prompts, the others landmark models.
    for elsewhere in ("every", "query", "passes", "on_error", "share_tokens", "threshold"):
        del options[elsewhere]
    return options


def _step(attached: Attached) -> int:
    """Blocks after which the states before no longer depend on the tokens behind.

    One, where lists are chosen by the tokens before a segment; layers that choose for themselves ask with all tokens of
    the segment, so for them whole segments are reused.
    """
    return attached.segment // attached.block_size if attached.selection.by_layer else 1


def _check_options(memory: Memory, document: Document, options: dict[str, Any]) -> None:
    """A document is read with the same options from beginning to end, or its states would not belong together."""
    if memory.mode == "r" or not len(document):
        return
    # Before documents kept their options themselves, the memory did, under this name.
    before = document.reading or memory.get_info(f"reading/{document.name}")
    if before is None:
        return
    changed = [key for key in options if before.get(key) != options[key]]
    different = [f"{key}={before.get(key)!r}, now {options[key]!r}" for key in changed]
    if different:
        raise InvalidArgument(
            f"document {document.name!r} was begun with {'; '.join(different)}: go on with the same options, or read "
            "the text under another name"
        )


def _segments(start: int, stop: int, size: int) -> Iterator[range]:
    """Pieces of ``start..stop`` that do not cross a multiple of ``size``."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield range(start, end)
        start = end


class _Reader:
    """The state of reading one document. Committing runs in a thread of its own, beside the next segment."""

    def __init__(
        self, attached: Attached, document: Document, options: dict[str, Any], *, score_from: int | None
    ) -> None:
        self.attached, self.document, self.score_from = attached, document, score_from
        self.retrieve: bool = options["retrieve"]
        self.reading = None if len(document) else options  # kept with the first append
        self.spec = attached.memories[0].spec
        self.selection = attached.selection
        self.tokens = len(document)
        self.nll: list[Tensor] = []
        self._last_logits: Tensor | None = None
        self._writer = background_workers(1)
        self._pending: Future[None] | None = None
        sliding = [plan.sliding or 0 for plan in attached.architecture.layers if plan.local]
        span = self.selection.retrieval.span
        keep = max([attached.window, span, *sliding]) + attached.segment + self.spec.block_size
        self.states = RecentStates(document, self.spec.block_size, keep=keep)
        self.codes = {
            layer: RecentCodes(keep=keep, bits=self.spec.key_dtype == "bit")
            for layer in ([] if self.selection.by_layer else self.selection.index_layers)
        }
        if self.tokens:
            self._load()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the last commit, also when reading is interrupted."""
        try:
            self._commit()
        finally:
            self._writer.shutdown()

    def _load(self) -> None:
        size = self.spec.block_size
        for layer in range(self.spec.layers):
            self.states.load(layer, self.tokens)
        first = next(iter(self.states.start.values()))
        blocks = range(first // size, -(-self.tokens // size))
        for layer, codes in self.codes.items():
            stored = self.document.layer(layer).landmarks(blocks)  # [n, 1, S, dim]
            codes.extend(stored[:, 0].flatten(0, 1)[: self.tokens - first], at=first)

    def segment(self, tokens: Tensor) -> None:
        """Read the next ``tokens [T]``, which lie within one segment, and hand them over to be committed."""
        begin = self.tokens // self.attached.segment * self.attached.segment
        if self.attached.window < self.attached.segment:
            self._commit()  # blocks of the segment before may be retrieved already
        seen = visible(
            [Source(self.document, 0)],
            self.spec.block_size,
            tokens=self.tokens,
            start=begin,
            sink=self.attached.sink,
            window=self.attached.window,
        )
        call = Call(
            self.selection, seen, self.states.read, reading=True, retrieve=self.retrieve, trace=self.attached.trace
        )
        if call.routed and not self.selection.by_layer:
            self._choose(call, begin)
        logits = self.attached.forward(call, tokens, logits=self._scores(len(tokens)))
        self._score(tokens, logits)
        self._keep(call)
        call.release()
        self._commit()
        blocks, landmarks = self._blocks(len(tokens))
        self._settle(blocks, len(tokens))
        self._pending = self._writer.submit(self._append, tokens, blocks, landmarks)
        self.tokens += len(tokens)

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

    def _append(self, tokens: Tensor, blocks: list[tuple[Tensor, Tensor]], landmarks: dict[int, Tensor]) -> None:
        reading, self.reading = self.reading, None
        with self.document.append(tokens, reading=reading) as batch:
            for layer, (keys, values) in enumerate(blocks):
                batch.put(layer, landmarks=landmarks.get(layer), k=keys, v=values)

    def _commit(self) -> None:
        """Wait until the segment in hand is committed; what went wrong there is raised here."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _scores(self, new: int) -> bool:
        return (
            self.score_from is not None and self.tokens + new >= self.score_from
        )  # its last logits predict the first token after it

    def _score(self, tokens: Tensor, logits: Tensor | None) -> None:
        if logits is None or self.score_from is None:
            return
        before, self._last_logits = self._last_logits, logits[-1:]
        predicted = logits[:-1] if before is None else torch.cat((before, logits[:-1]))
        nll = F.cross_entropy(
            predicted.float(), tokens[len(tokens) - len(predicted) :].to(logits.device), reduction="none"
        )
        first = self.tokens + len(tokens) - len(nll)
        self.nll.append(nll[max(0, self.score_from - first) :].cpu())
