"""Readers of models with caches of their own: plain calls of the model get one that goes on after a document."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memstore.errors import InvalidArgument
from memstore.memory import Document
from memstore.models.cache import ModelCache
from memstore.models.causal import uncompiled
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
