"""Blocks that are kept in memory are those that are committed now, whoever wrote them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.memory import Document, Memory
from memstore.resources import PeakMemory, memory_in_use
from tests.memory.helpers import (
    G,
    S,
    append,
    check_content,
    in_blocks,
    make_fingerprint,
    make_spec,
    random_tokens,
    run_python,
    states,
)
from tests.memory.test_damage import flip

TOKENS = random_tokens(20 * S + 1)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    """A memory on disk with one document of 21 blocks, the last of them incomplete."""
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("a"), TOKENS)
        yield memory


def disk_reads(memory: Memory) -> int:
    count = memory.stats()["tiers"]["disk"]["hits"]
    assert isinstance(count, int)
    return count


def settle(document: Document, layer: int, blocks: list[int]) -> None:
    """Gather what is being brought, so that nothing is under way."""
    document.layer(layer).gather(blocks)


def test_a_block_is_read_from_disk_once(memory: Memory) -> None:
    for _ in range(3):
        check_content(memory.document("a"), TOKENS)
    reads = disk_reads(memory)
    check_content(memory.document("a"), TOKENS)
    assert disk_reads(memory) == reads + 3, "the incomplete block of each layer, which may still change"


def test_without_a_budget_every_block_is_read(memory: Memory, tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", mode="r", host_bytes=0) as reader:
        view = reader.document("a").layer(1)
        for _ in range(3):
            view.prefetch([1, 2])
            view.gather([1, 2])
        assert disk_reads(reader) == 6


def test_asking_where_blocks_are_moves_and_counts_nothing(memory: Memory) -> None:
    view = memory.document("a").layer(0)
    before = memory.stats()["tiers"]
    assert view.tiers([1, 0, 1]) == ["disk"] * 3
    assert memory.stats()["tiers"] == before
    view.gather([1])
    before = memory.stats()["tiers"]
    assert view.tiers([1, 0, 1]) == ["host", "disk", "host"]
    assert memory.document("a").layer(1).tiers(torch.tensor([1])) == ["disk"]
    assert memory.stats()["tiers"] == before
    with memstore.open("ram:", spec=make_spec()) as other:
        append(other.document("a"), random_tokens(9))
        assert other.document("a").layer(0).tiers([0, 1]) == ["host", "host"]


def test_a_memory_in_host_memory_is_not_kept_there_twice() -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("a"), TOKENS)
        memory.document("a").layer(0).gather([1])
        assert memory.stats()["tiers"]["host"]["held_bytes"] == 0


def test_nothing_stale_is_served_after_truncating_and_appending(memory: Memory) -> None:
    document, tokens = memory.document("a"), TOKENS
    for seed in range(1, 5):
        check_content(document, tokens)
        document.truncate(12)
        tokens = torch.cat([tokens[: 12 * S], random_tokens(7 * S + 2, seed)])
        append(document, tokens[12 * S :])
        check_content(document, tokens)


REWRITE = """
with memstore.open(sys.argv[1]) as memory:
    memory.document("a").truncate(12)
    append(memory.document("a"), random_tokens(8 * S, int(sys.argv[2])))
"""


def test_nothing_stale_is_served_after_another_process_has_written(memory: Memory, tmp_path: Path) -> None:
    memory.close()
    with memstore.open(tmp_path / "m", mode="r") as reader:
        document = reader.document("a")
        check_content(document, TOKENS)
        for seed in (1, 2):
            run_python(REWRITE, str(tmp_path / "m"), str(seed))
            check_content(document, torch.cat([TOKENS[: 12 * S], random_tokens(8 * S, seed)]))


def test_a_forgotten_document_is_not_served_from_memory(memory: Memory) -> None:
    view = memory.document("a").layer(1)
    view.gather([3])
    memory.forget("a")
    with pytest.raises(NotFound):
        view.gather([3])
    append(memory.document("a"), TOKENS[: 4 * S] + 1)
    check_content(memory.document("a"), TOKENS[: 4 * S] + 1)


def test_blocks_that_left_are_not_served_from_memory(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "small", spec=make_spec(capacity=5)) as memory:
        document = memory.document("a")
        for part in TOKENS.split(5):
            append(document, part)
            document.layer(0).gather(list(document.blocks))
        with pytest.raises(NotFound, match="no block 3"):
            document.layer(0).gather([3])
        check_content(document, TOKENS)


def test_blocks_are_brought_ahead_for_several_layers(memory: Memory) -> None:
    document = memory.document("a")
    document.layer(0).prefetch([1, 2])
    document.layer(2).prefetch([2, 5, 20, 99])
    settle(document, 0, [1, 2])
    settle(document, 2, [2, 5])
    assert disk_reads(memory) == 4
    assert memory.stats()["tiers"]["host"]["prefetched"] == 4
    assert torch.equal(document.layer(2).gather([5, 2])["k"], states(in_blocks(TOKENS)[[5, 2]], 2)["k"])


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("held", [False, True])
def test_several_layers_are_gathered_as_each_by_itself(tmp_path: Path, codec: str, held: bool) -> None:
    """Also where some blocks are in host memory, others on disk, and the last is not complete."""
    with memstore.open(tmp_path / "m", spec=make_spec(codec=codec)) as memory:
        document, cpu = memory.document("a"), torch.device("cpu")
        append(document, TOKENS)
        if held:
            document.prefetch([2, 1], [7, 4])
            settle(document, 1, [7])
            settle(document, 2, [7])
        for blocks in ([7, 4], [4, 20, 3], []):
            layers = [2, 0, 1, 2]  # one of them twice
            each = [document.layer(layer).gather(blocks) for layer in layers]
            for alone, together in zip(each, document.gather(layers, blocks, device=cpu), strict=True):
                assert all(torch.equal(alone[name], together[name]) for name in ("k", "v"))
        document.prefetch([], [3])
        assert document.gather([], [3], device=cpu) == []
        assert document.at_hand([], [3])
        assert document.at_hand([0, 1, 2], [3, 4])
        assert not document.at_hand([0, 1, 2], [3, 5])


def test_damage_in_one_of_several_layers_is_named(memory: Memory, tmp_path: Path) -> None:
    memory.close()
    flip(tmp_path / "m", states(in_blocks(TOKENS), 1)["k"][3].contiguous().numpy().tobytes(), 9)
    with (
        memstore.open(tmp_path / "m", mode="r") as reader,
        pytest.raises(DamagedError, match=r"document 'a', layer 1, block 3 is damaged or lost"),
    ):
        reader.document("a").gather([0, 1, 2], [2, 3], device=torch.device("cpu"))


def test_damage_met_ahead_is_named_when_the_block_is_wanted(memory: Memory, tmp_path: Path) -> None:
    memory.close()
    flip(tmp_path / "m", states(in_blocks(TOKENS), 1)["k"][3].contiguous().numpy().tobytes(), 9)
    with memstore.open(tmp_path / "m", mode="r") as reader:
        view = reader.document("a").layer(1)
        view.prefetch([2, 3])
        assert torch.equal(view.gather([2])["k"], states(in_blocks(TOKENS)[2:3], 1)["k"])
        with pytest.raises(DamagedError, match=r"document 'a', layer 1, block 3 is damaged or lost"):
            view.gather([3])
        assert view.sound([2, 3, 4]) == view.sound([2, 3, 4]) == [2, 4]
        assert reader.stats()["tiers"]["left_out"] == 2


def test_no_thread_is_left_behind(memory: Memory) -> None:
    before = threading.active_count()
    memory.document("a").layer(0).prefetch([1])
    memory.close()
    assert threading.active_count() == before


def test_the_device_pool_gives_tensors_on_its_device(memory: Memory, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    with memstore.open(tmp_path / "m", mode="r", device_bytes=1 << 20, device="cpu", host_bytes=0) as reader:
        view = reader.document("a").layer(1)
        for _ in range(2):
            gathered = view.gather([4, 2, 20], device=cpu)
            assert torch.equal(gathered["k"], states(in_blocks(TOKENS)[[4, 2, 20]], 1)["k"])
        assert reader.stats()["tiers"]["device"]["hits"] == 2
        assert view.tiers([4, 2, 20, 5]) == ["device", "device", "disk", "disk"], "block 20 is incomplete"


@pytest.mark.parametrize(
    "options",
    [{"host_bytes": -1}, {"host_bytes": True}, {"device_bytes": 1.5}, {"device_bytes": 1, "device": "typewriter"}],
)
def test_budgets_that_are_none_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=r"number of bytes|a torch device"):
        memstore.open(tmp_path / "m", spec=make_spec(), **options)  # type: ignore[arg-type]


def test_budgets_hold_while_reading_and_gathering(tmp_path: Path) -> None:
    budget, size, blocks = 32 << 20, 64, 4096
    shape = (G, size, 64)
    spec = make_spec(
        layers=1,
        index_layers=(),
        block_size=size,
        fields={"k": shape, "v": shape},
        fingerprint=make_fingerprint(block_size=size),
    )
    with memstore.open(tmp_path / "large", spec=spec, host_bytes=budget) as memory:
        document = memory.document("a")
        before, _ = memory_in_use()
        with PeakMemory() as peak:
            for _ in range(blocks // 256):
                with document.append(random_tokens(256 * size)) as batch:
                    batch.put(0, k=torch.ones(256, *shape), v=torch.ones(256, *shape))
            for start in range(0, blocks, 64):
                document.layer(0).prefetch(range(start, start + 64))
                document.layer(0).gather(range(start, start + 64))
        assert memory.stats()["tiers"]["host"]["held_bytes"] <= budget
        assert 8 * budget <= memory.stats()["bytes"]["blocks"], "or it would prove nothing"
        assert peak.anonymous_bytes - before <= budget + (100 << 20)
