"""Arguments and options that several verbs share, and which documents they mean."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from memstore.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from memstore.memory import Document, Memory
    from memstore.tools.output import Report

T = TypeVar("T")


def taking(kind: type[T]) -> Callable[[Callable[[T], Report]], Callable[..., Report]]:
    """Make a verb of ``function(options)``: it takes what the dataclass ``kind`` holds, each option said there once."""

    def decorate(function: Callable[[T], Report]) -> Callable[..., Report]:
        @functools.wraps(function)
        def taken(**arguments: Any) -> Report:
            return function(kind(**arguments))

        hints = get_type_hints(kind, include_extras=True)  # each in the module that it was written in
        options = [each.replace(annotation=hints[each.name]) for each in inspect.signature(kind).parameters.values()]
        taken.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # for typer
        return taken

    return decorate


def lasting(url: str) -> str:
    """``url``, unless what it names would be gone when the command ends."""
    if url.startswith("ram:"):
        raise InvalidArgument(f"{url} would be gone when this command ends; name a folder (./{url} if it is one).")
    return url


MemoryUrl = Annotated[
    str, typer.Argument(metavar="MEMORY", help="Path of the memory.", show_default=False, callback=lasting)
]

DocumentArgument = Annotated[str, typer.Argument(metavar="DOCUMENT", help="Name of the document.", show_default=False)]

BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens in a block. A new memory takes 64.")]
Codec = Annotated[
    str | None,
    typer.Option(help="How a new memory stores states: none (as they are), int8, fp8 or int4 (a quarter of bfloat16)."),
]
Device = Annotated[str, typer.Option(help="Where the model runs and its memory is searched: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str,
    typer.Option(help="float32, bfloat16, float16, or auto: bfloat16 where the hardware computes in it, else float32."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A Hugging Face directory or hub id; a GGUF file; smollm2; or a model that comes with the package: drt, "
        "two-hop, landmark-passkey. Without it: the one that read the memory before, and smollm2 for a new one."
    ),
]
ModelThatRead = Annotated[
    str | None,
    typer.Option(
        "--model", help="The model that read the memory, whose tokenizer makes texts. Without it: as recorded."
    ),
]
Index = Annotated[
    str, typer.Option(help="What finds blocks: exact, faiss:IVF1024,Flat or another factory string, auto, ...")
]
RouterFile = Annotated[
    str | None,
    typer.Option(
        "--router", help="File of a trained router, for a new memory of a stock model. Without it: fitted to the text."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Without it: what PyTorch chooses.")]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", min=1, help="Blocks retrieved at a time. Without it: 8, or what the model was trained with."
    ),
]
TOP_K = 8
"""Blocks that a stock model retrieves at a time, unless said."""


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


def on_disk(argument: str) -> bool:
    """Whether an argument of the command line names a memory, sound or not."""
    if argument.startswith("zarr+"):
        return True
    folder = argument.removeprefix("zarr:")
    return any(os.path.exists(f"{folder}/{name}") for name in ("data.mdb", "tail"))  # noqa: PTH110 - of any text


def existing(memory: Memory, name: str) -> Document:
    """The document ``name`` of a memory that is open for writing. Raises ``NotFound``."""
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
            raise InvalidArgument(f"--threads is at most {most} here, four for each CPU, got {threads:,}.")
        import torch

        torch.set_num_threads(threads)


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
            chats = [name for name in facts if name not in among and self._fits(name, facts[name])]
            also = f"; {chats[0]!r} does, and a conversation is asked by --document {chats[0]}" if chats else ""
            raise NotFound(
                f"none of {len(among):,} documents fits --match, --meta and --since: memstore ls shows them{also}"
            )
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
