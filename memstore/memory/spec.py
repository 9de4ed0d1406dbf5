"""The layout of a memory: sizes, element types and the fingerprint of the model it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

from memstore.errors import InvalidArgument
from memstore.memory.fingerprint import Fingerprint, check_names
from memstore.stored import anything, array, fit, maybe, members, row, table, text, whole

DTYPES = ("float32", "float16", "bfloat16")
KEY_DTYPES = ("float32", "bfloat16", "bit")
CODECS = ("none", "int8", "fp8", "int4")
MOST_LAYERS = 2**16
MOST_NUMBERS = 2**29
"""In the states, or the landmarks, of one block of one layer: 2 GiB of float32, near what a store can hold in one."""

_SIZE = whole(1, 2**31)
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
        codec: How complete blocks are stored: none (as they are), int8, fp8 or int4, see ``memstore.store.codecs``.
        fingerprint: What must agree before the states are reused.
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
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", {name: tuple(shape) for name, shape in self.fields.items()})
        object.__setattr__(self, "index_layers", tuple(self.index_layers))
        for name in ("layers", "key_heads", "key_dim", "block_size", "keys_per_block"):
            _positive(name, getattr(self, name))
        if self.capacity is not None:
            _positive("capacity", self.capacity)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("key_dtype", self.key_dtype, KEY_DTYPES)
        _one_of("codec", self.codec, CODECS)
        if self.layers > MOST_LAYERS:
            raise InvalidArgument(f"layers must be at most {MOST_LAYERS:,}, not {self.layers:,}.")
        self._check_fields()
        self._check_index()

    def differences(self, other: MemorySpec) -> list[str]:
        """What differs between this spec and the ``other``, which is the memory's; the fingerprint first."""
        names = [item.name for item in fields(self) if item.name != "fingerprint"]
        return self.fingerprint.differences(other.fingerprint) + [
            f"{name}: {getattr(self, name)} here, {getattr(other, name)} in the memory"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        # A list of pairs, for the order of the fields is the order of the records and must survive sorted JSON.
        values["fields"] = [[name, list(shape)] for name, shape in self.fields.items()]
        return values | {"index_layers": list(self.index_layers), "fingerprint": self.fingerprint.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemorySpec:
        """The inverse of ``to_dict``.

        Raises ``ForeignMemory`` for what this version does not know, ``DamagedError`` for what none can have written.
        """
        fit(values, members(anything, 100), "the spec of a memory")
        check_names("spec", values, {item.name for item in fields(cls)})
        fit(values, SPEC, "the spec of a memory")
        shapes = {name: tuple(shape) for name, shape in values["fields"]}
        fingerprint = Fingerprint.from_dict(values["fingerprint"])
        return cls(**{**values, "fields": shapes, "fingerprint": fingerprint})

    def _check_fields(self) -> None:
        if not self.fields:
            raise InvalidArgument("fields is empty; a block needs at least one tensor, such as {'k': (G, S, D)}.")
        for name, shape in self.fields.items():
            if not name.isidentifier() or name in ("layer", "landmarks"):
                raise InvalidArgument(f"fields: {name!r} cannot be the name of a tensor; use a word such as 'k'.")
            for size in shape:
                _positive(f"fields[{name!r}]", size)
        numbers = sum(prod(shape) for shape in self.fields.values())
        if numbers > MOST_NUMBERS:
            raise InvalidArgument(
                f"fields: a block of one layer has {numbers:,} numbers, and {MOST_NUMBERS:,} is the most."
            )

    def _check_index(self) -> None:
        known = range(self.layers)
        if sorted(set(self.index_layers)) != list(self.index_layers) or not all(n in known for n in self.index_layers):
            raise InvalidArgument(
                f"index_layers must be ascending layers from 0 to {self.layers - 1}, not {self.index_layers}."
            )
        if self.key_dtype == "bit" and self.key_dim % 8:
            raise InvalidArgument(f"key_dim must be a multiple of 8 where key_dtype is 'bit', not {self.key_dim}.")
        numbers = self.key_heads * self.keys_per_block * self.key_dim
        if numbers > MOST_NUMBERS:
            raise InvalidArgument(f"landmarks of a block have {numbers:,} numbers, and {MOST_NUMBERS:,} is the most.")


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{name} must be an integer of at least 1, not {value!r}.")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
