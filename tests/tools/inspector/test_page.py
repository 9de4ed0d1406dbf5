"""The page in a real browser: what a person sees and clicks."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import memstore
from memstore.tools.serve import open_browser
from tests.tools.inspector.conftest import ANSWER, HOSTILE, NEEDLE, ids_of
from tests.tools.inspector.pages import BLOCK, fill, served, small_spec

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.slow

PLACE = NEEDLE // BLOCK
PATIENCE = 60.0  # seconds, on a machine that does other things too
RECORD = """
import sys, memstore
from memstore.memory import traces
from tests.tools.inspector.pages import look
traces.INTERVAL = 0.0  # every step is written when the next begins
with memstore.open(sys.argv[1], mode="r") as memory:
    facts = {"mechanism": "attach", "layers": [1], "heads": 2, "documents": ["leaflet"]}
    with memory.traces.record(**facts, question="What now?") as recorder:
        for number, line in enumerate(sys.stdin):
            recorder.begin()
            recorder.look(look([number + 10, 2], [0.5, 0.25], document="leaflet"))
            recorder.token(int(line))
            print(number, flush=True)
"""


class Seen:
    """A page in the browser, as tests look at it."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: object) -> Any:
        """What ``script`` returns, once that is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < end, f"{script} stays {value!r}; the page says: {self.run(WORDS)}"
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        # In one go, for what is there now may be drawn anew before another script comes.
        self.until("(found => found && (found.click(), true))(document.querySelector(arguments[0]))", selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def wheel(self, pixels: int) -> None:
        turned = "new WheelEvent('wheel', {deltaY: arguments[0], cancelable: true})"
        self.run(f"document.querySelector('#flow').dispatchEvent({turned})", pixels)

    def heap(self) -> int:
        """Bytes of JavaScript after a garbage collection."""
        self.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        return int(self.run("return performance.memory.usedJSHeapSize"))

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def rows(self) -> list[int]:
        rows: list[int] = self.run(
            "return [...document.querySelectorAll('.row')].map(row => Number(row.dataset.block))"
        )
        return rows

    def wait_for(self, selector: str, words: str) -> None:
        self.until("(document.querySelector(arguments[0])?.textContent ?? '').includes(arguments[1])", selector, words)


WORDS = "return document.body.innerText.slice(0, 700)"


@contextmanager
def shown(driver: Chrome, memory: memstore.Memory, *, allow_write: bool = False, expected: str = "-") -> Iterator[Seen]:
    """The page of a memory; nothing that it did was refused by its policy or went wrong, but what was ``expected``."""
    driver.get("about:blank")
    driver.get_log("browser")  # type: ignore[no-untyped-call]
    with served(memory, allow_write=allow_write) as link:
        driver.get(link)
        seen = Seen(driver)
        seen.until("!document.body.hasAttribute('aria-busy')")
        yield seen
        driver.get("about:blank")
    logged = [entry["message"] for entry in driver.get_log("browser")]  # type: ignore[no-untyped-call]
    assert [each for each in logged if expected not in each] == []


@pytest.fixture
def page(opened: memstore.Memory, chrome: Chrome) -> Iterator[Seen]:
    """The page of the book, with its trace."""
    with shown(chrome, opened) as seen:
        yield seen


def test_it_opens_with_the_documents_and_the_latest_trace(page: Seen) -> None:
    assert "token=" not in page.driver.current_url
    assert [page.text(f"#documents li:nth-child({place}) .name") for place in (1, 2)] == ["book", "leaflet"]
    assert page.text("#answer .tokens") == ANSWER
    assert page.text("#answer .question") == "The passkey is "
    page.wait_for("#used", "Used by the whole trace")
    page.wait_for(f"#row-{PLACE}", "PASSKEY")
    assert "1,000,000 tokens" in page.text("#title")
    assert "1,001,243" in page.text("#sizes")
    assert "100%" in page.text("#hits")


def test_a_token_lights_up_the_blocks_that_it_used(page: Seen) -> None:
    page.click("#answer .token:nth-child(5)")
    page.wait_for("#used h2", "Used for “4”, step 4")
    page.until("document.querySelectorAll('.row.lit').length")
    assert page.text(f"#row-{PLACE} .gutter i") == "38%"
    assert page.text("#used li:nth-child(1) b") == f"book · {PLACE:,}"
    shades = page.run(
        "return ['#row-' + arguments[0], '.row:not(.lit)'].map(row => "
        "getComputedStyle(document.querySelector(row)).backgroundColor)",
        PLACE,
    )
    assert shades[0] != shades[1]
    page.click("#used li:nth-child(2) button")
    page.wait_for("#row-104 .gutter i", "25%")


def test_layers_and_heads_can_be_chosen(page: Seen) -> None:
    page.click("#answer .token:nth-child(2)")
    page.wait_for("#used h2", "step 1")
    page.run(
        "const s = document.querySelector('#answer select.layer'); s.value = '1'; s.dispatchEvent(new Event('change'))"
    )
    page.until("document.querySelectorAll('#used li').length === 2")
    assert page.text("#used li:nth-child(1) .attention") == "75%"
    page.run(
        "const s = document.querySelector('#answer select.head'); s.value = '0'; s.dispatchEvent(new Event('change'))"
    )
    page.wait_for("#used li:nth-child(1) .attention", "75%")
    page.run(
        "const s = document.querySelector('#answer select.layer'); s.value = '0'; s.dispatchEvent(new Event('change'))"
    )
    page.wait_for("#used li:nth-child(1)", "book · 101")


def test_of_choices_made_quickly_the_last_one_counts(page: Seen) -> None:
    page.run(
        """const get = window.fetch; let asked = 0;
        window.fetch = async (...given) => {
          const answer = await get(...given);
          if (/steps/.test(given[0]) && !asked++) {
            await new Promise((later) => setTimeout(later, 500));
            setTimeout(() => { window.firstHasCome = true; }, 100);
          }
          return answer;
        };
        document.querySelector('#answer .token:nth-child(5)').click();
        for (const value of ['1', '0']) {
          const layer = document.querySelector('#answer select.layer');
          layer.value = value;
          layer.dispatchEvent(new Event('change'));
        }"""
    )
    page.wait_for("#used li:nth-child(1)", "book · 104")
    page.until("window.firstHasCome")  # the answer of all layers
    assert "book · 104" in page.text("#used li:nth-child(1)")


def test_a_block_shows_tokens_norms_landmark_neighbours_and_traces(page: Seen) -> None:
    page.click("#documents li:nth-child(1) button")
    page.click("#row-0")
    page.wait_for("#block", "Block 0")
    page.wait_for("#block", "in 1 steps, most in step 0")
    assert page.run("return document.querySelectorAll('#block .pieces .token').length") == BLOCK
    assert page.text("#block .pieces").startswith("It␣was␣a␣dark")
    assert "Landmark in layer 1" in page.text("#block")
    assert page.run("return document.querySelector('#block canvas').width") > 0
    assert page.run("return document.querySelectorAll('#block ol .hit').length") == 8
    page.click("#block tbody tr:nth-child(1) button")
    page.wait_for("#block", "Layer 0 has no landmarks.")
    page.click("#block ul .hit")
    page.wait_for("#used h2", "step 0")


def test_arrows_walk_through_blocks_and_tokens(page: Seen) -> None:
    from selenium.webdriver.common.keys import Keys

    page.click("#documents li:nth-child(1) button")
    page.click("#row-3")
    page.wait_for("#block h2", "Block 3")
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    page.wait_for("#block h2", "Block 5")
    page.press(Keys.ARROW_UP)
    page.wait_for("#block h2", "Block 4")
    assert page.run("return document.querySelector('#flow').getAttribute('aria-activedescendant')") == "row-4"
    page.press(Keys.ARROW_RIGHT)
    page.wait_for("#used h2", "step 0")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.wait_for("#used h2", "step 2")
    page.press(Keys.ESCAPE)
    page.until("document.querySelector('#answer').hidden && !document.querySelector('.row.lit')")


def test_a_text_is_searched_for_and_found(page: Seen) -> None:
    from selenium.webdriver.common.keys import Keys

    page.click("#documents li:nth-child(1) button")
    page.press("/", *"the passkey", Keys.ENTER)
    page.until("document.querySelectorAll('#found li').length")
    page.click("#found li button")
    page.wait_for("#block h2", "Block")
    marked = page.until("document.querySelector('.row mark')?.textContent")
    assert marked == "The PASSKEY"
    page.run("document.querySelector('#query').value = 'passkey is 50494'")
    page.run("document.querySelector('#search').requestSubmit()")
    marks = "[...document.querySelectorAll('.row mark')].map(mark => mark.textContent)"
    assert page.until(f"(marks => marks.length === 2 && marks)({marks})") == ["PASSKEY i", "s 50494"]
    page.wait_for("#found [role=status]", "1 block")
    page.press(Keys.ESCAPE)
    page.until("document.querySelector('#found').hidden")


def test_a_place_can_be_typed(page: Seen) -> None:
    from selenium.webdriver.common.keys import Keys

    page.click("#documents li:nth-child(1) button")
    page.press("/", *"#12,345", Keys.ENTER)
    page.wait_for("#block h2", "Block 12,345")
    page.wait_for("#row-12345 .text", " ")
    assert 12_345 in page.rows()
    page.press("/", *[Keys.BACKSPACE] * 9, *"#99999", Keys.ENTER)
    page.wait_for("#trouble", "There is no block 99,999 here: this document has blocks 0 to 32,258.")
    page.press("/", *[Keys.BACKSPACE] * 9, *"#0", Keys.ENTER)
    page.until("document.querySelector('#trouble').hidden")
    page.press("/", *[Keys.BACKSPACE] * 9, *"#99999", Keys.ENTER)
    page.until("!document.querySelector('#trouble').hidden")
    page.press("/", *[Keys.BACKSPACE] * 9, *"PASSKEY", Keys.ENTER)
    page.until("document.querySelector('#trouble').hidden")


def test_a_model_that_cannot_be_asked_leaves_no_search_open(opened: memstore.Memory, chrome: Chrome) -> None:
    with shown(chrome, opened, expected="409 (Conflict)") as seen:
        seen.run("document.querySelector('#mode').value = 'model'; document.querySelector('#query').value = 'night'")
        seen.run("document.querySelector('#search').requestSubmit()")
        seen.wait_for("#trouble", "was made by another model")
        assert seen.run("return document.querySelector('#found').hidden")


def test_scrolling_through_a_million_tokens_keeps_only_what_is_in_view(page: Seen) -> None:
    page.click("#documents li:nth-child(1) button")
    page.until("document.querySelector('#row-0')")
    most, before = 0, page.heap()
    for part in range(1, 40):
        page.run(
            "const strip = document.querySelector('#strip'), box = strip.getBoundingClientRect();"
            "strip.setPointerCapture = () => {};"
            "strip.dispatchEvent(new PointerEvent('pointerdown', {clientY: box.top + box.height * arguments[0] / 40}))",
            part,
        )
        page.until("!document.querySelector('.row .waiting')")
        most = max(most, len(page.rows()))
    assert most < 100
    assert page.heap() - before < 2 << 20  # of some 7 MB of text, had it all been kept
    page.run("document.querySelector('#strip').focus()")
    from selenium.webdriver.common.keys import Keys

    page.press(Keys.END)
    page.until("document.querySelector('#row-32258 .text:not(.waiting)')")
    assert page.rows()[-1] == 32_258
    bottoms = page.run(
        "return ['#row-32258', '#flow'].map(each => document.querySelector(each).getBoundingClientRect().bottom)"
    )
    assert abs(bottoms[0] - bottoms[1]) < 2


def test_the_wheel_moves_by_pixels_and_never_skips_a_block(page: Seen) -> None:
    page.click("#documents li:nth-child(1) button")
    page.until("document.querySelector('#row-0 .text:not(.waiting)')")
    before = page.run("return document.querySelector('#row-3').getBoundingClientRect().top")
    page.wheel(30)
    assert page.run("return document.querySelector('#row-3').getBoundingClientRect().top") == before - 30
    seen = set(page.rows())
    for _ in range(60):
        page.wheel(300)
        rows = page.rows()
        assert rows == list(range(rows[0], rows[-1] + 1))
        assert rows[0] <= max(seen)
        seen |= set(rows)
    assert len(seen) > 300


def test_hostile_text_is_shown_as_text_and_nothing_runs(
    tmp_path: Path, model_folder: Path, encode: PreTrainedTokenizerFast, chrome: Chrome
) -> None:
    name = "<img src=x onerror='window.hacked = 1'>\u202eeman"
    with memstore.open(tmp_path / "hostile.mem", spec=small_spec()) as memory:
        memory.put_info("model", {"name": str(model_folder)})
        long_line = "x" * 3000
        fill(memory.document(name), ids_of(encode, HOSTILE + "\n" * 40 + long_line))
        with memory.traces.record(documents=[name], question=HOSTILE, layers=[1], heads=1) as recorder:
            recorder.begin()
            for token in ids_of(encode, "<b>").tolist():
                recorder.token(token)
                recorder.begin()
        with shown(chrome, memory) as seen:
            seen.until("document.querySelector('#row-0 .text:not(.waiting)')")
            seen.wait_for("#documents .name", "<img src=x onerror='window.hacked = 1'>\\u202eeman")
            seen.until("document.querySelectorAll('.token').length")
            whole = seen.run(
                "return [...document.querySelectorAll('.row .text')].map(each => each.textContent).join('')"
            )
            assert HOSTILE.partition("\u202e")[0] in whole
            assert "\\x00\\x1b[31mred" in whole
            assert "\u202e" not in whole
            seen.click("#row-0")
            seen.wait_for("#block h2", "Block 0")
            assert seen.text("#answer .question").startswith("<script>window.hacked = 1</script>")
            assert seen.run("return window.hacked === undefined")
            assert seen.run("return document.querySelectorAll('main img, aside img, body script').length") == 0
            width = seen.run("return document.documentElement.scrollWidth - innerWidth")
            assert width <= 0
            seen.run(
                "window.fetch = (_, how) => { if (how.body) window.sent = how.body; return new Promise(() => {}); };"
                "document.querySelector('#among').value = 'this'; document.querySelector('#question').value = 'Who?';"
                "document.querySelector('#ask').requestSubmit()"
            )
            assert json.loads(seen.until("window.sent"))["metadata"] == {"document": name}


def test_the_page_follows_a_model_that_generates_in_another_process(
    tmp_path: Path, model_folder: Path, encode: PreTrainedTokenizerFast, chrome: Chrome
) -> None:
    path = tmp_path / "live.mem"
    with memstore.open(path, spec=small_spec()) as memory:
        memory.put_info("model", {"name": str(model_folder)})
        fill(memory.document("leaflet"), ids_of(encode, "the rain fell in torrents " * 60))
    with memstore.open(path, mode="r") as memory, shown(chrome, memory) as seen:
        seen.wait_for("#traces", "No traces yet: ask a question.")
        command = [sys.executable, "-c", RECORD, str(path)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=Path(__file__).parents[3], **pipes) as child:
            assert child.stdin is not None
            generate(child, ids_of(encode, "one").tolist())
            seen.until("document.querySelector('#traces .running')")
            seen.click("#traces button")
            seen.wait_for("#answer .tokens", "on")
            generate(child, ids_of(encode, " two").tolist())
            seen.wait_for("#answer .tokens", "one tw")
            seen.wait_for("#hits", "100%")
            seen.until("document.querySelector('.row.lit')")
            child.stdin.close()
            assert child.wait(PATIENCE) == 0
        seen.wait_for("#answer .tokens", "one two")
        seen.until("!document.querySelector('#traces .running')")
        seen.wait_for("#row-16 .gutter i", "50%")


def test_a_memory_that_was_empty_shows_its_first_document(tmp_path: Path, chrome: Chrome) -> None:
    path = tmp_path / "notes.mem"
    with (
        memstore.open(path, spec=small_spec()) as writer,
        memstore.open(path, mode="r") as memory,
        shown(chrome, memory) as seen,
    ):
        assert seen.text("#title") == "Nothing to read yet."
        seen.wait_for("#traces", "No traces yet. Record one: memstore ask MEMORY QUESTION --trace")
        fill(writer.document("diary"), ids_from(0, 40))
        seen.wait_for("#row-1 .text", "31 32 33")


def test_a_trace_that_is_removed_and_one_that_was_broken_off(tmp_path: Path, chrome: Chrome) -> None:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as memory:
        fill(memory.document("book"), ids_from(0, 40))
        for question in ("First?", "Second?"):
            with memory.traces.record(question=question, documents=["book"]) as recorder:
                recorder.begin()
        with closing(sqlite3.connect(tmp_path / "notes.mem" / "traces.sqlite")) as file, file:
            file.execute('UPDATE traces SET ended = 0, info = replace(info, \'"started": "20\', \'"started": "19\')')
        with shown(chrome, memory) as seen:
            seen.wait_for("#traces", "interrupted")
            assert seen.run("return document.querySelector('#traces .running')") is None
            seen.run("document.querySelector('#traces li:nth-child(2) button').focus()")
            memory.traces.remove(2)
            seen.wait_for("#trouble", "Trace 2 was removed.")
            assert seen.run("return document.querySelector('#answer').hidden")
            assert "First?" in seen.run("return document.activeElement.textContent")  # though the list was made anew
            seen.click("#traces button")
            seen.wait_for("#answer .question", "First?")
            assert seen.run("return document.querySelector('#trouble').hidden")


def generate(child: subprocess.Popen[str], tokens: list[int]) -> None:
    """Let the other process go on by these tokens."""
    assert child.stdin is not None
    assert child.stdout is not None
    for token in tokens:
        child.stdin.write(f"{token}\n")
    child.stdin.flush()
    assert [child.stdout.readline() != "" for _ in tokens] == [True] * len(tokens)


def test_a_document_that_grows_and_is_forgotten_meanwhile(tmp_path: Path, chrome: Chrome) -> None:
    with memstore.open(tmp_path / "notes.mem", spec=small_spec()) as writer:
        document = writer.document("diary")
        fill(document, ids_from(0, 40))
        forgotten = "404 (Not Found)"
        with (
            memstore.open(tmp_path / "notes.mem", mode="r") as memory,
            shown(chrome, memory, expected=forgotten) as seen,
        ):
            seen.wait_for("#row-1 .text", "31 32 33 34 35 36 37 38 39")
            assert "no tokenizer" in seen.until("document.querySelector('#memory .tag')?.textContent")
            grown = writer.document("diary")
            fill(grown, ids_from(40, 60))
            seen.wait_for("#title", "100 tokens in 4 blocks")
            seen.wait_for("#row-3 .text", "97 98 99")
            seen.wait_for("#row-1 .text", "59 60 61")
            writer.forget("diary")
            seen.wait_for("#title", "This document was forgotten.")
            seen.wait_for("#documents", "No documents yet. Add one: memstore read TEXT MEMORY")
            assert seen.rows() == []


def ids_from(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count)


def test_forgetting_asks_first(tmp_path: Path, chrome: Chrome) -> None:
    path = tmp_path / "notes.mem"
    with memstore.open(path, spec=small_spec()) as memory:
        for name in ("a", "b"):
            fill(memory.document(name), ids_from(0, 40))
    with memstore.open(path, mode="r") as memory, shown(chrome, memory, allow_write=True) as seen:
        seen.click("#documents .chosen .acts button:nth-child(1)")
        seen.wait_for("#documents .chosen", "pinned")
        seen.click("#documents .chosen .danger")
        assert "Forget “a”, all 40 tokens of it?" in seen.text("#confirm-words")
        seen.click("#confirm button[value=no]")
        assert len(memory.documents()) == 2
        seen.click("#documents .chosen .danger")
        seen.click("#confirm button[value=yes]")
        seen.wait_for("#title", "This document was forgotten.")
        assert [document.name for document in memory.documents()] == ["b"]


def test_a_memory_that_is_moved_away_and_back(tmp_path: Path, chrome: Chrome) -> None:
    path = tmp_path / "notes.mem"
    with memstore.open(path, spec=small_spec()) as memory:
        fill(memory.document("a"), ids_from(0, 20))
    with memstore.open(path, mode="r") as memory, shown(chrome, memory, expected="404 (Not Found)") as seen:
        seen.run("document.querySelector('#query').value = '#9'; document.querySelector('#search').requestSubmit()")
        seen.wait_for("#trouble", "There is no block 9 here: this document has only block 0.")
        path.rename(tmp_path / "moved.mem")
        seen.wait_for("#trouble", "the memory was removed")
        (tmp_path / "moved.mem").rename(path)
        seen.until("document.querySelector('#trouble').hidden")


def test_a_page_without_a_document(tmp_path: Path, model_folder: Path, chrome: Chrome) -> None:
    from selenium.webdriver.common.keys import Keys

    path = tmp_path / "notes.mem"
    with memstore.open(path, spec=small_spec()) as memory:
        memory.put_info("model", {"name": str(model_folder)})
        for name in ("a", "b"):
            fill(memory.document(name), ids_from(0, 40))
        with memory.traces.record(question="Who?", documents=["b"]) as recorder:
            recorder.begin()
    with memstore.open(path, mode="r") as memory, shown(chrome, memory, allow_write=True) as seen:
        seen.run("location.hash = '#document=2&block=1'")  # as if it was typed
        seen.wait_for("#block", "Block 1")
        assert seen.text("#title h2") == "b"
        assert seen.run("return document.querySelector('#answer').hidden"), "the address names no trace"
        seen.click("#traces button")
        seen.until("location.hash === '#document=2&block=1&trace=1'")
        seen.click("#documents .chosen .danger")
        seen.click("#confirm button[value=yes]")
        seen.until("location.hash === '#trace=1'")
        for form in ("#search", "#ask"):
            seen.run("document.querySelector('#trouble').hidden = true")
            seen.run("document.querySelector('#among').value = 'this'")
            for box in ("#query", "#question"):
                seen.run("document.querySelector(arguments[0]).value = 'words'", box)
            seen.run("document.querySelector(arguments[0]).requestSubmit()", form)
            seen.wait_for("#trouble:not([hidden])", "No document is open: choose one.")
        assert seen.text("#ask button") == "Ask"
        seen.press(Keys.ESCAPE)
        seen.until("document.querySelector('#answer').hidden && !location.hash")


def test_a_tab_without_the_token_says_so(opened: memstore.Memory, chrome: Chrome) -> None:
    with shown(chrome, opened, expected="403 (Forbidden)") as seen:
        link, first = chrome.current_url, chrome.current_window_handle
        chrome.switch_to.new_window("tab")
        chrome.get(link)
        seen.wait_for("#trouble", "This tab has no token: open the link that memstore view printed.")
        chrome.close()
        chrome.switch_to.window(first)


def test_the_page_tells_when_its_server_has_ended(opened: memstore.Memory, chrome: Chrome) -> None:
    with served(opened) as link:
        chrome.get(link)
        seen = Seen(chrome)
        seen.until("document.querySelectorAll('.token').length")
    seen.wait_for("#trouble", "The server no longer answers. Start memstore view again")
    chrome.get("about:blank")
    chrome.get_log("browser")  # type: ignore[no-untyped-call]  # failed requests, as they should be


def test_a_reload_comes_back_to_the_same_place(page: Seen) -> None:
    page.click("#answer .token:nth-child(3)")
    page.wait_for("#used h2", "step 2")
    page.click("#used li:nth-child(2) button")
    page.wait_for("#block h2", "Block 102")
    page.driver.refresh()
    page.wait_for("#block h2", "Block 102")
    page.wait_for("#used h2", "step 2")
    page.until("document.querySelector('#row-102.lit.selected')")


def test_the_file_that_the_browser_is_given_leads_to_the_page(
    opened: memstore.Memory, chrome: Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", chrome.get)
    with served(opened, allow_write=True) as link:
        open_browser(link, tmp_path)
        seen = Seen(chrome)
        seen.wait_for("#documents", "leaflet")
        assert "token" not in chrome.current_url
        chrome.refresh()
        seen.wait_for("#documents", "leaflet")
        chrome.get("about:blank")
