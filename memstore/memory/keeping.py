"""What a memory keeps and what it lets go: its limit, pinned documents, times to live, and how often each was read.

All of it lies in one value of META, which exists only where something of it was asked for. So a memory that has no
limit and no rules is as it always was.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

from memstore.errors import DamagedError, ForeignMemory, InvalidArgument
from memstore.memory.state import KEEPING, Address
from memstore.store.checks import MAX_DOCUMENT, MAX_ITEM, MAX_LAYER
from memstore.store.contract import BlockStore, Key, Record, Table
from memstore.store.records import Misplaced
from memstore.stored import array, fit, maybe, number, row, table, text, whole

WhenFull = Literal["refuse", "evict-oldest-document", "evict-least-read"]
"""What an append does that the limit has no room for: fail, or forget other documents, oldest or least read first."""

DAY = 24 * 3600.0
LONGEST = 1000 * 366 * DAY
"""Seconds that a time to live may be at most: what a calendar can tell, and long enough."""
LATEST = 9999 * 365 * DAY
"""Seconds of UTC since 1970 that a calendar can tell."""
BELIEVED = 30 * DAY
"""Seconds between two writes that a clock is believed without being asked; see ``Keeping.believes``."""


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
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1):
            raise InvalidArgument(f"max_bytes must be a number of bytes, at least 1, or None, not {max_bytes!r}.")
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
