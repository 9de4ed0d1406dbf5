from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.memory import Memory
from tests.memory.helpers import D, G, S, make_spec

MakeMemory = Callable[..., Memory]


@pytest.fixture(params=["ram", "lmdb", "zarr"])
def make_memory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked_here: None
) -> Iterator[MakeMemory]:
    """A function that makes a new memory; its arguments change the spec."""
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 2 * 4 * G * S * D)  # two blocks of float32
    with ExitStack() as stack:
        made = 0

        def make(**changes: Any) -> Memory:
            nonlocal made
            made += 1
            path = tmp_path / f"memory-{made}"
            url = {"ram": "ram:", "lmdb": str(path), "zarr": f"zarr:{path}"}[request.param]
            return stack.enter_context(memstore.open(url, spec=make_spec(**changes)))

        yield make


@pytest.fixture
def memory(make_memory: MakeMemory) -> Memory:
    return make_memory()
