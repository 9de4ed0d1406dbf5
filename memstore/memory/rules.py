"""What a memory keeps and what it lets go: its limit, pinned documents, times to live, and how often each was read.

All of it lies in one value of META, which exists only where something of it was asked for. So a memory that has no
limit and no rules is as it always was.

Writes that keep the rules of a memory: what has expired goes, and what a limit has no room for.

The rules of a memory by the names of its documents: what goes along when a memory is copied or exported.

In a memory they stand under the numbers of documents, which are others in every memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, get_args

from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, MemstoreError
from memstore.memory.entry import KEEPING, LONGEST_NAME, Address, DocumentState
from memstore.memory.places import catalog_of
from memstore.store.contract import MAX_DOCUMENT, MAX_ITEM, MAX_LAYER, Batch, BlockStore, Key, Record, Table, describe
from memstore.store.records import Misplaced
from memstore.stored import array, check_whole, fit, maybe, members, number, row, table, text, whole

WhenFull = Literal["refuse", "evict-oldest-document", "evict-least-read"]
"""What an append does that the limit has no room for: fail, or forget other documents, oldest or least read first."""

DAY = 24 * 3600.0
LONGEST = 1000 * 366 * DAY
"""Seconds that a time to live may be at most: what a calendar can tell, and long enough."""
LATEST = 9999 * 365 * DAY
"""Seconds of UTC since 1970 that a calendar can tell."""
BELIEVED = 30 * DAY
"""Seconds between two writes that a clock is believed without being asked; see ``Keeping.believes``."""


# One value of META, not the entries of documents: a fork does not inherit a pin, and an open append does not clash with
# one.
@dataclass(frozen=True, kw_only=True)
class Keeping:
    """One state of the rules. Documents are named by their numbers, which are never used twice."""

    max_bytes: int | None = None
    """The most that ``BlockStore.used_bytes`` may be after an append. None: no limit."""
    when_full: WhenFull = "refuse"
    pinned: frozenset[int] = frozenset()
    """Documents that are neither evicted nor expire."""
    expires: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Document -> when it may be forgotten, in seconds of UTC since 1970."""
    reads: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Document -> how many blocks of it were gathered, in all layers; counted where the least read are evicted."""
    clock: float = 0.0
    """When a writer last looked at the times, in seconds of UTC since 1970."""

    def limited(self, max_bytes: int | None, when_full: WhenFull) -> Self:
        """With another limit. Raises ``InvalidArgument``."""
        if max_bytes is not None:
            check_whole("max_bytes", max_bytes, 1, 2**63 - 1)
        if when_full not in get_args(WhenFull):
            raise InvalidArgument(f"when_full must be one of {', '.join(get_args(WhenFull))}, not {when_full!r}.")
        return replace(self, max_bytes=max_bytes, when_full=when_full)

    def expiring(self, document: int, seconds: float | None, now: float) -> Self:
        """With another time to live of a document; None: for ever. Raises ``InvalidArgument``."""
        times = {number: when for number, when in self.expires.items() if number != document}
        if seconds is not None:
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < LONGEST:
                raise InvalidArgument(
                    "seconds must be a positive number, of a thousand years at most, or None for no end, "
                    f"not {seconds!r}."
                )
            times[document] = now + seconds
        return replace(self, expires=times, clock=now)

    def read(self, counts: Mapping[int, int]) -> Self:
        """With blocks read since."""
        totals = {number: self.reads.get(number, 0) + counts.get(number, 0) for number in {*self.reads, *counts}}
        return replace(self, reads=totals)

    def only(self, documents: Collection[int]) -> Self:
        """Without what it says of documents that do not exist any more."""
        return replace(
            self,
            pinned=self.pinned.intersection(documents),
            expires={number: when for number, when in self.expires.items() if number in documents},
            reads={number: count for number, count in self.reads.items() if number in documents},
        )

    # A clock behind the last append, or more than 30 days ahead of it, is not believed by appends: they warn once and
    # forget nothing.
    def believes(self, now: float) -> bool:
        """Whether a write may forget what has expired by ``now`` without being asked.

        A clock that was set wrong must not empty a memory. So a write trusts it only where it is not behind the last
        write that looked, and at most thirty days ahead; ``Memory.expire``, which somebody calls, always does.
        """
        return self.clock <= now <= self.clock + BELIEVED

    def at(self, now: float) -> Self:
        """With the times looked at now."""
        return replace(self, clock=now)

    def expired(self, now: float) -> list[int]:
        """Documents whose time is over and that are not pinned, in the order of their numbers."""
        return sorted(number for number, when in self.expires.items() if when <= now and number not in self.pinned)

    def victims(self, documents: Collection[int], spared: int) -> list[int]:
        """Documents to evict, first one first: neither pinned ones, nor ``spared``, which is being written."""
        if self.when_full == "refuse":
            return []
        free = sorted(set(documents) - self.pinned - {spared})
        return free if self.when_full == "evict-oldest-document" else sorted(free, key=lambda n: self.reads.get(n, 0))

    def to_record(self) -> Record:
        """As stored."""
        return Record.from_json(
            {
                "max_bytes": self.max_bytes,
                "when_full": self.when_full,
                "pinned": sorted(self.pinned),
                "expires": sorted(self.expires.items()),
                "reads": sorted(self.reads.items()),
                "clock": self.clock,
            }
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of ``to_record``.

        Raises ``ForeignMemory`` for rules that this version does not know, and ``DamagedError``.
        """
        fit(values, KEEPING_VALUE, "the value with the rules of a memory")
        if unknown := set(values) - set(cls.__dataclass_fields__):
            raise ForeignMemory(f"a newer memstore wrote this memory: its rules have {', '.join(unknown)}; upgrade")
        if values["when_full"] not in get_args(WhenFull):
            raise ForeignMemory(
                f"a newer memstore wrote this memory: when full, it should {values['when_full']}; upgrade"
            )
        return cls(
            **{
                **values,
                "pinned": frozenset(values["pinned"]),
                "expires": dict(values["expires"]),
                "reads": dict(values["reads"]),
            }
        )


_NUMBER = whole(0, MAX_DOCUMENT)
_MOST = 10_000_000
KEEPING_VALUE = table(
    max_bytes=maybe(whole(1)),
    when_full=text(64),
    pinned=array(_NUMBER, _MOST),
    expires=array(row(_NUMBER, number(LATEST)), _MOST),
    reads=array(row(_NUMBER, whole()), _MOST),
    clock=number(LATEST),
)


def read_keeping(store: BlockStore) -> Keeping:
    """The rules of the memory on ``store``. Raises ``DamagedError`` or ``ForeignMemory``."""
    records = store.get(KEEPING)
    return Keeping() if records is None else Keeping.from_json(records[0].to_json())


# Rules that cannot be found are not taken for none, or a memory would forget what is pinned: a flipped bit in the tree
# moves a value without touching it.
def lost_keys(store: BlockStore) -> list[Key]:
    """Keys of META under which another key's value lies, where there seem to be no rules: it may be them.

    Most memories have none. One whose rules cannot be found must not be taken for one of these, and forget what is
    pinned.
    """
    if store.get(KEEPING) is not None:
        return []
    keys = store.keys(Key(Table.META), Key(Table.META, MAX_DOCUMENT, MAX_LAYER, MAX_ITEM))
    others = [key for key in keys if not key.document or key != Address(key.document).branch]
    return [key for key in others if _misplaced(store, key)]


def _misplaced(store: BlockStore, key: Key) -> bool:
    try:
        store.get(key)
    except DamagedError as error:
        return isinstance(error, Misplaced)
    return False


def utc() -> float:
    """Now, in seconds of UTC since 1970."""
    return time.time()


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

    def now(self) -> float:
        """Seconds of UTC since 1970, as the rules count them."""
        return utc()

    @property
    def ruled(self) -> bool:
        """Whether anybody has ever made a rule, also one that was taken back."""
        return self._store.get(KEEPING) is not None

    # Least read is the number of blocks gathered, counted in the process and stored with its next write; a reader in
    # mode "r" cannot store any. Ties: the oldest first.
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
        now = utc()
        overdue = [number for number in rules.expired(now) if number != document]
        if overdue and not rules.believes(now):
            self._doubt(len(overdue))
            overdue = []
        if rules.expires and rules.believes(now):
            rules = rules.at(now)
        self._write(rules, batch, overdue, {document: after})

    def expire(self) -> list[str]:
        """Forget every document whose time is over, in one transaction, whatever the clock was before; their names."""
        rules, now = self.rules(), utc()
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
            for victim in victims:
                names.extend(self._names([victim]))
                yield forget([victim])

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


_MOST_NAMES = 10_000_000
RULES = table(
    max_bytes=maybe(whole(1)),
    when_full=text(64),
    pinned=array(text(LONGEST_NAME), _MOST_NAMES),
    expires=members(number(LATEST), _MOST_NAMES),
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Limit, pins and times to live, as ``Keeping`` has them; how often documents were read stays behind."""

    max_bytes: int | None = None
    when_full: WhenFull = "refuse"
    pinned: tuple[str, ...] = ()
    expires: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Name -> when the document may be forgotten, in seconds of UTC since 1970."""

    @classmethod
    def of(cls, keeping: Keeping, names: Mapping[int, str]) -> Self:
        """The rules of a memory whose documents have these numbers and ``names``."""
        return cls(
            max_bytes=keeping.max_bytes,
            when_full=keeping.when_full,
            pinned=tuple(name for number, name in names.items() if number in keeping.pinned),
            expires={names[number]: when for number, when in keeping.expires.items() if number in names},
        )

    def only(self, documents: Collection[str]) -> Self:
        """Those of some documents, without the limit, which is for a whole memory."""
        return type(self)(
            pinned=tuple(name for name in self.pinned if name in documents),
            expires={name: when for name, when in self.expires.items() if name in documents},
        )

    # By the names of documents, in one transaction at the end, so that a time to live cannot take a document away while
    # others are still to be made of it. The limit goes only to a memory that holds nothing else and never had rules:
    # elsewhere it would evict what nobody meant.
    def added_to(self, keeping: Keeping, names: Mapping[int, str], now: float) -> Keeping:
        """The rules of a memory once it has these too, for the documents that it has. Raises ``InvalidArgument``."""
        numbers = {name: number for number, name in names.items()}
        times = {numbers[name]: when for name, when in self.expires.items() if name in numbers}
        pinned = {numbers[name] for name in self.pinned if name in numbers}
        added = replace(keeping, pinned=keeping.pinned | pinned, expires={**keeping.expires, **times})
        if times:
            added = added.at(now)
        limit = self.max_bytes, self.when_full
        return added if limit == (None, "refuse") else added.limited(*limit)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "pinned": list(self.pinned)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``. Raises ``ForeignMemory`` for rules that this version does not know."""
        fit(values, RULES, "the list of rules of a memory")
        if set(values) - set(cls.__dataclass_fields__) or values.get("when_full") not in get_args(WhenFull):
            raise ForeignMemory("a newer memstore wrote these rules of a memory; upgrade memstore.")
        return cls(**{**values, "pinned": tuple(values["pinned"]), "expires": {**values["expires"]}})
