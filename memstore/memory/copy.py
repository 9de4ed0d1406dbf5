"""Copies and comparisons of documents and whole memories, between any two stores.

A copy reads its source with all checks and appends to the target in transactions of bounded size. If it stops in the
middle, the target holds a valid beginning of the document, and the next copy continues there. Between memories of one
codec, complete blocks are copied in their stored form, so a copy of a copy has the same bits.

A comparison covers the token ids that both documents have. States are compared by their stored checksums, so little has
to be read of large memories.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument, NotFound, StoreFull, on_one_line
from memstore.memory.append import Append
from memstore.memory.document import Document
from memstore.memory.entry import DocumentState, common
from memstore.memory.memory import Memory, check_same, open_memory
from memstore.memory.shared import about, owner_of
from memstore.memory.spec import MemorySpec, block_layouts
from memstore.memory.urls import folder
from memstore.progress import progress_bar
from memstore.store.encryption_keys import KeySource

TRANSACTION_BYTES = 64 << 20
"""Bytes of states that one transaction copies; at least one block of all layers."""
FACTS_TOGETHER = 100
"""Documents whose facts are stored in one transaction."""


@dataclass(frozen=True, kw_only=True)
class CopyResult:
    """The result of ``copy_memory``."""

    documents: int
    """Number of documents in the source; the target has all of them now."""
    tokens: int
    """Tokens in them that can be read: without those of dropped blocks, and of blocks that have left."""
    copied_tokens: int
    """Tokens that were copied. The others existed already, or are shared with the parent of a fork."""


def copy_document(
    source: Document, memory: Memory, name: str, advance: Callable[[int], None] = lambda _: None
) -> Document:
    """Copy a document to ``memory``, in transactions of bounded size; everything is verified on the way.

    An interrupted copy continues where it stopped. A copy into another memory includes the facts about the document,
    and arrays of the memory that the target lacks, such as a router. It leaves out a pin and a time to live. If both
    memories have the same codec, every bit stays the same. Otherwise states are decoded and encoded again, and the
    losses of one codec remain. ``advance`` takes the number of tokens just copied. Raises ``ForeignMemory`` if the
    memories were made for different models, layouts or routers, ``InvalidArgument`` if another text has this name,
    ``ReadOnlyMemory``, ``StoreFull`` and ``DamagedError``.
    """
    if source.memory is memory and source.name == name:
        raise InvalidArgument(f"a copy of document {name!r} in its own memory needs a different name.")
    check_same(replace(memory.spec, codec=source.memory.spec.codec), source.memory)
    info, arrays = source.memory.facts() if source.memory is not memory else ({}, {})
    memory.put_facts({fact: value for fact, value in info.items() if not owner_of(fact)}, arrays, source.memory.url)
    target = _copy(source, memory, name, advance)
    own = {about(fact, name): value for fact, value in info.items() if owner_of(fact) == source.name}
    memory.put_facts({fact: value for fact, value in own.items() if fact is not None}, {}, source.memory.url)
    return target


Facts = tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]
"""JSON values, and arrays, by name: see ``Memory.facts``."""


@contextmanager
def storing_facts(memory: Memory, names: Sequence[str], facts: Facts, source: str) -> Iterator[Callable[[str], None]]:
    """Store ``facts`` from ``source``. Yield a function to call when one of the documents ``names`` is complete.

    The values about a document are stored afterwards, or an interrupted copy would pass for a file that was read.
    """
    copied, of, due = set(names), defaultdict[str | None, dict[str, Any]](dict), list[str]()
    for fact, value in facts[0].items():
        owner = owner_of(fact)  # the first words of a conversation come before its document
        of[owner if owner in copied else None][fact] = value
    memory.put_facts(of[None], facts[1], source)

    def store() -> None:
        there = [name for name in due if memory.document(name).id is not None]  # the limit may have evicted others
        memory.put_facts({fact: value for name in there for fact, value in of[name].items()}, {}, source)
        due.clear()

    def complete(name: str) -> None:
        if name in of:
            due.append(name)
        if len(due) == FACTS_TOGETHER:
            store()

    try:
        yield complete
    finally:
        store()


def check_kept(memory: Memory, names: Sequence[str], source: str | Path) -> None:
    """Raise ``StoreFull`` if documents that were copied from ``source`` are gone: the limit has evicted them."""
    if gone := [name for name in names if memory.document(name).id is None]:
        what = f"{len(gone):,} of {len(names):,} documents of {source} again, because its limit had no room for them"
        shown = on_one_line(gone[:10]) + ", ..." * (len(gone) > 10)
        raise StoreFull(f"memory {memory.url} has forgotten {what}: {shown}", memory=memory.url, remedy="limit")


def _copy(source: Document, memory: Memory, name: str, advance: Callable[[int], None]) -> Document:
    """Copy the document alone; see ``copy_document``."""
    target = memory.document(name)
    if target.id is None:
        target.begin(source.blocks.start, source.reading)
    edits, size = source.state.edits, memory.spec.block_size
    _check_beginning(source, target)
    step = max(1, TRANSACTION_BYTES // (memory.spec.layers * sum(lay.nbytes for lay in block_layouts(memory.spec))))
    while (state := source.state).edits == edits and (done := len(target)) < state.tokens:
        wanted = range(done // size, min(done // size + step, state.blocks))
        blocks = next(iter(state.present(wanted)), wanted[:0])
        if blocks.start == wanted.start and blocks:
            try:
                _copy_blocks(source, target, blocks, done)
            except NotFound:  # truncated meanwhile: told below
                if source.state.edits == edits:
                    raise
        else:
            target.pass_over((blocks or wanted[len(wanted) :]).start - wanted.start)
            continue
        advance(len(target) - done)
    if state.edits != edits:
        raise InvalidArgument(
            f"document {source.name!r} was truncated during the copy, so the copy may hold blocks that the source "
            f"has lost. Forget document {name!r} of {memory.url}, and copy again."
        )
    _check_digests(source, state, target)
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
    """Copy all documents of the memory at ``source``, and the facts stored beside them, into the one at ``target``.

    The target is created if it does not exist. It keeps what it has, so an interrupted copy can be run again. Documents
    that share blocks share them in the target too. If ``codec`` is given, the target stores states with it, see
    ``MemorySpec``. Documents that the copy makes keep their pins and times to live. The limit is copied only with a
    whole memory, see ``Memory.take_rules``. ``key`` opens the source, and also the target unless ``target_key`` is
    given, each as for ``memstore.open``. This is ``memstore.copy``.

    Raises ``InvalidArgument`` if the target has another text under a document's name, ``ForeignMemory`` if it was made
    for something else, ``DamagedError`` if the source is damaged (all documents before are copied), ``StoreFull``, also
    if the target's limit evicted some of them, and the errors of ``memstore.open``.
    """
    if _place(source) == _place(target):
        raise InvalidArgument(f"source and target are the same memory: {source} and {target}. Name another target.")
    with (
        open_memory(source, mode="r", key=key) as old,
        open_memory(
            target,
            spec=old.spec if codec is None else replace(old.spec, codec=codec),
            key=key if target_key is None else target_key,
        ) as new,
    ):
        documents, rules = old.documents(), old.rules()
        names, made = [document.name for document in documents], list[str]()
        check_same(replace(new.spec, codec=old.spec.codec), old)
        total, done = sum(map(_held, documents)), sum(_held(new.document(each.name)) for each in documents)
        copied = 0

        def count(tokens: int) -> None:
            nonlocal copied
            copied += tokens
            advance(tokens)

        with (
            storing_facts(new, names, old.facts(), old.url) as complete,
            progress_bar(str(source), done, total, progress, verb="copying") as advance,
        ):
            beginnings = Beginnings()
            for document in documents:
                if (begun := new.document(document.name)).id is None:
                    made.append(document.name)
                    advance(_begin(document, beginnings.find(document), begun))
                    new.take_rules(rules, made[-1:], names, complete=False)  # an interruption may follow
                _copy(document, new, document.name, count)
                complete(document.name)
                beginnings.add(document)
        new.take_rules(rules, made, names)
        check_kept(new, names, old.url)
    return CopyResult(documents=len(documents), tokens=total, copied_tokens=copied)


def _held(document: Document) -> int:
    return document.state.readable(document.memory.spec.block_size)


def _place(url: str | Path) -> str:
    place = folder(url)
    return str(url) if place is None else str(place.resolve())


def _check_beginning(source: Document, target: Document) -> None:
    """Raise ``InvalidArgument`` unless the target is a beginning of the source."""
    same = target.reading == source.reading and target.blocks.start <= source.blocks.start
    both = min(len(source), len(target))
    first, size = source.blocks.start, source.memory.spec.block_size
    if same and both > first * size:
        there = range(first * size, both)
        ours, theirs = _ids(source, there), _ids(target, there)
        same = not bool(((ours != theirs) & (ours >= 0) & (theirs >= 0)).any())
        if same and not ours.equal(theirs):
            raise InvalidArgument(
                f"document {target.name!r} of memory {target.memory.url} has lost other blocks than that of "
                f"{source.memory.url}, and a copy cannot fill gaps. Forget it there, and copy again."
            )
    if not same or len(target) > len(source) or len(target) < first * size:
        raise InvalidArgument(
            f"document {target.name!r} of memory {target.memory.url} is not the beginning of document "
            f"{source.name!r} of {source.memory.url}. Copy under another name, or forget the old document first."
        )


# If both memories have one codec, complete blocks are copied as stored: a step is rounded to bfloat16, so decoding
# and encoding again may give other codes, and copies of copies would drift. A source that is truncated
# meanwhile is an error: the copy could mix states of two moments.
def _copy_blocks(source: Document, target: Document, blocks: range, done: int) -> None:
    """Append the source's ``blocks`` to the target, which has ``done`` tokens.

    The incomplete last block is left out if it has grown during the read. The caller reads it again.
    """
    state, _ = source.located()
    size, live = source.memory.spec.block_size, common(blocks, state.live())
    if live.start > blocks.start:
        raise InvalidArgument(
            f"document {source.name!r} lost its blocks before {live.start} during the copy. Forget document "
            f"{target.name!r} of {target.memory.url}, and copy again when nothing else is writing."
        )
    if not live:  # truncated meanwhile
        return
    ids = torch.cat([source.tokens(block) for block in live])
    as_it_is = source.memory.spec.codec == target.memory.spec.codec
    complete = common(live, state.complete(size)) if as_it_is else None
    layers = [_read(source, layer, live, complete) for layer in range(source.memory.spec.layers)]
    if live.stop * size > state.tokens and source.state != state:
        # A steady writer must not keep the complete blocks out of the copy.
        _copy_blocks(source, target, common(live, state.complete(size)), done)
        return
    with target.append(ids[done - live.start * size :]) as batch:
        for put in layers:
            put(batch)
        for place, states in recurrent_between(source, batch.before.tokens, batch.after.tokens):
            batch.put_recurrent(states, at=place)


def recurrent_between(document: Document, first: int, last: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the recurrent states kept after more than ``first`` tokens, up to ``last``, each with its token count.

    Raises ``DamagedError``.
    """
    for place in document.recurrent_places(first + 1):
        if place <= last:
            with suppress(NotFound):  # an append removes the last one; it can be computed again
                yield place, document.recurrent(place)


def _read(source: Document, layer: int, live: range, complete: range | None) -> Callable[[Append], None]:
    """Read ``live`` blocks, those of ``complete`` in stored form. Return a function that puts them into an append."""
    view = source.layer(layer)
    marks = view.landmarks(live) if layer in source.memory.spec.index_layers else None
    if complete is None:
        states = view.gather(live)
        return lambda batch: batch.put(layer, landmarks=marks, **states)
    stored, last = view.stored(complete), view.gather(range(complete.stop, live.stop))
    return lambda batch: batch.put_stored(layer, stored, last, landmarks=marks)


def _check_digests(source: Document, state: DocumentState, target: Document) -> None:
    """Raise ``DamagedError`` if the copied tokens differ from those that the source hashed in ``state``."""
    fingerprint, theirs = source.memory.spec.fingerprint, target.memory.spec.fingerprint
    digests = {state.digest, target.digest} - {None}
    if fingerprint == theirs and state.tokens == len(target) and len(digests) > 1:
        raise DamagedError(
            f"the token ids of document {source.name!r} have changed since they were read: their digest is "
            f"{state.digest}, but the copy has {target.digest}. Run verify on {source.memory.url}, and forget "
            "the copy."
        )


def _begin(source: Document, found: tuple[int, str], target: Document) -> int:
    """Begin the copy of ``source``, as a fork of an earlier copy if one is ``found``. Return the tokens it has then."""
    blocks, name = found
    if not blocks or (like := target.memory.document(name)).id is None:  # the limit may have evicted it
        target.begin(source.blocks.start, source.reading)
        return 0
    return _held(like.fork(target.name, blocks))


class Beginnings:
    """An index of documents that finds the one sharing most first blocks, as stored values, with another."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, str], tuple[int, str]] = {}
        """First live block, home number and reading -> last shared block, and the document that has it."""

    def find(self, document: Document) -> tuple[int, str]:
        """Return the number of shared blocks and the added document that has them; 0 if there is none."""
        for key, stop, _ in self._pieces(document):
            if key in self._found:
                there, name = self._found[key]
                return min(stop, there), name
        return 0, ""

    def add(self, document: Document) -> None:
        """Add a document, so that others are compared with it too."""
        for key, stop, name in self._pieces(document):
            if self._found.get(key, (0, ""))[0] >= stop:
                return  # a document with this block has all blocks before it
            self._found[key] = stop, name

    def _pieces(self, document: Document) -> Iterator[tuple[tuple[int, int, str], int, str]]:
        state, places = document.located()
        if places is not None:
            read = json.dumps(state.reading, sort_keys=True)
            for owner, blocks in places.node.pieces(range(state.blocks)):
                yield (state.first, owner, read), blocks.stop, state.name


AT_ONCE = 1 << 18
"""Number of tokens compared at a time."""
_COMPARABLE = ("layers", "fields", "block_size", "dtype", "codec")
"""Parts of the spec that must agree before checksums of states can be compared."""

Advance = Callable[[int], None]
States = Literal["same", "different", "none in common", "not comparable"]


@dataclass(frozen=True, kw_only=True)
class DocumentDifference:
    """The result of comparing two documents."""

    name_a: str
    name_b: str
    tokens_a: int
    tokens_b: int
    common_tokens: int
    """Tokens at the beginning that both have and that can still be read in both."""
    common_blocks: int
    """Blocks of the first document that lie whole in this beginning."""
    states: States
    """Result for ``common_blocks``, and for a last block that ends both; other layouts or codecs are not comparable."""
    compared_blocks: int
    """Number of blocks whose states were compared, each in all layers."""
    lost_blocks: int
    """Number of blocks in this beginning that were dropped in one document and not in the other."""
    first_different: tuple[int, int] | None
    """The first block whose states differ, and the lowest such layer."""

    @property
    def same(self) -> bool:
        """Whether the texts and all comparable states are the same, and the same blocks are there."""
        texts = self.tokens_a == self.tokens_b == self.common_tokens
        return texts and self.states != "different" and not self.lost_blocks


@dataclass(frozen=True, kw_only=True)
class MemoryDifference:
    """The result of comparing two memories."""

    spec: tuple[tuple[str, Any, Any], ...]
    """Differences of spec and fingerprint: name, value in the first memory, value in the second."""
    only_a: tuple[str, ...]
    """Documents that only the first memory has."""
    only_b: tuple[str, ...]
    documents: tuple[DocumentDifference, ...]
    """Comparisons of the documents that both have."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.spec or self.only_a or self.only_b) and all(each.same for each in self.documents)


def compare_memories(a: Memory, b: Memory, advance: Advance = lambda tokens: None) -> MemoryDifference:  # noqa: ARG005 - nobody listens
    """Compare all documents, by name; ``advance`` takes the number of tokens just compared.

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
    # Of texts that end together, a last block that is not full is compared too.
    there = range(blocks + (tokens_a == tokens_b == shared))
    comparable = all(getattr(a.memory.spec, name) == getattr(b.memory.spec, name) for name in _COMPARABLE)
    compared, lost, first = _compare_blocks(a, b, there, states=comparable)
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
        lost_blocks=lost,
        first_different=first,
    )


def spec_differences(a: MemorySpec, b: MemorySpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences between two specs: name, and both values; each part of the fingerprint separately."""
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
        # Blocks that have left or were dropped in either document cannot be compared.
        differ = ((ours != theirs) & (ours >= 0) & (theirs >= 0)).nonzero()
        if len(differ):
            return start + int(differ[0])
        advance(len(tokens))
    return most


def _ids(document: Document, tokens: range) -> Tensor:
    """Return token ids ``[n]``; -1 if the block has left or was dropped."""
    size = document.memory.spec.block_size
    blocks = range(tokens.start // size, -(-tokens.stop // size))
    ids = torch.full((len(blocks) * size,), -1)
    for part in document.present(common(blocks, document.blocks)):
        found = document.tokens(part)
        place = (part.start - blocks.start) * size
        ids[place : place + len(found)] = found
    return ids[tokens.start - blocks.start * size :][: len(tokens)]


# Checksums in the headers are enough: LMDB need not read payloads.
def _compare_blocks(
    a: Document, b: Document, blocks: range, *, states: bool
) -> tuple[int, int, tuple[int, int] | None]:
    """Return how many ``blocks`` both have, if ``states`` are comparable, and how many were dropped in one only.

    Blocks that have left are not counted. Return also the first block with different states, and its layer.
    """
    step = max(1, AT_ONCE // a.memory.spec.block_size)
    compared, lost, first = 0, 0, None
    for start in range(blocks.start, blocks.stop, step):
        part = common(range(start, min(start + step, blocks.stop)), common(a.blocks, b.blocks))
        ours, theirs = ({block for piece in each.present(part) for block in piece} for each in (a, b))
        lost += len(ours ^ theirs)
        there = sorted(ours & theirs) if states else []
        compared += len(there)
        first = first or _first_different(a, b, there)
    return compared, lost, first


def _first_different(a: Document, b: Document, blocks: list[int]) -> tuple[int, int] | None:
    found: list[tuple[int, int]] = []
    if not blocks:
        return None
    for layer in range(a.memory.spec.layers):
        pairs = zip(a.layer(layer).checksums(blocks), b.layer(layer).checksums(blocks), strict=True)
        found += [(blocks[at], layer) for at, (ours, theirs) in enumerate(pairs) if ours != theirs][:1]
    return min(found, default=None)
