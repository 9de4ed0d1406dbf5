from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.memory import Memory
from tests.memory.helpers import make_spec

MakeMemory = Callable[..., Memory]


@pytest.fixture(params=["ram", "lmdb"])
def make_memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeMemory]:
    """A function that makes a new memory; its arguments change the spec."""
    with ExitStack() as stack:
        made = 0

        def make(**changes: Any) -> Memory:
            nonlocal made
            made += 1
            url = "ram:" if request.param == "ram" else tmp_path / f"memory-{made}"
            return stack.enter_context(memstore.open(url, spec=make_spec(**changes)))

        yield make


@pytest.fixture
def memory(make_memory: MakeMemory) -> Memory:
    return make_memory()
