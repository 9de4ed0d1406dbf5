"""The changes that a run of ``memstore read`` makes, and their cost: known before a model computes anything."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import memstore
from memstore.errors import InvalidArgument, NotFound, ReadOnlyMemory, StoreFull
from memstore.lazy import torch
from memstore.report import counted
from memstore.tools.files import STDIN, EmptyText, SourceFile, digest
from memstore.tools.models import chosen_name, recorded_name
from memstore.tools.parsing import LeftOut
from memstore.tools.verb import FACT

if TYPE_CHECKING:
    from memstore.memory import Memory, MemorySpec
    from memstore.readers.reader import Reader

TOLD = 4096
"""Tokens from which the cost of reading is announced beforehand."""
BYTES = {"int8": 1.07, "fp8": 1.07, "int4": 0.63}
"""Bytes per number, including its share of the scales, by codec."""


@dataclass(frozen=True)
class Contents:
    """The contents of a memory, and the model that read them."""

    spec: MemorySpec | None = None
    """Its layout; None if it does not exist yet."""
    model: str | None = None
    dtype: str | None = None
    documents: Mapping[str, int] = field(default_factory=dict)
    """Documents, with their tokens."""
    files: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Facts about the file of each document."""
    stats: Mapping[str, Any] = field(default_factory=dict)
    """Its sizes and rules: see ``Memory.stats``."""

    @classmethod
    def of(cls, memory: Memory, model: str | None = None) -> Contents:
        """Return the contents of an open memory, which ``model`` has read."""
        dtype, stats = memory.model_info().get("dtype"), memory.stats()
        documents = {document.name: len(document) for document in memory.documents()}
        facts = {key[len(FACT) :]: fact for key, fact in memory.infos(FACT).items()}
        files = {key: fact for key, fact in facts.items() if key in documents and isinstance(fact, dict)}
        for key, fact in files.items():  # a repair may have cut it, or an older copy stopped before its first token
            least = fact.get("tokens", 1)
            if not isinstance(least, int) or documents[key] < least:
                files[key] = {**fact, "whole": False}
        return cls(memory.spec, model, dtype if isinstance(dtype, str) else None, documents, files, stats)

    def room(self, named: Collection[str]) -> int | None:
        """Return the bytes left within the limit, if any. If it evicts, beside pinned documents and those ``named``."""
        if self.spec is None or self.stats["rules"]["max_bytes"] is None:
            return None
        rules, used = self.stats["rules"], int(self.stats["used_bytes"])
        if rules["when_full"] != "refuse":  # all others may go; bytes are taken to be as tokens
            kept = sum(self.documents.get(name, 0) for name in {*named, *rules["pinned"]})
            used = math.ceil(used * kept / max(1, sum(self.documents.values())))
        return max(0, int(rules["max_bytes"]) - used)

    @classmethod
    def at(cls, url: str, model: str | None) -> Contents:
        """Return the contents of the memory at ``url``.

        Raises an error if it is no memory, or if no ``model`` is named and the memory's model is not trusted.
        """
        try:
            with memstore.open(url, mode="r") as memory:
                named = recorded_name(memory)
                return cls.of(memory, chosen_name(memory) if model is None and named is not None else named)
        except NotFound:
            return cls()


class FileText(NamedTuple):
    """A file to read."""

    file: SourceFile
    document: str
    content: str
    version: tuple[int, int] | None
    """Bytes and time of the file (nanoseconds since 1970) before it was read: a later change is found next time."""
    encoding: str | None = None
    """The encoding that the user named."""
    moved: str | None = None
    """Document of a missing file with the same text: the file was renamed."""


@dataclass
class ReadPlan:
    """The work on the files that were found."""

    read: list[FileText] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    """Documents of unchanged files."""
    passed_over: list[dict[str, str]] = field(default_factory=list)
    """Files that have no text, each with the reason."""
    gone: list[str] = field(default_factory=list)
    """Documents whose files are missing now, or have no text any more."""
    bad: list[dict[str, str]] = field(default_factory=list)
    """Files that could not be read in full, each with the error."""
    pinned: list[str] = field(default_factory=list)
    """Documents of ``gone`` that are pinned, so they are not pruned."""
    evicted: list[str] = field(default_factory=list)
    """Documents that were forgotten during the reading, for the limit or their time to live."""
    cost: Cost | None = None
    """Rough cost of reading; None if there is nothing to read."""
    done: list[dict[str, Any]] = field(default_factory=list)
    """The result for each file that was read."""
    same: list[dict[str, Any]] = field(default_factory=list)
    """The same for the only file that is named, if it is unchanged."""

    @property
    def documents(self) -> list[str]:
        """All documents whose files were found."""
        return [*self.unchanged, *(each.document for each in self.read)]


def plan_of(
    found: list[SourceFile],
    files: Mapping[str, dict[str, Any]],
    document: str | None,
    *,
    encoding: str | None,
    alone: bool,
    gone: Sequence[str] = (),
    compare: bool = False,
) -> ReadPlan:
    """Find the new and changed files. ``alone``: raise the error of the only file. ``compare``: read all of them.

    ``files``: see ``Contents``. ``gone``: documents whose files are missing. A new file with the same text as one of
    them is that file, renamed.
    Raises ``InvalidArgument`` if ``document`` is the name of a conversation.
    """
    from memstore.memory.memory import check_name
    from memstore.memory.shared import CHAT

    if document is not None and document.startswith(CHAT):
        raise InvalidArgument(f"{document!r} is the name of a chat: choose another name with --document")
    plan = ReadPlan(gone=list(gone))
    names = {str(fact.get("path")): name for name, fact in files.items()}
    taken = set(files)
    read: dict[Any, list[str]] = {}
    for name, fact in files.items():
        if fact.get("whole"):
            read.setdefault(fact.get("digest"), []).append(name)
    for each in found:
        before = None if each.path is None else names.get(str(each.path))
        name = document or before or _free(each, taken)
        taken.add(name)
        fact = files.get(name, {}) if before == name else {}
        whole, version, path = fact.get("whole") and not compare, _version(each.path), str(each.path or STDIN)
        same = version == (fact.get("bytes"), fact.get("modified"))
        if whole and same and encoding in (None, fact.get("encoding")):
            plan.unchanged.append(name)
            continue
        try:
            left_out: LeftOut = []
            content = each.text(encoding, left_out)
            if content:
                check_name(name)
            plan.bad += [{"path": path, "error": f"part of {path} was not read: {part}"} for part in left_out]
        except (InvalidArgument, NotFound, OSError) as error:
            if alone:
                raise
            if not isinstance(error, EmptyText):
                plan.bad.append({"path": path, "error": str(error)})
                continue
            content = ""
        if not content:
            reason = "no text" if content is None else "empty"
            plan.passed_over.append({"path": path, "reason": reason})
            if fact:
                plan.gone.append(name)
        elif whole and fact.get("digest") == digest(content):
            plan.unchanged.append(name)  # touched, or copied again
        else:
            alike, moved = [] if fact else read.get(digest(content), []), None
            left = [other for other in alike if other in plan.gone or _is_gone(files[other])]
            if left:  # it was moved; among several prefer the same file name
                called = PurePath(each.path or each.name).name
                moved = next((other for other in left if _path(files[other]).name == called), left[0])
                alike.remove(moved)
                if moved not in (name, *plan.gone):
                    plan.gone.append(moved)  # from a folder that is not searched now
            plan.read.append(FileText(each, name, content, version, encoding, moved))
    return plan


def _path(fact: Mapping[str, Any]) -> Path:
    return Path(str(fact.get("path")))


def _is_gone(fact: Mapping[str, Any]) -> bool:
    """Check whether a file is surely no longer at its path."""
    try:
        _path(fact).lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _free(found: SourceFile, taken: set[str]) -> str:
    """Return a document name that no other file has, nor a conversation."""
    from memstore.memory.shared import CHAT  # the command starts without numpy

    names = [found.name]
    if found.path is not None:
        if found.in_folder:  # another folder has its name: add the name of the parent folder
            names.append("/".join(found.path.parts[-len(found.name.split("/")) - 1 :]).lstrip("/"))
        names += [found.path.name, str(found.path)]
    return next((name for name in names if name not in taken and not name.startswith(CHAT)), names[-1])


def _version(path: Path | None) -> tuple[int, int] | None:
    try:
        facts = None if path is None else path.stat()
    except OSError:
        return None
    return None if facts is None else (facts.st_size, facts.st_mtime_ns)


def gone(files: Mapping[str, dict[str, Any]], found: list[SourceFile], folders: list[Path]) -> list[str]:
    """Return documents whose files were below ``folders`` and are no longer found."""
    paths = {str(each.path) for each in found}
    closed = [each.path for each in found if each.path is not None and each.is_folder]  # their contents are unknown
    return [
        name
        for name, fact in files.items()
        if isinstance(path := fact.get("path"), str)
        and path not in paths
        and any(Path(path).is_relative_to(folder) for folder in folders)
        and not any(Path(path).is_relative_to(folder) for folder in closed)
    ]


def check_fit(memory: str, spec: MemorySpec | None, *, block_size: int | None, codec: str | None) -> None:
    """Raise ``InvalidArgument`` for an invalid size or codec, or one that differs from the existing memory's."""
    from memstore.memory.spec import CODECS  # the command starts without numpy and torch

    if codec is not None and codec not in CODECS:
        raise InvalidArgument(f"there is no codec {codec!r}. Choose one of {', '.join(CODECS)}.")
    if spec is None:
        if block_size is not None and 64 % block_size:
            raise InvalidArgument(
                f"--block-size must divide 64 and 256 (the sizes of sink and window), got {block_size}."
            )
        return
    if block_size not in (None, spec.block_size):
        raise InvalidArgument(
            f"memory {memory} has blocks of {spec.block_size} tokens: leave --block-size out, or name a new memory"
        )
    if codec not in (None, spec.codec):
        raise InvalidArgument(f"memory {memory} has the codec {spec.codec}: leave --codec out, or name a new memory")


SIDE = 1024
"""Rows and columns of a matrix that is multiplied to learn how fast the machine is."""


class Cost(NamedTuple):
    """Rough cost of reading the new tokens."""

    tokens: int
    disk_bytes: int
    index_bytes: int
    """Bytes of memory while the reader is attached; 0 if no index scans all tokens."""
    seconds: float


def check_room(
    memory: str,
    reader: Reader,
    known: Contents,
    texts: Sequence[tuple[int, int]],
    named: Collection[str],
    *,
    tell: bool,
) -> Cost:
    """Print the cost of reading documents, of which each has so many tokens, and so many of them are stored.

    Raises ``StoreFull`` if they do not fit beside what is ``known``; see ``Contents.room`` for ``named``.
    """
    spec, new = known.spec or reader.spec(), sum(all_ - there for all_, there in texts)
    codecs = (spec.codec, "int8", "int4") if reader.kind.takes("codec") else (spec.codec,)
    sizes = {codec: int(new * _bytes_per_token(spec, codec)) for codec in dict.fromkeys(codecs)}
    size, others = sizes[spec.codec], {codec: size for codec, size in sizes.items() if codec != spec.codec}
    instead = ", ".join(f"{codec} {_amount(bytes_)}" for codec, bytes_ in others.items())
    index = int(new * reader.index_bytes_per_token)
    cost = Cost(new, size, index, round(_seconds(reader, texts), 1))
    if tell and new >= TOLD:
        minutes = cost.seconds / 60
        about = "less than a minute" if minutes < 1 else f"about {minutes:,.0f} min"
        kept = f" ({instead} with --codec in a new memory)" if spec.codec == "none" and instead else ""
        held = f"; its index needs {_amount(index)} of memory while it is attached" if index else ""
        sys.stderr.write(f"{counted(new, 'token')} to read: about {_amount(size)} in {memory}{kept}, {about}{held}\n")
    within = room = known.room(named)
    folder = Path(memory.removeprefix("zarr:")).absolute()
    if "://" not in memory:
        while not folder.exists():
            folder = folder.parent
        disk = shutil.disk_usage(folder)
        if not os.access(folder, os.W_OK) or not disk.total:  # /proc and the like have no room at all
            raise ReadOnlyMemory(f"{memory} cannot be created: you may not write to {folder}. Choose another place.")
        room = disk.free if room is None else min(room, disk.free)
    if room is not None and size > room:
        smaller = ", ".join(f"{codec} {_amount(bytes_)}" for codec, bytes_ in others.items() if bytes_ <= room)
        what = ["read less", "make room", *([f"read into a new memory with --codec ({smaller})"] if smaller else [])]
        limit = " within its limit" if room == within else ""
        raise StoreFull(
            f"{counted(new, 'token')} need about {_amount(size)}, but {memory} has room for {_amount(room)}{limit}: "
            f"{', '.join(what[:-1])} or {what[-1]}",
            # An empty memory has nothing to forget or erase.
            memory=memory if known.documents else None,
            remedy="limit" if limit else None,
        )
    return cost


def _bytes_per_token(spec: MemorySpec, codec: str) -> float:
    """Estimate the bytes on disk of one token's states and landmarks."""
    from memstore.memory.spec import run_layout

    numbers: int = sum(math.prod(shape) for shape in spec.fields.values()) * spec.layers // spec.block_size
    beside = sum(layout.nbytes for layout in spec.recurrent) / spec.recurrent_step
    beside += len(spec.index_layers) * run_layout(spec, 1).nbytes / spec.block_size  # landmarks
    return numbers * BYTES.get(codec, 4 if spec.dtype == "float32" else 2) + beside


def _seconds(reader: Reader, tokens: Sequence[tuple[int, int]]) -> float:
    """Estimate the seconds of reading: a matrix is multiplied, and everything costs as much for each number."""
    weights = [each for name, each in reader.model.named_parameters() if each.dim() in (2, 3) and "embed" not in name]
    active = getattr(reader.model.config.get_text_config(), "num_experts_per_tok", None) or 1
    of_all = sum(each.numel() if each.dim() == 2 else each[0].numel() * active for each in weights)
    device = "cpu" if weights[0].is_meta else weights[0].device
    some, like = (torch.ones(rows, SIDE, dtype=reader.model.dtype, device=device) for rows in (256, SIDE))
    spent = []
    with torch.inference_mode():
        for _ in range(3):
            begun = time.perf_counter()
            some @ like.T
            spent.append(time.perf_counter() - begun)
    numbers: float = sum((all_ - old) * (of_all + reader.numbers_per_pair * (all_ + old) / 2) for all_, old in tokens)
    return min(spent) * numbers / like.numel() / len(some) * 1.3  # attention, and writing beside it


def _amount(size: int) -> str:
    """Format a size like ``1.3 GB``."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= least:
            return f"{size / least:,.1f} {unit}" if size < 10 * least else f"{size / least:,.0f} {unit}"
    return f"{size} bytes"
