"""Which documents are meant: by their names, their time, and what was noted of them when they were read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from memstore.memory import Memory

FACT = "file/"
"""Before a document's name: under what a memory keeps which file a document is, and what was noted of it."""
_AGO = re.compile(r"(\d+)\s*([hdw])", re.IGNORECASE)
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Documents that are wanted; each part that is given must hold."""

    match: Sequence[str] = ()
    """Patterns of names, one of which must fit: ``*`` is any text, also with strokes."""
    meta: Mapping[str, str]
    """What must have been noted."""
    since: datetime | None = None
    """When its file changed, or it was read where it is no file, at the earliest."""

    @classmethod
    def given(cls, match: Sequence[str] | None, meta: Sequence[str] | None, since: str | None) -> Filter | None:
        """As options say it; None where they say nothing. Raises ``InvalidArgument``."""
        if not (match or meta or since):
            return None
        return cls(match=match or (), meta=parse_meta(meta), since=None if since is None else parse_since(since))

    def names(self, memory: Memory, among: Sequence[str]) -> list[str]:
        """Those of ``among`` that are wanted. Raises ``NotFound`` where none is."""
        facts = facts_of(memory)
        found = [name for name in among if self._fits(name, facts[name])]
        if not found:
            raise NotFound(f"none of {len(among):,} documents fits --match, --meta and --since: memstore ls shows them")
        return found

    def _fits(self, name: str, fact: Mapping[str, Any]) -> bool:
        if self.match and not any(fnmatchcase(name, each) for each in self.match):
            return False
        noted = _dict(fact.get("meta"))
        if any(noted.get(key) != value for key, value in self.meta.items()):
            return False
        return self.since is None or ((when := time_of(fact)) is not None and when >= self.since)


def facts_of(memory: Memory) -> dict[str, dict[str, Any]]:
    """What is known of the file of each document, and was noted of it; of most that are no files nothing."""
    facts = memory.infos(FACT)
    return {each.name: _dict(facts.get(FACT + each.name)) for each in memory.documents()}


def time_of(fact: Mapping[str, Any]) -> datetime | None:
    """When a document's file was changed last, or was read where it is no file; None where nobody knows."""
    modified, read = fact.get("modified"), fact.get("read")
    with suppress(ValueError, OverflowError, OSError):  # whoever made the memory may have noted anything
        if isinstance(modified, int):
            return datetime.fromtimestamp(modified / 1e9, UTC)
        if isinstance(read, str):
            return datetime.fromisoformat(read).astimezone(UTC)
    return None


def parse_meta(given: Sequence[str] | None) -> dict[str, str]:
    """``["project=island"]`` as a mapping. Raises ``InvalidArgument``."""
    pairs = [each.partition("=") for each in given or []]
    for key, equals, value in pairs:
        if not (key.strip() and equals):
            raise InvalidArgument(f"--meta is KEY=VALUE, such as project=island, not {key + equals + value!r}")
    return {key.strip(): value for key, _, value in pairs}


def parse_since(text: str) -> datetime:
    """A time that is some hours, days or weeks ago (``7d``), or a date. Raises ``InvalidArgument``."""
    try:
        if found := _AGO.fullmatch(text.strip()):
            return datetime.now(UTC) - timedelta(hours=int(found[1]) * _HOURS[found[2].lower()])
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"--since is a time ago, such as 12h, 7d or 2w, or a date, such as 2026-03-01, not {text[:80]!r}"
        ) from None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
