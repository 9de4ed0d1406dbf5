"""The page's ask box: answers by the routes of `memstore serve`, recorded as traces, and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

import memstore
from memstore.tools.app import main
from memstore.tools.inspector.app import READ_HEADER, Inspector
from tests.tools.inspector.conftest import client_of
from tests.tools.inspector.test_page import Seen, shown

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

TEXTS = {"cottage": "The key of the cottage hangs in the woodshed. ", "ferry": "The last ferry leaves at 19:40. "}
ASKED = {"model": "notes", "messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 5, "stream": True}
CHAT = "/v1/chat/completions"
SCREENS = ((390, "light"), (390, "dark"), (768, "dark"), (1024, "light"), (1400, "dark"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, instruct_folder: Path) -> Path:
    """A memory of two documents, read by a model with a chat template."""
    folder = tmp_path_factory.mktemp("asked")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text * 8)
    texts = [str(folder / f"{name}.txt") for name in TEXTS]
    options = ["--model", str(instruct_folder), "--dtype", "float32", "--block-size", "16"]
    assert main(["read", *texts, str(folder / "notes.mem"), *options]) == 0
    return folder / "notes.mem"


@pytest.fixture
def asked(made: Path) -> Iterator[memstore.Memory]:
    with memstore.open(made, mode="r") as memory:
        yield memory


def events(client: TestClient, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    """What a stream tells."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer_is_streamed_and_recorded_and_says_where_its_attention_went(asked: memstore.Memory) -> None:
    inspector = Inspector(asked)
    client = client_of(inspector)
    try:
        told = events(client, ASKED)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in told)
        number = told[-1]["trace"]
        (listed,) = [each for each in client.get("/api/live").json()["traces"] if each["number"] == number]
        assert listed["question"] == "Where is it?"
        assert listed["ended"]
        trace = client.get(f"/api/traces/{number}").json()
        assert "".join(step["piece"] for step in trace["steps"]).strip() == text == listed["answer"]
        for step in trace["steps"]:
            # Nothing is lost: what went to blocks and what went elsewhere is all that there is.
            assert step["weight"] + sum(step["elsewhere"]) == pytest.approx(1, abs=0.01)
            assert sum(weight for *_, weight in step["blocks"]) == pytest.approx(step["weight"], abs=0.01)
        one = client.get(f"/api/traces/{number}", params={"layer": 1, "head": 2}).json()["steps"][2]
        assert one["weight"] + sum(one["elsewhere"]) == pytest.approx(1, abs=0.01)
        assert one["weight"] != pytest.approx(trace["steps"][2]["weight"], abs=1e-4)
        whole = client.get(f"/api/traces/{number}/overview").json()
        assert len(whole["by_step"]) == len(trace["steps"])
        assert [len(heads) for heads in whole["by_head"]] == [4] * len(whole["layers"])
        cells = [share for row in whole["by_step"] for share in row]
        assert sum(cells) / len(cells) == pytest.approx(
            sum(step["weight"] for step in trace["steps"]) / len(trace["steps"]), abs=0.01
        )
    finally:
        inspector.close()


def test_a_list_that_stays_is_fetched_once(asked: memstore.Memory) -> None:
    inspector = Inspector(asked)
    client = client_of(inspector)
    try:
        number = events(client, ASKED)[-1]["trace"]
        trace = client.get(f"/api/traces/{number}").json()
        kept = trace["tiers"].index("kept")
        first, *later = [step["tiers"] for step in trace["steps"]]
        assert sum(first[:kept]) > 0 == first[kept]
        assert later
        for tiers in later:
            assert sum(tiers[:kept]) == 0 < tiers[kept]
    finally:
        inspector.close()


def test_one_document_can_be_asked_and_words_be_gone_on_from(asked: memstore.Memory) -> None:
    inspector = Inspector(asked)
    client = client_of(inspector)
    try:
        sources = events(client, {**ASKED, "metadata": {"document": "ferry"}})[-1]["sources"]
        assert {source["document"] for source in sources} == {"ferry"}
        raw = {"model": "notes", "prompt": "The last ferry", "max_tokens": 3, "stream": True}
        assert events(client, raw, "/v1/completions")[-1]["trace"]
        missing = client.post(CHAT, json={**ASKED, "metadata": {"document": "nowhere"}})
        assert missing.status_code == 404
        assert "cottage" in missing.json()["error"]["message"]
    finally:
        inspector.close()


def test_who_may_ask(asked: memstore.Memory) -> None:
    inspector = Inspector(asked)
    stranger, owner = client_of(inspector, token=False), client_of(inspector)
    cookie = {key: value for key, value in owner.headers.items() if key.lower() != READ_HEADER}
    recorded = len(asked.traces.list())
    try:
        assert stranger.post(CHAT, json=ASKED).status_code == 403
        assert stranger.post(CHAT, json=ASKED, headers=cookie).status_code == 403
        assert owner.post(CHAT, json=ASKED, headers={"origin": "http://evil.example"}).status_code == 403
        assert owner.post(CHAT, json=ASKED, headers={"host": "evil.example"}).status_code == 403
        assert owner.post(CHAT, content=json.dumps(ASKED), headers={"content-type": "text/plain"}).status_code == 415
        assert owner.post("/v1/models", json={}).status_code == 403
        talk = owner.post(CHAT, json={**ASKED, "metadata": {"session": "ada"}})
        assert talk.status_code == 403
        assert "no conversations" in talk.json()["error"]["message"]
        assert len(asked.traces.list()) == recorded, "nothing was asked"
    finally:
        inspector.close()


def test_a_memory_that_names_no_model_has_no_ask_box(inspector: Inspector, tmp_path: Path) -> None:
    from tests.tools.conftest import tiny_spec

    with memstore.open(tmp_path / "blind.mem", spec=tiny_spec()) as memory:
        client = client_of(Inspector(memory))
        assert not client.get("/api/memory").json()["can_ask"]
        assert client.post(CHAT, json=ASKED).status_code == 403


def ask(seen: Seen, words: str) -> None:
    seen.run("document.querySelector('#question').value = arguments[0]", words)
    seen.run("document.querySelector('#ask').requestSubmit()")
    seen.until("document.querySelector('#ask button').textContent === 'Ask'")
    seen.until("document.querySelector('#answer .token')")


@pytest.mark.slow
def test_a_question_is_answered_on_the_page_and_drawn(asked: memstore.Memory, chrome: Chrome) -> None:
    with shown(chrome, asked) as seen:
        ask(seen, "When does the ferry leave?")
        seen.wait_for("#traces li.chosen", "When does the ferry leave?")
        seen.wait_for("#answer .question", "When does the ferry leave?")
        seen.wait_for("#used h2", "Used by the whole trace")
        seen.wait_for(".answer .where", "mean of")  # though each token was chosen as it came
        assert "step=" not in seen.driver.current_url
        shares = seen.run(
            "return [...document.querySelectorAll('.legend.parts li')]"
            ".map(each => [each.children[1].textContent, parseFloat(each.querySelector('b').textContent) || 0])"
        )
        assert {"question", "answer so far", "window", "sink", "other"} <= {name for name, _ in shares}
        assert sum(share for _, share in shares) == pytest.approx(100, abs=3)
        for canvas in ("bars", "map"):
            assert seen.run(f"return document.querySelector('#answer canvas.{canvas}').width") > 0
        # A bar is a hundred per cent high: the canvas is painted from its foot to its top.
        painted = (
            "return (([canvas, pen]) => [0.02, 0.5, 0.98].map(part => "
            "pen.getImageData(2, Math.round(canvas.height * part), 1, 1).data[3]))"
            "((canvas => [canvas, canvas.getContext('2d')])(document.querySelector('#answer canvas.bars')))"
        )
        assert seen.run(painted) == [255, 255, 255]
        seen.click("#answer .token:nth-child(2)")
        seen.wait_for(".answer .where", "of step 1")
        assert "% of " in seen.text("#hits")


@pytest.mark.slow
def test_two_traces_side_by_side(asked: memstore.Memory, chrome: Chrome) -> None:
    with shown(chrome, asked) as seen:
        ask(seen, "Where is the key?")
        ask(seen, "When does it leave?")
        seen.click("#traces li:nth-child(2) .acts button")
        seen.wait_for("#other .question", "Where is the key?")
        seen.wait_for("#used h2", "Used by both traces")
        assert seen.run("return document.querySelectorAll('#used .hit')[0].querySelectorAll('.attention').length") == 2
        seen.click("#other .token:nth-child(1)")
        seen.wait_for("#used h2", "step 0")
        seen.click("#other .close")
        seen.until("document.querySelector('#other').hidden && !document.querySelector('#answer').hidden")


@pytest.mark.slow
def test_what_comes_late_does_not_take_the_place_of_a_chosen_token(asked: memstore.Memory, chrome: Chrome) -> None:
    with shown(chrome, asked) as seen:
        ask(seen, "Where is the key?")
        ask(seen, "When does it leave?")
        seen.wait_for("#used h2", "Used by the whole trace")
        seen.run(
            "const fetched = window.fetch; window.waiting = 0; window.fetch = async (path, ...how) => {"
            " if (!path.includes('/used')) return fetched(path, ...how);"
            " window.waiting += 1; await new Promise(later => setTimeout(later, 1500));"
            " setTimeout(() => { window.late = true; window.waiting -= 1; }, 300); return fetched(path, ...how); }"
        )
        seen.click("#traces li:nth-child(2) .acts button")
        seen.click("#other .token:nth-child(1)")
        seen.wait_for("#used h2", "step 0")
        seen.until("window.late && !window.waiting")
        assert "step 0" in seen.text("#used h2")


@pytest.mark.slow
def test_a_chat_is_kept_and_shown(made: Path, chrome: Chrome) -> None:
    with memstore.open(made, mode="r") as memory, shown(chrome, memory, allow_write=True) as seen:
        pick = "const how = document.querySelector('#how'); how.value = 'chat'; how.dispatchEvent(new Event('change'))"
        # What was said before comes late: it does not take the place of what is asked meanwhile.
        seen.run(
            "const fetched = window.fetch; window.fetch = async (path, ...how) => {"
            " const reply = await fetched(path, ...how); if (!path.includes('conversations')) return reply;"
            " await new Promise(later => setTimeout(later, 1000));"
            " setTimeout(() => { window.late = true; }); return reply; }"
        )
        seen.run(pick)
        ask(seen, "Hello there.")
        seen.until("window.late")
        assert seen.text("#asked .user") == "Hello there."
        seen.driver.refresh()
        seen.until("!document.body.hasAttribute('aria-busy')")
        seen.run(pick)
        seen.wait_for("#asked .user", "Hello there.")
        seen.wait_for("#documents", "chat/chat")


# How bright the page is, and how each visible text stands out from the paper or panel that it is on (WCAG 2: 1 to 21).
BRIGHTNESS = r"""
const light = colour => {
  const [red, green, blue] = colour.match(/[\d.]+/g).map(each => (each / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
};
const opaque = each => getComputedStyle(each).backgroundColor.startsWith("rgb(");
const paper = each => opaque(each) ? each : paper(each.parentElement);
const texts = [...document.querySelectorAll("body *")].filter(
  each => each.offsetWidth && [...each.childNodes].some(node => node.nodeType == 3 && node.data.trim()));
const contrasts = texts.map(each => {
  const ratio = light(getComputedStyle(each).color) / light(getComputedStyle(paper(each)).backgroundColor);
  return [Math.max(ratio, 1 / ratio), each.outerHTML];
});
return [light(getComputedStyle(document.documentElement).backgroundColor), contrasts.sort((a, b) => a[0] - b[0])[0]];
"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "colours"), SCREENS)
def test_nothing_is_cut_off_or_faint_and_a_phone_has_tabs(
    asked: memstore.Memory, chrome: Chrome, width: int, colours: str
) -> None:
    with shown(chrome, asked) as seen:
        if not asked.traces.list():
            ask(seen, "Where is it?")
        seen.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        wanted = [{"name": "prefers-color-scheme", "value": colours}]
        seen.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
        try:
            paper, (contrast, text) = seen.run(BRIGHTNESS)
            assert (paper < 0.1) == (colours == "dark")
            assert contrast > 4, text
            visible = (
                "return ['#flow', '#left', '#right', '#pair'].filter(each => document.querySelector(each).offsetWidth)"
            )
            assert seen.run("return document.documentElement.scrollWidth") == width
            seen.run(
                "const box = document.querySelector('#question'); box.value = 'many words '.repeat(12);"
                "box.dispatchEvent(new Event('input'))"
            )
            assert (
                seen.run("return (box => box.scrollHeight - box.clientHeight)(document.querySelector('#question'))")
                == 0
            )
            if width < 600:
                assert seen.run(visible) == ["#pair"]
                parts = {"text": "#flow", "documents": "#left", "details": "#right"}
                for tab, part in parts.items():
                    seen.click(f"#tabs [data-tab={tab}]")
                    assert seen.run(visible) == [part]
                    assert seen.run("return document.querySelector(arguments[0]).offsetWidth", part) > width * 0.9
                    low = "[...document.querySelectorAll('#tabs button')].map(each => each.offsetHeight)"
                    assert min(seen.run(f"return {low}")) >= 40
            elif width < 900:
                assert seen.run(visible) == ["#flow", "#right", "#pair"]
                seen.click("#tabs [data-tab=documents]")
                assert seen.run(visible) == ["#flow", "#left", "#pair"]
            else:
                assert seen.run(visible) == ["#flow", "#left", "#right", "#pair"]
        finally:
            seen.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            seen.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.slow
def test_the_words_of_the_page_are_explained(asked: memstore.Memory, chrome: Chrome) -> None:
    with shown(chrome, asked) as seen:
        seen.click("#explain")
        seen.until("document.querySelector('#help').open")
        for word in ("amber", "trace", "landmark", "score", "window", "kept"):
            assert word in seen.text("#help")
        seen.click("#help button")
        seen.press("?")
        seen.until("document.querySelector('#help').open")
