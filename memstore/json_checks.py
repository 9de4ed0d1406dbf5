"""Checks of JSON values from disk: their types and bounds, before they are used.

Checksums show that a value is unchanged, not that its writer meant well. A number of 10**18 tokens would be believed
and counted to, and a text would be added to a number. So every JSON value of a memory, an export or an index is
compared with a schema when it is read. The functions here build these schemas.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from memstore.errors import DamagedError, InvalidArgument

Check = Callable[[Any, str], None]
"""Raises ``UnfitValue`` if a value does not fit; the second argument says in words where the value stands."""

LARGEST = 2**63 - 1
MAX_JSON_BYTES = 16 * 1024 * 1024
"""Largest length of one JSON value of a memory."""
MAX_JSON_VALUES = 4 * 1024 * 1024
"""Most values in one JSON value, roughly: an empty list takes three bytes of text, and thirty times that in memory."""
MAX_DEPTH = 100
"""Most levels of nested lists and objects."""


class UnfitValue(ValueError):
    """A value that no memstore writes. The message says where it stands and what was expected."""


def parse(raw: bytes, what: str, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON value in ``raw``. Raises ``DamagedError``, whose message calls it ``what``."""
    try:
        return parsed(raw, most_bytes)
    except ValueError as error:  # also for bytes that are not UTF-8
        reason = " ".join(str(error).split())[:200]
        raise DamagedError(f"{what} is damaged: {reason}; restore it from a copy", remedy="restore") from None


def storable(value: Any, check: Check, what: str) -> str:
    """Return ``value`` as JSON. Raises ``InvalidArgument``, which calls it ``what``, if a reader would refuse it."""
    try:
        text = json.dumps(value)
        check(parsed(text.encode()), "")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what} cannot be stored: {' '.join(str(error).split())[:200]}.") from None
    return text


def parsed(raw: bytes, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON value in ``raw``. Raises ``ValueError``."""
    if len(raw) > most_bytes:
        raise UnfitValue(f"it has {len(raw):,} bytes; at most {most_bytes:,} are allowed")
    if len(raw) > MAX_JSON_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise UnfitValue(f"it has more than {MAX_JSON_VALUES:,} values")
    try:
        value = _DECODER.decode(raw.decode())
    except RecursionError:
        raise UnfitValue(f"it has more than {MAX_DEPTH} levels of nesting") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ``UnfitValue`` if lists and objects are nested more than ``MAX_DEPTH`` levels deep."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [each for each in level if isinstance(each, dict | list)]
        if not inner:
            return
        level = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
    raise UnfitValue(f"it has more than {MAX_DEPTH} levels of nesting")


def fit(value: Any, check: Check, what: str) -> Any:
    """Return ``value`` if it passes ``check``. Raises ``DamagedError``, whose message calls it ``what``."""
    try:
        check(value, "")
    except UnfitValue as error:
        raise DamagedError(f"{what} is damaged: {error}; restore it from a copy", remedy="restore") from None
    return value


def whole(least: int = 0, most: int = LARGEST) -> Check:
    """Accept a whole number from ``least`` to ``most``."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            _unfit(at, f"a whole number from {least:,} to {most:,}", value)

    return check


def number(most: float) -> Check:
    """Accept a number from 0 to ``most``."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            _unfit(at, f"a number from 0 to {most:,}", value)

    return check


def text(most: int) -> Check:
    """Accept a text of up to ``most`` characters."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, str) or len(value) > most:
            _unfit(at, f"a text of at most {most:,} characters", value)
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a character, which JSON allows
            _unfit(at, "a text of valid Unicode", value)

    return check


def maybe(inner: Check) -> Check:
    """Accept null, or a value that passes ``inner``."""
    return lambda value, at: None if value is None else inner(value, at)


def array(inner: Check, most: int) -> Check:
    """Accept a list of up to ``most`` values that all pass ``inner``."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, list | tuple) or len(value) > most:
            _unfit(at, f"a list of at most {most:,} values", value)
        for place, each in enumerate(value):
            inner(each, f"{at}[{place}]")

    return check


def row(*inner: Check) -> Check:
    """Accept a list with one value for each check, in their order."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(inner):
            _unfit(at, f"a list of {len(inner)} values", value)
        for place, (each, wanted) in enumerate(zip(value, inner, strict=True)):
            wanted(each, f"{at}[{place}]")

    return check


def ranges(most: int) -> Check:
    """Accept a list of pairs ``[start, stop]`` that are not empty, ascend and end at ``most`` or before."""

    def check(value: Any, at: str) -> None:
        array(row(whole(0, most), whole(0, most)), most)(value, at)
        edges = [edge for pair in value for edge in pair]
        if edges != sorted(edges) or any(start == stop for start, stop in value):
            _unfit(at, "ascending ranges", value)

    return check


def members(inner: Check, most: int) -> Check:
    """Accept an object of up to ``most`` members with any names; each value passes ``inner``."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, Mapping) or len(value) > most:
            _unfit(at, f"an object with at most {most:,} members", value)
        for name, each in value.items():
            inner(each, f"{at}[{name if len(name) <= 30 else reprlib.repr(name)}]")

    return check


def table(optional: Mapping[str, Check] | None = None, /, **required: Check) -> Check:
    """Accept an object with all members ``required``. ``optional`` members are checked too, unknown ones are not."""
    wanted = {**(optional or {}), **required}

    def check(value: Any, at: str) -> None:
        if not isinstance(value, Mapping):
            _unfit(at, "an object", value)
        for name, inner in wanted.items():
            if name in value:
                inner(value[name], f"{at}.{name}" if at else name)
            elif name in required:
                raise UnfitValue(f"{at + ' ' if at else ''}lacks {name}")

    return check


def anything(value: Any, at: str) -> None:
    """Accept any JSON value."""


def _unfit(at: str, expected: str, value: Any) -> NoReturn:
    raise UnfitValue(f"{at or 'it'} must be {expected}, not {reprlib.repr(value)}")


def _no_number(constant: str) -> NoReturn:
    raise UnfitValue(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Require a whole number from ``least`` to ``most`` as ``value``: no text, no float, no bool."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgument(f"{name} must be a whole number from {least:,} to {most:,}, not {value!r}.")
