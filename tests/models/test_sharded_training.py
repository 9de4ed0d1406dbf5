"""A DRT that trains with blocks of other ranks gets the gradients of one process that has all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from memstore.errors import InvalidArgument
from memstore.models.drt import DRTForCausalLM, SharedBlocks
from memstore.readers.ranks import Ranks
from tests.models.drt import make, tokens
from tests.readers.ranks import join
from tests.readers.test_sharded import run_ranks

KINDS = ["rope", "alibi, two groups", "normalised scores", "tied, float16 states"]
ROWS, LENGTH = 4, 61
LENGTHS = torch.tensor([61, 40, 52, 33])
"""Of the rows: ragged, and none of them whole blocks of 7 tokens."""


def model(kind: str) -> DRTForCausalLM:
    """In float64: what differs is not rounding."""
    made = make(kind, gumbel=0.0, retrieval_top_k=5)
    made.double().train()
    return made


def batch() -> dict[str, Tensor]:
    """All rows, and which of their tokens are shared."""
    free = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    free[:, 14:30] = False  # an answer to somebody's question
    free[2] = False  # a row that shares nothing
    mask = torch.arange(LENGTH) < LENGTHS[:, None]
    return {"ids": tokens(LENGTH, rows=ROWS).where(mask, 0), "mask": mask, "free": free}


def trained(network: Any, rows: dict[str, Tensor], scale: float, ranks: Ranks | None = None) -> dict[str, Tensor]:
    """Logits of ``rows``, after their loss went back: its sum, times ``scale``."""
    ids, mask = rows["ids"], rows["mask"]
    bank = {"states": torch.ones(2, 8, 32).double(), "landmarks": torch.ones(2, 32).double()}
    shared = SharedBlocks(rows=rows["free"], ranks=ranks, **bank)
    logits = network(input_ids=ids, attention_mask=mask.long(), shared=shared, use_cache=False).logits
    targets = ids.where(mask, -100)[:, 1:]
    (scale * F.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="sum")).backward()
    return {"logits": logits.detach()}


def gradients(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}


def work(rank: int, size: int, folder: str) -> None:
    """Be a rank, with rows of its own that are as long as its longest."""
    join(rank, size, folder)
    ranks = Ranks(dist.group.WORLD)
    for kind in KINDS:
        mine = torch.arange(ROWS).tensor_split(size)[rank]
        rows = {name: each[mine, : int(LENGTHS[mine].max())] for name, each in batch().items()}
        network = model(kind)
        # It takes the mean of the ranks' gradients.
        found = trained(DistributedDataParallel(network), rows, float(size), ranks)
        torch.save({**gradients(network), **found}, f"{folder}/{kind}-{size}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process_with_all_rows(tmp_path: Path, size: int) -> None:
    assert run_ranks(work, size, str(tmp_path)) == [0] * size
    for kind in KINDS:
        alone = model(kind)
        whole = trained(alone, batch(), 1.0)["logits"]
        for rank, mine in enumerate(torch.arange(ROWS).tensor_split(size)):
            told = torch.load(tmp_path / f"{kind}-{size}-{rank}.pt", weights_only=True)
            seen = batch()["mask"][mine]
            logits = told.pop("logits")
            torch.testing.assert_close(logits[seen[:, : logits.shape[1]]], whole[mine][seen], atol=1e-5, rtol=0)
            assert told.keys() == gradients(alone).keys()
            for name, gradient in gradients(alone).items():
                torch.testing.assert_close(told[name], gradient, atol=1e-5, rtol=1e-5)


def test_without_the_others_gradients_are_other_ones() -> None:
    """What the test above compares depends on blocks of other rows."""
    for kind in KINDS:
        together, apart = model(kind), model(kind)
        trained(together, batch(), 1.0)
        for mine in torch.arange(ROWS).tensor_split(2):
            trained(apart, {name: each[mine] for name, each in batch().items()}, 1.0)
        name = "model.encoder.layers.0.qkv.weight"
        assert float((gradients(together)[name] - gradients(apart)[name]).abs().max()) > 1e-2


def work_without_a_block(rank: int, size: int, folder: str) -> None:
    """Write down what a rank is told when one of them has no block."""
    join(rank, size, folder)
    shared = SharedBlocks(ranks=Ranks(dist.group.WORLD))
    try:
        model("rope")(input_ids=tokens((20, 3)[rank]), shared=shared, use_cache=False)
    except InvalidArgument as error:
        Path(f"{folder}/{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def test_a_rank_without_a_block_is_an_error_on_all(tmp_path: Path) -> None:
    assert run_ranks(work_without_a_block, 2, str(tmp_path)) == [0, 0]
    for rank in range(2):
        assert "rank 1 has none: each row must have" in (tmp_path / f"{rank}.txt").read_text()
