"""One writer, many readers, each a process of its own; and writers that are killed."""

import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from memstore.errors import MemoryInUse, NotFound, ReadOnlyMemory
from memstore.store import Batch, LmdbStore
from memstore.testing.stores import BLOCKS, block, put_blocks, same, value
from tests import forks

HOLD = """
import sys
from memstore.store import LmdbStore
store = LmdbStore.open(sys.argv[1])
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.read()
store.close()
"""

READ = """
import sys
from memstore.store import LmdbStore
from memstore.testing.stores import BLOCKS
store = LmdbStore.open(sys.argv[1], read_only=True)
for line in sys.stdin:
    sys.stdout.write(f"{len(store.keys(*BLOCKS))} {store.version()}\\n"); sys.stdout.flush()
"""


def create_and_tell(path: Path, says: Connection) -> None:
    """Say so, and make a store with a block."""
    batch = Batch(puts=[(block(0), value(0))])
    says.send("ready")
    LmdbStore.create(path, batch=batch).close()


def write_and_tell(path: Path, number: int, says: Connection) -> None:
    """Commit batches without end, from that number on; tell how many there are."""
    store = LmdbStore.open(path)
    while True:
        batch = Batch()
        for item in range(10 * number, 10 * number + 10):
            batch.put(block(item), *value(item))
        batch.delete(block(0, document=2), block(99, document=2))
        batch.put(block(number % 100, document=2), *value(number))
        store.write(batch)
        number += 1
        says.send(number)


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    """Send a line, if any, and return the one that comes back."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_second_writer_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    LmdbStore.create(tmp_path / "m").close()
    with start(HOLD, tmp_path / "m") as holder:
        assert ask(holder) == "ready"
        with pytest.raises(MemoryInUse, match=rf"written by process {holder.pid} \(-c\) since \d\d:\d\d; wait for it"):
            LmdbStore.open(tmp_path / "m")
        reader = LmdbStore.open(tmp_path / "m", read_only=True)
        assert reader.keys(*BLOCKS) == []
        reader.close()
        holder.communicate()
    assert holder.returncode == 0
    assert not (tmp_path / "m" / "writer.json").exists()
    LmdbStore.open(tmp_path / "m").close()


def test_a_second_writer_in_this_process_is_refused(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m")
    with pytest.raises(MemoryInUse, match=rf"process {os.getpid()} \(this one\)"):
        LmdbStore.open(tmp_path / "m")
    put_blocks(store, range(1))
    store.close()
    LmdbStore.open(tmp_path / "m").close()


def test_the_holder_file_is_for_people_only(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m")
    facts = json.loads((tmp_path / "m" / "writer.json").read_text())
    assert facts["pid"] == os.getpid()
    (tmp_path / "m" / "writer.json").write_text("rubbish")
    with pytest.raises(MemoryInUse, match="written by another process"):
        LmdbStore.open(tmp_path / "m")
    for told in (facts | {"pid": "\x1b[2J"}, facts | {"started": "0001-01-01T00:00:00+23:59"}):
        (tmp_path / "m" / "writer.json").write_text(json.dumps(told))
        with pytest.raises(MemoryInUse, match="written by another process"):
            LmdbStore.open(tmp_path / "m")
    (tmp_path / "m" / "writer.json").write_text(json.dumps(facts | {"command": "\x1b[2J\n"}))
    with pytest.raises(MemoryInUse, match=r"\(\\x1b\[2J\\n\)"):
        LmdbStore.open(tmp_path / "m")
    store.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/usr/bin/memstore", "ask", "m", "a secret"], "memstore ask"),
        (["/lib/memstore/__main__.py", "ask", "m", "a secret"], "memstore ask"),
        (["/lib/notes/__main__.py", "a secret"], "notes"),
        (["notes.py", "a secret"], "notes.py"),
        ([""], "python"),
    ],
)
def test_the_holder_file_tells_the_program_and_our_verb_alone(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    with closing(LmdbStore.create(tmp_path / "m")):
        assert json.loads((tmp_path / "m" / "writer.json").read_text())["command"] == told


def test_readers_in_other_processes_see_commits(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "m", blocks_per_value=4)
    with start(READ, tmp_path / "m") as first, start(READ, tmp_path / "m") as second:
        for count in range(1, 6):
            put_blocks(store, range(count - 1, count))
            for reader in (first, second):
                assert ask(reader, "?") == f"{count} {store.version()}"
        for reader in (first, second):
            reader.communicate()
    store.close()


@pytest.mark.slow
def test_killed_writers_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    """Twenty kills at random moments: what was acknowledged is there, the batch under way is whole or absent."""
    path, moments = tmp_path / "m", random.Random(0)
    LmdbStore.create(path, blocks_per_value=8).close()
    number = 0
    for _ in range(20):
        told = forks.killed(1, moments.random() * 0.02, write_and_tell, path, number)
        number = check_whole_batches(path, told[-1])


def test_a_killed_creation_leaves_all_or_nothing(tmp_path: Path) -> None:
    moments = random.Random(1)
    for attempt in range(10):
        path = tmp_path / str(attempt)
        forks.killed(1, moments.random() * 0.008, create_and_tell, path)
        try:
            store = LmdbStore.open(path)
        except NotFound:
            store = LmdbStore.create(path, batch=Batch(puts=[(block(0), value(0))]))
        assert same(store.get(block(0)), value(0))
        store.close()


def check_whole_batches(path: Path, acknowledged: int) -> int:
    """Open for writing (so the lock is free), and return how many batches are there."""
    store = LmdbStore.open(path)
    found = list(store.scan())
    assert not any(scanned.damage for scanned in found)
    items = [scanned.key.item for scanned in found if scanned.key.document == 1]
    number = len(items) // 10
    assert items == list(range(10 * number))
    assert number in (acknowledged, acknowledged + 1)
    assert [scanned.key for scanned in found if scanned.key.document == 2] == [block((number - 1) % 100, document=2)]
    assert same(store.get(block(number * 10 - 1)), value(number * 10 - 1))
    store.close()
    return number


def read_only_program(path: Path, first: str = "") -> str:
    return f"""
import os, sys
from memstore.errors import ReadOnlyMemory
from memstore.store import LmdbStore
from memstore.testing.stores import BLOCKS, put_blocks
{first}
store = LmdbStore.open({str(path)!r}, read_only=True)
sys.stdout.write(f"{{len(store.keys(*BLOCKS))}} {{len(list(store.scan()))}}\\n")
store.close()
for attempt in (LmdbStore.open, LmdbStore.create):
    try:
        attempt({str(path)!r} + ("" if attempt == LmdbStore.open else "/new"))
    except ReadOnlyMemory as error:
        sys.stdout.write(f"{{error}}\\n")
"""


def make_memory(path: Path) -> None:
    store = LmdbStore.create(path)
    put_blocks(store, range(3))
    store.close()


def check_read_only(output: str) -> None:
    first, opening, creating = output.splitlines()
    assert first == "3 3"
    assert "cannot be written" in opening
    assert "mode='r'" in opening
    assert "cannot be created" in creating


def test_reading_in_a_folder_of_somebody_else(tmp_path: Path) -> None:
    """A process without the right to write, not even the lock file, can read."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    make_memory(tmp_path / "m")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o5 != 0o5 and folder.is_relative_to(tempfile.gettempdir()):  # pytest's own
            folder.chmod(0o755)
    program = read_only_program(tmp_path / "m", first="LmdbStore; os.setgroups([]); os.setgid(65534); os.setuid(65534)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_read_only(done.stdout)


def test_reading_on_a_read_only_mount(tmp_path: Path) -> None:
    make_memory(tmp_path / "m")
    script = f'mount --bind "{tmp_path}" "{tmp_path}" && mount -o remount,bind,ro "{tmp_path}" && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, read_only_program(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    check_read_only(done.stdout)


def test_a_reader_that_may_not_write_refuses_to(tmp_path: Path) -> None:
    make_memory(tmp_path / "m")
    reader = LmdbStore.open(tmp_path / "m", read_only=True)
    with pytest.raises(ReadOnlyMemory):
        reader.write(Batch())
    reader.close()
