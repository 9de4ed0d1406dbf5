"""Readers of models that have caches of their own, and the base of their audits.

A plain call of the model gets a cache that continues a document.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memstore.errors import InvalidArgument
from memstore.memory import Document
from memstore.models.cache import ModelCache
from memstore.models.causal import uncompiled
from memstore.readers.audit import Auditor
from memstore.readers.caches import CACHE, cache_in, with_cache
from memstore.readers.reader import Reader

C = TypeVar("C", bound=ModelCache)
_OPEN: WeakKeyDictionary[nn.Module, list[CacheReader[Any]]] = WeakKeyDictionary()


class CacheReader(Reader, Generic[C]):
    """A model, and the document that its caches continue."""

    def cache(self, rows: int = 1, **options: Any) -> C:
        """Return a cache; see ``Reader``. ``options`` belong to the mechanism.

        With it ``model(...)`` and ``model.generate(...)`` answer as they would after the whole text. It sees the blocks
        that are stored now.
        """
        if rows < 1:
            raise InvalidArgument(f"a cache needs at least one row, not {rows}")
        cache = self._made(rows, **options)
        cache.observers += self.observers
        return cache

    @abstractmethod
    def _made(self, rows: int) -> C:
        """Return a cache for ``rows`` continuations of the document, without observers."""

    def _begin(self) -> None:
        for name in self.names or []:
            self.memory.document(name)  # raises for an invalid name

    def _install(self, stack: ExitStack) -> None:
        readers = _OPEN.setdefault(self.model, [])
        readers.append(self)
        stack.callback(readers.remove, self)
        handle = self.model.register_forward_pre_hook(self._go_on, with_kwargs=True)
        stack.callback(handle.remove)

    @uncompiled
    def _go_on(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Pass a cache that continues the document to a call of the model that begins without one."""
        ids = args[0] if args else given.get("input_ids")
        if cache_in(given) is not None or len(args) > 2 or not isinstance(ids, Tensor):
            return None
        if len(_OPEN[self.model]) > 1:
            raise InvalidArgument(f"this model has several memories attached: choose one with {CACHE}=reader.cache()")
        return args, with_cache(given, self.cache(len(ids)))

    def _tokens(self, document: Document, first: int, count: int) -> Tensor:
        """Return the tokens of ``document`` from block ``first`` on; it has ``count`` tokens in all."""
        blocks = range(first, -(-count // self.memory.spec.block_size))
        return document.tokens(blocks) if blocks else torch.empty(0, dtype=torch.int64)


class CacheAuditor(Auditor):
    """Base of the audits of models whose caches report what each layer chose from one document."""

    def __init__(self, reader: Any, top_k: int | None) -> None:
        """Audit lists of ``top_k`` blocks; None takes the reader's number."""
        super().__init__(reader.model)
        retrieval = reader.retrieval if top_k is None else replace(reader.retrieval, top_k=top_k)
        self._document, self.documents = reader.document, [reader.document.name]
        self.top_k = retrieval.top_k
        self._cache = reader.cache(retrieval=retrieval)

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        self._cache.observers.append(self)
        yield {CACHE: self._cache}


def in_lists(lists: Tensor, blocks: int) -> Tensor:
    """Return ``[H, blocks]``: whether a block is in the list of a head. ``lists [H, K]`` have -1 for no block."""
    found = torch.zeros(len(lists), blocks + 1, dtype=torch.bool)
    return found.scatter_(1, torch.where(lists >= 0, lists, blocks), value=True)[:, :-1]
