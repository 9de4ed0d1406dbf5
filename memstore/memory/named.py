"""Named arrays and facts that belong to the memory itself, in the META table behind its header."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from memstore.errors import DamagedError, ForeignMemory, InvalidArgument
from memstore.memory.entry import FIRST_NAMED, LAST_ITEM, NAMED_VALUE
from memstore.memory.shared import Shared
from memstore.memory.tensors import TORCH_DTYPES, from_record, to_record
from memstore.store.contract import Batch, Key, Layout, Record, Table
from memstore.stored import anything, array, check_depth, fit, table, text

INFO = table(value=anything)
ARRAYS = table(arrays=array(text(1000), 254))


class Named:
    """Values under names. The first record of each is JSON ``{"kind", "name", ...}``, tensors follow it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known: dict[tuple[str, str], Key] = {}
        """Kind and name -> key of the values below ``_next``."""
        self._next = FIRST_NAMED.item
        self._lock = threading.Lock()

    def put_arrays(self, name: str, arrays: dict[str, Tensor]) -> None:
        """Store tensors under ``name``, replacing what was there, in one transaction."""
        records = [to_record(tensor) for tensor in arrays.values()]
        self._put("arrays", name, {"arrays": list(arrays)}, records)

    def get_arrays(self, name: str) -> dict[str, Tensor] | None:
        """The tensors under ``name``, or None."""
        found = self._find("arrays", name)
        if found is None:
            return None
        return _arrays(head_of(found[1]), found[1])

    def put_info(self, name: str, value: Any) -> None:
        """Store a small JSON value under ``name``, replacing what was there."""
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"the name of a fact must be a text that is not empty, not {name!r}.")
        try:
            json.dumps(value)
            check_depth(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"{name!r} must be a JSON value ({error}).") from None
        self._put("info", name, {"value": value}, [])

    def get_info(self, name: str) -> Any:
        """The JSON value under ``name``, or None."""
        found = self._find("info", name)
        return None if found is None else head_of(found[1])["value"]

    def all(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """All JSON values and all arrays, by their names."""
        info: dict[str, Any] = {}
        arrays: dict[str, dict[str, Tensor]] = {}
        for key in self._keys():
            records = self._shared.store.get(key)
            if records is None:
                continue
            head = head_of(records)
            if head["kind"] == "info":
                info[head["name"]] = head["value"]
            else:
                arrays[head["name"]] = _arrays(head, records)
        return info, arrays

    def share(self, other: Named) -> None:
        """Give another memory what it lacks of all this. Raises ``ForeignMemory`` where it has other arrays."""
        found = (self._shared.store.get(key) for key in self._keys())
        other.take((records for records in found if records is not None), self._shared.url)

    def take_all(self, info: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        """Store what is lacking of ``info`` and ``arrays``, which come from ``source``; see ``share``."""
        facts = [(_head("info", name, {"value": value}),) for name, value in info.items()]
        tensors = (
            (_head("arrays", name, {"arrays": list(each)}), *map(to_record, each.values()))
            for name, each in arrays.items()
        )
        self.take(chain(facts, tensors), source)

    def take(self, values: Iterable[tuple[Record, ...]], source: str) -> None:
        """Store those of ``values`` whose names are not there, in one transaction; see ``share``."""
        with self._shared.writing:
            self._read_new()
            batch, item = Batch(), self._next
            for records in values:
                head = head_of(records)
                key = self._known.get((head["kind"], head["name"]))
                if key is None:
                    batch.put(Key(Table.META, item=item), *records)
                    item += 1
                elif head["kind"] == "arrays" and _contents(self._shared.store.get(key) or ()) != _contents(records):
                    raise ForeignMemory(
                        f"memory {self._shared.url} has other arrays under the name {head['name']!r} than {source}, "
                        "so their states do not go together. Copy to a new memory."
                    )
            if batch.puts:
                self._shared.store.write(batch)

    def _put(self, kind: str, name: str, facts: dict[str, Any], records: list[Record]) -> None:
        with self._shared.writing:
            found = self._find(kind, name)
            batch = Batch()
            batch.put(
                Key(Table.META, item=self._next) if found is None else found[0], _head(kind, name, facts), *records
            )
            self._shared.store.write(batch)

    def _find(self, kind: str, name: str) -> tuple[Key, tuple[Record, ...]] | None:
        self._read_new()
        key = self._known.get((kind, name))
        records = None if key is None else self._shared.store.get(key)
        return None if key is None or records is None else (key, records)

    def _read_new(self) -> None:
        """Note the names of values that were stored since: they lie behind all others, and none is ever deleted."""
        with self._lock:
            for key in self._keys(self._next):
                records = self._shared.store.get(key)
                if records is not None:
                    head = head_of(records)
                    self._known.setdefault((head["kind"], head["name"]), key)
                self._next = key.item + 1

    def _keys(self, first: int = FIRST_NAMED.item) -> list[Key]:
        return self._shared.store.keys(Key(Table.META, item=first), Key(Table.META, item=LAST_ITEM))


def head_of(records: tuple[Record, ...]) -> dict[str, Any]:
    """What a named value says of itself. Raises ``DamagedError``."""
    head: dict[str, Any] = fit(records[0].to_json(), NAMED_VALUE, "a named value")
    if head["kind"] == "info":
        return fit(head, INFO, f"the value under the name {head['name']!r}")  # type: ignore[no-any-return]
    names = fit(head, ARRAYS, f"the value under the name {head['name']!r}")["arrays"]
    if len(names) != len(records) - 1 or any(record.layout.dtype not in TORCH_DTYPES for record in records[1:]):
        raise DamagedError(f"the arrays under the name {head['name']!r} are damaged; restore them from a copy")
    return head


def _arrays(head: dict[str, Any], records: tuple[Record, ...]) -> dict[str, Tensor]:
    return dict(zip(head["arrays"], map(from_record, records[1:]), strict=True))


def _head(kind: str, name: str, facts: Mapping[str, Any]) -> Record:
    return Record.from_json({"kind": kind, "name": name, **facts})


def _contents(records: tuple[Record, ...]) -> list[tuple[Layout, bytes]]:
    return [(record.layout, record.payload.tobytes()) for record in records]
