"""What holds for every test: one CPU thread, no network, and uninitialised memory that shows."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles all modules again
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MEMSTORE_RESIDENT"] = "off"  # no process that outlives the tests
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for where sums must be repeatable

import pytest
import torch
from hypothesis import settings

from memstore.memory import Finding, verify
from memstore.memory.urls import open_unchecked
from memstore.store.encryption_keys import MasterKey
from tests import disk, forks

gc.disable()  # importing and collecting make a million objects of which none is garbage: seconds
sys.dont_write_bytecode = False
# Started in the background by a shell, tests and what they start would ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Trusted models of the tests' own: not those of who runs them.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="memstore-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
disk.is_not_waited_for()  # so do forks; other processes that tests start do wait
torch.set_num_threads(1)
# Fills what torch.empty returns with NaN. torch.use_deterministic_algorithms would import compilers for seconds.
torch.set_deterministic_debug_mode("error")

# Machines that run tests are shared and slow at times: no deadline for a single example.
settings.register_profile("memstore", deadline=None, print_blob=True)
settings.load_profile("memstore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` need one; those marked ``slow`` may be slower still on a slow machine."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))
    # Where all run, a worker that is done takes over quick tests of the others, not the last long one.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """``verify`` works in this process: a child, which takes seconds, finds the same, as test_damage.py shows."""
    monkeypatch.setattr(verify, "in_child", check_here)


@pytest.fixture
def children_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that check and save memories are still processes of their own, but need not import PyTorch first."""
    monkeypatch.setattr(verify, "subprocess", SimpleNamespace(run=forks.completed))


def check_here(url: str, key: MasterKey | None = None) -> list[Finding]:
    store = open_unchecked(url, key)
    try:
        return [*verify.check(store), *verify.damaged_indexes(url)]
    finally:
        store.close()


@pytest.fixture(scope="session")
def ray_starts() -> None:
    """Ray needs processes, ports and shared memory, which not every machine gives."""
    code = "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False); ray.shutdown()"
    try:
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Ray does not start here: {(error.stderr or b'')[-300:]!r}")
