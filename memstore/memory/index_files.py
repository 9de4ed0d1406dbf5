"""Indexes kept beside the store, in the folder ``index`` of a memory, and believed only if they fit it.

For each document, layer and kind of index there are two files: the index, as its ``save`` writes it, and a JSON file
that says what it was made from. Both are put in place whole, the JSON file last, and their name has the digest of what
it says; so readers meet a pair that belongs together, or none. Whatever is missing, stale, damaged or of another
memory is left aside, and the index is built from the store.
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
from memstore.memory.rows import HistoryRuns, Runs, byte_rows
from memstore.memory.spec import MemorySpec
from memstore.store.records import MAX_DOCUMENT, MAX_ITEM

if TYPE_CHECKING:  # who lists what is kept needs no PyTorch
    from torch import Tensor

    from memstore.index import VectorIndex

FORMAT = 2
SAMPLES = 16
"""Blocks whose landmarks are compared, evenly spaced, before a file is used: that of the same text, read otherwise."""
FOLDER = "index"

_STEM = r"\d+-\d+-[0-9a-f]{8}-[0-9a-f]{16}"
_TOLD = re.compile(rf"({_STEM})\.json")
_INDEX = re.compile(rf"({_STEM})\.index")
# A process that was killed while it saved leaves a part, or what safetensors makes of it first, a .tmp.
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
    """What an index of one layer is made from."""

    number: int
    """Of the document."""
    layer: int
    state: DocumentState
    landmarks: Runs
    history: HistoryRuns
    places: Places


class IndexFiles:
    """The files of one memory; in ``folder`` None nothing is kept."""

    def __init__(self, folder: Path | None, spec: MemorySpec, kind: str, *, writable: bool) -> None:
        self._folder = folder
        self._memory_spec = spec
        self._kind = kind
        self.writable = writable and folder is not None
        """Whether ``save`` keeps anything."""

    @cached_property
    def _spec(self) -> str:
        return _digest(self._memory_spec.to_dict())

    def load(self, index: VectorIndex, source: LayerLandmarks, blocks: range) -> tuple[range, Mapping[str, Any]] | None:
        """Fill ``index`` from a file and say which of the complete ``blocks`` it holds, and its facts; None: from none.

        It may hold blocks before them, which have left since.
        """
        for path in self._files(source.number, source.layer):
            about = _read(path)
            if about is None or not self._fits(about, source, blocks):
                continue
            try:
                paths.find(path.with_suffix(".index"))
                index.load(path.with_suffix(".index"))
            except (DamagedError, NotFound, NotAMemory) as error:
                _log.warning("An index is built anew from the memory: %s", error)
                continue
            held = range(about["first"], about["stop"])
            if len(index) == len(held):
                return held, about["facts"]
            return None
        return None

    def save(self, index: VectorIndex, source: LayerLandmarks, blocks: range, facts: Mapping[str, Any]) -> None:
        """Keep ``index``, which holds ``blocks``, in place of what was kept. Raises ``OSError`` and ``NotAMemory``."""
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
        """Remove the files of documents that are gone or were truncated, of all kinds, and what was left unfinished.

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
        """What every file says of itself, of whatever kind its index is, with ``file_bytes``."""
        for path in _files(self._folder, _TOLD):
            about, index = _read(path), path.with_suffix(".index")
            if about is not None and index.exists():
                yield about | {"file_bytes": index.lstat().st_size}

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
        """The hash of all tokens before block ``stop``; None for documents without: of those only samples are known."""
        known = stop and source.state.digest is not None
        return source.history.hashes(source.places, range(stop - 1, stop)).hex() if known else None

    def _fits(self, about: Mapping[str, Any], source: LayerLandmarks, blocks: range) -> bool:
        """Whether the landmarks of a file are those of the store, of blocks that are complete now."""
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
    """Where indexes of a memory in the folder ``path`` are kept."""
    return None if path is None else path / FOLDER


def damaged(folder: Path | None) -> Iterator[tuple[Path, str]]:
    """Files in ``folder`` that say of an index what it was made from, where it or they are damaged, and what is wrong.

    What an index of another package writes only that package can check.
    """
    for path in _files(folder, _TOLD):
        about = _read(path)
        try:
            if about is None:
                raise DamagedError(f"{path} is damaged: it is not what was written. Rebuild the index.")
            if str(about.get("index")).partition(":")[0] in BUILT_IN:
                paths.find(path.with_suffix(".index"))
                from memstore.index import files

                files.load(path.with_suffix(".index"), {})
        except (DamagedError, NotFound, NotAMemory) as error:
            if path.exists():  # else a writer has put another in its place
                yield path, str(error)


def remove(path: Path) -> None:
    """Remove an index, which will be built anew; ``path`` is the file that says what it was made from."""
    for file in (path, path.with_suffix(".index")):
        with suppress(IsADirectoryError):  # a folder of that name is not ours
            file.unlink(missing_ok=True)


def _files(folder: Path | None, names: re.Pattern[str]) -> list[Path]:
    """The files of ours in the folder ``index`` with such names, in order; what else lies there is its owner's."""
    if folder is None:
        return []
    found = next(paths.walk(folder.parent, folder.name), None)
    return [] if found is None else [folder / name for name in sorted(found[2]) if names.fullmatch(name)]


def _spread(blocks: range) -> list[int]:
    """Up to ``SAMPLES`` of ``blocks``, the first and the last among them."""
    if len(blocks) <= SAMPLES:
        return list(blocks)
    return [blocks[(len(blocks) - 1) * place // (SAMPLES - 1)] for place in range(SAMPLES)]


def _sum(source: LayerLandmarks, block: int) -> str:
    rows: list[Tensor] = [rows for _, rows in source.landmarks.read(source.places, range(block, block + 1))]
    return xxhash.xxh3_64_hexdigest(byte_rows(rows[0]).tobytes())


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def _read(path: Path) -> dict[str, Any] | None:
    """What a file says of itself, if it can be read and its name is that of what it says."""
    try:
        raw = paths.read(path.parent.parent, f"{FOLDER}/{path.name}", MOST_BYTES)
        about = fit(parse(raw, str(path), MOST_BYTES), ABOUT, str(path))
    except (OSError, ValueError):  # NotAMemory, for a link, is one
        return None
    return about if path.stem.endswith(_digest(about)) else None
