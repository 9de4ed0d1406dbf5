"""A memory that several processes search and attend to together answers as one process does."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from tests import forks
from tests.pairs import each
from tests.readers import ranks
from tests.readers.models import tiny


def run_ranks(work: Callable[..., None], size: int, *arguments: object) -> list[int | None]:
    """Exit codes of so many processes."""
    processes = [forks.start(work, rank, size, *arguments) for rank in range(size)]
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


@each(case=list(ranks.CASES), size=[2, 3])
def test_ranks_answer_as_one_process(tmp_path: Path, case: str, size: int) -> None:
    ranks.read(tmp_path / "m", case, ranks.lengths(case))
    alone = ranks.answer(str(tmp_path / "m"), case)
    assert run_ranks(ranks.work, size, str(tmp_path), case) == [0] * size
    check(tmp_path, alone, size)


def check(folder: Path, alone: dict[str, torch.Tensor], size: int) -> list[int]:
    """Compare what each rank wrote down; landmarks that each held."""
    told = [torch.load(folder / f"{size}-{rank}.pt", weights_only=True) for rank in range(size)]
    for its in told:
        torch.testing.assert_close(its["logits"][0], alone["logits"][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(its["logits"][1, 3:], alone["logits"][1, 3:], atol=1e-5, rtol=0)
        assert torch.equal(its["generated"], alone["generated"])
        assert torch.equal(its["logits"], told[0]["logits"])
    return [int(its["landmarks"]) for its in told]


def test_a_memory_opens_with_any_number_of_ranks_each_of_which_holds_its_share(tmp_path: Path) -> None:
    ranks.read(tmp_path / "m", "model", (1500,))
    alone = ranks.answer(str(tmp_path / "m"), "model")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        full = len(memory.document("0").complete_blocks)
    for size in (1, 4):
        assert run_ranks(ranks.work, size, str(tmp_path), "model") == [0] * size
        held = check(tmp_path, alone, size)
        # Half as many again: in runs of two each has the block before it too.
        assert max(held) <= full / size * 1.5 + 3


@pytest.mark.parametrize("case", ["none"])
def test_there_may_be_more_ranks_than_blocks(tmp_path: Path, case: str) -> None:
    ranks.read(tmp_path / "m", case, (97,))
    alone = ranks.answer(str(tmp_path / "m"), case)
    assert run_ranks(ranks.work, 4, str(tmp_path), case) == [0] * 4
    check(tmp_path, alone, 4)


@pytest.mark.parametrize("case", ["model", "group"])
def test_what_ranks_tell_each_other_lies_where_their_group_wants_it(tmp_path: Path, case: str) -> None:
    ranks.read(tmp_path / "m", case, ranks.lengths(case))
    alone = ranks.answer(str(tmp_path / "m"), case)
    assert run_ranks(ranks.work_on_a_device, 2, str(tmp_path), case) == [0, 0]
    check(tmp_path, alone, 2)


@pytest.mark.parametrize("case", ["group", "none"])
def test_layers_may_be_divided_beside_a_memory_that_is_shared(tmp_path: Path, case: str) -> None:
    """Tensor parallelism along one dimension of a mesh of two by two, ranks along the other."""
    ranks.read(tmp_path / "m", case, ranks.lengths(case))
    alone = ranks.answer(str(tmp_path / "m"), case)
    assert run_ranks(ranks.work_divided, 4, str(tmp_path), case) == [0] * 4
    check(tmp_path, alone, 4)
    assert "divided among processes can only ask a memory: use mode='r'" in (tmp_path / "0.txt").read_text()


@pytest.mark.parametrize("case", ["group"])
def test_a_model_that_transformers_divides_answers_as_the_whole_one(tmp_path: Path, case: str) -> None:
    ranks.read(tmp_path / "m", case, ranks.lengths(case))
    tiny("llama").save_pretrained(tmp_path / "model")
    alone = ranks.answer(str(tmp_path / "m"), case)
    assert run_ranks(ranks.work_loaded_in_parts, 2, str(tmp_path), case) == [0, 0]
    check(tmp_path, alone, 2)


def test_a_model_that_is_brought_together_layer_by_layer_is_refused(tmp_path: Path) -> None:
    assert run_ranks(ranks.work_fully_sharded, 2, str(tmp_path)) == [0, 0]
    assert "fully_shard gathers its weights" in (tmp_path / "1.txt").read_text()


def test_the_digest_of_divided_weights_waits_for_nobody_who_has_kept_it(tmp_path: Path) -> None:
    assert run_ranks(ranks.work_on_computers_of_their_own, 2, str(tmp_path)) == [0, 0]


def test_attaching_again_and_again_opens_no_more_sockets(tmp_path: Path) -> None:
    ranks.read(tmp_path / "m", "model", (200,))
    assert run_ranks(ranks.work_again, 2, str(tmp_path), "model") == [0, 0]


def test_groups_of_ranks_beside_each_other_answer_what_each_is_asked(tmp_path: Path) -> None:
    """Data parallelism along one dimension of a mesh, ranks along the other."""
    ranks.read(tmp_path / "m", "model", ranks.lengths("model"))
    assert run_ranks(ranks.work_beside_others, 4, str(tmp_path), "model") == [0] * 4
    for rank in range(4):
        alone = ranks.answer(str(tmp_path / "m"), "model", seed=rank // 2)
        told = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(told["logits"], alone["logits"], atol=1e-5, rtol=0)
        assert torch.equal(told["generated"], alone["generated"])


@pytest.mark.parametrize("told", [-1, 9, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 3, 17))])
def test_a_rank_that_is_killed_is_an_error_on_all_others_in_time(tmp_path: Path, told: int) -> None:
    """Whenever that is; and nothing is lost."""
    ranks.read(tmp_path / "m", "model", (500,))
    alone, begun = ranks.answer(str(tmp_path / "m"), "model"), time.monotonic()
    assert run_ranks(ranks.work_until_one_dies, 3, str(tmp_path), told) == [0, -signal.SIGKILL, 0]
    assert time.monotonic() - begun < 90
    for rank in (0, 2):
        assert "a rank of the process group was lost" in (tmp_path / f"{rank}.txt").read_text()
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert memory.verify() == []
    assert torch.equal(ranks.answer(str(tmp_path / "m"), "model")["logits"], alone["logits"])


def test_ranks_that_see_different_memories_hear_of_it(tmp_path: Path) -> None:
    for rank, length in enumerate((500, 400)):
        ranks.read(tmp_path / str(rank), "model", (length,))
    assert run_ranks(ranks.work_on_different_memories, 2, str(tmp_path)) == [0, 0]
    for rank in range(2):
        assert "see different memories" in (tmp_path / f"{rank}.txt").read_text()


def test_what_ranks_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="use mode='r', and read texts with one"):
        memstore.attach(tiny("llama"), tmp_path / "m", process_group=object())
    ranks.read(tmp_path / "m", "model", (100,))
    reader = memstore.attach(tiny("llama"), tmp_path / "m", mode="r", process_group=object(), **ranks.SIZES)
    with pytest.raises(InvalidArgument, match="call init_process_group, or use torchrun"), reader:
        pass
    assert Retrieval().on_error == "raise"
