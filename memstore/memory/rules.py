"""The rules of a memory by the names of its documents: what goes along when a memory is copied or exported.

In a memory they stand under the numbers of documents, which are others in every memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, get_args

from memstore.errors import ForeignMemory
from memstore.memory.keeping import LATEST, Keeping, WhenFull
from memstore.memory.state import LONGEST_NAME
from memstore.stored import array, fit, maybe, members, number, table, text, whole

_MOST = 10_000_000
RULES = table(
    max_bytes=maybe(whole(1)),
    when_full=text(64),
    pinned=array(text(LONGEST_NAME), _MOST),
    expires=members(number(LATEST), _MOST),
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Limit, pins and times to live, as ``Keeping`` has them; how often documents were read stays behind."""

    max_bytes: int | None = None
    when_full: WhenFull = "refuse"
    pinned: tuple[str, ...] = ()
    expires: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Name -> when the document may be forgotten, in seconds of UTC since 1970."""

    @classmethod
    def of(cls, keeping: Keeping, names: Mapping[int, str]) -> Self:
        """The rules of a memory whose documents have these numbers and ``names``."""
        return cls(
            max_bytes=keeping.max_bytes,
            when_full=keeping.when_full,
            pinned=tuple(name for number, name in names.items() if number in keeping.pinned),
            expires={names[number]: when for number, when in keeping.expires.items() if number in names},
        )

    def only(self, documents: Collection[str]) -> Self:
        """Those of some documents, without the limit, which is for a whole memory."""
        return type(self)(
            pinned=tuple(name for name in self.pinned if name in documents),
            expires={name: when for name, when in self.expires.items() if name in documents},
        )

    def added_to(self, keeping: Keeping, names: Mapping[int, str], now: float) -> Keeping:
        """The rules of a memory once it has these too, for the documents that it has. Raises ``InvalidArgument``."""
        numbers = {name: number for number, name in names.items()}
        times = {numbers[name]: when for name, when in self.expires.items() if name in numbers}
        pinned = {numbers[name] for name in self.pinned if name in numbers}
        added = replace(keeping, pinned=keeping.pinned | pinned, expires={**keeping.expires, **times})
        if times:
            added = added.at(now)
        limit = self.max_bytes, self.when_full
        return added if limit == (None, "refuse") else added.limited(*limit)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "pinned": list(self.pinned)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``. Raises ``ForeignMemory`` for rules that this version does not know."""
        fit(values, RULES, "the list of rules of a memory")
        if set(values) - set(cls.__dataclass_fields__) or values.get("when_full") not in get_args(WhenFull):
            raise ForeignMemory("a newer memstore wrote these rules of a memory; upgrade memstore.")
        return cls(**{**values, "pinned": tuple(values["pinned"]), "expires": {**values["expires"]}})
