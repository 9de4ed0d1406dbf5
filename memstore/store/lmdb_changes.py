"""Changes in an LMDB transaction: values of a run are written together, and a range of keys is deleted."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.store import runs
from memstore.store.contract import Key, Record
from memstore.store.lmdb_values import Transaction, pack
from memstore.store.records import encode_value

Deletes = Sequence[tuple[Key, Key]]
Puts = Sequence[tuple[Key, tuple[Record, ...]]]


class Changes:
    """Writes in transactions. ``lengths`` are the items per LMDB value, by table: a list that its owner may change."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def apply(self, txn: Transaction, deletes: Deletes, puts: Puts) -> None:
        """Deletions first, then puts. Raises ``DamagedError`` where what shares a run with a change is damaged."""
        single: dict[Key, tuple[Record, ...]] = {}
        shared: dict[Key, dict[int, tuple[Key, tuple[Record, ...]]]] = {}
        for key, records in puts:
            if self._lengths[key.table] == 1:
                single[key] = records
            else:
                shared.setdefault(self._run(key), {})[key.item] = (key, records)
        for first, last in deletes:
            self._delete_range(txn, first, last)
        for key in sorted(single):
            txn.put(pack(key), encode_value(key, single[key]))
        for run in sorted(shared):
            self._put_run(txn, run, shared[run])

    def _put_run(self, txn: Transaction, run: Key, changes: dict[int, tuple[Key, tuple[Record, ...]]]) -> None:
        """Write values of one run, keeping its other items."""
        values: dict[int, bytes] = {}
        if old := txn.get(pack(run)):
            values = runs.split(old, run, self._lengths[run.table], without=changes)
        for item, (key, records) in changes.items():
            values[item] = encode_value(key, records)
        self._replace(txn, run, values)

    def _replace(self, txn: Transaction, run: Key, values: dict[int, bytes]) -> None:
        if values:
            txn.put(pack(run), b"".join(values[item] for item in sorted(values)))
        else:
            txn.delete(pack(run))

    def _delete_range(self, txn: Transaction, first: Key, last: Key) -> None:
        """Delete the runs inside the range; of runs that its ends cut through, keep the rest."""
        if first > last:
            return  # nothing lies between them, and a run that both cut through must not lose what is outside
        cut = {run for run in (self._run(first), self._run(last)) if run < first or self._run_end(run) > last}
        for run in cut:
            self._trim(txn, run, first, last)
        stop, whole = pack(self._run(last)), self._run(last) not in cut
        with txn.cursor() as cursor:
            cursor.set_range(pack(first))
            while (raw := bytes(cursor.key())) and (raw < stop or (whole and raw == stop)):
                cursor.delete()

    def _trim(self, txn: Transaction, run: Key, first: Key, last: Key) -> None:
        """Delete the items of one run that lie in the range."""
        if old := txn.get(pack(run)):
            self._replace(txn, run, runs.outside(old, run, self._lengths[run.table], first, last))

    def _run(self, key: Key) -> Key:
        return runs.run_start(key, self._lengths[key.table])

    def _run_end(self, run: Key) -> Key:
        return run._replace(item=run.item + self._lengths[run.table] - 1)
