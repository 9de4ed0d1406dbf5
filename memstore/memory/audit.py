"""The check behind ``verify``: one pass over all values, then what they say about each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from memstore.errors import DamagedError, MemstoreError
from memstore.memory.header import Header, read_header
from memstore.memory.keeping import Keeping
from memstore.memory.layouts import block_layouts, run_layout, token_layout
from memstore.memory.state import FIRST_NAMED, HEADER, KEEPING, LAST_ITEM, NEXT_DOCUMENT, DocumentState
from memstore.store.checks import MAX_DOCUMENT
from memstore.store.contract import BlockStore, Key, Layout, Record, Scanned, Table

_MOST = 1000  # findings; a memory with more has one cause, and a list without end helps nobody


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a memory."""

    kind: str
    """``damaged`` (a value is not what was written), ``missing``, ``unknown`` (nothing refers to it), ``mismatch``
    (whole, but not what belongs there), or ``crash`` (the check itself could not go on)."""
    message: str
    """What was expected and what was found."""
    document: str | None = None
    """Name of the document, where there is one."""
    layer: int | None = None
    block: int | None = None
    """The block, or the first one of those concerned."""
    tokens: tuple[int, int] | None = None
    """Positions in the document that are concerned, first and last, both included."""


@dataclass
class _Seen:
    """Items of one (table, document, layer), as ranges: values come in order, so memory stays small."""

    ranges: list[range] = field(default_factory=list)

    def add(self, item: int) -> None:
        if self.ranges and self.ranges[-1].stop == item:
            self.ranges[-1] = range(self.ranges[-1].start, item + 1)
        else:
            self.ranges.append(range(item, item + 1))

    def outside(self, expected: range) -> list[range]:
        """What was seen and is not in ``expected``."""
        parts = [
            (range(r.start, min(r.stop, expected.start)), range(max(r.start, expected.stop), r.stop))
            for r in self.ranges
        ]
        return [part for pair in parts for part in pair if part]

    def lacking(self, expected: range) -> list[range]:
        """What is in ``expected`` and was not seen."""
        gaps, start = [], expected.start
        for seen in self.ranges:
            gaps.append(range(start, min(seen.start, expected.stop)))
            start = max(start, seen.stop)
        gaps.append(range(start, expected.stop))
        return [gap for gap in gaps if gap]


class Audit:
    """One check of one store. Raises ``MemstoreError`` only where the header cannot be read."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._header: Header = read_header(store, "this one")
        self.documents: dict[int, DocumentState] = {}
        """What the entries say that are sound, by the documents' numbers."""
        self.numbers: set[int] = set()
        """Numbers of documents that any value has."""
        self.unknown: list[tuple[Key, Key]] = []
        """First and last key of what nothing refers to."""
        self._seen: dict[tuple[Table, int, int], _Seen] = {}
        self._damaged_entries: set[int] = set()
        self._layouts = block_layouts(self._header.spec)
        self._findings: list[Finding] = []

    def run(self) -> list[Finding]:
        """All findings, values first, at most a thousand."""
        for finding in self._all():
            self._findings.append(finding)
            if len(self._findings) == _MOST:
                self._findings.append(
                    Finding(kind="crash", message=f"there are more than {_MOST} findings; the check stopped.")
                )
                break
        return self._findings

    def _all(self) -> Iterator[Finding]:
        try:
            for scanned in self._store.scan():
                yield from self._value(scanned)
        except MemstoreError as error:
            yield Finding(kind="crash", message=f"the values cannot all be read: {error}")
        for number, state in self.documents.items():
            yield from self._document(number, state)
        for (table, number, layer), seen in self._seen.items():
            if number not in self.documents:
                message = f"{len(seen.ranges)} runs of values in {table.name} belong to no document (number {number})"
                yield Finding(kind="unknown", message=message, layer=layer, block=seen.ranges[0].start)
                if number not in self._damaged_entries:
                    self.unknown.append((Key(table, number, layer), Key(table, number, layer, LAST_ITEM)))
        yield from self._next_document()

    def _value(self, scanned: Scanned) -> Iterator[Finding]:
        key = scanned.key
        if key.table != Table.META:
            self.numbers.add(key.document)
        if key.table not in (Table.META, Table.DOCUMENTS):
            # A damaged value is there all the same: it is reported once, as damaged, and not as missing too.
            self._seen.setdefault((key.table, key.document, key.layer), _Seen()).add(key.item)
        if scanned.damage is not None:
            if key.table == Table.DOCUMENTS:
                self._damaged_entries.add(key.document)
            yield self._damaged(key, scanned.damage)
            return
        try:
            problem = self._problem(key, scanned.records)
        except (KeyError, TypeError, ValueError, MemstoreError) as error:
            problem = f"its content makes no sense ({error})"
        if problem:
            if key.table == Table.DOCUMENTS:
                self._damaged_entries.add(key.document)
            yield self._finding("mismatch", key, problem)

    def _problem(self, key: Key, records: tuple[Record, ...]) -> str | None:
        """What is wrong with a whole value, by itself and by the entry of its document."""
        layouts = [record.layout for record in records]
        if key.table in (Table.TOKENS, Table.LANDMARKS) and key.document not in self.documents:
            return None  # how long it should be stands in the entry; that this is missing is a finding of its own
        match key.table:
            case Table.META:
                return self._meta_problem(key, records)
            case Table.DOCUMENTS:
                self.documents[key.document] = DocumentState.from_record(records[0])
                return None
            case Table.TOKENS:
                return _differs(layouts, [token_layout(self._tokens_of(key))])
            case Table.BLOCKS:
                return _differs(layouts, self._layouts)
            case Table.LANDMARKS:
                return _differs(layouts, [run_layout(self._header.spec, self._rows_of(key))])

    def _meta_problem(self, key: Key, records: tuple[Record, ...]) -> str | None:
        head = records[0].to_json()
        if key == HEADER:
            return None
        if key == NEXT_DOCUMENT:
            return None if isinstance(head["next_document"], int) else "the number of the next document is not a number"
        if key == KEEPING:
            Keeping.from_json(head)
            return None
        if key.item < FIRST_NAMED.item or key.document or key.layer:
            return "nothing of a memory belongs here"
        expected = 1 + len(head["arrays"]) if head["kind"] == "arrays" else 1
        return None if len(records) == expected else f"{head['name']!r} has {len(records)} records, not {expected}"

    def _tokens_of(self, key: Key) -> int:
        size = self._header.spec.block_size
        state = self.documents.get(key.document)
        return size if state is None else max(0, min(size, state.tokens - key.item * size))

    def _rows_of(self, key: Key) -> int:
        length = self._header.blocks_per_run
        state = self.documents.get(key.document)
        return length if state is None else max(0, min(length, state.blocks - key.item * length))

    def _document(self, number: int, state: DocumentState) -> Iterator[Finding]:
        spec = self._header.spec
        live = state.live()
        if -(-state.tokens // spec.block_size) != state.blocks or not 0 <= state.first <= state.blocks:
            message = f"{state.tokens} tokens do not make blocks {state.first} to {state.blocks} of {spec.block_size}"
            yield Finding(kind="mismatch", message=message, document=state.name)
        yield from self._compare(Table.TOKENS, number, 0, live)
        for layer in range(spec.layers):
            yield from self._compare(Table.BLOCKS, number, layer, live)
        length = self._header.blocks_per_run
        runs = range(live.start // length, -(-live.stop // length)) if live else range(0)
        for layer in spec.index_layers:
            yield from self._compare(Table.LANDMARKS, number, layer, runs)
        for table, known in ((Table.BLOCKS, range(spec.layers)), (Table.LANDMARKS, spec.index_layers)):
            there = {seen[2] for seen in self._seen if seen[:2] == (table, number)}
            for layer in sorted(there - set(known)):
                key = Key(table, number, layer)
                self.unknown.append((key, key._replace(item=LAST_ITEM)))
                yield self._finding("unknown", key, f"layer {layer} has values it should not have")

    def _compare(self, table: Table, number: int, layer: int, expected: range) -> Iterator[Finding]:
        seen = self._seen.get((table, number, layer), _Seen())
        for gap in seen.lacking(expected):
            yield self._finding(
                "missing", Key(table, number, layer, gap.start), _items(table, gap, "missing"), len(gap)
            )
        for extra in seen.outside(expected):
            key = Key(table, number, layer, extra.start)
            self.unknown.append((key, key._replace(item=extra.stop - 1)))
            yield self._finding("unknown", key, _items(table, extra, "there, and no entry refers to them"), len(extra))

    def _next_document(self) -> Iterator[Finding]:
        """A new document must not get the number of another one."""
        last = max(self.numbers, default=0)
        try:
            records = self._store.get(NEXT_DOCUMENT)
            following = records[0].to_json()["next_document"] if records else 1
            if last < following:
                return
        except (MemstoreError, LookupError, TypeError, ValueError):
            return  # damaged, which is reported already
        message = f"the next document would get number {following}, and there are documents up to number {last}"
        yield Finding(kind="mismatch", message=message)

    def _damaged(self, key: Key, damage: DamagedError) -> Finding:
        return self._finding("damaged", key, str(damage))

    def _finding(self, kind: str, key: Key, message: str, items: int = 1) -> Finding:
        """A finding about ``items`` values from ``key`` on, in the words of a user: document, layer, block, tokens."""
        if key.document > MAX_DOCUMENT:  # not of a memory but of its store, which says so
            return Finding(kind=kind, message=message)
        if key.table in (Table.META, Table.DOCUMENTS):
            return Finding(kind=kind, message=f"{key.table.name} {key.document or key.item}: {message}")
        state = self.documents.get(key.document)
        name = None if state is None else state.name
        length = self._header.blocks_per_run if key.table == Table.LANDMARKS else 1
        first, last = key.item * length, (key.item + items) * length - 1
        size = self._header.spec.block_size
        place = f"document {name!r}, layer {key.layer}, {key.table.name.lower()} of block {first}"
        return Finding(
            kind=kind,
            message=f"{place}: {message}",
            document=name,
            layer=None if key.table == Table.TOKENS else key.layer,
            block=first,
            tokens=(first * size, (last + 1) * size - 1),
        )


def _differs(found: list[Layout], expected: list[Layout]) -> str | None:
    return None if found == expected else f"expected {_words(expected)}, found {_words(found)}"


def _words(layouts: list[Layout]) -> str:
    return ", ".join(f"{layout.dtype} {json.dumps(layout.shape)}" for layout in layouts)


def _items(table: Table, items: range, what: str) -> str:
    noun = "runs" if table == Table.LANDMARKS else "blocks"
    return f"{noun} {items.start} to {items.stop - 1} are {what}"
