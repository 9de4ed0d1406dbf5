"""A command leaves without taking Python down, and loses nothing by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

import memstore

LAST_WORDS = """
import atexit, sys, threading, time
import memstore
from memstore.__main__ import leave

class Heavy:
    def __del__(self):
        print("taken down")

def late():
    time.sleep(0.2)
    print("a thread")

heavy = Heavy()
atexit.register(print, "at exit")
memory = memstore.open(sys.argv[1], mode="r")
memory.documents()
threading.Thread(target=late).start()
print("x" * 1_000_000)
leave(7)
"""
UNFLUSHED = "from memstore.__main__ import leave; print('x'); leave(0); print('went on')"


def python(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run an interpreter of its own, whose output is buffered."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = str(Path(memstore.__file__).parents[1])
    command = [sys.executable, *arguments]
    return subprocess.run(command, text=True, stdout=stdout, stderr=subprocess.PIPE, check=False, env=environment)


def test_threads_exit_handlers_and_output_come_before_the_end(memory: Path) -> None:
    with lmdb.open(str(memory), readonly=True) as beside:  # so that the places of readers stay, also of dead ones
        done = python("-c", LAST_WORDS, str(memory))
        places = {line.split()[0] for line in beside.readers().splitlines()[1:]}
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == ["x" * 1_000_000, "a thread", "at exit"]
    assert places <= {str(os.getpid())}  # the store was closed


def test_output_that_cannot_be_written_is_left_to_python() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = python("-c", UNFLUSHED, stdout=full)
    os.close(full)
    assert (done.returncode, "No space left on device" in done.stderr) == (120, True)
    reading, writing = os.pipe()
    os.close(reading)
    done = python("-c", UNFLUSHED, stdout=writing)
    os.close(writing)
    assert (done.returncode, "BrokenPipeError" in done.stderr) == (120, True)


@pytest.mark.parametrize("watched", [["-X", "dev"], ["-m", "cProfile"], ["-m", "trace", "--listfuncs"]])
def test_whoever_watches_a_command_goes_on_after_it(watched: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNFLUSHED)
    assert "went on" in python(*watched, str(tmp_path / "program.py")).stdout


def test_the_program_ends_with_the_code_of_its_verb(memory: Path, tmp_path: Path) -> None:
    assert python("-m", "memstore", "ls", str(tmp_path / "nothing.mem")).returncode == 3
    done = python("-m", "memstore", "ls", str(memory))
    assert (done.returncode, "whale" in done.stdout) == (0, True)
