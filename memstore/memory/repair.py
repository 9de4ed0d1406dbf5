"""Repair a damaged memory by the findings of ``verify``, never by guessing.

A document with damaged, missing or wrong values keeps its longest sound prefix or, on request, everything but the
damaged blocks. If its entry is damaged, its other values still show its length, so only its name is lost. Values
without a reference are removed. Faults beyond repair stay, and are reported.

A dropped block is listed in the document's entry. It cannot be found, gathered or rewritten. Later blocks keep their
numbers and their states, which were computed while it was whole. Blocks at the end of a document are cut off instead,
so a further reading starts with whole blocks. The hash of a history is a chain over all tokens. With dropped blocks
some of them are missing, so the document loses its digest. It is never matched with another text, and its token ids are
checked only by their checksums. The same happens if only hashes are damaged; then no block is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, pairwise
from shlex import quote

from memstore.errors import DamagedError
from memstore.memory.append import moved
from memstore.memory.document import Document
from memstore.memory.entry import (
    HASHES_PER_RUN,
    KEEPING,
    NEXT_DOCUMENT,
    Address,
    DocumentState,
    Home,
    Places,
    common,
    merged,
)
from memstore.memory.index_files import damaged, folder_of, remove
from memstore.memory.rules import lost_keys
from memstore.memory.shared import SharedStore, next_document_record
from memstore.memory.urls import folder
from memstore.memory.usage import Deletion
from memstore.memory.verify import Check, Finding
from memstore.store.records import MAX_ITEM, MAX_LAYER, Batch, Key, Record, Table

Cure = Callable[[list[Finding], bool], "Iterable[RepairStep]"]
_ROUNDS = 5  # a repair can reveal more faults: first an entry, then the blocks it refers to
_UNREADABLE = (DamagedError, LookupError, TypeError, ValueError)  # raised by damaged or unexpected JSON
_FIRST_AGAIN = 1000  # numbers to skip if the last used one is unknown, because none is ever used twice


@dataclass(frozen=True, kw_only=True)
class RepairStep:
    """One step of a repair, done or planned."""

    message: str
    document: str | None = None
    """Name of the document, if there is one."""
    tokens_lost: int = 0
    """Number of the document's tokens that are lost."""


@dataclass(frozen=True, kw_only=True)
class RepairOutcome:
    """The outcome of a repair."""

    steps: list[RepairStep]
    left: list[Finding]
    """Remaining faults; after a dry run, all of them."""


class Repair:
    """One repair of one open memory. The caller holds ``SharedStore.writing``."""

    def __init__(
        self, shared: SharedStore, document: Callable[[str], Document], verify: Callable[[], list[Finding]]
    ) -> None:
        self._shared = shared
        self._document = document
        self._verify = verify

    def run(self, *, dry_run: bool, drop_blocks: bool = False) -> RepairOutcome:
        """Repair as much as possible. Raises ``DamagedError`` if even the keys cannot be walked.

        Also for values that may be intact: those that cannot be read now, or only with a file from a copy.
        """
        cure = self._drops if drop_blocks else self._truncations
        findings, steps = self._verify(), list[RepairStep]()
        for _ in range(_ROUNDS):
            if kept := next((finding for finding in findings if finding.remedy in ("verify", "restore")), None):
                raise DamagedError(
                    f"memory {self._shared.url} was not repaired, because a repair would delete data that may be "
                    f"intact: {kept.message}. Or save what can be read: memstore repair {quote(self._shared.url)} "
                    "--to NEW",
                    memory=self._shared.url,
                    remedy=kept.remedy,
                )
            if any(finding.kind == "crash" for finding in findings):
                raise DamagedError(
                    f"memory {self._shared.url} cannot be repaired in place: the tree of its values is damaged. "
                    f"Save the readable part: memstore repair {quote(self._shared.url)} --to NEW",
                    memory=self._shared.url,
                    remedy="repair",
                )
            done = self._round(findings, cure, dry_run) if findings else []
            steps += done
            if dry_run or not done:
                break
            findings = self._verify()
        return RepairOutcome(steps=steps, left=findings)

    def _round(self, findings: list[Finding], cure: Cure, dry_run: bool) -> list[RepairStep]:
        """Repair the faults that do not depend on others."""
        check = Check(self._shared.store)
        check.run()
        batch = Batch()
        steps = [*self._numbers(batch, check), *self._rules(batch), *self._entries(batch, check)]
        steps += self._branches(batch, check)
        if steps:
            if not dry_run:
                self._shared.store.write(batch)
                self._shared.catalog.clear()
            return steps
        steps = list(self._unknown(batch, check.unknown))
        if batch.deletes and not dry_run:
            self._shared.store.write(batch)
        return [*steps, *self._indexes(findings, dry_run), *cure(findings, dry_run)]

    def _numbers(self, batch: Batch, check: Check) -> Iterator[RepairStep]:
        """Restore the number of the next document."""
        last = max(check.numbers, default=0)
        try:
            if self._shared.next_document() > last:
                return
        except _UNREADABLE:
            pass
        batch.put(NEXT_DOCUMENT, next_document_record(last + _FIRST_AGAIN))
        yield RepairStep(message=f"the number of the next document was lost; the new number is {last + _FIRST_AGAIN}")

    def _rules(self, batch: Batch) -> Iterator[RepairStep]:
        try:
            self._shared.retention.rules()
        except _UNREADABLE:
            for key in (KEEPING, *lost_keys(self._shared.store)):
                batch.delete(key)
            yield RepairStep(message="the limit, pins and times to live were damaged and are removed; set them again")

    def _entries(self, batch: Batch, check: Check) -> Iterator[RepairStep]:
        """Rebuild damaged entries of documents: all but the name follows from the token ids.

        Shared blocks, and blocks under another number, were listed only in the entry. So all token ids without a sound
        entry become documents, one for each number that has some.
        """
        if not check.damaged_entries:
            return
        names = {state.name for state in check.documents.values()}
        for number in sorted({*check.damaged_entries, *check.orphans}):
            name = free_name(number, names)
            names.add(name)
            entry = Address(number).entry
            batch.delete(entry, entry._replace(layer=MAX_LAYER, item=MAX_ITEM))  # its possible places
            state = told_by_tokens(self._shared, number, name)
            if state is None:
                yield RepairStep(
                    message=f"document number {number} has a damaged entry and no token ids, so it is lost"
                )
            else:
                batch.put(entry, state.to_record())
                message = f"document number {number} had lost its entry, and with it its name; the new name is {name!r}"
                yield RepairStep(message=message, document=name)

    def _branches(self, batch: Batch, check: Check) -> Iterator[RepairStep]:
        """Restore the branches of homes from the entry of the document that writes there.

        If that document is gone, the blocks that others share through it cannot be found.
        """
        for number, facts in check.lost_branches().items():
            state = check.documents[number]
            home = number if state.home is None else state.home
            batch.put(Address(home).branch, Record.from_json(facts))
            yield RepairStep(
                message=f"the record of the shared blocks of document {state.name!r} was lost; it is restored from "
                "the document's entry"
            )
        written = {key for key, _ in batch.puts}
        for home in sorted(check.damaged_branches):
            if Address(home).branch not in written:
                batch.delete(Address(home).branch)
                yield RepairStep(
                    message=f"the record of the blocks before those of number {home} was damaged; those blocks are lost"
                )

    def _unknown(self, batch: Batch, unknown: list[tuple[Key, Key]]) -> Iterator[RepairStep]:
        """Remove values without a reference, and damaged recurrent states."""
        for first, last in unknown:
            batch.delete(first, last)
        if unknown:
            yield RepairStep(message=f"values that no document needs are removed, in {len(unknown)} places")

    def _indexes(self, findings: list[Finding], dry_run: bool) -> Iterator[RepairStep]:
        """Remove damaged kept indexes, which are built again."""
        if all(finding.kind != "index" for finding in findings):
            return  # finding the damaged ones again would read them all
        for path, _ in damaged(folder_of(folder(self._shared.url))):
            if not dry_run:
                remove(path)
            yield RepairStep(message=f"the saved index {path.stem} was damaged; it is rebuilt when it is needed")

    # Repair cuts instead of patching, because every block was computed from the earlier ones.
    def _truncations(self, findings: list[Finding], dry_run: bool) -> Iterator[RepairStep]:
        """Cut each document at its first unsound block."""
        size = self._shared.spec.block_size
        ends: dict[str, int] = {}
        for finding in findings:
            if finding.document is not None and finding.block is not None and _lost(finding):
                ends[finding.document] = min(finding.block, ends.get(finding.document, finding.block))
        for name, end in ends.items():
            document = self._document(name)
            before, keep = len(document), max(min(end, document.n_blocks), document.blocks.start)
            if not dry_run:
                document.truncate(keep)
            lost = before - min(before, keep * size)
            message = f"document {name!r} now ends before block {keep}: {before - lost} tokens stay, {lost} are lost"
            yield RepairStep(message=message, document=name, tokens_lost=lost)

    def _drops(self, findings: list[Finding], dry_run: bool) -> Iterator[RepairStep]:
        """Remove the unsound blocks of each document; cut it if they are at its end."""
        shared, size, batch = self._shared, self._shared.spec.block_size, Batch()
        blocks, hashes = defaultdict[str, list[range]](list), defaultdict[str, list[range]](list)
        for finding in findings:
            if finding.document is not None and finding.tokens is not None and _lost(finding):
                first, last = finding.tokens
                lost = hashes if finding.table == Table.HISTORY.name.lower() else blocks
                lost[finding.document].append(range(first // size, last // size + 1))
        states = {number: state for number in shared.catalog.numbers() if (state := shared.state(number)) is not None}
        for number, state in states.items():
            if state.name in hashes:
                states[number] = _without_hashes(batch, shared.places(number, state), state, hashes[state.name])
                message = f"document {state.name!r} continues without the hashes of its history: its text is not reused"
                yield RepairStep(message=message, document=state.name)
        after = {
            number: _without_blocks(shared, shared.places(number, state), state, blocks[state.name])
            for number, state in states.items()
            if state.name in blocks
        }
        if not dry_run:
            shared.store.write(batch)
            shared.store.write(_dropping(shared, states, after))
            shared.catalog.clear()
        for number, left in after.items():
            gone = sum(map(len, states[number].present())) - sum(map(len, left.present()))
            stay = left.readable(size)
            tokens = states[number].readable(size) - stay
            message = f"document {left.name!r} continues without {gone} damaged blocks: {tokens} tokens are lost"
            yield RepairStep(message=f"{message}, {stay} stay", document=left.name, tokens_lost=tokens)


def free_name(number: int, taken: Collection[str]) -> str:
    """Return a name, none of ``taken``, for document ``number``, which has lost its own."""
    return next(name for n in count(number) if (name := f"recovered-{n}") not in taken)


def _lost(finding: Finding) -> bool:
    """Whether a finding means lost blocks; recurrent states can be computed again."""
    return finding.kind != "unknown" and finding.table != Table.RECURRENT.name.lower()


# A finding names all documents that use a damaged run of hashes, so nobody needs the rest of it.
def _without_hashes(batch: Batch, places: Places, state: DocumentState, lost: list[range]) -> DocumentState:
    """Remove damaged hashes, and the digest of each document that uses them."""
    for owner, part in (piece for blocks in lost for piece in places.pieces(blocks)):
        first, last = part.start // HASHES_PER_RUN, (part.stop - 1) // HASHES_PER_RUN
        batch.delete(Key(Table.HISTORY, owner, 0, first), Key(Table.HISTORY, owner, 0, last))
    state = replace(state, digest=None)
    batch.put(places.entry, state.to_record())
    return state


def _without_blocks(shared: SharedStore, places: Places, before: DocumentState, lost: list[range]) -> DocumentState:
    """Return a document's state without the ``lost`` blocks. Raises ``DamagedError``."""
    parts = merged([*before.gaps, *(common(part, before.live()) for part in lost)])
    gone, end = tuple((part.start, part.stop) for part in parts), before.blocks
    if gone and gone[-1][1] == end:
        end, gone = max(gone[-1][0], before.first), gone[:-1]
    # The hash of a history is a chain over all tokens, and some are missing now.
    digest = None if gone else shared.history.digest(places, before, end, shared.spec)
    return replace(before.cut(end, shared.spec.block_size), dropped=gone, digest=digest)


# All documents that share a damaged block drop it together, in one transaction.
def _dropping(shared: SharedStore, before: Mapping[int, DocumentState], after: Mapping[int, DocumentState]) -> Batch:
    """Return the batch that removes the lost blocks of documents. Raises ``DamagedError``."""
    batch, fresh = Batch(), shared.next_document()
    changes: dict[int, tuple[DocumentState, Home]] = {}
    for number, state in after.items():
        places = shared.places(number, before[number])
        changes[number] = state, places.node
        if state.blocks < places.start:  # its next blocks lie elsewhere
            changes[number] = moved(batch, number, places, state, fresh)
            fresh += 1
    if fresh > shared.next_document():
        batch.put(NEXT_DOCUMENT, next_document_record(fresh))
    Deletion(shared).change(batch, changes)
    return batch


# The token ids determine the whole entry except the name. A gap means dropped blocks. Ending the document
# there would delete all later blocks.
def told_by_tokens(shared: SharedStore, number: int, name: str) -> DocumentState | None:
    """Rebuild the state of a document whose entry is lost, from its stored token ids. Raises ``DamagedError``.

    If blocks follow a gap, those in the gap were dropped.
    """
    address, size = Address(number), shared.spec.block_size
    items = [key.item for key in shared.store.keys(address.tokens(0), address.tokens(MAX_ITEM))]
    if not items:
        return None
    length = _length_of(shared, address, items[-1])
    if length is None:  # the block is cut off next; if it lies far behind the others, its key is damaged
        length, items[-1:] = size, [items[-2] + 1 if len(items) > 1 else items[-1]]
    gaps = tuple((item + 1, after) for item, after in pairwise(items) if after > item + 1)
    first, last = items[0], items[-1]
    return DocumentState(name=name, tokens=last * size + length, blocks=last + 1, first=first, dropped=gaps)


def _length_of(shared: SharedStore, address: Address, block: int) -> int | None:
    """Return the number of a block's token ids; None if they are damaged."""
    try:
        records = shared.store.get(address.tokens(block))
    except DamagedError:
        return None
    return records[0].layout.shape[0] if records else None
