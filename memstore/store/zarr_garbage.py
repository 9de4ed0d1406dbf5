"""Objects that no manifest names any more: they are deleted, at the latest when the memory is next opened to write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from memstore.errors import NotAMemory
from memstore.store.manifest import OBJECT, Extent
from memstore.store.objects import Objects
from memstore.store.shards import group_json
from memstore.store.zarr_cutting import Cut
from memstore.store.zarr_sealing import write_arrays

logger = logging.getLogger(__name__)


class Garbage:
    """What is to be deleted among the objects of the memory in the folder ``path``."""

    def __init__(self, path: Path, objects: Objects) -> None:
        self._path = path
        self._objects = objects
        self._garbage: list[str] = []  # objects, and folders with a slash at the end
        self.scans = 0
        """Scans of this process that are under way."""

    def drop(self, cut: Cut) -> None:
        """Let go of shards that the manifest does not name any more, and shorten the arrays that other tools see."""
        old, new = cut
        if not new.live:
            self._garbage.append(f"{old.folder}/")
            return
        dead = cut.dead_shards()
        self._garbage += shard_paths(old, dead)
        if dead or new.blocks() != old.blocks():
            self._try(lambda: write_arrays(self._objects, new), old.folder)

    def sweep(self) -> None:
        """Delete what no manifest names, unless a scan of this process still goes through it."""
        if self.scans:
            return
        garbage, self._garbage = self._garbage, []
        for path in garbage:
            delete = self._objects.delete_folder if path.endswith("/") else self._objects.delete
            self._try(partial(delete, path.rstrip("/")), path)

    def _try(self, work: Callable[[], None], what: str) -> None:
        """Do what may fail without harm: the next opening for writing deletes what is left."""
        try:
            work()
        except (OSError, NotAMemory) as error:
            logger.warning("memory %s: %s could not be brought up to date: %s", self._path, what, error)

    def collect(self, named: set[str], names: set[str]) -> None:
        """Delete what an interrupted process left: of ``names``, what the manifest has not ``named``; make groups."""
        if "blocks/zarr.json" not in names:
            for path in ("zarr.json", "blocks/zarr.json"):
                self._try(partial(self._objects.put, path, [group_json()], durable=False), path)
        folders = {_folder(name) for name in named}
        for name in filter(OBJECT.fullmatch, names - named):
            whole = name.count("/") > 1 and _folder(name) not in folders
            self._garbage.append(f"{_folder(name)}/" if whole else name)
        self._garbage = sorted(set(self._garbage))
        self.sweep()


def shard_paths(extent: Extent, shards: Iterable[int]) -> list[str]:
    """The objects of some shards of an extent."""
    return [extent.shard_path(record, shard) for shard in shards for record in range(len(extent.layouts))]


def _folder(path: str) -> str:
    """The folder of the extent that an object belongs to."""
    return "/".join(path.split("/")[:2])
