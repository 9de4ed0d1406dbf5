"""What must agree before stored states are reused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from memstore.errors import ForeignMemory
from memstore.stored import fit, maybe, table, text, whole


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identity of whatever makes the states of a memory: states of one are noise to another.

    Attributes:
        architecture: Kind and sizes of the model, such as ``llama/30x3x64`` (layers, key-value heads, head size).
        weights: Digest of the weights.
        tokenizer: Digest of the tokenizer; None where it is unknown, which agrees with everything.
        positions: Position encoding of the model, such as ``rope``.
        layout: What a block holds, such as ``kv``: keys before position encoding, and values.
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
        """What differs between this model and the ``other``, which is the memory's; one phrase each."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return [
            f"{name}: {ours} here, {theirs} in the memory"
            for name, ours, theirs in pairs
            if ours != theirs and not (name == "tokenizer" and None in (ours, theirs))
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fingerprint:
        """The inverse of ``to_dict``. Raises what ``MemorySpec.from_dict`` does."""
        check_names("fingerprint", values, {field.name for field in fields(cls)})
        fit(values, FINGERPRINT, "the fingerprint of a memory")
        return cls(**values)


FINGERPRINT = table(
    **dict.fromkeys(("architecture", "weights", "positions", "layout", "dtype"), text(10_000)),
    tokenizer=maybe(text(10_000)),
    block_size=whole(1, 2**31),
)


def check_names(what: str, values: Mapping[str, Any], known: set[str]) -> None:
    """Raise ``ForeignMemory`` unless ``values`` has the ``known`` names and no others."""
    if unknown := sorted(set(values) - known):
        raise ForeignMemory(
            f"a newer memstore wrote this memory: its {what} has {', '.join(unknown)}; upgrade memstore"
        )
    if missing := sorted(known - set(values)):
        raise ForeignMemory(
            f"another version of memstore wrote this memory: its {what} lacks {', '.join(missing)}; "
            "open it with the version that wrote it"
        )
