"""Many documents are read by several processes of Ray, whatever is killed, into the memory that one would make."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument, MemstoreError, NotFound
from memstore.memory.copy import compare_memories
from memstore.readers import many
from memstore.readers.many import read_many, read_parts
from tests import forks
from tests.models import drt
from tests.models.test_drt_stretches import LONG, check_same, read_alone
from tests.readers.models import tiny, tokens

pytest.importorskip("ray")

SIZES: dict[str, Any] = {"block_size": 16, "window": 32, "sink": 16, "segment": 32}
LONG_TEXTS = {name: tokens(length, seed=length) for name, length in (("a", 3000), ("b", 2500), ("c", 2000))}
TEXTS = {f"text {number}": tokens(150 + 37 * number, seed=number) for number in range(4)}


class Loader:
    """Loads a model, and notes which process has done so."""

    def __init__(self, folder: Path, kind: str | None = None) -> None:
        self._folder, self._kind = folder, kind
        folder.mkdir()

    def __call__(self) -> tuple[Any, None]:
        (self._folder / str(os.getpid())).touch()
        return tiny("llama") if self._kind is None else drt.make(self._kind), None

    def processes(self) -> set[int]:
        return {int(each.name) for each in self._folder.iterdir()}


def check(folder: Path, texts: dict[str, Any]) -> None:
    """Whether the memory holds what reading one text after the other stores."""
    with memstore.attach(tiny("llama"), folder / "alone", **SIZES) as reader:
        for name, ids in texts.items():
            reader.read(ids, name, reuse=False)
    with memstore.open(folder / "m", mode="r") as memory, memstore.open(folder / "alone", mode="r") as alone:
        assert compare_memories(memory, alone).same
        assert memory.verify() == []
    assert not (folder / "m.parts").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_starts")
def test_several_processes_store_what_one_stores_and_only_once_and_only_what_failed_again(tmp_path: Path) -> None:
    load, place = Loader(tmp_path / "processes"), tmp_path / "parts"
    place.write_text("no folder")
    with pytest.raises(MemstoreError, match="4 of 4 documents were not read"):
        read_many(load, TEXTS, tmp_path / "m", parts=place, **SIZES)
    assert len(load.processes()) == 3, "two workers, and this one"
    place.unlink()
    with memstore.attach(tiny("llama"), tmp_path / "m", **SIZES) as reader:
        reader.read(TEXTS["text 0"], "text 0")
        reader.read(TEXTS["text 1"][:64], "text 1")
    read = read_many(load, TEXTS, tmp_path / "m", parts=place, **SIZES)
    assert [(each.document, each.tokens) for each in read] == [(name, len(ids)) for name, ids in TEXTS.items()]
    assert [each.reused_tokens for each in read] == [150, 64, 0, 0]
    assert len(load.processes()) == 5, "two workers more"
    check(tmp_path, TEXTS)
    again = read_many(load, {**TEXTS, "text 1": TEXTS["text 1"][:90]}, tmp_path / "m", **SIZES)
    assert [each.new_tokens for each in again] == [0] * 4
    assert [each.tokens for each in again] == [len(ids) for ids in TEXTS.values()], "also of a text that ends before"
    assert len(load.processes()) == 5, "nobody else was needed"
    with pytest.raises(InvalidArgument, match="'text 2' holds a different text"):
        read_many(load, {"text 2": tokens(100, seed=9)}, tmp_path / "m", **SIZES)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_starts")
def test_a_worker_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    load, texts = Loader(tmp_path / "processes"), {"a": tokens(4000, seed=1), "b": tokens(3000, seed=2)}
    killed: list[int] = []

    def kill() -> None:
        """In the middle of its document."""
        while not any((tmp_path / "m.parts").glob("*/data.mdb")):
            time.sleep(0.01)
        time.sleep(0.2)
        killed.append((load.processes() - {os.getpid()}).pop())
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    read = read_many(load, texts, tmp_path / "m", **SIZES)
    killer.join()
    assert [each.tokens for each in read] == [4000, 3000]
    assert len(load.processes()) == 4, "one was started again"
    check(tmp_path, texts)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_starts")
def test_what_is_left_of_a_part_that_was_copied_goes_with_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends while it removes the part of the last document that is copied."""
    load, texts = Loader(tmp_path / "processes"), {"a": tokens(400, seed=1)}

    def broken_off(part: Path) -> None:
        (part / "data.mdb").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(many, "shutil", SimpleNamespace(rmtree=broken_off))
        with pytest.raises(KeyboardInterrupt):
            read_many(load, texts, tmp_path / "m", **SIZES)
    assert (tmp_path / "m.parts").exists()
    assert [each.new_tokens for each in read_many(load, texts, tmp_path / "m", **SIZES)] == [0]
    check(tmp_path, texts)


def read_long(load: Loader, folder: str) -> None:
    """Be the process that copies."""
    read_many(load, LONG_TEXTS, f"{folder}/m", **SIZES)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_starts")
@pytest.mark.timeout(600)
def test_whoever_is_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """The process that copies, and every other time a worker before it; what is there is always sound."""
    load, rng, held = Loader(tmp_path / "processes"), random.Random(4), 0
    for number in range(2):
        before = load.processes()
        reading = forks.start(read_long, load, str(tmp_path))
        while reading.is_alive() and len(load.processes() - before) < 2:  # itself, and a worker
            time.sleep(0.01)
        time.sleep(2 * rng.random())
        workers = [pid for pid in load.processes() - before if pid != reading.pid]
        with suppress(ProcessLookupError):
            for pid in workers[: number % 2]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(rng.random())
        reading.kill()
        reading.join()
        try:
            memory = memstore.open(tmp_path / "m", mode="r")
        except NotFound:
            assert held == 0, "it was there before"
            continue
        with memory:
            found = {document.name: document.tokens() for document in memory.documents()}
            assert all(torch.equal(ids, LONG_TEXTS[name][: len(ids)].int()) for name, ids in found.items())
            assert memory.verify() == []
            assert sum(map(len, found.values())) >= held
            held = sum(map(len, found.values()))
    read_long(load, str(tmp_path))
    check(tmp_path, LONG_TEXTS)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_starts")
def test_a_long_text_is_read_by_several_processes_and_only_what_failed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, parts = Loader(tmp_path / "processes", "rope"), tmp_path / "parts"
    texts = {"short": drt.tokens(50, seed=1)[0], "long": drt.tokens(2000)[0]}
    read_alone(tmp_path / "alone", "rope", texts)
    addresses: list[str] = []
    address = many._address

    def noted(*arguments: Any) -> str:
        addresses.append(address(*arguments))
        if len(addresses) == 3:  # the second stretch cannot be stored
            parts.mkdir()
            (parts / addresses[-1]).write_text("no folder")
        return addresses[-1]

    monkeypatch.setattr(many, "_address", noted)
    with pytest.raises(MemstoreError, match=r"1 of 2 documents were not read \('long'"):
        read_many(load, texts, tmp_path / "m", parts=parts, stretch=400, **LONG)
    assert len(load.processes()) == 3, "two workers, and this one"
    monkeypatch.undo()
    assert {each.name for each in parts.iterdir()} == set(addresses[2:]), "what came before it was copied"
    (parts / addresses[2]).unlink()
    read = read_many(load, texts, tmp_path / "m", parts=parts, stretch=400, **LONG)
    assert [each.reused_tokens for each in read] == [50, 420]
    assert len(load.processes()) == 5, "two workers more"
    check_same(tmp_path)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    load = Loader(tmp_path / "processes")
    with pytest.raises(InvalidArgument, match="workers must be at least 1"):
        read_many(load, TEXTS, tmp_path / "m", workers=0)
    with pytest.raises(InvalidArgument, match="need a folder: pass"):
        read_many(load, TEXTS, "ram:", **SIZES)
    with pytest.raises(NotFound, match="no model folder"):
        read_many(tmp_path / "nowhere", TEXTS, tmp_path / "m")
    with memstore.attach(tiny("llama"), "ram:", **SIZES) as reader:
        spec = reader.memory.spec
    with (
        memstore.open(tmp_path / "secret", spec=spec, key=lambda: bytes(range(32))) as memory,
        memstore.attach(tiny("llama"), memory, **SIZES) as reader,
        pytest.raises(InvalidArgument, match="an encrypted memory must be read by"),
    ):
        read_parts(reader, load, TEXTS, **SIZES)
    assert not (tmp_path / "secret.parts").exists()
