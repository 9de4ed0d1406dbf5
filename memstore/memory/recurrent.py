"""Recurrent states: what layers that do not attend remember of a document, up to some of its places.

Linear attention, state spaces and convolutions keep a state of a fixed size, whatever they have read. To go on after a
document it is needed at its end; where a document was cut or forked, at some place before. It can always be computed
again from an earlier one and the tokens between, at the worst from none and all tokens. So none has to be there, and
only as many are kept as take a quarter of what blocks take. They lie under the number of the document itself: a fork
gets a copy of the last one that it needs, and nothing is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memstore.errors import DamagedError, NotFound
from memstore.memory.entry import Address
from memstore.store.contract import BlockStore
from memstore.store.records import MAX_ITEM, Batch, Layout, Record, describe

if TYPE_CHECKING:  # a memory is checked and forgotten without PyTorch, which takes seconds to load
    from torch import Tensor


def kept(store: BlockStore, number: int, last: int, *, first: int = 0) -> list[int]:
    """The places of a document, in tokens from ``first`` to ``last``, of which the state is kept; ascending."""
    address = Address(number)
    return [key.item for key in store.keys(address.recurrent(first), address.recurrent(last))]


def read(store: BlockStore, layouts: Sequence[Layout], number: int, place: int) -> list[Tensor]:
    """The state after the first ``place`` tokens of a document. Raises ``NotFound`` and ``DamagedError``."""
    from memstore.memory.tensors import from_record

    key = Address(number).recurrent(place)
    records = store.get(key)
    if records is None:
        raise NotFound(f"{describe(key)}: the recurrent state after {place} tokens is not kept")
    if [record.layout for record in records] != list(layouts):
        raise DamagedError(f"{describe(key)}: it is not the state of this model's layers; run verify")
    return [from_record(record) for record in records]


def put(
    batch: Batch, store: BlockStore, number: int, before: int, states: Mapping[int, Sequence[Record]], step: int
) -> None:
    """Store states by their places, which are behind the first ``before`` tokens of a document.

    The last one that was there goes, unless it lies ``step`` tokens or more behind the one before it.
    """
    there = kept(store, number, before)
    if states and there and there[-1] - (there[-2] if len(there) > 1 else 0) < step:
        batch.delete(Address(number).recurrent(there[-1]))
    for place, records in states.items():
        batch.put(Address(number).recurrent(place), *records)


def cut(batch: Batch, number: int, tokens: int) -> None:
    """Delete the states of a document behind its first ``tokens`` tokens."""
    address = Address(number)
    batch.delete(address.recurrent(tokens + 1), address.recurrent(MAX_ITEM))
