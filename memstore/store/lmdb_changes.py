"""Changes in an LMDB transaction: values of a run are written together, and a range of keys is deleted."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.store import runs
from memstore.store.contract import Key, Record
from memstore.store.lmdb_values import Cursor, Transaction, older
from memstore.store.naming import Naming
from memstore.store.records import encode_value, header_sums

Deletes = Sequence[tuple[Key, Key]]
Puts = Sequence[tuple[Key, tuple[Record, ...]]]


class Changes:
    """Writes in transactions; the owner of ``naming`` may change it."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self.added = 0
        """What was added to the sum of all checks; for whoever keeps it to set back."""

    def apply(self, txn: Transaction, deletes: Deletes, puts: Puts) -> None:
        """Deletions first, then puts. Raises ``DamagedError`` where what shares a run with a change is damaged."""
        single: dict[Key, tuple[Record, ...]] = {}
        shared: dict[Key, dict[int, tuple[Key, tuple[Record, ...]]]] = {}
        for key, records in puts:
            if self._naming.lengths[key.table] == 1:
                single[key] = records
            else:
                shared.setdefault(self._run(key), {})[key.item] = (key, records)
        with txn.cursor() as cursor:
            for first, last in deletes:
                self._delete_range(cursor, first, last)
            for key in sorted(single):
                self._put(cursor, key, encode_value(key, single[key]))
            for run in sorted(shared):
                self._put_run(cursor, run, shared[run])

    def _put(self, cursor: Cursor, key: Key, value: bytes) -> None:
        """Write a value in place of what was there, which has another whole key."""
        name = key.to_bytes()
        whole = self._naming.whole(name, value)
        found = self._naming.find(cursor, name)
        if found not in (None, whole):
            self._delete(cursor)
        self.added += 0 if found == whole else self._naming.check(whole)
        cursor.put(whole, value)

    def _delete(self, cursor: Cursor) -> None:
        """Delete the value that ``cursor`` is on; it is on the next one then."""
        self.added -= self._naming.check(bytes(cursor.key()))
        cursor.delete()

    def _put_run(self, cursor: Cursor, run: Key, changes: dict[int, tuple[Key, tuple[Record, ...]]]) -> None:
        """Write values of one run, keeping its other items."""
        values: dict[int, bytes] = {}
        if found := self._naming.find(cursor, run.to_bytes()):
            old = self._last(cursor, found, run)
            values = runs.split(old, run, self._naming.lengths[run.table], without=changes)
        for item, (key, records) in changes.items():
            values[item] = encode_value(key, records)
        self._replace(cursor, run, values)

    def _replace(self, cursor: Cursor, run: Key, values: dict[int, bytes]) -> None:
        if values:
            self._put(cursor, run, b"".join(values[item] for item in sorted(values)))
        elif self._naming.find(cursor, run.to_bytes()):
            self._delete(cursor)

    def _last(self, cursor: Cursor, found: bytes, run: Key) -> memoryview:
        """The run that ``cursor`` is on. Raises ``DamagedError`` where an older one lies there."""
        view: memoryview = cursor.value()
        if not self._naming.holds(found, header_sums(view)):
            raise older(run)
        return view

    def _delete_range(self, cursor: Cursor, first: Key, last: Key) -> None:
        """Delete the runs inside the range; of runs that its ends cut through, keep the rest."""
        if first > last:
            return  # nothing lies between them, and a run that both cut through must not lose what is outside
        cut = {run for run in (self._run(first), self._run(last)) if run < first or self._run_end(run) > last}
        for run in cut:
            self._trim(cursor, run, first, last)
        end = self._run(last).to_bytes()
        stop = self._naming.first(end) if self._run(last) in cut else self._naming.last(end)
        cursor.set_range(self._naming.first(first.to_bytes()))
        while (raw := bytes(cursor.key())) and (raw < stop or (raw == stop and self._run(last) not in cut)):
            self._delete(cursor)

    def _trim(self, cursor: Cursor, run: Key, first: Key, last: Key) -> None:
        """Delete the items of one run that lie in the range."""
        if found := self._naming.find(cursor, run.to_bytes()):
            old = self._last(cursor, found, run)
            self._replace(cursor, run, runs.outside(old, run, self._naming.lengths[run.table], first, last))

    def _run(self, key: Key) -> Key:
        return runs.run_start(key, self._naming.lengths[key.table])

    def _run_end(self, run: Key) -> Key:
        return run._replace(item=run.item + self._naming.lengths[run.table] - 1)
