"""The layout of a memory: conditions for using stored states again, and the layouts of stored values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from memstore._version import __version__
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, NotAMemory, on_one_line
from memstore.json_checks import anything, array, check_whole, fit, maybe, members, row, table, text, whole
from memstore.memory.entry import HEADER, DocumentState
from memstore.memory.urls import NewMemory
from memstore.store.contract import BlockStore
from memstore.store.records import MAX_DIMENSIONS, Batch, Layout, Record


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
        raise ForeignMemory(
            f"a newer memstore wrote this memory: its {what} has {on_one_line(unknown)}; upgrade memstore"
        )
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
            if not name.isidentifier() or name in ("layer", "landmarks"):
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
    return [f"{name}: {here} here, {there} in the memory" for name, here, there in pairs if here != there]


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
    from memstore.store.codecs import LOSSY  # needs torch, but a check of a memory should not

    return [layout for shape in spec.fields.values() for layout in LOSSY[spec.codec].layouts(spec.dtype, shape)]


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
