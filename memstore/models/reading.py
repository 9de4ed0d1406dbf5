"""Readers of models with caches of their own, and their audits.

Plain calls of the model get a cache that goes on after a document.
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
    """A model, and the document that its caches go on after."""

    def cache(self, rows: int = 1, **options: Any) -> C:
        """See ``Reader``; ``options`` are those of the mechanism.

        With it ``model(...)`` and ``model.generate(...)`` give what they would give after the whole text. It sees the
        blocks that are stored now.
        """
        if rows < 1:
            raise InvalidArgument(f"a cache has at least one row, not {rows}")
        cache = self._made(rows, **options)
        cache.observers += self.observers
        return cache

    @abstractmethod
    def _made(self, rows: int) -> C:
        """A cache for ``rows`` continuations of the document, which nobody watches."""

    def _begin(self) -> None:
        for name in self.names or []:
            self.memory.document(name)  # raises for what cannot be a name

    def _install(self, stack: ExitStack) -> None:
        readers = _OPEN.setdefault(self.model, [])
        readers.append(self)
        stack.callback(readers.remove, self)
        handle = self.model.register_forward_pre_hook(self._go_on, with_kwargs=True)
        stack.callback(handle.remove)

    @uncompiled
    def _go_on(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Give a call of the model that begins without a past one that goes on after the document."""
        ids = args[0] if args else given.get("input_ids")
        if cache_in(given) is not None or len(args) > 2 or not isinstance(ids, Tensor):
            return None
        if len(_OPEN[self.model]) > 1:
            raise InvalidArgument(
                f"this model has several memories attached: say which one with {CACHE}=reader.cache()"
            )
        return args, with_cache(given, self.cache(len(ids)))

    def _tokens(self, document: Document, first: int, count: int) -> Tensor:
        """Tokens of ``document`` from block ``first`` on, which has ``count`` tokens in all."""
        blocks = range(first, -(-count // self.memory.spec.block_size))
        return document.tokens(blocks) if blocks else torch.empty(0, dtype=torch.int64)


class CacheAuditor(Auditor):
    """Base of the audits of models whose caches tell what each layer chose of one document."""

    def __init__(self, reader: Any, top_k: int | None) -> None:
        """``top_k``: blocks of a list; as many as the reader's if None."""
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
    """``[H, blocks]``: whether each block is in the list of a head, of ``lists [H, K]`` with -1 for none."""
    found = torch.zeros(len(lists), blocks + 1, dtype=torch.bool)
    return found.scatter_(1, torch.where(lists >= 0, lists, blocks), value=True)[:, :-1]
