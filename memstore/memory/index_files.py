"""Indexes kept beside the store, in the folder ``index`` of a memory, and used only if they match it.

For each document, layer and kind of index there are two files. One is the index, written by its ``save``. The other is
a JSON file that says what it was made from. Both are put in place whole, the JSON file last. Their name contains the
digest of the JSON content, so readers find a matching pair or none. A file that is missing, stale, damaged or from
another memory is ignored, and the index is built from the store.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from memstore import paths
from memstore.errors import DamagedError, MemstoreError, NotAMemory, NotFound
from memstore.index import BUILT_IN
from memstore.json_checks import anything, fit, members, parse, table, text, whole
from memstore.memory.entry import LONGEST_NAME, DocumentState, Places
from memstore.memory.spec import HistoryRuns, MemorySpec, Runs, byte_rows
from memstore.store.records import MAX_DOCUMENT, MAX_ITEM

if TYPE_CHECKING:  # listing the kept indexes needs no PyTorch
    from torch import Tensor

    from memstore.index import VectorIndex

FORMAT = 2
SAMPLES = 16
"""Evenly spaced blocks whose landmarks are compared before use: a file may be of the same text, read otherwise."""
FOLDER = "index"

_STEM = r"\d+-\d+-[0-9a-f]{8}-[0-9a-f]{16}"
_TOLD = re.compile(rf"({_STEM})\.json")
_INDEX = re.compile(rf"({_STEM})\.index")
# A process that was killed while saving leaves a part, or the temporary file of safetensors, a .tmp.
_UNFINISHED = re.compile(rf"{_STEM}(\.index\.\d+)?\.partial|\.{_STEM}\.json\.part|\.tmp[0-9A-Za-z]{{6}}")

_log = logging.getLogger("memstore.index")


MOST_BYTES = 1024 * 1024
_BLOCK = whole(0, MAX_ITEM)
ABOUT = table(
    {"landmarks": members(text(100), 1000)},
    format=whole(),
    memory=text(100),
    index=text(1000),
    document=whole(0, MAX_DOCUMENT),
    name=text(LONGEST_NAME),
    layer=whole(0, 2**31),
    edits=whole(),
    first=_BLOCK,
    stop=_BLOCK,
    facts=members(anything, 100),
)


class LayerLandmarks(NamedTuple):
    """The source of an index: one layer of a document."""

    number: int
    """Number of the document."""
    layer: int
    state: DocumentState
    landmarks: Runs
    history: HistoryRuns
    places: Places


class IndexFiles:
    """The index files of one memory; if ``folder`` is None, nothing is kept."""

    def __init__(self, folder: Path | None, spec: MemorySpec, kind: str, *, writable: bool) -> None:
        self._folder = folder
        self._memory_spec = spec
        self._kind = kind
        self.writable = writable and folder is not None
        """Whether ``save`` keeps files."""

    @cached_property
    def _spec(self) -> str:
        return _digest(self._memory_spec.to_dict())

    def load(self, index: VectorIndex, source: LayerLandmarks, blocks: range) -> tuple[range, Mapping[str, Any]] | None:
        """Fill ``index`` from a file.

        Return which of the complete ``blocks`` it holds, and its facts; None without a file.

        It may hold earlier blocks, which have left since.
        """
        for path in self._files(source.number, source.layer):
            about = _read(path)
            if about is None or not self._fits(about, source, blocks):
                continue
            try:
                paths.find(path.with_suffix(".index"))
                index.load(path.with_suffix(".index"))
            except (DamagedError, NotFound, NotAMemory) as error:
                _log.warning("An index is rebuilt from the memory: %s", error)
                continue
            held = range(about["first"], about["stop"])
            if len(index) == len(held):
                return held, about["facts"]
            return None
        return None

    def save(self, index: VectorIndex, source: LayerLandmarks, blocks: range, facts: Mapping[str, Any]) -> None:
        """Keep ``index``, which holds ``blocks``, in place of an older file. Raises ``OSError`` and ``NotAMemory``."""
        if self._folder is None or not self.writable:
            return
        with paths.opened_folder(self._folder.parent, FOLDER, make=True):
            pass
        about = self._about(source, blocks) | {"facts": dict(facts)}
        stem = f"{source.number}-{source.layer}-{_digest(self._kind)[:8]}-{_digest(about)}"
        old = [path for path in self._files(source.number, source.layer) if path.stem != stem]
        paths.find(self._folder / f"{stem}.index")
        index.save(self._folder / f"{stem}.index")
        paths.write(self._folder.parent, f"{FOLDER}/{stem}.json", [json.dumps(about).encode()], durable=False)
        for path in old:
            remove(path)

    def sweep(self, state_of: Callable[[int], DocumentState | None]) -> None:
        """Remove all kinds of files of deleted or truncated documents, and unfinished ones.

        They hold landmarks that were forgotten.
        """
        for path in _files(self._folder, _TOLD):
            about = _read(path) or {}
            state = state_of(about["document"]) if "document" in about else None
            if state is None or state.edits != about.get("edits") or state.first > about.get("first", 0):
                remove(path)
        for path in _files(self._folder, _UNFINISHED):
            path.unlink(missing_ok=True)
        for path in _files(self._folder, _INDEX):
            if not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    def told(self) -> Iterator[Mapping[str, Any]]:
        """Yield the facts in every JSON file, for all kinds of index, with ``file_bytes``."""
        for path in _files(self._folder, _TOLD):
            about, facts = _read(path), paths.find(path.with_suffix(".index"))
            if about is not None and facts is not None:  # a writer may just have replaced it
                yield about | {"file_bytes": facts.st_size}

    def _files(self, number: int, layer: int) -> list[Path]:
        start = f"{number}-{layer}-{_digest(self._kind)[:8]}-"
        return [path for path in _files(self._folder, _TOLD) if path.name.startswith(start)]

    def _about(self, source: LayerLandmarks, blocks: range) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "memory": self._spec,
            "index": self._kind,
            "document": source.number,
            "name": source.state.name,
            "layer": source.layer,
            "edits": source.state.edits,
            "first": blocks.start,
            "stop": blocks.stop,
            "history": self._history(source, blocks.stop),
            "landmarks": {str(block): _sum(source, block) for block in _spread(blocks)},
        }

    def _history(self, source: LayerLandmarks, stop: int) -> str | None:
        """Return the hash of all tokens before block ``stop``; None without one, so only samples can be compared."""
        known = stop and source.state.digest is not None
        return source.history.hashes(source.places, range(stop - 1, stop)).hex() if known else None

    def _fits(self, about: Mapping[str, Any], source: LayerLandmarks, blocks: range) -> bool:
        """Whether the landmarks of a file match the store's, for blocks that are complete now."""
        try:
            held = range(about["first"], about["stop"])
            if not held or held.stop > blocks.stop or held.stop <= blocks.start or held.start > blocks.start:
                return False
            expected = self._about(source, range(0)) | {"first": held.start, "stop": held.stop}
            expected["history"] = self._history(source, held.stop)
            kept = {str(block): _sum(source, block) for block in _spread(held) if block in blocks}
            told = {block: value for block, value in about["landmarks"].items() if int(block) in blocks}
            return told == kept and all(about[name] == expected[name] for name in expected if name != "landmarks")
        except (KeyError, TypeError, ValueError, AttributeError, MemstoreError):
            return False


def folder_of(path: Path | None) -> Path | None:
    """Return the folder for indexes of a memory in the folder ``path``."""
    return None if path is None else path / FOLDER


def damaged(folder: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield the JSON files of damaged indexes in ``folder``, and the fault; either of the two files may be damaged.

    An index of another package can be checked only by that package.
    """
    for path in _files(folder, _TOLD):
        about = _read(path)
        try:
            if about is None:
                raise DamagedError(f"{path} is damaged: its bytes have changed. Rebuild the index.")
            if str(about.get("index")).partition(":")[0] in BUILT_IN:
                paths.find(path.with_suffix(".index"))
                from memstore.index import files

                files.load(path.with_suffix(".index"), {})
        except (DamagedError, NotFound, NotAMemory) as error:
            if path.exists():  # otherwise a writer has replaced it
                yield path, str(error)


def remove(path: Path) -> None:
    """Remove an index, which will be built again; ``path`` is its JSON file."""
    for file in (path, path.with_suffix(".index")):
        with suppress(IsADirectoryError):  # a folder with that name is not ours
            file.unlink(missing_ok=True)


def _files(folder: Path | None, names: re.Pattern[str]) -> list[Path]:
    """Return our files in the folder ``index`` that match, sorted; any other files belong to their owner."""
    if folder is None:
        return []
    found = next(paths.walk(folder.parent, folder.name), None)
    return [] if found is None else [folder / name for name in sorted(found[2]) if names.fullmatch(name)]


def _spread(blocks: range) -> list[int]:
    """Return up to ``SAMPLES`` of ``blocks``, including the first and the last."""
    if len(blocks) <= SAMPLES:
        return list(blocks)
    return [blocks[(len(blocks) - 1) * place // (SAMPLES - 1)] for place in range(SAMPLES)]


def _sum(source: LayerLandmarks, block: int) -> str:
    rows: list[Tensor] = [rows for _, rows in source.landmarks.read(source.places, range(block, block + 1))]
    return xxhash.xxh3_64_hexdigest(byte_rows(rows[0]).tobytes())


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, if it can be read and matches the file's name."""
    try:
        raw = paths.read(path.parent.parent, f"{FOLDER}/{path.name}", MOST_BYTES)
        about = fit(parse(raw, str(path), MOST_BYTES), ABOUT, str(path))
    except (OSError, ValueError):  # NotAMemory, for a link, is an OSError
        return None
    return about if path.stem.endswith(_digest(about)) else None
