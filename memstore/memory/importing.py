"""Making a memory from an export: the same blocks, the same bits.

A document is put together under a name of its own and gets its real one in a single transaction, once all of it is
there: it is seen as a whole or not at all. What was put together before an interruption is used by the next run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument
from memstore.memory import landmarks
from memstore.memory.document import Document
from memstore.memory.exporting import stored_names
from memstore.memory.ingest import progress_bar
from memstore.memory.layouts import block_layouts
from memstore.memory.manifest import DocumentEntry, FileEntry, Manifest, damaged, read_file, read_manifest
from memstore.memory.memory import Memory, open_memory
from memstore.memory.state import LONGEST_NAME

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


def import_memory(folder: str | Path, target: str | Path, *, progress: bool = False) -> ImportResult:
    """Put the export in ``folder`` into the memory at ``target``, which is made if there is none.

    Documents that the memory has already, with the same content, are left as they are, so an import that was
    interrupted can be run again. Rules come along as with a copy, see ``Memory.take_rules``. Raises ``NotFound``,
    ``NotAMemory`` and ``DamagedError`` for an export that is not there or not whole (before anything is written, where
    files are missing or cut), ``ForeignMemory`` for a memory of another model, ``InvalidArgument`` where another text
    has the name of a document, and ``StoreFull``.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    with open_memory(target, spec=manifest.spec) as memory:
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
                decoded = None if marks is None else landmarks.decode(marks, spec.key_dtype)
                if complete:
                    batch.put_stored(layer, list(own.values()), _nothing(document), landmarks=decoded)
                else:
                    batch.put(layer, landmarks=decoded, **own)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise damaged(folder, file, f"it does not hold what a memory stores ({error})") from None
    count(file.tokens)


def _nothing(document: Document) -> dict[str, Tensor]:
    """The fields of no block at all."""
    spec = document.memory.spec
    return {name: torch.empty(0, *shape, dtype=getattr(torch, spec.dtype)) for name, shape in spec.fields.items()}


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
