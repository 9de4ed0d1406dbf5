"""``benchmarks/gpu.py`` keeps its clock and its rows, whatever its parts do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import PARTS, ROOT, TABLE_LINES, Part, Run, table

CHILD = """
import json, os, signal, subprocess, sys, time
part = sys.argv[sys.argv.index("--part") + 1]
def row(name): print(json.dumps({"part": part, "name": name, "value": 1}), flush=True)
row("first")
if part == "dies":
    print("the last words", file=sys.stderr, flush=True); os.abort()
if part == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(json.dumps({"name": "other", "value": other.pid}), flush=True)
    time.sleep(1000)  # whoever waits for it runs into the limit of a test
if part == "rubbish":
    os.write(1, bytes(range(256)) * 10 + b"\\n[1, 2]\\n" + b"x" * 200000 + b"\\n")
    os.write(1, b"[" * 100000 + b"\\n{\\"name\\": 3}\\n")
    row("after rubbish")
if part == "many":
    while True: row("again")
"""


def run(folder: Path, *parts: Part, budget: float = 60) -> list[dict[str, Any]]:
    with (folder / "out.jsonl").open("a") as out:
        rows = Run(out, budget, folder, tiny=False, command=[sys.executable, "-c", CHILD]).run(parts)
    assert [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()] == rows
    return rows


def part(name: str, limit: float = 20, least: float = 0, **more: Any) -> Part:
    return Part(name=name, limit=limit, least=least, **more)


@pytest.mark.slow
def test_a_part_that_dies_hangs_or_prints_rubbish_costs_itself_alone(tmp_path: Path) -> None:
    rows = run(tmp_path, part("dies"), part("hangs", limit=2), part("rubbish"), part("many", limit=2), part("good"))
    of = {name: [row for row in rows if row["part"] == name] for name in ("dies", "hangs", "rubbish", "many", "good")}
    assert all(found[0]["name"] == "first" for found in of.values())
    failed = {row["part"]: row["error"] for row in rows if row.get("ok") is False}
    assert set(failed) == {"dies", "hangs", "many"}
    assert failed["dies"].splitlines()[-1] == "the last words"
    assert "ended after 2 s" in failed["hangs"]
    other = next(row["value"] for row in of["hangs"] if row["name"] == "other")
    assert not Path(f"/proc/{other}").exists() or "Z" in Path(f"/proc/{other}/stat").read_text().split()[2]
    assert [row["name"] for row in of["rubbish"]] == ["first", "after rubbish", "rubbish", "took"]
    assert len(of["many"]) < 2100
    shown = table(rows)
    assert [line.split()[:2] for line in shown[2:5]] == [["dies", "FAIL"], ["hangs", "FAIL"], ["many", "FAIL"]]
    assert len(shown) <= TABLE_LINES


def test_no_part_begins_without_the_time_that_it_needs(tmp_path: Path) -> None:
    rows = run(tmp_path, part("good", least=5), part("later", least=100), budget=30)
    assert [(row["part"], row["name"]) for row in rows] == [("good", "first"), ("good", "took"), ("later", "skipped")]


def test_pieces_run_side_by_side_and_a_part_beside_the_next(tmp_path: Path) -> None:
    rows = run(tmp_path, part("beside", beside=True, pieces=("a", "b"), processes=2), part("good"), part("last"))
    assert [row["part"] for row in rows if row["name"] == "first"].count("beside") == 2
    took = [row["part"] for row in rows if row["name"] == "took"]
    assert took[-1] == "last"
    assert set(took) == {"beside", "good", "last"}


def test_without_a_gpu_it_says_so_and_is_content(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "--tiny" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs_to_its_end_on_a_pretended_device(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    out = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--tiny", "--budget", "1700", "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row for row in rows if row.get("ok") is False] == []
    assert done.returncode == 0
    assert all(row["tiny"] for row in rows)
    assert {row["part"] for row in rows if row["name"] not in ("took", "skipped")} == {
        "about",
        *(part.name for part in PARTS),
    }
