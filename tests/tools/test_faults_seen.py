"""Every fault as a user meets it: what happened, what is safe, and what to type next, in three lines at most."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import memstore
from benchmarks.torture.processes import run
from memstore.memory.entry import HEADER
from memstore.store import Batch, LmdbStore, Record
from memstore.store.lmdb.environment import WriterLock
from memstore.tools.app import main
from tests import forks
from tests.faults.lmdb_pages import by_kind
from tests.tools.conftest import Cli, Outcome, append, tiny_spec
from tests.tools.test_failures import flip
from tests.tools.test_read_ask import wait_for_tokens

READING = (["ls"], ["show", "whale", "1"], ["stats"])
WRITING = (["forget", "ship"], ["pin", "ship"], ["limit", "--max-bytes", "1GB"], ["compact"])
NOBODY = 65534  # the number of a user without rights


def fill(url: str) -> dict[str, bytes]:
    """Make a memory; values of it as they are stored."""
    torch.manual_seed(0)
    with memstore.open(url, spec=tiny_spec()) as memory:
        append(memory.document("whale"), 21)
        append(memory.document("ship"), 4)
        view = memory.document("whale").layer(1)
        return {
            "states": view.gather([1])["k"].numpy().tobytes(),
            "tokens": torch.arange(4, 8, dtype=torch.int32).numpy().tobytes(),
            "landmarks": view.landmarks(range(1, 2)).numpy().tobytes(),
            "documents": b'"name": "whale"',
            "header": b'"blocks_per_run"',
        }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    path = tmp_path_factory.mktemp("seen") / "whole"
    return path, fill(str(path))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """The same in Zarr, with two blocks in a shard."""
    path = tmp_path_factory.mktemp("seen") / "sealed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memstore.store.zarr.store.SHARD_BYTES", 2 * 4 * 2 * 4 * 8)
        return path, fill(f"zarr:{path}")


@pytest.fixture
def notes(whole: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Path:
    shutil.copytree(whole[0], tmp_path / "notes")
    return tmp_path / "notes"


@pytest.fixture
def archive(sealed: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Path:
    shutil.copytree(sealed[0], tmp_path / "archive")
    return tmp_path / "archive"


def call(cli: Cli, memory: object, verb: list[str]) -> Outcome:
    """Run a verb on a memory. Whatever comes of it is short and no traceback."""
    done = cli(verb[0], memory, *verb[1:])
    lines = [line for line in done.err.splitlines() if not line.startswith("copying")]
    assert "Traceback" not in done.err + done.out, done
    assert "bug in memstore" not in done.err, done
    assert len(lines) <= 3, done
    assert all(len(line) < 400 for line in lines), done
    assert done.code or not lines, done
    return done


def typed(done: Outcome) -> list[list[str]]:
    """The commands that an outcome tells to type, without the word memstore."""
    verbs = "verify|repair|compact|copy|forget|limit|ls"
    found = re.findall(rf"memstore ((?:{verbs}) .*?)(?=;|$)", done.out + done.err, re.MULTILINE)
    return [shlex.split(command) for command in found]


def follow(cli: Cli, done: Outcome, saved: Path) -> Outcome:
    """Type what a user is told to type, until nothing more is told; the last outcome."""
    for _ in range(4):
        commands = [[str(saved) if word == "NEW" else word for word in command] for command in typed(done)]
        if not commands:
            break
        done = cli(*commands[-1])
        assert "Traceback" not in done.err + done.out
    return done


@pytest.mark.parametrize("what", ["states", "tokens", "landmarks", "documents"])
def test_a_flipped_bit_in_a_value(
    cli: Cli, whole: tuple[Path, dict[str, bytes]], notes: Path, tmp_path: Path, what: str
) -> None:
    flip(notes / "data.mdb", whole[1][what])
    outcomes = [call(cli, notes, verb) for verb in READING]
    failed = [done for done in outcomes if done.code]
    assert {done.code for done in failed} == {4}
    assert len(failed) == (3 if what == "documents" else 1)
    for done in failed:
        assert "is damaged" in done.err
        assert "it was not used" in done.err
        assert ["verify", str(notes)] in typed(done)
        assert ["repair", str(notes)] in typed(done)
    copied = call(cli, notes, ["copy", str(tmp_path / "copy")])
    assert (copied.code, ["repair", str(notes)] in typed(copied)) == (4, True)
    verified = call(cli, notes, ["verify"])
    assert (verified.code, typed(verified)) == (4, [["repair", str(notes)]])
    last = follow(cli, verified, tmp_path / "saved")
    assert (last.code, "the memory is intact" in last.out) == (0, True)
    assert call(cli, notes, ["verify"]).code == 0
    assert call(cli, notes, ["ls"]).code == 0


def test_what_a_repair_lost_is_read_again(cli: Cli, model_folder: Path, tmp_path: Path) -> None:
    text, notes = tmp_path / "text.txt", tmp_path / "notes"
    text.write_text("A text that is long enough for several blocks. " * 20)
    assert cli("read", text, notes, "--model", model_folder).code == 0
    with memstore.open(notes, mode="r") as memory:
        (document,) = memory.documents()
        tokens, states = document.tokens().tolist(), document.layer(0).gather([2])["k"]
    flip(notes / "data.mdb", states.view(torch.uint8).numpy().tobytes())
    assert cli("repair", notes, "--yes").code == 0
    with memstore.open(notes, mode="r") as memory:
        assert len(memory.document(document.name)) < len(tokens)
    assert cli("read", text, notes).code == 0
    with memstore.open(notes, mode="r") as memory:
        assert memory.document(document.name).tokens().tolist() == tokens
    assert cli("verify", notes).code == 0


def test_blocks_behind_the_damage_can_be_kept(cli: Cli, whole: tuple[Path, dict[str, bytes]], notes: Path) -> None:
    flip(notes / "data.mdb", whole[1]["states"])
    assert "--drop-blocks" in call(cli, notes, ["repair"]).out
    done = call(cli, notes, ["repair", "--drop-blocks", "--yes"])
    assert (done.code, "continues without 1 damaged blocks: 4 tokens are lost, 17 stay" in done.out) == (0, True)
    verified = call(cli, notes, ["verify"])
    assert (verified.code, "document 'whale' lacks blocks that a repair removed: 1" in verified.out) == (0, True)
    shown = call(cli, notes, ["show", "whale", "1"])
    assert (shown.code, "a repair removed it" in shown.err) == (3, True)
    assert call(cli, notes, ["show", "whale", "2"]).code == 0


def test_a_header_that_is_lost(cli: Cli, whole: tuple[Path, dict[str, bytes]], notes: Path) -> None:
    flip(notes / "data.mdb", whole[1]["header"])
    for verb in (*READING, *WRITING, ["verify"], ["repair"]):
        done = call(cli, notes, verb)
        assert (done.code, "Restore it from a copy" in done.err + done.out, typed(done)) == (4, True, [])


def test_a_damaged_page_of_the_tree(cli: Cli, notes: Path, tmp_path: Path) -> None:
    page = by_kind(notes / "data.mdb")["leaf"][0].start
    data = bytearray((notes / "data.mdb").read_bytes())
    data[page + 11] ^= 0x40
    (notes / "data.mdb").write_bytes(data)
    for verb in (*READING, *WRITING, ["repair"], ["copy", str(tmp_path / "copy")]):
        done = call(cli, notes, verb)
        assert (done.code, "Nothing was read from it" in done.err) == (4, True)
        assert typed(done) == [["repair", str(notes), "--to", "NEW"]]
    verified = call(cli, notes, ["verify"])
    assert typed(verified) == [["repair", str(notes), "--to", "NEW"]]
    last = follow(cli, verified, tmp_path / "saved")
    assert "is now an intact memory" in last.out
    assert (notes / "data.mdb").read_bytes() == bytes(data)
    assert call(cli, tmp_path / "saved", ["verify"]).code == 0


@pytest.mark.parametrize("length", [0, 100])
def test_a_file_that_lost_its_end(cli: Cli, notes: Path, length: int) -> None:
    os.truncate(notes / "data.mdb", length)
    for verb in (*READING, *WRITING, ["verify"], ["repair"]):
        done = call(cli, notes, verb)
        assert (done.code, "was truncated" in done.err, "restore it from a copy" in done.err) == (4, True, True)


@pytest.mark.parametrize("kind", ["empty", "other", "unfinished"])
def test_a_folder_that_is_no_memory(cli: Cli, notes: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    folder.mkdir()
    if kind == "other":
        (folder / "thesis.txt").write_text("Call me Ishmael.")
    if kind == "unfinished":
        shutil.copy(notes / "lock.mdb", folder)
    for verb in (*READING, *WRITING, ["verify"], ["repair"], ["copy", str(tmp_path / "copy")]):
        done = call(cli, folder, verb)
        assert (done.code, done.err.count(str(folder))) == (3, 1)
    assert (folder / "thesis.txt").exists() == (kind == "other")


def test_a_memory_of_a_newer_format(cli: Cli, notes: Path) -> None:
    store, batch = LmdbStore.open(notes), Batch()
    records = store.get(HEADER)
    assert records is not None
    batch.put(HEADER, Record.from_json({**records[0].to_json(), "format": 2, "library": "9.0"}))
    store.write(batch)
    store.close()
    before = (notes / "data.mdb").read_bytes()
    for verb in (*READING, *WRITING, ["repair"], ["verify"]):
        done = call(cli, notes, verb)
        assert (done.code, "made by memstore 9.0" in done.err, "Upgrade memstore" in done.err) == (5, True, True)
    assert (notes / "data.mdb").read_bytes() == before


def test_a_memory_that_somebody_writes(cli: Cli, notes: Path) -> None:
    lock = WriterLock(notes)
    try:
        for verb in (*WRITING, ["repair"]):
            done = call(cli, notes, verb)
            assert (done.code, f"process {os.getpid()} (this one)" in done.err) == (5, True)
            assert "close it there first" in done.err
            assert "Nothing was changed" in done.err
            assert call(cli, notes, typed(done)[0][:1]).code == 0
        assert [call(cli, notes, verb).code for verb in (*READING, ["verify"])] == [0] * 4
    finally:
        lock.release()


@pytest.mark.parametrize("store", ["lmdb", "zarr"])
def test_a_folder_that_may_not_be_written(cli: Cli, notes: Path, archive: Path, store: str) -> None:
    folder, url = (notes, str(notes)) if store == "lmdb" else (archive, f"zarr:{archive}")
    if not os.getuid():
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        for path in folder.parents[:4]:
            path.chmod(path.stat().st_mode | 0o755)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def without_rights(say: Callable[[str], None]) -> None:
        if not os.getuid():
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        for verb in (*WRITING, ["repair"]):
            done = call(cli, url, verb)
            assert (done.code, "cannot be written" in done.err) == (5, True), done
            assert "Nothing was changed" in done.err
            assert typed(done) == [["copy", url, "NEW"]]
        assert [call(cli, url, verb).code for verb in READING] == [0, 0, 0]
        say("all is said")

    ending = run(without_rights)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert ending.lines == ["all is said"]


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """No file can grow beyond ``nbytes``, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(cli: Cli, notes: Path, tmp_path: Path) -> None:
    with at_most(40_000):
        done = call(cli, notes, ["copy", str(tmp_path / "copy")])
    assert done.code == 5, done
    assert "no room" in done.err
    assert "Free some space" in done.err
    assert call(cli, notes, ["copy", str(tmp_path / "copy")]).code == 0
    assert call(cli, tmp_path / "copy", ["verify"]).code == 0


@pytest.mark.parametrize("store", ["lmdb", "zarr"])
def test_a_disk_that_is_full_in_a_memory_with_documents(cli: Cli, notes: Path, archive: Path, store: str) -> None:
    folder, url = (notes, str(notes)) if store == "lmdb" else (archive / "tail", f"zarr:{archive}")
    with at_most((folder / "data.mdb").stat().st_size):
        done = call(cli, url, ["fork", "whale", "minke"])
        assert (done.code, "earlier commits are intact" in done.err) == (5, True), done
        forget, compact = typed(done)
        assert (forget, compact) == (["forget", url, "DOCUMENT"], ["compact", url])
        assert [each["document"] for each in cli("ls", url, "--json").json["documents"]] == ["whale", "ship"]
    assert call(cli, url, ["forget", "ship"]).code == 0
    assert call(cli, url, ["compact"]).code == 0
    assert call(cli, url, ["fork", "whale", "minke"]).code == 0
    assert call(cli, url, ["verify"]).code == 0


def test_a_limit_without_room(cli: Cli, notes: Path, tmp_path: Path) -> None:
    assert cli("export", notes, tmp_path / "out").code == 0
    assert call(cli, notes, ["forget", "whale"]).code == 0
    assert call(cli, notes, ["limit", "--max-bytes", "17KB"]).code == 0
    done = call(cli, tmp_path / "out", ["import", str(notes)])
    assert (done.code, "limit" in done.err, "earlier commits are intact" in done.err) == (5, True, True), done
    assert typed(done) == [["forget", str(notes), "DOCUMENT"], ["limit", str(notes), "--max-bytes", "MORE"]]
    assert cli("show", notes, "ship", 0).code == 0


@pytest.mark.parametrize("store", ["lmdb", pytest.param("zarr", marks=pytest.mark.slow)])
def test_a_process_that_was_killed(cli: Cli, model_folder: Path, tmp_path: Path, store: str) -> None:
    """What it had committed is there, the lock is free, and the same command goes on."""
    text, folder = tmp_path / "log.txt", tmp_path / "log.mem"
    text.write_text("".join(f"Line {i} of the log tells of nothing new. " for i in range(500)))
    url = str(folder) if store == "lmdb" else f"zarr:{folder}"
    reading = ["read", str(text), url, "--model", str(model_folder), "--dtype", "float32"]
    process = forks.start(main, reading)
    wait_for_tokens(url)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (document,) = call(cli, url, ["ls", "--json"]).json["documents"]
    assert 0 < document["tokens"] < len(text.read_text())
    verified = call(cli, url, ["verify"])
    assert (verified.code, verified.out.startswith("clean: 1 document")) == (0, True), verified
    done = cli(*reading, "--json").json
    assert (done["reused_tokens"], done["tokens"]) == (document["tokens"], len(text.read_text()))


def shards(archive: Path) -> list[Path]:
    return sorted(path for path in (archive / "blocks").rglob("*") if path.is_file() and path.name != "zarr.json")


@pytest.mark.parametrize("how", ["missing", "shorter", "flipped"])
def test_a_zarr_shard_that_is_damaged(cli: Cli, archive: Path, tmp_path: Path, how: str) -> None:
    for shard in shards(archive):
        if how == "missing":
            shard.unlink()
        elif how == "shorter":
            os.truncate(shard, 10)
        else:
            data = bytearray(shard.read_bytes())
            data[100] ^= 1
            shard.write_bytes(data)
    url = f"zarr:{archive}"
    assert [call(cli, url, verb).code for verb in (["ls"], ["stats"])] == [0, 0]
    shown = call(cli, url, ["show", "whale", "0"])
    assert (shown.code, ["repair", url] in typed(shown)) == (4, True)
    verified = call(cli, url, ["verify"])
    assert (verified.code, typed(verified)) == (4, [["repair", url]])
    last = follow(cli, verified, tmp_path / "saved")
    assert (last.code, "the memory is intact" in last.out) == (0, True)
    assert call(cli, url, ["verify"]).code == 0


@pytest.mark.parametrize("what", ["manifest", "tree", "empty"])
def test_a_zarr_tail_that_is_damaged(cli: Cli, archive: Path, tmp_path: Path, what: str) -> None:
    tail, url = archive / "tail" / "data.mdb", f"zarr:{archive}"
    data = bytearray(tail.read_bytes())
    if what == "manifest":
        place = data.index(b'"shard_blocks"')
        while place >= 0:
            data[place] ^= 1
            place = data.find(b'"shard_blocks"')
    elif what == "tree":
        data[by_kind(tail)["leaf"][0].start + 11] ^= 0x40
    tail.write_bytes(b"" if what == "empty" else data)
    outcomes = [call(cli, url, verb) for verb in (["show", "whale", "0"], ["verify"])]
    assert [done.code for done in outcomes] == [4, 4]
    for done in outcomes:
        assert typed(done) or "restore it from a copy" in done.err
    if what == "tree":
        assert "is now an intact memory" in follow(cli, outcomes[1], tmp_path / "saved").out
        assert call(cli, tmp_path / "saved", ["verify"]).code == 0


def test_damage_in_object_storage_is_told_with_its_url(tmp_path: Path, cli: Cli) -> None:
    url = f"zarr+file://{tmp_path}/bucket?tail={tmp_path}/tail"
    documents = fill(url)["documents"]
    flip(tmp_path / "tail" / "tail" / "data.mdb", documents)
    outcome = cli("ls", url)
    assert outcome.code == 4
    assert f"memstore repair {shlex.quote(url)}" in outcome.err
