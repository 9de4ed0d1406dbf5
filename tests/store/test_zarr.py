from __future__ import annotations

import logging
import random
import shutil
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import memstore
from memstore.errors import DamagedError, ForeignMemory, NotAMemory, NotFound, ReadOnlyMemory
from memstore.memory.urls import Mode
from memstore.store import Batch, BlockStore, Key, Layout, LmdbStore, Record, Table, ZarrStore
from memstore.testing.stores import BLOCKS, LAYOUTS, StoreTests, block, put_blocks, rows, same, value
from tests import forks
from tests.memory.helpers import D, G, S, append, check_content, make_spec, random_tokens

SMALL = 160  # bytes: shards of four blocks of the suite's 40 bytes


def open_zarr(path: Path, shard_bytes: int = SMALL, **options: Any) -> ZarrStore:
    if (path / "tail" / "data.mdb").exists():
        return ZarrStore.open(path, shard_bytes=shard_bytes, **options)
    return ZarrStore.create(path, shard_bytes=shard_bytes, **options)


class TestZarrStore(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return open_zarr(path)


class TestZarrStoreThatSealsNothing(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return open_zarr(path, 1 << 20)


class TestZarrStoreWithShardsElsewhere(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return open_zarr(path, shards=made(path.with_name(f"shards of {path.name}")))


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def shard_files(path: Path) -> list[Path]:
    return sorted((path / "blocks").rglob("c.*"))


def fields(*items: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What the arrays of ``LAYOUTS`` should hold for these blocks; bfloat16 as its bits."""
    values = [value(item) for item in items]
    return (
        np.stack([v[0].payload.view("<f4").reshape(2, 5) for v in values]),
        np.stack([v[1].payload.view("<u2") for v in values]),
    )


def check_blocks(store: BlockStore, items: range, first_seed: int = 0) -> None:
    assert store.keys(*BLOCKS) == [block(item) for item in items]
    out = rows(len(items))
    store.read([block(item) for item in items], LAYOUTS, out)
    for row, item in enumerate(items):
        expected = [record.payload.tobytes() for record in value(first_seed + item)]
        assert [field[row].tobytes() for field in out] == expected, item


def test_any_zarr_tool_reads_sealed_blocks(tmp_path: Path) -> None:
    store = open_zarr(tmp_path / "m")
    put_blocks(store, range(11))
    group = zarr.open_group(tmp_path / "m", mode="r")
    assert [name for name, _ in group["blocks"].groups()] == ["1.0.1"]  # type: ignore[union-attr]
    for record, expected in enumerate(fields(*range(8))):  # the newest is never sealed, two more make no shard
        array = group[f"blocks/1.0.1/{record}"]
        assert isinstance(array, zarr.Array)
        assert array.shards == (4, *LAYOUTS[record].shape)
        assert np.asarray(array[:]).tobytes() == expected.tobytes()
        assert array.attrs["memstore"] == {
            "document": 1,
            "layer": 0,
            "record": record,
            "dtype": LAYOUTS[record].dtype,
            "first_block": 0,
            "live": [[0, 8]],
        }
    store.close()


def test_arrays_are_as_long_as_what_is_alive(tmp_path: Path) -> None:
    store = open_zarr(tmp_path / "m")
    put_blocks(store, range(14))
    store.write(Batch(deletes=[(block(6), block(99)), (block(0), block(4))]))
    array = zarr.open_array(tmp_path / "m" / "blocks" / "1.0.1" / "0", mode="r")
    assert array.shape == (6, 2, 5)
    assert array.attrs["memstore"]["live"] == [[5, 6]]  # type: ignore[index, call-overload]
    assert np.asarray(array[5]).tobytes() == fields(5)[0].tobytes()
    assert [file.name for file in shard_files(tmp_path / "m")] == ["c.1.0.0", "c.1.0"]
    assert store.keys(*BLOCKS) == [block(5)]
    store.delete(1)
    assert not list((tmp_path / "m" / "blocks").glob("1.*"))
    store.close()


def test_what_is_written_again_is_never_old(tmp_path: Path) -> None:
    """Truncated in the middle of a shard, and grown again with other blocks, also in one batch."""
    store = open_zarr(tmp_path / "m")
    put_blocks(store, range(14))
    batch = Batch(deletes=[(block(6), block(99))])
    for item in range(6, 20):
        batch.put(block(item), *value(100 + item))
    store.write(batch)
    for _ in range(2):
        found = [store.get(block(item)) for item in range(20)]
        assert all(same(found[item], value(item)) for item in range(6))
        assert all(same(found[item], value(100 + item)) for item in range(6, 20))
        store.close()
        store = open_zarr(tmp_path / "m")
    second = zarr.open_array(tmp_path / "m" / "blocks" / "1.0.2" / "0", mode="r")
    assert second.attrs["memstore"]["first_block"] == 6  # type: ignore[index, call-overload]
    assert np.asarray(second[0]).tobytes() == fields(106)[0].tobytes()
    store.close()


def test_sealed_blocks_leave_the_tail(tmp_path: Path) -> None:
    store = open_zarr(tmp_path / "m", 1 << 20)
    payload = np.zeros(1 << 18, np.uint8)
    for item in range(40):  # 10 MiB, 256 KiB at a time
        store.write(Batch(puts=[(block(item), (Record(Layout("uint8", payload.shape), payload),))]))
    assert (tmp_path / "m" / "tail" / "data.mdb").stat().st_blocks * 512 < 4 << 20
    assert store.size_bytes() > 10 << 20
    assert len(shard_files(tmp_path / "m")) == 9
    store.close()


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damage_of_a_shard_is_named_and_harms_nothing_else(tmp_path: Path, harm: str) -> None:
    store = open_zarr(tmp_path / "m")
    put_blocks(store, range(11))
    file = tmp_path / "m" / "blocks" / "1.0.1" / "0" / "c.1.0.0"
    data = bytearray(file.read_bytes())
    data[2 * 40 + 7] ^= 4  # in block 6
    store.close()
    if harm == "remove":
        file.unlink()
    else:
        file.write_bytes(data if harm == "flip" else data[:90])
    store = open_zarr(tmp_path / "m", read_only=True)
    with pytest.raises(DamagedError, match=r"block 6 is damaged: .* it was not used"):
        store.get(block(6))
    with pytest.raises(DamagedError, match=r"block 6 is damaged: .* it was not used"):
        store.read([block(1), block(6)], LAYOUTS, rows(2))
    assert same(store.get(block(3)), value(3))
    wrong = [scanned.key.item for scanned in store.scan() if scanned.damage]
    assert wrong == {"flip": [6], "truncate": [4, 6, 7], "remove": [4, 5, 6, 7]}[harm]
    store.close()


def test_every_flipped_bit_of_a_shard_is_found(tmp_path: Path) -> None:
    """Also in its index, which only other tools use."""
    store = open_zarr(tmp_path / "m")
    put_blocks(store, range(6))
    file = tmp_path / "m" / "blocks" / "1.0.1" / "1" / "c.0.0"
    good = file.read_bytes()
    assert len(good) == 4 * 6 + 4 * 16 + 4
    for bit in range(0, 8 * len(good), 13):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        assert [scanned.key.item for scanned in store.scan() if scanned.damage] == [min(bit // 48, 4) % 4]
    file.write_bytes(good)
    assert not any(scanned.damage for scanned in store.scan())
    store.close()


def test_what_an_interrupted_process_left_is_cleaned_by_the_next_write(tmp_path: Path) -> None:
    """Not by the next opening: the tail may be an older copy, which does not name the shards."""
    store = open_zarr(tmp_path / "m")
    put_blocks(store, range(11))
    store.close()
    blocks = tmp_path / "m" / "blocks"
    shutil.copytree(blocks / "1.0.1", blocks / "1.0.2")
    shutil.copy(blocks / "1.0.1" / "0" / "c.1.0.0", blocks / "1.0.1" / "0" / "c.2.0.0")
    (blocks / "1.0.1" / "1" / ".c.2.0.part").write_bytes(b"half")
    left = {file for file in blocks.rglob("*") if "1.0.2" in str(file) or "2.0" in file.name}
    assert len(left) > 5
    open_zarr(tmp_path / "m", read_only=True).close()
    assert all(file.exists() for file in left)
    open_zarr(tmp_path / "m").close()
    assert all(file.exists() for file in left)
    store = open_zarr(tmp_path / "m")
    store.write(Batch())
    assert not any(file.exists() for file in left)
    check_blocks(store, range(11))
    put_blocks(store, range(11, 30))
    check_blocks(store, range(30))
    store.close()


def test_blocks_that_cannot_be_sealed_stay_in_the_tail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_zarr(tmp_path / "m")
    (tmp_path / "m" / "blocks" / "1.0.1").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        put_blocks(store, range(11))
    assert "document 1, layer 0 could not be sealed, and stay in the tail" in caplog.text
    check_blocks(store, range(11))
    (tmp_path / "m" / "blocks" / "1.0.1").unlink()
    put_blocks(store, range(11, 20))
    check_blocks(store, range(20))
    assert len(shard_files(tmp_path / "m")) == 8
    store.close()


def test_shards_in_another_folder(tmp_path: Path) -> None:
    shards = made(tmp_path / "shards")
    store = open_zarr(tmp_path / "m", shards=shards)
    put_blocks(store, range(30))
    store.write(Batch(deletes=[(block(0), block(9)), (block(26), block(99))]))
    put_blocks(store, range(26, 40))
    store.close()
    store = open_zarr(tmp_path / "m", shards=shards)
    check_blocks(store, range(10, 40))
    assert not any(scanned.damage for scanned in store.scan())
    file = next((tmp_path / "shards").rglob("c.3.0.0"))  # blocks 12 to 15
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DamagedError, match="block 14 is damaged"):
        store.get(block(14))
    file.unlink()
    store.close()
    store = open_zarr(tmp_path / "m", shards=shards)
    with pytest.raises(DamagedError, match="block 12 is damaged"):
        store.get(block(12))
    store.close()


def test_shards_of_another_memory_are_not_touched(tmp_path: Path) -> None:
    mine, other = made(tmp_path / "shards of mine"), made(tmp_path / "shards of other")
    for name, shards in (("mine", mine), ("other", other), ("local", None)):
        store = open_zarr(tmp_path / name, shards=shards)
        put_blocks(store, range(20))
        store.close()
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    for name, shards, read_only in (("mine", other, False), ("mine", other, True), ("local", other, False)):
        with pytest.raises(ForeignMemory, match="do not belong to memory"):
            open_zarr(tmp_path / name, shards=shards, read_only=read_only)
    with pytest.raises(ForeignMemory, match="choose an empty place"):
        open_zarr(tmp_path / "new", shards=other)
    with pytest.raises(ForeignMemory, match="pass shards="):
        open_zarr(tmp_path / "mine")
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    for name, shards in (("mine", mine), ("other", other), ("local", None)):
        store = open_zarr(tmp_path / name, shards=shards)
        check_blocks(store, range(20))
        store.close()


def write_and_tell(path: Path, number: int, says: Connection) -> None:
    """Commit batches without end, from that number on; tell how many there are."""
    store = ZarrStore.open(path, shard_bytes=160)
    while True:
        batch = Batch(deletes=[(block(10 * number - 3), block(10 * number))] if number else [])
        for item in range(max(0, 10 * number - 3), 10 * number + 10):
            batch.put(block(item), *value(item))
        store.write(batch)
        number += 1
        says.send(number)


def test_killed_writers_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    """Kills at random moments, most of them while shards are written, named or deleted."""
    path, moments = tmp_path / "m", random.Random(0)
    open_zarr(path).close()
    number = 0
    for _ in range(6):
        acknowledged = forks.killed(1, moments.random() * 0.1, write_and_tell, path, number)[-1]
        reader = open_zarr(path, read_only=True)
        number = len(reader.keys(*BLOCKS)) // 10
        assert number in (acknowledged, acknowledged + 1)
        check_blocks(reader, range(10 * number))
        assert not any(scanned.damage for scanned in reader.scan())
        reader.close()
    store = open_zarr(path)
    store.write(Batch())
    named = {path / name for name in store._named()}
    assert {file for file in (path / "blocks").rglob("*") if file.is_file()} == named
    store.close()


READ = """
import sys
from memstore.errors import NotFound
from memstore.store import ZarrStore
from memstore.testing.stores import BLOCKS, LAYOUTS, rows, value
store = ZarrStore.open(sys.argv[1], read_only=True)
good = {value(seed)[0].payload.tobytes(): seed for seed in range(300 * 16)}
sys.stdout.write("ready\\n"); sys.stdout.flush()
reads = 0
while reads < 15:
    keys = store.keys(*BLOCKS)
    out = rows(len(keys))
    try:
        store.read(keys, LAYOUTS, out)
    except NotFound:
        continue  # they were deleted after they were listed
    seeds = [good[row.tobytes()] for row in out[0]]
    assert [seed % 16 for seed in seeds] == [key.item for key in keys], seeds
    assert len({seed // 16 for seed in seeds}) <= 1, seeds
    assert not any(scanned.damage for scanned in store.scan())
    reads += 1
"""


def test_a_reader_in_another_process_never_sees_a_mixture(tmp_path: Path) -> None:
    """All blocks are replaced again and again, their shards deleted: every read is of one commit."""
    store = open_zarr(tmp_path / "m")
    with subprocess.Popen([sys.executable, "-c", READ, str(tmp_path / "m")], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        for generation in range(300):
            batch = Batch(deletes=[(block(0), block(99))])
            for item in range(16):
                batch.put(block(item), *value(16 * generation + item))
            store.write(batch)
            if reader.poll() is not None:
                break
        reader.wait()
    assert reader.returncode == 0
    store.close()


def test_a_block_that_is_sealed_during_a_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process seals it after the reader saw that it was not sealed."""
    writer = open_zarr(tmp_path / "m")
    put_blocks(writer, range(4))  # the newest is never sealed, so these make no shard
    reader = open_zarr(tmp_path / "m", read_only=True)
    place = reader._sealed.place

    def late(*looked_for: Any) -> Any:
        found = place(*looked_for)
        if not shard_files(tmp_path / "m"):
            put_blocks(writer, range(4, 5))
        return found

    monkeypatch.setattr(reader._sealed, "place", late)
    found = reader.get(block(0))
    assert len(shard_files(tmp_path / "m")) == 2
    assert same(found, value(0))
    reader.close()
    writer.close()


def test_scans_of_this_process_outlive_the_shards_they_go_through(tmp_path: Path) -> None:
    store = open_zarr(tmp_path / "m")
    put_blocks(store, range(10))
    scan = store.scan()
    next(scan)
    store.delete(1)
    assert len(shard_files(tmp_path / "m")) == 4
    assert [scanned.key.item for scanned in scan if not scanned.damage] == list(range(1, 10))
    store.write(Batch())
    assert shard_files(tmp_path / "m") == []
    store.close()


FILL = """
import sys
import numpy as np
from memstore.errors import StoreFull
from memstore.store import Batch, Layout, Record, ZarrStore
from memstore.testing.stores import BLOCKS, block

def record(item):
    payload = np.random.default_rng(item).integers(0, 256, 20_000, np.uint8)
    return Record(Layout("uint8", payload.shape), payload)

store = ZarrStore.create(sys.argv[1], shard_bytes=200_000)
count, full = 0, 0
while full < 5:
    try:
        store.write(Batch(puts=[(block(item), (record(item),)) for item in range(count, count + 3)]))
        count += 3
    except StoreFull as error:
        assert "earlier commits are intact" in str(error), error
        full += 1
    assert count < 10_000
assert store.keys(*BLOCKS) == [block(item) for item in range(count)]
store.write(Batch(deletes=[(block(0), block(count // 2))]))
for item in range(count, count + 9):
    store.write(Batch(puts=[(block(item), (record(item),))]))
store.close()
store = ZarrStore.open(sys.argv[1], shard_bytes=200_000)
kept = store.keys(*BLOCKS)
assert kept == [block(item) for item in range(count // 2 + 1, count + 9)]
for key in kept:
    assert store.get(key)[0].payload.tobytes() == record(key.item).payload.tobytes()
assert not any(scanned.damage for scanned in store.scan())
sys.stdout.write(f"{count}\\n")
"""


def test_a_full_file_system(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=6m tmpfs "{tmp_path}" && exec "$@"'
    program = [sys.executable, "-c", FILL, str(tmp_path / "m")]
    command = ["unshare", "--mount", "sh", "-c", script, "sh", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_memories_are_not_mistaken_for_one_another(tmp_path: Path) -> None:
    memstore.open(f"zarr:{tmp_path}/z", spec=make_spec()).close()
    memstore.open(tmp_path / "l", spec=make_spec()).close()
    modes: list[Mode] = ["a", "r"]
    for mode in modes:
        with pytest.raises(NotAMemory, match=f"open it as zarr:{tmp_path}/z"):
            memstore.open(tmp_path / "z", spec=make_spec(), mode=mode)
        with pytest.raises(NotAMemory, match="open it without zarr:"):
            memstore.open(f"zarr:{tmp_path}/l", spec=make_spec(), mode=mode)
    with pytest.raises(ForeignMemory, match=f"open zarr:{tmp_path}/z"):
        LmdbStore.open(tmp_path / "z" / "tail")
    (tmp_path / "file").write_text("text")
    with pytest.raises(NotAMemory, match="is a file"):
        memstore.open(f"zarr:{tmp_path}/file")
    with pytest.raises(NotFound, match="pass a spec"):
        memstore.open(f"zarr:{tmp_path}/nothing")
    with pytest.raises(NotFound, match="there is no memory"):
        memstore.open(f"zarr:{tmp_path}/nothing", mode="r")
    reader = ZarrStore.open(tmp_path / "z", read_only=True)
    with pytest.raises(ReadOnlyMemory, match="mode='a'"):
        reader.write(Batch())
    reader.close()


@pytest.mark.parametrize("lost", ["tail", "tail/data.mdb"])
def test_shards_whose_tail_has_gone_are_not_garbage(tmp_path: Path, lost: str) -> None:
    store = open_zarr(tmp_path / "m")
    put_blocks(store, range(11))
    store.close()
    path = tmp_path / "m" / lost
    path.rename(tmp_path / "elsewhere")
    shards = shard_files(tmp_path / "m")
    for open_or_create in (ZarrStore.open, ZarrStore.create):
        with pytest.raises(DamagedError, match=r"has blocks in shards, but tail/data.mdb.*Nothing was changed"):
            open_or_create(tmp_path / "m")
    assert shards == shard_files(tmp_path / "m") != []
    (tmp_path / "elsewhere").rename(path)
    store = open_zarr(tmp_path / "m")
    check_blocks(store, range(11))
    store.close()


def test_a_shard_that_cannot_be_read_now_is_not_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 2 * 4 * G * S * D)
    url = f"zarr:{tmp_path}/m"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(6 * S))
    moved = shard_files(tmp_path / "m")[0].parents[1]
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    with memstore.open(url) as memory:
        assert {(finding.kind, finding.remedy) for finding in memory.verify()} == {("damaged", "verify")}
        with pytest.raises(
            DamagedError, match="was not repaired, because a repair would delete data that may be intact"
        ):
            memory.repair()
        moved.unlink()
        (tmp_path / "elsewhere").rename(moved)
        assert memory.verify() == []
        check_content(memory.document("whale"), random_tokens(6 * S))


def test_verify_names_the_document_whose_shard_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 2 * 4 * G * S * D)
    url = f"zarr:{tmp_path}/m"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(6 * S))
        check_content(memory.document("whale"), random_tokens(6 * S))
        assert memory.verify() == []
    shards = shard_files(tmp_path / "m")
    assert len(shards) == 3 * 2 * 2
    data = bytearray(shards[-1].read_bytes())
    data[5] ^= 1
    shards[-1].write_bytes(data)
    with memstore.open(url) as memory:
        (finding,) = memory.verify()
        assert (finding.kind, finding.document, finding.layer, finding.block) == ("damaged", "whale", 2, 2)
        with pytest.raises(DamagedError, match="document 'whale', layer 2, block 2 is damaged"):
            memory.document("whale").layer(2).gather([2])


def test_values_of_other_tables_lie_in_the_tail(tmp_path: Path) -> None:
    store = open_zarr(tmp_path / "m")
    for table in Table:
        store.write(Batch(puts=[(Key(table, 1, 0, item), value(item)) for item in range(9)]))
    assert {file.parent.parent.name for file in shard_files(tmp_path / "m")} == {"1.0.1"}
    store.close()
