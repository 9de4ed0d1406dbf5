"""Parts of the page's scripts without a browser: in node, with as much of a document as they need."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memstore.tools import inspector

NODE = shutil.which("node")
DOCUMENT = """
class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, className: "", style: { setProperty() {} } });
  }
  get classList() {
    const words = () => new Set(this.className.split(" ").filter(Boolean));
    const toggle = (word, on) => {
      const all = words();
      if (on) all.add(word);
      else all.delete(word);
      this.className = [...all].join(" ");
    };
    return { toggle, contains: (word) => words().has(word) };
  }
  get textContent() { return this.children.map((each) => each.textContent ?? String(each)).join(""); }
  set textContent(text) { this.children = [text]; }
  get lastChild() { return this.children.at(-1); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  setAttribute() {}
  addEventListener() {}
  querySelectorAll(wanted) {
    const inside = this.children.filter((each) => each instanceof Element);
    const is = (each) => (wanted === "[data-offset]" ? each.dataset.offset !== undefined
      : wanted.startsWith(".") ? each.classList.contains(wanted.slice(1)) : each.tag === wanted);
    return inside.flatMap((each) => [...(is(each) ? [each] : []), ...each.querySelectorAll(wanted)]);
  }
  querySelector(wanted) { return this.querySelectorAll(wanted)[0]; }
}
const parts = {};
globalThis.document = {
  createElement: (tag) => new Element(tag),
  getElementById: (id) => (parts[id] ??= new Element("div")),
};
const { runs, said, text } = await import("./tokens.js");
const { showUsed, together } = await import("./used.js");
const { Flow } = await import("./flow.js");
const shown = (nodes) => nodes.map((each) => each.textContent ?? each).join("");
const spans = (found) => found.map(({ from, to }) => [from, to]);
const use = (block, tokens, more) => {
  const pieces = [..."abcdefgh"];
  return { name: "log", document: 1, block, weight: 0.1, text: pieces.join(""), pieces, tokens, ...more };
};
const flow = (picked, blocks) => {
  const of = Object.create(Flow.prototype);
  Object.assign(of, { rows: new Element("div"), box: new Element("div"), lit: new Map(), picked, unit: 1, size: 8 });
  Object.assign(of, { marks: "", selected: null, pages: { get: (number) => blocks[number] }, from: 5, to: 6 });
  of.rows.append(of.make(5));
  return of;
};
"""

Script = Callable[[str], Any]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """Returns what a script gives, which has the functions above."""
    if NODE is None:
        pytest.skip("needs the program node: apt-get install nodejs")
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(Path(inspector.__file__).parent / "static" / "js", folder, dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')

    def run(body: str) -> Any:
        (folder / "test.js").write_text(
            f"{DOCUMENT}\nconst given = () => {{ {body} }};\nconsole.log(JSON.stringify(given()));"
        )
        done = subprocess.run([NODE, "test.js"], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_chosen_entry_that_was_also_missed_is_one_run(script: Script) -> None:
    found, words = script("""
      const chosen = { weight: 0.1, score: 1, layer: 2, missed: 0.02 };
      const block = use(0, { 0: chosen, 1: { missed: 0.02 }, 3: { missed: 0.02 } });
      const found = runs(block, 4, 16);
      return [found, shown(text(block, found, 4, "", "", ""))];
    """)
    assert words == "abcdefgh"
    (run,) = found
    assert (run["from"], run["to"], run["weight"], run["score"], run["layer"]) == (0, 3, 0.1, 1, 2)
    assert run["missed"] == pytest.approx(0.06)


def test_missed_tokens_and_entries_are_runs_of_their_own(script: Script) -> None:
    tokens = "{ 2: { missed: 0.1 }, 3: { missed: 0.1 }, 5: { weight: 0.2 } }"
    assert script(f"return spans(runs(use(0, {tokens}), 1, 8))") == [[2, 2], [3, 3], [5, 5]]
    entries = "{ 0: { missed: 0.1, entry: true }, 4: { weight: 0.2 }, 5: { missed: 0.1 } }"
    assert script(f"return spans(runs(use(0, {entries}), 4, 8))") == [[0, 3], [4, 7]]
    assert (
        script(f"const block = use(0, {entries}); return shown(text(block, runs(block, 4, 8), 4, '', '', ''))")
        == "abcdefgh"
    )


def test_a_run_over_the_end_of_a_block_says_so(script: Script) -> None:
    told = script("""
      const tokens = Object.fromEntries([...Array(8).keys()].map((offset) => [offset, { weight: 0.1 }]));
      const found = runs(use(1, tokens), 6, 8); // tokens 8 to 15 of the document: its runs begin at 6 and at 12
      return found.map((run) => [run.from, run.to, said(run, 6)]);
    """)
    assert [each[:2] for each in told] == [[0, 3], [4, 7]]
    assert all("part of 6 tokens chosen together: attention 40%" in words for *_, words in told)
    whole = script("return said(runs(use(0, { 0: { weight: 0.1 } }), 6, 8)[0], 6)")
    assert whole.startswith("6 tokens")


def test_a_whole_trace_tells_no_scores(script: Script) -> None:
    told = script("""
      const told = (score) => said(runs(use(0, { 0: { weight: 0.1, score, layer: 3 } }), 1, 8)[0], 1);
      return [undefined, null, 2].map(told);
    """)
    assert ["score" in each for each in told] == [False, True, True]
    assert "no score" in told[1]
    assert "score 2 in layer 3" in told[2]


def test_a_block_that_one_trace_missed_and_the_other_retrieved_is_listed(script: Script) -> None:
    both, words = script("""
      const missed = { found: 0, blocks: [use(7, { 1: { missed: 0.2 } }, { weight: null })] };
      const retrieved = { found: 1, blocks: [use(7, { 1: { weight: 0.5 } }, { weight: 0.5 })] };
      showUsed("", together(missed, retrieved), () => {}, ["1", "2"], 1, 8);
      return [together(missed, retrieved), document.getElementById("used").textContent];
    """)
    (block,) = both["blocks"]
    assert (block["weight"], block["weights"], block["tokens"]) == (
        0.5,
        [None, 0.5],
        {"1": {"missed": 0.2, "weight": 0.5}},
    )
    assert "log · 7–50%" in words
    assert "Only" not in words


def test_the_page_says_how_many_blocks_it_leaves_out(script: Script) -> None:
    words = script("""
      const blocks = [use(0, {}), use(1, { 0: { missed: 0.1 } }, { weight: null })];
      showUsed("", { found: 1234, blocks }, () => {}, null, 1, 8);
      return document.getElementById("used").textContent;
    """)
    assert "Only 1 of 1,234 blocks are listed and marked" in words


def test_a_token_is_framed_when_its_text_arrives_and_stays_framed(script: Script) -> None:
    framed = script("""
      const blocks = {};
      const on = flow(new Map([[5, use(5, { 2: { weight: 0.1 }, 4: { weight: 0.1 } })]]), blocks);
      const [row] = on.rows.children;
      on.point(5, 2);
      blocks[5] = { block: 5, text: "abcdefgh" };
      const seen = () => row.querySelectorAll(".pointed").map((each) => each.textContent);
      on.write(row);
      const first = seen();
      delete row.dataset.here;
      on.write(row);
      const again = seen();
      on.point(5, 4);
      return [first, again, seen()];
    """)
    assert framed == [["c"], ["c"], ["e"]]


def test_a_row_with_another_text_keeps_the_shade_of_its_block(script: Script) -> None:
    by_token = script("""
      return ["abcdefgh", "otherwise"].map((text) => {
        const on = flow(new Map([[5, use(5, { 2: { weight: 0.1 } })]]), { 5: { block: 5, text } });
        return on.rows.children[0].classList.contains("by-token");
      });
    """)
    assert by_token == [True, False]
