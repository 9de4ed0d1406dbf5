"""Named arrays and facts that belong to the memory itself, in the META table behind its header."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from memstore.errors import ForeignMemory, InvalidArgument
from memstore.memory.shared import Shared
from memstore.memory.state import FIRST_NAMED, LAST_ITEM
from memstore.memory.tensors import from_record, to_record
from memstore.store.contract import Batch, Key, Layout, Record, Table


class Named:
    """Values under names. The first record of each is JSON ``{"kind", "name", ...}``, tensors follow it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def put_arrays(self, name: str, arrays: dict[str, Tensor]) -> None:
        """Store tensors under ``name``, replacing what was there, in one transaction."""
        records = [to_record(tensor) for tensor in arrays.values()]
        self._put("arrays", name, {"arrays": list(arrays)}, records)

    def get_arrays(self, name: str) -> dict[str, Tensor] | None:
        """The tensors under ``name``, or None."""
        found = self._find("arrays", name)
        if found is None:
            return None
        head, *records = found[1]
        return dict(zip(head.to_json()["arrays"], map(from_record, records), strict=True))

    def put_info(self, name: str, value: Any) -> None:
        """Store a small JSON value under ``name``, replacing what was there."""
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{name!r} must be a JSON value ({error}).") from None
        self._put("info", name, {"value": value}, [])

    def get_info(self, name: str) -> Any:
        """The JSON value under ``name``, or None."""
        found = self._find("info", name)
        return None if found is None else found[1][0].to_json()["value"]

    def all(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """All JSON values and all arrays, by their names."""
        info: dict[str, Any] = {}
        arrays: dict[str, dict[str, Tensor]] = {}
        for key in self._keys():
            records = self._shared.store.get(key)
            if records is None:
                continue
            head, *rest = records[0].to_json(), *records[1:]
            if head["kind"] == "info":
                info[head["name"]] = head["value"]
            else:
                arrays[head["name"]] = dict(zip(head["arrays"], map(from_record, rest), strict=True))
        return info, arrays

    def share(self, other: Named) -> None:
        """Give another memory what it lacks of all this. Raises ``ForeignMemory`` where it has other arrays."""
        for key in self._keys():
            records = self._shared.store.get(key)
            if records is None:
                continue
            head = records[0].to_json()
            there = other._find(head["kind"], head["name"])
            if there is None:
                other._put(head["kind"], head["name"], head, list(records[1:]))
            elif head["kind"] == "arrays" and _contents(there[1]) != _contents(records):
                raise ForeignMemory(
                    f"memory {other._shared.url} has other arrays under the name {head['name']!r} than "
                    f"{self._shared.url}, so their states do not go together. Copy to a new memory."
                )

    def _put(self, kind: str, name: str, facts: dict[str, Any], records: list[Record]) -> None:
        with self._shared.writing:
            found = self._find(kind, name)
            item = (
                max((key.item for key in self._keys()), default=FIRST_NAMED.item - 1) + 1
                if found is None
                else found[0].item
            )
            head = Record.from_json({"kind": kind, "name": name, **facts})
            batch = Batch()
            batch.put(Key(Table.META, item=item), head, *records)
            self._shared.store.write(batch)

    def _find(self, kind: str, name: str) -> tuple[Key, tuple[Record, ...]] | None:
        for key in self._keys():
            records = self._shared.store.get(key)
            if records is not None:
                head = records[0].to_json()
                if (head["kind"], head["name"]) == (kind, name):
                    return key, records
        return None

    def _keys(self) -> list[Key]:
        return self._shared.store.keys(FIRST_NAMED, Key(Table.META, item=LAST_ITEM))


def _contents(records: tuple[Record, ...]) -> list[tuple[Layout, bytes]]:
    return [(record.layout, record.payload.tobytes()) for record in records]
