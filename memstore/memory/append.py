"""Changes of a document: an append, which commits tokens and states together or not at all; a cut; a fork."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index.contract import check_numbers, check_tensor
from memstore.json_checks import storable
from memstore.memory.entry import READING, Address, DocumentState, Home, Places
from memstore.memory.shared import SharedStore
from memstore.memory.spec import (
    beginning,
    byte_rows,
    chain,
    encode_blocks,
    finite,
    kept_recurrent,
    plain_layouts,
    put_recurrent,
    read_rows,
    to_record,
    token_layout,
    torch_dtype,
)
from memstore.memory.usage import Deletion
from memstore.store.records import Batch, Bytes, Record


def truncation(
    shared: SharedStore, number: int, before: DocumentState, blocks: int, fresh: int
) -> tuple[Batch, DocumentState]:
    """Return the batch that cuts document ``number`` to ``blocks`` complete blocks, and its new state.

    If the next append would rewrite shared blocks, or blocks before its home, the document moves to the home ``fresh``.
    Its state says so.
    """
    batch, places, deleting = Batch(), shared.places(number, before), Deletion(shared)
    digest = shared.history.digest(places, before, blocks, shared.spec)
    after, home = replace(before.cut(blocks, shared.spec.block_size), digest=digest), places.node
    if blocks < places.start or any(used.stop > blocks for used in deleting.used_by_others(number)):
        after, home = moved(batch, number, places, after, fresh)
    deleting.change(batch, {number: (after, home)})
    return batch, after


def moved(batch: Batch, number: int, places: Places, after: DocumentState, fresh: int) -> tuple[DocumentState, Home]:
    """Return state and home of a document that shares all its old blocks and continues at the home ``fresh``."""
    home = places.branch(fresh, after.blocks)
    _put_homes(batch, home, number, places)
    return replace(after, home=fresh, **_told(home)), home


def _put_homes(batch: Batch, home: Home, number: int, of: Places) -> None:
    """Store a new home, and also its parent if only an entry with spans describes that one yet."""
    _put_home(batch, home, number)
    if home.below is of.node:
        _put_home(batch, of.node, of.number)


def _told(home: Home) -> dict[str, Any]:
    """Return the part of a document's entry that describes its home: ``branch`` or ``spans``."""
    if home.below is None:
        return {"branch": None, "spans": ()}
    if not home.below.listed:
        return {"branch": (home.below.number, home.start), "spans": ()}
    pieces = list(home.below.pieces(range(home.start)))[::-1]
    return {"branch": None, "spans": tuple((owner, blocks.start, blocks.stop) for owner, blocks in pieces)}


def _put_home(batch: Batch, home: Home, document: int) -> None:
    """Store the branch of ``home``, which was made for a document."""
    facts = _told(home)
    if facts["branch"]:
        parent, stop = facts["branch"]
        batch.put(Address(home.number).branch, Record.from_json({"document": document, "parent": parent, "stop": stop}))
    elif facts["spans"]:
        batch.put(Address(home.number).branch, Record.from_json({"document": document, "spans": facts["spans"]}))


def forking(
    shared: SharedStore, of: int, state: DocumentState, name: str, blocks: int, number: int
) -> tuple[Batch, DocumentState]:
    """Return the batch that makes document ``number`` from the first ``blocks`` blocks of ``of``, and its state.

    If an incomplete last block is among them, it is copied, and nothing else. Raises ``DamagedError`` and ``NotFound``.
    """
    size = shared.spec.block_size
    whole = min(blocks, state.tokens // size)
    parent = shared.places(of, state)
    home = parent.branch(number, whole)
    fork = DocumentState(
        name=name,
        tokens=min(state.tokens, blocks * size),
        blocks=blocks,
        first=min(state.first, blocks),
        **_told(home),
        digest=shared.history.digest(parent, state, whole, shared.spec),
        reading=state.reading,
        dropped=state.dropped_below(whole),
    )
    batch, places = Batch(), Places(number, fork, home)
    _put_homes(batch, home, number, parent)
    if blocks > whole:
        _copy_block(batch, shared, parent, places, whole, fork.tokens - whole * size)
    batch.put(places.entry, fork.to_record())
    if shared.spec.recurrent:
        for place in kept_recurrent(shared.store, of, fork.tokens)[-1:]:
            batch.put(Address(number).recurrent(place), *(shared.store.get(Address(of).recurrent(place)) or ()))
    return batch, fork


def _copy_block(batch: Batch, shared: SharedStore, parent: Places, places: Places, block: int, tokens: int) -> None:
    """Copy an incomplete last block with ``tokens`` tokens: ids, states and landmarks."""
    store, layouts = shared.store, plain_layouts(shared.spec)
    ids = read_rows(store, [parent.tokens(block)], [token_layout(tokens)])[0]
    batch.put(places.tokens(block), to_record(ids[0]))
    layers = range(shared.spec.layers)
    rows = store.gather([parent.block(layer, block) for layer in layers], layouts)
    for layer in layers:
        records = (Record(layout, out[layer]) for layout, out in zip(layouts, rows, strict=True))
        batch.put(places.block(layer, block), *records)
    for layer in shared.spec.index_layers:
        runs = shared.runs(layer)
        marks = torch.cat([keys for _, keys in runs.read(parent, range(block, block + 1))])
        runs.write(batch, places, block, marks, block)


Tokens = Sequence[int] | npt.NDArray[np.integer] | Tensor

_LARGEST_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class _Layer:
    complete: list[Tensor]  # the stored rows of complete blocks, [n, ...] each
    incomplete: list[Tensor]  # the fields of an incomplete last block, [0 or 1, *shape] each
    landmarks: Tensor | None  # [n, G, P, D]


class Append:
    """The object that ``with document.append(tokens) as batch`` gives: put every layer once; leaving the body commits.

    Do not change the tensors before that: those with the right dtype are not copied.
    """

    def __init__(
        self,
        shared: SharedStore,
        state: DocumentState,
        tokens: Tensor,
        reading: Mapping[str, Any] | None,
        commit: Callable[[Append], None],
    ) -> None:
        self._shared = shared
        self._commit = commit
        self._layers: dict[int, _Layer] = {}
        self._recurrent: dict[int, list[Record]] = {}
        self.before = state
        """State of the document that this append starts from."""
        self.after = state.grown(len(tokens), shared.spec.block_size, shared.spec.capacity)
        """State of the document after the commit. Its digest is computed then."""
        if reading is not None:
            self.after = replace(self.after, reading=checked_reading(state, reading))
        self.tokens = tokens
        """Token ids ``[t]`` int32."""
        first = state.tokens // shared.spec.block_size
        self.blocks = range(first, self.after.blocks if len(tokens) else first)
        """Blocks whose states must be put. An incomplete last block comes first and is rewritten whole."""
        self._complete = max(0, self.after.tokens // shared.spec.block_size - first)  # of these
        self._layouts = shared.block_layouts

    def put(self, layer: int, *, landmarks: Tensor | None = None, **fields: Tensor) -> None:
        """Store states of ``self.blocks`` in one layer: each field ``[n, *shape]``, the last block padded with zeros.

        Layers that are searched need ``landmarks [n, key_heads, P, key_dim]``; others take none. Raises
        ``InvalidArgument``, naming layer and field.
        """
        self._check_new(layer)
        spec = self._shared.spec
        if set(fields) != set(spec.fields):
            raise InvalidArgument(f"layer {layer}: expected the fields {list(spec.fields)}, not {list(fields)}.")
        states = {name: self._checked(layer, name, fields[name], shape) for name, shape in spec.fields.items()}
        complete = encode_blocks(spec, {name: tensor[: self._complete] for name, tensor in states.items()})
        full = self._complete == len(self.blocks)
        incomplete = [] if full else [tensor[self._complete :] for tensor in states.values()]
        self._layers[layer] = _Layer(complete, incomplete, self._checked_landmarks(layer, landmarks))

    def put_stored(
        self, layer: int, complete: Sequence[Tensor], last: Mapping[str, Tensor], *, landmarks: Tensor | None = None
    ) -> None:
        """Like ``put``, for complete blocks in the stored form of the same codec: see ``LayerView.stored``.

        ``complete`` is ``[n, ...]`` for each of ``block_layouts``. ``last`` has the fields of the incomplete last
        block, ``[0 or 1, *shape]``. Encoded data is not encoded again, so every bit stays the same.
        """
        self._check_new(layer)
        self._check_stored(layer, complete, last)
        incomplete = [last[name].detach().cpu() for name in self._shared.spec.fields]
        self._layers[layer] = _Layer(list(complete), incomplete, self._checked_landmarks(layer, landmarks))

    def put_recurrent(self, states: Sequence[Tensor], *, at: int | None = None) -> None:
        """Store the recurrent states of layers without attention, as ``spec.recurrent`` says. This is optional.

        ``at``: the number of tokens that they have read, ending among the appended tokens; by default all. Raises
        ``InvalidArgument``.
        """
        place, spec = self.after.tokens if at is None else at, self._shared.spec
        if not self.before.tokens < place <= self.after.tokens:
            raise InvalidArgument(
                f"recurrent states after token {place} must end among the appended tokens: pass at= with the number "
                "of tokens read."
            )
        found = [(tensor.dtype, tuple(tensor.shape)) for tensor in states]
        expected = [(torch_dtype(each.dtype), each.shape) for each in spec.recurrent]
        if not expected or found != expected:
            raise InvalidArgument(f"recurrent states: expected {expected}, not {found}.")
        if not all(finite(tensor) for tensor in states):
            raise InvalidArgument("recurrent states contain NaN or infinity. Find the cause before you store them.")
        self._recurrent[place] = [to_record(tensor.detach().cpu()) for tensor in states]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.blocks:
            if missing := sorted(set(range(self._shared.spec.layers)) - set(self._layers)):
                raise InvalidArgument(
                    f"layers {missing} were not put, so nothing was written. Put every layer in the body of the with "
                    "block."
                )
            self._commit(self)

    def compose(self, document: int, last_tokens: Tensor | None) -> Batch:
        """Return all changes. ``last_tokens [t] int32`` belong to an incomplete last block. Raises ``DamagedError``."""
        batch = Batch()
        places = self._shared.places(document, self.before)
        tokens = self.tokens if last_tokens is None else torch.cat([last_tokens, self.tokens])
        self._leave(batch, document, places)
        size = self._shared.spec.block_size
        full = len(tokens) // size
        rows = byte_rows(tokens[: full * size].view(full, size))
        self._put_tokens(batch, places, rows, tokens[full * size :])
        self._put_history(batch, places, rows)
        for number, layer in sorted(self._layers.items()):
            self._put_layer(batch, places, number, layer)
        if self._recurrent:
            step = self._shared.spec.recurrent_step
            put_recurrent(batch, self._shared.store, document, self.before.tokens, self._recurrent, step)
        batch.put(places.entry, self.after.to_record())
        return batch

    def _leave(self, batch: Batch, document: int, places: Places) -> None:
        """Delete the blocks that exceed the capacity."""
        if range(self.before.first, min(self.after.first, self.before.blocks)):
            Deletion(self._shared).change(batch, {document: (self.after, places.node)})

    def _put_tokens(self, batch: Batch, places: Places, rows: Bytes, incomplete: Tensor) -> None:
        layout, kept = token_layout(self._shared.spec.block_size), self._kept(len(rows))
        for key, row in zip(places.all_tokens(kept), rows[len(rows) - len(kept) :], strict=True):
            batch.put(key, Record(layout, row))
        if len(incomplete):
            batch.put(places.tokens(self.blocks[-1]), to_record(incomplete))

    def _kept(self, complete: int) -> range:
        """Return those of the first ``complete`` blocks that the capacity leaves in the document."""
        blocks = self.blocks[:complete]
        return range(min(max(blocks.start, self.after.first), blocks.stop), blocks.stop)

    def _put_history(self, batch: Batch, places: Places, rows: Bytes) -> None:
        """Store hashes of the blocks that are complete now, whose tokens are ``rows [n, bytes]``.

        A document that began without hashes continues without them.
        """
        spec = self._shared.spec
        if not self.before.tokens:
            before = beginning(spec.fingerprint, self.after.reading)
        elif self.before.digest is not None:
            before = bytes.fromhex(self.before.digest)
        else:
            return
        if len(rows):
            hashes = chain(before, rows)
            self._shared.history.write(batch, places, self.blocks.start, torch.from_numpy(hashes), self.after.first)
            before = hashes[-1].tobytes()
        self.after = replace(self.after, digest=before.hex())

    def _put_layer(self, batch: Batch, places: Places, number: int, layer: _Layer) -> None:
        kept = self._kept(self._complete)
        payloads = [byte_rows(stored)[self._complete - len(kept) :] for stored in layer.complete]
        for key, rows in zip(places.all_blocks(number, kept), zip(*payloads, strict=True), strict=True):
            batch.put(key, *map(Record, self._layouts, rows))
        for block in self.blocks[self._complete :]:
            batch.put(places.block(number, block), *(to_record(field[0]) for field in layer.incomplete))
        if layer.landmarks is not None:
            runs = self._shared.runs(number)
            runs.write(batch, places, self.blocks.start, layer.landmarks, self.after.first)

    def _check_new(self, layer: int) -> None:
        self._shared.check_layer(layer)
        if layer in self._layers:
            raise InvalidArgument(f"layer {layer} was put already; put all its fields in one call.")

    def _check_stored(self, layer: int, complete: Sequence[Tensor], last: Mapping[str, Tensor]) -> None:
        spec, blocks = self._shared.spec, (self._complete, len(self.blocks) - self._complete)
        expected = [(torch_dtype(each.dtype), (blocks[0], *each.shape)) for each in self._layouts]
        expected += [(torch_dtype(spec.dtype), (blocks[1], *shape)) for shape in spec.fields.values()]
        tensors = [*complete, *(last[name] for name in spec.fields if name in last)]
        if (found := [(each.dtype, tuple(each.shape)) for each in tensors]) != expected:
            raise InvalidArgument(f"layer {layer}: expected stored blocks of {expected}, not {found}.")

    def _checked(self, layer: int, name: str, tensor: object, shape: tuple[int, ...]) -> Tensor:
        spec = self._shared.spec
        states = _floats(f"layer {layer}, {name}", tensor, [len(self.blocks), *shape])
        states = states.detach().to("cpu", torch_dtype(spec.dtype))
        if not finite(states):
            raise InvalidArgument(
                f"layer {layer}, {name}: as {spec.dtype} they contain NaN or infinity. Find the cause, or use a "
                "dtype with a wider range (bfloat16, float32)."
            )
        return states

    def _checked_landmarks(self, layer: int, landmarks: Tensor | None) -> Tensor | None:
        spec = self._shared.spec
        if layer not in spec.index_layers:
            if landmarks is not None:
                raise InvalidArgument(f"layer {layer} has no landmarks; layers with landmarks: {spec.index_layers}.")
            return None
        what, shape = f"layer {layer}, landmarks", (spec.key_heads, spec.keys_per_block, spec.key_dim)
        marks = _floats(what, landmarks, [len(self.blocks), *shape])
        check_numbers(what, marks)
        return marks.detach().cpu()


def _floats(what: str, value: object, shape: list[int]) -> Tensor:
    """Return ``value`` if it is a dense floating-point tensor ``shape``. Raises ``InvalidArgument``."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or list(value.shape) != shape:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidArgument(f"{what}: expected floating point {shape}, not {'none' if value is None else found}.")
    check_tensor(what, value)
    return value


def checked_reading(state: DocumentState, reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``reading`` as the entry stores it."""
    given = dict(reading) if isinstance(reading, Mapping) else reading
    values: dict[str, Any] = json.loads(storable(given, READING, "reading"))
    if state.tokens and values != state.reading:
        raise InvalidArgument(
            f"document {state.name!r} was begun with reading={state.reading}, not {values}, so the states would "
            "not fit together. Use the same reading, or another document."
        )
    return values


def as_tokens(tokens: Tokens) -> Tensor:
    """Return token ids as int32 ``[t]``. Raises ``InvalidArgument`` for values that are no ids."""
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        why = "of a tokenizer's output pass input_ids" if isinstance(tokens, str | Mapping) else error
        raise InvalidArgument(f"tokens must be integers of shape [t] ({why}).") from None
    check_tensor("tokens", ids)
    if ids.dim() == 1 and not ids.numel():
        return torch.empty(0, dtype=torch.int32)
    if ids.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has no minimum for these
        ids = ids.long()
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InvalidArgument(f"tokens must be integers of shape [t], not {ids.dtype} of {list(ids.shape)}.")
    low, high = map(int, ids.aminmax())
    if low < 0 or high > _LARGEST_TOKEN:
        raise InvalidArgument(f"token ids must be from 0 to {_LARGEST_TOKEN}; got {low} to {high}.")
    return ids.detach().to("cpu", torch.int32)
