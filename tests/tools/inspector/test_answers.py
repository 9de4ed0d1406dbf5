"""What the page's server says of a memory."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

import memstore
from memstore.memory.search import search_block
from memstore.memory.shared import Handle
from memstore.tools.inspector import data, traced
from memstore.tools.inspector.app import ANSWERS, WRITE_HEADER, Inspector
from memstore.tools.inspector.data import MOST_BLOCKS, MOST_DOCUMENTS, Words
from tests.instruct import instruct_tokenizer
from tests.tools.conftest import Cli, tiny_spec
from tests.tools.inspector.conftest import ANSWER, HOSTILE, NEEDLE, TOKENS, client_of, ids_of
from tests.tools.inspector.pages import BLOCK, fill, look, small_spec

BLOCKS = -(-TOKENS // BLOCK)
PLACE = NEEDLE // BLOCK


def test_documents_in_the_order_they_were_made(client: TestClient) -> None:
    answer = client.get("/api/documents").json()
    assert [(each["name"], each["tokens"], each["first"], each["stop"]) for each in answer["documents"]] == [
        ("book", TOKENS, 0, BLOCKS),
        ("leaflet", 40 * BLOCK + 3, 0, 41),
    ]
    assert client.get("/api/documents", params={"part": "LEAF"}).json()["found"] == 1


def test_blocks_have_their_text(client: TestClient) -> None:
    book = client.get("/api/documents").json()["documents"][0]["id"]
    answer = client.get(f"/api/documents/{book}/blocks", params={"start": PLACE, "stop": PLACE + 3}).json()
    assert [each["block"] for each in answer["blocks"]] == [PLACE, PLACE + 1, PLACE + 2]
    assert "The PASSKEY is 50494." in "".join(each["text"] for each in answer["blocks"])
    assert (answer["first"], answer["stop"], answer["tokens"]) == (0, BLOCKS, TOKENS)


@pytest.mark.parametrize(
    ("start", "stop", "there"), [(0, 0, 0), (0, 1, 1), (BLOCKS - 1, BLOCKS + 9, 1), (BLOCKS + 5, BLOCKS + 9, 0)]
)
def test_ranges_are_cut_to_what_is_there(client: TestClient, start: int, stop: int, there: int) -> None:
    book = client.get("/api/documents").json()["documents"][0]["id"]
    answer = client.get(f"/api/documents/{book}/blocks", params={"start": start, "stop": stop})
    assert answer.status_code == 200
    assert len(answer.json()["blocks"]) == there


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"start": 0},
        {"start": -1, "stop": 1},
        {"start": 5, "stop": 4},
        {"start": 0, "stop": MOST_BLOCKS + 1},
        {"start": "a", "stop": "b"},
        {"start": 10**30, "stop": 10**30},
    ],
)
def test_bad_ranges_are_refused(client: TestClient, query: dict[str, object]) -> None:
    book = client.get("/api/documents").json()["documents"][0]["id"]
    answer = client.get(f"/api/documents/{book}/blocks", params={k: str(v) for k, v in query.items()})
    assert answer.status_code == 400
    assert answer.json()["error"] == "InvalidArgument"


@pytest.mark.parametrize(
    "path",
    [
        "documents/99/blocks?start=0&stop=1",
        "documents/99/find?text=a",
        "documents/1/blocks/999999",
        "documents/1/blocks/999999/neighbours?layer=1",
        "documents/99/blocks/0/traces",
        "traces/99",
        "traces/99/steps/0",
        "traces/1/steps/999",
        "traces/99/used",
        "traces/9007199254740991/steps/9007199254740991",
    ],
)
def test_what_is_not_there_is_not_found(client: TestClient, path: str) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == 404
    assert answer.json()["message"]


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000, "-1e3", "a", "%00", "1.0"])
@pytest.mark.parametrize("path", ["documents/{}/blocks?start=0&stop=1", "documents/1/blocks/{}", "traces/{}/steps/0"])
def test_what_is_no_number_is_told(client: TestClient, path: str, number: str) -> None:
    answer = client.get(f"/api/{path.format(number)}")
    assert answer.status_code == 400
    assert "must be a whole number" in answer.json()["message"]
    assert len(answer.text) < 300


def test_a_block_down_to_its_tokens(client: TestClient) -> None:
    book = client.get("/api/documents").json()["documents"][0]["id"]
    answer = client.get(f"/api/documents/{book}/blocks/{PLACE + 1}", params={"layer": 1}).json()
    around = {"start": PLACE + 1, "stop": PLACE + 2}
    (block,) = client.get(f"/api/documents/{book}/blocks", params=around).json()["blocks"]
    assert "".join(answer["pieces"]) == block["text"]
    assert len(answer["ids"]) == len(answer["pieces"]) == len(answer["token_norms"]["k"]) == BLOCK
    assert answer["first_token"] == (PLACE + 1) * BLOCK
    assert [list(layer) for layer in answer["norms"]] == [["k"], ["k"]]
    assert (answer["landmarks"]["vectors"], answer["landmarks"]["dim"]) == (1, 4)
    assert client.get(f"/api/documents/{book}/blocks/0", params={"layer": 0}).json()["landmarks"] is None
    assert client.get(f"/api/documents/{book}/blocks/0", params={"layer": 2}).status_code == 400


def test_neighbours_are_those_of_a_search_without_the_block_itself(client: TestClient, opened: memstore.Memory) -> None:
    leaflet = opened.document("leaflet")
    answer = client.get(f"/api/documents/{leaflet.id}/blocks/5/neighbours", params={"layer": 1}).json()
    expected = search_block(leaflet, 5, 8, layer=1, among=[leaflet])
    assert [(each["block"], each["score"]) for each in answer["neighbours"]] == [(m.block, m.score) for m in expected]
    assert 5 not in [each["block"] for each in answer["neighbours"]]
    assert client.get(f"/api/documents/{leaflet.id}/blocks/5/neighbours", params={"layer": 0}).status_code == 400


def test_a_text_is_found_across_blocks_and_whatever_its_case(client: TestClient) -> None:
    book = client.get("/api/documents").json()["documents"][0]["id"]
    found: list[int] = []
    at: int | None = 0
    while at is not None:
        answer = client.get(f"/api/documents/{book}/find", params={"text": "passkey IS 50494", "start": at}).json()
        found += [each["block"] for each in answer["matches"]]
        assert answer["next"] is None or answer["next"] > at
        at = answer["next"]
    assert found == [(NEEDLE + 4) // BLOCK]


def test_common_texts_come_in_portions_and_none_twice(client: TestClient) -> None:
    leaflet = client.get("/api/documents").json()["documents"][1]["id"]
    first = client.get(f"/api/documents/{leaflet}/find", params={"text": "e"}).json()
    blocks = [each["block"] for each in first["matches"]]
    assert blocks == sorted(set(blocks))
    assert len(blocks) > 30
    assert client.get(f"/api/documents/{leaflet}/find", params={"text": "no such words"}).json()["matches"] == []
    for text in ("", "x" * 201):
        assert client.get(f"/api/documents/{leaflet}/find", params={"text": text}).status_code == 400


def test_a_trace_has_its_tokens_as_text(client: TestClient) -> None:
    answer = client.get("/api/traces/1").json()
    assert "".join(step["piece"] for step in answer["steps"]) == ANSWER
    assert answer["question"] == "The passkey is "
    assert (answer["length"], answer["layers"], answer["heads"], answer["ended"]) == (len(ANSWER), [0, 1], 2, True)
    assert answer["steps"][0]["weight"] == pytest.approx((0.875 + 0.75) / 2, abs=1e-3)
    assert answer["steps"][0]["tiers"] == [0, 4, 0, 0, 0]
    later = client.get("/api/traces/1", params={"start": 4, "stop": 6}).json()
    assert [step["piece"] for step in later["steps"]] == list(ANSWER[4:6])
    assert client.get("/api/traces/1", params={"start": 0, "stop": 10_000}).status_code == 400


def test_a_step_names_the_blocks_that_it_used(client: TestClient) -> None:
    both = client.get("/api/traces/1/steps/3").json()["blocks"]
    assert (both[0]["block"], round(both[0]["weight"], 3)) == (PLACE, 0.375)
    one = client.get("/api/traces/1/steps/3", params={"layer": 1, "head": 0}).json()["blocks"]
    assert [(each["block"], round(each["weight"], 3)) for each in one] == [(PLACE, 0.75), (3, 0.125)]
    assert (one[0]["name"], one[0]["tier"], one[0]["layer"], one[0]["score"]) == ("book", "host", 1, 7.5)
    assert one[0]["text"]
    assert client.get("/api/traces/1/steps/3", params={"layer": 9}).json()["blocks"] == []


def test_a_block_knows_the_traces_that_retrieved_it(client: TestClient) -> None:
    book = client.get("/api/documents").json()["documents"][0]["id"]
    answer = client.get(f"/api/documents/{book}/blocks/{PLACE}/traces").json()
    assert answer["traces"] == [{"trace": 1, "steps": len(ANSWER), "best": 0, "weight": pytest.approx(0.375, abs=1e-3)}]
    assert client.get(f"/api/documents/{book}/blocks/20000/traces").json()["traces"] == []


def test_a_whole_trace_names_the_blocks_that_it_used(client: TestClient) -> None:
    answer = client.get("/api/traces/1/used").json()
    assert answer["blocks"][0]["block"] == PLACE
    assert answer["found"] == len(answer["blocks"]) == 2 * len(ANSWER) + 1  # block 7 is also of the eighth step


def test_scores_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as memory:
        fill(memory.document("book"), memstore_ids(3 * BLOCK))
        with memory.traces.record(documents=["book"], prompt=[1], layers=[1]) as recorder:
            recorder.begin()
            seen = look([1, -1], [float("nan"), float("nan")])
            seen.scores[:], seen.document[0, 1] = float("-inf"), -1
            recorder.look(seen)
            recorder.token(5)
        client = client_of(Inspector(memory))
        (block,) = client.get("/api/traces/1/steps/0").json()["blocks"]
        assert (block["block"], block["weight"], block["score"]) == (1, 0.0, None)
        assert client.get("/api/traces/1").json()["steps"][0]["weight"] == 0.0
        assert client.get("/api/live").json()["traces"][0]["steps"] == 1


def test_a_trace_is_listed_with_the_documents_it_quoted_and_without_control_tokens(
    tmp_path: Path, instruct_folder: Path
) -> None:
    answer = instruct_tokenizer()("y<|end|>", add_special_tokens=False).input_ids
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as memory:
        memory.put_info("model", {"name": str(instruct_folder)})
        fill(memory.document("book"), memstore_ids(3 * BLOCK))
        names = ["a", "b", "c", "book", "x" * 5000]
        for quoted in ([["book", 1], ["book", 2], ["x" * 5000, 0]], [], "odd"):
            with memory.traces.record(documents=names, quoted=quoted) as recorder:
                for token in answer:
                    recorder.begin()
                    recorder.token(token)
        odd, usual, told = client_of(Inspector(memory)).get("/api/live").json()["traces"]
        assert (told["answer"], told["documents"]) == ("y", ["book", "x" * 200])
        assert usual["documents"] == odd["documents"] == names[:3]


@pytest.mark.parametrize(
    "facts",
    [
        {"layers": 5, "heads": 10**9, "documents": [1, {"a": 1}, None, "book"], "prompt": "abc", "question": ["<b>"]},
        {"layers": "abc", "heads": "x", "documents": "book", "prompt": ["a", -1, 10**30], "started": "yesterday"},
        {"layers": [{}, "<b>"], "heads": -4, "documents": {"book": 1}, "question": "q" * 10**6, "mechanism": {}},
    ],
)
def test_odd_facts_of_a_trace_harm_no_page(tmp_path: Path, model_folder: Path, facts: dict[str, object]) -> None:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as memory:
        memory.put_info("model", {"name": str(model_folder)})
        fill(memory.document("book"), memstore_ids(3 * BLOCK))
        with memory.traces.record(**facts) as recorder:
            for token in (1, -5, 2**40):
                recorder.begin()
                recorder.look(look([1, 2], [0.5, 0.25]))
                recorder.token(token)
        client = client_of(Inspector(memory))
        live, trace = client.get("/api/live"), client.get("/api/traces/1")
        assert (live.status_code, trace.status_code) == (200, 200)
        assert len(live.text) + len(trace.text) < 10_000
        assert trace.json()["layers"] == []
        assert trace.json()["heads"] <= 1024
        assert [each["piece"] for each in trace.json()["steps"]][1:] == ["", ""]
        assert client.get("/api/traces/1/steps/2").json()["blocks"][0]["block"] == 1


def test_a_trace_that_was_broken_off_is_not_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as memory:
        recorder = memory.traces.record(documents=[])
        recorder.begin()
        client = client_of(Inspector(memory))
        (now,) = client.get("/api/live").json()["traces"]
        assert (now["ended"], now["quiet"]) == (False, False)
        later = time.time() + 61
        monkeypatch.setattr("memstore.tools.inspector.traced.time.time", lambda: later)
        (then,) = client.get("/api/live").json()["traces"]
        assert (then["ended"], then["quiet"]) == (False, True)
        recorder.close()


def memstore_ids(count: int) -> torch.Tensor:
    return torch.arange(count)


def test_without_a_tokenizer_there_are_token_ids(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as memory:
        document = memory.document("book")
        fill(document, memstore_ids(2 * BLOCK + 1))
        client = client_of(Inspector(memory))
        assert "does not name the model" in client.get("/api/text").json()["missing"]
        blocks = client.get(f"/api/documents/{document.id}/blocks", params={"start": 2, "stop": 9}).json()["blocks"]
        assert blocks == [{"block": 2, "text": "62", "tokens": 1, "dropped": False}]
        found = client.get(f"/api/documents/{document.id}/find", params={"text": "30 31 32"}).json()
        assert [each["block"] for each in found["matches"]] == [0]
        assert client.get(f"/api/documents/{document.id}/blocks/2").json()["pieces"] == ["62"]


def test_documents_that_are_forgotten_and_made_meanwhile(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as writer:
        fill(writer.document("old"), memstore_ids(40))
        with memstore.open(tmp_path / "notes.mem", mode="r") as memory:
            client = client_of(Inspector(memory))
            old = client.get("/api/documents").json()["documents"][0]["id"]
            writer.forget("old")
            assert client.get(f"/api/documents/{old}/blocks", params={"start": 0, "stop": 1}).status_code == 404
            fill(writer.document("old"), memstore_ids(80))
            (new,) = client.get("/api/documents").json()["documents"]
            assert new["id"] != old
            assert client.get("/api/live").json()["sizes"]["tokens"] == 80


@pytest.mark.parametrize("wanted", ["blocks", "numbers"])
def test_a_document_that_is_forgotten_during_a_listing_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Another process forgets it after it was listed, or after the first look at its entry."""
    with memstore.open(tmp_path / "m", spec=small_spec()) as writer, memstore.open(tmp_path / "m", mode="r") as memory:
        fill(writer.document("old"), memstore_ids(40))
        fill(writer.document("new"), memstore_ids(80))
        new, listed, current = writer.document("new").id, memory.documents, Handle.current
        there = ["old"]

        def late(of: Handle | None = None) -> object:
            found = listed() if of is None else current(of)
            if there and (of is None or of.name == "old"):
                writer.forget(there.pop())
            return found

        if wanted == "blocks":
            monkeypatch.setattr(memory, "documents", late)
            answer = client_of(Inspector(memory)).get(f"/api/documents/{new}/blocks", params={"start": 0, "stop": 1})
            assert answer.json()["tokens"] == 80
        else:
            monkeypatch.setattr(Handle, "current", late)
            assert traced._numbers(memory)["new"] == new
        assert not there


def test_a_text_is_found_in_its_block_while_the_first_blocks_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = dataclasses.replace(small_spec(), capacity=4)
    with memstore.open(tmp_path / "m", spec=spec) as writer, memstore.open(tmp_path / "m", mode="r") as memory:
        fill(writer.document("book"), memstore_ids(4 * BLOCK))
        client, rows = client_of(Inspector(memory)), data.rows

        def late(document: memstore.Document, wanted: range) -> list[tuple[int, list[int]]]:
            if len(writer.document("book")) == 4 * BLOCK:
                fill(writer.document("book"), memstore_ids(2 * BLOCK))
            return rows(document, wanted)

        monkeypatch.setattr(data, "rows", late)
        book = writer.document("book").id
        found = client.get(f"/api/documents/{book}/find", params={"text": f"{3 * BLOCK} {3 * BLOCK + 1}"}).json()
        assert len(writer.document("book")) == 6 * BLOCK
        assert [each["block"] for each in found["matches"]] == [3]


def test_of_many_documents_the_first_are_listed(tmp_path: Path) -> None:
    with memstore.open("ram:", spec=small_spec()) as memory:
        for number in range(MOST_DOCUMENTS + 3):
            fill(memory.document(f"note {number}"), memstore_ids(1))
        client = client_of(Inspector(memory))
        answer = client.get("/api/documents").json()
        assert (len(answer["documents"]), answer["found"]) == (MOST_DOCUMENTS, MOST_DOCUMENTS + 3)
        (last,) = client.get("/api/documents", params={"part": "note 202"}).json()["documents"]
        blocks = client.get(f"/api/documents/{last['id']}/blocks", params={"start": 0, "stop": 0}).json()
        names = {"name": "note 202", "raw_name": "note 202"}
        assert blocks == {**names, "first": 0, "stop": 1, "tokens": 1, "blocks": []}


def test_traces_that_are_damaged_hide_no_documents(writable: Path) -> None:
    (writable / "traces.sqlite").write_bytes(b"not a database" * 1000)
    with memstore.open(writable, mode="r") as memory:
        client = client_of(Inspector(memory))
        live = client.get("/api/live").json()
        assert "traces.sqlite" in live["trouble"]
        assert (live["traces"], live["sizes"]["documents"]) == ([], 2)
        assert client.get("/api/traces/1").status_code == 500
        assert "traces.sqlite" in client.get("/api/traces/1").json()["message"]


def test_a_memory_that_is_removed_meanwhile_is_told(writable: Path) -> None:
    with memstore.open(writable, mode="r") as memory:
        client = client_of(Inspector(memory))
        shutil.rmtree(writable)
        answer = client.get("/api/live")
        assert answer.status_code == 404
        assert "the memory was removed" in answer.json()["message"]


def test_a_fault_of_the_system_is_told(writable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def live(memory: memstore.Memory) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setitem(cast("Any", ANSWERS), "live", live)
    with memstore.open(writable, mode="r") as memory:
        answer = client_of(Inspector(memory)).get("/api/live")
    assert answer.status_code == 500
    assert "Too many open files" in answer.json()["message"]


def test_a_zarr_memory_is_shown_too(tmp_path: Path) -> None:
    url = f"zarr:{tmp_path / 'notes.zarr'}"
    with memstore.open(url, spec=tiny_spec()) as memory:
        document = memory.document("book")
        from tests.tools.conftest import append

        append(document, 11)
    with memstore.open(url, mode="r") as memory:
        client = client_of(Inspector(memory))
        (found,) = client.get("/api/documents").json()["documents"]
        assert client.get(f"/api/documents/{found['id']}/blocks/1", params={"layer": 1}).status_code == 200


@pytest.fixture
def writable(tmp_path: Path, book: Path) -> Path:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as memory:
        fill(memory.document("a"), memstore_ids(40))
        fill(memory.document("b"), memstore_ids(40))
        with memory.traces.record(documents=["a"]) as recorder:
            recorder.begin()
    return tmp_path / "notes.mem"


def test_pins_documents_and_traces_can_be_changed_where_that_is_allowed(writable: Path) -> None:
    with memstore.open(writable, mode="r") as memory:
        client = client_of(Inspector(memory, allow_write=True))
        client.headers[WRITE_HEADER] = client.get("/api/memory").json()["write_token"]
        first, second = (each["id"] for each in client.get("/api/documents").json()["documents"])
        assert client.post("/api/do/pin", json={"document": first}).json() == {"done": "pin"}
        assert client.get("/api/documents").json()["documents"][0]["pinned"]
        assert client.post("/api/do/unpin", json={"document": first}).status_code == 200
        assert not client.get("/api/documents").json()["documents"][0]["pinned"]
        assert client.post("/api/do/forget", json={"document": second}).status_code == 200
        assert [each["name"] for each in client.get("/api/documents").json()["documents"]] == ["a"]
        assert client.post("/api/do/remove-trace", json={"trace": 1}).status_code == 200
        assert client.get("/api/live").json()["found"] == 0
        assert client.post("/api/do/forget", json={"document": second}).status_code == 404
        assert client.post("/api/do/erase", json={}).status_code == 400
        for body in ("[]", "nonsense", '{"document": "a"}', "{}", '{"document": true}'):
            assert client.post("/api/do/forget", content=body).status_code == 400
        with memstore.open(writable):  # what another process does while it writes
            answer = client.post("/api/do/pin", json={"document": first})
            assert answer.status_code == 409
            told = answer.json()
            assert (told["error"], told["code"], told["memory"]) == ("MemoryInUse", "in-use", str(writable))


def test_what_would_be_obeyed_is_spelled_out(
    tmp_path: Path, model_folder: Path, encode: PreTrainedTokenizerFast
) -> None:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as memory:
        memory.put_info("model", {"name": str(model_folder)})
        document = memory.document(f"name\n{HOSTILE}"[:100])
        fill(document, ids_of(encode, HOSTILE))
        client = client_of(Inspector(memory))
        answer = client.get("/api/documents").json()["documents"][0]
        blocks = client.get(f"/api/documents/{document.id}/blocks", params={"start": 0, "stop": 9}).json()["blocks"]
        for text in (answer["name"], "".join(block["text"] for block in blocks)):
            assert "<script>window.hacked" in text
            assert not any(character in text for character in "\0\x1b\u202e")


def test_pieces_join_to_the_text_also_of_letters_of_many_bytes(book: Path, encode: PreTrainedTokenizerFast) -> None:
    with memstore.open(book, mode="r") as memory:
        words = Words(memory)
        ids = ids_of(encode, "naïve 雨 ☂ end").tolist()
        pieces = words.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == "naïve 雨 ☂ end"
        assert "雨" in pieces
        assert words.pieces([]) == []
        assert words.pieces(ids_of(encode, "雨").tolist()[:2]) == ["", "�"]


def test_the_model_that_read_a_text_is_asked(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"Night {number} was dark, {number**2} drops." for number in range(30)))
    path = tmp_path / "notes.mem"
    assert cli("read", tmp_path / "text.txt", path, "--model", model_folder, "--block-size", 16).code == 0
    by_command = cli("search", path, "--text", "a dark night", "--top-k", 20, "--json").json["matches"]
    with memstore.open(path, mode="r") as memory:
        client = client_of(Inspector(memory))
        assert client.get("/api/memory").json()["can_ask"]
        document = client.get("/api/documents").json()["documents"][0]["id"]
        answer = client.get(f"/api/documents/{document}/ask", params={"text": "a dark night"}).json()
        assert [each["block"] for each in answer["matches"]] == [each["block"] for each in by_command]
        empty = client.get(f"/api/documents/{document}/ask", params={"text": " "})
        assert (empty.status_code, empty.json()["message"]) == (400, "the search text is empty. Pass some words.")


def test_why_a_model_cannot_be_asked_is_told(client: TestClient) -> None:
    answer = client.get("/api/documents/1/ask", params={"text": "a dark night"})
    assert answer.status_code == 409
    assert "was made by another model" in answer.json()["message"]


def test_a_copy_of_the_folder_is_shown_like_the_folder(book: Path, tmp_path: Path) -> None:
    shutil.copytree(book, tmp_path / "copy.mem")
    with memstore.open(tmp_path / "copy.mem", mode="r") as memory:
        assert client_of(Inspector(memory)).get("/api/traces/1").status_code == 200
