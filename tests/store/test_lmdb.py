import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    NotAMemory,
    NotFound,
    ReadOnlyMemory,
    StoreFull,
)
from memstore.store import Batch, BlockStore, Key, LmdbStore, Record, Table
from memstore.store.lmdb import environment
from memstore.store.lmdb import values as lmdb_values
from memstore.store.lmdb.values import STORE_KEY
from memstore.store.records import encode_value
from memstore.testing.stores import BLOCKS, LAYOUTS, StoreTests, block, put_blocks, rows, same, value


class TestLmdbStore(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return LmdbStore.open(path) if path.exists() else LmdbStore.create(path)


class TestPackedLmdbStore(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return LmdbStore.open(path) if path.exists() else LmdbStore.create(path, blocks_per_value=8)


def test_small_blocks_share_a_value(tmp_path: Path) -> None:
    sizes = {}
    for length in (1, 16):
        with_length = LmdbStore.create(tmp_path / str(length), blocks_per_value=length)
        payload = Record.from_json("x" * 2200)
        with_length.write(Batch(puts=[(block(item), (payload,)) for item in range(512)]))
        sizes[length] = with_length.size_bytes()
        with_length.close()
    assert sizes[16] < 0.75 * sizes[1]


def test_the_number_of_blocks_per_value_is_kept(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m", blocks_per_value=12).close()
    store = LmdbStore.open(tmp_path / "m", read_only=True)
    assert store.blocks_per_value == 12
    assert list(store.scan()) == []
    store.close()


def test_the_first_batch_is_part_of_creation(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m", batch=Batch(puts=[(Key(Table.META), value(5))]))
    assert same(store.get(Key(Table.META)), value(5))
    store.close()


def test_reader_and_writer_of_one_process_share_an_environment(tmp_path: Path) -> None:
    writer = LmdbStore.create(tmp_path / "m")
    readers = [LmdbStore.open(tmp_path / "m", read_only=True) for _ in range(2)]
    put_blocks(writer, range(3))
    assert all(reader.keys(*BLOCKS) == [block(0), block(1), block(2)] for reader in readers)
    assert readers[0].version() == writer.version()
    writer.close()
    readers[0].close()
    assert same(readers[1].get(block(1)), value(1))
    again = LmdbStore.open(tmp_path / "m")
    put_blocks(again, range(3, 4))
    assert same(readers[1].get(block(3)), value(3))
    readers[1].close()
    again.close()


def test_a_store_for_reading_refuses_to_write(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m").close()
    store = LmdbStore.open(tmp_path / "m", read_only=True)
    with pytest.raises(ReadOnlyMemory, match="mode='a'"):
        put_blocks(store, range(1))
    store.close()


def test_a_deleted_folder_made_anew_is_another_memory(tmp_path: Path) -> None:
    old = LmdbStore.create(tmp_path / "m")
    put_blocks(old, range(3))
    shutil.rmtree(tmp_path / "m")
    new = LmdbStore.create(tmp_path / "m")
    assert new.keys(*BLOCKS) == []
    assert len(old.keys(*BLOCKS)) == 3
    new.close()
    old.close()


def test_two_names_of_one_folder_are_one_memory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "m")
    store = LmdbStore.create(tmp_path / "m")
    reader = LmdbStore.open(tmp_path / "link", read_only=True)
    with pytest.raises(MemoryInUse):
        LmdbStore.open(tmp_path / "link")
    put_blocks(store, range(1))
    assert same(reader.get(block(0)), value(0))
    reader.close()
    store.close()


def test_a_forgotten_store_lets_go(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m")
    LmdbStore.open(tmp_path / "m").close()


# Forking is the point here; Python warns about it once other tests have started threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_told_to_open_for_itself(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m")
    put_blocks(store, range(1))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        for use in (lambda: store.get(block(0)), lambda: LmdbStore.open(tmp_path / "m", read_only=True)):
            try:
                use()
            except MemoryInUse as error:
                sender.send(str(error))
        store.close()

    process = context.Process(target=child)
    process.start()
    for _ in range(2):
        assert receiver.poll(20)
        assert (
            f"was opened by process {os.getpid()}, which then forked into this process, {process.pid}"
            in receiver.recv()
        )
    process.join()
    put_blocks(store, range(1, 2))
    assert len(store.keys(*BLOCKS)) == 2
    with pytest.raises(MemoryInUse):
        LmdbStore.open(tmp_path / "m")
    store.close()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no memory at"):
        LmdbStore.open(tmp_path / "m")
    with pytest.raises(NotFound):
        LmdbStore.open(tmp_path / "m", read_only=True)
    assert not (tmp_path / "m").exists()


def test_something_else_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("x")
    with lmdb.open(str(tmp_path / "lmdb")) as other, other.begin(write=True) as txn:
        txn.put(b"a", b"b")
    for name in ("file", "folder", "lmdb"):
        with pytest.raises(NotAMemory):
            LmdbStore.create(tmp_path / name)
        with pytest.raises((NotAMemory, NotFound)):
            LmdbStore.open(tmp_path / name)


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotAMemory, match="m is a broken link"):
        LmdbStore.create(tmp_path / "m")
    assert not (tmp_path / "nowhere").exists()


def test_creating_twice(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m").close()
    with pytest.raises(InvalidArgument, match="already holds a memory"):
        LmdbStore.create(tmp_path / "m")
    LmdbStore.open(tmp_path / "m").close()


@pytest.mark.parametrize("length", [0, 100, 4096])
def test_a_truncated_memory_is_not_taken_for_one_never_made(tmp_path: Path, length: int) -> None:
    LmdbStore.create(tmp_path / "m").close()
    os.truncate(tmp_path / "m" / "data.mdb", length)
    for open_or_create in (LmdbStore.open, LmdbStore.create):
        with pytest.raises(DamagedError, match=f"was truncated: it has only {length} bytes"):
            open_or_create(tmp_path / "m")
    assert (tmp_path / "m" / "data.mdb").stat().st_size == length


def test_a_memory_whose_data_has_gone_is_not_taken_for_one_never_made(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m").close()
    (tmp_path / "m" / "data.mdb").unlink()
    before = sorted((tmp_path / "m").iterdir())
    for open_or_create in (LmdbStore.open, LmdbStore.create):
        with pytest.raises(DamagedError, match=r"has lost its data.mdb.*restore it from a copy"):
            open_or_create(tmp_path / "m")
    assert sorted((tmp_path / "m").iterdir()) == before


@pytest.mark.parametrize("step", ["link", "posix_fallocate"])
def test_an_interrupted_creation_is_named_and_can_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        LmdbStore.create(tmp_path / "m")
    monkeypatch.undo()
    with pytest.raises(NotFound, match="interrupted"):
        LmdbStore.open(tmp_path / "m")
    store = LmdbStore.create(tmp_path / "m")
    put_blocks(store, range(1))
    store.close()


def test_a_path_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ReadOnlyMemory, match="permission denied"):
        LmdbStore.open(tmp_path / "m")


def test_an_empty_folder_is_a_place_for_a_memory(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(NotFound, match="is an empty folder, not a memory"):
        LmdbStore.open(tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []
    LmdbStore.create(tmp_path / "m").close()


def test_an_environment_without_facts_is_an_interrupted_creation(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path / "m")).close()
    with pytest.raises(NotFound, match="interrupted"):
        LmdbStore.open(tmp_path / "m")
    LmdbStore.create(tmp_path / "m").close()


class _Committing:
    """An environment in which another process makes a memory: its count is ahead of what reads see."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def stat(self) -> dict[str, Any]:
        return {**self._env.stat(), "entries": 1}


def test_a_memory_that_is_being_made_is_not_taken_for_another_kind_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lmdb.open(str(tmp_path), map_size=1 << 40).close()
    init = LmdbStore.__init__

    def in_the_making(store: LmdbStore, *arguments: Any) -> None:
        init(store, *arguments)
        monkeypatch.setattr(store, "_env", _Committing(store._env))

    monkeypatch.setattr(LmdbStore, "__init__", in_the_making)
    with pytest.raises(NotFound, match="interrupted"):
        LmdbStore.open(tmp_path, read_only=True)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m")
    store._use_format(4)
    put_blocks(store, range(1))
    store.close()
    with pytest.raises(ForeignMemory, match=r"newer memstore \(format 4\); upgrade"):
        LmdbStore.open(tmp_path / "m")


def test_a_full_map_is_a_full_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "MAP_BYTES", 1 << 20)
    store = LmdbStore.create(tmp_path / "m")
    put_blocks(store, range(10))
    with pytest.raises(StoreFull, match="earlier commits are intact"):
        store.write(Batch(puts=[(block(item), value(item)) for item in range(10_000)]))
    assert store.keys(*BLOCKS) == [block(item) for item in range(10)]
    put_blocks(store, range(10, 20))
    assert len(store.keys(*BLOCKS)) == 20
    store.close()


def test_limited_address_space_is_named(tmp_path: Path) -> None:
    program = """
import resource, sys
from memstore.errors import InvalidArgument
from memstore.store import LmdbStore
from memstore.store.lmdb import environment
resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
try:
    LmdbStore.create(sys.argv[1])
except InvalidArgument as error:
    sys.stdout.write(str(error))
environment.MAP_BYTES = 1 << 30
LmdbStore.create(sys.argv[1]).close()
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "m"], capture_output=True, text=True, check=True)
    assert "address space" in done.stdout
    assert "ulimit -v unlimited" in done.stdout


@pytest.mark.parametrize("length", [1, 8])
def test_damage_is_named_and_found_by_scan(tmp_path: Path, length: int) -> None:
    store = LmdbStore.create(tmp_path / "m", blocks_per_value=length)
    put_blocks(store, range(20))
    store.close()
    data = tmp_path / "m" / "data.mdb"
    raw = bytearray(data.read_bytes())
    needle = value(13)[0].payload.tobytes()
    place = raw.find(needle)
    assert place > 0
    while place >= 0:  # LMDB may have left older copies of the page in the file
        raw[place + 17] ^= 0x10
        place = raw.find(needle)
    data.write_bytes(raw)

    store = LmdbStore.open(tmp_path / "m")
    with pytest.raises(DamagedError, match="document 1, layer 0, block 13 is damaged: the payload checksum"):
        store.read([block(12), block(13)], LAYOUTS, rows(2))
    with pytest.raises(DamagedError, match="block 13"):
        store.get(block(13))
    store.read([block(12), block(14)], LAYOUTS, rows(2))
    assert [scanned.key for scanned in store.scan() if scanned.damage] == [block(13)]
    assert len(list(store.scan())) == 20
    store.delete(1)
    assert list(store.scan()) == []
    store.close()


@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize("most", [3, 1000])
def test_what_was_sound_once_is_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, most: int
) -> None:
    """Whatever bit of it changes after it was read, in a payload or in a header; what is written again is read."""
    monkeypatch.setattr(lmdb_values, "_MOST_KNOWN", most)
    store = LmdbStore.create(tmp_path / "m", blocks_per_value=length)
    put_blocks(store, range(10))
    keys = [block(item) for item in range(10)]
    for _ in range(3):
        store.read(keys, LAYOUTS, rows(10))
    store.write(Batch(puts=[(block(4), value(104))]))
    (found, _) = store.gather(keys, LAYOUTS)
    assert found[4].tobytes() == value(104)[0].payload.tobytes()
    whole = encode_value(block(7), value(7))
    data = tmp_path / "m" / "data.mdb"
    raw = data.read_bytes()
    places = [at for at in range(len(raw)) if raw.startswith(whole, at)]
    for byte in (0, 30, 79, 80, 95, 100, 135, 136, 144, 230, len(whole) - 1):
        with data.open("r+b") as file:
            for place in places:
                file.seek(place + byte)
                file.write(bytes([whole[byte] ^ 4]))
        with pytest.raises(DamagedError, match="block 7 is damaged"):
            store.read(keys, LAYOUTS, rows(10))
        with data.open("r+b") as file:
            for place in places:
                file.seek(place)
                file.write(whole)
        store.read(keys, LAYOUTS, rows(10))
    store.close()


@pytest.mark.parametrize("opened", ["once", "again"])
def test_rewriting_a_run_verifies_what_it_keeps(tmp_path: Path, opened: str) -> None:
    """Also a run that the same store has written itself."""
    store = LmdbStore.create(tmp_path / "m", blocks_per_value=8)
    put_blocks(store, range(4))
    if opened == "again":
        store.close()
        store = LmdbStore.open(tmp_path / "m")
    _swap_bytes(store, value(2)[0].payload.tobytes())
    with pytest.raises(DamagedError, match="block 2"):
        put_blocks(store, range(4, 5))
    assert len(store.keys(*BLOCKS)) == 4
    put_blocks(store, range(2, 3))
    put_blocks(store, range(4, 5))
    assert all(scanned.damage is None for scanned in store.scan())
    store.close()


def _swap_bytes(store: LmdbStore, needle: bytes) -> None:
    """Change a byte of a stored value behind the store's back."""
    with store._env.begin(write=True) as txn:
        for key, content in list(txn.cursor()):
            txn.put(key, content.replace(needle, bytes([needle[0] ^ 1]) + needle[1:]))


def test_a_value_under_a_wrong_key_is_damage(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m")
    put_blocks(store, range(2))
    with store._env.begin(write=True) as txn:
        _, (key, _), (_, other) = list(txn.cursor())
        txn.put(key, other)
    with pytest.raises(DamagedError, match="wrong address"):
        store.read([block(0)], LAYOUTS, rows(1))
    # The first one says that somebody else has written to the tree.
    assert [scanned.key for scanned in store.scan() if scanned.damage] == [STORE_KEY, block(0)]
    store.close()


def test_a_truncated_file_is_refused_not_a_crash(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m")
    payload = Record.from_json("x" * 3_000_000)
    store.write(Batch(puts=[(block(0), (payload,))]))
    store.close()
    os.truncate(tmp_path / "m" / "data.mdb", 500_000)
    with pytest.raises(DamagedError, match="truncated"):
        LmdbStore.open(tmp_path / "m", read_only=True)


def test_a_file_that_is_cut_while_it_is_open_is_no_bus_error(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m").close()
    store = LmdbStore.open(tmp_path / "m")
    put_blocks(store, range(300))
    reader = LmdbStore.open(tmp_path / "m", read_only=True)
    whole = (tmp_path / "m" / "data.mdb").read_bytes()
    os.truncate(tmp_path / "m" / "data.mdb", 4 * 4096)
    for read in (lambda: reader.get(block(200)), lambda: list(reader.scan()), lambda: put_blocks(store, range(1))):
        with pytest.raises(DamagedError, match="was truncated: it has only 16384 of"):
            read()
    (tmp_path / "m" / "data.mdb").write_bytes(whole)
    assert same(reader.get(block(200)), value(200))
    reader.close()
    store.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_reads_can_close_and_open(tmp_path: Path) -> None:
    """A lock that the other thread holds at that moment would be held in the child for ever."""
    store = LmdbStore.create(tmp_path / "m")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with environment._guard:
            held.set()
            done.wait(0.2)

    other = threading.Thread(target=hold)
    other.start()
    held.wait()

    def child() -> None:
        store.close()
        LmdbStore.create(tmp_path / "n").close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    done.set()
    process.join(20)
    exitcode = process.exitcode
    process.kill()
    other.join()
    store.close()
    assert exitcode == 0


@pytest.mark.parametrize("read", ["get", "gather", "walk"])
def test_a_close_waits_for_a_read_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    store = LmdbStore.create(tmp_path / "m")
    put_blocks(store, range(3))
    used = getattr(values := store.values, inner := {"gather": "take"}.get(read, read))
    environment_of_it = store._environment

    def close_first(*arguments: Any, **options: Any) -> Any:
        store.close()
        assert environment_of_it.users == 1
        return used(*arguments, **options)

    monkeypatch.setattr(values, inner, close_first)
    uses: dict[str, Callable[[], Any]] = {
        "get": lambda: same(store.get(block(1)), value(1)),
        "gather": lambda: store.gather([block(1)], LAYOUTS)[0].any(),
        "walk": lambda: [key for key, _ in store.walk(*BLOCKS)] == [block(item) for item in range(3)],
    }
    assert uses[read]()
    assert environment_of_it.users == 0
    with pytest.raises(InvalidArgument, match="is closed"):
        uses[read]()
    LmdbStore.open(tmp_path / "m").close()


@pytest.mark.parametrize(
    "use",
    [
        LmdbStore.version,
        LmdbStore.used_bytes,
        LmdbStore.sync,
        lambda store: store.get(block(0)),
        lambda store: store.keys(*BLOCKS),
        lambda store: list(store.scan()),
    ],
    ids=["version", "used_bytes", "sync", "get", "keys", "scan"],
)
def test_a_use_that_meets_a_close_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[LmdbStore], object]
) -> None:
    store = LmdbStore.create(tmp_path / "m")
    put_blocks(store, range(3))
    monkeypatch.setattr(store, "_check_open", store.close)  # another thread closes it after the check
    with pytest.raises(InvalidArgument, match="closed during use"):
        use(store)


def test_rubbish_instead_of_data(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m").close()
    (tmp_path / "m" / "data.mdb").write_bytes(np.random.default_rng(0).bytes(100_000))
    with pytest.raises(DamagedError, match="restore the memory from a copy"):
        LmdbStore.open(tmp_path / "m")


def test_the_lock_file_has_its_disk_space(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m").close()
    facts = (tmp_path / "m" / "lock.mdb").stat()
    assert facts.st_blocks * 512 >= facts.st_size > 0


def test_a_memory_copied_without_its_locks_opens(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m")
    put_blocks(store, range(1))
    store.close()
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "m" / "data.mdb", tmp_path / "copy")
    for read_only in (True, False):
        copy = LmdbStore.open(tmp_path / "copy", read_only=read_only)
        assert same(copy.get(block(0)), value(0))
        copy.close()
