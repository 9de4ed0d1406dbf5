"""memstore beside others, on the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import layers
from benchmarks.peers.__main__ import table
from tests.instruct import instruct_model, instruct_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures memory by Linux's /proc")
def test_peers_do_the_same_work_and_a_flipped_bit_changes_no_answer_of_memstore(tmp_path: Path) -> None:
    for part in (instruct_model(), instruct_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    out = tmp_path / "rows.json"
    work = ["--lengths", "1536", "--peers", "memstore", "full", "--dtype", "float32", "--threads", "1", "--flips", "2"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--model", str(tmp_path / "model"), *work, "--out", str(out)],
        cwd=ROOT,
        check=True,
    )
    results = json.loads(out.read_text("utf-8"))
    ours, full = results["rows"]
    assert ours["questions"] == full["questions"] == 12
    assert full["disk_bytes"] > 1536 * 3 * 2 * 16 * 4
    assert ours["flips_other_answers"] == full["flips_refused"] == 0
    for peer in ("memstore", "full"):
        assert f"| 1,536 | {peer} |" in table(results)


@pytest.mark.parametrize(("file", "as_table"), [("peers.json", table), ("layer-peers.json", layers.table)])
def test_the_page_about_peers_has_the_measured_rows(file: str, as_table: Callable[[Any], str]) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / file).read_text("utf-8"))
    assert as_table(results) in (ROOT / "docs" / "peers.md").read_text("utf-8")
