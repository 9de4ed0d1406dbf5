"""Writing a memory as files that need no memstore to be read: safetensors, and a manifest in JSON.

Blocks go out as they are stored, each verified on the way, a few at a time, so a memory of any size needs little host
memory. Everything is written to a folder beside the target, which gets its name when the last byte is on the disk: an
export is there as a whole or not at all. ``interchange.py`` makes a memory of it again, with the same bits.

A table with a row for each block of a memory, as a Parquet file: what data frames and SQL can look through.

It holds what is known of blocks, not their states: where they are, their tokens and text, and how long their vectors
are. ``export.py`` writes the states.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor

from memstore import paths
from memstore.errors import InvalidArgument, MemoryInUse, NotFound, StoreFull
from memstore.memory.copy import Beginnings, recurrent_between
from memstore.memory.document import Document
from memstore.memory.interchange import (
    FACTS,
    FILE,
    MOST_FILE_BYTES,
    NAME,
    DocumentEntry,
    FileEntry,
    Manifest,
    block_bytes,
    stored_names,
)
from memstore.memory.memory import Memory, open_memory
from memstore.memory.rows import encode_landmarks
from memstore.memory.spec import block_layouts
from memstore.progress import progress_bar

FILE_BYTES = 64 << 20
"""Blocks in one file, and in one transaction when they are imported; at least one block of all layers."""
_LOCK = "export.lock"
"""Marks a folder that an export is being written to, so that what an end of the process left behind can be removed."""


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What ``export_memory`` wrote."""

    documents: int
    tokens: int
    """Tokens in them, without blocks that have left or were dropped."""
    files: int
    nbytes: int
    """Bytes of all files."""


def export_memory(
    source: str | Path | Memory, folder: str | Path, *, documents: Sequence[str] | None = None, progress: bool = False
) -> ExportResult:
    """Write the memory at ``source``, or the ``documents`` named, to the new ``folder``.

    Documents that share blocks share them in the export too. Pins and times to live go along, and the limit with the
    whole memory. While a document grows, what was there at first is written. Raises ``InvalidArgument`` where something
    is at ``folder``, ``NotFound``, ``DamagedError`` where the memory is damaged, ``StoreFull``, ``MemoryInUse`` where
    another process exports to the same place, and ``OSError``; nothing is left at ``folder`` then.
    """
    if not isinstance(source, Memory):
        with open_memory(source, mode="r") as memory:
            return export_memory(memory, folder, documents=documents, progress=progress)
    chosen = source.documents() if documents is None else [source.document(name) for name in dict.fromkeys(documents)]
    rules = source.rules() if documents is None else source.rules().only(documents).limited(None, "refuse")
    with _made(Path(folder)) as place:
        writer = _Writer(place)
        with progress_bar(source.url, 0, sum(map(len, chosen)), progress, verb="exporting") as advance:
            beginnings, entries = Beginnings(), list[DocumentEntry]()
            for number, document in enumerate(chosen, start=1):
                entries.append(_Pieces(document, beginnings.find(document), writer, number, advance).written())
                beginnings.add(document)
        info, arrays = source.facts()
        if sum(value.nbytes for each in arrays.values() for value in each.values()) > MOST_FILE_BYTES:
            raise InvalidArgument(f"an export holds arrays of up to {MOST_FILE_BYTES:,} bytes; use memstore copy.")
        tensors = {f"arrays.{name}.{key}": value for name, each in arrays.items() for key, value in each.items()}
        manifest = Manifest(
            spec=source.spec,
            documents=tuple(entries),
            info=info,
            arrays={name: tuple(each) for name, each in arrays.items()},
            facts=writer.write(FACTS, tensors) if tensors else None,
            rules=rules,
        )
        content = manifest.to_bytes()
        writer.put(NAME, content)
        files = list(manifest.files())
    return ExportResult(
        documents=len(entries),
        tokens=sum(file.tokens for file in files),
        files=len(files) + 1,
        nbytes=sum(file.nbytes for file in files) + len(content),
    )


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A folder to write to that becomes ``folder`` when all went well, and is gone when it did not."""
    if folder.exists() or folder.is_symlink():
        raise InvalidArgument(f"{folder} exists already; name a new folder for the export.")
    place = folder.with_name(f"{folder.name}.incomplete")
    # One that was killed before it had its lock has left an empty folder.
    if paths.find(place, stat.S_IFDIR) and not paths.find(place / _LOCK) and any(place.iterdir()):
        raise InvalidArgument(f"{place}, where the export is written first, exists already; remove or rename it.")
    place.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(place / _LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise MemoryInUse(f"another process is exporting to {folder}; wait for it, or name another folder.") from None
    try:
        _clear(place)
        if strange := next((each.name for each in place.iterdir() if each.name != _LOCK), None):
            raise InvalidArgument(f"{place}, where the export is written first, has {strange} in it; remove that.")
        yield place
        (place / _LOCK).unlink()
        paths.sync_folder(place)
        place.rename(folder)
        paths.sync_folder(folder.parent)
    except BaseException as error:
        with suppress(OSError):
            _clear(place)
            (place / _LOCK).unlink(missing_ok=True)
            place.rmdir()
        if isinstance(error, OSError) and error.errno in paths.FULL:
            raise StoreFull(
                f"no room for the export {folder}: {error.strerror}. Nothing of it was left; make room, or name "
                "another disk."
            ) from error
        raise
    finally:
        lock.release()


def _clear(place: Path) -> None:
    """Remove what an export writes, and nothing else."""
    for path in place.iterdir():
        if path.name == NAME or FILE.fullmatch(path.name):
            path.unlink()


class _Writer:
    """Puts files into a folder, each on the disk before the next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, tensors: dict[str, Tensor], **place: object) -> FileEntry:
        """Write tensors as a safetensors file; ``place`` are the other values of its entry."""
        from safetensors.torch import save

        content = save({key: tensor.contiguous() for key, tensor in tensors.items()})
        self.put(name, content)
        digest = hashlib.sha256(content).hexdigest()
        return FileEntry(name=name, nbytes=len(content), sha256=digest, **place)  # type: ignore[arg-type]  # by name

    def put(self, name: str, content: bytes) -> None:
        """Write a file."""
        with os.fdopen(paths.new_file(self._folder / name), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


class _Pieces:
    """One document, cut into files."""

    def __init__(
        self,
        document: Document,
        shared: tuple[int, str],
        writer: _Writer,
        number: int,
        advance: Callable[[int], None],
    ) -> None:
        self._document, self._shared, self._writer = document, shared, writer
        self._number, self._advance = number, advance
        self._spec = document.memory.spec
        self._files: list[FileEntry] = []

    def written(self) -> DocumentEntry:
        """Write it; its entry in the manifest."""
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
                f"document {state.name!r} lost blocks while it was exported; export again when nobody changes it."
            )
        return DocumentEntry(
            name=state.name,
            tokens=tokens,
            first=state.first,
            digest=state.digest if tokens // size == complete.stop else None,
            reading=state.reading,
            begins_like=(name, blocks) if blocks else None,
            files=tuple(self._files),
        )

    def _write_complete(self, blocks: range) -> None:
        tensors = {"tokens": self._document.tokens(blocks).int()}
        for layer in range(self._spec.layers):
            view = self._document.layer(layer)
            names = stored_names(self._spec.codec, list(self._spec.fields), len(block_layouts(self._spec)))
            tensors |= {f"layer.{layer}.{name}": x for name, x in zip(names, view.stored(blocks), strict=True)}
            tensors |= self._landmarks(layer, blocks)
        self._write(tensors, blocks)

    def _write_last(self, block: int, expected: int) -> int:
        """Write the incomplete last block, if there is one; tokens of the document then.

        It may grow while it is read, and be complete in the end.
        """
        size = self._spec.block_size
        while expected > block * size:
            state = self._document.located()[0]
            if block in state.complete(size):
                self._write_complete(range(block, block + 1))
                return (block + 1) * size
            here = range(block, block + 1)
            tensors = {"tokens": self._document.tokens(block).int()}
            for layer in range(self._spec.layers):
                states = self._document.layer(layer).gather(here)
                tensors |= {f"layer.{layer}.{name}": x for name, x in states.items()} | self._landmarks(layer, here)
            if self._document.located()[0] == state:
                self._write(tensors, here)
                return state.tokens
        return block * size

    def _landmarks(self, layer: int, blocks: range) -> dict[str, Tensor]:
        if layer not in self._spec.index_layers:
            return {}
        found = self._document.layer(layer).landmarks(blocks)
        return {f"layer.{layer}.landmarks": encode_landmarks(found, self._spec.key_dtype)}

    def _write(self, tensors: dict[str, Tensor], blocks: range) -> None:
        tokens, begin = len(tensors["tokens"]), blocks.start * self._spec.block_size
        for place, states in recurrent_between(self._document, begin, begin + tokens):
            tensors |= {f"recurrent.{place}.{number}": state for number, state in enumerate(states)}
        name = f"document-{self._number:04}-{len(self._files) + 1:06}.safetensors"
        self._files.append(self._writer.write(name, tensors, blocks=(blocks.start, blocks.stop), tokens=tokens))
        self._advance(tokens)


ROWS = 1024
"""Blocks that are read at a time; their states of one layer are held."""

Decode = Callable[[list[int]], str]


def export_table(
    memory: Memory,
    file: str | Path,
    *,
    documents: Sequence[str] | None = None,
    decode: Decode | None = None,
    progress: bool = False,
) -> int:
    """Write a row for each block of a memory, or of the ``documents`` named, to the new Parquet ``file``; rows written.

    Columns: document, block, first_token, tokens (their number), complete, token_ids, text (what ``decode`` makes of
    them, null without it), and for each field of the states, and for landmarks, the mean Euclidean norm of its vectors
    over all layers: k_norm, v_norm, landmark_norm. Raises ``NotFound`` without the package pyarrow, ``InvalidArgument``
    where something is at ``file``, ``DamagedError``, ``StoreFull``; nothing is left then.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise NotFound("a table in Parquet needs the package pyarrow: pip install 'torch-memstore[tables]'") from None
    path = Path(file)
    if path.exists() or path.is_symlink():
        raise InvalidArgument(f"{path} exists already; name a new file for the table.")
    chosen = memory.documents() if documents is None else [memory.document(name) for name in dict.fromkeys(documents)]
    schema, rows = _schema(memory, pa), 0
    # Of numbers with a NaN no reader may trust statistics, and DuckDB 2.0 does: it skips rows that a filter wants.
    exact = [field.name for field in schema if not pa.types.is_floating(field.type)]
    unfinished = path.with_name(f"{path.name}.incomplete")
    try:
        unfinished.unlink(missing_ok=True)
        with (
            os.fdopen(paths.new_file(unfinished), "wb") as content,
            parquet.ParquetWriter(content, schema, write_statistics=exact) as writer,
            progress_bar(memory.url, 0, sum(map(len, chosen)), progress, verb="exporting") as advance,
        ):
            for document in chosen:
                for group in _groups(memory, document, decode):
                    writer.write_table(pa.Table.from_pylist(group, schema=schema))
                    rows += len(group)
                    advance(sum(row["tokens"] for row in group))
        unfinished.rename(path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in paths.FULL:
            raise StoreFull(f"no room for {path}; nothing of it was left. Make room, or name another disk.") from error
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
    """Rows of consecutive blocks; an incomplete last block has a group of its own."""
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
    """Mean norms ``[n]`` over all layers; ``tokens`` is the number of them in each block."""
    spec, sums = memory.spec, dict[str, list[Tensor]]()
    for layer in range(spec.layers):
        view = document.layer(layer)
        vectors = {f"{name}_norm": states for name, states in view.gather(blocks).items()}
        if layer in spec.index_layers:
            vectors["landmark_norm"] = view.landmarks(blocks)
        for name, each in vectors.items():
            # What fills an incomplete block up is no vector of a token.
            own = each[..., :tokens, :] if each.dim() > 2 and each.shape[-2] == spec.block_size else each
            sums.setdefault(name, []).append(own.float().norm(dim=-1).flatten(1).mean(1))
    return {name: torch.stack(each).mean(0) for name, each in sums.items()}
