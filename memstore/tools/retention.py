"""The verbs that change a memory without a model: what is kept, for how long, and where."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.report import Page, Report, counted
from memstore.tools.verb import (
    DocumentArgument,
    Interruption,
    Json,
    MemoryUrl,
    argument,
    bar,
    existing,
    fact_of,
    seconds_in,
)

Name = Annotated[str, argument("NAME", "Name of the new document.")]
Blocks = Annotated[
    int | None,
    typer.Option(min=0, help="Share only this many blocks, from the first on. Default: all that the document has now."),
]


def fork(memory: MemoryUrl, document: DocumentArgument, name: Name, *, blocks: Blocks = None) -> Report:
    """Start a new document from an existing one.

    Whole blocks are shared, so a fork takes the same moment at any size. From then on the two are independent. A pin or
    a time to live stays with the old one.

    Example:

        memstore fork notes.mem moby-dick another-end

    In Python: memstore.Document.fork.
    """
    from memstore.memory.shared import CHAT

    if name.startswith(CHAT) and not document.startswith(CHAT):
        raise InvalidArgument(f"{name!r} is the name of a chat, which ask leaves out: choose another name")
    with memstore.open(memory) as opened:
        made = existing(opened, document).fork(name, blocks)
        tokens, count = len(made), len(made.blocks)
    data = {"memory": memory, "document": document, "fork": name, "tokens": tokens, "blocks": count}
    told = f"{name!r} begins with {counted(tokens, 'token')} of {document!r}"
    return Report(data=data, text=lambda page: page.line(told))


def forget(memory: MemoryUrl, document: DocumentArgument) -> Report:
    """Delete a document and all its data.

    Its bytes stay in the file until others are written over them, or until memstore compact. In an encrypted memory its
    key is destroyed at once. The file that was read stays where it is, so the next memstore read brings it back.

    Example:

        memstore forget notes.mem moby-dick

    In Python: memstore.Memory.forget.
    """
    with memstore.open(memory) as opened:
        tokens, path = len(existing(opened, document)), fact_of(opened, document).get("path")
        opened.forget(document)
        encrypted = opened.encrypted
    data = {"memory": memory, "document": document, "tokens": tokens}
    erased = "Its key is destroyed" if encrypted else f"To erase it from the disk: memstore compact {quote(memory)}"

    def text(page: Page) -> None:
        page.line(f"forgot {document!r}, {counted(tokens, 'token')}. {erased}")
        if isinstance(path, str) and os.path.exists(path):  # noqa: PTH110 - can be any text
            page.line(f"Its file {path} still exists: the next memstore read of the file or its folder reads it again")

    return Report(data=data, text=text)


def pin(memory: MemoryUrl, document: DocumentArgument) -> Report:
    """Keep a document despite any limit or time to live.

    memstore forget still deletes it.

    Example:

        memstore pin notes.mem moby-dick

    In Python: memstore.Document.pin.
    """
    return _set(memory, document, pinned=True)


def unpin(memory: MemoryUrl, document: DocumentArgument) -> Report:
    """Apply the memory's limit and times to live to a document again.

    Example:

        memstore unpin notes.mem moby-dick

    In Python: memstore.Document.unpin.
    """
    return _set(memory, document, pinned=False)


def _set(memory: str, name: str, *, pinned: bool) -> Report:
    with memstore.open(memory) as opened:
        document = existing(opened, name)
        if pinned:
            document.pin()
        else:
            document.unpin()
    words = "pinned: only memstore forget deletes it" if pinned else "no longer pinned"
    data = {"memory": memory, "document": name, "pinned": pinned}
    return Report(data=data, text=lambda page: page.line(f"{name!r} is {words}"))


After = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Forget after this time from now: 45m, 12h, 30d or 8w; or never.", show_default=False
    ),
]


def expire(memory: MemoryUrl, document: DocumentArgument, *, after: After) -> Report:
    """Forget a document after a time.

    It is forgotten with the first append to another document after that time, and not while it is pinned. Until then
    the document does not change.

    Example:

        memstore expire notes.mem moby-dick --after 30d

    In Python: memstore.Document.expire.
    """
    seconds = parse_duration(after)
    with memstore.open(memory) as opened:
        found = existing(opened, document)
        found.expire(seconds)
        when = found.expires
        words = f"{document!r} never expires" if when is None else f"{document!r} expires at {when:%Y-%m-%d %H:%M} UTC"
        if when is not None and found.pinned:
            words += ", but it is pinned, so it stays until memstore unpin"
    expires = None if when is None else when.isoformat(timespec="seconds")
    data = {"memory": memory, "document": document, "expires": expires}
    return Report(data=data, text=lambda page: page.line(words))


def parse_duration(text: str) -> float | None:
    """Return the seconds of a text such as ``30d``; None for ``never``. Raises ``InvalidArgument``."""
    from memstore.memory.rules import LONGEST

    if text.strip().lower() == "never":
        return None
    seconds = seconds_in(text)
    if seconds is None or not 0 < seconds < LONGEST:
        raise InvalidArgument(f"--after must be a time such as 45m, 12h, 30d or 8w, or never, not {text!r}")
    return seconds


_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)

MaxBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Limit the size of all values: 500MB, 10GB, 8GiB, or none for no limit."),
]
WhenFullOption = Annotated[
    Literal["refuse", "evict-oldest-document", "evict-least-read"] | None,
    typer.Option(
        metavar="RULE", help="Rule for an append that finds no room: refuse, evict-oldest-document or evict-least-read."
    ),
]


def limit(memory: MemoryUrl, *, max_bytes: MaxBytes = None, when_full: WhenFullOption = None) -> Report:
    """Set or show the limit of a memory.

    It is stored with the memory and applies to every append from now on. Until then, existing documents stay.

    Example:

        memstore limit notes.mem --max-bytes 10GB --when-full evict-least-read

    In Python: memstore.Memory.limit.
    """
    change = max_bytes is not None or when_full is not None
    with memstore.open(memory, mode="a" if change else "r") as opened:
        if change:
            most = opened.stats()["rules"]["max_bytes"] if max_bytes is None else parse_size(max_bytes)
            opened.limit(most, when_full)
        numbers = opened.stats()
    rules = numbers["rules"]
    data = {name: rules[name] for name in ("max_bytes", "when_full")} | {"used_bytes": numbers["used_bytes"]}

    def text(page: Page) -> None:
        most = "no limit" if rules["max_bytes"] is None else f"limit {rules['max_bytes']:,} bytes"
        page.line(f"{numbers['used_bytes']:,} bytes used, {most}; when full: {rules['when_full']}")
        if rules["max_bytes"] is not None and numbers["used_bytes"] > rules["max_bytes"]:
            what = "is refused" if rules["when_full"] == "refuse" else "forgets other documents, but no pinned ones"
            page.line(f"that is more than the limit, so the next append {what}")

    return Report(data={"memory": memory, **data}, text=text)


def parse_size(text: str) -> int | None:
    """Return the bytes of a text such as ``10GB``; None for ``none``. Raises ``InvalidArgument``."""
    if text.lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _BYTES.get(match[2].lower())
    if match is None or unit is None or not (size := int(float(match[1]) * unit)):
        raise InvalidArgument(f"--max-bytes must be a size such as 500MB, 10GB or 8GiB, or none, not {text!r}")
    return size


def compact(memory: MemoryUrl, *, json: Json = False) -> Report:
    """Erase forgotten data from the file, and give its space back to the disk.

    It works in place, and other processes can read meanwhile. You can interrupt it at any moment and run it again.

    Example:

        memstore compact notes.mem

    In Python: memstore.Memory.compact.
    """
    with memstore.open(memory) as opened, bar("compacting", show=not json, in_bytes=True) as progress:
        done = opened.compact(progress)
    data = {"memory": memory, "disk_bytes_before": done.before, "disk_bytes": done.after}
    freed = max(0, done.before - done.after)
    told = f"forgotten data is erased; {freed:,} bytes were freed, {done.after:,} are in use"
    return Report(data=data, text=lambda page: page.line(told))


NewKey = Annotated[Path, argument("NEW_KEY_FILE", "File with the new key.")]


def rekey(memory: MemoryUrl, new_key_file: NewKey) -> Report:
    """Change the key of an encrypted memory.

    The keys of its documents are wrapped under the new key, at once or not at all. Nothing else is written. The old key
    still opens older copies of the file `keys`, so destroy it.

    Example:

        memstore rekey notes.mem new.key --key-file notes.key

    In Python: memstore.Memory.change_key.
    """
    with memstore.open(memory) as opened:
        changed = opened.change_key(new_key_file)
    told = f"{memory} {'now' if changed else 'already'} uses the key in {new_key_file}; "
    told += "destroy the old key" if changed else "nothing was changed"
    data = {"memory": memory, "key_file": str(new_key_file), "changed": changed}
    return Report(data=data, text=lambda page: page.line(told))


Source = Annotated[str, argument("SOURCE", "Memory to copy.", memory=True)]
Target = Annotated[str, argument("TARGET", "Memory to copy to. Created if it does not exist.", memory=True)]
CopyCodec = Annotated[
    str | None,
    typer.Option("--codec", help="Store states in the target as none, int8, fp8 or int4. Default: as in the source."),
]


def copy(source: Source, target: Target, codec: CopyCodec = None) -> Report:
    """Copy a memory to another place or kind of store.

    Every value is verified on the way. Documents that the target already has are completed or kept as they are, so
    after an interruption you run the same command again. Forks share their blocks in the copy too. With --codec states
    are encoded again; without it the copy has the same bits. New documents keep their pins and times to live, and a new
    memory keeps the limit too.

    Example:

        memstore copy notes.mem zarr:archive
        memstore copy notes.mem small.mem --codec int8

    In Python: memstore.copy, or memstore.memory.copy.copy_document for one document.
    """
    try:
        result = memstore.copy(source, target, codec=codec, progress=True)
    except KeyboardInterrupt:
        raise Interruption("interrupted; the copied part is intact. Run the same command again to continue") from None

    def text(page: Page) -> None:
        there = counted(result.tokens, "token")
        page.line(f"copied {counted(result.copied_tokens, 'token')}; {target} now has all {there} of {source}")

    return Report(data={"source": source, "target": target, **asdict(result)}, text=text)
