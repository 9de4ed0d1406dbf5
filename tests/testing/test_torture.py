"""The torture test finds every planted fault, and none where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.testing.broken import PLANTED
from tests.testing.table import RESULTS, table

ROOT = RESULTS.parents[1]


def tortured(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    # In a process of its own, which has one thread and no memory open: it forks.
    call = [sys.executable, "-m", "benchmarks.torture", *arguments, "--json"]
    done = forks.completed(call)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["rows"]


@pytest.mark.slow
def test_every_planted_fault_is_found_and_none_in_a_sound_store() -> None:
    # Not from one that has imported PyTorch: it forks some hundred times, each longer the more memory there is.
    done = subprocess.run([sys.executable, "-m", "tests.testing.broken"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    missed = [each for each in found if not PLANTED[each[0], each[1]] & set(each[3])]
    assert missed == []
    wrong = [each for each in found if each[0] == "Sound" and set(each[3]) - {"right", "refused"}]
    assert wrong == []


OWN = """
from benchmarks.torture.subjects import ArrayFiles
from benchmarks.torture.harness import Subject

class Store(ArrayFiles):
    pass

class Elsewhere(Subject):
    def __init__(self, folder):
        pass
    def __len__(self):
        return 0
    def append(self, states):
        pass
    def cut(self, blocks):
        pass
    def read(self, block):
        raise KeyError

class Bare(Elsewhere):
    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
"""


def test_a_store_of_ones_own_is_found_where_one_is_and_rows_stay_if_it_keeps_no_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    stores, environment = ("mine:Elsewhere", "mine:Bare", "mine:Store"), {**os.environ, "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", "benchmarks.torture", *stores, "--fault", "restart", "--fault", "swap"]
    call += ["--rounds", "1", "--json"]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, [(row["store"], row["fault"]) for row in told["rows"]]) == (
        1,
        [(store, "restart") for store in stores] + [("mine:Store", "swap")],
    )
    untried = "the store wrote nothing into its folder, so there is nothing to damage."
    assert told["untried"] == dict.fromkeys(stores[:2], untried)


@pytest.mark.parametrize(
    ("store", "faults"),
    [
        ("lmdb", ()),
        pytest.param("zarr", (), marks=pytest.mark.slow),
        pytest.param("bucket", ("--fault", "restart", "--fault", "kill"), marks=pytest.mark.slow),
    ],
)
def test_a_memory_loses_nothing_and_serves_nothing_wrong(store: str, faults: tuple[str, ...]) -> None:
    code, rows = tortured(store, "--rounds", "3", *faults)
    assert code == 0, rows
    assert [row["fault"] for row in rows if not row["rounds"]] == []


def test_states_in_a_bare_file_are_served_although_a_bit_was_flipped() -> None:
    code, (row,) = tortured("numpy", "--fault", "flip", "--rounds", "6", "--seed", "3")
    assert (code, row["wrong"] > 0) == (1, True)


def test_nothing_is_left_where_it_is_told_to_end(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "benchmarks.torture", "numpy", "--fault", "kill", "--rounds", "10000"]
    running = subprocess.Popen([*call, "--folder", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not any(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    assert any(tmp_path.iterdir())
    running.terminate()
    _, told = running.communicate(timeout=120)
    assert (running.returncode, list(tmp_path.iterdir())) == (130, []), told
    assert "interrupted" in told


ORPHAN = """
import os, pathlib, time
from benchmarks.torture.processes import fork

def outlive(say):
    say("begun")
    time.sleep(20)
    pathlib.Path("here").touch()

parent = fork(lambda say: fork(lambda _: outlive(say)).wait())
os.read(parent.pipe, 1)
parent.kill()  # returns when both have ended
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's end")
def test_what_is_forked_ends_with_its_parent(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ORPHAN], cwd=tmp_path, check=True, timeout=120)
    assert not (tmp_path / "here").exists()


INTERRUPTED = """
import os, pathlib, signal, time
from benchmarks.torture.processes import end_children, fork

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))

def outlive(say):
    time.sleep(1)
    pathlib.Path("here").touch()

try:
    fork(outlive)
except KeyboardInterrupt:
    end_children()
    time.sleep(2)
    print("interrupted")
"""


def test_an_interruption_during_a_fork_ends_the_child_and_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, list(tmp_path.iterdir())) == ("interrupted\n", [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch", "--fault", "fire"], "there is no fault 'fire'; choose from restart"),
        (["floppy"], "there is no store 'floppy'; choose from lmdb"),
        (["tests.nothing:Store"], "cannot be imported"),
        (["pathlib:Path"], "must be a subclass of benchmarks.torture.harness.Subject"),
        (["lmdb", "--folder", "nowhere"], "is not a folder"),
    ],
)
def test_what_there_is_not_is_said(arguments: list[str], words: str) -> None:
    done = forks.completed([sys.executable, "-m", "benchmarks.torture", *arguments])
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("name", "needs"), [("memos:MemOS", "memos"), ("llamacpp:Slots", "llama_cpp"), ("lmcache:LocalDisk", "lmcache")]
)
def test_another_store_is_tried_where_it_is_installed(name: str, needs: str) -> None:
    name = f"benchmarks.torture.{name}"
    call = [sys.executable, "-m", "benchmarks.torture", name, "--fault", "restart", "--rounds", "1", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert f"'{needs}'" in told["message"] if done.returncode == 2 else told["rows"][0]["store"] == name


def test_the_page_has_the_table_of_its_results() -> None:
    page = (ROOT / "docs" / "torture.md").read_text("utf-8")
    assert table() in page
