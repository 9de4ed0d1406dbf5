"""Any history of additions, removals, wrap-arounds, filters, saving and finishing, against a brute-force model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from memstore.index import VectorIndex, chunks, cluster_index, codes, exact, faiss, open_index, sieve
from memstore.kernels.best_products import native, torch_int
from memstore.kernels.search_blocks import native as passes
from memstore.testing.indexes import assert_found, brute_force, small_integers

HEADS, PER_BLOCK, DIM = 2, 2, 8
BLOCKS = st.integers(0, 300)
RANGES = st.builds(range, BLOCKS, BLOCKS)
ALLOWED = st.none() | RANGES | st.lists(BLOCKS, max_size=20).map(lambda ids: torch.tensor(ids).long())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, groups, tiles and bases of a few blocks: every seam is crossed."""
    for module, name, value in [
        (chunks, "FIRST_CHUNK_KEYS", 16),
        (chunks, "LARGEST_CHUNK_KEYS", 128),
        (exact, "TILE_KEYS", 24),
        (exact, "TILE_KEYS_OF_FEW", 40),
        (exact, "FEW_QUERIES", 2),
        (exact, "TILE_QUERIES", 3),
        (chunks, "GATHERED_NUMBERS", 50),
        (sieve, "GROUP_KEYS", 4),
        (sieve, "LARGEST_SHARE", 1),
        (faiss, "FEWEST_KEYS", 16),
        (faiss, "FEWEST_WANTED", 1),
        (cluster_index, "SMALLEST", 24),
        (cluster_index, "ENOUGH", 2),
        (codes, "CHUNK_KEYS", 20),
        (torch_int, "TILE_PRODUCTS", 9),
        (cluster_index, "LARGE", 64),
        (cluster_index, "LARGEST_SHARE", 1),
    ]:
        monkeypatch.setattr(module, name, value)


class Machine(RuleBasedStateMachine):
    """Keys are small whole numbers, so that scores are exact and ties are common."""

    name: str
    dtype = torch.float32

    @initialize(seed=st.integers(0, 1000), offset=st.sampled_from([0, 40]))
    def start(self, seed: int, offset: int) -> None:
        self.index = self.make()
        self.there: dict[int, Tensor] = {}
        self.pool = small_integers(500, HEADS, PER_BLOCK, DIM, seed=seed) + offset
        self.queries = small_integers(2 * HEADS, 2, DIM, seed=seed + 1)
        self.next = 0

    def make(self) -> VectorIndex:
        return open_index(self.name, key_heads=HEADS, key_dim=DIM, keys_per_block=PER_BLOCK, dtype=self.dtype)

    def add(self, ids: list[int]) -> None:
        keys = torch.stack([self.pool[(7 * block + len(self.there)) % 500] for block in ids])
        self.index.add(torch.tensor(ids), keys)
        self.there |= dict(zip(ids, keys, strict=True))

    def drop(self, ids: list[int]) -> None:
        self.index.remove(torch.tensor(ids).long())
        for block in ids:
            del self.there[block]

    @rule(n=st.integers(1, 60))
    def append(self, n: int) -> None:
        self.next = max([self.next, *(block + 1 for block in self.there)])
        self.add(list(range(self.next, self.next + n)))

    @rule(capacity=st.integers(10, 80))
    def leave_at_the_front(self, capacity: int) -> None:
        self.drop(sorted(self.there)[: max(0, len(self.there) - capacity)])

    @rule(n=st.integers(0, 70))
    def truncate(self, n: int) -> None:
        self.drop(sorted(self.there)[n:])
        self.next = max([-1, *self.there]) + 1

    @rule(chosen=st.sets(BLOCKS, max_size=9))
    def remove_some(self, chosen: set[int]) -> None:
        self.drop(sorted(chosen & self.there.keys()))

    @rule(chosen=st.sets(BLOCKS, min_size=1, max_size=9))
    def put_back(self, chosen: set[int]) -> None:
        if new := sorted(chosen - self.there.keys()):
            self.add(new)

    @rule()
    def finish(self) -> None:
        self.index.finish()

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.index.save(Path(folder) / "index")
            self.index.close()
            self.index = self.make()
            self.index.load(Path(folder) / "index")

    @rule(k=st.integers(1, 9), allowed=ALLOWED)
    def search(self, k: int, allowed: range | Tensor | None) -> None:
        wanted = self.there.keys() if allowed is None else self.there.keys() & {int(block) for block in allowed}
        ids = sorted(wanted)
        keys = torch.stack([self.there[block] for block in ids]) if ids else self.pool[:0]
        truth = brute_force(torch.tensor(ids).long(), keys, self.queries, k)
        found = self.index.search(self.queries, k, allowed=allowed)
        if self.index.capabilities.exact:
            assert_found(found, truth)
        scores = brute_force(torch.tensor(ids).long(), keys, self.queries, max(1, len(ids)))
        for place in ((found.ids >= 0).nonzero()).tolist():
            head, row, _ = place
            block = int(found.ids[tuple(place)])
            assert block in wanted
            at = (scores.ids[head, row] == block).nonzero()
            assert float(found.scores[tuple(place)]) == float(scores.scores[head, row, at])
        if self.index.capabilities.dense and self.dtype == torch.float32:  # products of others are rounded to them
            every, blocks = self.index.score(self.queries, allowed=allowed)
            assert blocks.tolist() == ids
            order = scores.ids[..., : len(ids)].sort(dim=-1).indices
            assert torch.equal(every, scores.scores[..., : len(ids)].gather(-1, order))
        unique = [len({*row.tolist()} - {-1}) == int((row >= 0).sum()) for row in found.ids.flatten(0, 1)]
        assert all(unique)

    @invariant()
    def it_has_as_many_blocks(self) -> None:
        if hasattr(self, "index"):
            assert len(self.index) == len(self.there)

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("exact", torch.float32),
        ("exact", torch.bfloat16),
        ("faiss:Flat", torch.float32),
        ("faiss:IVF2,Flat;nprobe=1", torch.float32),
        ("faiss:IVF2,SQ8", torch.float32),
        ("faiss:HNSW4", torch.float32),
        ("clusters:0.3", torch.float32),
        ("clusters:1", torch.bfloat16),
        ("codes", torch.float32),
        ("auto:recall=0.3", torch.float32),
    ],
)
def test_any_history_equals_the_model(name: str, dtype: torch.dtype) -> None:
    run(name, dtype)


@pytest.mark.parametrize("name", ["exact", "codes", "clusters:1"])
def test_any_history_equals_the_model_without_c(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (native, passes):
        monkeypatch.setattr(module, "problem", lambda: "is left out here")
    run(name, torch.float32)


@pytest.mark.parametrize("fewest_groups", [0, 1 << 30])
def test_any_history_equals_the_model_as_among_many_keys(fewest_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "PASSED_PRODUCTS", 0)
    monkeypatch.setattr(exact, "FEWEST_GROUPS", fewest_groups)
    run("exact", torch.float32)


def run(name: str, dtype: torch.dtype) -> None:
    """Some histories of an index."""
    machine: Any = type("Named", (Machine,), {"name": name, "dtype": dtype})
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
    machine.TestCase("runTest").runTest()
