"""A disk, a quota or a limit that is full: the batch fails, nothing committed is lost, the store goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

FILL = """
import resource, sys
import numpy as np
from memstore.errors import StoreFull
from memstore.store import Batch, Layout, LmdbStore, Record
from memstore.testing.stores import BLOCKS, block

def record(item):
    payload = np.random.default_rng(item).integers(0, 256, size, np.uint8)
    return Record(Layout("uint8", (size,)), payload)

path, limit, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = LmdbStore.create(path)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
count = 0
message = ""
while not message:
    batch = Batch()
    for item in range(count, count + 3):
        batch.put(block(item), record(item))
    try:
        store.write(batch)
        count += 3
    except StoreFull as error:
        message = str(error)
    assert count < 10_000
assert "earlier commits are intact" in message, message
assert store.keys(*BLOCKS) == [block(item) for item in range(count)]
for _ in range(3):
    try:
        store.write(Batch(puts=[(block(item), (record(item),)) for item in range(count, count + 3)]))
        raise SystemExit("it fitted after all")
    except StoreFull:
        pass
for item in range(0, count, 2):  # deleting needs no room to speak of, and what it frees is used again
    store.write(Batch(deletes=[(block(item), block(item))]))
    if item >= count // 2:
        break
store.write(Batch(puts=[(block(count), (record(count),))]))
store.close()
store = LmdbStore.open(path)
kept = store.keys(*BLOCKS)
assert kept[-1] == block(count) and len(kept) > count // 2
for key in kept:
    assert store.get(key)[0].payload.tobytes() == record(key.item).payload.tobytes()
assert not any(scanned.damage for scanned in store.scan())
sys.stdout.write(f"{count}\\n")
"""

SIZES = (5_000, 100_000)  # bytes: two pages, and many


@pytest.mark.parametrize("size", SIZES)
def test_a_limit_on_the_size_of_files(tmp_path: Path, size: int) -> None:
    command = [sys.executable, "-c", FILL, str(tmp_path / "m"), "3001000", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


@pytest.mark.parametrize("size", SIZES)
def test_a_full_file_system(tmp_path: Path, size: int) -> None:
    script = f'mount -t tmpfs -o size=3m tmpfs "{tmp_path}" && exec "$@"'
    program = [sys.executable, "-c", FILL, str(tmp_path / "m"), "0", str(size)]
    command = ["unshare", "--mount", "sh", "-c", script, "sh", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


FORGET = """
import os, sys
from pathlib import Path
import numpy as np
from memstore.errors import StoreFull
from memstore.store import Batch, Key, Layout, LmdbStore, Record, Table

path, others = Path(sys.argv[1]) / "m", Path(sys.argv[1]) / "others"
record = Record(Layout("uint8", (30_000,)), np.frombuffer((b"Leviathan" * 3334)[:30_000], np.uint8))

def fill():
    "Somebody else takes every byte that is left."
    with others.open("ab", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1024))
            except OSError:
                return

store = LmdbStore.create(path)
for document in (1, 2):
    for item in range(20):
        store.write(Batch(puts=[(Key(Table.BLOCKS, document, 0, item), (record,))]))
store.compact()  # so that the file has no room of its own
fill()
for size in (100_000, 1_000_000):
    try:
        store.write(Batch(puts=[(Key(Table.BLOCKS, 3), (Record(Layout("uint8", (size,)), np.ones(size, np.uint8)),))]))
        raise SystemExit("it fitted after all")
    except StoreFull as error:
        assert "Nothing of the batch was stored" in str(error), error
fill()
for document in (1, 2):
    store.delete(document)
    fill()
    store.compact()
    fill()
assert store.keys(Key(Table.BLOCKS), Key(Table.BLOCKS, 9)) == []
assert b"Leviathan" not in (path / "data.mdb").read_bytes()
others.unlink()
store.write(Batch(puts=[(Key(Table.BLOCKS, 3), (record,))]))
assert (path / "reserve").stat().st_size > 0
store.close()
"""


def test_deleting_and_compacting_work_on_a_disk_that_others_have_filled(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=4m tmpfs "{tmp_path}" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", FORGET, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
