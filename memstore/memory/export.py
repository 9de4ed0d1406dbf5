"""Exports of a memory that need no memstore to be read, and imports: safetensors with a JSON manifest, or a table.

An export is a folder with ``manifest.json`` and files in the safetensors format, each with consecutive blocks of one
document. The manifest has the length and the SHA-256 of every file. ``docs/export.md`` lists the names of the tensors
and the content of the manifest. Blocks are written as they are stored, a few at a time, each verified on the way. So a
memory of any size needs little host memory. Everything is written to a folder beside the target, which gets its final
name when the last byte is on the disk. So an export exists as a whole or not at all.

An imported document is built under a temporary name, which readers see. It gets its real name in a single transaction,
once it is complete. After an interruption, the next run continues from the finished part.

The table has a row for each block, in Parquet, for data frames and SQL. It holds facts about blocks, not their states:
their places, tokens and text, and the lengths of their vectors.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import filelock
import torch
from torch import Tensor

from memstore import paths
from memstore._version import __version__
from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    NotFound,
    StoreFull,
)
from memstore.json_checks import anything, array, fit, maybe, members, parse, row, table, text, whole
from memstore.memory.copy import Beginnings, check_kept, recurrent_between, storing_facts
from memstore.memory.document import Document
from memstore.memory.entry import LONGEST_NAME
from memstore.memory.memory import Memory, open_memory
from memstore.memory.rules import Rules
from memstore.memory.shared import IMPORTING, not_found
from memstore.memory.spec import (
    MemorySpec,
    block_layouts,
    decode_landmarks,
    encode_landmarks,
    no_states,
    plain_layouts,
    run_layout,
    token_layout,
)
from memstore.progress import progress_bar
from memstore.store.encryption_keys import KeySource
from memstore.store.records import MAX_ITEM

FORMAT, VERSION = "memstore-export", 1
NAME = "manifest.json"
MOST_BYTES = 64 * 1024 * 1024
"""Most bytes of the manifest."""
MOST_FILE_BYTES = 256 * 1024 * 1024
"""Most bytes of any other file, unless one block is larger.

A file is read whole, and one with holes can be very long.
"""
FILE_BYTES = 64 << 20
"""Bytes of blocks in one file, and in one transaction of an import; at least one block of all layers."""
FACTS = "facts.safetensors"
FILE = re.compile(r"facts\.safetensors|document-\d{4,}-\d{6,}\.safetensors")
_LOCK = "export.lock"
"""Marks a folder of an export in progress, so that the rest of a killed export can be removed."""
_BLOCK = whole(0, MAX_ITEM)
_MOST = 10_000_000
_FILE = {"tokens": whole(0, 2**53), "name": text(100), "nbytes": whole(), "sha256": text(64)}
"""Schema of a file. Files of a document also have ``blocks``: the first, and the last plus one."""
HEAD = table(format=text(100), version=whole(0), library=text(1000), sha256=text(100))
MANIFEST = table(
    {"rules": anything},
    spec=anything,
    info=members(anything, _MOST),
    arrays=members(array(text(1000), 255), _MOST),
    facts=maybe(table(**_FILE)),
    documents=array(
        table(
            {"begins_like": maybe(row(text(LONGEST_NAME), _BLOCK))},
            name=text(LONGEST_NAME),
            tokens=whole(0, 2**53),
            first=_BLOCK,
            digest=maybe(text(64)),
            reading=maybe(members(anything, 1000)),
            files=array(table(**_FILE, blocks=row(_BLOCK, _BLOCK)), _MOST),
        ),
        _MOST,
    ),
)

Values = dict[str, Any]
"""Content of the manifest: in total, of a document, or of a file."""


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The result of ``export_memory``."""

    documents: int
    tokens: int
    """Tokens in them, without blocks that have left or were dropped."""
    files: int
    nbytes: int
    """Bytes of all files."""


def export_memory(
    source: str | Path | Memory, folder: str | Path, *, documents: Sequence[str] | None = None, progress: bool = False
) -> ExportResult:
    """Write the memory at ``source``, or the named ``documents``, to the new ``folder``.

    Documents that share blocks share them in the export too. Pins and times to live are exported, and the limit with
    the whole memory. If a document grows during the export, its state at the start is written. Raises
    ``InvalidArgument`` if ``folder`` exists, ``NotFound``, ``DamagedError`` if the memory is damaged, ``StoreFull``,
    ``MemoryInUse`` if another process exports to the same place, and ``OSError``. After an error nothing is left at
    ``folder``.
    """
    if not isinstance(source, Memory):
        with open_memory(source, mode="r") as memory:
            return export_memory(memory, folder, documents=documents, progress=progress)
    chosen = _chosen(source, documents)
    rules = source.rules() if documents is None else source.rules().only(documents).limited(None, "refuse")
    with _made(Path(folder)) as place:
        with progress_bar(source.url, 0, sum(map(len, chosen)), progress, verb="exporting") as advance:
            beginnings, entries = Beginnings(), list[Values]()
            for number, document in enumerate(chosen, start=1):
                entries.append(_Pieces(document, beginnings.find(document), place, number, advance).written())
                beginnings.add(document)
        info, arrays = source.facts()
        if sum(value.nbytes for each in arrays.values() for value in each.values()) > MOST_FILE_BYTES:
            raise InvalidArgument(f"an export holds arrays of at most {MOST_FILE_BYTES:,} bytes; use memstore copy.")
        tensors = {f"arrays.{name}.{key}": value for name, each in arrays.items() for key, value in each.items()}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "library": f"memstore {__version__}",
            "spec": source.spec.to_dict(),
            "info": info,
            "arrays": {name: list(each) for name, each in arrays.items()},
            "facts": _write(place, FACTS, tensors) if tensors else None,
            "documents": entries,
        }
        if rules != Rules[str]():
            manifest["rules"] = rules.to_dict()
        signed = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1, ensure_ascii=False)
        # Half of a character, possible in a file's path, is not UTF-8. With a backslash it is JSON.
        content = signed.encode("utf-8", "backslashreplace")
        _put(place, NAME, content)
    files = _files(manifest)
    return ExportResult(
        documents=len(entries),
        tokens=sum(file["tokens"] for file in files),
        files=len(files) + 1,
        nbytes=sum(file["nbytes"] for file in files) + len(content),
    )


def _chosen(memory: Memory, documents: Sequence[str] | None) -> list[Document]:
    chosen = [memory.document(name) for name in dict.fromkeys(documents or ())]
    if missing := next((each.name for each in chosen if each.id is None), None):
        raise not_found(missing, memory.url, [each.name for each in memory.documents()])
    return memory.documents() if documents is None else chosen


def _files(manifest: Values) -> list[Values]:
    """Return all files except the manifest itself."""
    facts = manifest["facts"]
    return [*([] if facts is None else [facts]), *(file for each in manifest["documents"] for file in each["files"])]


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to. It becomes ``folder`` on success, and is removed after an error."""
    _check_new(folder)
    place = folder.with_name(f"{folder.name}.incomplete")
    # A process that was killed before it had its lock has left an empty folder.
    if paths.find(place, stat.S_IFDIR) and not paths.find(place / _LOCK) and any(place.iterdir()):
        raise InvalidArgument(f"{place} exists already, and the export is written there first; remove or rename it.")
    place.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(place / _LOCK)
    try:
        lock.acquire(timeout=0)
    except (filelock.Timeout, FileNotFoundError):  # the other process may have renamed the folder by now
        raise MemoryInUse(f"another process is exporting to {folder}; wait for it, or name another folder.") from None
    try:
        _check_new(folder)  # another export may have ended since
        _clear(place)
        if strange := next((each.name for each in place.iterdir() if each.name != _LOCK), None):
            raise InvalidArgument(f"{place}, where the export is written first, contains {strange}; remove that.")
        yield place
        place.rename(folder)
        (folder / _LOCK).unlink()  # last, so that no other process can lock the folder before
        paths.sync_folder(folder)
        paths.sync_folder(folder.parent)
    except BaseException as error:
        with suppress(OSError):
            _clear(place)
            (place / _LOCK).unlink(missing_ok=True)
            place.rmdir()
        if isinstance(error, OSError) and error.errno in paths.FULL:
            raise StoreFull(
                f"there is no room for the export {folder}: {error.strerror}. The unfinished export was removed. "
                "Free some space, or use another disk."
            ) from error
        raise
    finally:
        lock.release()


def _check_new(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise InvalidArgument(f"{path} exists already; choose a new name for the export.")


def _clear(place: Path) -> None:
    """Remove the files of an export, and nothing else."""
    for path in place.iterdir():
        if path.name == NAME or FILE.fullmatch(path.name):
            path.unlink()


def _put(folder: Path, name: str, content: bytes) -> None:
    """Write a file durably."""
    with os.fdopen(paths.new_file(folder / name), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write(folder: Path, name: str, tensors: dict[str, Tensor], blocks: range | None = None, tokens: int = 0) -> Values:
    """Write tensors as a safetensors file and return its entry for the manifest."""
    from safetensors.torch import save

    content = save({key: tensor.contiguous() for key, tensor in tensors.items()})
    _put(folder, name, content)
    span = None if blocks is None else (blocks.start, blocks.stop)
    digest = hashlib.sha256(content).hexdigest()
    return {"name": name, "nbytes": len(content), "sha256": digest, "blocks": span, "tokens": tokens}


class _Pieces:
    """One document, split into files."""

    def __init__(
        self, document: Document, shared: tuple[int, str], folder: Path, number: int, advance: Callable[[int], None]
    ) -> None:
        self._document, self._shared, self._folder = document, shared, folder
        self._number, self._advance = number, advance
        self._spec = document.memory.spec
        self._files: list[Values] = []

    def written(self) -> Values:
        state, size = self._document.located()[0], self._spec.block_size
        complete = state.complete(size)
        blocks, name = min(self._shared[0], complete.stop), self._shared[1]
        start = max(complete.start, blocks)
        self._advance(start * size)
        step = max(1, FILE_BYTES // block_bytes(self._spec))
        for part in self._document.present(range(start, complete.stop)):
            for first in range(part.start, part.stop, step):
                self._write_complete(range(first, min(first + step, part.stop)))
        tokens = self._write_last(complete.stop, state.tokens)
        now = self._document.located()[0]
        if now.edits != state.edits or now.first > complete.start:
            raise InvalidArgument(
                f"document {state.name!r} lost blocks during the export; export again when nothing else is writing."
            )
        return {
            "name": state.name,
            "tokens": tokens,
            "first": state.first,
            "digest": state.digest if tokens // size == complete.stop else None,
            "reading": state.reading,
            "begins_like": (name, blocks) if blocks else None,
            "files": self._files,
        }

    def _tensors(self, blocks: range, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors of ``blocks``: with ``names``, states as stored."""
        tensors, spec = {"tokens": self._document.tokens(blocks).int()}, self._spec
        for layer in range(spec.layers):
            view = self._document.layer(layer)
            states = dict(zip(names, view.stored(blocks), strict=True)) if names else view.gather(blocks)
            if layer in spec.index_layers:
                states["landmarks"] = encode_landmarks(view.landmarks(blocks), spec.key_dtype)
            tensors |= {f"layer.{layer}.{name}": each for name, each in states.items()}
        return tensors

    def _write_complete(self, blocks: range) -> None:
        names = stored_names(self._spec.codec, list(self._spec.fields), len(block_layouts(self._spec)))
        self._write(self._tensors(blocks, names), blocks)

    def _write_last(self, block: int, expected: int) -> int:
        """Write the incomplete last block, if there is one, and return the document's tokens then.

        The block may grow while it is read, and even become complete.
        """
        size = self._spec.block_size
        while expected > block * size:
            state = self._document.located()[0]
            if block in state.complete(size):
                self._write_complete(range(block, block + 1))
                return (block + 1) * size
            here = range(block, block + 1)
            tensors = self._tensors(here)
            if self._document.located()[0] == state:
                self._write(tensors, here)
                return state.tokens
        return block * size

    def _write(self, tensors: dict[str, Tensor], blocks: range) -> None:
        tokens, begin = len(tensors["tokens"]), blocks.start * self._spec.block_size
        for place, states in recurrent_between(self._document, begin, begin + tokens):
            tensors |= {f"recurrent.{place}.{number}": state for number, state in enumerate(states)}
        name = f"document-{self._number:04}-{len(self._files) + 1:06}.safetensors"
        self._files.append(_write(self._folder, name, tensors, blocks, tokens))
        self._advance(tokens)


def block_bytes(spec: MemorySpec) -> int:
    """Return the most bytes that one block of all layers takes in an export, with its tokens and landmarks."""
    states = max(sum(layout.nbytes for layout in layouts) for layouts in (plain_layouts(spec), block_layouts(spec)))
    landmarks = run_layout(spec, 1).nbytes
    return spec.layers * states + len(spec.index_layers) * landmarks + token_layout(spec.block_size).nbytes


def stored_names(codec: str, fields: Sequence[str], layouts: int) -> list[str]:
    """Return the names of a complete block's stored tensors: ``k``, or ``k.0``, ``k.1``, ... in a codec's order."""
    if codec == "none":
        return list(fields)
    return [f"{name}.{number}" for name in fields for number in range(layouts // len(fields))]


def _read_manifest(folder: Path) -> tuple[MemorySpec, Rules[str], Values]:
    """Return the manifest of the export in ``folder``, after checking that every file has its full length.

    Raises ``NotFound``, ``NotAMemory`` for a folder without an export, ``DamagedError``, and ``ForeignMemory`` for an
    export of a newer version.
    """
    if not folder.exists():
        raise NotFound(f"there is no export at {folder}; check the path.")
    path = folder / NAME
    if not folder.is_dir() or paths.find(path) is None:
        raise NotAMemory(
            f"{folder} is not a finished export: it lacks {NAME}, which is written last. Export again, or name a "
            "folder that memstore export wrote."
        )
    spec, rules, manifest = _parsed(path)
    recurrent = sum(layout.nbytes for layout in spec.recurrent)
    most = max(MOST_FILE_BYTES, 2 * (block_bytes(spec) + recurrent))
    for file in _files(manifest):
        name, nbytes = file["name"], file["nbytes"]
        if not FILE.fullmatch(name):
            raise _damaged(f"{path} is damaged: {name!r} is not a file name of an export")
        facts = paths.find(folder / name)
        size = None if facts is None else facts.st_size
        if nbytes > most:
            raise _damaged(f"{path} is damaged: {name} has {nbytes:,} bytes, but at most {most:,} are allowed")
        if size != nbytes:
            found = "is missing" if size is None else f"has {size:,} of {nbytes:,} bytes"
            raise _damaged(f"the export {folder} is incomplete: {name} {found}")
    return spec, rules, manifest


def _damaged(what: str) -> DamagedError:
    return DamagedError(f"{what}. Restore it from a copy, or export again.", remedy="restore")


def _damaged_file(folder: Path, file: Values, what: str) -> DamagedError:
    """Return the error for a file with wrong content."""
    return _damaged(f"the export {folder} is damaged: {file['name']}: {what}. Nothing was imported from this file")


def _parsed(path: Path) -> tuple[MemorySpec, Rules[str], Values]:
    try:
        content = fit(parse(paths.read(path.parent, path.name, MOST_BYTES), str(path), MOST_BYTES), HEAD, str(path))
        if content["format"] == FORMAT and content["version"] > VERSION:
            raise ForeignMemory(f"{path} was written by a newer memstore ({content['library']}); upgrade memstore.")
        told = content.pop("sha256")
        if content["format"] != FORMAT or _digest(content) != told:
            raise ValueError("its digest does not match")
        fit(content, MANIFEST, str(path))
        rules: Rules[str] = Rules.from_dict(content["rules"]) if "rules" in content else Rules()
        return MemorySpec.from_dict(content["spec"]), rules, content
    except InvalidArgument as error:
        raise _damaged(f"{path} is damaged: {str(error).rstrip('.')}") from None
    except MemstoreError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split())[:100]
        raise _damaged(f"{path} is damaged: {words}") from None


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """The result of ``import_memory``."""

    documents: int
    """Number of documents in the export; the memory has all of them now."""
    tokens: int
    """Tokens in them."""
    imported_tokens: int
    """Tokens that were imported; the others existed already."""


def import_memory(
    folder: str | Path, target: str | Path, *, progress: bool = False, key: KeySource | None = None
) -> ImportResult:
    """Import the export in ``folder`` into the memory at ``target``, which is created if it does not exist.

    Documents that the memory already has with the same content stay unchanged, so an interrupted import can be run
    again. Rules are imported like those of a copy, see ``Memory.take_rules``. ``key`` is that of the memory, as for
    ``memstore.open``. Raises ``NotFound``, ``NotAMemory`` and ``DamagedError`` if the export is missing or incomplete
    (before anything is written, if files are missing or cut), ``ForeignMemory`` for a memory of another model,
    ``InvalidArgument`` if another text has the name of a document, and ``StoreFull``, also if the memory's limit
    evicted documents of the export.
    """
    place = Path(folder)
    spec, rules, manifest = _read_manifest(place)
    with open_memory(target, spec=spec, key=key) as memory:
        names = [entry["name"] for entry in manifest["documents"]]
        made = set(names) - {document.name for document in memory.documents()}
        facts = manifest["info"], _arrays(place, manifest)
        total = sum(file["tokens"] for file in _files(manifest))
        done = 0

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            advance(tokens)

        with (
            storing_facts(memory, names, facts, str(place)) as complete,
            progress_bar(str(place), 0, total, progress, verb="importing") as advance,
        ):
            for entry in manifest["documents"]:
                before = done
                _import(place, entry, memory, count)
                complete(entry["name"])
                memory.take_rules(rules, made & {entry["name"]}, names, complete=False)  # an interruption may follow
                advance(sum(file["tokens"] for file in entry["files"]) - (done - before))  # those it already had
        memory.take_rules(rules, made, names)
        check_kept(memory, names, place)
    tokens = sum(document["tokens"] for document in manifest["documents"])
    return ImportResult(documents=len(names), tokens=tokens, imported_tokens=done)


def _arrays(folder: Path, manifest: Values) -> dict[str, dict[str, Tensor]]:
    """Return the arrays of the exported memory itself, by name."""
    tensors = {} if manifest["facts"] is None else _tensors(folder, manifest["facts"])
    try:
        return {
            name: {key: tensors[f"arrays.{name}.{key}"] for key in keys} for name, keys in manifest["arrays"].items()
        }
    except KeyError as error:
        raise _damaged(f"the export {folder} is damaged: it lacks the tensor {error}") from None


def _import(folder: Path, entry: Values, memory: Memory, count: Callable[[int], None]) -> None:
    there, begun = memory.document(entry["name"]), _staged(entry["name"], memory)
    if there.id is not None:
        if len(there) != entry["tokens"] or not _begins(folder, entry, there):
            raise InvalidArgument(
                f"memory {memory.url} has a document {entry['name']!r} that differs from the one in the export "
                f"{folder}: forget it first, or import into another memory."
            )
        if begun.id is not None:  # it is complete since the last run
            memory.forget(begun.name)
        return
    if begun.id is not None and not _begins(folder, entry, begun):
        memory.forget(begun.name)
    document = memory.document(begun.name)
    if document.id is None:
        memory.put_info(IMPORTING + document.name, True)  # first: a kill must not leave the document without it
        if (like := entry.get("begins_like")) is None:
            document.begin(entry["first"], entry["reading"])
        else:
            check_kept(memory, like[:1], folder)
            memory.document(like[0]).fork(document.name, like[1])
    try:
        for file in entry["files"]:
            _append(folder, file, document, count)
        if len(document) != entry["tokens"] or (document.digest and entry["digest"] not in (None, document.digest)):
            raise _damaged(f"the export {folder} is damaged: document {entry['name']!r} differs from its manifest")
    except DamagedError:
        memory.forget(document.name)
        raise
    document.fork(entry["name"])
    memory.forget(document.name)


def _staged(name: str, memory: Memory) -> Document:
    """Return the document, perhaps begun, in which ``name`` is built: one that is marked, or else a new one."""
    number = 1
    while True:
        ending = " (unfinished import)" if number == 1 else f" (unfinished import {number})"
        document = memory.document(name.encode()[: LONGEST_NAME - len(ending)].decode("utf-8", "ignore") + ending)
        if document.id is None or memory.get_info(IMPORTING + document.name):
            return document
        number += 1  # a document without a mark is the user's


def _begins(folder: Path, entry: Values, document: Document) -> bool:
    """Whether a document consists of exactly the first few files of an export, or all of them."""
    if document.reading != entry["reading"] or document.blocks.start != entry["first"]:
        return False
    size = document.memory.spec.block_size
    ends = {file["blocks"][0] * size + file["tokens"] for file in entry["files"]}
    like = entry.get("begins_like")
    begun = (like[1] if like else entry["first"]) * size
    if len(document) not in {begun, *ends}:
        return False
    same = len(document) == entry["tokens"] and document.digest is not None and document.digest == entry["digest"]
    files = entry["files"][-1:] if same else entry["files"]  # the digest covers only complete blocks
    return all(_holds(folder, file, document) for file in files)


def _holds(folder: Path, file: Values, document: Document) -> bool:
    """Whether a document has the token ids of a file, or ends before it."""
    blocks = range(file["blocks"][0], min(file["blocks"][1], document.n_blocks))
    if not blocks:
        return True
    if document.present(blocks) != [blocks]:
        return False
    return torch.equal(document.tokens(blocks), _tensors(folder, file)["tokens"].long())


def _append(folder: Path, file: Values, document: Document, count: Callable[[int], None]) -> None:
    """Append the blocks of a file, unless the document has them: every file was one transaction."""
    spec = document.memory.spec
    blocks, size = range(*file["blocks"]), spec.block_size
    if len(document) >= blocks.start * size + file["tokens"]:
        return
    tensors = _tensors(folder, file)
    complete = file["tokens"] // size
    names = stored_names(spec.codec, list(spec.fields), len(block_layouts(spec)))
    try:
        if document.n_blocks < blocks.start:  # the blocks between were dropped from the document
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
        raise _damaged_file(folder, file, f"its content does not fit a memory ({error})") from None
    count(file["tokens"])


def _tensors(folder: Path, file: Values) -> dict[str, Tensor]:
    """Return the tensors in a file of an export. Raises ``DamagedError`` if it has changed."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = paths.read(folder, file["name"], file["nbytes"])
    except OSError as error:
        raise _damaged(f"the export {folder} cannot be read: {file['name']}: {error.strerror}") from None
    if len(content) != file["nbytes"] or hashlib.sha256(content).hexdigest() != file["sha256"]:
        raise _damaged_file(folder, file, "its SHA-256 differs from the manifest")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _damaged_file(folder, file, str(error)) from None


ROWS = 1024
"""Blocks that are read at a time; their states of one layer are in memory together."""

Decode = Callable[[list[int]], str]


def export_table(
    memory: Memory,
    file: str | Path,
    *,
    documents: Sequence[str] | None = None,
    decode: Decode | None = None,
    progress: bool = False,
) -> int:
    """Write a row for each block of a memory, or of the named ``documents``, to the new Parquet ``file``.

    Returns the number of rows. Columns: document, block, first_token, tokens (their number), complete, token_ids, text
    (the output of ``decode``, null without it), and for each field of the states, and for landmarks, the mean Euclidean
    norm of its vectors over all layers: k_norm, v_norm, landmark_norm. Raises ``NotFound`` without the package pyarrow,
    ``InvalidArgument`` if ``file`` exists, ``DamagedError``, ``StoreFull``; after an error nothing is left.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise NotFound("a Parquet table needs the package pyarrow: pip install 'torch-memstore[tables]'") from None
    path = Path(file)
    _check_new(path)
    chosen = _chosen(memory, documents)
    schema, rows = _schema(memory, pa), 0
    # No reader may trust statistics of numbers with a NaN, but DuckDB 2.0 does: it skips rows that a filter wants.
    exact = [field.name for field in schema if not pa.types.is_floating(field.type)]
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 32}.incomplete"):
        with suppress(OSError), left.open("r+b") as content:
            fcntl.flock(content, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its process was killed, unless this raises
            left.unlink()
    # Another process may write the same table.
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}.incomplete")
    try:
        with os.fdopen(paths.new_file(unfinished), "wb") as content:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(content, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with (
                parquet.ParquetWriter(content, schema, write_statistics=exact) as writer,
                progress_bar(memory.url, 0, sum(map(len, chosen)), progress, verb="exporting") as advance,
            ):
                for document in chosen:
                    for group in _groups(memory, document, decode):
                        writer.write_table(pa.Table.from_pylist(group, schema=schema))
                        rows += len(group)
                        advance(sum(row["tokens"] for row in group))
            content.flush()
            os.fsync(content.fileno())
            os.close(paths.new_file(path))  # raises if another file has appeared, which replace would remove
            unfinished.replace(path)
        paths.sync_folder(path.parent)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            _check_new(path)
        if isinstance(error, OSError) and error.errno in paths.FULL:
            raise StoreFull(
                f"there is no room for {path}; the unfinished file was removed. Free some space, or use another disk."
            ) from error
        raise
    return rows


def _schema(memory: Memory, pa: Any) -> Any:
    spec = memory.spec
    names = [*(f"{name}_norm" for name in spec.fields), *(["landmark_norm"] if spec.index_layers else [])]
    return pa.schema(
        [
            ("document", pa.dictionary(pa.int32(), pa.string())),
            ("block", pa.int64()),
            ("first_token", pa.int64()),
            ("tokens", pa.int32()),
            ("complete", pa.bool_()),
            ("token_ids", pa.list_(pa.int32())),
            ("text", pa.string()),
            *((name, pa.float32()) for name in names),
        ],
        metadata={"memory": memory.url, "architecture": spec.fingerprint.architecture},
    )


def _groups(memory: Memory, document: Document, decode: Decode | None) -> Iterator[list[dict[str, Any]]]:
    """Yield rows of consecutive blocks; an incomplete last block has a group of its own."""
    state, size = document.located()[0], memory.spec.block_size
    complete = state.complete(size)
    parts = [*document.present(complete), *document.present(range(complete.stop, state.blocks))]
    for part in parts:
        for first in range(part.start, part.stop, ROWS):
            blocks = range(first, min(first + ROWS, part.stop))
            ids = [each.tolist() for each in document.tokens(blocks).split(size)]
            norms = _norms(memory, document, blocks, len(ids[-1]))
            yield [
                {
                    "document": document.name,
                    "block": block,
                    "first_token": block * size,
                    "tokens": len(own),
                    "complete": block in complete,
                    "token_ids": own,
                    "text": None if decode is None else decode(own),
                    **{name: float(values[row]) for name, values in norms.items()},
                }
                for row, (block, own) in enumerate(zip(blocks, ids, strict=True))
            ]


def _norms(memory: Memory, document: Document, blocks: range, tokens: int) -> dict[str, Tensor]:
    """Return mean norms ``[n]`` over all layers; each block has ``tokens`` tokens."""
    spec, sums = memory.spec, dict[str, list[Tensor]]()
    for layer in range(spec.layers):
        view = document.layer(layer)
        vectors = {f"{name}_norm": states for name, states in view.gather(blocks).items()}
        if layer in spec.index_layers:
            vectors["landmark_norm"] = view.landmarks(blocks)
        for name, each in vectors.items():
            # The padding of an incomplete block holds no vectors of tokens.
            own = each[..., :tokens, :] if each.dim() > 2 and each.shape[-2] == spec.block_size else each
            sums.setdefault(name, []).append(own.float().norm(dim=-1).flatten(1).mean(1))
    return {name: torch.stack(each).mean(0) for name, each in sums.items()}
