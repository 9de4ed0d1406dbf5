"""Bits flipped in the branch pages of LMDB's tree: whatever a read can no longer find, a scan reports."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from memstore.errors import DamagedError
from memstore.store import Batch, Layout, LmdbStore, Record
from memstore.store.contract import document_ranges
from memstore.testing.stores import BLOCKS, block, put_blocks, value

PAGE = 4096  # bytes
BRANCH = 1  # flag of a page
FLIPS = 150

PROGRAM = """
# For each [place, bit] on standard input: flip it, scan and read in a fork, restore it, and print what happened.
import json, os, signal, sys
from memstore.errors import MemstoreError
from memstore.store import LmdbStore

CRASHED, REPORTED, RIGHT, WRONG = range(4)
path = sys.argv[1]
store = LmdbStore.open(path, read_only=True)
stored = {scanned.key: [record.payload.tobytes() for record in scanned.records] for scanned in store.scan()}
store.close()

def outcome(tell):
    signal.alarm(60)
    try:
        store = LmdbStore.open(path, read_only=True)
    except MemstoreError:
        return tell(REPORTED)
    if any(scanned.damage for scanned in store.scan()):
        return tell(REPORTED)
    tell(WRONG)  # unless it gets further
    if all([record.payload.tobytes() for record in store.get(key) or ()] == stored[key] for key in stored):
        tell(RIGHT)

data = os.open(f"{path}/data.mdb", os.O_RDWR)
for place, bit in json.load(sys.stdin):
    whole = os.pread(data, 1, place)
    os.pwrite(data, bytes([whole[0] ^ 1 << bit]), place)
    hear, say = os.pipe()
    if not (child := os.fork()):
        try:
            outcome(lambda what: os.write(say, bytes([what])))
        finally:
            os._exit(0)
    os.close(say)
    os.waitpid(child, 0)
    told = os.read(hear, 9) or bytes([CRASHED])
    os.close(hear)
    os.pwrite(data, whole, place)
    print(told[-1])
"""
CRASHED, REPORTED, RIGHT, WRONG = range(4)


def live_branches(path: Path) -> dict[int, bytes]:
    """The branch pages of the last commit, by page number: found from the younger of the two meta pages."""
    data = (path / "data.mdb").read_bytes()
    metas = [data[number * PAGE + 16 :] for number in (0, 1)]
    # magic, version, address, map size: 24 bytes; two trees of 48 bytes, the second is ours; last page; transaction
    live = max(metas, key=lambda meta: int.from_bytes(meta[128:136], "little"))
    pending, found = [int.from_bytes(live[112:120], "little")], {}
    while pending:
        number = pending.pop()
        page = data[number * PAGE : (number + 1) * PAGE]
        flags, lower = struct.unpack_from("<HH", page, 10)
        if flags & BRANCH:
            found[number] = page
            for (node,) in struct.iter_unpack("<H", page[16:lower]):
                low, high, top = struct.unpack_from("<HHH", page, node)
                pending.append(low | high << 16 | top << 32)
    return found


def used_bits(path: Path) -> list[tuple[int, int]]:
    """Every bit of the live branch pages that means something, as place in the file and bit."""
    bits = []
    for number, page in live_branches(path).items():
        lower, upper = struct.unpack_from("<HH", page, 12)
        places = [*range(16, lower), *range(upper, PAGE)]
        bits += [(number * PAGE + place, bit) for place in places for bit in range(8)]
    return bits


def outcomes(path: Path, bits: list[tuple[int, int]]) -> list[int]:
    """What each flipped bit leads to: the scan crashes or reports, or says nothing and all reads are right, or not."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path], input=json.dumps(bits), capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of 600 small values in three commits: one root above some tens of leaves."""
    store = LmdbStore.create(tmp_path / "m")
    for start in (0, 200, 400):
        items = range(start, start + 200)
        store.write(Batch(puts=[(block(item, layer=item % 3), value(item)) for item in items]))
    store.close()
    return tmp_path / "m"


def test_what_reads_cannot_find_a_scan_reports(path: Path) -> None:
    bits = random.Random(7).sample(used_bits(path), FLIPS)
    found = outcomes(path, bits)
    assert len(found) == FLIPS
    assert [bit for bit, outcome in zip(bits, found, strict=True) if outcome == WRONG] == []
    assert found.count(REPORTED) > FLIPS / 4


def test_a_value_that_became_shorter_twice_in_one_commit_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB leaves it on more pages than it needs, where its key stays; a flipped bit in their number is found."""
    monkeypatch.setattr(LmdbStore, "_formats", (1,))
    path, gone = tmp_path / "m", range(2, 60, 3)
    with closing(LmdbStore.create(path, blocks_per_value=64)) as store:
        store.write(Batch(puts=[(block(item), value(item)) for item in range(64)]))
        store.write(Batch(deletes=[(block(item), block(item)) for item in gone]))
    with closing(LmdbStore.open(path)) as store:
        assert [key.item for key in store.keys(block(0), block(63))] == [i for i in range(64) if i not in gone]
        store.compact()
    data = (path / "data.mdb").read_bytes()
    heads = {place: struct.unpack_from("<QHHI", data, place) for place in range(0, len(data), PAGE)}
    large = {place: pages for place, (own, _, flags, pages) in heads.items() if (own, flags) == (place // PAGE, 4)}
    (place,), pages = large, max(large.values())
    with (path / "data.mdb").open("r+b") as file:
        file.seek(place + 12)
        file.write(bytes([pages ^ 1]))
    with pytest.raises(DamagedError, match="some pages overlap or are lost"):
        LmdbStore.open(path)


def test_free_pages_that_lie_behind_the_end_of_the_file_are_no_damage(tmp_path: Path) -> None:
    """LMDB does not write pages that were taken and given up in one commit."""
    record = Record(Layout("uint8", (20 * PAGE,)), np.ones(20 * PAGE, np.uint8))
    with closing(LmdbStore.create(tmp_path / "m")) as store:
        for document in (1, 7, 7):  # which leaves free pages for all that is small
            put_blocks(store, range(200), document=document)
        batch = Batch(puts=[(block(0, document=document), (record,)) for document in (2, 3)])
        evictions = [Batch(deletes=document_ranges(document)) for document in (3, 7)]
        assert store.write_within(batch, store.used_bytes() + 15 * PAGE, evictions) == 2
        pages = store._env.info()["last_pgno"] + 1
        assert (tmp_path / "m" / "data.mdb").stat().st_size < pages * PAGE
        assert not any(scanned.damage for scanned in store.scan())
        with closing(LmdbStore.open(tmp_path / "m", read_only=True)) as reader:
            assert {key.document for key in reader.keys(*BLOCKS)} == {1, 2}
        store.compact()
        store.write(batch)
        assert {key.document for key in store.keys(*BLOCKS)} == {1, 2, 3}
        assert not any(scanned.damage for scanned in store.scan())
