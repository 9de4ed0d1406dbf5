"""What differs between two memories, or between two documents: layouts, texts, and whether states are the same bits.

Token ids are compared as far as both documents go, states by the checksums that are stored with them, so that little
has to be read of large memories. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from memstore.memory.document import Document
from memstore.memory.memory import Memory
from memstore.memory.places import common
from memstore.memory.spec import MemorySpec

AT_ONCE = 1 << 18
"""Tokens that are compared at a time."""
_COMPARABLE = ("layers", "fields", "block_size", "dtype", "codec")
"""What must be the same before checksums of states mean anything."""

Advance = Callable[[int], None]
States = Literal["same", "different", "none in common", "not comparable"]


@dataclass(frozen=True, kw_only=True)
class DocumentDifference:
    """How far two documents are the same."""

    name_a: str
    name_b: str
    tokens_a: int
    tokens_b: int
    common_tokens: int
    """Tokens at the beginning that both have, as far as both can still be read."""
    common_blocks: int
    """Blocks of the first document that lie whole in this beginning."""
    states: States
    """Of the complete blocks in this beginning; not comparable between memories of other layouts or codecs."""
    compared_blocks: int
    """Blocks whose states were compared, each in all layers."""
    first_different: tuple[int, int] | None
    """The first block, and the lowest layer in it, whose states differ."""

    @property
    def same(self) -> bool:
        """Whether the texts are the same, and all states that can be compared."""
        return self.tokens_a == self.tokens_b == self.common_tokens and self.states != "different"


@dataclass(frozen=True, kw_only=True)
class MemoryDifference:
    """How far two memories are the same."""

    spec: tuple[tuple[str, Any, Any], ...]
    """What differs of spec and fingerprint: name, in the first memory, in the second one."""
    only_a: tuple[str, ...]
    """Documents that only the first memory has."""
    only_b: tuple[str, ...]
    documents: tuple[DocumentDifference, ...]
    """Of those that both have."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.spec or self.only_a or self.only_b) and all(each.same for each in self.documents)


def compare_memories(a: Memory, b: Memory, advance: Advance = lambda tokens: None) -> MemoryDifference:  # noqa: ARG005 - nobody listens
    """Compare all documents, by name; ``advance`` is told how many tokens more are compared.

    Raises ``DamagedError``.
    """
    ours, theirs = ({document.name: document for document in memory.documents()} for memory in (a, b))
    return MemoryDifference(
        spec=tuple(spec_differences(a.spec, b.spec)),
        only_a=tuple(name for name in ours if name not in theirs),
        only_b=tuple(name for name in theirs if name not in ours),
        documents=tuple(compare_documents(ours[name], theirs[name], advance) for name in ours if name in theirs),
    )


def compare_documents(a: Document, b: Document, advance: Advance = lambda tokens: None) -> DocumentDifference:  # noqa: ARG005 - nobody listens
    """Compare two documents, of one memory or of two. Raises ``NotFound`` and ``DamagedError``."""
    tokens_a, tokens_b = len(a), len(b)
    shared = _common_tokens(a, b, min(tokens_a, tokens_b), advance)
    blocks = shared // a.memory.spec.block_size
    comparable = all(getattr(a.memory.spec, name) == getattr(b.memory.spec, name) for name in _COMPARABLE)
    compared, first = _compare_states(a, b, range(blocks)) if comparable else (0, None)
    states: States = "different" if first is not None else "same" if compared else "none in common"
    return DocumentDifference(
        name_a=a.name,
        name_b=b.name,
        tokens_a=tokens_a,
        tokens_b=tokens_b,
        common_tokens=shared,
        common_blocks=blocks,
        states=states if comparable else "not comparable",
        compared_blocks=compared,
        first_different=first,
    )


def spec_differences(a: MemorySpec, b: MemorySpec) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two specs: name, and both values; of the fingerprint each part by itself."""
    ours, theirs = a.to_dict(), b.to_dict()
    for spec in (ours, theirs):
        spec |= {f"fingerprint {name}": value for name, value in spec.pop("fingerprint").items()}
    for name in sorted(ours, key=lambda name: not name.startswith("fingerprint")):
        if ours[name] != theirs[name]:
            yield name, ours[name], theirs[name]


def _common_tokens(a: Document, b: Document, most: int, advance: Advance) -> int:
    for start in range(0, most, AT_ONCE):
        tokens = range(start, min(start + AT_ONCE, most))
        ours, theirs = _ids(a, tokens), _ids(b, tokens)
        # What has left or was dropped of one of them is not there to be compared.
        differ = ((ours != theirs) & (ours >= 0) & (theirs >= 0)).nonzero()
        if len(differ):
            return start + int(differ[0])
        advance(len(tokens))
    return most


def _ids(document: Document, tokens: range) -> Tensor:
    """Token ids ``[n]``; -1 where the block has left or was dropped."""
    size = document.memory.spec.block_size
    blocks = range(tokens.start // size, -(-tokens.stop // size))
    ids = torch.full((len(blocks) * size,), -1)
    for part in document.present(common(blocks, document.blocks)):
        found = document.tokens(part)
        place = (part.start - blocks.start) * size
        ids[place : place + len(found)] = found
    return ids[tokens.start - blocks.start * size :][: len(tokens)]


def _compare_states(a: Document, b: Document, blocks: range) -> tuple[int, tuple[int, int] | None]:
    """How many of ``blocks`` both have, and the first of them, with its layer, of which the states differ."""
    step = max(1, AT_ONCE // a.memory.spec.block_size)
    compared, first = 0, None
    for start in range(blocks.start, blocks.stop, step):
        part = common(range(start, min(start + step, blocks.stop)), common(a.complete_blocks, b.complete_blocks))
        theirs = {block for piece in b.present(part) for block in piece}
        there = [block for piece in a.present(part) for block in piece if block in theirs]
        compared += len(there)
        different = None if first is not None else _first_different(a, b, there)
        first = different or first
    return compared, first


def _first_different(a: Document, b: Document, blocks: list[int]) -> tuple[int, int] | None:
    found: list[tuple[int, int]] = []
    if not blocks:
        return None
    for layer in range(a.memory.spec.layers):
        pairs = zip(a.layer(layer).checksums(blocks), b.layer(layer).checksums(blocks), strict=True)
        found += [(blocks[at], layer) for at, (ours, theirs) in enumerate(pairs) if ours != theirs][:1]
    return min(found, default=None)
