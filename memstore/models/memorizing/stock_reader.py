"""Reading a text into a memory of single tokens with a stock model that has a kNN layer, and asking it later.

What is kept is what the layer looks up, its keys and values before positions. They depend on the layers below, which
look nothing up: so reading searches for nothing, and runs no further than the layer. A text is read in the segments
that the model was trained with. The first token of a call is never found (see ``stock``), so each segment is read after
one token of context: the last one of the segment before, or the text's first token once more.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from memstore.attention.knn_stored import StoredTokens, token_spec
from memstore.errors import InvalidArgument
from memstore.memory import Document, MemorySpec
from memstore.memory.search import Match, search_vectors
from memstore.models.memorizing.choice import KNNChoice
from memstore.models.memorizing.reader import BLOCK_SIZE, DocumentTokens
from memstore.models.memorizing.stock import NAME, knn_memory_of
from memstore.readers.asking import Query
from memstore.readers.attachment import Job, evaluating
from memstore.readers.caches import cache_in
from memstore.readers.fingerprint import fingerprint_of
from memstore.readers.kinds import KNN
from memstore.readers.observer import Choices, Origin
from memstore.readers.reader import Reader

SEGMENT = 512
"""Tokens of a segment, for a model that was not trained with segments."""


class KNNReader(Reader):
    """A document of a memory, and the stock model with a kNN layer that reads it.

    A call that begins without a cache finds the document, and not what was said before; ``block_size``: of a new
    memory, 64.
    """

    kind = KNN

    def __init__(self, *given: Any, block_size: int | None = None, **options: Any) -> None:
        """See ``memstore.attach``."""
        super().__init__(*given, **options)
        self._block_size = block_size
        self._layer, self._settings = knn_memory_of(self.model), getattr(self.model.config, NAME)
        self._asked = True  # by whoever uses the model, not by reading

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        """See ``Reader``."""
        layer, number, size = self._layer, self._settings["layer"], BLOCK_SIZE if made is None else made.block_size
        size = size if self._block_size is None else self._block_size
        fingerprint = fingerprint_of(
            self.model,
            self.tokenizer,
            architecture=f"{self.model.config.model_type} knn layer={number},groups={layer.groups},dim={layer.dim}",
            positions=f"segments of {self._segment_tokens}",
            layout="k before positions, v, of single tokens",
            block_size=size,
        )
        return token_spec(layer.groups, layer.dim, fingerprint=fingerprint, block_size=size, dtype=fingerprint.dtype)

    def _install(self, stack: ExitStack) -> None:
        layer = self._layer
        if layer.beginning is not None:
            raise InvalidArgument("this model has a memory attached already; leave that block first")
        stack.enter_context(layer.set_aside())  # what it remembers of the texts before is there again afterwards
        layer.beginning, layer.found = self._beginning, self._tell
        # Before the layer's own hook, which compares the rows of the batch with those of its memory.
        hook = self.model.register_forward_pre_hook(self._begin_call, with_kwargs=True, prepend=True)
        stack.callback(hook.remove)

    def _beginning(self, rows: int) -> DocumentTokens:
        """What a call that begins without a cache can find."""
        layer = self._layer
        own = max(1, layer.memory_size, self._segment_tokens)
        tokens = DocumentTokens(self._continued(), rows, layer.groups, own, layer.dim, like=self.model)
        tokens.stored.tiers = [{} for _ in range(rows)] if self.observers else None
        return tokens

    def _begin_call(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        past = cache_in(named)
        fresh = past is None or not past.get_seq_length()
        if fresh:
            self._layer.clear()
        ids = given[0] if given else named.get("input_ids")
        if ids is not None and isinstance(mask := named.get("attention_mask"), Tensor) and mask.dim() == 2:
            ids = ids[:, mask[0, -ids.shape[1] :].bool()]
        for observer in self.observers if self._asked else ():
            observer.begin(None if ids is None else ids[0], fresh=fresh)

    def _tell(self, **found: Any) -> None:
        """Tell the observers what the layer found."""
        origin = Origin(self.document, self.model.device)
        for observer in self.observers:
            observer.choice(KNNChoice(self._settings["layer"], attention=self._layer, origin=origin, **found))

    @property
    def _segment_tokens(self) -> int:
        return int(self._settings.get("window", SEGMENT))

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        stored = StoredTokens([job.document])
        for tokens in segments:
            before = self._before(job.document, tokens.long())
            self._asked = False
            try:
                keys, values = self._layer.states(self.model, torch.cat([before, tokens.long()]))
            finally:
                self._asked = True
            stored.append([tokens], keys[:, :, len(before) :], values[:, :, len(before) :])
            yield len(tokens)

    def _before(self, document: Document, tokens: Tensor) -> Tensor:
        """What is read before ``tokens``: a token of context, and what the document has of their segment already."""
        size, count = document.memory.spec.block_size, len(document)
        first = count // self._segment_tokens * self._segment_tokens
        if not count:
            return tokens[:1]
        start = max(0, first - 1)
        held = document.tokens(range(start // size, -(-count // size)))[start - start // size * size :]
        return held if first else torch.cat([held[:1], held])

    def _described(self) -> dict[str, Any]:
        layer = self._layer
        return {"mechanism": "knn", "layers": [self._settings["layer"]], "heads": layer.heads, "top_k": layer.top_k}

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """By the tokens that the last one looks up: a block's score is that of its best token, a mean over heads."""
        own = self._settings["layer"]
        if layer not in (None, own):
            raise InvalidArgument(f"only layer {own} of this model looks tokens up, not {layer}")
        if not self.document.complete_blocks:
            return []
        asked = Choices(KNNChoice, lambda choice: choice.queries[0, :, -1:].float().cpu())
        usual, self.observers[:] = list(self.observers), [asked]  # nobody else is told
        try:
            with evaluating(self.model):
                self.model(query.tokens[None].to(self.model.device), use_cache=False)
        finally:
            self.observers[:] = usual
        return search_vectors([self.document], asked[-1], top_k, layer=0)
