"""What a process or a system lacks is no damage of the memory, and is said in plain words."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import lmdb
import pytest

import memstore
from memstore.errors import InvalidArgument, MemstoreError, ReadOnlyMemory, StoreFull
from memstore.memory import index_files
from memstore.memory.urls import Mode
from memstore.store import LmdbStore
from memstore.store.lmdb.environment import translate
from tests.memory.helpers import append, check_content, make_spec, random_tokens

TOKENS = random_tokens(40)
MODES: tuple[Mode, ...] = ("r", "a")


@pytest.fixture(params=["", "zarr:"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"{request.param}{tmp_path / 'm'}"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("a"), TOKENS)
    return url


@contextmanager
def files_left(number: int) -> Iterator[None]:
    """This process can open so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    handles = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(handles) + 200), hard))
    try:
        while True:
            try:
                handles.append(os.dup(0))
            except OSError:
                break
        for _ in range(number):
            os.close(handles.pop())
        yield
    finally:
        for handle in handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_are_no_damage(url: str) -> None:
    with memstore.open(url) as memory:  # what is imported at the first use needs files too
        check_content(memory.document("a"), TOKENS)
    opened = 0
    for number in range(16):
        with files_left(number):
            for mode in MODES:
                error = told(url, mode)
                opened += error is None
                if error is not None:
                    assert type(error) is MemstoreError, (number, mode, error)
                    assert "too many files are open in this process or on this machine. Nothing is damaged" in str(
                        error
                    )
    assert opened > 2


def told(url: str, mode: Mode) -> MemstoreError | None:
    """What opening and reading a memory raises, if anything."""
    try:
        with memstore.open(url, mode=mode) as memory:
            check_content(memory.document("a"), TOKENS)
    except MemstoreError as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_the_system_lacks_is_told(tmp_path: Path, code: int) -> None:
    error = lmdb.Error("it failed")
    vars(error)["code"] = code
    assert type(translate(error, tmp_path)) is MemstoreError


def test_limited_address_space_names_what_can_be_done(tmp_path: Path) -> None:
    assert "ulimit -v unlimited" in str(translate(lmdb.MemoryError("no"), tmp_path))


def test_a_file_system_without_locks_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.warns(UserWarning, match="flock"), pytest.raises(ReadOnlyMemory, match="has no file locks"):
        memstore.open(url)
    with memstore.open(url, mode="r") as memory:
        check_content(memory.document("a"), TOKENS)


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
def test_every_file_obeys_the_umask(tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.memory.view.WORTH_KEEPING", 1)
    before = os.umask(umask)
    try:
        for scheme in ("", "zarr:"):
            with memstore.open(f"{scheme}{tmp_path}/m{len(scheme)}", spec=make_spec()) as memory:
                append(memory.document("a"), TOKENS)
                memory.build_indexes()
                with memory.traces.record(model="m"):
                    found = [path for path in tmp_path.rglob("*") if path.is_file()]
                    rights = {path.name: oct(path.stat().st_mode & 0o777) for path in found}
    finally:
        os.umask(before)
    assert {"data.mdb", "lock.mdb", "reserve", "writer.json"} <= set(rights)
    allowed = {oct(0o666 & ~umask), oct(0o644 & ~umask)}  # the second of SQLite and of the writer's lock
    assert set(rights.values()) <= allowed, rights
    assert rights["data.mdb"] == rights["lock.mdb"] == oct(0o666 & ~umask)


def test_an_open_memory_is_neither_copied_nor_sent(url: str) -> None:
    with memstore.open(url) as memory:
        for work in (copy.copy, copy.deepcopy, pickle.dumps):
            for thing in (memory, memory.document("a")):
                if work is copy.copy and thing is not memory:
                    continue
                with pytest.raises(InvalidArgument, match="open it there"):
                    work(thing)


def test_indexes_that_find_no_room_are_a_full_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.memory.view.WORTH_KEEPING", 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with memstore.open(url) as memory:
        with monkeypatch.context() as patch:
            patch.setattr(index_files.IndexFiles, "save", full)
            with pytest.raises(StoreFull, match=r"indexes of memory .* cannot be written"):
                memory.build_indexes()
        memory.build_indexes()


def test_pages_of_an_unknown_lmdb_are_neither_checked_nor_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LmdbStore.create(tmp_path / "m").close()
    monkeypatch.setattr(lmdb, "version", lambda: (1, 0, 3))
    with closing(LmdbStore.open(tmp_path / "m")) as store:
        before = (tmp_path / "m" / "data.mdb").read_bytes()
        with pytest.raises(MemstoreError, match=r"this is LMDB 1\.0\.3"):
            store.compact()
        assert (tmp_path / "m" / "data.mdb").read_bytes() == before
