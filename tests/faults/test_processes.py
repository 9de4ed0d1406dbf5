"""A child that never ends is found, and one that only waits for its turn is no fault."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
from benchmarks.torture.processes import fork

def compute(say):
    while True:
        pass

def wait(say):
    time.sleep(1.5)  # longer than the patience, which is what is tested
    say("done")

ending = fork({"compute": compute, "wait": wait}[sys.argv[1]], patience=1).wait()
sys.stdout.write(f"{ending.hung} {ending.crashed} {ending.last}")
"""


@pytest.mark.parametrize(("what", "found"), [("compute", "True False "), ("wait", "False False done")])
def test_patience_is_for_computing(what: str, found: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, check=True)
    assert done.stdout == found
