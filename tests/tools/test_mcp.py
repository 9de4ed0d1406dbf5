"""`memstore mcp`: asked by the official client, over standard input and output and over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

import memstore
from memstore.index.words import words_of
from memstore.tools.app import main
from tests.tools.conftest import Cli

READING = {"recall", "ask", "list"}
WRITING = {"remember", "forget"}
TOKEN = "a-token-that-is-long-enough"  # noqa: S105 - guards nothing


@pytest.fixture
def notes(tmp_path: Path, instruct_folder: Path) -> Path:
    (tmp_path / "ferry.txt").write_text("The last ferry leaves at 19:40. " * 8)
    options = ["--model", str(instruct_folder), "--dtype", "float32", "--block-size", "16"]
    assert main(["read", str(tmp_path / "ferry.txt"), str(tmp_path / "notes.mem"), *options]) == 0
    return tmp_path / "notes.mem"


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    done = await client.call_tool(tool, arguments)
    assert not done.is_error, done.content
    assert done.structured_content is not None
    return done.structured_content.get("result", done.structured_content)


@pytest.mark.timeout(600)
def test_an_agent_remembers_recalls_asks_and_forgets(notes: Path) -> None:
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "memstore", "mcp", str(notes)], env=dict(os.environ)
    )

    async def talk() -> None:
        async with Client(stdio_client(command)) as client:
            tools = {each.name: each for each in (await client.list_tools()).tools}
            assert tools.keys() == READING | WRITING
            assert {name for name, each in tools.items() if each.annotations.read_only_hint} == READING  # type: ignore[union-attr]
            assert tools["forget"].annotations.destructive_hint  # type: ignore[union-attr]
            stored = await call(client, "remember", text="The key of the cottage hangs in the woodshed.")
            assert stored == {"document": "remembered", "new_tokens": 46, "tokens": 46}
            assert (await call(client, "remember", text="Dogs travel free."))["tokens"] == 64
            found = await call(client, "recall", query="Dogs travel free.", most=3)
            assert ("remembered", 3) in {(each["document"], each["block"]) for each in found}
            assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
            answer = await call(client, "ask", question="Where?", documents=["remembered"], max_tokens=2)
            assert {each["document"] for each in answer["sources"]} == {"remembered"}
            assert {*answer["unsupported"]} <= {*words_of(answer["answer"])}
            uri = {each.name: each.uri for each in (await client.list_resources()).resources}["remembered"]
            (content,) = (await client.read_resource(uri)).contents
            assert "woodshed.\n" in content.text  # type: ignore[union-attr]
            with pytest.raises(MCPError, match="no document 'whale'"):
                await client.read_resource(uri.replace("remembered", "whale"))
            refused = await client.call_tool("remember", {"text": "More.", "document": "ferry"})
            assert refused.is_error
            assert "is the document of the file" in refused.content[0].text  # type: ignore[union-attr]
            await call(client, "forget", document="remembered")
            assert [each["document"] for each in await call(client, "list")] == ["ferry"]
            refused = await client.call_tool("forget", {"document": "remembered"})
            assert "no document 'remembered'" in refused.content[0].text  # type: ignore[union-attr]

    anyio.run(talk)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_ends_it_while_it_waits_for_input(notes: Path) -> None:
    command = [sys.executable, "-m", "memstore", "mcp", str(notes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "answers agents" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.stderr.read() == ""


@contextmanager
def serving(*arguments: object) -> Iterator[str]:
    """The command in a process of its own; its url."""
    command = [sys.executable, "-m", "memstore", "mcp", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[0]
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.timeout(600)
def test_over_http_it_answers_to_its_names_and_a_read_only_memory_has_no_tool_that_writes(
    notes: Path, cli: Cli, instruct_folder: Path
) -> None:
    (notes.parent / "token").write_text(f"{TOKEN}\n")
    (notes.parent / "token").chmod(0o600)

    async def talk(url: str) -> None:
        headers = {"authorization": f"Bearer {TOKEN}", "host": "notes.example", "origin": "https://notes.example"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            assert {each.name for each in (await client.list_tools()).tools} == READING
            assert (await client.call_tool("remember", {"text": "More."})).is_error
            other = notes.parent / "cottage.txt"
            other.write_text("The key hangs in the woodshed. " * 8)
            assert main(["read", str(other), str(notes), "--model", str(instruct_folder)]) == 0  # nobody holds its lock
            found = await call(client, "recall", query="Where is the key?", documents=["cottage"])
            assert {each["document"] for each in found} == {"cottage"}

    options = ["--read-only", "--port", 0, "--name", "Notes.example", "--token-file", notes.parent / "token"]
    with serving(notes, *options) as url:
        assert httpx2.post(url, json={}).status_code == 401
        for wrong in ({"host": "other.example"}, {"origin": "https://other.example"}):
            assert httpx2.post(url, json={}, headers={"authorization": f"Bearer {TOKEN}", **wrong}).status_code == 403
        anyio.run(talk, url)
    assert cli("mcp", notes.parent / "nothing.mem", "--read-only").code == 3
    assert cli("mcp", notes, "--host", "0.0.0.0", "--port", 0, "--no-token").code == 2  # noqa: S104 - refused


@pytest.mark.timeout(600)
def test_an_agent_may_forget_a_conversation_but_writes_into_none(notes: Path) -> None:
    with memstore.open(notes) as memory:
        memory.document("ferry").fork("chat/ada")
        memory.put_info("said/ada/0", {"role": "user", "text": "My word is heron."})

    async def talk() -> None:
        command = StdioServerParameters(
            command=sys.executable, args=["-m", "memstore", "mcp", str(notes)], env=dict(os.environ)
        )
        async with Client(stdio_client(command)) as client:
            found = await call(client, "recall", query="The last ferry")
            assert {each["document"] for each in found} == {"ferry"}
            found = await call(client, "recall", query="The last ferry", documents=["chat/ada"])
            assert {each["document"] for each in found} == {"chat/ada"}
            refused = await client.call_tool("remember", {"text": "More.", "document": "chat/ada"})
            assert "is the name of a chat" in refused.content[0].text  # type: ignore[union-attr]
            await call(client, "forget", document="chat/ada")

    anyio.run(talk)
    with memstore.open(notes, mode="r") as memory:
        assert [each.name for each in memory.documents()] == ["ferry"]
        assert memory.infos("said/") == {}


# 770 KB: reading it takes every machine longer than the tests wait.
LONG = "The colour of the room is green, and the ferry leaves at noon. " * 12_000


REMEMBER = {
    "jsonrpc": "2.0",
    "id": 2,
    "method": "tools/call",
    "params": {"name": "remember", "arguments": {"text": LONG, "document": "longer"}},
}


def limited(*arguments: object) -> subprocess.Popen[str]:
    """The command with at most 3 GB of memory."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30)); "
        "from memstore.tools.app import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "mcp", *map(str, arguments), "--port", "0", "--no-token"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def stored(memory: Path, document: str) -> int:
    with memstore.open(memory, mode="r") as opened:
        return sum(len(each) for each in opened.documents() if each.name == document)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_long_requests_take_neither_time_nor_memory_and_a_signal_ends_them(notes: Path) -> None:

    async def talk(url: str) -> None:
        async with Client(streamable_http_client(url)) as client:
            for tool, name in (("recall", "query"), ("ask", "question")):
                begun = time.monotonic()
                result = await client.call_tool(tool, {name: "colour of room " * 69_000})
                assert result.is_error
                assert "characters" in result.content[0].text  # type: ignore[union-attr]
                assert time.monotonic() - begun < 2
            with anyio.move_on_after(3):  # nobody waits for it any more, and what was read stays
                await client.call_tool("remember", {"text": LONG, "document": "long"})
            begun = time.monotonic()
            assert await call(client, "recall", query="When does the ferry leave?")
            assert time.monotonic() - begun < 5
            kept = stored(notes, "long")
            assert 0 < kept < len(LONG)  # a token is a byte
            await anyio.sleep(1)
            assert stored(notes, "long") == kept

    def remember(url: str) -> None:
        with suppress(httpx2.HTTPError):
            headers = {"accept": "application/json, text/event-stream"}
            told.append(httpx2.post(url, json=REMEMBER, headers=headers, timeout=60).json())

    told: list[Any] = []
    with limited(notes) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[0]
        try:
            anyio.run(talk, url)
            asking = threading.Thread(target=remember, args=(url,))
            asking.start()
            while not stored(notes, "longer"):
                time.sleep(0.05)
        finally:
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - begun < 5
        asking.join()
        assert "Traceback" not in process.stderr.read()
    assert "the server is shutting down" in json.dumps(told)


@pytest.mark.timeout(300)
def test_a_signal_ends_a_server_of_standard_input_while_it_remembers(notes: Path) -> None:
    command = [sys.executable, "-m", "memstore", "mcp", str(notes)]
    version = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    lines = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": version},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        REMEMBER,
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write("".join(json.dumps(line) + "\n" for line in lines))
        process.stdin.flush()
        while not stored(notes, "longer"):
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - begun < 5
