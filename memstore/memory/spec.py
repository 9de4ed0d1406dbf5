"""The layout of a memory: conditions for using stored states again, and the layouts and content of stored values.

Blocks are encoded once, when they are complete. An incomplete last block is stored without a codec and read again when
it grows. So no state is ever encoded twice, and errors do not add up. The entry of a document shows which form a block
has.

Landmarks and the hashes of histories are short rows, one per block, in runs of consecutive blocks. Only the last run is
ever rewritten. Landmarks are stored with their dtype, in bfloat16, or as signs of one bit each: 1 means that a number
is not negative. Bit 0 of byte 0 belongs to the first number (little-endian). A bit is decoded to +1 or -1, so that an
inner product with a query counts agreeing signs.

The history of a document is a chain of hashes over its tokens, one for each complete block. The hash before the first
block covers the model that computed the states, and the options of its reading: ``h = H(fingerprint, reading)``. That
of a block covers everything up to its end: ``h[i] = H(h[i - 1], tokens of block i)``. If the hashes of two blocks are
equal, their whole histories are equal, and so are their states. So blocks are found by hash and shared.

Linear attention, state spaces and convolutions keep a state of fixed size, for any number of tokens. Continuing a
document needs the state at its end; after a cut or a fork, at some earlier place. A state can always be computed again
from an earlier one and the tokens between, at worst from all tokens. So each state is optional, and those that are kept
take about a quarter of the space of the blocks. They lie under the number of the document itself. A fork gets a copy of
the last one that it needs, and shares none.

PyTorch is loaded only to read or write rows. The child process of `verify` does neither, and so starts in a tenth of
the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memstore._version import __version__
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, NotAMemory, NotFound
from memstore.json_checks import anything, array, check_whole, fit, maybe, members, row, table, text, whole
from memstore.lazy import later, torch
from memstore.memory.entry import HASH_BYTES, HASHES_PER_RUN, HEADER, Address, DocumentState, Places
from memstore.memory.urls import NewMemory
from memstore.store.cache import as_tensor, empty_rows
from memstore.store.contract import BlockStore
from memstore.store.records import (
    ITEM_BYTES,
    MAX_DIMENSIONS,
    MAX_ITEM,
    Batch,
    Bytes,
    Key,
    Layout,
    Record,
    Table,
    describe,
)

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.store import codecs
else:
    codecs = later("memstore.store.codecs")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identity of the model that makes the states of a memory: another model cannot use them.

    Attributes:
        architecture: Kind and sizes of the model, such as ``llama/30x3x64`` (layers, key-value heads, head size).
        weights: Digest of the weights.
        tokenizer: Digest of the tokenizer; None if it is unknown, which agrees with everything.
        positions: Position encoding of the model, such as ``rope``.
        layout: Content of a block, such as ``kv``: keys before position encoding, and values.
        dtype: Element type that the model computed in.
        block_size: Tokens per block.
    """

    architecture: str
    weights: str
    tokenizer: str | None
    positions: str
    layout: str
    dtype: str
    block_size: int

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the differences between this model and the ``other``, which is the memory's; one phrase each."""
        known = other if None not in (self.tokenizer, other.tokenizer) else replace(other, tokenizer=self.tokenizer)
        return _differences(self, known)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fingerprint:
        """Invert ``to_dict``. Raises the errors of ``MemorySpec.from_dict``."""
        check_names("fingerprint", values, {field.name for field in fields(cls)})
        fit(values, FINGERPRINT, "the fingerprint of a memory")
        return cls(**values)


FINGERPRINT = table(
    **dict.fromkeys(("architecture", "weights", "positions", "layout", "dtype"), text(10_000)),
    tokenizer=maybe(text(10_000)),
    block_size=whole(1, 2**31),
)


def check_names(what: str, values: Mapping[str, Any], known: set[str]) -> None:
    """Raise ``ForeignMemory`` unless ``values`` has exactly the ``known`` names."""
    if unknown := set(values) - known:
        raise ForeignMemory.newer(f"its {what} has", unknown)
    if missing := sorted(known - set(values)):
        raise ForeignMemory(
            f"another version of memstore wrote this memory: its {what} lacks {', '.join(missing)}; "
            "open it with the version that wrote it"
        )


DTYPES = ("float32", "float16", "bfloat16")
KEY_DTYPES = ("float32", "bfloat16", "bit")
CODECS = ("none", "int8", "fp8", "int4")
MOST_LAYERS = 2**16
MOST_NUMBERS = 2**29
"""Most numbers in the states, or the landmarks, of one block of one layer: 2 GiB of float32, near a store's limit."""

MOST_RECORDS = 255
"""Most records in one value."""
RECURRENT_SHARE = 4
"""Blocks take this many times the space of the recurrent states kept beside them."""

MOST_SIZE = 2**31
_SIZE = whole(1, MOST_SIZE)
SPEC = table(
    layers=_SIZE,
    fields=array(row(text(255), array(_SIZE, 7)), 100),
    index_layers=array(whole(0, 2**31), MOST_LAYERS),
    key_heads=_SIZE,
    key_dim=_SIZE,
    block_size=_SIZE,
    keys_per_block=_SIZE,
    dtype=text(64),
    key_dtype=text(64),
    capacity=maybe(_SIZE),
    codec=text(64),
    recurrent=array(row(text(64), array(_SIZE, MAX_DIMENSIONS)), MOST_RECORDS),
    fingerprint=members(anything, 100),
)


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """Everything about a memory that never changes after it was made. Raises ``InvalidArgument``.

    Attributes:
        layers: Layers that keep states.
        fields: Name of each tensor of a block -> its shape, such as ``{"k": (G, S, D), "v": (G, S, D)}``.
        index_layers: Layers that have landmarks: all, or the one that routes for all.
        key_heads: Heads that have keys of their own in a landmark.
        key_dim: Size of one key.
        block_size: Tokens per block.
        keys_per_block: Keys per block and key head.
        dtype: Element type of the fields as stored: float32, float16 or bfloat16.
        key_dtype: Element type of the landmarks as stored: float32, bfloat16, or bit (the signs, one bit each).
        capacity: Blocks per document; the oldest leave when there are more. None: no limit.
        codec: Codec of complete blocks: none (unchanged), int8, fp8 or int4, see ``memstore.store.codecs``.
        recurrent: Element type and shape of each recurrent state, for layers without attention; most models have
            none.
        fingerprint: Identity that must agree before the states are used again.
    """

    layers: int
    fields: Mapping[str, tuple[int, ...]] = field(hash=False)
    index_layers: tuple[int, ...]
    key_heads: int
    key_dim: int
    block_size: int
    keys_per_block: int
    dtype: str = "float32"
    key_dtype: str = "float32"
    capacity: int | None = None
    codec: str = "none"
    recurrent: tuple[Layout, ...] = ()
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", {name: tuple(shape) for name, shape in self.fields.items()})
        object.__setattr__(self, "index_layers", tuple(self.index_layers))
        recurrent = tuple(Layout(dtype, tuple(shape)) for dtype, shape in self.recurrent)
        object.__setattr__(self, "recurrent", recurrent)
        check_whole("layers", self.layers, 1, MOST_LAYERS)
        for name in ("key_heads", "key_dim", "block_size", "keys_per_block", "capacity"):
            if (value := getattr(self, name)) is not None or name != "capacity":
                check_whole(name, value, 1, MOST_SIZE)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("key_dtype", self.key_dtype, KEY_DTYPES)
        _one_of("codec", self.codec, CODECS)
        self._check_fields()
        self._check_index()
        self._check_recurrent()

    def differences(self, other: MemorySpec) -> list[str]:
        """Return the differences between this spec and the ``other``, which is the memory's; the fingerprint first."""
        found = self.fingerprint.differences(other.fingerprint)
        found += _differences(self, replace(other, fingerprint=self.fingerprint))
        return list(dict.fromkeys(found))  # both contain block_size and dtype

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        # A list of pairs, because the order of the fields is the order of the records and must survive sorted JSON.
        values["fields"] = [[name, list(shape)] for name, shape in self.fields.items()]
        # Specs without recurrent states keep their original form, the only one that older versions know.
        values["recurrent"] = [[dtype, list(shape)] for dtype, shape in self.recurrent]
        if not self.recurrent:
            del values["recurrent"]
        return values | {"index_layers": list(self.index_layers), "fingerprint": self.fingerprint.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemorySpec:
        """Invert ``to_dict``.

        Raises ``ForeignMemory`` for values that this version does not know, ``DamagedError`` for ones that no version
        writes.
        """
        fit(values, members(anything, 100), "the spec of a memory")
        values = {"recurrent": [], **values}
        check_names("spec", values, {item.name for item in fields(cls)})
        fit(values, SPEC, "the spec of a memory")
        shapes = {name: tuple(shape) for name, shape in values["fields"]}
        fingerprint = Fingerprint.from_dict(values["fingerprint"])
        return cls(**{**values, "fields": shapes, "fingerprint": fingerprint})

    @property
    def recurrent_step(self) -> int:
        """Tokens between the places whose recurrent states are kept."""
        states = sum(layout.nbytes for layout in self.recurrent)
        return max(self.block_size, RECURRENT_SHARE * states * self.block_size // self._block_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's fields in all layers, without a codec."""
        return self._block_bytes // self.block_size

    @property
    def _block_bytes(self) -> int:
        return self.layers * sum(layout.nbytes for layout in plain_layouts(self))

    def _check_fields(self) -> None:
        if not self.fields:
            raise InvalidArgument("fields is empty; a block needs at least one tensor, such as {'k': (G, S, D)}.")
        for name in self.fields:
            if not name.isidentifier() or name in ("self", "layer", "landmarks"):
                raise InvalidArgument(f"fields: {name!r} cannot be the name of a tensor; use a word such as 'k'.")
        _check_shapes("fields", self.fields.values())

    def _check_index(self) -> None:
        known = range(self.layers)
        if sorted(set(self.index_layers)) != list(self.index_layers) or not all(n in known for n in self.index_layers):
            raise InvalidArgument(
                f"index_layers must be ascending layers from 0 to {self.layers - 1}, not {self.index_layers}."
            )
        if self.key_dtype == "bit" and self.key_dim % 8:
            raise InvalidArgument(f"key_dim must be a multiple of 8 if key_dtype is 'bit', not {self.key_dim}.")
        _check_shapes("landmarks", [(self.key_heads, self.keys_per_block, self.key_dim)])

    def _check_recurrent(self) -> None:
        if len(self.recurrent) > MOST_RECORDS:
            raise InvalidArgument(f"recurrent has {len(self.recurrent)} tensors; at most {MOST_RECORDS} are allowed.")
        for layout in self.recurrent:
            _one_of("recurrent", layout.dtype, DTYPES)
        _check_shapes("recurrent", [layout.shape for layout in self.recurrent])


def _differences(ours: Any, theirs: Any) -> list[str]:
    pairs = ((each.name, getattr(ours, each.name), getattr(theirs, each.name)) for each in fields(ours))
    return [f"{name}: {_of_both(a, b)} here, {_of_both(b, a)} in the memory" for name, a, b in pairs if a != b]


def _of_both(here: Any, there: Any) -> str:
    """Return ``here``, or if the two are texts that differ only in options, its options that differ."""
    ours, theirs = str(here).split(), str(there).split()
    other = [word for word in ours if word not in theirs]
    return " ".join(other) if other and all("=" in word for word in {*ours} ^ {*theirs}) else str(here)


def _check_shapes(what: str, shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise ``InvalidArgument`` for impossible shapes of one block of one layer."""
    numbers = 0
    for shape in shapes:
        for size in shape:
            check_whole(f"a size in {what}", size, 1, MOST_SIZE)
        numbers += math.prod(shape)
    if numbers > MOST_NUMBERS:
        raise InvalidArgument(
            f"{what}: a block of one layer has {numbers:,} numbers; at most {MOST_NUMBERS:,} are allowed."
        )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


BELIEVED_BYTES = 1024 * 1024
"""Size of a document, from its entry, up to which it is not compared with the size of the store."""
RUN_BYTES = 64 * 1024
"""Approximate size of a run of landmarks, so that opening a memory reads few values."""


def block_layouts(spec: MemorySpec) -> list[Layout]:
    """Return the layouts of a complete block of one layer, in record order: the codec's output for each field."""
    if spec.codec == "none":
        return plain_layouts(spec)
    return [layout for shape in spec.fields.values() for layout in codecs.LOSSY[spec.codec].layouts(spec.dtype, shape)]


def plain_layouts(spec: MemorySpec) -> list[Layout]:
    """Return the layouts of an incomplete last block, which is stored without a codec."""
    return [Layout(spec.dtype, shape) for shape in spec.fields.values()]


def token_layout(tokens: int) -> Layout:
    """Return the layout of the token ids of a block that holds ``tokens``."""
    return Layout("int32", (tokens,))


def run_layout(spec: MemorySpec, blocks: int) -> Layout:
    """Return the layout of a run of ``blocks`` blocks: ``[blocks, G, P, D]``, or for bits ``[blocks, G, P, D/8]``.

    The layout of bits is uint8.
    """
    bits = spec.key_dtype == "bit"
    numbers = spec.key_dim // 8 if bits else spec.key_dim
    return Layout("uint8" if bits else spec.key_dtype, (blocks, spec.key_heads, spec.keys_per_block, numbers))


class Room:
    """Checks whether a store is large enough for the blocks in a document's entry, each stored once.

    Without this check, a false entry could make memstore count, or make room for blocks, for ever.
    """

    def __init__(self, store: BlockStore, spec: MemorySpec) -> None:
        self._store = store
        self._block_size = spec.block_size
        self._bytes = spec.layers * sum(layout.nbytes for layout in block_layouts(spec))
        # Data that this process wrote itself is trusted.
        self._believed = BELIEVED_BYTES if store.capabilities.durable else math.inf

    def holds(self, state: DocumentState) -> bool:
        """Whether there is room for a document. Raises ``DamagedError`` for an entry that contradicts itself."""
        state.check()
        full = len(state.complete(self._block_size))
        needed = self._bytes * max(full - sum(stop - start for start, stop in state.dropped), len(state.live()) - full)
        if needed > self._believed:
            # Twice, so that a growing document is not compared with the store at each append.
            self._believed = max(self._believed, 2 * self._store.used_bytes())
        return needed <= self._believed


def blocks_per_run(spec: MemorySpec) -> int:
    """Return the number of blocks whose landmarks are stored together; a new memory stores this number."""
    return max(1, RUN_BYTES // run_layout(spec, 1).nbytes)


FORMAT = 1
MOST_RUN_BYTES = 64 * 1024 * 1024
"""Most bytes of a run with several blocks, far more than ``RUN_BYTES`` ever was."""
FACTS = table(format=whole(1), library=text(1000), spec=anything, blocks_per_run=whole(1, 2**31))


class Header(NamedTuple):
    """The content of the header."""

    spec: MemorySpec
    blocks_per_run: int
    """Blocks whose landmarks are stored together."""


def blank(spec: MemorySpec) -> NewMemory:
    """Return the batch that makes an empty store a memory with this spec."""
    batch = Batch()
    values = {"format": FORMAT, "library": __version__, "spec": spec.to_dict(), "blocks_per_run": blocks_per_run(spec)}
    batch.put(HEADER, Record.from_json(values))
    return NewMemory(batch, sum(layout.nbytes for layout in block_layouts(spec)), token_layout(spec.block_size).nbytes)


def read_header(store: BlockStore, url: str) -> Header:
    """Read and check the header. Raises ``NotAMemory``, ``ForeignMemory`` or ``DamagedError``."""
    try:
        records = store.get(HEADER)
    except DamagedError as error:
        raise DamagedError(
            f"memory {url} has lost its header, so none of its values can be interpreted ({error}). Restore it "
            "from a copy",
            memory=url,
            remedy="restore",
        ) from error
    if records is None:
        raise NotAMemory(f"{url} has no header of a memory, so it is not a memory. Check the path.")
    values: dict[str, Any] = fit(records[0].to_json(), FACTS, f"the header of memory {url}")
    if values["format"] > FORMAT:
        raise ForeignMemory(
            f"memory {url} has format {values['format']}, made by memstore {values['library']}; "
            f"memstore {__version__} reads up to {FORMAT}. Upgrade memstore."
        )
    try:
        spec = MemorySpec.from_dict(values["spec"])
        if values["blocks_per_run"] > 1 and run_layout(spec, values["blocks_per_run"]).nbytes > MOST_RUN_BYTES:
            raise DamagedError(
                f"memory {url} has a damaged header: it names {values['blocks_per_run']:,} blocks per run, which "
                "no memstore writes"
            )
        return Header(spec, values["blocks_per_run"])
    except InvalidArgument as error:
        raise ForeignMemory(f"memory {url} has a spec that this memstore cannot use: {error}") from error


_PIECE_BYTES = 2 << 20
"""Bytes of rows read at a time, so that they stay in the processor's cache until they are copied to their place."""
_TYPES = tuple(name for name in ITEM_BYTES if name != "json")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a record's dtype."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def byte_rows(tensor: Tensor) -> Bytes:
    """Convert ``[n, ...]`` to uint8 ``[n, bytes]``; a view if the tensor is contiguous and on the CPU."""
    rows = tensor.detach().cpu().contiguous()
    if not rows.numel():
        return np.empty((len(rows), 0), np.uint8)
    array: Bytes = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
    return array


def to_record(tensor: Tensor) -> Record:
    """Return the tensor as a record. Raises ``InvalidArgument`` for a dtype that a store does not know."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise InvalidArgument(f"a memory stores {', '.join(_TYPES)}, not {tensor.dtype}; convert the tensor first.")
    return Record(Layout(name, tuple(tensor.shape)), byte_rows(tensor.reshape(1, -1))[0])


def from_record(record: Record) -> Tensor:
    """Return the tensor in a record; it shares the record's bytes."""
    dtype = torch_dtype(record.layout.dtype)
    if not record.payload.size:
        return torch.empty(record.layout.shape, dtype=dtype)
    return torch.from_numpy(record.payload.reshape(-1)).view(dtype).reshape(record.layout.shape)


def read_rows(store: BlockStore, keys: Sequence[Key], layouts: Sequence[Layout]) -> list[Tensor]:
    """Return the verified values under ``keys``: ``[len(keys), *shape]`` for each of ``layouts``.

    Raises ``NotFound`` or ``DamagedError``, which names the key.
    """
    return list(map(as_tensor, store.gather(keys, layouts), layouts))


def encode_landmarks(landmarks: Tensor, key_dtype: str) -> Tensor:
    """Convert ``[n, G, P, D]`` floating point to the stored form."""
    if key_dtype != "bit":
        return landmarks.to(torch_dtype(key_dtype))
    signs = (landmarks >= 0).cpu().numpy()
    return torch.from_numpy(np.packbits(signs, axis=-1, bitorder="little"))


def decode_landmarks(stored: Tensor, key_dtype: str) -> Tensor:
    """Convert the stored form to ``[n, G, P, D]`` float32."""
    if key_dtype != "bit":
        return stored.float()
    bits = torch.from_numpy(np.unpackbits(stored.numpy(), axis=-1, bitorder="little"))
    return bits.float().mul_(2).sub_(1)


def index_dtype(key_dtype: str) -> torch.dtype:
    """Return the dtype in which an index should keep landmarks: +1 and -1 are exact in bfloat16."""
    return torch_dtype("float32" if key_dtype == "float32" else "bfloat16")


def finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # A sum takes a twentieth of the time of ``isfinite`` and passes on NaN and infinity. It rarely overflows itself.
    return math.isfinite(float(tensor.sum())) or all(math.isfinite(float(end)) for end in tensor.aminmax())


def encode_blocks(spec: MemorySpec, states: Mapping[str, Tensor]) -> list[Tensor]:
    """Encode finite states ``[n, *shape]`` of every field as ``[n, ...]`` for each of ``block_layouts``."""
    if spec.codec == "none":
        return [states[name] for name in spec.fields]
    return [stored for name in spec.fields for stored in codecs.LOSSY[spec.codec].encode(states[name])]


def decode_block_rows(spec: MemorySpec, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Decode ``n`` stored complete blocks, ``[n, ...]`` for each of ``block_layouts``, to states ``[n, *shape]``."""
    if spec.codec == "none":  # nothing to decode, and a noticeable cost in a fast gather
        return dict(zip(spec.fields, rows, strict=True))
    codec, dtype = codecs.LOSSY[spec.codec], torch_dtype(spec.dtype)
    each = len(rows) // len(spec.fields)
    return {
        name: codec.decode(rows[number * each : (number + 1) * each], dtype, shape)
        for number, (name, shape) in enumerate(spec.fields.items())
    }


def as_stored(spec: MemorySpec, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return states ``[n, *shape]`` of complete blocks as the memory will return them after storage."""
    return decode_block_rows(spec, encode_blocks(spec, states))


def no_states(spec: MemorySpec) -> dict[str, Tensor]:
    """Return the fields of zero blocks: ``[0, *shape]`` each."""
    return dict(zip(spec.fields, empty_rows(plain_layouts(spec)), strict=True))


class Runs:
    """Rows of one table and layer: run ``r`` of an owner holds blocks ``r * length`` up to the last one in use.

    A run starts at its first block, even if that block has left the memory. A row that was never written is zeros, and
    no live block ever reads it. Only the first run of a branch starts at the branch, ``Home.base``. In a chain of forks
    many blocks come before it, and each fork would store zeros for them.
    """

    def __init__(
        self, store: BlockStore, table: Table, layer: int, length: int, layout: Callable[[int], Layout]
    ) -> None:
        """``layout(n)`` returns the layout of ``n`` rows."""
        self._store = store
        self._table = table
        self._layer = layer
        self._length = length
        self._layout = layout

    def read(self, places: Places, blocks: range) -> Iterator[tuple[range, Tensor]]:
        """Yield pieces of ``blocks`` with their rows ``[n, ...]``. Raises ``DamagedError``."""
        for owner, part in places.pieces(blocks):
            step = self._length * max(1, _PIECE_BYTES // self._layout(self._length).nbytes)
            base, start = places.node.at(part.start).base, part.start - part.start % self._length
            while start < part.stop:
                stop, first = (start + step, start) if base <= start else (start + self._length, base)
                piece = range(max(start, part.start), min(stop, part.stop))
                yield piece, self._rows(owner, start // self._length, piece.stop - first)[piece.start - first :]
                start = stop

    def _rows(self, owner: int, run: int, rows: int) -> Tensor:
        """Return the first ``rows`` from the start of a run: whole runs at once, and the rest from the last run."""
        keys = [self._key(owner, number) for number in range(run, run + -(-rows // self._length))]
        whole = rows // self._length
        parts = [self._whole(keys[:whole])] if whole else []
        parts += [self._stored(key, rows % self._length) for key in keys[whole:]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _whole(self, keys: Sequence[Key]) -> Tensor:
        try:
            return read_rows(self._store, keys, [self._layout(self._length)])[0].flatten(0, 1)
        except (DamagedError, NotFound):  # one by one, so the error names the first faulty run
            return torch.cat([self._stored(key, self._length) for key in keys])

    def write(self, batch: Batch, places: Places, first_block: int, rows: Tensor, first_live: int) -> None:
        """Put ``rows [n, ...]`` of blocks ``first_block ...``, which lie at home; rewrite the runs that contain them.

        Runs whose blocks are all before ``first_live`` are left out. Raises ``DamagedError``.
        """
        run = first_block // self._length
        begin = max(run * self._length, places.node.base)
        if first_block > begin:
            head = self._head(self._key(places.home, run), begin, first_block - begin, max(first_live, places.whole))
            rows = torch.cat([head, rows])
        end, start = begin + len(rows), begin
        while start < end:
            stop = (run + 1) * self._length
            if stop > first_live:
                batch.put(self._key(places.home, run), to_record(rows[start - begin : stop - begin]))
            start, run = stop, run + 1

    def release(self, batch: Batch, owner: int, base: int, gap: range, used: Sequence[range]) -> None:
        """Delete rows that are not in use any more: those of ``gap``, next to the ``used`` ones.

        Raises ``DamagedError``.

        A run in use loses the rows after the last one in use; earlier ones stay. ``base`` is the owner's.
        """
        first, last = gap.start // self._length, (gap.stop - 1) // self._length
        if stop := self._stop(first, used):
            if stop <= gap.start:
                self._shorten(batch, self._key(owner, first), stop - max(first * self._length, base))
            first += 1
        if last >= first and self._stop(last, used):
            last -= 1
        if last >= first:
            batch.delete(self._key(owner, first), self._key(owner, last))

    def _stop(self, run: int, used: Sequence[range]) -> int:
        """Return one more than the last block of a run that is in use; 0 without any."""
        start, stop = run * self._length, (run + 1) * self._length
        return max((min(part.stop, stop) for part in used if part.start < stop and part.stop > start), default=0)

    def _shorten(self, batch: Batch, key: Key, rows: int) -> None:
        records = self._store.get(key)
        if records is not None and records[0].layout.shape[0] > rows:
            batch.put(key, to_record(self._stored(key, rows)))

    def _head(self, key: Key, begin: int, rows: int, first: int) -> Tensor:
        """Return the first ``rows`` of a run, from block ``begin``; zeros for missing ones before ``first``."""
        if begin + rows > first:
            return self._stored(key, rows)
        records = self._store.get(key)
        there = 0 if records is None else min(rows, records[0].layout.shape[0])
        layout = self._layout(rows - there)
        zeros = torch.zeros(layout.shape, dtype=torch_dtype(layout.dtype))
        return torch.cat([self._stored(key, there), zeros]) if there else zeros

    def _stored(self, key: Key, rows: int) -> Tensor:
        records = self._store.get(key)
        expected = self._layout(rows)
        layouts = [record.layout for record in records or ()]
        good = len(layouts) == 1 and layouts[0].dtype == expected.dtype and layouts[0].shape[1:] == expected.shape[1:]
        if not records or not good or layouts[0].shape[0] < rows:
            found = f"found {layouts}" if layouts else "found nothing"
            raise DamagedError(
                f"{self._table.name.lower()} of document {key.document}, layer {self._layer}, run {key.item}: "
                f"expected {expected}, {found}. Run verify"
            )
        return from_record(records[0])[:rows]

    def _key(self, owner: int, run: int) -> Key:
        return Key(self._table, owner, self._layer, run)


class LandmarkRuns(Runs):
    """The landmarks of one layer."""

    def __init__(self, store: BlockStore, spec: MemorySpec, layer: int, length: int) -> None:
        super().__init__(store, Table.LANDMARKS, layer, length, lambda rows: run_layout(spec, rows))
        self._key_dtype = spec.key_dtype

    def read(self, places: Places, blocks: range) -> Iterator[tuple[range, Tensor]]:
        """Yield pieces of ``blocks`` with their landmarks ``[n, G, P, D]`` float32. Raises ``DamagedError``."""
        for piece, rows in super().read(places, blocks):
            yield piece, decode_landmarks(rows, self._key_dtype)

    def write(self, batch: Batch, places: Places, first_block: int, rows: Tensor, first_live: int) -> None:
        """Put landmarks ``rows [n, G, P, D]``; see ``Runs.write``."""
        super().write(batch, places, first_block, encode_landmarks(rows, self._key_dtype), first_live)


class HistoryRuns(Runs):
    """The hashes of the histories of documents: uint8 ``[n, HASH_BYTES]``."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store, Table.HISTORY, 0, HASHES_PER_RUN, lambda rows: Layout("uint8", (rows, HASH_BYTES)))

    def hashes(self, places: Places, blocks: range) -> bytes:
        """Return the stored hashes of ``blocks``, each over everything up to its block's end.

        Raises ``DamagedError``.
        """
        return b"".join(rows.numpy().tobytes() for _, rows in self.read(places, blocks))

    def digest(self, places: Places, state: DocumentState, block: int, spec: MemorySpec) -> str | None:
        """Return the digest of a document after a cut before ``block``; None if it is unknown (by now).

        Hashes of blocks that have left may be gone with them. Raises ``DamagedError``.
        """
        if state.digest is None or block == state.tokens // spec.block_size:
            return state.digest
        if 0 < block <= state.first:
            return None
        last = range(block - 1, block)
        return (self.hashes(places, last) if block else beginning(spec.fingerprint, state.reading)).hex()


def beginning(fingerprint: Fingerprint, reading: Mapping[str, Any] | None) -> bytes:
    """Return the hash before the first block."""
    return hashed(json.dumps([fingerprint.to_dict(), reading], sort_keys=True).encode())


def chain(start: bytes, tokens: Bytes) -> Bytes:
    """Return hashes uint8 ``[n, HASH_BYTES]`` of complete blocks ``tokens [n, bytes]`` after the hash ``start``."""
    hashes = bytearray()
    for ids in tokens:
        start = hashed(start + ids.tobytes())
        hashes += start
    return np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)


def broken(blocks: range, stored: Iterable[bytes], tokens: Bytes, start: bytes | None) -> Iterator[int]:
    """Return the ``blocks`` whose stored hash does not follow from the previous one and ``tokens [n, bytes]``.

    ``start`` is the hash before the first of them. None means that it is unknown; then the first block passes.
    """
    for block, found, ids in zip(blocks, stored, tokens, strict=True):
        if start is not None and hashed(start + ids.tobytes()) != found:
            yield block
        start = found


def hashed(content: bytes) -> bytes:
    """Return a BLAKE2b hash of 16 bytes."""
    return blake2b(content, digest_size=HASH_BYTES).digest()


def kept_recurrent(store: BlockStore, number: int, last: int, *, first: int = 0) -> list[int]:
    """Return the places in a document, from ``first`` to ``last`` tokens, whose recurrent state is kept; ascending."""
    address = Address(number)
    return [key.item for key in store.keys(address.recurrent(first), address.recurrent(last))]


def read_recurrent(store: BlockStore, layouts: Sequence[Layout], number: int, place: int) -> list[Tensor]:
    """Return the state after the first ``place`` tokens of a document. Raises ``NotFound`` and ``DamagedError``."""
    key = Address(number).recurrent(place)
    records = store.get(key)
    if records is None:
        raise NotFound(f"{describe(key)}: there is no recurrent state after {place} tokens")
    if [record.layout for record in records] != list(layouts):
        raise DamagedError(f"{describe(key)}: the state does not fit the layers of this model. Run verify")
    return [from_record(record) for record in records]


def put_recurrent(
    batch: Batch, store: BlockStore, number: int, before: int, states: Mapping[int, Sequence[Record]], step: int
) -> None:
    """Store states by their places, which come after the first ``before`` tokens of a document.

    The last earlier one is deleted, unless it lies at least ``step`` tokens after the one before it.
    """
    there = kept_recurrent(store, number, before)
    if states and there and there[-1] - (there[-2] if len(there) > 1 else 0) < step:
        batch.delete(Address(number).recurrent(there[-1]))
    for place, records in states.items():
        batch.put(Address(number).recurrent(place), *records)


def cut_recurrent(batch: Batch, number: int, tokens: int) -> None:
    """Delete the states of a document after its first ``tokens`` tokens."""
    address = Address(number)
    batch.delete(address.recurrent(tokens + 1), address.recurrent(MAX_ITEM))
