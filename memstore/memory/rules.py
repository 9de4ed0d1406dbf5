"""Rules for keeping and forgetting: the memory's limit, pinned documents, times to live, and how often each was read.

All rules lie in one value of META, which exists only if somebody has set one. So a memory without rules is unchanged.
That value uses document numbers, which differ between memories. Rules that are copied or exported with a memory use
document names.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, get_args

from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, MemstoreError
from memstore.json_checks import Check, array, check_whole, fit, maybe, members, number, row, table, text, whole
from memstore.memory.entry import KEEPING, LONGEST_NAME, Address, Catalog
from memstore.store.contract import BlockStore
from memstore.store.records import (
    MAX_DOCUMENT,
    MAX_ITEM,
    MAX_LAYER,
    Batch,
    Key,
    MisplacedValue,
    Record,
    Table,
    describe,
)

if TYPE_CHECKING:  # it needs torch, but a check of a memory reads rules without torch
    from memstore.store.cache import BlockCache

K = TypeVar("K", int, str)
J = TypeVar("J", int, str)

WhenFull = Literal["refuse", "evict-oldest-document", "evict-least-read"]
"""What an append does if it exceeds the limit: fail, or forget other documents, oldest or least read first."""

DAY = 24 * 3600.0
LONGEST = 1000 * 366 * DAY
"""Longest time to live in seconds: within the range of a calendar, and long enough."""
LATEST = 9999 * 365 * DAY
"""Latest time in a calendar, in seconds of UTC since 1970."""
BELIEVED = 30 * DAY
"""Longest plausible time between two writes, in seconds; see ``Rules.believes``."""

_log = logging.getLogger("memstore")
_NO_ROOM = "because the limit had no room for it"
_OVER = "because its time to live was over"
_MOST = 10_000_000
_NUMBER = whole(0, MAX_DOCUMENT)
STORED = table(
    max_bytes=maybe(whole(1)),
    when_full=text(64),
    pinned=array(_NUMBER, _MOST),
    expires=array(row(_NUMBER, number(LATEST)), _MOST),
    reads=array(row(_NUMBER, whole()), _MOST),
    clock=number(LATEST),
)
"""Schema of the value in the store."""
EXPORTED = table(
    max_bytes=maybe(whole(1)),
    when_full=text(64),
    pinned=array(text(LONGEST_NAME), _MOST),
    expires=members(number(LATEST), _MOST),
)
"""Schema of the value in an export."""

Forget = Callable[[Collection[int]], Batch]
"""Returns the batch that removes documents, applied after the batches of earlier calls."""
Forgetting = Callable[[], Forget]
"""Makes a ``Forget`` for one commit."""


def utc() -> float:
    """Return the current time, in seconds of UTC since 1970."""
    return time.time()


# One value of META, not the entries of documents: a fork does not inherit a pin, and an open append never clashes with
# one.
@dataclass(frozen=True, kw_only=True)
class Rules(Generic[K]):
    """One state of the rules. ``K`` are documents: numbers, which are never used twice, or, outside a store, names."""

    max_bytes: int | None = None
    """The most that ``BlockStore.used_bytes`` may be after an append. None: no limit."""
    when_full: WhenFull = "refuse"
    pinned: frozenset[K] = frozenset()
    """Documents that are never evicted or expired."""
    expires: Mapping[K, float] = field(default_factory=dict, hash=False)
    """Document -> time after which it may be forgotten, in seconds of UTC since 1970."""
    reads: Mapping[K, int] = field(default_factory=dict, hash=False)
    """Document -> number of its gathered blocks, in all layers; counted if the least read are evicted."""
    clock: float = 0.0
    """Time when a writer last checked the times to live, in seconds of UTC since 1970."""

    def limited(self, max_bytes: int | None, when_full: WhenFull) -> Self:
        """Return rules with another limit. Raises ``InvalidArgument``."""
        if max_bytes is not None:
            check_whole("max_bytes", max_bytes, 1, 2**63 - 1)
        if when_full not in get_args(WhenFull):
            raise InvalidArgument(f"when_full must be one of {', '.join(get_args(WhenFull))}, not {when_full!r}.")
        return replace(self, max_bytes=max_bytes, when_full=when_full)

    def expiring(self, document: K, seconds: float | None) -> Self:
        """Return rules with another time to live for a document, from now on; None: for ever.

        Raises ``InvalidArgument``.
        """
        now, times = utc(), {other: when for other, when in self.expires.items() if other != document}
        if seconds is not None:
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < LONGEST:
                raise InvalidArgument(
                    "seconds must be a positive number of at most a thousand years, or None for no expiry; not "
                    f"{seconds!r}."
                )
            times[document] = now + seconds
        return replace(self, expires=times, clock=now)

    def read(self, counts: Mapping[K, int]) -> Self:
        """Return the rules with these blocks counted as read."""
        totals = Counter(self.reads)
        totals.update(counts)
        return replace(self, reads=totals)

    def only(self, documents: Collection[K]) -> Self:
        """Return the rules for these documents alone."""
        return replace(
            self,
            pinned=self.pinned.intersection(documents),
            expires={each: when for each, when in self.expires.items() if each in documents},
            reads={each: count for each, count in self.reads.items() if each in documents},
        )

    def renamed(self, names: Mapping[K, J]) -> Rules[J]:
        """Return limit, pins and times to live of the documents that have ``names``, without the counts of reads."""
        return Rules[J](
            max_bytes=self.max_bytes,
            when_full=self.when_full,
            pinned=frozenset(names[each] for each in self.pinned if each in names),
            expires={names[each]: when for each, when in self.expires.items() if each in names},
        )

    # In one transaction at the end of a copy, so that no document expires while others are still
    # to be forked from it.
    def joined(self, other: Rules[K]) -> Self:
        """Return rules with those of ``other`` for its documents, and its limit if it has one.

        Raises ``InvalidArgument``.
        """
        clock = utc() if other.expires else self.clock
        pinned, expires = self.pinned | other.pinned, {**self.expires, **other.expires}
        joined = replace(self, pinned=pinned, expires=expires, clock=clock)
        limit = other.max_bytes, other.when_full
        return joined if limit == (None, "refuse") else joined.limited(*limit)

    def believes(self, now: float) -> bool:
        """Whether a write may forget documents expired by ``now`` by itself.

        A wrong clock must not empty a memory. So a write trusts it only if it is not behind the last write that
        checked, and at most thirty days ahead. ``Memory.expire``, an explicit call, always trusts it.
        """
        return self.clock <= now <= self.clock + BELIEVED

    def expired(self, now: float) -> list[K]:
        """Return unpinned documents whose time is over, in their order."""
        return sorted(each for each, when in self.expires.items() if when <= now and each not in self.pinned)

    def victims(self, documents: Collection[K], spared: Collection[K]) -> list[K]:
        """Return documents to evict, in this order: neither pinned ones nor ``spared``, which are being written."""
        if self.when_full == "refuse":
            return []
        free = sorted(set(documents) - self.pinned - set(spared))  # oldest first, also among the least read
        return free if self.when_full == "evict-oldest-document" else sorted(free, key=lambda n: self.reads.get(n, 0))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values without the counts of reads: the form of ``EXPORTED``, by names."""
        return {
            "max_bytes": self.max_bytes,
            "when_full": self.when_full,
            "pinned": sorted(self.pinned),
            "expires": dict(self.expires),
        }

    def to_record(self) -> Record:
        """Return the record to store: the form of ``STORED``, by numbers."""
        pairs = {"expires": sorted(self.expires.items()), "reads": sorted(self.reads.items())}
        return Record.from_json({**self.to_dict(), **pairs, "clock": self.clock})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], schema: Check = EXPORTED) -> Self:
        """Invert ``to_dict`` or, with ``STORED``, ``to_record``.

        Raises ``ForeignMemory`` for rules that this version does not know, and ``DamagedError``.
        """
        fit(values, schema, "the rules of a memory")
        if unknown := set(values) - {each.name for each in fields(cls)}:
            raise ForeignMemory.newer("its rules have", unknown)
        if values["when_full"] not in get_args(WhenFull):
            raise ForeignMemory.newer("its rule for a full memory is", [values["when_full"]])
        maps = {name: dict(values[name]) for name in ("expires", "reads") if name in values}
        return cls(**{**values, **maps, "pinned": frozenset(values["pinned"])})


def read_rules(store: BlockStore) -> Rules[int]:
    """Return the rules of the memory on ``store``. Raises ``DamagedError`` or ``ForeignMemory``."""
    records = store.get(KEEPING)
    return Rules() if records is None else Rules.from_dict(records[0].to_json(), STORED)


# Missing rules do not count as none, or a memory would forget pinned documents: a flipped bit in the tree
# moves a value without touching it.
def lost_keys(store: BlockStore) -> list[Key]:
    """Return META keys with another key's value, if the rules are missing: one of these may be the rules."""
    if store.get(KEEPING) is not None:
        return []
    keys = store.keys(Key(Table.META), Key(Table.META, MAX_DOCUMENT, MAX_LAYER, MAX_ITEM))
    others = [key for key in keys if not key.document or key != Address(key.document).branch]
    return [key for key in others if _misplaced(store, key)]


def _misplaced(store: BlockStore, key: Key) -> bool:
    try:
        store.get(key)
    except DamagedError as error:
        return isinstance(error, MisplacedValue)
    return False


class Retention:
    """The rules of an open memory, and commits that obey them.

    Callers of writing methods hold ``SharedStore.writing``.
    """

    def __init__(
        self,
        store: BlockStore,
        url: str,
        catalog: Catalog,
        cache: BlockCache,
        forgotten: Iterable[Callable[[Sequence[str]], None]],
    ) -> None:
        """``forgotten`` are called with the names of documents after they were forgotten."""
        self._store = store
        self._url = url
        self._catalog = catalog
        self._cache = cache
        self._forgotten = forgotten
        self._warned = False
        self._sure = False
        self.spared: Collection[str] = ()
        """Names of documents that no append of this process evicts."""
        self.evicted = 0
        """Number of documents evicted for the limit since the memory was opened."""
        self.expired = 0
        """Number of documents expired since the memory was opened."""

    def rules(self) -> Rules[int]:
        """Return the rules as stored now. Raises ``DamagedError`` or ``ForeignMemory``."""
        if not self._sure:
            if lost := lost_keys(self._store):
                raise DamagedError(
                    f"memory {self._url}: {describe(lost[0])} holds the value of another key, perhaps the limit, "
                    "pins and times to live. Run verify, then repair"
                )
            self._sure = True
        return read_rules(self._store)

    @property
    def ruled(self) -> bool:
        """Whether a rule was ever made, even if it was taken back."""
        return self._store.get(KEEPING) is not None

    def change(self, change: Callable[[Rules[int]], Rules[int]]) -> None:
        """Store other rules."""
        self._commit(change(self.rules()), Batch())

    def write(self, batch: Batch, document: int, forgetting: Forgetting) -> None:
        """Commit an append to ``document``, and the changes that the rules require, in one transaction.

        Raises ``StoreFull`` if the limit is exceeded, and the errors of ``BlockStore.write``.
        """
        rules = self.rules()
        if rules == Rules():
            self._store.write(batch)
            return
        now = utc()
        overdue = [each for each in rules.expired(now) if each != document]
        if rules.expires and rules.believes(now):
            rules = replace(rules, clock=now)
        elif overdue:
            self._doubt(len(overdue))
            overdue = []
        self._commit(rules, batch, forgetting(), overdue, document)

    def expire(self, forget: Forget) -> list[str]:
        """Forget every expired document in one transaction, without doubting the clock; return their names."""
        rules, now = self.rules(), utc()
        return self._commit(replace(rules, clock=now), Batch(), forget, rules.expired(now)) if rules.expires else []

    def _commit(
        self,
        rules: Rules[int],
        batch: Batch,
        forget: Forget | None = None,
        overdue: Collection[int] = (),
        document: int | None = None,
    ) -> list[str]:
        """Commit ``batch``, the rules, and the deletion of ``overdue`` documents; return their names.

        If a ``document`` is appended to, the limit applies: others are evicted.
        """
        there = self._catalog.known()
        overdue = [each for each in overdue if each in there]
        names = [self._name(each) for each in overdue]
        if overdue and forget:
            _add(batch, forget(overdue))
        rest = [each for each in there if each not in overdue]
        # Counted in the process and stored with its next write; a reader in mode "r" cannot store counts.
        reads = self._cache.take_counts() if rules.when_full == "evict-least-read" else {}
        rules = rules.read(reads)
        if document is None or rules.expires or reads:
            batch.put(KEEPING, rules.only(rest if document is None else {*rest, document}).to_record())
        try:
            with self._catalog.committing() as changed:
                if document is None or rules.max_bytes is None or forget is None:
                    self._store.write(batch)
                    evicted = []
                else:
                    names_of = self._catalog.names() if self.spared else {}
                    spared = {document, *(each for each, name in names_of.items() if name in self.spared)}
                    evicted = self._write_within(rules.max_bytes, batch, rules.victims(rest, spared), forget)
                changed.update(dict.fromkeys([*overdue, *evicted]))
        except BaseException:
            self._cache.give_back(reads)
            raise
        self.expired += len(names)
        self._tell(names, _OVER)
        return names

    def _write_within(self, max_bytes: int, batch: Batch, victims: list[int], forget: Forget) -> list[int]:
        """Write within the limit; return the documents that had to be evicted."""
        names: list[str] = []

        def evictions() -> Iterator[Batch]:
            for victim in victims:
                names.append(self._name(victim))
                yield forget([victim])

        evicted = self._store.write_within(batch, max_bytes, evictions())
        self.evicted += evicted
        self._tell(names[:evicted], _NO_ROOM)
        return victims[:evicted]

    def _name(self, document: int) -> str:
        try:
            state = self._catalog.state(document)
        except MemstoreError:  # damaged: it can still be deleted
            state = None
        return f"number {document}" if state is None else state.name

    def _doubt(self, documents: int) -> None:
        if not self._warned:
            _log.warning(
                "memory %s: %d documents seem to have expired, but they stay, because the clock is behind the "
                "last write or more than 30 days ahead of it. If the clock is right, call memory.expire()",
                self._url,
                documents,
            )
        self._warned = True

    def _tell(self, names: list[str], why: str) -> None:
        for name in names:
            _log.warning("memory %s: document %r was forgotten, %s", self._url, name, why)
        try:
            for told in self._forgotten:
                told(names)
        except MemstoreError as error:  # the append is stored anyway
            _log.warning("memory %s: traces of forgotten documents could not be removed: %s", self._url, error)


def _add(batch: Batch, other: Batch) -> None:
    """Add the changes of ``other`` to ``batch``, to be applied after its own: in a batch deletions come first."""
    kept = [put for put in batch.puts if not any(first <= put[0] <= last for first, last in other.deletes)]
    batch.deletes += other.deletes
    batch.puts = kept + other.puts
