"""What an export says of itself, and making a memory from one: the same blocks, the same bits.

An export is a folder with ``manifest.json``, which has the length and the SHA-256 of every file, and files in the
safetensors format, each with consecutive blocks of one document. ``docs/export.md`` has the names of the tensors.

A document is put together under a name of its own and gets its real one in a single transaction, once all of it is
there: it is seen as a whole or not at all. What was put together before an interruption is used by the next run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore import paths
from memstore._version import __version__
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, MemstoreError, NotAMemory, NotFound
from memstore.json_checks import anything, array, fit, maybe, members, parse, row, table, text, whole
from memstore.memory.document import Document
from memstore.memory.entry import LONGEST_NAME
from memstore.memory.memory import Memory, open_memory
from memstore.memory.rows import decode_landmarks, no_states
from memstore.memory.rules import Rules
from memstore.memory.spec import MemorySpec, block_layouts, plain_layouts, run_layout, token_layout
from memstore.progress import progress_bar
from memstore.store.encryption_keys import KeySource
from memstore.store.records import MAX_ITEM

FORMAT, VERSION = "memstore-export", 1
NAME = "manifest.json"
MOST_BYTES = 64 * 1024 * 1024
"""Of the manifest."""
MOST_FILE_BYTES = 256 * 1024 * 1024
"""Of any other file, unless one block is larger. A file with holes can be of any length, and it is read whole."""
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
    rules: Rules[str] = field(default_factory=Rules)

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
        if self.rules != Rules[str]():
            content["rules"] = self.rules.to_dict()
        text = json.dumps({**content, "sha256": _digest(content)}, indent=1, ensure_ascii=False)
        # Half of a character, as the path of a file can have, is no UTF-8; with a backslash it is JSON.
        return text.encode("utf-8", "backslashreplace")


def block_bytes(spec: MemorySpec) -> int:
    """Bytes of one block of all layers in an export, with its tokens and landmarks: at most."""
    states = max(sum(layout.nbytes for layout in layouts) for layouts in (plain_layouts(spec), block_layouts(spec)))
    landmarks = run_layout(spec, 1).nbytes
    return spec.layers * states + len(spec.index_layers) * landmarks + token_layout(spec.block_size).nbytes


def stored_names(codec: str, fields: Sequence[str], layouts: int) -> list[str]:
    """Names of what is stored of complete blocks: ``k``, or with a codec ``k.0``, ``k.1``, ... in its order."""
    if codec == "none":
        return list(fields)
    each = layouts // len(fields)
    return [f"{name}.{number}" for name in fields for number in range(each)]


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
    recurrent = sum(layout.nbytes for layout in manifest.spec.recurrent)
    most = max(MOST_FILE_BYTES, 2 * (block_bytes(manifest.spec) + recurrent))
    for entry in manifest.files():
        if not FILE.fullmatch(entry.name):
            raise DamagedError(f"{path} is damaged: no file of an export is called {entry.name!r}. Export again.")
        facts = paths.find(folder / entry.name)
        size = None if facts is None else facts.st_size
        if entry.nbytes > most:
            raise DamagedError(f"{path} is damaged: {entry.name} has {entry.nbytes:,} bytes, and {most:,} is the most.")
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
        content = paths.read(folder, entry.name, entry.nbytes)
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
        "export again.",
        remedy="restore",
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
        raise DamagedError(
            f"{path} is damaged: {error} Restore it from a copy, or export again.", remedy="restore"
        ) from None
    except MemstoreError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split())[:100]
        raise DamagedError(
            f"{path} is damaged: {words}. Restore it from a copy, or export again.", remedy="restore"
        ) from None


_BLOCK = whole(0, MAX_ITEM)
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


_UNFINISHED = " (unfinished import)"


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """What ``import_memory`` did."""

    documents: int
    """Documents of the export, all of which the memory has now."""
    tokens: int
    """Tokens in them."""
    imported_tokens: int
    """Tokens that were imported; the others were there already."""


def import_memory(
    folder: str | Path, target: str | Path, *, progress: bool = False, key: KeySource | None = None
) -> ImportResult:
    """Put the export in ``folder`` into the memory at ``target``, which is made if there is none.

    Documents that the memory has already, with the same content, are left as they are, so an import that was
    interrupted can be run again. Rules come along as with a copy, see ``Memory.take_rules``. ``key`` is that of the
    memory, as for ``memstore.open``. Raises ``NotFound``, ``NotAMemory`` and ``DamagedError`` for an export that is not
    there or not whole (before anything is written, where files are missing or cut), ``ForeignMemory`` for a memory of
    another model, ``InvalidArgument`` where another text has the name of a document, and ``StoreFull``.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    with open_memory(target, spec=manifest.spec, key=key) as memory:
        names = [entry.name for entry in manifest.documents]
        made = set(names) - {document.name for document in memory.documents()}
        _take_facts(place, manifest, memory)
        total = sum(file.tokens for file in manifest.files())
        done = 0

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            advance(tokens)

        with progress_bar(str(place), 0, total, progress, verb="importing") as advance:
            for entry in manifest.documents:
                before = done
                _import(place, entry, memory, count)
                advance(sum(file.tokens for file in entry.files) - (done - before))  # those that were there
        memory.take_rules(manifest.rules, made, names)
    tokens = sum(document.tokens for document in manifest.documents)
    return ImportResult(documents=len(manifest.documents), tokens=tokens, imported_tokens=done)


def _take_facts(folder: Path, manifest: Manifest, memory: Memory) -> None:
    """Store what belongs to the memory itself and that it lacks. Raises ``ForeignMemory`` for other arrays there."""
    tensors = {} if manifest.facts is None else _tensors(folder, manifest.facts)
    try:
        arrays = {
            name: {key: tensors[f"arrays.{name}.{key}"] for key in keys} for name, keys in manifest.arrays.items()
        }
    except KeyError as error:
        raise DamagedError(f"the export {folder} is damaged: the tensor {error} is missing.") from None
    memory.put_facts(manifest.info, arrays, str(folder))


def _import(folder: Path, entry: DocumentEntry, memory: Memory, count: Callable[[int], None]) -> None:
    there, staged = memory.document(entry.name), _staging_name(entry.name)
    begun = memory.document(staged)
    if there.id is not None:
        if len(there) != entry.tokens or not _begins(folder, entry, there):
            raise InvalidArgument(
                f"memory {memory.url} has another document {entry.name!r} than the export {folder}: forget that one "
                "first, or import into another memory."
            )
        if begun.id is not None:  # it was complete when the last run ended
            memory.forget(staged)
        return
    if begun.id is not None and not _begins(folder, entry, begun):
        memory.forget(staged)
    document = memory.document(staged)
    if document.id is None:
        _begin(entry, memory, document)
    try:
        for file in entry.files:
            _append(folder, file, document, count)
        if len(document) != entry.tokens or _differ(document.digest, entry.digest):
            raise DamagedError(
                f"the export {folder} is damaged: document {entry.name!r} is not what its manifest says. Restore it "
                "from a copy, or export again.",
                remedy="restore",
            )
    except DamagedError:
        memory.forget(staged)
        raise
    document.fork(entry.name)
    memory.forget(staged)


def _begin(entry: DocumentEntry, memory: Memory, document: Document) -> None:
    if entry.begins_like is None:
        document.begin(entry.first, entry.reading)
    else:
        memory.document(entry.begins_like[0]).fork(document.name, entry.begins_like[1])


def _begins(folder: Path, entry: DocumentEntry, document: Document) -> bool:
    """Whether a document holds the first of an export's files, or all of them, and nothing else."""
    if document.reading != entry.reading or document.blocks.start != entry.first:
        return False
    size = document.memory.spec.block_size
    ends = {file.blocks[0] * size + file.tokens for file in entry.files if file.blocks is not None}
    begun = (entry.begins_like[1] if entry.begins_like else entry.first) * size
    if len(document) not in {begun, *ends}:
        return False
    if len(document) == entry.tokens and document.digest is not None and document.digest == entry.digest:
        files = entry.files[-1:]  # the digest is of complete blocks
    else:
        files = entry.files
    return all(_holds(folder, file, document) for file in files)


def _holds(folder: Path, file: FileEntry, document: Document) -> bool:
    """Whether a document has the token ids of a file, as far as it goes."""
    assert file.blocks is not None
    blocks = range(file.blocks[0], min(file.blocks[1], document.n_blocks))
    if not blocks:
        return True
    if document.present(blocks) != [blocks]:
        return False
    return torch.equal(document.tokens(blocks), _tensors(folder, file)["tokens"].long())


def _differ(one: str | None, other: str | None) -> bool:
    """Whether two digests are known and not the same."""
    return None not in (one, other) and one != other


def _append(folder: Path, file: FileEntry, document: Document, count: Callable[[int], None]) -> None:
    """Append the blocks of a file, unless the document has them: every file was one transaction."""
    spec = document.memory.spec
    assert file.blocks is not None
    blocks, size = range(*file.blocks), spec.block_size
    if len(document) >= blocks.start * size + file.tokens:
        return
    tensors = _tensors(folder, file)
    complete = file.tokens // size
    names = stored_names(spec.codec, list(spec.fields), len(block_layouts(spec)))
    try:
        if document.n_blocks < blocks.start:  # those between were dropped from the document long ago
            document.pass_over(blocks.start - document.n_blocks)
        with document.append(tensors["tokens"]) as batch:
            for layer in range(spec.layers):
                own = {name: tensors[f"layer.{layer}.{name}"] for name in (names if complete else spec.fields)}
                marks = tensors.get(f"layer.{layer}.landmarks")
                decoded = None if marks is None else decode_landmarks(marks, spec.key_dtype)
                if complete:
                    batch.put_stored(layer, list(own.values()), no_states(spec), landmarks=decoded)
                else:
                    batch.put(layer, landmarks=decoded, **own)
            for place in sorted({int(name.split(".")[1]) for name in tensors if name.startswith("recurrent.")}):
                states = [tensors[f"recurrent.{place}.{number}"] for number in range(len(spec.recurrent))]
                batch.put_recurrent(states, at=place)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise damaged(folder, file, f"it does not hold what a memory stores ({error})") from None
    count(file.tokens)


def _tensors(folder: Path, file: FileEntry) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = read_file(folder, file)
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise damaged(folder, file, str(error)) from None


def _staging_name(name: str) -> str:
    room = LONGEST_NAME - len(_UNFINISHED.encode())
    return name.encode()[:room].decode("utf-8", "ignore") + _UNFINISHED
