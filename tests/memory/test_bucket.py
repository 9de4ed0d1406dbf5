"""Memories in a bucket, over the protocol of S3: who sees what, what it costs in requests, and what fails how."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import (
    DamagedError,
    ForeignMemory,
    MemoryInUse,
    MemstoreError,
    NotFound,
    ReadOnlyMemory,
    StoreFull,
    WrongKey,
)
from memstore.memory import Memory
from memstore.memory.urls import Mode
from memstore.store.zarr import published
from memstore.store.zarr import store as zarr_store
from memstore.store.zarr.objects import CLIENT, from_url
from tests import forks
from tests.memory.helpers import D, G, S, append, check_content, in_blocks, make_spec, random_tokens, states
from tests.readers import child
from tests.store.buckets import BUCKET, UNANSWERED, Fault, Way, bucket

TOKENS = random_tokens(41 * S + 1)
HERE, THERE = f"zarr+s3://{BUCKET}/notes", "zarr+s3://nowhere/notes"
BLOCK_BYTES = 2 * 4 * G * S * D


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Way]:
    """The way to an empty bucket; shards are of four blocks, and this computer is called a."""
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 4 * BLOCK_BYTES)
    on(monkeypatch, tmp_path / "a")
    with bucket(monkeypatch) as found:
        yield found


def on(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Be the computer whose disk is ``folder``."""
    patch.setenv("XDG_DATA_HOME", str(folder))


def written(url: str = HERE, tokens: torch.Tensor = TOKENS) -> None:
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), tokens)


def test_another_computer_reads_what_was_published(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memstore.open(HERE, spec=make_spec()) as writer:
        append(writer.document("whale"), TOKENS[: 20 * S])
        writer._shared.store.sync()
        on(monkeypatch, tmp_path / "b")
        with memstore.open(HERE, mode="r") as reader:
            check_content(reader.document("whale"), TOKENS[: 20 * S])
            assert reader.verify() == []
        append(writer.document("whale"), TOKENS[20 * S :])
    with memstore.open(HERE, mode="r") as reader:
        check_content(reader.document("whale"), TOKENS)
        with pytest.raises(ReadOnlyMemory):
            append(reader.document("whale"), TOKENS)
    with pytest.raises(ForeignMemory, match=r"another computer writes.* mode='r'"):
        memstore.open(HERE, spec=make_spec())


class NoLocks:
    """In place of ``fcntl``."""

    LOCK_EX = 2

    @staticmethod
    def flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")


@pytest.mark.parametrize("how", ["cut", "changed", "rotten"])
def test_a_fetched_copy_that_is_damaged_is_fetched_again(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    written()
    on(monkeypatch, tmp_path / "b")
    with memstore.open(HERE, mode="r") as reader:
        check_content(reader.document("whale"), TOKENS)
    (data,) = (tmp_path / "b").rglob("data.mdb")
    sound, times = data.read_bytes(), (data.stat().st_atime_ns, data.stat().st_mtime_ns)
    if how == "cut":
        os.truncate(data, 20_000)
    else:
        data.write_bytes(sound[: 2 * 4096] + bytes(255 - byte for byte in sound[2 * 4096 :]))
    if how == "rotten":
        os.utime(data, ns=times)
    with memstore.open(HERE, mode="r") as reader:
        check_content(reader.document("whale"), TOKENS)
    assert data.read_bytes() == sound


def test_what_a_killed_fetch_left_is_removed_and_a_full_disk_is_named(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    written()
    on(monkeypatch, tmp_path / "b")
    with monkeypatch.context() as patched:
        patched.setattr(published, "_write", full)
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # as if the process had been killed
        with pytest.raises(StoreFull, match="has no room for a copy"):
            memstore.open(HERE, mode="r")
    assert len(list((tmp_path / "b").rglob(".*.part"))) == 1
    with memstore.open(HERE, mode="r") as reader:
        check_content(reader.document("whale"), TOKENS)
    assert list((tmp_path / "b").rglob(".*.part")) == []


@pytest.mark.parametrize("moment", ["listed", "looked up", "assembled"])
def test_a_version_is_fetched_beside_processes_that_fetch_later_ones(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """They remove the earlier versions that this process has listed, or looked pieces up in.

    On a file system without locks, or they would wait.
    """
    monkeypatch.setattr(published, "fcntl", NoLocks)
    monkeypatch.setattr(published, "PIECE_BYTES", 4096)
    monkeypatch.setitem(published.Version.__init__.__kwdefaults__ or {}, "piece_bytes", 4096)
    place, name = {
        "listed": (Path, "glob"), "looked up": (published, "_known_pieces"), "assembled": (Path, "rename"),
    }[moment]  # fmt: skip
    step, reached = getattr(place, name), False

    def late(path: Path, *args: Any) -> Any:
        nonlocal reached
        if reached or "published" not in path.parts:
            return step(path, *args)
        reached = True
        done: Any = None if moment == "assembled" else step(path, *args)
        done = list(done) if moment == "listed" else done
        for _ in range(2):
            fetch_next()
        return step(path, *args) if moment == "assembled" else done

    with memstore.open(HERE, spec=make_spec()) as writer:
        on(monkeypatch, tmp_path / "b")

        def fetch_next() -> None:
            append(writer.document("whale"), TOKENS[:S])
            writer._shared.store.sync()
            with memstore.open(HERE, mode="r") as reader:
                assert len(reader.document("whale"))

        for _ in range(2):
            fetch_next()
        monkeypatch.setattr(place, name, late)
        fetch_next()
    assert reached


def test_what_one_computer_read_another_answers_from_bit_for_bit(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, with folders of their own."""
    forks.run(child.read_sealed, HERE, 600)
    forks.run(child.logits, HERE, str(tmp_path / "a.pt"))
    on(monkeypatch, tmp_path / "b")
    with way.counted() as requests:
        forks.run(child.logits, HERE, str(tmp_path / "b.pt"))
    assert any("/blocks/" in path for _, path in requests), "states should have come from the bucket"
    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert a["lists"] == b["lists"] != []
    assert torch.equal(a["logits"], b["logits"])
    assert torch.equal(a["tokens"], b["tokens"])


def test_the_window_of_all_layers_is_under_way_together(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks.run(child.read_sealed, HERE, 600)
    on(monkeypatch, tmp_path / "b")
    layers, everyone, late = set[str](), threading.Event(), list[str]()

    def wait(method: str, path: str) -> int | None:
        """Answer nobody before somebody has asked for a block of each layer."""
        _, here, place = path.partition("/blocks/")
        if here:
            layers.add(place.split(".")[1])
            if len(layers) == 4:
                everyone.set()
            if not everyone.wait(timeout=20):
                late.append(path)
        return None

    with memstore.open(HERE, mode="r") as memory:
        assert memory.spec.layers == 4
        way.fault = wait
        found = child.answer(memory)
        assert late == []
        way.fault = lambda method, path: None
    with memstore.open(HERE, mode="r") as memory:
        assert torch.equal(found["logits"], child.answer(memory)["logits"])


def test_32_cold_blocks_take_at_most_32_requests_and_neighbours_fewer(way: Way) -> None:
    written()
    with memstore.open(HERE, mode="r", host_bytes=0) as memory:
        view = memory.document("whale").layer(1)
        for blocks, most in ((range(32), 8), (range(0, 40, 4), 10), ([1, 2, 9, 10, 33], 3), (range(0, 40, 2), 20)):
            with way.counted() as requests:
                found = view.gather(list(blocks))
            expected = states(in_blocks(TOKENS)[list(blocks)], 1)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert len(requests) <= most
            assert {method for method, _ in requests} == {"GET"}


def test_requests_of_a_gather_are_under_way_together(way: Way) -> None:
    written()
    with memstore.open(HERE, mode="r", host_bytes=0) as memory:
        view = memory.document("whale").layer(0)
        five = threading.Barrier(5)

        def wait(method: str, path: str) -> int | None:
            five.wait(timeout=20)  # goes on only when five requests are here
            return None

        way.fault = wait
        found = view.gather([0, 4, 8, 12, 16])
    assert torch.equal(found["k"], states(in_blocks(TOKENS)[[0, 4, 8, 12, 16]], 0)["k"])


def test_what_several_layers_will_ask_for_is_under_way_together(way: Way) -> None:
    written()
    with memstore.open(HERE, mode="r") as memory:
        six = threading.Barrier(6)

        def wait(method: str, path: str) -> int | None:
            six.wait(timeout=20)  # goes on only when all six requests are here
            return None

        way.fault = wait
        document = memory.document("whale")
        with way.counted() as requests:
            for layer in range(3):
                document.layer(layer).prefetch([0, 4])
            found = [document.layer(layer).gather([0, 4]) for layer in range(3)]
        assert len(requests) == 6
        assert memory.stats()["tiers"]["host"]["prefetched"] == 6
    for layer, each in enumerate(found):
        assert torch.equal(each["k"], states(in_blocks(TOKENS)[[0, 4]], layer)["k"])


@pytest.mark.parametrize("blocks", [40, 160])
def test_opening_and_listing_take_as_many_requests_whatever_there_is(
    way: Way, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tokens=random_tokens(blocks * S))
    with way.counted() as requests, memstore.open(HERE) as memory:
        assert len(memory.documents()) == 1
        memory.stats()
    assert len(requests) == 1
    on(monkeypatch, tmp_path / "b")
    for most in (3, 2):  # the second time the pieces are there
        with way.counted() as requests, memstore.open(HERE, mode="r") as memory:
            assert len(memory.documents()) == 1
            memory.stats()
        assert len(requests) <= most


def test_of_two_writers_with_copies_of_one_tail_one_is_refused(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tokens=TOKENS[: 4 * S])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = memstore.open(HERE)
    on(monkeypatch, tmp_path / "b")
    second = memstore.open(HERE)
    append(first.document("whale"), TOKENS[4 * S :])
    append(second.document("ship"), random_tokens(30 * S, 7))
    first.close()
    with pytest.raises(MemoryInUse, match="another writer has published"):
        second.close()
    on(monkeypatch, tmp_path / "c")
    with memstore.open(HERE, mode="r") as memory:
        check_content(memory.document("whale"), TOKENS)
        assert [document.name for document in memory.documents()] == ["whale"]
        assert memory.verify() == []
    on(monkeypatch, tmp_path / "b")
    with pytest.raises(MemoryInUse, match="it is an older copy"):
        memstore.open(HERE)


def test_two_computers_that_make_a_memory_at_once_do_not_both_get_it(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(method: str, path: str) -> int | None:
        if method == "PUT":
            way.fault = lambda method, path: None
            on(monkeypatch, tmp_path / "b")
            written()
        return None

    way.fault = meanwhile
    with pytest.raises(ForeignMemory, match="belong to another memory"):
        memstore.open(HERE, spec=make_spec())
    with memstore.open(HERE) as memory:
        check_content(memory.document("whale"), TOKENS)


@pytest.mark.parametrize("after", [0, 3, 7])
def test_a_storage_that_is_gone_in_mid_upload_leaves_the_previous_version(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr("memstore.store.zarr.objects.RETRIES", {"max_retries": 0})
    text = TOKENS[: 12 * S + 1]
    written(tokens=text[: 5 * S])
    puts = 0

    def cut(method: str, path: str) -> int | None:
        nonlocal puts
        puts += method == "PUT"
        return 0 if puts > after else None

    memory = memstore.open(HERE)
    way.fault = cut
    append(memory.document("whale"), text[5 * S :])
    with pytest.raises(MemstoreError, match="was not published"):
        memory.close()
    way.fault = lambda method, path: None
    check_published_late(monkeypatch, tmp_path, text)


def check_published_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: torch.Tensor) -> None:
    """Elsewhere the first five blocks are there, until the writer opens its memory again."""
    on(monkeypatch, tmp_path / "b")
    with memstore.open(HERE, mode="r") as memory:
        check_content(memory.document("whale"), text[: 5 * S])
        assert memory.verify() == []
    on(monkeypatch, tmp_path / "a")
    with memstore.open(HERE) as memory:
        check_content(memory.document("whale"), text)  # what was committed stands
    on(monkeypatch, tmp_path / "b")
    with memstore.open(HERE, mode="r") as memory:
        check_content(memory.document("whale"), text)
        assert memory.verify() == []


def publish(url: str) -> None:
    """Go on with the text, in a process that may be killed at any moment."""
    zarr_store.SHARD_BYTES = 4 * BLOCK_BYTES  # type: ignore[attr-defined]  # this process is for nothing else
    with memstore.open(url) as memory:
        append(memory.document("whale"), TOKENS[5 * S :])


@pytest.mark.parametrize("after", [0, 4, 9])
def test_a_writer_that_is_killed_in_mid_upload_leaves_the_previous_version(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    written(tokens=TOKENS[: 5 * S])
    puts = 0

    def kill(method: str, path: str) -> int | None:
        nonlocal puts
        puts += method == "PUT"
        if puts > after:
            writer.kill()
            return 0
        return None

    way.fault = kill
    writer = forks.start(publish, HERE)
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    way.fault = lambda method, path: None
    check_published_late(monkeypatch, tmp_path, TOKENS)


@pytest.mark.parametrize("retries", [0, 5])
def test_a_manifest_whose_answer_was_lost_is_not_taken_for_another_writers(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    monkeypatch.setattr("memstore.store.zarr.objects.RETRIES", {"max_retries": retries})
    written(tokens=TOKENS[: 5 * S])
    memory = memstore.open(HERE)
    append(memory.document("whale"), TOKENS[5 * S : 9 * S])
    way.fault = _once_unanswered(way)
    if retries:  # it is the second try that meets what the first one put
        memory._shared.store.sync()
    else:
        with pytest.raises(MemstoreError, match="was not published"):
            memory._shared.store.sync()
    append(memory.document("whale"), TOKENS[9 * S :])
    memory.close()
    with memstore.open(HERE) as memory:
        check_content(memory.document("whale"), TOKENS)
    on(monkeypatch, tmp_path / "b")
    with memstore.open(HERE, mode="r") as memory:
        check_content(memory.document("whale"), TOKENS)


def test_a_place_whose_claim_was_not_answered_is_this_memorys(way: Way) -> None:
    way.fault = _once_unanswered(way)
    written()
    with memstore.open(HERE) as memory:
        check_content(memory.document("whale"), TOKENS)


def _once_unanswered(way: Way) -> Fault:
    """The answer to the next put of a manifest is lost."""

    def once(method: str, path: str) -> int | None:
        if method != "PUT" or "manifest.json" not in path:
            return None
        way.fault = lambda method, path: None
        return UNANSWERED

    return once


def test_throttling_and_cut_lines_are_tried_again(way: Way) -> None:
    seen: dict[str, int] = {}

    def sometimes(method: str, path: str) -> int | None:
        seen[method + path] = seen.get(method + path, 0) + 1
        return (
            (503, 0, None)[min(seen[method + path], 3) - 1] if method == "GET" else (503, None)[seen[method + path] > 1]
        )

    way.fault, text = sometimes, TOKENS[: 9 * S]
    written(tokens=text)
    seen.clear()
    with memstore.open(HERE, host_bytes=0) as memory:
        check_content(memory.document("whale"), text)


def test_what_is_not_answered_in_time_is_asked_again(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENT, "timeout", timedelta(seconds=0.5))
    seen: set[str] = set()

    def slow(method: str, path: str) -> int | None:
        met = method == "POST" or "/blocks/" in path or "manifest" in path
        if met and method + path not in seen and sum(each.startswith(method) for each in seen) < 2:
            seen.add(method + path)
            time.sleep(1.5)
            return 0 if method == "POST" else None  # of what is to be deleted the server has not heard
        return None

    way.fault = slow
    text = TOKENS[: 5 * S]
    written(tokens=text)
    with memstore.open(HERE, host_bytes=0) as memory:
        check_content(memory.document("whale"), text)
        memory.forget("whale")
        memory.compact()
    assert len(list(from_url(f"s3://{BUCKET}/notes").names("tail"))) == 1, "older pieces should be gone"
    assert {each[:3] for each in seen} == {"GET", "PUT", "POS"}


@pytest.mark.parametrize("mode", ["r", "a"])
def test_keys_that_are_not_good_are_said_in_one_line(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    written()
    on(monkeypatch, tmp_path / "b")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    spec = None if mode == "r" else make_spec()
    with pytest.raises(MemstoreError, match=r"InvalidAccessKeyId.*Check the address") as told:
        memstore.open(HERE, mode=mode, spec=spec)
    assert "\n" not in str(told.value)
    assert "secret" not in str(told.value)


def test_what_is_wrong_with_a_place_is_said_in_one_line(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written()
    on(monkeypatch, tmp_path / "b")
    for url, what in ((THERE, "NoSuchBucket"), (f"zarr+s3://{BUCKET}/other", "nothing was published there")):
        with pytest.raises(MemstoreError, match=what) as caught:
            memstore.open(url, mode="r")
        said = str(caught.value)
        assert "\n" not in said
        assert "secret" not in said
        assert url.partition("?")[0] in said
    with pytest.raises(MemstoreError, match="NoSuchBucket"):
        memstore.open(THERE, spec=make_spec())
    with pytest.raises(NotFound):
        memstore.open(f"zarr+s3://{BUCKET}/other", mode="r")


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "gone"])
def test_what_is_damaged_in_the_bucket_is_named(way: Way, damage: str) -> None:
    written()
    objects = from_url(f"s3://{BUCKET}/notes")
    name = min(each for each in objects.names("blocks") if "/c." in each)  # the first blocks of layer 0
    stored = objects.get(name)
    assert stored is not None
    content = bytearray(stored.content)
    content[BLOCK_BYTES // 2] ^= 1
    objects.delete(name)
    if damage != "gone":
        objects.put(name, [bytes(content) if "bit" in damage else stored.content[: 2 * BLOCK_BYTES]])
    with memstore.open(HERE, mode="r", host_bytes=0) as memory:
        first = 2 if damage == "cut short" else 0
        with pytest.raises(DamagedError, match=f"document 'whale', layer 0, block {first} is damaged or lost"):
            memory.document("whale").layer(0).gather(range(4))
        assert memory.verify() != []
        assert len(memory.document("whale").layer(1).gather(range(4))["k"]) == 4, "the others can be read"


def test_forgotten_blocks_leave_the_bucket(way: Way, tmp_path: Path) -> None:
    written()
    with memstore.open(HERE) as memory:
        append(memory.document("ship"), TOKENS[:S])
        memory.forget("whale")
        memory.compact()
        objects = memory._shared.store._objects  # type: ignore[attr-defined]
        assert [name for name in objects.names("blocks") if "/c." in name] == []
        (piece,) = objects.names("tail")
        assert TOKENS[:S].int().numpy().tobytes() in objects.get(piece).content
        assert TOKENS[S : 2 * S].int().numpy().tobytes() not in objects.get(piece).content


def test_what_a_killed_process_left_in_the_bucket_is_deleted(way: Way) -> None:
    written()
    with memstore.open(HERE) as memory:
        objects = memory._shared.store._objects  # type: ignore[attr-defined]
        before = sorted(objects.names("blocks"))
    memory = memstore.open(HERE)
    objects = memory._shared.store._objects  # type: ignore[attr-defined]
    objects.put("blocks/1.0.1/0/c.99.0.0.0.0", [b"left"])
    objects.put(f"tail/{'0' * 32}", [b"left"])
    killed(memory)
    with memstore.open(HERE) as memory:
        memory.put_info("plan", {})
        objects = memory._shared.store._objects  # type: ignore[attr-defined]
        assert sorted(objects.names("blocks")) == before
        assert f"tail/{'0' * 32}" not in set(objects.names("tail"))


def test_what_others_read_is_not_deleted_before_they_can_read_what_comes_after(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes on after a process that was killed may be killed too."""
    monkeypatch.setattr("memstore.store.zarr.objects.RETRIES", {"max_retries": 0})
    written()
    memory = memstore.open(HERE)
    memory.forget("whale")
    killed(memory)
    way.fault = lambda method, path: 0 if method == "PUT" else None
    killed(memstore.open(HERE))
    way.fault = lambda method, path: None
    on(monkeypatch, tmp_path / "b")
    with memstore.open(HERE, mode="r", host_bytes=0) as reader:
        check_content(reader.document("whale"), TOKENS)
        assert reader.verify() == []
    on(monkeypatch, tmp_path / "a")
    with memstore.open(HERE) as memory:
        memory.put_info("plan", {})
        assert not any("/c." in name for name in from_url(f"s3://{BUCKET}/notes").names("blocks"))


@pytest.mark.parametrize("what", ["list", "delete"])
def test_what_the_storage_would_not_list_or_delete_goes_with_a_later_write(
    way: Way, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("memstore.store.zarr.objects.RETRIES", {"max_retries": 0})
    written()
    memory = memstore.open(HERE)
    memory.forget("whale")
    if what == "list":  # which is only done after a process that was killed
        killed(memory)
    done: list[str] = []

    def refuse(method: str, path: str) -> int | None:
        done.extend(["delete"] * (method == "POST"))
        shards = done != ["delete"]  # pieces of the tail go first, in one request
        return 503 if what in path and (shards or what == "list") else None

    way.fault = refuse
    if what == "list":
        memory = memstore.open(HERE)
        memory.put_info("plan", {})
    memory.close()
    way.fault = lambda method, path: None
    objects = from_url(f"s3://{BUCKET}/notes")
    assert any("/c." in name for name in objects.names("blocks")), "nothing can have gone yet"
    with memstore.open(HERE) as memory:
        memory.put_info("plan", {"later": True})
    assert not any("/c." in name for name in objects.names("blocks"))


def killed(memory: Memory) -> None:
    """End a memory as the end of its process does: nothing is published or noted."""
    memory._shared.blocks.close()
    memory._shared.store._close()  # type: ignore[attr-defined]


def test_a_copy_into_a_bucket_goes_on_where_it_was_cut_off(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.memory.copy.TRANSACTION_BYTES", 8 * 3 * BLOCK_BYTES)
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    with monkeypatch.context() as patched:
        commits = 0
        commit = memstore.memory.append.Append.compose

        def cut(*arguments: object) -> object:
            nonlocal commits
            commits += 1
            if commits == 3:
                raise KeyboardInterrupt
            return commit(*arguments)  # type: ignore[arg-type]

        patched.setattr("memstore.memory.append.Append.compose", cut)
        with pytest.raises(KeyboardInterrupt):
            memstore.copy(tmp_path / "m", HERE)
    assert memstore.copy(tmp_path / "m", HERE).copied_tokens == len(TOKENS) - 16 * S
    on(monkeypatch, tmp_path / "b")
    memstore.copy(HERE, tmp_path / "back")
    with memstore.open(tmp_path / "back") as memory:
        check_content(memory.document("whale"), TOKENS)


def test_an_encrypted_memory_is_read_elsewhere_with_its_key_and_its_file_of_keys(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the bucket opens it: that file is not published."""
    key = bytes(range(32))
    with memstore.open(HERE, spec=make_spec(), key=lambda: key) as memory:
        append(memory.document("a-secret-name"), TOKENS)
    objects = from_url(f"s3://{BUCKET}/notes")
    names = [name for folder in ("blocks", "tail") for name in objects.names(folder)]
    contents = [stored.content for stored in objects.get_all([*names, "manifest.json"]) if stored is not None]
    assert len(contents) > 30
    some = states(in_blocks(TOKENS), 0)["k"][1].contiguous().numpy().tobytes()
    for pattern in (b"a-secret-name", TOKENS[:S].int().numpy().tobytes(), some, key):
        assert not any(pattern in content for content in contents)
    (tail,) = (tmp_path / "a" / "memstore" / "tails").iterdir()
    on(monkeypatch, tmp_path / "b")
    with pytest.raises(DamagedError, match=r"its file keys is missing.* from the folder that writes there"):
        memstore.open(HERE, mode="r", key=lambda: key)
    there = tmp_path / "b" / "memstore" / "tails" / tail.name
    shutil.copy(tail / "keys", there / "keys")
    with pytest.raises(WrongKey):
        memstore.open(HERE, mode="r", key=lambda: bytes(32))
    with memstore.open(HERE, mode="r", key=lambda: key) as memory:
        check_content(memory.document("a-secret-name"), TOKENS)
