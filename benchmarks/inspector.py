"""How fast the inspector page is on a large memory, and how much memory it takes while everything is scrolled through.

    python benchmarks/inspector.py                    # 16,777,216 tokens: some minutes, most of them to make the memory
    python benchmarks/inspector.py --tokens 1048576   # half a minute
    python benchmarks/inspector.py --memory DIR       # a memory that is there; its first document is shown

Needs Debian's chromium and chromium-driver. Times are those of the browser, from the beginning of the navigation to the
first paint, and from a click to the frame in which what was asked for stands. Heaps are those of JavaScript after a
garbage collection.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import memstore
from memstore.resources import hardware
from tests.tools.inspector.pages import CHROMEDRIVER, CHROMIUM, chromium, fill, served, small_spec

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

VOCABULARY = 5000
TIMES = ("paints", "texts", "views", "waits")
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
TEXT = """
const done = arguments[0];
(function look() {
  if (document.querySelector('.row .text:not(.waiting)')) requestAnimationFrame(() => done(performance.now()));
  else requestAnimationFrame(look);
})();
"""
SHOW = """
const [block, done] = [arguments[0], arguments[1]];
const begun = performance.now();
const query = document.querySelector('#query');
query.value = '#' + block;
document.querySelector('#search').requestSubmit();
(function look() {
  const there = document.querySelector('#row-' + block + ' .text:not(.waiting)');
  const detail = document.querySelector('#block h2')?.textContent === 'Block ' + block.toLocaleString('en');
  if (there && detail) requestAnimationFrame(() => done(performance.now() - begun));
  else requestAnimationFrame(look);
})();
"""
SCROLL = """
const [parts, done] = [arguments[0], arguments[1]];
const strip = document.querySelector('#strip'), box = strip.getBoundingClientRect(), waits = [];
strip.setPointerCapture = () => {};
(function jump() {
  if (waits.length === parts.length) return done(waits);
  const begun = performance.now();
  strip.dispatchEvent(new PointerEvent('pointerdown', {clientY: box.top + box.height * parts[waits.length]}));
  (function look() {
    if (document.querySelector('.row .waiting')) return requestAnimationFrame(look);
    requestAnimationFrame(() => { waits.push(performance.now() - begun); jump(); });
  })();
})();
"""
"""Many jumps in one script: the driver keeps each script, of 16 KB, until it would have taken too long."""


def measure(memory: memstore.Memory, *, places: int, shows: int) -> dict[str, Any]:
    """First paints, first texts, views of a block and waits after a jump in milliseconds; JavaScript heaps in bytes."""
    with tempfile.TemporaryDirectory() as profile, served(memory) as link, chromium(Path(profile)) as driver:
        driver.set_script_timeout(600)
        paints, texts = zip(*(_opened(driver, link) for _ in range(5)), strict=True)
        blocks = memory.documents()[0].n_blocks
        chosen = torch.randint(blocks, (shows,), generator=torch.Generator().manual_seed(0)).tolist()
        views = [driver.execute_async_script(SHOW, block) for block in chosen]
        heaps, waits = [_heap(driver)], []
        parts = [place / (places + 1) for place in range(1, places + 1)]
        for first in range(0, places, -(-places // 4)):
            waits += driver.execute_async_script(SCROLL, parts[first : first + -(-places // 4)])
            heaps.append(_heap(driver))
        rows = driver.execute_script("return document.querySelectorAll('.row').length")
    return {"paints": paints, "texts": texts, "views": views, "waits": waits, "heaps": heaps, "rows": rows}


def _opened(driver: Chrome, link: str) -> tuple[float, float]:
    """Milliseconds to the first paint, and until the first blocks have their text."""
    driver.get("about:blank")
    driver.get(link)
    text = driver.execute_async_script(TEXT)
    return float(driver.execute_script(PAINT)), float(text)


def _heap(driver: Chrome) -> float:
    driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    return float(driver.execute_script("return performance.memory.usedJSHeapSize"))


def row(result: dict[str, Any], memory: memstore.Memory) -> dict[str, Any]:
    """Medians of milliseconds and the worst of them; heaps in bytes."""
    stats = memory.stats()
    times = {name: {"median": median(result[name]), "worst": max(result[name])} for name in TIMES}
    heaps = {"least": min(result["heaps"]), "most": max(result["heaps"])}
    return {"tokens": stats["tokens"], "blocks": stats["blocks"], "ms": times, "heap_bytes": heaps, **hardware()}


def main() -> None:
    """Make the memory, open the page, print a row of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_777_216)
    parser.add_argument("--memory", type=Path, help="a memory to show instead of one that is made")
    parser.add_argument("--places", type=int, default=400, help="jumps in the scroll through everything")
    options = parser.parse_args()
    if CHROMIUM is None or CHROMEDRIVER is None:
        parser.error("needs the programs chromium and chromedriver: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as folder:
        path = options.memory or Path(folder) / "large.mem"
        if options.memory is None:
            with memstore.open(path, spec=small_spec()) as memory:
                fill(memory.document("book"), torch.randint(VOCABULARY, (options.tokens,)))
        with memstore.open(path, mode="r") as memory:
            print(json.dumps(row(measure(memory, places=options.places, shows=20), memory)))


if __name__ == "__main__":
    main()
