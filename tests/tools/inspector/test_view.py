"""`memstore view`: how it starts and how it ends. What its page shows is tested beside this file."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import webbrowser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.tools import web
from memstore.tools.inspector import app
from tests.tools.conftest import Cli

PATIENCE = 60


def url_to_path(url: str) -> str:
    """Where the file is that a ``file:`` link names."""
    return urllib.request.url2pathname(url.removeprefix("file://"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(memory: Path, number: int) -> None:
    command = [sys.executable, "-m", "memstore.tools.app", "view", str(memory), "--no-open", "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        link, hint = (child.stderr.readline() for _ in range(2))  # type: ignore[union-attr]
        link = link.strip()
        with urllib.request.urlopen(link, timeout=PATIENCE) as answer:  # noqa: S310 - our own
            assert answer.status == 200
            assert b"memstore" in answer.read()
        child.send_signal(number)
        out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert (hint, err) == ("Ctrl-C ends it.\n", "")
    assert json.loads(out) == {"memory": str(memory), "url": link.partition("?")[0]}


def test_it_can_serve_in_a_thread(memory: Path) -> None:
    links: list[str] = []

    def started(url: str) -> None:
        links.append(url)
        raise KeyboardInterrupt

    with memstore.open(memory, mode="r") as opened, ThreadPoolExecutor(1) as pool:
        assert [pool.submit(app.serve, opened, started=started).result()] == links


def test_a_memory_that_is_closed_before_its_tokenizer_is_there_ends_in_peace(memory: Path) -> None:
    with memstore.open(memory, mode="r") as opened:
        inspector = app.Inspector(opened)
    inspector.warm()
    for thread in threading.enumerate():
        if thread.name == "tokenizer":
            thread.join()  # what it raised would fail this test


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serve nothing; the links that a browser was to open."""
    opened: list[str] = []

    def serve(_: memstore.Memory, *, started: Callable[[str], None], **__: Any) -> str:
        started("http://127.0.0.1:1/?token=x")
        return "http://127.0.0.1:1/?token=x"

    monkeypatch.setattr(app, "serve", serve)

    def browse(url: str) -> None:
        page = Path(url_to_path(url))
        assert page.stat().st_mode & 0o777 == 0o600
        assert page.parent.stat().st_mode & 0o777 == 0o700
        opened.extend([url, page.read_text()])

    monkeypatch.setattr(webbrowser, "open", browse)
    monkeypatch.setenv("DISPLAY", ":0")
    return opened


def test_it_opens_the_browser_and_says_where_it_is(cli: Cli, memory: Path, serving: list[str]) -> None:
    done = cli("view", memory)
    assert (done.code, done.out) == (0, "")
    assert done.err == "http://127.0.0.1:1/?token=x\nCtrl-C ends it.\n"
    url, page = serving
    assert "token" not in url  # other users can read the command line of the browser
    assert 'content="0; url=http://127.0.0.1:1/?token=x"' in page
    assert not Path(url_to_path(url)).exists()  # it was for once


def test_it_opens_no_browser_where_none_is_wanted_or_there_is_no_screen(
    cli: Cli, memory: Path, serving: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("view", memory, "--no-open").code == 0
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cli("view", memory).code == 0
    assert serving == []


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])  # noqa: S104 - nothing is bound
def test_a_host_that_others_can_reach_is_warned_of(cli: Cli, memory: Path, serving: list[str], host: str) -> None:
    done = cli("view", memory, "--no-open", "--host", host)
    assert f"everyone who can reach {host}" in done.err


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_is_not_warned_of(cli: Cli, memory: Path, serving: list[str], host: str) -> None:
    assert "everybody" not in cli("view", memory, "--no-open", "--host", host).err


def test_a_port_that_is_in_use(cli: Cli, memory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli("view", memory, "--no-open", "--port", port)
    assert done.code == 2
    assert done.err == f"memstore: port {port} is in use. Choose another with --port; 0 is any free one.\n"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_here(cli: Cli, memory: Path, host: str) -> None:
    done = cli("view", memory, "--no-open", "--host", host)
    assert done.code == 2
    assert f"--host {host}" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none(cli: Cli, memory: Path, port: str) -> None:
    assert cli("view", memory, "--no-open", "--port", port).code == 2


def test_a_memory_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    done = cli("view", tmp_path / "none.mem", "--no-open")
    assert done.code == 3
    assert len(done.err.splitlines()) == 1


def test_without_the_packages_it_says_what_to_install(cli: Cli, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "find_spec", lambda name: None)
    done = cli("view", memory, "--no-open")
    assert done.code == 3
    assert "pip install 'torch-memstore[web]'" in done.err
