"""Reports of commands, how they are shown to people and programs, and parsing of token counts.

People see rich tables on a terminal, and aligned plain text anywhere else. Programs get CSV. Nothing here needs the
command line.
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
    """The data that ``--json`` prints."""
    text: Callable[[Page], None]
    """Writes the same data for people."""
    exit_code: int = 0


class Page:
    """Writes for people: rich tables on a terminal, aligned plain text anywhere else."""

    def __init__(self) -> None:
        self._rich = sys.stdout.isatty()

    def line(self, text: str = "") -> None:
        """Write one paragraph, or an empty line."""
        print(printable(text))

    def facts(self, facts: Mapping[str, object]) -> None:
        """Write names and values below each other."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            print(f"{name:<{width}}  {cell(value)}")

    def excerpt(self, text: str, length: int = 72) -> str:
        """Return the beginning of ``text`` for a table cell, at most ``length`` characters."""
        words = " ".join(text.split())
        return words if len(words) <= length else words[: length - 1] + "…"

    def brief(self, shown: str, value: object) -> object:  # noqa: ARG002 - for programs
        """Return ``shown``, which people see in a table cell in place of ``value``."""
        return shown

    def sheet(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Keep a table for programs, while people see something else."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "") -> None:
        """Write a table; numbers are aligned to the right. Without rows, write ``empty``."""
        if empty and not rows:
            self.line(empty)
            return
        numeric = [_numbers([row[i] for row in rows]) for i in range(len(columns))]
        cells = [[cell(value) for value in row] for row in rows]
        (_rich_table if self._rich else _plain_table)(columns, cells, numeric)

    def records(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
        """Write a table of ``rows``, with these ``columns`` or all; column names become words."""
        columns = columns or list(rows[0])
        heads = [column.replace("_per_", "/").replace("_", " ") for column in columns]
        self.table(heads, [[row[column] for column in columns] for row in rows])


# A new verb gets CSV for free: its first table before formatting, else its facts, else its flattened JSON.
class Sheet(Page):
    """A page that collects a verb's output and writes its table as CSV."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: list[tuple[Sequence[str], Sequence[Sequence[object]]]] = []
        self._facts: dict[str, object] = {}

    def line(self, text: str = "") -> None:
        """Ignore text, which is for people."""

    def excerpt(self, text: str, length: int = 72) -> str:  # noqa: ARG002 - for people
        """Return the whole text."""
        return text

    def brief(self, shown: str, value: object) -> object:  # noqa: ARG002 - for people
        """Return the value itself."""
        return value

    def facts(self, facts: Mapping[str, object]) -> None:
        """Keep the facts, in case no table follows."""
        self._facts |= facts

    def sheet(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Keep the table, if it has rows."""
        if rows:
            self.table(list(rows[0]), [list(row.values()) for row in rows])

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "") -> None:  # noqa: ARG002 - for people
        """Keep the table as it is; without rows, only its header is printed."""
        self._tables.append((columns, rows))

    def write(self, data: Mapping[str, Any]) -> None:
        """Print the first table; if none was kept, the facts; if those are missing too, ``data``."""
        facts = self._facts or dict(flattened(data))
        columns, rows = self._tables[0] if self._tables else (("name", "value"), list(facts.items()))
        writer = csvlib.writer(sys.stdout)
        writer.writerow(columns)
        writer.writerows([[field(value) for value in row] for row in rows])


def json_text(value: object) -> str:
    """Return a value as JSON. Half characters, as in file names that are not UTF-8, are escaped."""
    text = jsonlib.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return jsonlib.dumps(value)
    return text


def field(value: object) -> str:
    """Return a value for CSV: numbers as they are, nothing for None, lists as JSON."""
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
    """Yield nested mappings as flat pairs: ``{"bytes": {"blocks": 1}}`` gives ``"bytes blocks", 1``."""
    for name, value in numbers.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flattened(value, f"{label} ")
        else:
            yield label, value


def cell(value: object) -> str:
    """Return a value as people read it."""
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
    """Return a number with its noun: ``1 token``, ``2 tokens``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _numbers(column: Sequence[object]) -> bool:
    """Whether all filled cells of a column are numbers."""
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
    """Return the number of tokens that ``512``, ``8K`` (8,192) or ``1M`` means; None for any other text."""
    match = re.fullmatch(r"\s*([0-9]+)([kKmM]?)\s*", text, re.ASCII)
    return None if match is None else int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


def tokens_of(option: str, text: str | None, least: int) -> int | None:
    """Return the number of tokens in ``text``, the value of ``option``; None without it. Raises ``InvalidArgument``."""
    if text is None:
        return None
    count = token_count(text)
    if count is None or count < least:
        raise InvalidArgument(
            f"{option} must be a number of tokens of at least {least}, such as 512 or 8K, not {text!r}"
        )
    return count


def token_counts(option: str, text: str, *, least: int, such_as: str, what: str) -> list[int]:
    """Parse ``64K,1M`` or ``65536,1048576`` into numbers of tokens, in that order. Raises ``InvalidArgument``."""
    counts = []
    for part in text.split(","):
        count = token_count(part)
        if count is None or count < least:
            raise InvalidArgument(
                f"{option} {text!r}: {part!r} is not a number of tokens. Write numbers such as {such_as}."
            )
        counts.append(count)
    if len(set(counts)) < len(counts):
        raise InvalidArgument(f"{option} {text!r} has the same {what} twice: leave one out")
    return counts


def listed(option: str, text: str, read: Callable[[str], T], hint: str) -> list[T]:
    """Apply ``read`` to each part of ``text`` between commas. Turn its ``ValueError`` into ``InvalidArgument``."""
    try:
        return [read(part.strip()) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"{option} {text!r}: {hint}") from None
