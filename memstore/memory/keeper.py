"""Writes that keep the rules of a memory: what has expired goes, and what a limit has no room for."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from memstore.errors import DamagedError, MemstoreError
from memstore.memory import keeping
from memstore.memory.catalog import catalog_of
from memstore.memory.keeping import Keeping, lost_keys, read_keeping
from memstore.memory.state import KEEPING, Address, DocumentState
from memstore.store.contract import Batch, BlockStore
from memstore.store.records import describe

log = logging.getLogger("memstore")

_NO_ROOM = "the limit had no room for it"
_OVER = "its time to live was over"

Changed = Mapping[int, DocumentState]
"""The document that is appended to, as it is then; empty where nothing is appended."""
Forget = Callable[[Collection[int]], Batch]
"""What takes documents away, once those that it was asked for before are gone."""


class Keeper:
    """The rules of one open memory. Whoever calls what writes holds ``Shared.writing``."""

    def __init__(self, store: BlockStore, url: str, forgetting: Callable[[Changed], Forget]) -> None:
        self._store = store
        self._forgetting = forgetting
        self._url = url
        self._reads: Counter[int] = Counter()
        self._catalog = catalog_of(store, url)
        self._lock = threading.Lock()
        self._warned = False
        self._sure = False
        self.evicted = 0
        """Documents forgotten for the limit since the memory was opened."""
        self.expired = 0
        """Documents forgotten because their time was over, since the memory was opened."""

    def rules(self) -> Keeping:
        """As they are stored now. Raises ``DamagedError`` or ``ForeignMemory``."""
        if not self._sure:
            if lost := lost_keys(self._store):
                raise DamagedError(
                    f"memory {self._url}: {describe(lost[0])} holds another key's value, maybe the limit, pins and "
                    "times to live; run verify, then repair"
                )
            self._sure = True
        return read_keeping(self._store)

    @property
    def ruled(self) -> bool:
        """Whether anybody has ever made a rule, also one that was taken back."""
        return self._store.get(KEEPING) is not None

    def count(self, document: int, blocks: int) -> None:
        """Note that blocks of a document were gathered; the next write stores it, where a limit asks for it."""
        if not self._store.read_only:  # else there will be none
            with self._lock:
                self._reads[document] += blocks

    def change(self, change: Callable[[Keeping], Keeping]) -> None:
        """Store other rules."""
        self._write(change(self.rules()), Batch(), (), {})

    def write(self, batch: Batch, document: int, after: DocumentState) -> None:
        """Commit an append that leaves ``document`` in state ``after``, and what the rules ask for, in one transaction.

        Raises ``StoreFull`` where the limit has no room, and what ``BlockStore.write`` raises.
        """
        rules = self.rules()
        if rules == Keeping():
            self._store.write(batch)
            return
        now = keeping.utc()
        overdue = [number for number in rules.expired(now) if number != document]
        if overdue and not rules.believes(now):
            self._doubt(len(overdue))
            overdue = []
        if rules.expires and rules.believes(now):
            rules = rules.at(now)
        self._write(rules, batch, overdue, {document: after})

    def expire(self) -> list[str]:
        """Forget every document whose time is over, in one transaction, whatever the clock was before; their names."""
        rules, now = self.rules(), keeping.utc()
        return self._write(rules.at(now), Batch(), rules.expired(now), {}) if rules.expires else []

    def _write(self, rules: Keeping, batch: Batch, overdue: Collection[int], changed: Changed) -> list[str]:
        """Commit ``batch``, the rules, and that ``overdue`` documents go; the names of these.

        Where a document is ``changed``, the limit holds: others are evicted.
        """
        there, document = self._catalog.known(), next(iter(changed), None)
        overdue = [number for number in overdue if number in there]
        names = self._names(overdue)
        forget = self._forgetting(changed)
        if overdue:
            _add(batch, forget(overdue))
        rest = [number for number in there if number not in overdue]
        reads = self._taken() if rules.when_full == "evict-least-read" else {}
        if document is None or rules.expires or reads:
            kept = rules.read(reads).only(rest if document is None else {*rest, document})
            batch.put(KEEPING, kept.to_record())
        try:
            if document is None or rules.max_bytes is None:
                self._store.write(batch)
            else:
                victims = rules.read(reads).victims(rest, document)
                self._write_within(rules.max_bytes, batch, victims, forget)
        except BaseException:
            self._give_back(reads)
            raise
        self._catalog.remove(overdue)
        self.expired += len(names)
        self._tell(names, _OVER)
        return names

    def _write_within(self, max_bytes: int, batch: Batch, victims: list[int], forget: Forget) -> None:
        names: list[str] = []

        def evictions() -> Iterator[Batch]:
            for number in victims:
                names.extend(self._names([number]))
                yield forget([number])

        evicted = self._store.write_within(batch, max_bytes, evictions())
        self._catalog.remove(victims[:evicted])
        self.evicted += evicted
        self._tell(names[:evicted], _NO_ROOM)

    def _names(self, documents: Collection[int]) -> list[str]:
        return [self._name(number) for number in documents]

    def _name(self, document: int) -> str:
        try:
            records = self._store.get(Address(document).entry)
            return DocumentState.from_record(records[0]).name if records else f"number {document}"
        except MemstoreError:  # damaged: it can go all the same
            return f"number {document}"

    def _taken(self) -> Counter[int]:
        with self._lock:
            reads, self._reads = self._reads, Counter()
        return reads

    def _give_back(self, reads: dict[int, int]) -> None:
        with self._lock:
            self._reads.update(reads)

    def _doubt(self, documents: int) -> None:
        if not self._warned:
            log.warning(
                "memory %s: %d documents seem to have expired, but the clock is behind the last write or more than 30 "
                "days ahead of it, so they stay; if the clock is right, call memory.expire()",
                self._url,
                documents,
            )
        self._warned = True

    def _tell(self, names: list[str], why: str) -> None:
        for name in names:
            log.warning("memory %s: document %r was forgotten, %s", self._url, name, why)


def _add(batch: Batch, other: Batch) -> None:
    """Let ``batch`` do what ``other`` does too, after what it does itself: in a batch deletions come first."""
    kept = [put for put in batch.puts if not any(first <= put[0] <= last for first, last in other.deletes)]
    batch.deletes += other.deletes
    batch.puts = kept + other.puts
