"""Check every value of a memory in one pass, then check that the values agree with each other.

Run as ``python -m memstore.memory.verify PATH``, it prints one JSON object per finding and ``{"done": true}`` at the
end. ``Memory.verify`` runs it in this way, because damage to the tree around the values can kill the process that walks
it. For example, a page number past the end of the map is a bus error, not an exception.
"""

from __future__ import annotations

import json
import os
import reprlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from memstore.errors import DamagedError, MemstoreError, NotFound, Remedy, WrongKey
from memstore.json_checks import fit
from memstore.memory.entry import (
    BRANCH,
    FIRST_NAMED,
    HASH_BYTES,
    HASHES_PER_RUN,
    HEADER,
    KEEPING,
    NAMED_VALUE,
    NEXT_DOCUMENT,
    NEXT_DOCUMENT_VALUE,
    Address,
    DocumentState,
    Home,
    Homes,
    Places,
    common,
    lacking,
    merged,
)
from memstore.memory.rules import STORED, Rules
from memstore.memory.spec import (
    Header,
    Room,
    beginning,
    block_layouts,
    broken,
    plain_layouts,
    read_header,
    run_layout,
    token_layout,
)
from memstore.memory.urls import folder, open_locked, open_unchecked
from memstore.memory.usage import Usage, clipped
from memstore.paths import python_module
from memstore.store.contract import BlockStore
from memstore.store.encryption_keys import MasterKey, key_of_environment, lacks_key, owners_told
from memstore.store.records import MAX_DOCUMENT, MAX_ITEM, Key, Layout, Record, ScannedValue, Table

_UNREADABLE = (DamagedError, LookupError, TypeError, ValueError)
_MOST = 1000  # findings; more of them have one cause, and an endless list helps nobody
_ATTEMPTS = 5
DONE = {"done": True}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of a memory."""

    kind: str
    """The kind of fault: ``damaged``, ``missing``, ``unknown``, ``mismatch``, ``index`` or ``crash``.

    A ``damaged`` value has changed, and nothing refers to an ``unknown`` one. A ``mismatch`` is intact, but wrong for
    its place. With ``index``, an index file is damaged: it is built again, and nothing is lost. With ``crash``, the
    tree around the values is damaged, or the check could not continue.
    """
    message: str
    """The expected value, and the one found."""
    document: str | None = None
    """Name of the document, if there is one."""
    layer: int | None = None
    block: int | None = None
    """The affected block, or the first of several."""
    tokens: tuple[int, int] | None = None
    """Affected positions in the document, first and last, both included."""
    table: str | None = None
    """The faulty part of a document: ``tokens``, ``blocks``, ``landmarks``, ``history``, or ``recurrent``.

    A ``recurrent`` state can be computed again.
    """
    remedy: Remedy | None = None
    """``"restore"``, ``"repair"``, ``"verify"`` (check again): see ``MemstoreError``. None: use ``memstore repair``."""


@dataclass
class _Items:
    """Items of one (table, document, layer), as ranges: values come in order, so memory stays small."""

    ranges: list[range] = field(default_factory=list)

    def add(self, item: int) -> None:
        if self.ranges and self.ranges[-1].stop == item:
            self.ranges[-1] = range(self.ranges[-1].start, item + 1)
        else:
            self.ranges.append(range(item, item + 1))

    def outside(self, expected: list[range]) -> list[range]:
        """Return the items that were seen and are not in ``expected``."""
        return [extra for seen in self.ranges for extra in lacking(seen, expected)]


class Check:
    """One check of one store. Raises ``MemstoreError`` only if the header cannot be read."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._header: Header = read_header(store, "this one")
        self._room = Room(store, self._header.spec)
        self.documents: dict[int, DocumentState] = {}
        """Document number -> its sound entry."""
        self.damaged_entries: set[int] = set()
        """Numbers of the documents with damaged entries."""
        self.damaged_branches: set[int] = set()
        """Homes whose stored branch cannot be read."""
        self.branches: dict[int, Any] = {}
        """Home number -> its stored branch."""
        self.numbers: set[int] = set()
        """Numbers that have any values."""
        self.unknown: list[tuple[Key, Key]] = []
        """First and last keys of values without a reference, and of damaged values that nothing needs.

        Unreliable while there are damaged entries.
        """
        self._homes = Homes(store)
        self._places: dict[int, Home] = {}
        self._layers: dict[tuple[Table, int], set[int]] = {}
        """Table and number -> layers that have values."""
        self._seen: dict[tuple[Table, int, int], _Items] = {}
        self._complete, self._incomplete = block_layouts(self._header.spec), plain_layouts(self._header.spec)
        self._findings: list[Finding] = []

    def run(self) -> list[Finding]:
        """Return all findings, values first, at most a thousand."""
        for finding in self._all():
            self._findings.append(finding)
            if len(self._findings) == _MOST:
                self._findings.append(
                    Finding(kind="crash", message=f"there are more than {_MOST} findings; the check stopped there.")
                )
                break
        return self._findings

    def _all(self) -> Iterator[Finding]:
        try:
            for scanned in self._store.scan():
                yield from self._value(scanned)
        except MemstoreError as error:
            yield Finding(kind="crash", message=f"some values cannot be read: {error}", remedy=error.remedy)
        for state in self.documents.values():
            for message in self._contradictions(state):
                yield Finding(kind="mismatch", message=message, document=state.name)
        for owner in self._owners:
            yield from self._owned(owner)
        for (table, owner, layer), seen in self._seen.items():
            if owner not in self._owners:
                message = f"{len(seen.ranges)} runs of values in {table.name} belong to no document (number {owner})"
                yield Finding(kind="unknown", message=message, layer=layer, block=seen.ranges[0].start)
                self.unknown.append((Key(table, owner, layer), Key(table, owner, layer, MAX_ITEM)))
        yield from self._branches()
        yield from self._next_document()
        yield from self._histories()

    @property
    def orphans(self) -> list[int]:
        """Numbers that have token ids and no document."""
        return sorted({owner for table, owner, _ in self._seen if table == Table.TOKENS and owner not in self._owners})

    @cached_property
    def _usage(self) -> Usage:
        """The blocks that documents use. Entries come before all other values, so all are known."""
        usage = Usage()
        for number, state in self.documents.items():
            usage.put(number, self._home(number), state.present())
        return usage

    @cached_property
    def _hashed(self) -> Usage:
        """The blocks whose hashes a document needs: complete ones, in documents with a digest."""
        usage, size = Usage(), self._header.spec.block_size
        for number, state in self.documents.items():
            whole = 0 if state.digest is None else state.tokens // size
            usage.put(number, self._home(number), clipped(state.present(), range(whole)))
        return usage

    def _home(self, number: int) -> Home:
        """Return the home of a document. If its branch is damaged, the shared blocks are lost."""
        if number not in self._places:
            state = self.documents[number]
            try:
                self._places[number] = self._homes.of(number, state)
            except _UNREADABLE:
                self._places[number] = Home(number if state.home is None else state.home)
        return self._places[number]

    @cached_property
    def _owners(self) -> dict[int, list[range]]:
        """Number -> its blocks in use."""
        usage = self._usage
        return {owner: usage.used(owner) for owner in {*self.documents, *usage.owners()}}

    @cached_property
    def _hashes_of(self) -> dict[int, list[range]]:
        return {owner: self._hashed.used(owner) for owner in self._hashed.owners()}

    def _value(self, scanned: ScannedValue) -> Iterator[Finding]:
        key = scanned.key
        if key.table != Table.META:
            self.numbers.add(key.document)
        if key.table not in (Table.META, Table.DOCUMENTS):
            # A damaged value still exists: it is reported once, as damaged, and not as missing too.
            self._seen.setdefault((key.table, key.document, key.layer), _Items()).add(key.item)
            self._layers.setdefault((key.table, key.document), set()).add(key.layer)
        damage = scanned.damage
        problem = None if damage is None else str(damage)
        kind, remedy = ("mismatch", None) if damage is None else ("damaged", damage.remedy)
        if problem is None:
            try:
                problem = self._problem(key, scanned.records)
            except (KeyError, TypeError, ValueError, MemstoreError) as error:
                problem = f"its content is invalid ({error})"
        if problem is not None and key.document > MAX_DOCUMENT:  # a fault of the whole tree: see ``BlockStore.scan``
            yield Finding(kind="crash", message=problem, remedy=remedy)
        elif problem is not None:
            if key.table == Table.DOCUMENTS:
                self.damaged_entries.add(key.document)
            if key.document and key == Address(key.document).branch:
                self.damaged_branches.add(key.document)
            if key.table == Table.RECURRENT:
                self.unknown.append((key, key))
            yield from (replace(finding, remedy=remedy) for finding in self._named(kind, key, problem))

    def _problem(self, key: Key, records: tuple[Record, ...]) -> str | None:
        """Return the fault of an intact value, by itself or against the entry of its document."""
        layouts = [record.layout for record in records]
        if key.table not in (Table.META, Table.DOCUMENTS, Table.RECURRENT) and not self._used(key):
            return None  # an unused value is a finding of its own
        match key.table:
            case Table.META:
                return self._meta_problem(key, records)
            case Table.DOCUMENTS:
                state = DocumentState.from_record(records[0])
                if not self._room.holds(state):
                    return f"{state.tokens:,} tokens in {state.blocks:,} blocks are more than the whole memory has"
                self.documents[key.document] = state
                return None
            case Table.TOKENS:
                return _differs(layouts, [token_layout(self._tokens_of(key))])
            case Table.BLOCKS:
                return _differs(layouts, self._layouts_of(key, layouts))
            case Table.LANDMARKS:
                return _differs(layouts, [run_layout(self._header.spec, self._rows_of(key))])
            case Table.RECURRENT:
                return _differs(layouts, list(self._header.spec.recurrent))
            case Table.HISTORY:
                # A document that lost its digest may have left its hashes here.
                least, most = self._rows_of(key), self._rows_of(key, Table.LANDMARKS)
                rows = min(max(least, layouts[0].shape[0]), most)
                return _differs(layouts, [Layout("uint8", (rows, HASH_BYTES))])

    def _meta_problem(self, key: Key, records: tuple[Record, ...]) -> str | None:
        head = records[0].to_json()
        if key == HEADER:
            return None
        if key == NEXT_DOCUMENT:
            fit(head, NEXT_DOCUMENT_VALUE, "the number of the next document")
            return None
        if key == KEEPING:
            Rules.from_dict(head, STORED)
            return None
        if 0 < key.document <= MAX_DOCUMENT and key == Address(key.document).branch:
            self.branches[key.document] = head
            fit(head, BRANCH, "the stored branch of a document")
            whole = "spans" in head or {"parent", "stop"} < head.keys()
            return None if whole else "it does not name the document that it branches off from"
        if key.item < FIRST_NAMED.item or key.document or key.layer:
            return "memstore stores nothing under this key"
        fit(head, NAMED_VALUE, "a named value")
        expected = 1 + len(head["arrays"]) if head["kind"] == "arrays" else 1
        return None if len(records) == expected else f"{head['name']!r} has {len(records)} records, expected {expected}"

    def _layouts_of(self, key: Key, found: list[Layout]) -> list[Layout]:
        """Return the expected layouts of a block: while incomplete, it is stored without a codec."""
        if key.document not in self.documents:
            return self._incomplete if found == self._incomplete else self._complete
        complete = self._tokens_of(key) == self._header.spec.block_size
        return self._complete if complete else self._incomplete

    def _tokens_of(self, key: Key) -> int:
        size, writer = self._header.spec.block_size, self._usage.own(key.document)
        # Shared blocks are complete. Only the last block of the document that writes here can be incomplete.
        return size if writer is None else max(0, min(size, self.documents[writer].tokens - key.item * size)) or size

    def _rows_of(self, key: Key, table: Table | None = None) -> int:
        """Return the rows of a run, up to the last block in use; 0 for hashes that nobody needs.

        ``table`` counts as if the run belonged to it.
        """
        run = self._blocks_of(key, 1)
        used = (self._hashes_of if (table or key.table) == Table.HISTORY else self._owners).get(key.document, [])
        start = max(run.start, self._usage.base(key.document))
        return max((blocks.stop - start for blocks in clipped(used, run)), default=0)

    def _length(self, table: Table) -> int:
        """Return the number of blocks in one item of a table."""
        return {Table.LANDMARKS: self._header.blocks_per_run, Table.HISTORY: HASHES_PER_RUN}.get(table, 1)

    def _blocks_of(self, key: Key, items: int) -> range:
        if key.table == Table.RECURRENT:  # an item is a number of tokens
            last = max(key.item - 1, 0) // self._header.spec.block_size
            return range(last, last + 1)
        length = self._length(key.table)
        return range(key.item * length, (key.item + items) * length)

    def _used(self, key: Key) -> bool:
        blocks = self._blocks_of(key, 1)
        return any(common(part, blocks) for part in self._owners.get(key.document, []))

    def _contradictions(self, state: DocumentState) -> Iterator[str]:
        """Yield contradictions in an entry, beside those that ``DocumentState.check`` finds."""
        size, full = self._header.spec.block_size, state.tokens // self._header.spec.block_size
        if -(-state.tokens // size) != state.blocks:
            yield f"{state.tokens} tokens do not fit blocks {state.first} to {state.blocks} of {size} tokens"
        if state.spans and state.spans[-1][2] > full:
            yield f"the spans {reprlib.repr(list(state.spans))} go beyond its last complete block"
        if state.branch is not None and not 0 < state.branch[1] <= full:
            yield f"it claims to share {state.branch[1]} blocks, but it has fewer complete ones"
        edges = [0, *(edge for part in state.dropped for edge in part)]
        if edges != sorted(edges) or edges[-1] > full or (state.dropped and state.digest):
            told = reprlib.repr(list(state.dropped))
            yield f"the blocks recorded as removed, {told}, are not blocks of the document"

    def _branches(self) -> Iterator[Finding]:
        """Compare the stored branches of homes with the entries."""
        for number, expected in self.lost_branches().items():
            message = f"expected {json.dumps(expected)} for number {expected['document']}, found another value or none"
            yield Finding(kind="mismatch", message=message, document=self.documents[number].name)
        for home in self.branches.keys() - set(self._usage.owners()):
            yield Finding(
                kind="unknown", message=f"there is a branch for number {home}, but no document has blocks there"
            )
            self.unknown.append((Address(home).branch, Address(home).branch))

    def lost_branches(self) -> dict[int, dict[str, int]]:
        """Return document number -> the branch that its home lacks."""
        lost = {}
        for number, state in self.documents.items():
            if state.branch is not None:
                expected = {"document": number, "parent": state.branch[0], "stop": state.branch[1]}
                if self.branches.get(number if state.home is None else state.home) != expected:
                    lost[number] = expected
        return lost

    def _owned(self, owner: int) -> Iterator[Finding]:
        """Compare the values under one number with the expected ones."""
        spec, blocks = self._header.spec, self._owners[owner]
        yield from self._compare(Table.TOKENS, owner, 0, blocks)
        for layer in range(spec.layers):
            yield from self._compare(Table.BLOCKS, owner, layer, blocks)
        for layer in spec.index_layers:
            yield from self._compare(Table.LANDMARKS, owner, layer, blocks)
        yield from self._compare(Table.HISTORY, owner, 0, self._hashes_of.get(owner, []), allowed=blocks)
        state = self.documents.get(owner) if spec.recurrent else None
        places = [] if state is None else [range(1, state.tokens + 1)]
        yield from self._compare(Table.RECURRENT, owner, 0, [], allowed=places)
        layers = {Table.BLOCKS: range(spec.layers), Table.LANDMARKS: spec.index_layers, Table.RECURRENT: (0,)}
        for table, known in layers.items():
            for layer in sorted(self._layers.get((table, owner), set()) - set(known)):
                key = Key(table, owner, layer)
                self.unknown.append((key, key._replace(item=MAX_ITEM)))
                yield from self._named("unknown", key, f"layer {layer} has values, but should have none")

    def _compare(
        self, table: Table, owner: int, layer: int, blocks: list[range], *, allowed: list[range] | None = None
    ) -> Iterator[Finding]:
        """Compare the existing items with those that ``blocks`` need; ``allowed`` blocks may have them too."""
        length, seen = self._length(table), self._seen.get((table, owner, layer), _Items())
        needed = [_items_of(part, length) for part in blocks]
        for gap in {gap: None for part in needed for gap in lacking(part, seen.ranges)}:
            yield from self._named(
                "missing", Key(table, owner, layer, gap.start), _items(table, gap, "missing"), len(gap)
            )
        for extra in seen.outside(needed if allowed is None else [_items_of(part, length) for part in allowed]):
            key = Key(table, owner, layer, extra.start)
            self.unknown.append((key, key._replace(item=extra.stop - 1)))
            what = _items(table, extra, "stored, but no entry refers to them")
            yield self._finding("unknown", key, what, self._blocks_of(key, len(extra)), self.documents.get(owner))

    def _next_document(self) -> Iterator[Finding]:
        """Check that a new document, or home, cannot get a number that was used before."""
        last = max(self.numbers, default=0)
        try:
            records = self._store.get(NEXT_DOCUMENT)
            following = records[0].to_json()["next_document"] if records else 1
            if last < following:
                return
        except (MemstoreError, LookupError, TypeError, ValueError):
            return  # damaged, and reported already
        message = f"the next document would get number {following}, but there are documents up to number {last}"
        yield Finding(kind="mismatch", message=message)

    def _named(self, kind: str, key: Key, message: str, items: int = 1) -> Iterator[Finding]:
        """Yield a finding about ``items`` values from ``key`` on, for each document that uses any of them."""
        blocks = self._blocks_of(key, items)
        if key.table in (Table.META, Table.DOCUMENTS):
            yield Finding(kind=kind, message=f"{key.table.name} {key.document or key.item}: {message}")
        elif key.table != Table.RECURRENT and (
            users := list(islice(self._usage.documents(key.document, blocks), _MOST))
        ):
            for number, part in users:
                yield self._finding(kind, key, message, part, self.documents[number])
        else:
            yield self._finding(kind, key, message, blocks, self.documents.get(key.document))

    def _finding(self, kind: str, key: Key, message: str, blocks: range, state: DocumentState | None) -> Finding:
        """Return a finding in the words of a user: document, layer, block, tokens."""
        name, size = None if state is None else state.name, self._header.spec.block_size
        place = f"document {name!r}, layer {key.layer}, {key.table.name.lower()} of block {blocks.start}"
        return Finding(
            kind=kind,
            message=f"{place}: {message}",
            document=name,
            layer=None if key.table in (Table.TOKENS, Table.HISTORY, Table.RECURRENT) else key.layer,
            block=blocks.start,
            tokens=(blocks.start * size, blocks.stop * size - 1),
            table=key.table.name.lower(),
        )

    def _histories(self) -> Iterator[Finding]:
        """Compute the hashes of all documents again, those of shared blocks only once."""
        checked: dict[int, list[range]] = {}
        for number, state in self.documents.items():
            if state.digest is None:
                continue
            places = Places(number, state, self._home(number))
            complete, gaps = state.complete(self._header.spec.block_size), list[range]()
            for owner, blocks in places.node.pieces(complete):
                new = lacking(blocks, checked.get(owner, []))
                if not new and not state.first:
                    break  # once these are checked, the earlier ones are too
                # Missing tokens were reported already, and the number of such blocks may be huge.
                there = self._seen.get((Table.TOKENS, owner, 0), _Items()).ranges
                gaps += [part for gap in new for seen in there if (part := common(gap, seen))]
                if not state.first:
                    checked[owner] = merged([*checked.get(owner, []), blocks])
            for gap in gaps[::-1]:
                for start in range(gap.start, gap.stop, HASHES_PER_RUN):
                    yield from self._history(state, places, range(start, min(start + HASHES_PER_RUN, gap.stop)))
            yield from self._digest(state, places, complete)

    def _history(self, state: DocumentState, places: Places, blocks: range) -> Iterator[Finding]:
        layout = token_layout(self._header.spec.block_size)
        ids = np.empty((len(blocks), layout.nbytes), np.uint8)
        try:
            self._store.read(places.all_tokens(blocks), [layout], [ids])
            known = blocks.start > state.first or not blocks.start
            start = self._hash_before(state, places, blocks.start) if known else None
            wrong = list(broken(blocks, self._hashes(places, blocks), ids, start))
        except (DamagedError, NotFound):
            return  # reported already, as damaged or missing
        for block in wrong:
            message = "the token ids, or the hash, do not fit the history of the document"
            yield from self._named("mismatch", Key(Table.TOKENS, places.owner(block), 0, block), message)

    def _digest(self, state: DocumentState, places: Places, complete: range) -> Iterator[Finding]:
        """Compare the digest in the entry with the last stored hash."""
        if not complete and state.first:
            return
        try:
            found = self._hash_before(state, places, complete.stop).hex()
        except DamagedError:
            return
        if found != state.digest:
            message = f"the digest of document {state.name!r} is {state.digest}, but its tokens give {found}"
            yield Finding(kind="mismatch", message=message, document=state.name)

    def _hash_before(self, state: DocumentState, places: Places, block: int) -> bytes:
        """Return the stored hash of everything before ``block``. Raises ``DamagedError``."""
        if not block:
            return beginning(self._header.spec.fingerprint, state.reading)
        (found,) = self._hashes(places, range(block - 1, block))
        return found

    def _hashes(self, places: Places, blocks: range) -> Iterator[bytes]:
        """Return the stored hashes of ``blocks``. Raises ``DamagedError``."""
        for owner, part in places.pieces(blocks):
            for run, together in groupby(part, lambda block: block // HASHES_PER_RUN):
                records = self._store.get(Key(Table.HISTORY, owner, 0, run))
                stored = records[0].payload.tobytes() if records else b""
                start = max(run * HASHES_PER_RUN, places.node.at(part.start).base)
                for place in ((block - start) * HASH_BYTES for block in together):
                    if len(stored) < place + HASH_BYTES:
                        raise DamagedError(f"some hashes of run {run} of number {owner} are missing")
                    yield stored[place : place + HASH_BYTES]


def _items_of(blocks: range, length: int) -> range:
    """Return the items that hold ``blocks``, with ``length`` blocks each."""
    return range(blocks.start // length, -(-blocks.stop // length)) if blocks else range(0)


def _differs(found: list[Layout], expected: list[Layout]) -> str | None:
    return None if found == expected else f"expected {_words(expected)}, found {_words(found)}"


def _words(layouts: list[Layout]) -> str:
    return ", ".join(f"{layout.dtype} {json.dumps(layout.shape)}" for layout in layouts)


def _items(table: Table, items: range, what: str) -> str:
    noun = "runs" if table in (Table.LANDMARKS, Table.HISTORY) else "blocks"
    return f"{noun} {items.start} to {items.stop - 1} are {what}"


def check(store: BlockStore) -> list[Finding]:
    """Check a store in this process. Never raises ``MemstoreError``: an error that stops the check is a finding."""
    return _settled(store, lambda: Check(store).run())


def check_ciphertext(store: BlockStore, keys: Path) -> list[Finding]:
    """Check an encrypted memory without its key: every checksum, and that every number has its wrapped key."""
    return _settled(store, lambda: _ciphertext(store, keys))


def _settled(store: BlockStore, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Repeat a check that has findings if a writer has committed meanwhile: it compared values of different commits."""
    findings: list[Finding] = []
    for _ in range(_ATTEMPTS):
        version = store.version()
        try:
            findings = check()
        except MemstoreError as error:
            return [Finding(kind="damaged", message=str(error), remedy=error.remedy)]
        if not findings or store.version() == version:
            return findings
    # Each damaged value was read by itself. The other findings are from comparisons.
    message = f"the memory changed during each of {_ATTEMPTS} checks. Stop its writer, and verify again"
    alone = [each for each in findings if each.kind in ("damaged", "crash")]
    return [*alone, Finding(kind="crash", message=message, remedy="verify")]


def _ciphertext(store: BlockStore, keys: Path) -> list[Finding]:
    findings, owners = [], set[int]()
    try:
        for scanned in store.scan():
            if scanned.damage is None:
                owners.add(scanned.key.document)
            else:  # a fault of the tree, reported under one of the store's own numbers
                findings.append(Finding(kind="damaged", message=str(scanned.damage), remedy=scanned.damage.remedy))
        lost = sorted(owners - owners_told(keys))
    except MemstoreError as error:
        return [*findings, Finding(kind="damaged", message=str(error), remedy=error.remedy)]
    return [*findings, *(Finding(kind="missing", message=str(lacks_key(each)), remedy="restore") for each in lost)]


def damaged_indexes(url: str) -> list[Finding]:
    """Find faults of the indexes kept beside a memory on disk."""
    path = folder(url)
    if path is None or not os.path.lexists(path / "index"):
        return []
    # Indexes need torch. Without it, a check of a memory that has none starts in a tenth of the time.
    from memstore.memory.index_files import damaged, folder_of

    found = damaged(folder_of(path))
    return [Finding(kind="index", message=f"{what} It is rebuilt when it is needed.") for _, what in found]


def in_child(path: str, key: MasterKey | None = None) -> list[Finding]:
    """Check the memory in folder ``path`` in a child process, whose crash is a finding too.

    Without ``key``, here or in the environment, an encrypted memory gets only the checks that need none.
    """
    command = [*python_module("memstore.memory.verify"), "--", path]
    lines, crash = lines_of_child(command, "" if key is None else key.raw.hex())
    findings = [_from_json(line) for line in lines]
    if crash is not None:
        message = (
            f"the process that checked the memory was ended {crash}. Probably the tree of its values is damaged, "
            f"so not every value could be read. Save the readable part: memstore repair {quote(path)} --to NEW"
        )
        findings.append(Finding(kind="crash", message=message, remedy="repair"))
    return findings


def lines_of_child(command: list[str], order: str = "") -> tuple[list[dict[str, Any]], str | None]:
    """Yield the JSON objects that a child prints, one per line; if it ends before its last line, also how it ended."""
    child = subprocess.run(command, input=order, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    # A killed child may have left half a line: only whole ones count.
    lines = [json.loads(line) for line in child.stdout.splitlines(keepends=True) if line.endswith("}\n")]
    if not child.returncode and DONE in lines:
        return [line for line in lines if line != DONE], None
    code = child.returncode
    reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    words = child.stderr.strip().splitlines()[-1:] or ["without a message"]
    return [line for line in lines if line != DONE], f"{reason} ({words[0]})"


def say(line: Mapping[str, object]) -> None:
    """Print a line for ``lines_of_child``."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _from_json(line: dict[str, Any]) -> Finding:
    tokens = line.pop("tokens")
    return Finding(**line, tokens=None if tokens is None else (tokens[0], tokens[1]))


def main(path: str, key: MasterKey | None) -> None:
    """Check the memory at ``path`` (a folder, or ``zarr:`` and one) and print the findings."""
    try:
        store = open_unchecked(path, key)  # a scan finds more details of a damaged tree
    except WrongKey as error:
        findings = [Finding(kind="damaged", message=str(error))]
        if (key or key_of_environment()) is None and (keys := folder(path)):
            findings = check_ciphertext(open_locked(path), keys)
    except MemstoreError as error:
        findings = [Finding(kind="damaged", message=str(error), remedy=error.remedy)]
    else:
        findings = [*check(store), *damaged_indexes(path)]
        store.close()
    for finding in findings:
        say(asdict(finding))
    say(DONE)


if __name__ == "__main__":
    # Never an argument, which other users of the machine could see.
    told = "" if sys.stdin.isatty() else sys.stdin.read()
    main(sys.argv[-1], MasterKey(bytes.fromhex(told)) if told else None)
