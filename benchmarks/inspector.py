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
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import memstore
from tests.tools.inspector.pages import CHROMEDRIVER, CHROMIUM, chromium, fill, served, small_spec

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

VOCABULARY = 5000
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
const [part, done] = [arguments[0], arguments[1]];
const strip = document.querySelector('#strip'), box = strip.getBoundingClientRect();
strip.setPointerCapture = () => {};
const begun = performance.now();
strip.dispatchEvent(new PointerEvent('pointerdown', {clientY: box.top + box.height * part}));
(function look() {
  if (!document.querySelector('.row .waiting')) requestAnimationFrame(() => done(performance.now() - begun));
  else requestAnimationFrame(look);
})();
"""


def measure(memory: memstore.Memory, *, places: int, shows: int) -> dict[str, Any]:
    """First paint and block views in milliseconds, JavaScript heaps in MiB."""
    with tempfile.TemporaryDirectory() as profile, served(memory) as link, chromium(Path(profile)) as driver:
        driver.set_script_timeout(60)
        paints, texts = zip(*(_opened(driver, link) for _ in range(5)), strict=True)
        blocks = memory.documents()[0].n_blocks
        chosen = torch.randint(blocks, (shows,), generator=torch.Generator().manual_seed(0)).tolist()
        views = [driver.execute_async_script(SHOW, block) for block in chosen]
        heaps, waits = [_heap(driver)], []
        for place in range(1, places + 1):
            waits.append(driver.execute_async_script(SCROLL, place / (places + 1)))
            if place % (places // 4) == 0:
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
    return float(driver.execute_script("return performance.memory.usedJSHeapSize") / 2**20)


def _print(result: dict[str, Any], memory: memstore.Memory) -> None:
    stats = memory.stats()
    print(f"{stats['tokens']:,} tokens in {stats['blocks']:,} blocks")
    names = {
        "paints": "first paint",
        "texts": "first text",
        "views": "a block, any place",
        "waits": "text after a jump",
    }
    for name, said in names.items():
        ordered = sorted(result[name])
        print(f"{said:<20} {statistics.median(ordered):7.0f} ms (worst of {len(ordered)}: {ordered[-1]:.0f})")
    print(f"heap over the scroll {' '.join(f'{heap:.1f}' for heap in result['heaps'])} MiB; {result['rows']} rows")


def main() -> None:
    """Make the memory, open the page, print."""
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
            _print(measure(memory, places=options.places, shows=20), memory)


if __name__ == "__main__":
    main()
