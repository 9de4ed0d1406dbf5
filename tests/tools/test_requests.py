"""Requests as clients really send them: histories with tools, a chat's user interface, and every field of the API."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from starlette.datastructures import Headers

from memstore.errors import InvalidArgument
from memstore.paths import user_folder
from memstore.tools.app import main
from memstore.tools.endpoint.request import HARMLESS, HONOURED, MOST_STOPS, ONLY, Ask, Refusal
from memstore.tools.serve import token_for
from memstore.tools.web import host_is_known, names_of, without_paths
from tests.tools.conftest import Cli
from tests.tools.test_serve import ask, chat, serving

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CALL = {"id": "call_1", "type": "function", "function": {"name": "ferries", "arguments": '{"port": "Oban"}'}}
TOOLS = [{"type": "function", "function": {"name": "ferries", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory, instruct_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("ferry")
    (folder / "ferry.txt").write_text("The last ferry leaves at 19:40. " * 8)
    options = ["--model", str(instruct_folder), "--dtype", "float32", "--block-size", "16"]
    assert main(["read", str(folder / "ferry.txt"), str(folder / "ferry.mem"), *options]) == 0
    return folder / "ferry.mem"


@pytest.fixture(scope="module")
def port(memory: Path) -> Iterator[int]:
    with serving(memory) as port:
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(*messages: dict[str, Any], **more: Any) -> Ask:
    return Ask.chat({"model": "ferry", "messages": [*messages], **more}, Headers())


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


# Histories


@pytest.mark.parametrize(
    "messages",
    [
        [system("Be brief."), user("When?"), system("In French.")],
        [user("When?"), system("Be brief."), system("In French.", "developer")],
        [system("Be brief."), system("In French."), user("When?")],
    ],
)
def test_system_messages_count_wherever_they_stand(messages: list[dict[str, Any]]) -> None:
    made = asked(*messages)
    assert (made.system, made.question, made.before) == ("Be brief.\n\nIn French.", "When?", [])


def test_calls_of_tools_and_their_results_are_part_of_the_turn() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "19:40"}
    made = asked(
        user("When is the last ferry?"),
        assistant(None, tool_calls=[CALL]),
        result,
        assistant("At 19:40."),
        user("And tomorrow?"),
    )
    call = 'ferries({"port": "Oban"})'
    assert made.before == [("When is the last ferry?", f"{call}\n\n19:40\n\nAt 19:40.")]
    assert made.question == "And tomorrow?"
    made = asked(user("When is the last ferry?"), assistant(None, tool_calls=[CALL]), result)
    assert (made.before, made.question) == ([], f"When is the last ferry?\n\n{call}\n\n19:40")
    older = asked(
        user("When?"),
        assistant("", function_call=CALL["function"]),
        {"role": "function", "name": "ferries", "content": [{"type": "text", "text": "19:40"}]},
    )
    assert older.question == f"When?\n\n{call}\n\n19:40"


def test_refusals_and_answers_without_words_are_history() -> None:
    refused = assistant([{"type": "refusal", "refusal": "I will not."}])
    made = asked(
        user("A?"), refused, user("B?"), assistant(None, refusal="No."), user("C?"), assistant(None), user("D?")
    )
    assert made.before == [("A?", "I will not."), ("B?", "No.")]
    assert made.question == "C?\n\nD?"


def test_tools_are_taken_where_none_need_be_called() -> None:
    asked(user("When?"), tools=TOOLS, parallel_tool_calls=True)
    for taken in ("none", "auto"):
        asked(user("When?"), tools=TOOLS, tool_choice=taken)
    for choice in ("required", {"type": "function", "function": {"name": "ferries"}}):
        with pytest.raises(Refusal, match="tool_choice is not supported here with this value"):
            asked(user("When?"), tools=TOOLS, tool_choice=choice)


def test_options_of_sampling_are_those_of_generate() -> None:
    options = asked(user("When?"), temperature=0.7, top_k=5, min_p=0.1, repetition_penalty=1.2).options
    assert options == {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
    }
    assert asked(user("When?"), top_k=-1, temperature=1).options["top_k"] == 0
    assert asked(user("When?"), reasoning_effort="high", verbosity="low").options == {}


def test_openai_s_client_with_tools_in_its_history(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        system("Be brief."),
        user("When is the last ferry?"),
        assistant(None, tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "call_1", "content": "19:40"},
    ]
    tools: list[Any] = [*TOOLS]
    answer = client.chat.completions.create(model="ferry", messages=messages, tools=tools, max_tokens=4)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="response_format is not supported"):
        client.chat.completions.create(
            model="ferry", messages=[{"role": "user", "content": "When?"}], response_format={"type": "json_object"}
        )


def test_an_answer_is_cut_to_what_fits(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="ferry", messages=[{"role": "user", "content": "When? " * 160}], max_completion_tokens=100_000, stop=["e"]
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 2048


# What Open WebUI 0.6 and later sends to an API like OpenAI's (backend/open_webui/utils/payload.py, routers/openai.py
# and routers/tasks.py): a conversation that streams, with the options that a user has set, and requests of its own for
# a title and follow-up questions.
OPEN_WEBUI: list[dict[str, Any]] = [
    {
        "model": "ferry",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "User context:\n\nToday is Friday."},
            {"role": "user", "content": [{"type": "text", "text": "When is the last ferry?"}]},
            {"role": "assistant", "content": "At 19:40."},
            {"role": "user", "content": "And on Sundays?"},
        ],
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "max_tokens": 6,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.1,
        "reasoning_effort": "medium",
        "seed": 0,
        "stop": ["###"],
        "logit_bias": {},
    },
    {
        "model": "ferry",
        "stream": False,
        "messages": [
            {
                "role": "user",
                "content": "### Task:\nGenerate a title.\n### Chat History:\n<chat_history>\nWhen?\n</chat_history>",
            }
        ],
        "max_completion_tokens": 1000,
        "stop": ["e"],
    },
    {
        "model": "ferry",
        "stream": False,
        "messages": [user("### Task:\nSuggest three follow-up questions.")],
        "stop": ["e"],
    },
]


@pytest.mark.parametrize("request_of_page", OPEN_WEBUI, ids=["chat", "title", "follow-ups"])
def test_requests_of_open_webui_are_answered(client: openai.OpenAI, request_of_page: dict[str, Any]) -> None:
    assert [each.id for each in client.models.list().data] == ["ferry"]  # which it asks for first
    own = {name: request_of_page[name] for name in ("top_k", "min_p", "repetition_penalty") if name in request_of_page}
    rest = {name: value for name, value in request_of_page.items() if name not in own}
    answer: Any = client.chat.completions.create(**rest, extra_body=own)
    if request_of_page["stream"]:
        chunks = list(answer)
        assert any(chunk.choices and chunk.choices[0].finish_reason in ("stop", "length") for chunk in chunks)
        assert chunks[-1].usage.completion_tokens <= 6
    else:
        assert answer.choices[0].finish_reason in ("stop", "length")


# Fields


def test_every_field_that_openai_s_client_can_send_is_known() -> None:
    fields = {
        *chat_create_params.CompletionCreateParamsBase.__annotations__,
        *completion_create_params.CompletionCreateParamsBase.__annotations__,
    }
    assert fields <= {*HONOURED, *HARMLESS, *ONLY}
    assert not {*HONOURED} & {*HARMLESS} | {*HONOURED} & {*ONLY} | {*HARMLESS} & {*ONLY}


HOW = {
    "model": "the memory to ask",
    "messages": (
        "texts of all roles. System messages are joined, wherever they stand; tool calls and their results become "
        "text of the turn; images, sound and files are refused"
    ),
    "prompt": "one text",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "shortened to what fits; then finish_reason is length"),
    "stop": f"at most {MOST_STOPS} texts",
    "stream_options": "include_usage; other options change nothing",
    "temperature": "default 0: the most likely token",
    **dict.fromkeys(("top_p", "top_k", "min_p"), "used with a temperature"),
    "repetition_penalty": "as in transformers",
    "metadata": "document and session say what to ask; other entries change nothing",
}
"""What the page says of fields that are obeyed."""


def as_table() -> str:
    """The fields of a request, as the page prints them."""
    assert {*HOW} <= HONOURED
    rows = [f"| `{name}` | honoured{f': {HOW[name]}' if name in HOW else ''} |" for name in sorted(HONOURED)]
    rows += [f"| {', '.join(f'`{name}`' for name in sorted(HARMLESS))} | accepted, changes nothing |"]
    for name, values in sorted(ONLY.items()):
        told = " or ".join(f"`{json.dumps(value)}`" for value in values)
        rows.append(f"| `{name}` | refused, except {told} |")
    return "\n".join([*rows, "| any other | refused by its name |"])


def test_the_page_has_the_fields() -> None:
    assert as_table() in PAGE.read_text()


# Who may ask


def test_without_a_token_file_one_is_made_for_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    token, told = token_for("127.0.0.1", None, no_token=False)
    file = user_folder("config") / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().strip() == token
    assert f"The token is {token}" in told
    assert token_for("0.0.0.0", None, no_token=False)[0] == token  # noqa: S104 - the same each time
    assert token_for("localhost", None, no_token=True) == (None, "")
    with pytest.raises(InvalidArgument, match=r"others can reach 192\.168\.0\.7"):
        token_for("192.168.0.7", None, no_token=True)
    with pytest.raises(InvalidArgument, match="--token-file names a"):
        token_for("127.0.0.1", str(file), no_token=True)


def test_a_full_disk_leaves_no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, most))
    try:
        with pytest.raises(InvalidArgument, match=r"cannot be written to .*too large"):
            token_for("127.0.0.1", None, no_token=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert list(user_folder("config").iterdir()) == []
    (user_folder("config") / "token").touch()  # as an earlier version left it
    token, _ = token_for("127.0.0.1", None, no_token=False)
    assert [file.read_text() for file in user_folder("config").iterdir()] == [f"{token}\n"]


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *((name, True) for name in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:80")),
        *((name, True) for name in ("192.168.0.7:8000", "notes.example", "Notes.Example:443")),
        *((name, False) for name in ("", "127.0.0.1:1@evil.com", "evil.com", "localhost.evil.com", "evil.com:8000")),
        *((name, False) for name in ("localhost@evil.com", "127.0.0.1:x", "127.0.0.1:", "[::1", "::1]", "[::1]x")),
        *((name, False) for name in ("localhost:80:80", "localhost/", "localhost?", "[localhost]", "127.0.0.1:123456")),
        *((name, False) for name in (" localhost", "localhost\t", "[evil.com]:80", "user@127.0.0.1")),
    ],
)
def test_a_host_is_an_address_or_a_name_of_this_server_and_a_port(host: str, known: bool) -> None:
    assert host_is_known(host, names_of(["notes.example"])) is known


def test_pages_of_other_sites_may_not_ask(port: int) -> None:
    assert ask(port, "/v1/models", origin="http://localhost:3000")[0] == 200
    assert ask(port, "/v1/models", host="127.0.0.1:1@evil.com")[0] == 403
    assert ask(port, "/v1/models", host="10.0.0.1:8000", origin="http://10.0.0.1:3000")[0] == 200
    for origin in ("https://evil.com", "null", "http://127.0.0.1:1@evil.com", "http://[", "http://6.6.6.6", "x"):
        assert ask(port, "/v1/models", origin=origin)[0] == 403


def test_errors_tell_clients_no_paths(memory: Path, port: int) -> None:
    told = without_paths(
        InvalidArgument(f"the memory {memory} is damaged: restore {memory.parent}/copy.mem"), str(memory)
    )
    assert told == "the memory ferry.mem is damaged: restore copy.mem"
    assert without_paths(InvalidArgument("ask /v1/chat/completions, 3/4 of ~/x and docs/serving.md")) == (
        "ask /v1/chat/completions, 3/4 of ~/x and docs/serving.md"
    )
    spaces = "/tmp/my notes/ferry.mem"  # noqa: S108 - a text
    assert without_paths(InvalidArgument(f"no memory at {spaces}"), f"zarr:{spaces}") == "no memory at ferry.mem"
    url = "zarr+file:///tmp/my notes/ferry.mem?tail=/tmp/the tail/of it"
    told = "no blobs in /tmp/my notes/ferry.mem/blobs or /tmp/the tail/of it/0"
    assert without_paths(InvalidArgument(told), url) == "no blobs in ferry.mem/blobs or of it/0"
    assert without_paths(InvalidArgument(f"cannot open {url!r}"), url) == "cannot open 'ferry.mem'"
    assert without_paths(InvalidArgument("no zarr+file:///tmp/a/b.mem?tail=/tmp/c/d")) == "no b.mem?tail=d"
    told = "+a" * 300_000  # at once; a search that goes back takes minutes
    assert without_paths(InvalidArgument(told)) == told
    moved = memory.with_name("moved.mem")
    memory.rename(moved)
    try:
        status, answer, _ = ask(port, "/v1/chat/completions", chat("ferry"))
    finally:
        moved.rename(memory)
    assert status >= 400
    assert str(memory.parent) not in answer["error"]["message"]


def test_a_mistake_is_an_error_object_without_paths_too(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my notes").mkdir()
    shutil.copytree(memory, place := tmp_path / "my notes" / "ferry.mem")

    def mistaken(*_: object) -> None:
        raise RuntimeError(f"no {place}")

    monkeypatch.setattr(Ask, "chat", mistaken)
    with serving(place) as port:
        status, answer, _ = ask(port, "/v1/chat/completions", chat("ferry"))
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert answer["error"]["message"].startswith("RuntimeError: no ferry.mem - this is a bug")


# How it ends


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stream", [True, False])
def test_a_signal_in_the_middle_of_an_answer_ends_it_with_an_error_object(memory: Path, stream: bool) -> None:
    command = [sys.executable, "-m", "memstore", "serve", str(memory), "--port", "0", "--no-token"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = int(process.stderr.readline().split("/v1")[0].rpartition(":")[2])
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        found: list[Any] = []

        def answered() -> None:
            try:
                made: Any = client.completions.create(model="ferry", prompt="The", max_tokens=1900, stream=stream)
                found.extend(made if stream else [made])
            except openai.APIError as error:
                found.append(error)

        thread = threading.Thread(target=answered)
        thread.start()
        while not (found if stream else ask(port, "/health")[1]["answering"]):
            time.sleep(0.01)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        ended = time.monotonic() - begun
        thread.join()
        assert "Traceback" not in process.stderr.read()
    assert isinstance(found[-1], openai.APIError)
    assert "the server is shutting down" in str(found[-1])
    assert ended < 5


MEGABYTE = "colour of room " * 70_000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_question_of_a_megabyte_is_refused_at_once(port: int, path: str) -> None:
    text = MEGABYTE[:1_000_000]
    body = chat("ferry", text) if path.startswith("chat") else {"model": "ferry", "prompt": text, "max_tokens": 3}
    begun = time.monotonic()
    status, answer, _ = ask(port, f"/v1/{path}", body)
    assert (status, "characters" in answer["error"]["message"]) == (400, True)
    assert time.monotonic() - begun < 2


def test_a_search_for_a_megabyte_is_refused_at_once(cli: Cli, memory: Path) -> None:
    done = cli("search", memory, "--text", MEGABYTE[:1_000_000])
    assert (done.code, bool(re.search("the question has 1,000,000 characters", done.err))) == (2, True)
