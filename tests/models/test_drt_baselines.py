"""What the learned retriever is compared with, and blocks of other rows as distractors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.models.drt import DRTForCausalLM
from memstore.models.drt.retrieval import SharedBlocks
from tests.models.drt import close, embed, logits, make, tokens

BASELINES: dict[str, dict[str, Any]] = {
    "no retrieval": {"retrieval": "none"},
    "random": {"retrieval": "random"},
    "external": {"retrieval": "external"},
    "chunked": {"fusion": "chunked"},
    "no Gumbel noise": {"gumbel": 0.0},
}


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_learns(name: str) -> None:
    model, ids = make(**BASELINES[name], initializer_range=0.05).train(), tokens(60, rows=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_without_retrieval_there_is_nothing_to_retrieve_with() -> None:
    names = " ".join(name for name, _ in make(retrieval="none").named_parameters())
    assert not any(word in names for word in ("encoder", "retriever", "cross", "block_states"))


def test_random_lists_do_not_depend_on_the_text() -> None:
    model = make(retrieval="random")
    one, other = (model(tokens(90, seed=s), output_retrieval=True, use_cache=False).retrieval[0] for s in (0, 1))
    assert torch.equal(one.blocks, other.blocks)
    there = one.blocks >= 0
    assert torch.equal(one.weights, there / there.sum(-1, keepdim=True).clamp(min=1))


def test_an_external_retriever_sees_whole_blocks_and_is_obeyed() -> None:
    model, ids, seen = make(retrieval="external", retrieval_top_k=1), tokens(77, rows=2), []

    def first_token(blocks: Tensor) -> Tensor:
        seen.append(blocks)
        return torch.nn.functional.one_hot(blocks[:, 0] % 3, 3).float()

    model.set_retriever(first_token)
    with torch.no_grad():
        lists = model(ids, use_cache=False, output_retrieval=True).retrieval[0]
    assert torch.equal(torch.cat(seen).view(2, 11, 7), ids.view(2, 11, 7))
    kinds = ids.view(2, 11, 7)[..., 0] % 3
    for row in range(2):
        for block in range(1, 11):
            earlier = (kinds[row, :block] == kinds[row, block]).nonzero().flatten().tolist()
            if earlier:
                assert int(lists.blocks[row, block, 0]) in earlier


def test_an_external_retriever_belongs_to_models_that_use_one() -> None:
    with pytest.raises(InvalidArgument, match="retrieval='external'"):
        make().set_retriever(embed)
    model = make(retrieval="external")
    model.model.external = None
    with pytest.raises(InvalidArgument, match="set_retriever"):
        model(tokens(20))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.tensor(1.0), r"\[n, e\].* it returned \[\]"),
        (torch.ones(2, 7, 4), r"for \[2, 7\] it returned \[2, 7, 4\]"),
        (torch.ones(1, 4), r"for \[2, 7\] it returned \[1, 4\]"),
        (torch.ones(2, 0), r"it returned \[2, 0\]"),
        (torch.tensor([[1.0], [math.nan]]), "NaN or infinity"),
        ([[1.0], [2.0]], "a list, not a tensor"),
        (None, "a NoneType, not a tensor"),
    ],
)
def test_an_external_retriever_must_return_one_embedding_for_each_block(returned: Any, message: str) -> None:
    model = make(retrieval="external")
    model.set_retriever(lambda blocks: returned)
    with pytest.raises(InvalidArgument, match=message):
        model(tokens(20))


def trainable(kind: str = "rope") -> DRTForCausalLM:
    model = make(kind, gumbel=0.0)
    model.train()
    return model


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups", "chunked", "landmark uses own"])
@pytest.mark.parametrize("length", [2, 20, 75])
def test_sharing_nothing_changes_nothing(kind: str, length: int) -> None:
    model, ids = trainable(kind), tokens(length, rows=3)
    nothing = SharedBlocks(rows=torch.zeros(3, length, dtype=torch.bool))
    for shared in (nothing, SharedBlocks()):
        close(logits(model, ids, shared=shared), logits(model, ids))


def influences(model: DRTForCausalLM, ids: Tensor, shared: SharedBlocks, row: int) -> Tensor:
    """How much the logits of ``row`` depend on each token of every row, ``[B, M]``."""
    embedded: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    handle = model.model.embed_tokens.register_forward_hook(keep)
    out = model(ids, use_cache=False, shared=shared).logits[row]
    (out * torch.randn_like(out)).sum().backward()
    handle.remove()
    assert embedded[0].grad is not None
    return embedded[0].grad.abs().sum(-1)


def test_a_row_sees_blocks_of_another_only_where_all_their_tokens_are_shared() -> None:
    model, ids = make(gumbel=0.0, window=3, lower_layers=1, retrieval_top_k=40), tokens(35, rows=2)
    free = torch.zeros(2, 35, dtype=torch.bool)
    free[1, 7:14] = True  # block 1
    free[1, 21:27] = True  # block 3, but for its last token
    influence = influences(model, ids, SharedBlocks(rows=free), row=0)
    # Items of the stream: a block has 8 of them, the last its landmark, which is no token. One lower layer of window 3
    # sees two items more before a block.
    assert influence[1].nonzero().flatten().tolist() == [6, *range(8, 15)]
    assert bool((influences(model, ids, SharedBlocks(rows=free), row=1)[0] == 0).all())


def test_blocks_that_a_shorter_row_does_not_have_are_not_shared() -> None:
    model, ids = make(gumbel=0.0, retrieval_top_k=40), tokens(35, rows=2)
    mask = torch.ones(2, 35, dtype=torch.long)
    mask[1, 10:] = 0
    shared = SharedBlocks(rows=torch.ones(2, 35, dtype=torch.bool))
    out = model(ids, attention_mask=mask, shared=shared, use_cache=False, output_retrieval=True)
    assert sorted(set(out.retrieval[0].blocks[0].flatten().tolist())) == [-1, 0, 1, 2, 3, 5]
    assert set(out.retrieval[0].blocks[0, 0].tolist()) == {-1, 5}, "block 0 of the other row has number 5"


def test_states_of_earlier_steps_can_be_retrieved() -> None:
    model, ids = trainable(), tokens(35, rows=2)
    model.config.retrieval_top_k = 1
    states = torch.randn(4, 8, 32)
    landmarks = 1000 * states[:, -1]
    out = model(ids, use_cache=False, shared=SharedBlocks(states=states, landmarks=landmarks), output_retrieval=True)
    assert bool((out.retrieval[0].blocks >= 10).any())
    assert bool((out.logits - logits(model, ids)).abs().max() > 0.1)


def test_the_loss_of_a_row_reaches_what_it_shares() -> None:
    model, ids = trainable(), tokens(75, rows=3)
    shared = SharedBlocks(rows=torch.ones(3, 75, dtype=torch.bool))
    model(ids, labels=ids, use_cache=False, shared=shared).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all())
        assert bool(parameter.grad.any())


def test_sharing_that_cannot_be_is_refused() -> None:
    model, ids = make(), tokens(20, rows=2)
    shared = SharedBlocks(rows=torch.ones(2, 20, dtype=torch.bool))
    with pytest.raises(InvalidArgument, match="use_cache=False"):
        model(ids, shared=shared, use_cache=True)
    with pytest.raises(InvalidArgument, match="retrieval='random'"):
        make(retrieval="random")(ids, shared=shared, use_cache=False)
    with pytest.raises(InvalidArgument, match="landmarks"):
        model(ids, shared=SharedBlocks(states=torch.zeros(1, 8, 32)), use_cache=False)
    with pytest.raises(InvalidArgument, match="rows"):
        model(ids, shared=SharedBlocks(rows=torch.ones(2, 19, dtype=torch.bool)), use_cache=False)
