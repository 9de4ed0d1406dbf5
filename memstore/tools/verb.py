"""Common parts of all verbs: arguments and options, the report and its printing, and exit codes."""

from __future__ import annotations

import functools
import inspect
import json as jsonlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, fields
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from memstore.errors import (
    DamagedError,
    DifferentRun,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    NotFound,
    ReadOnlyMemory,
    StoreFull,
    UnsupportedModel,
    WrongKey,
    printable,
)
from memstore.lazy import torch
from memstore.report import Page, Report, Sheet, json_text, tokens_of
from memstore.tools.models import resolve_model

if TYPE_CHECKING:
    from memstore.memory import Document, Memory
    from memstore.store.contract import Progress

KEY_VARIABLE = "MEMSTORE_KEY_FILE"  # as in ``store.encryption_keys``, which loads too much for the start of a verb
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
KeyFile = Annotated[
    str | None,
    typer.Option(
        help="Key file of an encrypted memory. A new memory is encrypted with it. Default: the file named by "
        "MEMSTORE_KEY_FILE, if any."
    ),
]
Csv = Annotated[bool, typer.Option("--csv", help="Print only the table, as CSV. Without a table, facts as name,value.")]


def verb(function: Callable[..., Report]) -> Callable[..., int]:
    """Make a command of a function that returns a report: add ``--json`` and ``--csv``, and print the report.

    If it takes a memory, ``--key-file`` is added, which overrides the environment. The function gets ``json`` only if
    it has a parameter of that name. Then it prints nothing itself, because a program reads the output, JSON or CSV.
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
            raise InvalidArgument("--json and --csv are two forms of the same output: choose one.")
        if key_file is not None:
            from memstore.memory.urls import check_key_used

            # A user who names a key believes that the opened memory is encrypted.
            check_key_used([url for name in memories for url in _urls(arguments.get(name))])
        with _key_from(key_file):
            report = function(json=json or csv, **arguments) if wants_json else function(**arguments)
            if json:
                print(json_text(report.data))
            elif csv:
                sheet = Sheet()
                report.text(sheet)
                sheet.write(report.data)
            else:
                report.text(Page())
        return report.exit_code

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    # The sign \b before indented lines keeps typer from filling them.
    command.__doc__ = (inspect.getdoc(function) or "").replace("\n\n    ", "\n\n\b\n    ")
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _names_memory(annotation: Any) -> bool:
    """Check whether an argument of a verb is the path of a memory, or of several."""
    return any(getattr(each, "callback", None) is lasting for each in getattr(annotation, "__metadata__", ()))


def _urls(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else [*(given or ())]


@contextmanager
def _key_from(file: str | None) -> Iterator[None]:
    """Use ``file`` as the key of encrypted memories inside, also for children of this process."""
    before = os.environ.get(KEY_VARIABLE)
    if file is not None:
        os.environ[KEY_VARIABLE] = os.path.abspath(file)  # noqa: PTH100 - symbolic links in it stay unresolved
    try:
        yield
    finally:
        if file is not None:
            os.environ.pop(KEY_VARIABLE)
            if before is not None:
                os.environ[KEY_VARIABLE] = before


def bar(what: str, *, show: bool, in_bytes: bool = False) -> AbstractContextManager[Progress]:
    """Show a bar on standard error that counts done and total, and disappears; none without a terminal."""
    from rich.progress import DownloadColumn, MofNCompleteColumn, TimeRemainingColumn

    return _bar(what, DownloadColumn() if in_bytes else MofNCompleteColumn(), TimeRemainingColumn(), show=show)


def waiting(what: str, *, show: bool) -> AbstractContextManager[object]:
    """Show a moving bar on standard error, with the seconds so far, for work without known progress."""
    from rich.progress import TimeElapsedColumn

    return _bar(what, TimeElapsedColumn(), show=show)


@contextmanager
def _bar(what: str, *columns: Any, show: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def index_bar() -> Iterator[None]:
    """Show a bar while searches build indexes from the store; none if no index has to be built."""
    from memstore.memory.view import watched

    with ExitStack() as stack:
        progress: Progress | None = None

        def told(done: int, total: int) -> None:
            nonlocal progress
            progress = progress or stack.enter_context(bar("blocks indexed", show=True))
            progress(done, total)

        with watched(told):
            yield


# Arguments and options that several verbs have, and the documents that they select.


def taking(kind: type[Any]) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """Make a verb of ``function(options, *, own, ...)``: it takes the fields of the dataclass ``kind``, and its own."""

    def decorate(function: Callable[..., Report]) -> Callable[..., Report]:
        own = [*inspect.signature(function, eval_str=True).parameters.values()][1:]

        @functools.wraps(function)
        def taken(**arguments: Any) -> Report:
            given = {each.name: arguments.pop(each.name) for each in own}
            return function(kind(**arguments), **given)

        hints = get_type_hints(kind, include_extras=True)  # each in the module where it was written
        options = [each.replace(annotation=hints[each.name]) for each in inspect.signature(kind).parameters.values()]
        parameters = sorted([*options, *own], key=lambda each: each.kind)  # keyword-only parameters come last
        taken.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
        return taken

    return decorate


# Options that kinds of models declare as fields of dataclasses.


def parameters_of(options: type[Any]) -> list[inspect.Parameter]:
    """Return a verb's parameters for the fields of the dataclass ``options``; see ``memstore.train.options.option``."""
    hints = get_type_hints(options)
    return [_parameter(each, hints[each.name]) for each in fields(options)]


def _parameter(field: Field[Any], type_: Any) -> inspect.Parameter:
    shown = {name: value for name, value in field.metadata.items() if name not in ("tokens", "model")}
    flags = [shown.pop("flags")] if "flags" in shown else []
    required = field.default is MISSING
    if (argument := shown.pop("argument", None)) is not None:
        told = typer.Argument(metavar=argument, show_default=False, **shown)
    else:
        if "tokens" in field.metadata:  # written as 8K
            type_ = str | None
        told = typer.Option(*flags, **shown, show_default=not required)
    default = inspect.Parameter.empty if required else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, told]
    )


def values_of(options: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the values ``given`` for the fields of ``options``. Raises ``InvalidArgument`` and ``NotFound``."""
    return {each.name: _value(each, given[each.name]) for each in fields(options)}


def _value(field: Field[Any], given: Any) -> Any:
    if given is None:
        return None
    option = "--" + field.name.replace("_", "-")
    if (least := field.metadata.get("tokens")) is not None:
        return tokens_of(option, given, least=least)
    if "model" in field.metadata:
        return Path(resolve_model(str(given)))
    return given


def lasting(given: Any) -> Any:
    """Return the url, or urls, of an argument for memories, unless one would vanish when the command ends."""
    for url in _urls(given):
        if url.startswith("ram:"):
            raise InvalidArgument(
                f"{url} would be lost when this command ends. Name a folder (./{url} for a folder of this name)."
            )
    return given


def argument(metavar: str, told: str, *, memory: bool = False) -> Any:
    """Describe a positional argument; with ``memory``, the path of a memory, or of several."""
    return typer.Argument(metavar=metavar, help=told, show_default=False, callback=lasting if memory else None)


MemoryUrl = Annotated[str, argument("MEMORY", "Path of the memory.", memory=True)]
DocumentArgument = Annotated[str, argument("DOCUMENT", "Name of the document.")]

BlockSize = Annotated[
    int | None, typer.Option(min=1, help="Tokens in a block. Default: that of the memory. 64 for a new one.")
]
Codec = Annotated[
    str | None,
    typer.Option(help="Store the states of a new memory as none (unchanged), int8, fp8 or int4 (a third of bfloat16)."),
]
Device = Annotated[str, typer.Option(help="Run the model and search its memory on this device: cpu, cuda, cuda:1, ...")]
PRECISION = typer.Option(
    help="Compute in float32, bfloat16, float16 or auto. auto: bfloat16 if the hardware computes in it, else float32."
)
Dtype = Annotated[str, PRECISION]
Model = Annotated[
    str | None,
    typer.Option(
        help="Use this model: smollm2, a GGUF file, a Hugging Face directory or hub id. Or one in this package: "
        "drt, two-hop, landmark-passkey, hils-passkey, indexed-passkey, indexed-blocks-passkey. Default: the "
        "model that read the memory, or smollm2."
    ),
]
ModelThatRead = Annotated[
    str | None,
    typer.Option("--model", help="Model that read the memory. Its tokenizer shows texts. Default: as recorded."),
]
Index = Annotated[
    str,
    typer.Option(help="Find blocks with this index: exact, auto, faiss:IVF1024,Flat or another factory string, ..."),
]
RouterFile = Annotated[
    str | None,
    typer.Option(
        "--router",
        help="File of a trained router, for a new memory of a stock model. Default: the router in this package for "
        "the model, if any. Otherwise, and with fit, a router is fitted to the text.",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Use this many CPU threads. Default: chosen by PyTorch.")]
MOST_BLOCKS = 65_536
"""Blocks that a command may retrieve at once, at most. Python also offers "all" of them, as full attention."""
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        min=1,
        max=MOST_BLOCKS,
        help="Retrieve this many blocks at a time. Default: 8, or what the model was trained with.",
    ),
]


def on_disk(argument: str) -> bool:
    """Check whether an argument of the command line names a memory, sound or not."""
    if argument.startswith("zarr+"):
        return True
    folder = argument.removeprefix("zarr:")
    return any(os.path.exists(f"{folder}/{name}") for name in ("data.mdb", "tail"))  # noqa: PTH110 - can be any text


def existing(memory: Memory, name: str) -> Document:
    """Return the document ``name`` of a memory that is open for writing. Raises ``NotFound``."""
    documents = {document.name: document for document in memory.documents()}
    if name not in documents:
        from memstore.memory.shared import not_found

        raise not_found(name, memory.url, list(documents))
    return documents[name]


def use_threads(threads: int | None) -> None:
    """Limit PyTorch to ``threads`` CPU threads, if a number is given. Raises ``InvalidArgument`` for far too many."""
    if threads is not None:
        most = 4 * (os.cpu_count() or 1)
        if threads > most:
            raise InvalidArgument(f"--threads must be at most {most} on this machine (four per CPU), got {threads:,}.")
        torch.set_num_threads(threads)


FACT = "file/"
"""Prefix of the key under which a memory stores the file of a document and its notes; the document's name follows."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A choice of documents; each given part must hold."""

    match: Sequence[str] = ()
    """Patterns of names, one of which must fit: ``*`` is any text, also with slashes."""
    meta: Mapping[str, str]
    """Notes that the document must have."""
    since: datetime | None = None
    """Earliest change of its file, or earliest reading if it is not a file."""

    @classmethod
    def given(cls, match: Sequence[str] | None, meta: Sequence[str] | None, since: str | None) -> Filter | None:
        """Build the filter from options; None if none is given. Raises ``InvalidArgument``."""
        if not (match or meta or since):
            return None
        return cls(match=match or (), meta=parse_meta(meta), since=None if since is None else parse_since(since))

    def names(self, memory: Memory, among: Sequence[str]) -> list[str]:
        """Return the names in ``among`` that pass. Raises ``NotFound`` if none does."""
        from memstore.memory.shared import CHAT

        facts = facts_of(memory)
        found = [name for name in among if self._fits(name, facts[name])]
        if not found:
            chats = [name for name in facts if name.startswith(CHAT) and self._fits(name, facts[name])]
            given = {"--match": self.match, "--meta": self.meta, "--since": self.since}
            asked = " and ".join(option for option, value in given.items() if value)
            also = f"; the chat {chats[0]!r} does: ask it with --document {chats[0]}" if chats else ""
            none = "the document does not fit" if len(among) == 1 else f"none of {len(among):,} documents fits"
            raise NotFound(f"{none} {asked}; memstore ls shows the documents{also}")
        return found

    def _fits(self, name: str, fact: Mapping[str, Any]) -> bool:
        names = (name, name.rpartition("/")[2])
        if self.match and not any(fnmatchcase(one, each) for one in names for each in self.match):
            return False
        noted = _dict(fact.get("meta"))
        if any(noted.get(key) != value for key, value in self.meta.items()):
            return False
        return self.since is None or ((when := time_of(fact)) is not None and when >= self.since)


def facts_of(memory: Memory) -> dict[str, dict[str, Any]]:
    """Return facts and notes about the file of each document. Most documents that are not files have none."""
    facts = memory.infos(FACT)
    return {each.name: _dict(facts.get(FACT + each.name)) for each in memory.documents()}


def fact_of(memory: Memory, document: str) -> dict[str, Any]:
    """Return facts and notes about the file of one document; empty if there are none."""
    return _dict(memory.get_info(FACT + document))


def time_of(fact: Mapping[str, Any]) -> datetime | None:
    """Return when a document's file was last changed, or when it was read if it is no file; None if unknown."""
    modified, read = fact.get("modified"), fact.get("read")
    with suppress(ValueError, OverflowError, OSError):  # the maker of the memory may have stored any value
        if isinstance(modified, int):
            return datetime.fromtimestamp(modified / 1e9, UTC)
        if isinstance(read, str):
            return datetime.fromisoformat(read).astimezone(UTC)
    return None


def parse_meta(given: Sequence[str] | None) -> dict[str, str]:
    """Parse ``["project=island"]`` into a mapping. Raises ``InvalidArgument``."""
    pairs = [each.partition("=") for each in given or []]
    for key, equals, value in pairs:
        if not (key.strip() and equals):
            raise InvalidArgument(f"--meta must be KEY=VALUE, such as project=island, not {key + equals + value!r}")
    return {key.strip(): value for key, _, value in pairs}


def seconds_in(text: str) -> float | None:
    """Return the seconds of a text such as ``30d``; None for other texts."""
    found = _DURATION.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _SECONDS[found[2].lower()]


def parse_since(text: str) -> datetime:
    """Parse a time some hours, days or weeks ago (``7d``), or a date. Raises ``InvalidArgument``."""
    try:
        if (seconds := seconds_in(text)) is not None:
            return datetime.now(UTC) - timedelta(seconds=seconds)
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"--since must be an age such as 12h, 7d or 2w, or a date such as 2026-03-01, not {text[:80]!r}"
        ) from None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# Failures of a verb: the exit code, and one or two lines that say what to do.

OK, FAILED, USAGE, NOT_FOUND, DAMAGED, REFUSED, INTERRUPTED, PIPE = 0, 1, 2, 3, 4, 5, 130, 141

EXIT_CODES = """\
Exit codes: 0 done, 1 other failure (of memstore or of the system), 2 wrong use, 3 not found, 4 damaged,
5 refused (memory of another model, wrong key, other training run, in use, read-only, full), 130 interrupted,
141 the reader of the output closed it.
With --json, a failure is the object {"error": TYPE, "message": TEXT, "code": WORD} on standard output. It also has
"memory" and "remedy" if they are known."""


class Interruption(MemstoreError):
    """Ctrl-C. The message says what is safe and how to continue."""

    code = "interrupted"


class Mistake(MemstoreError):
    """An unexpected error, in one line."""

    code = "mistake"

    def __init__(self, error: Exception) -> None:
        self.kind = type(error).__name__
        words = " ".join(str(error).split())
        super().__init__(f"{self.kind}: {words} - this is a bug in memstore; please report it")


_ENDS: Mapping[type[Exception], tuple[int, int]] = {
    InvalidArgument: (USAGE, 400),
    NotFound: (NOT_FOUND, 404),
    NotAMemory: (NOT_FOUND, 404),
    DamagedError: (DAMAGED, 500),
    StoreFull: (REFUSED, 507),
    Interruption: (INTERRUPTED, 500),
    **dict.fromkeys(
        (ForeignMemory, WrongKey, UnsupportedModel, DifferentRun, MemoryInUse, ReadOnlyMemory), (REFUSED, 409)
    ),
}
"""Exit code for scripts, and HTTP status, of each kind of error."""


def exit_code(error: Exception) -> int:
    """Return the exit code for scripts."""
    return error.exit_code if isinstance(error, typer.TyperException) else _end(error)[0]


def status_of(error: Exception) -> int:
    """Return the HTTP status for this kind of error."""
    return _end(error)[1]


def _end(error: Exception) -> tuple[int, int]:
    return next((end for kind, end in _ENDS.items() if isinstance(error, kind)), (FAILED, 500))


def report_failure(error: Exception, *, json: bool) -> int:
    """Print the error, as text on standard error or as JSON on standard output, and return the exit code."""
    usage = isinstance(error, typer.TyperException)
    message = _usage(error) if isinstance(error, typer.TyperException) else str(error)
    if json:
        kind = "UsageError" if usage else error.kind if isinstance(error, Mistake) else type(error).__name__
        facts = error.facts() if isinstance(error, MemstoreError) else {"code": "usage"}
        print(jsonlib.dumps({"error": kind, "message": message, **facts}))
    else:
        print(f"memstore: {printable(message)}", file=sys.stderr)
        if usage:
            context: typer.Context | None = getattr(error, "ctx", None)
            print(f"Try '{context.command_path if context else 'memstore'} --help'.", file=sys.stderr)
    return exit_code(error)


_WANTED = {
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""What a value must be, by the name of pydantic's error."""


def _usage(error: typer.TyperException) -> str:
    """Return the message of a wrong use. Those about values are pydantic's, which leave out the value."""
    message = " ".join(error.format_message().split())
    if re.match(r"No such option: -\d", message):
        return f"{message} (blocks are numbered from 0; put -- before a text that begins with -)"
    cause: Any = error.__cause__
    for each in cause.errors() if hasattr(cause, "errors") else ():
        facts = each.get("ctx", {})
        if each["type"] in _WANTED:
            wanted = _WANTED[each["type"]].format(**facts)
            message = message.replace(each["msg"], f"it must be {wanted}, not {each['input']!r}")
        elif "error" in facts:
            message = message.replace(each["msg"], str(facts["error"]))
    return message


_AGAIN = "run the same command again"


# The library's error says what happened and what is safe. The command line adds the command to type for this memory.
def with_way_out(error: Exception, arguments: Sequence[str]) -> Exception:
    """Add that line to the error, if one of ``arguments`` is the memory that it is about.

    If only a copy helps, or the fault is in the traces, the error says so itself.
    """
    memories = [each for each in arguments[1:] if on_disk(each)]
    if not memories or not isinstance(error, MemstoreError):
        return error
    # As the user wrote it. A copy names two memories: the first is read and the last is written.
    named = [each for each in memories if error.memory and _path(each) == _path(error.memory)] or memories
    match error:
        case DamagedError() if error.remedy is None:
            wrong, right = f"memstore verify {quote(named[0])}", f"memstore repair {quote(named[0])}"
            return error.reworded(
                f"{error}\nThe rest was not changed. To see all damage: {wrong}; to repair it: {right}"
            )
        case MemoryInUse() | ReadOnlyMemory() | StoreFull() if error.remedy == "limit" or on_disk(error.memory or ""):
            return error.reworded(f"{error}\n{_refused(error, quote(named[-1]))}")
    return error


def _path(memory: str) -> str:
    return memory if memory.startswith("zarr+") else os.path.realpath(memory.removeprefix("zarr:"))


def _refused(error: MemstoreError, memory: str) -> str:
    """Return advice for errors without damage; ``memory`` is quoted."""
    match error:
        case MemoryInUse():
            return (
                f"Nothing was changed here. Reading still works, such as: memstore ls {memory}; when the memory "
                f"is free, {_AGAIN}"
            )
        case ReadOnlyMemory():
            return (
                f"Nothing was changed. For a copy that you can write: memstore copy {memory} NEW; to write here, "
                f"get the permission, and {_AGAIN}"
            )
    more = f"limit {memory} --max-bytes MORE" if error.remedy == "limit" else f"compact {memory}"
    return f"To free space: memstore forget {memory} DOCUMENT; memstore {more}; then {_AGAIN}"
