"""What a command reports, how it is shown to people and programs, and the numbers of tokens that it is given.

Rich tables on a terminal, aligned plain text anywhere else, CSV for programs. Nothing here needs the command line.
"""

from __future__ import annotations

import csv as csvlib
import json as jsonlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from memstore.errors import InvalidArgument, on_one_line, printable

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a verb."""

    data: Mapping[str, Any]
    """What ``--json`` prints."""
    text: Callable[[Page], None]
    """Writes the same for people."""
    exit_code: int = 0


class Page:
    """Writes for people: rich tables on a terminal, aligned plain text anywhere else."""

    def __init__(self) -> None:
        self._rich = sys.stdout.isatty()

    def line(self, text: str = "") -> None:
        """One paragraph, or an empty line."""
        print(printable(text))

    def facts(self, facts: Mapping[str, object]) -> None:
        """Names and values below each other."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            print(f"{name:<{width}}  {cell(value)}")

    def excerpt(self, text: str, length: int = 72) -> str:
        """The beginning of ``text``, of at most ``length`` characters, for the cell of a table."""
        words = " ".join(text.split())
        return words if len(words) <= length else words[: length - 1] + "…"

    def brief(self, shown: str, value: object) -> object:  # noqa: ARG002 - for programs
        """What people see of ``value`` in the cell of a table: ``shown``."""
        return shown

    def sheet(self, rows: Sequence[Mapping[str, object]]) -> None:
        """A table for programs, where people see something else."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "") -> None:
        """One row below the other; numbers are aligned to the right. ``empty`` is said where there are no rows."""
        if empty and not rows:
            self.line(empty)
            return
        numeric = [_numbers([row[i] for row in rows]) for i in range(len(columns))]
        cells = [[cell(value) for value in row] for row in rows]
        (_rich_table if self._rich else _plain_table)(columns, cells, numeric)

    def records(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
        """A table of these columns of ``rows``, or of all, whose names are told as words."""
        columns = columns or list(rows[0])
        heads = [column.replace("_per_", "/").replace("_", " ") for column in columns]
        self.table(heads, [[row[column] for column in columns] for row in rows])


# A new verb has CSV without a word: its first table before formatting, else its facts, else its JSON, flattened.
class Sheet(Page):
    """Takes what a verb shows to people, and writes its table as CSV."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: list[tuple[Sequence[str], Sequence[Sequence[object]]]] = []
        self._facts: dict[str, object] = {}

    def line(self, text: str = "") -> None:
        """Words are for people."""

    def excerpt(self, text: str, length: int = 72) -> str:  # noqa: ARG002 - for people
        """All of it."""
        return text

    def brief(self, shown: str, value: object) -> object:  # noqa: ARG002 - for people
        """The value itself."""
        return value

    def facts(self, facts: Mapping[str, object]) -> None:
        """Keep them, in case there is no table."""
        self._facts |= facts

    def sheet(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Keep it, if there is anything."""
        if rows:
            self.table(list(rows[0]), [list(row.values()) for row in rows])

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "") -> None:  # noqa: ARG002 - for people
        """Keep it as it is; without rows its head stands alone."""
        self._tables.append((columns, rows))

    def write(self, data: Mapping[str, Any]) -> None:
        """Print the first table; where there was none the facts, and without those what ``data`` says."""
        facts = self._facts or dict(flattened(data))
        columns, rows = self._tables[0] if self._tables else (("name", "value"), list(facts.items()))
        writer = csvlib.writer(sys.stdout)
        writer.writerow(columns)
        writer.writerows([[field(value) for value in row] for row in rows])


def json_text(value: object) -> str:
    """A value as JSON, of which half characters, as in names of files that are no UTF-8, are escaped."""
    text = jsonlib.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return jsonlib.dumps(value)
    return text


def field(value: object) -> str:
    """A value as programs read it in CSV: numbers as they are, nothing for None, lists as JSON."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case list() | tuple() | dict():
            return json_text(value)
    text = str(value)
    return printable(text) if sys.stdout.isatty() else text


def flattened(numbers: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as one: ``{"bytes": {"blocks": 1}}`` gives ``"bytes blocks", 1``."""
    for name, value in numbers.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flattened(value, f"{label} ")
        else:
            yield label, value


def cell(value: object) -> str:
    """A value as people read it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return on_one_line([str(value)])


def counted(number: int, thing: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _numbers(column: Sequence[object]) -> bool:
    """Whether a column holds numbers, and nothing else where there is something."""
    return any(isinstance(each, int | float) for each in column) and all(
        each is None or each == "" or isinstance(each, int | float) for each in column
    )


def _plain_table(columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]) -> None:
    rows = [columns, *cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    for row in rows:
        padded = [
            f"{text:>{width}}" if right else f"{text:<{width}}"
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def token_count(text: str) -> int | None:
    """Tokens that ``512``, ``8K`` (8,192) or ``1M`` mean; None for any other text."""
    match = re.fullmatch(r"\s*([0-9]+)([kKmM]?)\s*", text, re.ASCII)
    return None if match is None else int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


def tokens_of(option: str, text: str | None, least: int) -> int | None:
    """Tokens that ``text`` says for ``option``; None where it was not given. Raises ``InvalidArgument``."""
    if text is None:
        return None
    count = token_count(text)
    if count is None or count < least:
        raise InvalidArgument(f"{option} must be a number of tokens from {least} on, such as 512 or 8K, not {text!r}")
    return count


def token_counts(option: str, text: str, *, least: int, such_as: str, what: str) -> list[int]:
    """``64K,1M`` or ``65536,1048576`` -> numbers of tokens, in that order. Raises ``InvalidArgument``."""
    counts = []
    for part in text.split(","):
        count = token_count(part)
        if count is None or count < least:
            raise InvalidArgument(f"{option} {text!r}: {part!r} is no number of tokens. Write such as {such_as}.")
        counts.append(count)
    if len(set(counts)) < len(counts):
        raise InvalidArgument(f"{option} {text!r} names a {what} twice")
    return counts


def listed(option: str, text: str, read: Callable[[str], T], hint: str) -> list[T]:
    """What ``read`` makes of each part of ``text`` between commas; its ``ValueError`` is an ``InvalidArgument``."""
    try:
        return [read(part.strip()) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"{option} {text!r}: {hint}") from None
