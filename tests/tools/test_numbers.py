"""The figures of the README are those of the rows that its commands have written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def rows(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def squad(ranker: str) -> float:
    whole = [each for each in rows("questions-squad") if each["words"] and each["half"] == "held-out"][-1]  # the newest
    return next(float(row["all"]) for row in whole["rows"] if row["ranker"] == ranker and row["top_k"] == 8)


def faults() -> int:
    """Rounds on each store of what the README names."""
    named = ("kill-writers", "kill-readings", "full-disk", "bit-flips", "truncations")
    found = rows("faults")
    rounds = [
        sum(int(each["rounds"]) for each in found[store]["results"] if each["fault"] in named)
        for store in ("lmdb", "zarr")
    ]
    return min(rounds)


ATTACH = {each["about"]["dtype"].removeprefix("torch."): each for each in rows("attach")}
PROSE = next(row for row in rows("needles")["rows"] if row["tokens"] == 65_536)
LONG = rows("eval-passkey-100m")["rows"][0]
GATHER = next(row for row in rows("store")["rows"] if row["what"] == "warm gather, LMDB")

FIGURES: list[tuple[str, Callable[[], object]]] = [
    (r"\| ([\d.,]+) of \d+ found, [\d.]+ GB of memory", lambda: f"{LONG['accuracy'] * LONG['samples']:.0f}"),
    (r"of \d+ found, ([\d.]+) GB of memory", lambda: f"{LONG['peak_bytes'] / 1e9:.1f}"),
    (r"block retrieved ([\d.]+), whole answer", lambda: f"{PROSE['recall']:.2f}"),
    (r"whole answer ([\d.]+) \|", lambda: f"{PROSE['accuracy']:.2f}"),
    (r"\| ([\d.]+) \(BM25", lambda: f"{squad('memory'):.3f}"),
    (r"\(BM25 ([\d.]+),", lambda: f"{squad('bm25'):.3f}"),
    (r"MiniLM ([\d.]+),", lambda: f"{squad('minilm'):.3f}"),
    (r"both fused ([\d.]+)\)", lambda: f"{squad('bm25+minilm'):.3f}"),
    (r"\| ([\d.]+) \(bfloat16\)", lambda: f"{ATTACH['bfloat16']['decode']['32768']['decode_ratio']:.2f}"),
    (r"([\d.]+) \(float32\)", lambda: f"{ATTACH['float32']['decode']['32768']['decode_ratio']:.2f}"),
    (r"of a memcpy's speed \| ([\d.]+) \|", lambda: f"{GATHER['ratio']:.2f}"),
    (r"truncations: ([\d,]+) on each store", lambda: f"{faults() // 1000 * 1000:,}"),
]


@pytest.mark.parametrize(("words", "figure"), FIGURES, ids=[words for words, _ in FIGURES])
def test_a_figure_of_the_readme_is_in_the_results(words: str, figure: Callable[[], object]) -> None:
    found = re.search(words, README)
    assert found, "say in test_numbers.py which row the new words of the README are of"
    assert found[1] == figure()
