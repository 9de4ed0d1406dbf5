"""Read a long input into a memory of single tokens with a Memorizing Transformer, and query it later.

The text goes into the memory a window at a time, as in training. The memory keeps the keys and values of single tokens,
of the layer that looks tokens up. The windows of the other layers are not kept. So a question after a closed document
begins with empty windows, and sees the document through its memory only. Reading on computes the windows again.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memstore.attention.knn import Neighbours, products
from memstore.attention.knn_memory import RecentTokens
from memstore.attention.knn_stored import StoredTokens, token_spec
from memstore.device_copies import to_device
from memstore.errors import InvalidArgument
from memstore.memory import Document, MemorySpec
from memstore.memory.search import Match, search_vectors
from memstore.models.memorizing.cache import KNNChoice, MemorizingCache
from memstore.models.memorizing.modeling import MemorizingForCausalLM
from memstore.models.reading import CacheReader, tokens_between
from memstore.readers.asking import Query
from memstore.readers.attachment import Job, Place, changed, evaluating
from memstore.readers.fingerprint import fingerprint_of
from memstore.readers.kinds import MEMORIZING
from memstore.readers.observer import Choices, Origin
from memstore.readers.reader import described

BLOCK_SIZE = 64
"""Tokens of a block of a new memory. Each of them has a landmark of its own."""


def memory_spec(model: MemorizingForCausalLM, tokenizer: Any = None, block_size: int = BLOCK_SIZE) -> MemorySpec:
    """Return the spec of a memory for ``model``: keys and values of the layer that looks tokens up.

    Raises ``InvalidArgument`` for a model without such a layer.
    """
    config = model.config
    if config.memory_layer is None:
        raise InvalidArgument("this model has no memory layer (memory_layer is None), so it cannot use a memory")
    fingerprint = fingerprint_of(
        model,
        tokenizer,
        shaping="num_attention_heads num_key_value_heads memory_layer retrieval_top_k joint layer_norm_eps",
        architecture=f"{config.model_type}/{config.num_hidden_layers}x{config.hidden_size}",
        positions=f"window {config.window}, farthest {config.farthest}",
        layout="k of length 1, v, of single tokens",
        block_size=block_size,
    )
    sizes = config.num_key_value_heads, config.head_dim
    return token_spec(*sizes, fingerprint=fingerprint, block_size=block_size, dtype=fingerprint.dtype)


class MemorizingReader(CacheReader[MemorizingCache]):
    """A document of a memory, and the Memorizing Transformer that reads it. ``block_size``: of a new memory, 64."""

    kind = MEMORIZING
    reads = MemorizingForCausalLM
    model: MemorizingForCausalLM

    def __init__(
        self, model: Any, memory: Place, document: str | None = None, *, block_size: int | None = None, **shared: Any
    ) -> None:
        super().__init__(model, memory, document, **shared)
        self._block_size = block_size

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        size = BLOCK_SIZE if made is None else made.block_size
        return memory_spec(self.model, self.tokenizer, size if self._block_size is None else self._block_size)

    # A memory of tokens keeps one layer, from which the windows of the others cannot be computed. So they begin empty.
    # Tokens of a question can be found after they leave the window too: they are in tensors beside the document.
    def _made(self, rows: int) -> MemorizingCache:
        config = self.model.config
        own = max(config.memory_size, config.window)
        sizes = (config.num_key_value_heads, own, config.head_dim)
        document = self._continued()
        memory = DocumentTokens(document, rows, *sizes, like=self.model)
        cache = MemorizingCache(self.model.config, rows, memory)
        cache.origin = Origin(document, self.model.device)
        if self.observers:
            memory.stored.tiers = [{} for _ in range(rows)]
        return cache

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """Search by the lookups of the last token. A block's score is that of its best token, as a mean over heads."""
        own = self.model.config.memory_layer
        if layer not in (None, own):
            raise InvalidArgument(f"only layer {own} of this model has a memory, not layer {layer}")
        if not self.document.complete_blocks:
            return []
        cache, asked = self._made(1), Choices(KNNChoice, lambda choice: choice.queries[0, :, -1:].float().cpu())
        cache.observers.append(asked)
        with evaluating(self.model):
            self.model(query.tokens[None].to(self.model.device), past_key_values=cache, logits_to_keep=1)
        return search_vectors([self.document], asked[-1], top_k, layer=0)

    def _described(self) -> dict[str, Any]:
        config = self.model.config
        return described("knn", [config.memory_layer], heads=config.num_attention_heads, top_k=config.retrieval_top_k)

    @property
    def _segment_tokens(self) -> int:
        return self.model.config.window

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        config, document = self.model.config, job.document
        cache = MemorizingCache(config, 1, StoredTokens([document]))
        if len(document):  # stored keys depend on the windows of the layers below, which look nothing up
            size = self.memory.spec.block_size
            first = (len(document) - int(config.memory_layer or 0) * config.window) // size
            before = tokens_between(document, max(first, document.blocks.start) * size, len(document))
            with changed(cache, memory=None, _remembers=False):
                self._segment(before, cache)
        try:
            for tokens in segments:
                self._segment(tokens, cache)
                yield len(tokens)
        finally:  # even after an error or an interruption, the computed part is whole
            cache.flush()

    def _segment(self, tokens: Tensor, cache: MemorizingCache) -> None:
        (ids,) = to_device([tokens.long()[None]], self.model.device)
        self.model(ids, past_key_values=cache, logits_to_keep=1)


class DocumentTokens:
    """The tokens of a document that all rows share, then tokens of each row's own, which are in no store."""

    def __init__(self, document: Document, rows: int, groups: int, capacity: int, dim: int, *, like: Any) -> None:
        """Make room for ``capacity`` own tokens: ``groups`` key-value heads of size ``dim``; ``like``: the model."""
        self.stored = StoredTokens([document] * rows)
        self.own = RecentTokens(rows, groups, capacity, dim, dtype=like.dtype, device=like.device)
        self.begun = 0.0
        """Time at which the last search began."""
        self._split = 0

    def search(self, queries: Tensor, top_k: int) -> Neighbours:
        """Return the ``top_k`` tokens with the largest inner products for each of ``queries [B, H, T, D]``, best first.

        Raises the errors of ``StoredTokens.search``.
        """
        self.begun = time.perf_counter()
        stored = self.stored.search(queries, top_k)
        self._split = stored.keys.shape[2]
        if not any(self.own.added):
            return stored
        return best_of_both(queries, stored, self.own.search(queries, top_k), top_k)

    def numbers_of(self, ids: Tensor) -> Tensor:
        """Return token numbers for ``ids`` of the last search. Own tokens follow the document's; -1 for none."""
        ids = ids.cpu()
        theirs, own = torch.where(ids < self._split, ids, -1), torch.where(ids < self._split, -1, ids - self._split)
        after = len(self.stored.documents[0]) + self.own.numbers_of(own)
        return torch.where(own >= 0, after, self.stored.numbers_of(theirs))

    def append(self, tokens: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Add own tokens; see ``RecentTokens``. The document does not change."""
        self.own.append(tokens, keys, values)

    @property
    def added(self) -> list[int]:
        """Return how many own tokens each row was given."""
        return self.own.added

    def reorder(self, rows: Tensor) -> None:
        """Reorder own tokens; see ``RecentTokens``. All rows share the document."""
        self.own.reorder(rows)

    def clear(self, row: int) -> None:
        """Forget own tokens; see ``RecentTokens``. The document does not change."""
        self.own.clear(row)


@torch.no_grad()
def best_of_both(queries: Tensor, first: Neighbours, second: Neighbours, top_k: int) -> Neighbours:
    """Return the ``top_k`` best tokens of two memories for ``queries [B, H, T, D]``. Only ``first`` keeps its ids."""
    count = first.keys.shape[2]
    keys, values = (torch.cat([first[part].to(second[part]), second[part]], 2) for part in range(2))
    ids = torch.cat([first.ids, torch.where(second.ids < 0, -1, second.ids + count)], -1)
    scores = products(queries, keys, ids)
    return Neighbours(keys, values, ids.gather(-1, scores.topk(top_k, -1).indices))
