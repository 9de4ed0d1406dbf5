"""Memories in Azure's storage, as its emulator speaks it.

Skipped where there is no ``azurite-blob`` on the path: ``npm install azurite`` in a folder, and add its
``node_modules/.bin`` to ``PATH``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

import memstore
from memstore.errors import MemoryInUse, MemstoreError
from tests.memory.helpers import S, append, check_content, make_spec
from tests.memory.test_bucket import BLOCK_BYTES, TOKENS, on
from tests.store.buckets import Way

AZURITE = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and the key that every Azurite has."""
HERE = "zarr+az://states/notes"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(AZURITE is None, reason="azurite-blob is not installed")]


class Azurite:
    """The emulator, with its blobs in a folder. Killed, it loses what it has said to keep: for nothing but the end."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])
        command = [str(AZURITE), "--location", str(folder), "--blobPort", str(self.port), "--skipApiVersionCheck"]
        self._process = subprocess.Popen([*command, "--silent"])
        for _ in range(300):
            with socket.socket() as tried:
                if not tried.connect_ex(("127.0.0.1", self.port)):
                    return
            time.sleep(0.1)
        raise AssertionError("azurite does not start")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def make_container(self, name: str) -> None:
        """A request signed with the key of the account."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06", "Content-Length": "0"}
        signed = "PUT" + 12 * "\n" + "".join(f"{key}:{headers[key]}\n" for key in ("x-ms-date", "x-ms-version"))
        signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        line = http.client.HTTPConnection("127.0.0.1", self.port)
        line.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        assert line.getresponse().status == 201
        line.close()


@pytest.fixture
def azurite(tmp_path: Path) -> Iterator[Azurite]:
    server = Azurite(tmp_path / "blobs")
    server.make_container("states")
    yield server
    server.kill()


@pytest.fixture
def way(azurite: Azurite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Way]:
    """The way to the emulator; shards are of four blocks, and this computer is called a."""
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 4 * BLOCK_BYTES)
    on(monkeypatch, tmp_path / "a")
    found = Way("127.0.0.1", azurite.port)
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", found.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    yield found
    found.shutdown()
    found.server_close()


def test_another_computer_reads_what_was_published(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memstore.open(HERE, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    on(monkeypatch, tmp_path / "b")
    with memstore.open(HERE, mode="r", host_bytes=0) as memory:
        with way.counted() as requests:
            check_content(memory.document("whale"), TOKENS)
        assert any("/blocks/" in path for _, path in requests)
        assert memory.verify() == []
    for place in ("states/other", "nowhere/notes"):
        with pytest.raises(MemstoreError, match="nothing was published there"):
            memstore.open(f"zarr+az://{place}", mode="r")


def test_of_two_writers_with_copies_of_one_tail_one_is_refused(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memstore.open(HERE, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS[: 4 * S])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = memstore.open(HERE)
    on(monkeypatch, tmp_path / "b")
    second = memstore.open(HERE)
    append(first.document("whale"), TOKENS[4 * S :])
    append(second.document("ship"), TOKENS[: 30 * S])
    first.close()
    with pytest.raises(MemoryInUse, match="another writer has published"):
        second.close()
