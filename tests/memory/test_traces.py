"""Traces: what is recorded is read back, also by others, within bounds, and whatever happens to the file."""

from __future__ import annotations

import signal
import time
import timeit
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.memory import Look, Memory, Trace, trace_file, traces
from memstore.memory.traces import NAME, uses
from memstore.memory.urls import Mode
from tests import forks
from tests.memory.helpers import append, make_spec, random_tokens, run_python

FACTS: dict[str, Any] = {"mechanism": "attach", "question": "where?", "documents": ["whale"], "layers": [1], "heads": 4}


def make_look(seed: int = 0, *, lists: int = 2, heads: int = 4, entries: int = 3, **changes: Any) -> Look:
    """A look with random weights; entry ``k`` of list ``r`` is block ``10 r + k`` of the first document."""
    random = np.random.default_rng(seed)
    blocks = 10 * np.arange(lists)[:, None] + np.arange(entries)
    values: dict[str, Any] = {
        "layer": 1,
        "row": 0,
        "documents": ["whale", "ship"],
        "document": np.zeros((lists, entries), np.int16),
        "blocks": blocks,
        "scores": random.normal(size=(lists, entries)).astype(np.float32),
        "weights": random.random((heads, entries)).astype(np.float32) / 8,
        "tiers": np.full((lists, entries), 2, np.int8),
    }
    return Look(**(values | changes))


def record(memory: Memory, steps: int = 3, heads: int = 4, entries: int = 3, **info: Any) -> Trace:
    """Record a trace of ``steps`` steps, whose tokens are 100, 101, ..."""
    with memory.traces.record(**(FACTS | info)) as writer:
        for step in range(steps):
            writer.begin()
            writer.look(make_look(step, heads=heads, entries=entries))
            writer.token(100 + step)
    trace = memory.traces.last()
    assert trace is not None
    return trace


@pytest.fixture(params=["lmdb", "zarr", "remote", "ram"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Memory]:
    url = {
        "lmdb": str(tmp_path / "m"),
        "zarr": f"zarr:{tmp_path / 'm'}",
        "remote": f"zarr+file://{tmp_path / 'shards'}?tail={tmp_path / 'm'}",
        "ram": "ram:",
    }[request.param]
    with memstore.open(url, spec=make_spec()) as opened:
        append(opened.document("whale"), random_tokens(40))
        yield opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A memory on disk."""
    with memstore.open(tmp_path / "m", spec=make_spec()) as opened:
        append(opened.document("whale"), random_tokens(40))
    return tmp_path / "m"


# Writing and reading


def assert_same(one: Look, other: Look) -> None:
    assert (one.layer, one.row, list(one.documents)) == (other.layer, other.row, list(other.documents))
    for field in ("document", "blocks", "offsets", "scores", "tiers"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field), field)
    np.testing.assert_allclose(one.weights, other.weights, rtol=1e-3)
    assert (one.elsewhere is None) == (other.elsewhere is None)
    if one.elsewhere is not None and other.elsewhere is not None:
        np.testing.assert_allclose(one.elsewhere, other.elsewhere, rtol=1e-3)
    assert (one.search_us, one.gather_us) == (other.search_us, other.gather_us)


def test_what_was_recorded_is_read_back(memory: Memory) -> None:
    looks = [
        make_look(1),
        make_look(2, layer=7, row=3, lists=1, heads=9, entries=5, search_us=12.0, gather_us=0.5),
        make_look(3, offsets=np.arange(6).reshape(2, 3), documents=["ship"], weights=np.full((4, 3), np.nan)),
        make_look(5, elsewhere=np.full((4, 4), 0.125, np.float32)),
        make_look(4, lists=3, heads=3, entries=0),
    ]
    with memory.traces.record(**FACTS) as writer:
        writer.begin()
        for each in looks:
            writer.look(each)
        writer.token(5)
        writer.begin()
    trace = memory.traces.get(writer.number)
    first, second = trace.steps()
    assert len(trace) == 2
    assert (first.number, first.token, second.number, second.token) == (0, 5, 1, None)
    assert 0 <= first.seconds <= second.seconds
    assert second.looks == []
    for one, other in zip(first.looks, looks, strict=True):
        assert_same(one, other)


def test_a_trace_knows_what_it_is_of(memory: Memory) -> None:
    with memory.traces.record(**FACTS) as writer:
        writer.describe(prompt=[1, 2])
        assert not memory.traces.get(writer.number).info["ended"]
    info = memory.traces.get(writer.number).info
    assert {**FACTS, "prompt": [1, 2], "ended": True, "version": memstore.__version__}.items() <= info.items()
    assert info["started"].endswith("+00:00")


def test_a_memory_without_traces_has_none_and_no_file(memory: Memory, tmp_path: Path) -> None:
    assert memory.traces.list() == []
    assert memory.traces.last() is None
    with pytest.raises(NotFound, match="has no trace 1; it has none"):
        memory.traces.get(1)
    assert not list(tmp_path.rglob(f"{NAME}*"))


def test_numbers_are_never_used_again(memory: Memory) -> None:
    first, second = record(memory), record(memory)
    memory.traces.remove(second.number)
    third = record(memory)
    assert first.number < second.number < third.number
    assert [trace.number for trace in memory.traces.list()] == [first.number, third.number]
    assert len(second) == 0
    with pytest.raises(NotFound, match=f"no trace {second.number}; it has {first.number}, {third.number}"):
        memory.traces.remove(second.number)


def test_steps_are_read_in_pieces(memory: Memory) -> None:
    trace = record(memory, steps=5)
    assert [step.number for step in trace.steps(2, 4)] == [2, 3]
    assert [step.token for step in trace.steps(3)] == [103, 104]
    assert trace.steps(5) == []
    assert trace.tokens() == [100, 101, 102, 103, 104]


def test_closing_tells_tokens_that_were_not_known(memory: Memory) -> None:
    writer = memory.traces.record(**FACTS)
    for _ in range(3):
        writer.begin()
    writer.close(tokens=[7, 8, 9])
    writer.close()
    assert memory.traces.get(writer.number).tokens() == [7, 8, 9]


@pytest.mark.parametrize("tokens", [torch.tensor([7, 8]), np.array([7, 8])])
def test_closing_takes_tokens_of_any_kind(memory: Memory, tokens: Any) -> None:
    with memory.traces.record(**FACTS) as writer:
        for _ in tokens:
            writer.begin()
        for wrong in ("xy", ["a"], [1.5], [10**30], [-1]):
            with pytest.raises(InvalidArgument, match="the id of a token must be"):
                writer.close(wrong)  # type: ignore[arg-type]
        writer.close(tokens)
    assert memory.traces.get(writer.number).tokens() == [7, 8]


@pytest.mark.parametrize("wrong", [float("nan"), object(), {"deep": [float("inf")]}])
def test_facts_that_no_reader_could_read_are_refused(memory: Memory, wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="the facts about a trace"):
        memory.traces.record(**FACTS, score=wrong)
    with memory.traces.record(**FACTS) as writer:
        with pytest.raises(InvalidArgument, match="the facts about a trace"):
            writer.describe(score=wrong)
        writer.describe(score=1.5)
    (trace,) = memory.traces.list()
    assert trace.info["score"] == 1.5


def test_a_look_can_be_told_later_until_its_step_is_written(memory: Memory) -> None:
    with memory.traces.record(**FACTS) as writer:
        writer.begin()
        writer.begin()
        writer.before_writing = lambda: writer.look(make_look(layer=9), step=0)
    assert [[each.layer for each in step.looks] for step in memory.traces.get(writer.number).steps()] == [[9], []]


# What was used


def test_weights_are_means_over_steps_layers_and_heads(memory: Memory) -> None:
    weights = np.zeros((4, 3), np.float32)
    weights[0, 1], weights[3, 2] = 0.5, 0.25  # block 1 of the first list, block 12 of the second
    with memory.traces.record(**FACTS) as writer:
        writer.begin()
        writer.look(make_look(weights=weights))
        writer.begin()
        writer.look(make_look(weights=weights, layer=2, document=np.ones((2, 3), np.int16)))
    trace = memory.traces.get(writer.number)
    assert trace.used()[:4] == [
        ("whale", 1, 0.5 / 8),
        ("ship", 1, 0.5 / 8),
        ("whale", 12, 0.25 / 8),
        ("ship", 12, 0.25 / 8),
    ]
    assert trace.used(layer=2)[0] == ("ship", 1, 0.5 / 4)
    assert trace.used(layer=1, head=3)[0] == ("whale", 12, 0.25)
    assert {block for _, block, _ in trace.used(head=3)} == {10, 11, 12}
    assert trace.used(layer=5) == []
    assert trace.steps_using("ship", 12) == [(1, 0.25 / 4)]
    assert trace.steps_using("whale", 99) == []


def test_runs_of_tokens_go_over_the_ends_of_blocks() -> None:
    offsets = np.array([[0, 4, 5, 0, 1, 2]])  # in blocks of 6: tokens 0, 4 and 5, then 6, 7 and 8
    blocks = np.array([[0, 0, 0, 1, 1, 1]])
    found = make_look(lists=1, heads=1, entries=6, blocks=blocks, offsets=offsets)
    weights, scores = found.weights[0], found.scores[0]
    told = {use.weight: use for use in uses([found], unit=4, size=6)}
    assert sorted(told) == pytest.approx(sorted([weights[0], weights[1:5].sum(), weights[5]]))
    best = 1 + int(scores[1:5].argmax())
    of = next(use for use in told.values() if use.score == scores[best])
    assert (of.document, of.block, of.offset) == ("whale", blocks[0, best], offsets[0, best])
    assert of.weight == pytest.approx(weights[1:5].sum())


def test_of_equal_scores_the_use_with_most_weight_is_told() -> None:
    scores = np.array([[1.0, np.nan, 2.0]], np.float32)
    looks = [
        make_look(lists=1, heads=1, layer=layer, scores=scores, weights=np.full((1, 3), weight))
        for layer, weight in ((3, 0.1), (4, 0.3), (5, 0.2))
    ]
    assert {(use.block, use.score, use.layer) for use in uses(looks)} == {(0, 1.0, 4), (1, None, 4), (2, 2.0, 4)}


def test_the_use_of_many_entries_is_found_faster_than_they_are_sorted() -> None:
    many = np.random.default_rng(0).integers(0, 2**16, (1, 300_000))
    look = make_look(lists=1, heads=1, entries=many.size, blocks=many // 64, offsets=many % 64)

    def seconds(of: Callable[[], object]) -> float:
        return min(timeit.repeat(of, number=1, repeat=5, timer=time.process_time))

    by_two_keys = seconds(lambda: np.lexsort((-look.weights[0], -look.scores[0])))
    assert seconds(lambda: uses([look])) < by_two_keys


def test_entries_that_are_none_or_unknown_have_no_weight(memory: Memory) -> None:
    found = make_look(lists=1, heads=1, weights=np.array([[0.5, np.nan, 0.25]], np.float32))
    found.document[0, 2] = -1
    with memory.traces.record() as writer:
        writer.begin()
        writer.look(found)
    assert memory.traces.get(writer.number).used() == [("whale", 0, 0.5), ("whale", 1, 0.0)]


# Bounds


LARGE: dict[str, Any] = {"heads": 64, "entries": 64}
LARGE_BYTES = len(trace_file.encode([make_look(0, **LARGE)]))


def test_the_oldest_traces_leave_first(memory: Memory) -> None:
    memory.traces.max_bytes = 10 * LARGE_BYTES
    traces = [record(memory, steps=4, **LARGE) for _ in range(4)]
    assert [trace.number for trace in memory.traces.list()] == [trace.number for trace in traces[2:]]
    assert all(step.looks for trace in traces[2:] for step in trace.steps())


def test_a_long_prompt_counts(memory: Memory) -> None:
    memory.traces.max_bytes = 3_000
    record(memory)
    with memory.traces.record() as writer:
        writer.describe(prompt=list(range(1000)))
        writer.begin()
    assert [trace.number for trace in memory.traces.list()] == [writer.number]


def test_then_the_oldest_looks_of_the_trace_in_hand_leave(memory: Memory) -> None:
    memory.traces.max_bytes = 4 * LARGE_BYTES
    record(memory, steps=1, **LARGE)
    trace = record(memory, steps=30, **LARGE)
    assert memory.traces.list()[0].number == trace.number
    there = [step.number for step in trace.steps() if step.looks]
    assert 2 <= len(there) <= 4
    assert there == list(range(there[0], 30))
    assert trace.tokens() == list(range(100, 130))


def test_the_file_stays_within_its_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "INTERVAL", 0.0)
    with memstore.open(path) as memory:
        memory.traces.max_bytes = 200_000
        for _ in range(4):
            with memory.traces.record() as writer:
                for step in range(40):
                    writer.begin()
                    writer.look(make_look(step, heads=64, entries=64, lists=8))
    assert (path / NAME).stat().st_size < 400_000


# Others who read, and endings


def write_and_hold(path: str, mode: Mode, says: Connection) -> None:
    """Record four steps, three of them written, say so, and wait."""
    traces.INTERVAL = 0.0
    memory = memstore.open(path, mode=mode)
    writer = memory.traces.record(**FACTS)
    for step in range(4):
        writer.begin()
        writer.look(make_look(step))
        writer.token(100 + step)
    says.send("ready")
    signal.pause()


READ = """
with memstore.open(sys.argv[1], mode="r") as memory:
    trace = memory.traces.last()
    print(trace.number, trace.tokens(), trace.info["ended"], [len(step.looks) for step in trace.steps()])
"""


@pytest.fixture
def writing(path: Path) -> Iterator[Callable[[Mode], BaseProcess]]:
    """A function that starts a process which writes and holds."""
    started: list[BaseProcess] = []

    def start(mode: Mode) -> BaseProcess:
        started.append(forks.begun(write_and_hold, str(path), mode))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def test_another_process_reads_while_one_writes(path: Path, writing: Any) -> None:
    writing("a")
    assert run_python(READ, str(path)) == "1 [100, 101, 102] False [1, 1, 1]\n"


def test_a_trace_that_was_killed_is_readable_and_not_ended(path: Path, writing: Any) -> None:
    child = writing("a")
    child.kill()
    child.join()
    with memstore.open(path) as memory:
        assert memory.verify() == []
        (trace,) = memory.traces.list()
        assert (trace.tokens(), trace.info["ended"]) == ([100, 101, 102], False)
        assert record(memory).number == 2


@pytest.mark.slow
def test_two_processes_record_at_once_and_one_may_only_read_the_memory(path: Path, writing: Any) -> None:
    writing("r")
    with memstore.open(path) as memory:
        trace = record(memory)
        assert [each.number for each in memory.traces.list()] == [1, 2]
        assert trace.tokens() == [100, 101, 102]


def test_traces_of_a_named_memory_stay_as_long_as_it(request: pytest.FixtureRequest) -> None:
    url = f"ram:{request.node.name}"
    with memstore.open(url, spec=make_spec()) as memory:
        record(memory)
    with memstore.open(url) as memory:
        assert [trace.tokens() for trace in memory.traces.list()] == [[100, 101, 102]]
    with memstore.open("ram:", spec=make_spec()) as other:
        assert other.traces.list() == []


# What happens to the file


def test_a_memory_is_whole_with_its_traces_and_they_are_not_copied(memory: Memory, tmp_path: Path) -> None:
    with memory.traces.record(**FACTS) as writer:
        writer.begin()
        assert memory.verify() == []
        memory.compact()
        memory.stats()
        memory.build_indexes()
        memory.forget("whale")
    assert memory.traces.get(writer.number).info["documents"] == ["whale"]
    with memstore.open(str(tmp_path / "copy"), spec=make_spec()) as copy:
        assert copy.traces.list() == []


@pytest.mark.parametrize("scheme", ["", "zarr:"])
def test_copying_leaves_traces_where_they_are(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path / 'm'}"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(40))
        with memory.traces.record() as writer:
            writer.begin()
            memstore.copy(url, f"{scheme}{tmp_path / 'copy'}")
    with memstore.open(f"{scheme}{tmp_path / 'copy'}") as copy:
        assert copy.traces.list() == []
        assert len(copy.document("whale")) == 40
