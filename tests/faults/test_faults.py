"""The short form of every fault, on every store; ``make faults`` is the long one."""

import subprocess
import sys

import pytest

from tests.faults.run import FAULTS
from tests.faults.world import STORES


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_promise_is_broken(fault: str, store: str) -> None:
    # In an interpreter of its own, which has one thread and no memory open: it forks.
    command = [sys.executable, "-m", "tests.faults.run", "--only", fault, "--store", store]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
