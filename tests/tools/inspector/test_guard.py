"""Who gets an answer from the page's server, and who does not."""

from __future__ import annotations

import socket
import urllib.request
from contextlib import ExitStack, suppress

import pytest
from starlette.testclient import TestClient

import memstore
from memstore.tools import web
from memstore.tools.inspector.app import HEADERS, READ_HEADER, WRITE_HEADER, Inspector
from tests.tools.inspector.conftest import client_of
from tests.tools.inspector.pages import served

PATHS = ["/", "/static/js/main.js", "/api/memory", "/api/live", "/nowhere"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=%FF"])
def test_without_the_token_nothing_is_shown(inspector: Inspector, path: str, query: str) -> None:
    answer = client_of(inspector, token=False).get(path + query)
    assert answer.status_code == 403
    assert "token is missing or wrong" in answer.text
    assert "set-cookie" not in answer.headers


def test_the_link_sets_a_cookie_that_only_this_site_sends_and_that_opens_only_its_files(inspector: Inspector) -> None:
    client = client_of(inspector, token=False)
    answer = client.get("/", params={"token": inspector.token})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert [client.get(path).status_code for path in ("/", "/static/js/main.js", "/api/memory")] == [200, 200, 403]
    assert inspector.token not in cookie
    stolen = client.cookies["memstore-8000"]
    for headers, query in (({READ_HEADER: stolen}, {}), ({WRITE_HEADER: stolen}, {}), ({}, {"token": stolen})):
        assert client.get("/api/memory", headers=headers, params=query).status_code == 403


def test_cookies_of_other_pages_on_this_machine_are_no_trouble(inspector: Inspector) -> None:
    client = client_of(inspector)
    client.cookies.set("memstore-1234", "another")
    client.cookies.set("theme", "dark")
    assert client.get("/static/js/main.js").status_code == 200


@pytest.mark.parametrize(
    "other", ['a={"x": 1}', "a=b c, d", 'a="open', "expires=1; path=/", "[a]=1", "\xe9=1", "=", "a"]
)
def test_cookies_that_break_the_rules_do_not_hide_ours(inspector: Inspector, other: str) -> None:
    ours = client_of(inspector).cookies["memstore-8000"]
    client = client_of(inspector, token=False)
    cookies = f"{other}; memstore-8000={ours}"
    assert client.get("/", headers={b"cookie": cookies.encode("latin-1")}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1"])
def test_a_foreign_host_name_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/api/memory", headers={"host": host})
    assert answer.status_code == 403
    assert "host name" in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:8000", "10.1.2.3:80", "LOCALHOST"])
def test_addresses_and_this_machine_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/memory", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("allowed", [True, False])
def test_every_answer_says_what_a_browser_may_do(inspector: Inspector, path: str, allowed: bool) -> None:
    answer = client_of(inspector, token=allowed).get(path)
    assert HEADERS.items() <= dict(answer.headers).items()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2f..%2fapp.py",
        "/static/%2e%2e%2f%2e%2e%2f%2e%2e%2f%2e%2e%2f%2e%2e%2fetc/passwd",
        "/static//etc/passwd",
        "/static/js",
        "/static/",
    ],
)
def test_only_files_of_the_page_are_served(client: TestClient, path: str) -> None:
    assert client.get(path, follow_redirects=False).status_code == 404


def test_the_page_has_nothing_inline() -> None:
    from memstore.tools.inspector.app import STATIC

    page = (STATIC / "index.html").read_text()
    assert "style=" not in page
    assert "<style" not in page
    assert all("src=" in line for line in page.splitlines() if "<script" in line)
    for file in STATIC.rglob("*.*"):
        text = file.read_text()
        assert "innerHTML" not in text, file
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), file
        assert "https://" not in text, file


def test_nothing_can_be_changed_unless_it_is_allowed(client: TestClient, opened: memstore.Memory) -> None:
    for header in ({}, {WRITE_HEADER: "guessed"}):
        answer = client.post("/api/do/forget", json={"document": opened.document("book").id}, headers=header)
        assert answer.status_code == 403
        assert "--allow-write" in answer.text
    assert client.get("/api/memory").json()["write_token"] is None
    assert len(opened.documents()) == 2


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_refused(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/memory").status_code == 403


def test_a_change_needs_its_own_token_and_this_page(opened: memstore.Memory) -> None:
    client = client_of(Inspector(opened, allow_write=True))
    token = client.get("/api/memory").json()["write_token"]
    origin = {"origin": "http://127.0.0.1:8000"}
    for headers, words in [
        (origin, WRITE_HEADER),
        (origin | {WRITE_HEADER: "wrong"}, WRITE_HEADER),
        ({WRITE_HEADER: token, "origin": "http://evil.example"}, "this page"),
        ({WRITE_HEADER: token, "origin": "null"}, "this page"),
    ]:
        answer = client.post("/api/do/nothing", json={}, headers=headers)
        assert answer.status_code == 403
        assert words in answer.text
    assert client.post("/api/do/nothing", json={}, headers=origin | {WRITE_HEADER: token}).status_code == 400


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 20_000, b'"' + b"x" * 100_000 + b'"', b"\xff", b"[]"])
def test_what_is_no_small_object_is_a_bad_request(opened: memstore.Memory, body: bytes) -> None:
    client = client_of(Inspector(opened, allow_write=True))
    headers = {WRITE_HEADER: client.get("/api/memory").json()["write_token"]}
    answer = client.post("/api/do/forget", content=body, headers=headers)
    assert answer.status_code == 400
    assert "JSON object" in answer.json()["message"]


def test_many_slow_requests_keep_nobody_out_and_end(opened: memstore.Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_SECONDS", 2.0)
    with served(opened) as link, ExitStack() as stack:
        host, port = link.removeprefix("http://").split("/")[0].split(":")
        slow = []
        for _ in range(300):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127")
            slow.append(connection)
        with urllib.request.urlopen(link, timeout=30) as answer:  # noqa: S310 - our own
            assert answer.status == 200
        for connection in slow:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
