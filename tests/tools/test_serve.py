"""`memstore serve`: a real server, asked by urllib and by OpenAI's own client."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from string import ascii_letters
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, cast

import pytest

import memstore
from memstore.errors import CancelledError, MemstoreError
from memstore.index.words import words_of
from memstore.readers.asking import Answer
from memstore.resources import memory_in_use
from memstore.tools.app import main
from memstore.tools.endpoint.app import MOST_BYTES, Endpoint
from memstore.tools.endpoint.request import Refusal
from memstore.tools.endpoint.shelf import Shelf, name_of
from memstore.tools.endpoint.worker import QueuedJob, Result, Served, Worker, _prompt, receipt_of
from memstore.tools.web import listen, server_of
from tests.tools.conftest import Cli
from tests.tools.test_failures import flip
from tests.tools.test_faults_seen import at_most

TEXTS = {"cottage": "The key of the cottage hangs in the woodshed. ", "ferry": "The last ferry leaves at 19:40. "}
TOKEN = "a-token-that-is-long-enough"  # noqa: S105 - guards nothing


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, instruct_folder: Path) -> Path:
    """A memory for each of TEXTS, read by one model."""
    folder = tmp_path_factory.mktemp("shelf")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text * 8)
        options = ["--model", str(instruct_folder), "--dtype", "float32", "--block-size", "16"]
        assert main(["read", str(folder / f"{name}.txt"), str(folder / f"{name}.mem"), *options]) == 0
    return folder


@contextmanager
def serving(*memories: Path, on: dict[str, Any] | None = None, **options: Any) -> Iterator[int]:
    """A server of memories in a thread of its own; its port. ``on``: of the shelf that they are on."""
    with ExitStack() as stack, listen("127.0.0.1", 0) as listening:
        shelf = Shelf(stack, **on or {})
        for each in memories:
            shelf.open(str(each), each.stem)
        endpoint = Endpoint(shelf, **options)
        server = server_of(endpoint.app, most=300, grace=1, lifespan=False)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
            endpoint.worker.close()


@pytest.fixture(scope="module")
def port(shelf: Path) -> Iterator[int]:
    with serving(shelf / "cottage.mem", shelf / "ferry.mem") as port:
        yield port


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, JSON and headers of an answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **{name.replace("_", "-"): each for name, each in headers.items()}}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def chat(model: str = "cottage", text: str = "Where is it?", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **more}


def test_a_greeting_is_passed_over_and_words_in_a_row_are_one_message(port: int) -> None:
    said = [("assistant", "Hello!"), ("user", "Where is the key?"), ("user", "And the ferry?")]
    apart = [{"role": role, "content": words} for role, words in said]
    together = [{"role": "user", "content": "Where is the key?\n\nAnd the ferry?"}]
    (status, answer, _), (_, same, _) = (
        ask(port, "/v1/chat/completions", chat() | {"messages": messages}) for messages in (apart, together)
    )
    assert status == 200
    assert (answer["choices"], answer["usage"]) == (same["choices"], same["usage"])


def test_each_answer_comes_from_its_own_memory(port: int) -> None:
    names = ["cottage", "ferry"] * 6
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(port, "/v1/chat/completions", chat(name)), names))
    for name, (status, answer, _) in zip(names, answers, strict=True):
        assert status == 200
        assert answer["model"] == name
        assert answer["sources"]
        for source in answer["sources"]:
            assert source["document"] == name
            assert source["text"].strip("\n") in TEXTS[name] * 8
            assert source["line"] == 1
            assert 0 <= source["attention"] <= 1
    (text,) = {answer["choices"][0]["message"]["content"] for _, answer, _ in answers[::2]}  # greedy: always the same
    assert isinstance(text, str)


def test_what_was_said_before_is_part_of_the_prompt(port: int) -> None:
    turns = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Yes?"), ("user", "Where is it?")]
    body = chat() | {"messages": [{"role": role, "content": text} for role, text in turns]}
    status, answer, _ = ask(port, "/v1/chat/completions", body)
    marked = "<|system|>Be brief.<|end|>\n<|user|>Hello<|end|>\n<|assistant|>Yes?<|end|>\n<|user|>Where is it?<|end|>\n"
    assert status == 200
    text = marked + "<|assistant|>"
    marks = text.count("<|")
    letters = len(text) - sum(
        len(f"<|{each}|>") * text.count(f"<|{each}|>") for each in ("system", "user", "assistant", "end")
    )
    assert answer["usage"]["prompt_tokens"] == letters + marks  # a token is a byte, or a mark


def test_a_question_that_refers_to_something_is_looked_up_with_the_exchange_before(port: int) -> None:
    def scores(*said: str) -> dict[int, float]:
        turns = zip(("user", "assistant", "user"), said, strict=False)
        body = chat() | {"messages": [{"role": role, "content": text} for role, text in turns]}
        return {each["block"]: each["score"] for each in ask(port, "/v1/chat/completions", body)[1]["sources"]}

    before = ("Where is the key?", "In the woodshed.")
    for question, same in (("Who hung it there?", False), ("Who has the key?", True)):
        alone, after = scores(question), scores(*before, question)
        both = alone.keys() & after.keys()
        assert both
        assert all((alone[block] == after[block]) is same for block in both)


def test_health_and_models(port: int) -> None:
    assert ask(port, "/health")[:2] == (200, {"status": "ok", "answering": False, "waiting": 0})
    listed = ask(port, "/v1/models")[1]["data"]
    assert [each["id"] for each in listed] == ["cottage", "ferry"]
    assert ask(port, f"/v1/models/{listed[1]['also']}")[1] == listed[1]
    assert listed[1]["also"].endswith("@ferry")
    assert ask(port, "/v1/chat/completions", chat(listed[1]["also"]))[1]["sources"][0]["document"] == "ferry"


def test_a_model_that_sees_one_document_is_served_too_and_asks_for_its_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("The grass is green. The sky is blue. " * 20)
        options = ["--model", "hils-passkey"]
        assert main(["read", str(tmp_path / f"{name}.txt"), str(tmp_path / "passkeys.mem"), *options]) == 0
    with serving(tmp_path / "passkeys.mem") as port:
        status, answer, _ = ask(port, "/v1/chat/completions", chat("passkeys"))
        assert (status, answer["error"]["message"]) == (
            400, "the memory has several documents. Choose one with metadata.document: one, two"
        )  # fmt: skip
        asked = chat("passkeys", metadata={"document": "two"})
        assert ask(port, "/v1/chat/completions", asked)[0] == 200


def test_embeddings_are_refused_with_what_to_do_instead(port: int) -> None:
    status, answer, _ = ask(port, "/v1/embeddings", {"model": "cottage", "input": "Where is it?"})
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (
        404,
        "invalid_request_error",
        "unsupported_endpoint",
    )
    assert "sources" in answer["error"]["message"]


def test_sampling_can_be_repeated(port: int) -> None:
    sampled = chat(temperature=1.5, max_tokens=12, top_p=0.9)
    first, free, again, freely, other = (
        ask(port, "/v1/chat/completions", {**sampled, "seed": seed})[1]["choices"] for seed in (1, None, 1, None, 2)
    )
    assert first == again
    assert first != other
    assert free != freely, "a seed is of one request alone"


def test_the_client_of_openai(port: int) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == ["cottage", "ferry"]
        asked = {"model": "ferry", "messages": [{"role": "user", "content": "When?"}], "max_tokens": 8}
        whole = client.chat.completions.create(**asked)
        assert whole.sources[0]["document"] == "ferry"
        with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
        assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == whole.choices[0].message.content
        assert chunks[-2].sources == whole.sources
        assert chunks[-2].unsupported == whole.unsupported
        assert {*whole.unsupported} <= {*words_of(whole.choices[0].message.content)}
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage == whole.usage
        raw = client.completions.create(model="cottage", prompt="The key", max_tokens=4)
        with client.completions.create(model="cottage", prompt="The key", max_tokens=4, stream=True) as stream:
            assert "".join(each.choices[0].text for each in stream) == raw.choices[0].text
        with pytest.raises(
            openai.NotFoundError, match=r"there is no memory called 'whale'\. This server has: cottage, ferry"
        ):
            client.completions.create(model="whale", prompt="The key")


def test_the_program_of_the_page_runs(
    port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    page = (Path(__file__).parents[2] / "docs" / "everyday.md").read_text("utf-8")
    ((program,),) = [re.findall(r"^    from openai.*\n(?:    .*\n|\n(?=    ))*", page, re.MULTILINE)]
    names: dict[str, Any] = {}
    exec(dedent(program).replace(":8000/", f":{port}/").replace('"notes"', '"ferry"'), names)  # noqa: S102
    assert capsys.readouterr().out.split()[-2] == "ferry"
    names["client"].close()


def test_a_stream_ends_with_sources_and_done(port: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(chat(stream=True)).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, *_, last = (json.loads(each.removeprefix("data: ")) for each in events[:-2])
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert last["sources"][0]["document"] == "cottage"


WRONG: list[tuple[Any, int, str]] = [
    (b"{", 400, "must be JSON"),
    (b"[" * 100_000, 400, "must be JSON"),
    (b"[]", 400, "must be a JSON object"),
    (b'{"model": "cottage", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "not valid Unicode"),
    (b'{"model": "cottage", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', 400, "must be JSON in UTF-8"),
    (
        '{"model": "cottage", "messages": [{"role": "user", "content": "\\ud800"}]}'.encode("utf-16"),
        400,
        "must be JSON",
    ),
    (b" " * (MOST_BYTES + 1), 413, "at most 1,048,576 bytes"),
    ({"messages": []}, 400, "the last message"),
    (chat(model="../cottage"), 404, "there is no memory called"),
    (chat() | {"model": 5}, 400, "model has the wrong type"),
    (chat() | {"messages": "Where?"}, 400, "messages has the wrong type"),
    (chat() | {"messages": [{"role": "narrator", "content": "x"}]}, 400, "a message must be an object with role"),
    (chat() | {"messages": [{"role": [], "content": "x"}]}, 400, "a message must be an object"),
    (chat() | {"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "tool_calls must be a list, not int"),
    (
        chat()
        | {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 800
            + [{"role": "user", "content": "x"}]
        },
        400,
        "later messages not counted",
    ),
    (chat() | {"messages": [{"role": "tool", "content": "x"}]}, 400, "must come from the user"),
    (chat() | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "a part of type 'image_url'"),
    (chat() | {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "'input_audio'"),
    (chat() | {"messages": [{"role": "user", "content": {"text": "x"}}]}, 400, "got something else"),
    (chat() | {"messages": [{"role": "user", "content": None}]}, 400, "has no words"),
    (chat() | {"messages": [{"role": "assistant", "content": "Hello"}]}, 400, "must come from the user"),
    (chat(text=" "), 400, "has no words"),
    (chat(max_tokens=True), 400, "max_tokens has the wrong type"),
    (chat(max_tokens=0), 400, "max_tokens must be at least 1"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens must be at least 1, got 0"),
    (chat(text="Where? " * 3000), 400, "the model takes at most 2,048 tokens"),
    (chat(text="Where? " * 30_000), 400, "the question has 210,000 characters"),
    (chat(temperature=float("nan")), 400, "temperature must be from 0 to 2"),
    (chat(stop=["x", ""]), 400, "stop must be a text, or a list of at most 4 texts"),
    (chat(stop=5), 400, "stop has the wrong type"),
    (chat(n=2), 400, "n is not supported"),
    (chat(tool_choice="required"), 400, "tool_choice is not supported here with this value"),
    (chat(response_format={"type": "json_object"}), 400, "response_format is not supported here with this value"),
    (chat(frequency_penalty=0.5), 400, "frequency_penalty is not supported here with this value"),
    (chat(mirostat=2), 400, "mirostat is not supported here: leave it out"),
]


@pytest.mark.parametrize(("body", "status", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_what_cannot_be_answered_is_refused_with_a_reason(port: int, body: Any, status: int, message: str) -> None:
    found, answer, _ = ask(port, "/v1/chat/completions", body)
    assert (found, answer.keys(), answer["error"].keys()) == (status, {"error"}, {"message", "type", "param", "code"})
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_what_changes_nothing_is_passed_over(port: int) -> None:
    harmless = chat(
        user="me",
        n=1,
        stop=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        top_logprobs=0,
        logprobs=False,
        response_format={"type": "text"},
    )
    assert ask(port, "/v1/chat/completions", harmless)[0] == 200


def test_other_refusals_are_error_objects_too(port: int) -> None:
    for path, body, headers, status in [
        ("/v1/models", None, {"host": "evil.example"}, 403),
        ("/v1/completions", {"model": "cottage", "prompt": [1, 2]}, {}, 400),
        ("/v1/completions", {"model": "cottage", "prompt": "x"}, {"content_type": "text/plain"}, 415),
        ("/v1/chat/completions", None, {}, 405),
        ("/v1/nothing", None, {}, 404),
    ]:
        found, answer, _ = ask(port, path, body, **headers)
        assert (found, list(answer)) == (status, ["error"]), path
    for path, status, allowed in (("/v1/chat/completions", 405, "POST"), ("/v1/responses", 404, None)):
        found, answer, headers = ask(port, path)
        assert (found, headers["allow"]) == (status, allowed)
        assert "GET /v1/models, " in answer["error"]["message"]


def test_a_token_is_asked_for_where_there_is_one(shelf: Path) -> None:
    with serving(shelf / "ferry.mem", token=TOKEN) as port:
        assert ask(port, "/health")[0] == 200
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
            status, answer, headers = ask(port, "/v1/models", **given)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert headers["www-authenticate"] == "Bearer"
        assert ask(port, "/v1/models", authorization=f"Bearer {TOKEN}")[0] == 200


def test_too_many_requests_are_told_to_come_again(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(_: Worker, __: QueuedJob) -> Result:
        begun.set()
        assert go.wait(60)
        return Result("Yes", ended=True, prompt_tokens=1, tokens=1, seconds=0.0)

    monkeypatch.setattr(Worker, "_do", slow)
    with serving(shelf / "ferry.mem", waiting=1) as port, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, port, "/v1/chat/completions", chat("ferry"))]
        assert begun.wait(60)
        asked.append(pool.submit(ask, port, "/v1/chat/completions", chat("ferry")))
        while ask(port, "/health")[1]["waiting"] == 0:
            time.sleep(0.01)
        status, answer, headers = ask(port, "/v1/chat/completions", chat("ferry"))
        go.set()
        assert [each.result()[0] for each in asked] == [200, 200]
    assert (status, answer["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "5")


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_waits_for_is_broken_off(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    begun, ended, answer, made = threading.Event(), threading.Event(), Worker._do, list[object]()

    def noted(worker: Worker, job: QueuedJob) -> object:
        begun.set()
        try:
            made.append(answer(worker, job))
        except CancelledError as error:  # it had not begun to speak
            made.append(error)
            raise
        finally:
            ended.set()
        return made[-1]

    monkeypatch.setattr(Worker, "_do", noted)
    with serving(shelf / "ferry.mem") as port:
        client = HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"model": "ferry", "prompt": "The last", "max_tokens": 1500, "stream": stream})
        client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert begun.wait(60)
        client.close()
        assert ended.wait(60)
    assert isinstance(made[0], CancelledError) or (isinstance(made[0], Result) and made[0].tokens < 1000)


def test_a_damaged_block_is_an_error_with_the_words_of_the_memory(shelf: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.mem"
    shutil.copytree(shelf / "ferry.mem", damaged)
    with memstore.open(damaged, mode="r") as memory:
        states = memory.document("ferry").layer(1).gather([8])["k"].numpy().tobytes()
    flip(damaged / "data.mdb", states)
    with serving(damaged, shelf / "ferry.mem", on={"top_k": 16}) as port:
        status, answer, _ = ask(port, "/v1/chat/completions", chat("damaged", stream=True))
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "layer 1, block 8 is damaged" in answer["error"]["message"]
        assert ask(port, "/v1/chat/completions", chat("ferry"))[0] == 200  # the others go on
    with serving(damaged, on={"top_k": 16, "on_error": "miss"}) as port:
        status, answer, _ = ask(port, "/v1/chat/completions", chat("damaged"))
        assert status == 200
        assert 8 not in {each["block"] for each in answer["sources"]}
        assert [(each["document"], each["block"]) for each in answer["missing"]] == [("ferry", 8)]
        assert "is damaged" in answer["missing"][0]["error"]
        assert "memstore_missing_blocks_total 1\n" in metrics(port)


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def test_metrics_count_what_was_answered_and_refused(shelf: Path) -> None:
    with serving(shelf / "ferry.mem") as port:
        statuses = [ask(port, "/v1/chat/completions", chat(name))[0] for name in ("ferry", "ferry", "whale")]
        lines = metrics(port).splitlines()
    assert statuses == [200, 200, 404]
    assert {'memstore_requests_total{status="200"} 2', 'memstore_requests_total{status="404"} 1'} <= {*lines}
    assert {"memstore_answers_total 2", 'memstore_tokens_total{kind="generated"} 6'} <= {*lines}
    assert all(len(line.split()) == 2 or line.startswith("# TYPE ") for line in lines)


def said(session: str, text: str, **more: Any) -> dict[str, Any]:
    return chat("ferry", text, metadata={"session": session}, **more)


def turns(memory: Path, session: str) -> list[str]:
    """What was said in a session."""
    with memstore.open(memory, mode="r") as opened:
        facts = opened.facts()[0]
        return [fact["text"] for key, fact in sorted(facts.items()) if key.startswith(f"said/served/{session}/")]


@pytest.mark.timeout(600)
def test_a_killed_server_comes_back_with_every_turn_that_it_answered(shelf: Path, tmp_path: Path) -> None:
    memory = tmp_path / "ferry.mem"
    shutil.copytree(shelf / "ferry.mem", memory)
    command = [sys.executable, "-m", "memstore", "serve", str(memory), "--sessions", "2", "--port", "0", "--no-token"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = int(process.stderr.readline().split("/v1")[0].rpartition(":")[2])
        answers = [ask(port, "/v1/chat/completions", said("ada", text))[1] for text in ("One", "Two")]

        def ask_late() -> None:
            with suppress(OSError):  # nobody answers: the server is killed
                ask(port, "/v1/chat/completions", said("ada", "Three", max_tokens=900, temperature=2))

        late = threading.Thread(target=ask_late)
        late.start()
        while turns(memory, "ada")[-1] != "Three":
            time.sleep(0.01)
        process.kill()
        late.join()
    kept = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert turns(memory, "ada") == ["One", kept[0], "Two", kept[1], "Three"]
    with serving(memory, sessions=2) as port:
        answer = ask(port, "/v1/chat/completions", said("ada", "Four"))[1]
        assert turns(memory, "ada")[4:7] == ["Three", "", "Four"]
        assert answer["usage"]["prompt_tokens"] < 60  # what was said before is in the memory
        other = ask(port, "/v1/chat/completions", said("eve", "Who else is here?", max_tokens=8192, stop="e"))[1]
        assert {each["document"] for each in other["sources"]} == {"ferry"}
        status, answer, _ = ask(port, "/v1/chat/completions", said("tom", "Hello"))
        assert (status, answer["error"]["code"]) == (403, "session_limit")
        assert ask(port, "/v1/chat/completions", said("x" * 101, "Hello"))[0] == 400
    with serving(memory) as port:
        assert ask(port, "/v1/chat/completions", said("ada", "Hello"))[0] == 403


def answer_of(port: int, name: str, text: str) -> tuple[str, int, tuple[tuple[str, int], ...]]:
    """What a memory answers, to how many tokens, and the blocks that it was written with."""
    status, answer, _ = ask(port, "/v1/chat/completions", chat(name, text, max_tokens=8))
    assert status == 200, answer
    places = tuple((each["document"], each["block"]) for each in answer["sources"])
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"], places


@pytest.mark.slow
def test_a_hundred_clients_at_once_are_each_told_what_their_memory_says_when_it_is_asked_alone(
    tmp_path: Path, instruct_folder: Path
) -> None:
    memories = [tmp_path / f"notes-{number}.mem" for number in range(10)]
    options = ["--model", str(instruct_folder), "--dtype", "float32", "--block-size", "16"]
    alone = dict[tuple[str, str], Any]()
    for number, memory in enumerate(memories):
        text = memory.with_suffix(".txt")
        text.write_text("".join(random.Random(number).choices(ascii_letters, k=400)))
        assert main(["read", str(text), str(memory), *options]) == 0
        with serving(memory) as port:
            questions = [(memory.stem, "Where? " * count) for count in range(1, 11)]
            alone |= {question: answer_of(port, *question) for question in questions}
    assert len({*alone.values()}) == 100  # any mix-up would show
    assert all({document for document, _ in places} == {name} for (name, _), (_, _, places) in alone.items())
    command = [sys.executable, "-m", "memstore", "serve", *map(str, memories), "--port", "0", "--no-token"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, ThreadPoolExecutor(100) as pool:
        assert process.stderr is not None
        port = int(process.stderr.readline().split("/v1")[0].rpartition(":")[2])
        together = threading.Barrier(100, timeout=60)

        def client(question: tuple[str, str]) -> object:
            together.wait()
            return answer_of(port, *question)

        try:
            assert dict(zip(alone, pool.map(client, alone), strict=True)) == alone
        finally:
            process.terminate()


def test_a_full_disk_fails_a_turn_and_with_room_the_session_goes_on(shelf: Path, tmp_path: Path) -> None:
    memory = tmp_path / "ferry.mem"
    shutil.copytree(shelf / "ferry.mem", memory)
    with serving(memory, sessions=1) as port:

        def say(text: str) -> tuple[int, Any]:
            return ask(port, "/v1/chat/completions", said("ada", text))[:2]

        kept = []
        with at_most((memory / "data.mdb").stat().st_size):
            for number in range(200):
                status, answer = say(f"Turn {number}")
                if status != 200:
                    break
                kept.append(f"Turn {number}")
            assert (status, answer["error"]["type"]) == (507, "server_error")
            assert "no room" in answer["error"]["message"]
            assert ask(port, "/v1/chat/completions", chat("ferry"))[0] == 200  # who only reads does not notice
        assert say("With room")[0] == 200
    with memstore.open(memory, mode="r") as store:
        assert not store.verify()
    assert {*kept, "With room"} <= {*turns(memory, "ada")}


def test_a_memory_is_made_when_it_is_asked_for_within_limits(
    shelf: Path, tmp_path: Path, instruct_folder: Path
) -> None:
    on = {"folder": tmp_path, "most": 1, "model": str(instruct_folder)}
    with serving(shelf / "ferry.mem", on=on, sessions=1) as port:

        def hello(name: str) -> tuple[int, Any]:
            return ask(port, "/v1/chat/completions", {**said("today", "Hello"), "model": name})[:2]

        assert hello("ada")[0] == 200
        status, answer = hello("bob")
        assert (status, answer["error"]["code"]) == (403, "memory_limit")
        assert [hello(name)[0] for name in ("../ada", "a/b", "other@ada")] == [404] * 3
        assert [each["id"] for each in ask(port, "/v1/models")[1]["data"]] == ["ferry", "ada"]
    assert [each.name for each in tmp_path.iterdir()] == ["ada.mem"]
    assert turns(tmp_path / "ada.mem", "today")[0] == "Hello"


def test_memories_are_made_and_opened_while_another_one_is_attached(
    shelf: Path, tmp_path: Path, instruct_folder: Path
) -> None:
    on = {"folder": tmp_path, "most": 2, "model": str(instruct_folder)}
    for _ in ("made", "opened"):
        with serving(shelf / "ferry.mem", on=on) as port:
            names = ("ferry", "ada", "bob", "ada", "ferry")
            assert [ask(port, "/v1/chat/completions", chat(name))[0] for name in names] == [200] * 5


def test_a_memory_that_cannot_be_served_stays_closed(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf / "ferry.mem", broken := tmp_path / "broken.mem")
    with memstore.open(broken) as memory:
        memory.put_info("model", {"name": str(tmp_path / "no-model"), "dtype": "float32"})
    open_files = []
    with ExitStack() as stack:
        served = Shelf(stack)
        for _ in range(3):
            with pytest.raises(MemstoreError):
                served.open(str(broken), "broken")
            open_files.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - of a process
    assert open_files[0] == open_files[-1]


def test_the_tail_of_a_memory_is_not_its_name() -> None:
    assert name_of("zarr+file:///data/notes.mem?tail=/tails/one") == name_of("notes.mem") == "notes"


def test_a_link_to_another_memory_takes_no_name_from_one_that_is_served(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shutil.copytree(shelf / "cottage.mem", tmp_path / "other/ferry.mem")
    (tmp_path / "on").mkdir()
    (tmp_path / "on/team.mem").symlink_to(tmp_path / "other/ferry.mem")
    with serving(shelf / "ferry.mem", on={"folder": tmp_path / "on", "most": 2}) as port:
        answers = [ask(port, "/v1/chat/completions", chat(name))[1] for name in ("ferry", "team", "ferry")]
        assert [each["sources"][0]["document"] for each in answers] == ["ferry", "cottage", "ferry"]
        assert [each["id"] for each in ask(port, "/v1/models")[1]["data"]] == ["ferry", "team"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_memory_that_is_gone_or_replaced_is_not_made_anew(shelf: Path, tmp_path: Path, replaced: bool) -> None:
    memory = tmp_path / "ferry.mem"
    shutil.copytree(shelf / "ferry.mem", memory)
    with serving(memory, sessions=2) as port:
        assert ask(port, "/v1/chat/completions", chat("ferry"))[0] == 200
        memory.rename(tmp_path / "away")
        if replaced:
            shutil.copytree(shelf / "cottage.mem", memory)
        for body in (chat("ferry"), said("ada", "Hello")):
            status, answer, _ = ask(port, "/v1/chat/completions", body)
            assert status == 404
            assert "was removed or replaced while the server ran: restart" in answer["error"]["message"]
        assert memory.exists() == replaced
        shutil.rmtree(memory, ignore_errors=True)
        (tmp_path / "away").rename(memory)
        assert ask(port, "/v1/chat/completions", said("ada", "Hello"))[0] == 200


@pytest.mark.timeout(600)
def test_memory_stays_bounded_over_many_requests(shelf: Path) -> None:
    names, used = list(TEXTS), []
    with serving(*(shelf / f"{name}.mem" for name in names)) as port:
        for i in range(80):
            assert ask(port, "/v1/chat/completions", chat(names[i % 2], f"Question {i}"))[0] == 200
            used.append(memory_in_use()[0])
    assert used[79] - used[39] < 2 << 20  # bytes; the first half fills what is kept


def test_what_another_process_reads_is_seen_by_the_next_answer(
    shelf: Path, tmp_path: Path, instruct_folder: Path
) -> None:
    grows = tmp_path / "grows.mem"
    shutil.copytree(shelf / "ferry.mem", grows)
    with serving(grows) as port:
        assert {each["document"] for each in ask(port, "/v1/chat/completions", chat("grows"))[1]["sources"]} == {
            "ferry"
        }
        assert main(["read", str(shelf / "cottage.txt"), str(grows), "--model", str(instruct_folder)]) == 0
        sources = ask(port, "/v1/chat/completions", chat("grows"))[1]["sources"]
    assert {each["document"] for each in sources} == {"ferry", "cottage"}


def test_a_server_for_others_needs_a_token(cli: Cli, shelf: Path, tmp_path: Path) -> None:
    done = cli("serve", shelf / "ferry.mem", "--host", "0.0.0.0", "--no-token")  # noqa: S104 - refused
    assert (done.code, "others can reach 0.0.0.0" in done.err) == (2, True)
    (tmp_path / "token").write_text("short\n")
    done = cli("serve", shelf / "ferry.mem", "--token-file", tmp_path / "token")
    assert (done.code, "at least 16" in done.err) == (2, True)
    done = cli("serve", shelf / "ferry.mem", shelf / "ferry.mem")
    assert (done.code, "two memories have the name 'ferry'" in done.err) == (2, True)
    assert cli("serve", tmp_path / "nothing.mem").code == 3


@pytest.mark.parametrize("verb", ["serve", "mcp"])
def test_a_port_in_use_is_told_before_anything_is_loaded(cli: Cli, tmp_path: Path, verb: str) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = cli(verb, tmp_path / "none.mem", "--port", port, "--no-token")
    assert (done.code, done.err) == (
        2,
        f"memstore: port {port} is in use. Choose another with --port; 0 is any free one.\n",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_in_peace_and_it_answers_to_its_names_alone(
    cli: Cli, shelf: Path, number: int
) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    answers: list[int] = []

    def end() -> None:
        try:
            while not answers:
                with suppress(urllib.error.URLError):
                    answers.append(ask(port, "/v1/chat/completions", chat("ferry"))[0])
            answers.extend(ask(port, "/v1/models", host=name)[0] for name in ("notes.example", "other.example"))
        finally:
            os.kill(os.getpid(), number)

    ending = threading.Thread(target=end)
    ending.start()
    done = cli("serve", shelf / "ferry.mem", "--port", port, "--name", "Notes.example", "--no-token", "--json")
    ending.join()
    assert (done.code, answers) == (0, [200, 200, 403])
    assert done.json == {"url": f"http://127.0.0.1:{port}/v1", "memories": ["ferry"]}
    assert done.err == f"http://127.0.0.1:{port}/v1 serves ferry\nCtrl-C ends it.\n"


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_ends_before_a_text_that_is_to_stop_it(port: int, stream: bool) -> None:
    def told(**more: Any) -> tuple[str, str]:
        body = chat(temperature=2, seed=1, max_tokens=40, **more)
        if not stream:
            (choice,) = ask(port, "/v1/chat/completions", body)[1]["choices"]
            return choice["message"]["content"], choice["finish_reason"]
        data = json.dumps({**body, "stream": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            events = [json.loads(each[6:]) for each in answer.read().decode().split("\n\n")[:-2]]
        text = "".join(each["choices"][0]["delta"].get("content", "") for each in events)
        return text, events[-1]["choices"][0]["finish_reason"]

    whole, _ = told()
    stop = next(whole[at : at + 2] for at in range(4, len(whole)) if whole[at : at + 2].strip() and whole[at].isascii())
    assert told(stop=[stop, "never said"]) == (whole[: whole.index(stop)].strip(), "stop")


def test_no_request_sees_a_conversation_that_is_not_its_own(shelf: Path, tmp_path: Path) -> None:
    memory = tmp_path / "ferry.mem"
    shutil.copytree(shelf / "ferry.mem", memory)
    with memstore.open(memory) as opened:
        opened.document("ferry").fork("chat/one")  # a chat of the terminal
        opened.put_info("said/one/0", {"role": "user", "text": "Mine", "time": "", "start": 0})
    with serving(memory, sessions=1) as port:
        assert ask(port, "/v1/chat/completions", said("ada", "My word is heron"))[0] == 200
        for name in ("chat/one", "chat/ada", "chat/served/ada", "nothing"):
            for more in ({}, {"session": "ada"}):
                body = chat("ferry") | {"metadata": {"document": name, **more}}
                status, answer, _ = ask(port, "/v1/chat/completions", body)
                assert (status, "it has 'ferry'." in answer["error"]["message"]) == (404, True)
        body = {"model": "ferry", "prompt": "The", "metadata": {"document": "chat/served/ada"}}
        assert ask(port, "/v1/completions", body)[0] == 404
        status, answer, _ = ask(port, "/v1/chat/completions", said("one", "Go on"))
        assert (status, answer["error"]["code"]) == (403, "session_limit")  # a session of its own, and one too many
    with memstore.open(memory, mode="r") as opened:
        assert len(opened.infos("said/one/")) == 1


NAMES = (
    "jp/会議\u3000議事録.md",
    "a\u00a0b.md",
    "10.15\u202fPM.png",
    "\U0001f468\u200d\U0001f469.md",
    "soft\u00adhyphen",
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_header_names_the_document_as_metadata_do_or_not_at_all(shelf: Path, tmp_path: Path, path: str) -> None:
    memory = tmp_path / "ferry.mem"
    shutil.copytree(shelf / "ferry.mem", memory)
    with memstore.open(memory) as opened:
        for name in ("fähre", *NAMES):
            opened.document("ferry").fork(name)
    asked = chat("ferry") if path.startswith("/v1/chat") else {"model": "ferry", "prompt": "The last"}
    named, utf8 = asked | {"metadata": {"document": "fähre"}}, "fähre".encode().decode("latin-1")
    with serving(memory) as port:
        expected = ask(port, path, named)[1]
        for body in (asked, named):
            status, answer, _ = ask(port, path, body, x_memstore_document=utf8)
            assert (status, answer["choices"]) == (200, expected["choices"])
            assert answer["sources"] == expected["sources"]
        for name in NAMES:
            assert ask(port, path, asked | {"metadata": {"document": name}})[0] == 200, ascii(name)
        for wrong in ("ferry", "x" * 513, "f\xe4hre", ""):
            status, answer, _ = ask(port, path, named, x_memstore_document=wrong)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert answer["error"]["param"] == "X-Memstore-Document"
        assert ask(port, path, asked, x_memstore_document="whale")[0] == 404


def test_a_header_names_the_session_as_metadata_do_or_not_at_all(shelf: Path, tmp_path: Path) -> None:
    memory = tmp_path / "ferry.mem"
    shutil.copytree(shelf / "ferry.mem", memory)
    path, first, second = "/v1/chat/completions", chat("ferry", "My word is heron"), said("ada", "Go on")
    with serving(memory, sessions=2) as port:
        assert ask(port, path, first, x_memstore_session="ada")[0] == 200
        assert ask(port, path, second, x_memstore_session="ada")[0] == 200
        assert ask(port, path, second, x_memstore_session="eve")[0] == 400
        assert ask(port, path, first, x_memstore_session="x" * 101)[0] == 400
        client = HTTPConnection("127.0.0.1", port, timeout=60)
        client.putrequest("POST", path)
        client.putheader("content-type", "application/json")
        client.putheader("content-length", str(len(json.dumps(first))))
        for name in ("ada", "eve"):  # one of them may be a proxy's, the other one its client's
            client.putheader("x-memstore-session", name)
        client.endheaders(json.dumps(first).encode())
        assert client.getresponse().status == 400
        client.close()
    with memstore.open(memory, mode="r") as opened:
        assert {each.name for each in opened.documents()} == {"ferry", "chat/served/ada"}
    assert turns(memory, "ada")[::2] == ["My word is heron", "Go on"]


def test_no_name_of_a_session_breaks_another(shelf: Path, tmp_path: Path) -> None:
    memory = tmp_path / "ferry.mem"
    shutil.copytree(shelf / "ferry.mem", memory)
    with serving(memory, sessions=9) as port:
        names = ["bob/x", "bob", "bob/0", "served/bob", "/"]
        for name in names * 2:
            assert ask(port, "/v1/chat/completions", said(name, f"I am {name}"))[0] == 200
    with memstore.open(memory, mode="r") as opened:
        assert {each.name for each in opened.documents()} == {"ferry", *(f"chat/served/{name}" for name in names)}


def job_of(line: str, told: list[Any], *, left: bool = False) -> QueuedJob:
    nothing = cast("Served", lambda _: None)
    job = QueuedJob(nothing, lambda *_: None, lambda what: told.append((line, what)), line=line)
    if left:
        job.left.set()
    return job


def test_lines_take_turns_and_a_full_queue_has_room_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, told = threading.Event(), threading.Event(), list[Any]()

    def slow(_: Worker, __: QueuedJob) -> str:
        begun.set()
        assert go.wait(60)
        return "done"

    monkeypatch.setattr(Worker, "_do", slow)
    worker = Worker(4)
    worker.submit(job_of("first", told))
    assert begun.wait(60)
    for _ in range(4):
        worker.submit(job_of("many", told))
    with pytest.raises(Refusal):
        worker.submit(job_of("many", told))
    worker.submit(job_of("few", told))
    worker.submit(job_of("few", told))
    with pytest.raises(Refusal):
        worker.submit(job_of("few", told))
    assert [(line, type(what)) for line, what in told] == [("many", Refusal)] * 2
    assert worker.waiting == 4
    go.set()
    while len(told) < 7:
        time.sleep(0.01)
    worker.close()
    assert [line for line, _ in told[2:]] == ["first", "many", "few", "many", "few"]


def test_earlier_messages_are_not_read_for_nobody() -> None:
    ask, frame = SimpleNamespace(before=[("Hello", "Yes?")]), SimpleNamespace(opening="")
    with pytest.raises(CancelledError):
        _prompt(cast("Any", None), cast("Any", frame), cast("Any", ask), job_of("a", [], left=True))


def test_a_receipt_says_what_the_memory_has_and_leaves_out_what_is_unknown() -> None:
    nothing: Any = SimpleNamespace(tokenizer=None, memories=(), takes_questions=True)
    plain = Answer(
        question="", text="", tokens=[], thought=[], ended=True, seconds=0.0, trace=None, used=[], scores={}, quoted=[],
        absent=None, coverage=None, missing={}, reader=nothing,
    )  # fmt: skip
    assert receipt_of(plain) == {"sources": [], "unsupported": []}
    told = {"coverage": 1.0, "absent": [], "found": True}
    assert receipt_of(replace(plain, coverage=1.0, absent=[])) == {"sources": [], "unsupported": [], **told}
