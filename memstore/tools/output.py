"""What a verb returns and how people and programs see it: tables, lines, JSON, CSV, progress bars."""

from __future__ import annotations

import csv as csvlib
import functools
import inspect
import json as jsonlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.errors import InvalidArgument
from memstore.stored import on_one_line, printable

if TYPE_CHECKING:
    from memstore.store.contract import Progress

KEY_VARIABLE = "MEMSTORE_KEY_FILE"  # as in ``memstore.store.keys``, which loads more than starting a verb may
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
KeyFile = Annotated[
    str | None,
    typer.Option(
        help="File of the key of an encrypted memory; a new memory is encrypted under it. Without it: the file that "
        "MEMSTORE_KEY_FILE names, if it does."
    ),
]
Csv = Annotated[bool, typer.Option("--csv", help="Print the table alone, as CSV; without one, facts as name,value.")]


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


def field(value: object) -> str:
    """A value as programs read it in CSV: numbers as they are, nothing for None, lists as JSON."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case list() | tuple() | dict():
            return jsonlib.dumps(value, ensure_ascii=False)
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


def verb(function: Callable[..., Report]) -> Callable[..., int]:
    """Make a command of a function that returns a report: adds ``--json`` and ``--csv``, and prints the report.

    Where it takes a memory ``--key-file`` is added, which takes the place of the environment's. The function sees
    ``json`` only if it has a parameter of that name: then it says nothing by itself, for a program reads what is
    printed, be it JSON or CSV.
    """
    signature = inspect.signature(function, eval_str=True)
    parameters = list(signature.parameters.values())
    wants_json = "json" in signature.parameters
    if not wants_json:
        parameters.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json))
    parameters.append(inspect.Parameter("csv", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Csv))
    memories = [each.name for each in parameters if each.name == "memory" or _names_memory(each.annotation)]
    if memories:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("key_file", kind, default=None, annotation=KeyFile))

    @functools.wraps(function)
    def command(*, json: bool = False, csv: bool = False, key_file: str | None = None, **arguments: Any) -> int:
        if json and csv:
            raise InvalidArgument("--json and --csv are two ways to print the same: choose one of them.")
        if key_file is not None:
            _check_key_used([arguments[name] for name in memories if name in arguments])
        with _key_from(key_file):
            report = function(json=json or csv, **arguments) if wants_json else function(**arguments)
            if json:
                print(jsonlib.dumps(report.data, ensure_ascii=False))
            elif csv:
                sheet = Sheet()
                report.text(sheet)
                sheet.write(report.data)
            else:
                report.text(Page())
        return report.exit_code

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__doc__ = _with_verbatim_example(inspect.getdoc(function) or "")
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _names_memory(annotation: Any) -> bool:
    """Whether an argument of a verb is the path of a memory, or of several."""
    names = (getattr(each, "metavar", None) for each in getattr(annotation, "__metadata__", ()))
    return any(name in ("MEMORY", "MEMORY...", "SOURCE", "TARGET", "[OTHER]", "NEW") for name in names)


def _check_key_used(named: Sequence[str | Sequence[str] | None]) -> None:
    """Raise ``WrongKey`` where no memory that is named needs a key: who names one believes that it is encrypted."""
    from memstore.memory.urls import check_key_used

    check_key_used([url for each in named for url in ([each] if isinstance(each, str) else each or ())])


@contextmanager
def _key_from(file: str | None) -> Iterator[None]:
    """Inside, ``file`` holds the key of encrypted memories, also for children of this process."""
    before = os.environ.get(KEY_VARIABLE)
    if file is not None:
        os.environ[KEY_VARIABLE] = os.path.abspath(file)  # noqa: PTH100 - links in it stay as they are
    try:
        yield
    finally:
        if file is not None:
            os.environ.pop(KEY_VARIABLE)
            if before is not None:
                os.environ[KEY_VARIABLE] = before


def _with_verbatim_example(doc: str) -> str:
    """Mark the indented lines of ``doc`` with the sign that keeps typer from filling them."""
    return doc.replace("\n\n    ", "\n\n\b\n    ")


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


@contextmanager
def bar(what: str, *, show: bool, in_bytes: bool = False) -> Iterator[Progress]:
    """A bar on standard error that is told how much of how much is done, and goes away; none where no terminal is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def waiting(what: str, *, show: bool) -> Iterator[None]:
    """A bar on standard error for work that cannot tell how far it is: it moves, and tells for how long already."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as shown:
        shown.add_task(what, total=None)
        yield


@contextmanager
def index_bar() -> Iterator[None]:
    """A bar for indexes that searches have to build from the store first; none while there is nothing to build."""
    from memstore.memory.view import watched

    with ExitStack() as stack:
        progress: Progress | None = None

        def told(done: int, total: int) -> None:
            nonlocal progress
            progress = progress or stack.enter_context(bar("blocks indexed", show=True))
            progress(done, total)

        with watched(told):
            yield
