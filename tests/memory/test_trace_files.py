"""The file of traces: what was done to it, by whomever, is named, and neither runs nor hangs."""

from __future__ import annotations

import logging
import sqlite3
import struct
import tempfile
import time
import zlib
from contextlib import closing
from pathlib import Path

import pytest

import memstore
from memstore.errors import DamagedError, ForeignMemory, MemoryInUse, MemstoreError
from memstore.memory import Recorder, trace_file, traces
from memstore.memory.index_files import IndexFiles
from memstore.memory.traces import NAME
from tests.memory.helpers import append, make_spec, random_tokens, run_python
from tests.memory.test_traces import make_look, record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A memory on disk."""
    with memstore.open(tmp_path / "m", spec=make_spec()) as opened:
        append(opened.document("whale"), random_tokens(40))
    return tmp_path / "m"


def test_garbage_is_named_and_harms_nothing(path: Path) -> None:
    (path / NAME).write_bytes(b"x" * 5000)
    with memstore.open(path) as memory:
        for look_at in (memory.traces.list, memory.traces.last, memory.traces.record):
            with pytest.raises(DamagedError, match=f"delete {path / NAME}"):
                look_at()
        assert memory.verify() == []
        (path / NAME).unlink()
        assert record(memory).tokens() == [100, 101, 102]


def test_damaged_looks_are_named(path: Path) -> None:
    with memstore.open(path) as memory:
        trace = record(memory)
        with sqlite3.connect(path / NAME) as connection:
            connection.execute("UPDATE steps SET looks = ? WHERE number = 1", [trace_file.encode([make_look()])[:-9]])
        connection.close()
        assert len(trace.steps(2)) == 1
        with pytest.raises(DamagedError, match="delete"):
            trace.steps()


def test_an_error_about_a_trace_keeps_no_file_open(path: Path) -> None:
    with memstore.open(path) as memory:
        record(memory)
    with closing(sqlite3.connect(path / NAME)) as file, file:
        file.execute("UPDATE traces SET info = 'no JSON'")
    errors, before = [], len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        with memstore.open(path, mode="r") as memory, pytest.raises(DamagedError) as error:
            memory.traces.list()
        errors.append(error.value)
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 1, "somebody keeps the errors"


def test_an_empty_file_is_no_traces(path: Path) -> None:
    (path / NAME).touch()
    with memstore.open(path) as memory:
        assert memory.traces.list() == []
        assert record(memory).number == 1


def test_a_file_that_another_process_is_making_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has turned on the log, but has not made the tables yet."""
    log, begin, tables = traces._TABLES.partition("BEGIN IMMEDIATE;")
    file, version, looks = traces.TraceFile(path, str(path)), traces.TraceFile._version, list[int]()
    with monkeypatch.context() as patched, closing(sqlite3.connect(path / NAME, isolation_level=None)) as other:

        def late(self: traces.TraceFile, connection: sqlite3.Connection) -> int:
            other.executescript(begin + tables if looks else log)
            other.execute("SELECT * FROM sqlite_master").fetchall()  # opens the log
            looks.append(1)
            return version(self, connection)

        patched.setattr(traces.TraceFile, "_version", late)
        file.acquire()
        assert len(looks) == 2
        other.execute("INSERT INTO traces (info, ended, bytes) VALUES ('{}', 1, 2)")
    file.release()
    with memstore.open(path) as memory:
        assert record(memory).number == 2


def test_a_file_of_version_1_is_read_and_goes_on(path: Path) -> None:
    with memstore.open(path) as memory:
        before = record(memory)
        with sqlite3.connect(path / NAME) as connection:  # what version 2 adds to a step, none of these has
            connection.execute("PRAGMA user_version = 1")
        connection.close()
        assert before.tokens() == [100, 101, 102]
        after = record(memory)
        assert [trace.number for trace in memory.traces.list()] == [before.number, after.number]
        with sqlite3.connect(path / NAME) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (traces.VERSION,)
        connection.close()


def test_a_newer_file_is_refused(path: Path) -> None:
    with memstore.open(path) as memory:
        record(memory)
        with sqlite3.connect(path / NAME) as connection:
            connection.execute("PRAGMA user_version = 9")
        connection.close()
        for look_at in (memory.traces.list, memory.traces.record):
            with pytest.raises(ForeignMemory, match="newer"):
                look_at()


def test_a_removed_trace_leaves_no_bytes(path: Path) -> None:
    question = "the treasure lies under the third palm"
    with memstore.open(path) as memory:
        number = record(memory, question=question).number
        assert question.encode() in (path / NAME).read_bytes()
        memory.traces.remove(number)
    assert not any(question.encode() in file.read_bytes() for file in path.glob(f"{NAME}*"))


def test_bytes_of_a_removed_trace_that_somebody_reads_are_erased_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "WAIT", 0.1)
    question = "the treasure lies under the third palm"
    with memstore.open(path) as memory:
        number = record(memory, question=question).number
        with closing(sqlite3.connect(path / NAME, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM traces").fetchone()
            with pytest.raises(MemoryInUse, match="are removed, but their bytes stay"):
                memory.traces.remove(number)
            assert memory.traces.list() == []
            reader.execute("COMMIT")
            record(memory)
            assert not any(question.encode() in file.read_bytes() for file in path.glob(f"{NAME}*"))


def test_traces_of_a_forgotten_conversation_that_were_in_use_are_removed_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "WAIT", 0.1)
    with memstore.open(path) as memory:
        for name in ("chat/a", "chat/b"):
            append(memory.document(name), random_tokens(40))
            record(memory, conversation={"document": name, "start": 0})
        with closing(sqlite3.connect(path / NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(MemoryInUse, match=r"'chat/a' is forgotten, but .* memstore compact"):
                memory.forget("chat/a")
        assert [document.name for document in memory.documents()] == ["whale", "chat/b"]
        memory.compact()
        assert [trace.info["conversation"]["document"] for trace in memory.traces.list()] == ["chat/b"]


def test_an_index_that_cannot_be_removed_stops_no_other_clean_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "index")

    monkeypatch.setattr(IndexFiles, "sweep", refused)
    with memstore.open(path) as memory:
        append(memory.document("chat/a"), random_tokens(40))
        record(memory, conversation={"document": "chat/a", "start": 0})
        with pytest.raises(MemstoreError, match=r"'chat/a' is forgotten, but .*Permission denied"):
            memory.forget("chat/a")
        assert memory.traces.list() == []
        before = memory.stats()["disk_bytes"]
        with pytest.raises(MemstoreError, match=r"data is erased, but .*Permission denied"):
            memory.compact()
        assert memory.stats()["disk_bytes"] < before


LOSE_RIGHTS = """
import os
from memstore.errors import ReadOnlyMemory
from tests.memory.test_traces import record

path, recorded = sys.argv[1], sys.argv[2] == "True"
with memstore.open(path, spec=make_spec()) as memory:
    if recorded:
        record(memory)
for file in os.listdir(path):
    if file.endswith(("-wal", "-shm")):
        os.unlink(f"{path}/{file}")
    else:
        os.chmod(f"{path}/{file}", 0o444)
os.chmod(path, 0o555)
if not os.getuid():
    os.setuid(65534)  # root may write everywhere, so it becomes somebody without rights
with memstore.open(path, mode="r") as memory:
    print([trace.tokens() for trace in memory.traces.list()])
    try:
        memory.traces.record()
    except ReadOnlyMemory as error:
        print("and its folder writable" in str(error))
"""


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_is_recorded_where_nothing_can_be_written(recorded: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:  # that of pytest cannot be entered by others
        Path(folder).chmod(0o755)
        told = run_python(LOSE_RIGHTS, f"{folder}/m", str(recorded))
        Path(folder, "m").chmod(0o755)
    assert told.splitlines() == [str([[100, 101, 102]] if recorded else []), "True"]


def test_a_disk_that_is_full_ends_the_trace_and_not_the_model(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "INTERVAL", 0.0)
    with memstore.open(path) as memory:
        writer = memory.traces.record()
        _limit_pages(writer)
        with caplog.at_level(logging.WARNING):
            for step in range(200):
                writer.begin()
                writer.look(make_look(step, heads=64, entries=64, lists=8))
            writer.close()
        assert [record.message for record in caplog.records if "has stopped" in record.message] == [
            caplog.records[0].message
        ]
        assert "full" in caplog.records[0].message
        assert 0 < len(memory.traces.get(writer.number)) < 200


def test_a_disk_that_is_full_when_a_trace_is_closed_is_told_too(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "INTERVAL", 1000.0)
    with memstore.open(path) as memory, caplog.at_level(logging.WARNING):
        writer = memory.traces.record()
        _limit_pages(writer)
        for step in range(200):
            writer.begin()
            writer.look(make_look(step, heads=64, entries=64, lists=8))
        writer.close(tokens=list(range(200)))
        assert "has stopped" in caplog.text
        assert not writer.active


def _limit_pages(writer: Recorder) -> None:
    """Let SQLite find no room after a few pages, as on a disk that is full."""
    connection = writer._file._connection
    assert connection is not None
    connection.execute("PRAGMA max_page_count = 60")


def swelling(megabytes: int) -> bytes:
    """What unpacks to so many megabytes of zeros, put together from one of them: to pack them all takes seconds."""
    packer = zlib.compressobj(9)
    first, more = (packer.compress(bytes(10**6)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    end = struct.pack(">HI", 0x0300, megabytes * 10**6 % 65521 << 16 | 1)  # an empty last block, and the sum of zeros
    return first + (megabytes - 1) * more + end


HOSTILE = {
    "a view": "DROP TABLE traces; CREATE VIEW traces AS WITH RECURSIVE n(number) AS (SELECT 1 UNION ALL SELECT number "
    "FROM n) SELECT number, '{}' AS info, 0 AS ended, 0 AS bytes FROM n",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON traces BEGIN INSERT INTO steps WITH RECURSIVE n(i) AS (SELECT 1 "
    "UNION ALL SELECT i + 1 FROM n) SELECT new.number, i, 0, 0, NULL FROM n; END",
    "another table": "CREATE TABLE more (x)",
    "brackets": f"INSERT INTO traces VALUES (9, '{'[' * 100_000}', 1, 0)",  # noqa: S608 - on purpose
    "a list": "INSERT INTO traces VALUES (9, '[]', 1, 0)",
    "bytes": "INSERT INTO traces VALUES (9, x'ff', 1, 0)",
    "a long text": "INSERT INTO traces VALUES (9, hex(zeroblob(40000000)), 1, 0)",
    "a step that swells": f"UPDATE steps SET looks = x'{swelling(600).hex()}'",  # noqa: S608 - on purpose
}


@pytest.mark.parametrize("what", HOSTILE)
def test_traces_of_somebody_else_neither_run_nor_hang(tmp_path: Path, what: str) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        with memory.traces.record() as recorder:
            recorder.begin()
            recorder.token(1)
        with closing(sqlite3.connect(tmp_path / "m" / "traces.sqlite")) as connection:
            connection.executescript(HOSTILE[what])
        begun = time.process_time()
        with pytest.raises(MemstoreError) as caught:
            [trace.steps() for trace in memory.traces.list()]
        if what in ("a view", "a trigger", "another table"):
            with pytest.raises(MemstoreError):
                memory.traces.record().close([])
        assert "\n" not in str(caught.value)
        assert time.process_time() - begun < 5


def test_a_journal_beside_the_traces_is_never_opened(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        record(memory)
        (size,) = struct.unpack_from(">H", (tmp_path / "m" / NAME).read_bytes(), 16)
        # As SQLite lays out a transaction over several files: who opens this one is to delete the file that it names.
        magic, name = bytes.fromhex("d9d505f920a163d7"), bytes(victim)
        header = (magic + struct.pack(">5I", 0, 7, 1, 512, size)).ljust(512, b"\0")
        end = struct.pack(">I", 2**30 // size + 1) + name + struct.pack(">2I", len(name), sum(name)) + magic
        journal = tmp_path / "m" / f"{NAME}-journal"
        journal.write_bytes(header + end)
        for use in (lambda: record(memory), memory.traces.list, lambda: memory.traces.remove(1)):
            with pytest.raises(DamagedError, match=f"delete {journal}"):
                use()
        assert victim.read_text() == "precious"
        journal.unlink()
        assert record(memory).number == 2
