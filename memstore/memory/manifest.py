"""The manifest of an export: what is in the folder, with the length and the SHA-256 of every file.

An export is a folder with ``manifest.json`` and files in the safetensors format, each with consecutive blocks of one
document. Anything that reads safetensors can read them. ``docs/export.md`` has the names of the tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memstore._version import __version__
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, MemstoreError, NotAMemory, NotFound
from memstore.memory.rules import Rules
from memstore.memory.spec import MemorySpec
from memstore.memory.state import LAST_BLOCK, LONGEST_NAME
from memstore.store import paths
from memstore.stored import anything, array, fit, maybe, members, parse, row, table, text, whole

FORMAT, VERSION = "memstore-export", 1
NAME = "manifest.json"
MOST_BYTES = 128 * 1024 * 1024
"""Of the manifest."""
FACTS = "facts.safetensors"
FILE = re.compile(r"facts\.safetensors|document-\d{4,}-\d{6,}\.safetensors")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of an export."""

    name: str
    nbytes: int
    sha256: str
    blocks: tuple[int, int] | None = None
    """First block in it, and one more than the last; None for what belongs to the memory itself."""
    tokens: int = 0
    """Tokens in these blocks."""


@dataclass(frozen=True, kw_only=True)
class DocumentEntry:
    """One document of an export."""

    name: str
    tokens: int
    """Length of the document, tokens of blocks that have left or were dropped included."""
    first: int
    """First block that has not left."""
    digest: str | None
    reading: dict[str, Any] | None
    begins_like: tuple[str, int] | None = None
    """A document before this one, and how many of its first blocks are this one's too: they are not written twice."""
    files: tuple[FileEntry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about an export that is not tensors."""

    spec: MemorySpec
    documents: tuple[DocumentEntry, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values of the memory itself, see ``Memory.put_info``."""
    arrays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name -> the names of its tensors in ``facts.safetensors``, as ``arrays.NAME.TENSOR``."""
    facts: FileEntry | None = None
    rules: Rules = field(default_factory=Rules)

    def files(self) -> Iterator[FileEntry]:
        """All files, the manifest itself excepted."""
        if self.facts is not None:
            yield self.facts
        for document in self.documents:
            yield from document.files

    def to_bytes(self) -> bytes:
        """As it is written: JSON with a digest over all of it."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "library": f"memstore {__version__}",
            "spec": self.spec.to_dict(),
            "info": dict(self.info),
            "arrays": {name: list(tensors) for name, tensors in self.arrays.items()},
            "facts": None if self.facts is None else asdict(self.facts),
            "documents": [asdict(document) for document in self.documents],
        }
        if self.rules != Rules():
            content["rules"] = self.rules.to_dict()
        return json.dumps({**content, "sha256": _digest(content)}, indent=1, ensure_ascii=False).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the export in ``folder``, of which every file is there in its full length.

    Raises ``NotFound``, ``NotAMemory`` for a folder without an export, ``DamagedError``, and ``ForeignMemory`` for an
    export of a newer version.
    """
    if not folder.exists():
        raise NotFound(f"there is no export at {folder}; check the path.")
    path = folder / NAME
    if not folder.is_dir() or paths.find(path) is None:
        raise NotAMemory(
            f"{folder} is not a finished export: it has no {NAME}, which is written last. Export again, or name the "
            "folder that memstore export made."
        )
    manifest = _parsed(path)
    for entry in manifest.files():
        if not FILE.fullmatch(entry.name):
            raise DamagedError(f"{path} is damaged: no file of an export is called {entry.name!r}. Export again.")
        facts = paths.find(folder / entry.name)
        size = None if facts is None else facts.st_size
        if size != entry.nbytes:
            found = "is missing" if size is None else f"has {size:,} bytes of {entry.nbytes:,}"
            raise DamagedError(
                f"the export {folder} is incomplete: {entry.name} {found}. Restore it from a copy, or export again.",
                remedy="restore",
            )
    return manifest


def read_file(folder: Path, entry: FileEntry) -> bytes:
    """The content of a file of an export. Raises ``DamagedError`` where it is not what was written."""
    try:
        content = paths.read(folder, entry.name)
    except OSError as error:
        raise DamagedError(
            f"the export {folder} cannot be read: {entry.name}: {error.strerror}. Restore it from a copy, or export "
            "again.",
            remedy="restore",
        ) from None
    if len(content) != entry.nbytes or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise damaged(folder, entry, "its SHA-256 is not that of the manifest")
    return content


def damaged(folder: Path, entry: FileEntry, what: str) -> DamagedError:
    """The error for a file that does not hold what it should."""
    return DamagedError(
        f"the export {folder} is damaged: {entry.name}: {what}. Nothing of it was used. Restore it from a copy, or "
        "export again."
    )


def _parsed(path: Path) -> Manifest:
    try:
        content = fit(parse(paths.read(path.parent, path.name, MOST_BYTES), str(path), MOST_BYTES), HEAD, str(path))
        if content["format"] == FORMAT and content["version"] > VERSION:
            raise ForeignMemory(f"{path} was written by a newer memstore ({content['library']}); upgrade memstore.")
        told = content.pop("sha256")
        if content["format"] != FORMAT or _digest(content) != told:
            raise ValueError("its digest does not match")
        fit(content, MANIFEST, str(path))
        facts = content["facts"]
        return Manifest(
            spec=MemorySpec.from_dict(content["spec"]),
            documents=tuple(_document(each) for each in content["documents"]),
            info={**content["info"]},
            arrays={name: tuple(tensors) for name, tensors in content["arrays"].items()},
            facts=None if facts is None else _file(facts),
            rules=Rules.from_dict(content["rules"]) if "rules" in content else Rules(),
        )
    except InvalidArgument as error:
        raise DamagedError(f"{path} is damaged: {error} Restore it from a copy, or export again.") from None
    except MemstoreError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split())[:100]
        raise DamagedError(
            f"{path} is damaged: {words}. Restore it from a copy, or export again.", remedy="restore"
        ) from None


_BLOCK = whole(0, LAST_BLOCK)
_TENSOR = text(1000)
_MOST = 10_000_000
_ENTRY = table(
    {"blocks": maybe(row(_BLOCK, _BLOCK)), "tokens": whole(0, 2**53)}, name=text(100), nbytes=whole(), sha256=text(64)
)
HEAD = table(format=text(100), version=whole(0), library=text(1000), sha256=text(100))
MANIFEST = table(
    {"rules": anything},
    spec=anything,
    info=members(anything, _MOST),
    arrays=members(array(_TENSOR, 255), _MOST),
    facts=maybe(_ENTRY),
    documents=array(
        table(
            {"begins_like": maybe(row(text(LONGEST_NAME), _BLOCK))},
            name=text(LONGEST_NAME),
            tokens=whole(0, 2**53),
            first=_BLOCK,
            digest=maybe(text(64)),
            reading=maybe(members(anything, 1000)),
            files=array(_ENTRY, _MOST),
        ),
        _MOST,
    ),
)


def _document(values: dict[str, Any]) -> DocumentEntry:
    like = values["begins_like"]
    files = tuple(_file(each) for each in values["files"])
    return DocumentEntry(**{**values, "files": files, "begins_like": None if like is None else (like[0], like[1])})


def _file(values: dict[str, Any]) -> FileEntry:
    blocks = values["blocks"]
    return FileEntry(**{**values, "blocks": None if blocks is None else (blocks[0], blocks[1])})


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
