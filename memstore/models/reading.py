"""Readers of models that have caches of their own, and the base of their audits.

A plain call of the model gets a cache that continues a document.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memstore.device_copies import to_device
from memstore.errors import InvalidArgument
from memstore.memory import Document, MemorySpec
from memstore.memory.search import Match, best
from memstore.models.cache import ModelCache
from memstore.models.packing import Packing
from memstore.readers.asking import Query
from memstore.readers.attachment import Job, Place, before_calls, evaluating
from memstore.readers.audit import Auditor
from memstore.readers.caches import CACHE, cache_in, with_cache
from memstore.readers.kinds import Retrieval
from memstore.readers.observer import Choices
from memstore.readers.reader import Reader

C = TypeVar("C", bound=ModelCache)
COMMIT_BLOCKS = 256
"""Blocks that are committed together. Fewer would wait for the disk more often."""
_OPEN: WeakKeyDictionary[nn.Module, list[CacheReader[Any]]] = WeakKeyDictionary()


class CacheReader(Reader, Generic[C]):
    """A model, and the document that its caches continue."""

    reads: ClassVar[type[Any]]
    """The class of its models."""
    _codec: str | None = None

    def __init__(self, model: Any, memory: Place, document: str | None = None, **shared: Any) -> None:
        """Open the document; see ``memstore.attach``. ``shared`` are the parameters that all kinds take."""
        if not isinstance(model, self.reads):
            raise InvalidArgument(
                f"expected a {self.reads.__name__}, got a {type(model).__name__}; see memstore.attach"
            )
        super().__init__(model, memory, document, **shared)

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

    def _codec_of(self, made: MemorySpec | None) -> str:
        """Return the codec of the memory: as asked for, or as in the existing one."""
        if self._codec is not None:
            return self._codec
        return "none" if made is None else made.codec

    def _begin(self) -> None:
        for name in self.names or []:
            self.memory.document(name)  # raises for an invalid name

    def _install(self, stack: ExitStack) -> None:
        readers = _OPEN.setdefault(self.model, [])
        readers.append(self)
        stack.callback(readers.remove, self)
        before_calls(stack, self.model, self._go_on)

    def _go_on(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Pass a cache that continues the document to a call of the model that begins without one."""
        ids = args[0] if args else given.get("input_ids")
        if cache_in(given) is not None or len(args) > 2 or not isinstance(ids, Tensor):
            return None
        if len(_OPEN[self.model]) > 1:
            raise InvalidArgument(f"this model has several memories attached: choose one with {CACHE}=reader.cache()")
        return args, with_cache(given, self.cache(len(ids)))


def tokens_between(document: Document, first: int, stop: int) -> Tensor:
    """Return the tokens of ``document`` from number ``first`` on, up to ``stop``."""
    size = document.memory.spec.block_size
    blocks = range(first // size, -(-stop // size))
    return document.tokens(blocks)[first % size : stop - blocks.start * size] if blocks else torch.empty(0).long()


class BlockReader(CacheReader[C]):
    """A model whose cache keeps complete blocks with landmarks, which are committed to the document together."""

    model: Any

    def __init__(
        self, model: Any, memory: Place, document: str | None = None, *, codec: str | None = None, **shared: Any
    ) -> None:
        super().__init__(model, memory, document, **shared)
        self._codec = codec

    @abstractmethod
    def _begun(self, document: Document, rows: int, retrieval: Retrieval) -> C:
        """Return a cache at the end of the document."""

    def _begun_reading(self, document: Document) -> C:
        """Return a cache at the end of the document that is read."""
        return self._begun(document, 1, self.retrieval)

    @abstractmethod
    def _store(self, batch: Any, cache: C) -> None:
        """Put the states of the blocks of ``batch`` into it."""

    @abstractmethod
    def _stored(self, cache: C, stop: int) -> None:
        """Drop the blocks below ``stop`` from the cache, because they are in the document now."""

    @torch.no_grad()
    def _made(self, rows: int, *, retrieval: Retrieval | None = None) -> C:
        """Return a cache; see ``CacheReader``. ``retrieval``: other options than those the text was read with."""
        cache = self._begun(self._continued(), rows, self.retrieval if retrieval is None else retrieval)
        cache.belong_to(self.model.model)
        return cache

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        cache = self._begun_reading(job.document)
        limit = COMMIT_BLOCKS * self.model.config.tokens_per_block
        waiting: list[Tensor] = []
        try:
            for tokens in segments:
                (ids,) = to_device([tokens.long()[None]], self.model.device)
                self._segment(ids, cache)
                waiting.append(tokens)
                if sum(map(len, waiting)) >= limit:
                    self._commit(job, waiting, cache)
                yield len(tokens)
        finally:  # even after an error or an interruption, the computed part is whole
            self._commit(job, waiting, cache)

    def _segment(self, ids: Tensor, cache: Any) -> None:
        packing = Packing(ids, None, cache.offsets, self.model.config.block_size)
        cache.begin(packing)
        self.model.model.read(packing, cache)
        cache.end()

    def _commit(self, job: Job, waiting: list[Tensor], cache: C) -> None:
        """Store the tokens in ``waiting``, and empty it."""
        if not waiting:
            return
        options, job.options = job.options, None
        with job.document.append(torch.cat(waiting), reading=options) as batch:
            self._store(batch, cache)
        waiting.clear()
        self._stored(cache, job.document.complete_blocks.stop)

    def _best_shares(self, query: Query, top_k: int, kind: Any, layer: int | None) -> list[Match]:
        """Search by the last token. A block's score is its largest share in any head of ``layer``, or of all layers.

        ``kind`` is the class of the choices that layers report. Blocks that are seen without being chosen have no
        score.
        """

        def told(choice: Any) -> tuple[Tensor, Tensor] | None:
            if not choice.rows or layer not in (None, choice.layer):  # only the text's last token counts
                return None
            shares, blocks = choice.shares()
            return shares.amax(0).float().cpu(), blocks.cpu()

        blocks, cache, given = self.document.complete_blocks, self._made(1), Choices(kind, told)
        cache.observers.append(given)
        with evaluating(self.model):
            self.model(query.tokens.to(self.model.device)[None], past_key_values=cache, logits_to_keep=1)
        scores = torch.zeros(len(blocks))
        for shares, numbers in filter(None, given):
            mine = (numbers >= blocks.start) & (numbers < blocks.stop)
            at = numbers[mine] - blocks.start
            scores[at] = torch.maximum(scores[at], shares[mine])
        found = scores > 0
        return best([(self.document, torch.arange(blocks.start, blocks.stop)[found], scores[found])], top_k)


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
