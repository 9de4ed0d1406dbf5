"""Take damaged blocks out of documents and leave the others: what ``repair`` does when it is told to drop.

A dropped block is named in the document's entry. It cannot be found, gathered or rewritten; the blocks behind it keep
their numbers and their states, which were computed when it was whole. Blocks at the end of a document are cut off
instead, so that whoever reads on begins with whole ones.

The hash of a history is a chain over all tokens, which are not all there any more. So a document with dropped blocks
gives its digest up: no text is ever taken for its text, and its token ids are checked by their checksums alone. The
same happens where only hashes are damaged, and then no block is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from memstore.memory.audit import Finding
from memstore.memory.hashes import HASHES_PER_RUN
from memstore.memory.history import digest_at
from memstore.memory.places import Home, Places, common, dropped, merged
from memstore.memory.shared import Shared, next_document_record
from memstore.memory.sharing import Deleting, moved
from memstore.memory.state import NEXT_DOCUMENT, DocumentState
from memstore.store.contract import Batch, Key, Table


@dataclass
class Loss:
    """What a document has lost by damage."""

    blocks: list[range] = field(default_factory=list)
    hashes: list[range] = field(default_factory=list)
    """Blocks of which the hash is lost."""


@dataclass(frozen=True)
class Dropped:
    """A document before and after its damaged blocks have gone."""

    before: DocumentState
    after: DocumentState
    block_size: int

    @property
    def blocks(self) -> int:
        """How many blocks are dropped or cut off."""
        return _present(self.before) - _present(self.after)

    @property
    def tokens(self) -> int:
        """How many tokens are in them."""
        return self._tokens(self.before) - self.stay

    @property
    def stay(self) -> int:
        """How many tokens there still are."""
        return self._tokens(self.after)

    def _tokens(self, state: DocumentState) -> int:
        return _present(state) * self.block_size - (-state.tokens % self.block_size if state.live() else 0)


def losses(findings: Iterable[Finding], block_size: int) -> dict[str, Loss]:
    """What documents have lost by ``findings``, by their names."""
    found: dict[str, Loss] = {}
    for finding in findings:
        if finding.document is None or finding.tokens is None or finding.kind == "unknown":
            continue
        first, last = finding.tokens
        loss = found.setdefault(finding.document, Loss())
        lost = loss.hashes if finding.table == Table.HISTORY.name.lower() else loss.blocks
        lost.append(range(first // block_size, last // block_size + 1))
    return found


def without_hashes(shared: Shared, lost: Mapping[int, Loss]) -> Batch:
    """What takes the damaged hashes away, and the digests of the documents that use them, by their numbers.

    All documents that use a run of hashes are told that it is damaged, so nobody needs what is left of it.
    Raises ``DamagedError``.
    """
    batch = Batch()
    for number, loss in lost.items():
        state = shared.state(number)
        if state is None or not loss.hashes:
            continue
        places = shared.places(number, state)
        for owner, part in (piece for blocks in loss.hashes for piece in places.pieces(blocks)):
            first, last = part.start // HASHES_PER_RUN, (part.stop - 1) // HASHES_PER_RUN
            batch.delete(Key(Table.HISTORY, owner, 0, first), Key(Table.HISTORY, owner, 0, last))
        batch.put(places.entry, replace(state, digest=None).to_record())
    return batch


def outcomes(shared: Shared, lost: Mapping[int, Loss]) -> dict[int, Dropped]:
    """What documents, by their numbers, are without the blocks that they have lost. Raises ``DamagedError``."""
    states = {number: shared.state(number) for number, loss in lost.items() if loss.blocks}
    return {
        n: _dropping(shared, shared.places(n, state), state, lost[n])
        for n, state in states.items()
        if state is not None
    }


def without_blocks(shared: Shared, done: Mapping[int, Dropped]) -> Batch:
    """What takes the lost blocks away. Raises ``DamagedError``.

    It is one batch for all documents, for those that share a block lose it together.
    """
    batch, fresh = Batch(), shared.next_document()
    changes: dict[int, tuple[DocumentState, Home]] = {}
    for number, outcome in done.items():
        after, places = outcome.after, shared.places(number, outcome.before)
        changes[number] = after, places.node
        if after.blocks < places.start:  # what it writes next does not lie where these blocks lay
            changes[number] = moved(batch, number, places, after, fresh)
            fresh += 1
    if fresh > shared.next_document():
        batch.put(NEXT_DOCUMENT, next_document_record(fresh))
    Deleting(shared).change(batch, changes)
    return batch


def _dropping(shared: Shared, places: Places, before: DocumentState, loss: Loss) -> Dropped:
    size, live = shared.spec.block_size, before.live()
    parts = merged([*dropped(before), *(common(part, live) for part in loss.blocks)])
    gone, end = tuple((part.start, part.stop) for part in parts), before.blocks
    if gone and gone[-1][1] == end:
        end, gone = max(gone[-1][0], before.first), gone[:-1]
    lost = bool(gone or loss.hashes)
    digest = None if lost else digest_at(shared.history, places, before, end, shared.spec)
    return Dropped(before, replace(before.cut(end, size), dropped=gone, digest=digest), size)


def _present(state: DocumentState) -> int:
    return len(state.live()) - _dropped(state)


def _dropped(state: DocumentState) -> int:
    return sum(len(common(part, state.live())) for part in dropped(state))
