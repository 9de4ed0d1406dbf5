"""Copying and comparing documents and whole memories, between any two stores.

What is copied is read with all its checks and appended to the target in transactions of bounded size. So if it stops
in the middle, the target holds a beginning of the document that is sound in itself, and the next copy goes on there.
Between memories of one codec complete blocks go over as they are stored, so a copy of a copy is still the same bits.

Token ids are compared as far as both documents go, states by the checksums that are stored with them, so that little
has to be read of large memories.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.memory.append import Append
from memstore.memory.document import Document
from memstore.memory.entry import common
from memstore.memory.memory import Memory, check_same, open_memory
from memstore.memory.shared import about, owner_of
from memstore.memory.spec import MemorySpec, block_layouts
from memstore.memory.urls import folder
from memstore.progress import progress_bar
from memstore.store.encryption_keys import KeySource

# A copy is made of appends, so what is there at any moment is a document like any other, and going on needs no record
# of how far it came.
TRANSACTION_BYTES = 64 << 20
"""States that are copied in one transaction; at least one block of all layers."""


@dataclass(frozen=True, kw_only=True)
class CopyResult:
    """What ``copy_memory`` did."""

    documents: int
    """Documents of the source, all of which the target has now."""
    tokens: int
    """Tokens in them."""
    copied_tokens: int
    """Tokens that were copied; the others were there, or are shared with a document that a fork was made of."""


def copy_document(
    source: Document, memory: Memory, name: str, advance: Callable[[int], None] = lambda _: None
) -> Document:
    """Copy a document to ``memory``, in transactions of bounded size; everything is verified on the way.

    A copy that was interrupted goes on where it stopped. Into another memory what else is known of the document, and
    arrays of the memory itself that the target lacks, such as a router, are copied too; a pin and a time to live are
    not. Where both memories have the same codec, not a bit changes. Where they differ, states are decoded and encoded
    anew, and what one codec lost is not brought back by another. ``advance`` is told how many tokens more have been
    copied. Raises ``ForeignMemory`` where the memories were made for different models, layouts or routers,
    ``InvalidArgument`` where another text has this name, ``ReadOnlyMemory``, ``StoreFull`` and ``DamagedError``.
    """
    if source.memory is memory and source.name == name:
        raise InvalidArgument(f"a copy of document {name!r} in its own memory needs another name.")
    check_same(replace(memory.spec, codec=source.memory.spec.codec), source.memory)
    if source.memory is not memory:
        info, arrays = source.memory.facts()
        told = ((about(fact, name), value) for fact, value in info.items() if owner_of(fact) in (None, source.name))
        memory.put_facts({fact: value for fact, value in told if fact is not None}, arrays, source.memory.url)
    return _copy(source, memory, name, advance)


def _copy(source: Document, memory: Memory, name: str, advance: Callable[[int], None]) -> Document:
    """See ``copy_document``: the document alone."""
    target = memory.document(name)
    if target.id is None:
        target.begin(source.blocks.start, source.reading)
    _check_beginning(source, target)
    edits = source.located()[0].edits
    size = memory.spec.block_size
    step = max(1, TRANSACTION_BYTES // (memory.spec.layers * sum(lay.nbytes for lay in block_layouts(memory.spec))))
    while (done := len(target)) < len(source):
        wanted = range(done // size, min(done // size + step, source.n_blocks))
        blocks = next(iter(source.present(wanted)), wanted[:0])
        if blocks.start == wanted.start and blocks:
            _copy_blocks(source, target, blocks, done)
        else:
            target.pass_over((blocks or wanted[len(wanted) :]).start - wanted.start)
        advance(len(target) - done)
    if source.located()[0].edits != edits:
        raise InvalidArgument(
            f"document {source.name!r} was truncated while it was copied, so the copy may hold what it has lost: "
            f"forget document {name!r} of {memory.url}, and copy again."
        )
    _check_digests(source, target)
    return target


def copy_memory(
    source: str | Path,
    target: str | Path,
    *,
    codec: str | None = None,
    progress: bool = False,
    key: KeySource | None = None,
    target_key: KeySource | None = None,
) -> CopyResult:
    """Copy every document of the memory at ``source``, and what is stored beside them, into that at ``target``.

    The target is made if it does not exist; what it has already is kept, so a copy that was interrupted can be run
    again. Documents that share blocks share them in the target too. ``codec`` is the target's, where it shall store
    states in another way than the source, see ``MemorySpec``. Documents that the copy makes take their pins and times
    to live along; the limit goes with a copy as a whole, see ``Memory.take_rules``. ``key`` opens the source, and the
    target where ``target_key`` is not given, each as for ``memstore.open``. This is ``memstore.copy``.

    Raises ``InvalidArgument`` where the target has another text under the name of a document, ``ForeignMemory`` where
    it was made for something else, ``DamagedError`` where the source is damaged (all documents before are copied), and
    whatever ``memstore.open`` raises.
    """
    if _place(source) == _place(target):
        raise InvalidArgument(f"{source} and {target} are the same memory; name another place for the copy.")
    with (
        open_memory(source, mode="r", key=key) as old,
        open_memory(
            target,
            spec=old.spec if codec is None else replace(old.spec, codec=codec),
            key=key if target_key is None else target_key,
        ) as new,
    ):
        documents, rules = old.documents(), old.rules()
        made = [document.name for document in documents if new.document(document.name).id is None]
        check_same(replace(new.spec, codec=old.spec.codec), old)
        new.put_facts(*old.facts(), old.url)
        total, done = sum(map(len, documents)), sum(len(new.document(each.name)) for each in documents)
        copied = 0

        def count(tokens: int) -> None:
            nonlocal copied
            copied += tokens
            advance(tokens)

        with progress_bar(str(source), done, total, progress, verb="copying") as advance:
            beginnings = Beginnings()
            for document in documents:
                advance(_fork(document, beginnings.find(document), new))
                _copy(document, new, document.name, count)
                beginnings.add(document)
        new.take_rules(rules, made, [document.name for document in documents])
    return CopyResult(documents=len(documents), tokens=total, copied_tokens=copied)


def _place(url: str | Path) -> str:
    place = folder(url)
    return str(url) if place is None else str(place.resolve())


def _check_beginning(source: Document, target: Document) -> None:
    """Raise ``InvalidArgument`` unless the target holds a beginning of the source."""
    same = target.reading == source.reading and target.blocks.start <= source.blocks.start
    both = min(len(source), len(target))
    first, size = source.blocks.start, source.memory.spec.block_size
    if same and both > first * size:
        there = range(first * size, both)
        same = _ids(source, there).equal(_ids(target, there))
    if not same or len(target) > len(source) or len(target) < first * size:
        raise InvalidArgument(
            f"memory {target.memory.url} has a document {target.name!r} that is no beginning of document "
            f"{source.name!r} of {source.memory.url}; copy it under another name, or forget that one first."
        )


# Complete blocks go as they are stored where both memories have one codec: a step is rounded to bfloat16, so decoding
# and encoding again need not give the same codes, and copies of copies would drift. A source that is truncated
# meanwhile is an error: the copy could hold what it never had at one time.
def _copy_blocks(source: Document, target: Document, blocks: range, done: int) -> None:
    """Append what the source has in ``blocks`` to the target, which has ``done`` tokens.

    Nothing is appended where the incomplete last block has grown while it was read: it is to be read again.
    """
    state, _ = source.located()
    size, live = source.memory.spec.block_size, common(blocks, state.live())
    if live.start > blocks.start:
        raise InvalidArgument(
            f"document {source.name!r} lost its blocks below {live.start} while it was copied: forget document "
            f"{target.name!r} of {target.memory.url}, and copy again when nobody reads more into it."
        )
    ids = torch.cat([source.tokens(block) for block in live])
    as_it_is = source.memory.spec.codec == target.memory.spec.codec
    complete = common(live, state.complete(size)) if as_it_is else None
    layers = [_read(source, layer, live, complete) for layer in range(source.memory.spec.layers)]
    if live.stop * size > state.tokens and source.located()[0] != state:
        return
    with target.append(ids[done - live.start * size :]) as batch:
        for put in layers:
            put(batch)
        for place, states in recurrent_between(source, batch.before.tokens, batch.after.tokens):
            batch.put_recurrent(states, at=place)


def recurrent_between(document: Document, first: int, last: int) -> Iterator[tuple[int, list[Tensor]]]:
    """The recurrent states that are kept behind the first ``first`` tokens, up to ``last``; after how many each is.

    Raises ``DamagedError``.
    """
    for place in document.recurrent_places(first + 1):
        if place <= last:
            with suppress(NotFound):  # who appends takes the last one away, and who needs it computes it again
                yield place, document.recurrent(place)


def _read(source: Document, layer: int, live: range, complete: range | None) -> Callable[[Append], None]:
    """Read ``live`` blocks, those of ``complete`` as they are stored: what puts them into an append."""
    view = source.layer(layer)
    marks = view.landmarks(live) if layer in source.memory.spec.index_layers else None
    if complete is None:
        states = view.gather(live)
        return lambda batch: batch.put(layer, landmarks=marks, **states)
    stored, last = view.stored(complete), view.gather(range(complete.stop, live.stop))
    return lambda batch: batch.put_stored(layer, stored, last, landmarks=marks)


def _check_digests(source: Document, target: Document) -> None:
    """Raise ``DamagedError`` where the tokens that were copied are not those that the source once hashed."""
    fingerprint, theirs = source.memory.spec.fingerprint, target.memory.spec.fingerprint
    digests = {source.digest, target.digest} - {None}
    if fingerprint == theirs and len(source) == len(target) and len(digests) > 1:
        raise DamagedError(
            f"the token ids of document {source.name!r} are not those that were read: its digest is {source.digest}, "
            f"that of its copy {target.digest}. Run verify on {source.memory.url}, and forget the copy."
        )


def _fork(document: Document, found: tuple[int, str], memory: Memory) -> int:
    """Let the copy of ``document`` begin as a fork of one copied before, as ``found``; tokens it has then."""
    blocks, name = found
    if not blocks or memory.document(document.name).id is not None:
        return 0
    return len(memory.document(name).fork(document.name, blocks))


class Beginnings:
    """Which of some documents shares most first blocks, as values, with another one."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, str], tuple[int, str]] = {}
        """First live block, number of a home and what documents were read with -> last block there, and whose."""

    def find(self, document: Document) -> tuple[int, str]:
        """How many blocks, and with which document: one of those that were added. 0 where there is none."""
        for key, stop, _ in self._pieces(document):
            if key in self._found:
                there, name = self._found[key]
                return min(stop, there), name
        return 0, ""

    def add(self, document: Document) -> None:
        """Let others be compared with a document too."""
        for key, stop, name in self._pieces(document):
            if self._found.get(key, (0, ""))[0] >= stop:
                return  # what has this has everything before it as well
            self._found[key] = stop, name

    def _pieces(self, document: Document) -> Iterator[tuple[tuple[int, int, str], int, str]]:
        state, places = document.located()
        if places is not None:
            read = json.dumps(state.reading, sort_keys=True)
            for owner, blocks in places.node.pieces(range(state.blocks)):
                yield (state.first, owner, read), blocks.stop, state.name


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


# By the checksums in the headers: LMDB need not read payloads for it.
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
