"""Make a damaged memory sound again: by what ``verify`` finds, never by guessing.

Of a document with damaged, missing or unfitting values the longest sound prefix stays, or, where that is asked for,
everything but the damaged blocks. Where a document's entry is damaged, everything else of it still says how long it is,
so only its name is lost. Values that nothing refers to go. Whatever cannot be put right is left as it is, and named.

A dropped block is named in the document's entry. It cannot be found, gathered or rewritten; the blocks behind it keep
their numbers and their states, which were computed when it was whole. Blocks at the end of a document are cut off
instead, so that whoever reads on begins with whole ones. The hash of a history is a chain over all tokens, which are
not all there any more: a document with dropped blocks gives its digest up. No text is ever taken for its text, and its
token ids are checked by their checksums alone. The same happens where only hashes are damaged; then no block is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
_ROUNDS = 5  # what is put right first can show what else is wrong: an entry, then the blocks it refers to
_UNREADABLE = (DamagedError, LookupError, TypeError, ValueError)  # of JSON that is damaged, or not what it should be
# Numbers of documents are never used twice: a lost next number is set this far past the last one known.
_FIRST_AGAIN = 1000  # numbers left out where nobody knows which one was used last


@dataclass(frozen=True, kw_only=True)
class RepairStep:
    """One thing that a repair did, or would do."""

    message: str
    document: str | None = None
    """Name of the document, where there is one."""
    tokens_lost: int = 0
    """Tokens of the document that are gone."""


@dataclass(frozen=True, kw_only=True)
class RepairOutcome:
    """The outcome of a repair."""

    steps: list[RepairStep]
    left: list[Finding]
    """What is still wrong; after a dry run, everything that is."""


class Repair:
    """One repair of one open memory. The caller holds ``SharedStore.writing``."""

    def __init__(
        self, shared: SharedStore, document: Callable[[str], Document], verify: Callable[[], list[Finding]]
    ) -> None:
        self._shared = shared
        self._document = document
        self._verify = verify

    def run(self, *, dry_run: bool, drop_blocks: bool = False) -> RepairOutcome:
        """Repair as far as that is possible. Raises ``DamagedError`` where not even the keys can be walked."""
        cure = self._drops if drop_blocks else self._truncations
        findings, steps = self._verify(), list[RepairStep]()
        for _ in range(_ROUNDS):
            if any(finding.kind == "crash" for finding in findings):
                raise DamagedError(
                    f"memory {self._shared.url} cannot be repaired in place: the tree around its values is damaged. "
                    f"To save what can still be read: memstore repair {quote(self._shared.url)} --to NEW",
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
        """Put right what does not depend on anything else that is wrong."""
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
        """The number of the next document."""
        last = max(check.numbers, default=0)
        try:
            if self._shared.next_document() > last:
                return
        except _UNREADABLE:
            pass
        batch.put(NEXT_DOCUMENT, next_document_record(last + _FIRST_AGAIN))
        yield RepairStep(message=f"the number of the next document was lost; it will be {last + _FIRST_AGAIN}")

    def _rules(self, batch: Batch) -> Iterator[RepairStep]:
        """Limits and pins: where they are damaged there are none."""
        try:
            self._shared.retention.rules()
        except _UNREADABLE:
            for key in (KEEPING, *lost_keys(self._shared.store)):
                batch.delete(key)
            yield RepairStep(message="the limit, pins and times to live were damaged and are gone; set them anew")

    def _entries(self, batch: Batch, check: Check) -> Iterator[RepairStep]:
        """Entries of documents that are damaged: all but the name follows from the token ids.

        What such a document shared with others, or wrote under another number, stood in its entry alone. So all token
        ids that no sound entry refers to become documents, one for each number under which there are some.
        """
        if not check.damaged_entries:
            return
        names = {state.name for state in check.documents.values()}
        for number in sorted({*check.damaged_entries, *check.orphans}):
            name = next(name for n in count(number) if (name := f"recovered-{n}") not in names)
            names.add(name)
            entry = Address(number).entry
            batch.delete(entry, entry._replace(layer=MAX_LAYER, item=MAX_ITEM))  # where it may have come to lie
            state = told_by_tokens(self._shared, number, name)
            if state is None:
                yield RepairStep(
                    message=f"document number {number} has a damaged entry and no token ids, so it is gone"
                )
            else:
                batch.put(entry, state.to_record())
                message = f"document number {number} had lost its entry, and with it its name: it is {name!r} now"
                yield RepairStep(message=message, document=name)

    def _branches(self, batch: Batch, check: Check) -> Iterator[RepairStep]:
        """What homes are branches of: the entry of the document that writes there says it too.

        Where there is no such document any more, the blocks that others share through it cannot be found.
        """
        for number, facts in check.lost_branches().items():
            state = check.documents[number]
            home = number if state.home is None else state.home
            batch.put(Address(home).branch, Record.from_json(facts))
            yield RepairStep(
                message=f"where document {state.name!r} has its shared blocks was lost; its entry tells it"
            )
        written = {key for key, _ in batch.puts}
        for home in sorted(check.damaged_branches):
            if Address(home).branch not in written:
                batch.delete(Address(home).branch)
                yield RepairStep(
                    message=f"where the blocks before those of number {home} lie was damaged: they are lost"
                )

    def _unknown(self, batch: Batch, unknown: list[tuple[Key, Key]]) -> Iterator[RepairStep]:
        """Values that nothing refers to, and recurrent states that are damaged."""
        for first, last in unknown:
            batch.delete(first, last)
        if unknown:
            yield RepairStep(message=f"values that no document needs were removed, in {len(unknown)} places")

    def _indexes(self, findings: list[Finding], dry_run: bool) -> Iterator[RepairStep]:
        """Kept indexes that are damaged: they are built anew, so they go."""
        if all(finding.kind != "index" for finding in findings):
            return  # to find out again which ones would mean to read them all
        for path, _ in damaged(folder_of(folder(self._shared.url))):
            if not dry_run:
                remove(path)
            yield RepairStep(message=f"the kept index {path.stem} was damaged; it is built anew where it is wanted")

    # Repair cuts instead of patching: every block was computed from those before it.
    def _truncations(self, findings: list[Finding], dry_run: bool) -> Iterator[RepairStep]:
        """Cut each document where its first unsound block is."""
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
            message = f"document {name!r} ends before block {keep} now: {before - lost} tokens stay, {lost} are lost"
            yield RepairStep(message=message, document=name, tokens_lost=lost)

    def _drops(self, findings: list[Finding], dry_run: bool) -> Iterator[RepairStep]:
        """Take out of each document its unsound blocks, at its end by cutting it."""
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
                message = f"document {state.name!r} goes on without hashes of its history: its text is not reused"
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
            stay = _tokens(left, size)
            tokens = _tokens(states[number], size) - stay
            message = f"document {left.name!r} goes on without {gone} damaged blocks: {tokens} tokens are lost"
            yield RepairStep(message=f"{message}, {stay} stay", document=left.name, tokens_lost=tokens)


def _lost(finding: Finding) -> bool:
    """Whether a document has lost what was found wrong: recurrent states are computed again."""
    return finding.kind != "unknown" and finding.table != Table.RECURRENT.name.lower()


def _tokens(state: DocumentState, block_size: int) -> int:
    """How many tokens there are in the blocks of a document."""
    missing = -state.tokens % block_size if state.live() else 0
    return sum(map(len, state.present())) * block_size - missing


# All documents that use a run of hashes are told that it is damaged, so nobody needs what is left of it.
def _without_hashes(batch: Batch, places: Places, state: DocumentState, lost: list[range]) -> DocumentState:
    """Take damaged hashes away, and with them the digest of a document that uses them."""
    for owner, part in (piece for blocks in lost for piece in places.pieces(blocks)):
        first, last = part.start // HASHES_PER_RUN, (part.stop - 1) // HASHES_PER_RUN
        batch.delete(Key(Table.HISTORY, owner, 0, first), Key(Table.HISTORY, owner, 0, last))
    state = replace(state, digest=None)
    batch.put(places.entry, state.to_record())
    return state


def _without_blocks(shared: SharedStore, places: Places, before: DocumentState, lost: list[range]) -> DocumentState:
    """A document once ``lost`` blocks are gone. Raises ``DamagedError``."""
    parts = merged([*before.gaps, *(common(part, before.live()) for part in lost)])
    gone, end = tuple((part.start, part.stop) for part in parts), before.blocks
    if gone and gone[-1][1] == end:
        end, gone = max(gone[-1][0], before.first), gone[:-1]
    # The hash of a history is a chain over tokens that are not all there any more.
    digest = None if gone else shared.history.digest(places, before, end, shared.spec)
    return replace(before.cut(end, shared.spec.block_size), dropped=gone, digest=digest)


# All documents that share a damaged block drop it together, in one transaction.
def _dropping(shared: SharedStore, before: Mapping[int, DocumentState], after: Mapping[int, DocumentState]) -> Batch:
    """What takes the lost blocks of documents away. Raises ``DamagedError``."""
    batch, fresh = Batch(), shared.next_document()
    changes: dict[int, tuple[DocumentState, Home]] = {}
    for number, state in after.items():
        places = shared.places(number, before[number])
        changes[number] = state, places.node
        if state.blocks < places.start:  # what it writes next does not lie where these blocks lay
            changes[number] = moved(batch, number, places, state, fresh)
            fresh += 1
    if fresh > shared.next_document():
        batch.put(NEXT_DOCUMENT, next_document_record(fresh))
    Deletion(shared).change(batch, changes)
    return batch


# The token ids say everything of an entry but the name. A gap in them is blocks that were dropped; to end the document
# there would delete all that lies behind.
def told_by_tokens(shared: SharedStore, number: int, name: str) -> DocumentState | None:
    """The state of a document whose entry is lost, from the blocks that have token ids. Raises ``DamagedError``.

    Where some lie behind a gap, the blocks between were dropped.
    """
    address, size = Address(number), shared.spec.block_size
    items = [key.item for key in shared.store.keys(address.tokens(0), address.tokens(MAX_ITEM))]
    if not items:
        return None
    length = _length_of(shared, address, items[-1])
    if length is None:  # the block is cut off next; where it lies far behind the others, its place is what is damaged
        length, items[-1:] = size, [items[-2] + 1 if len(items) > 1 else items[-1]]
    gaps = tuple((item + 1, after) for item, after in pairwise(items) if after > item + 1)
    first, last = items[0], items[-1]
    return DocumentState(name=name, tokens=last * size + length, blocks=last + 1, first=first, dropped=gaps)


def _length_of(shared: SharedStore, address: Address, block: int) -> int | None:
    """How many token ids a block has; None where they are damaged."""
    try:
        records = shared.store.get(address.tokens(block))
    except DamagedError:
        return None
    return records[0].layout.shape[0] if records else None
