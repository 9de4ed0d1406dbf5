"""The layers of grouped cross attention, against what the paper says of them, written out."""

from __future__ import annotations

import math
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.attention.gca import (
    BlockEncoder,
    BlockKeysValues,
    CausalRetriever,
    Fusion,
    GroupedCrossAttention,
    ListStates,
    choose,
    weighed,
)
from memstore.kernels.grouped_cross_attention import FoldedList, Ready

HIDDEN, HEADS, GROUPS, DIM, S = 12, 2, 1, 6, 5
TOLERANCE = 1e-12  # float64; sums of some dozens of terms in another order


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


Module = TypeVar("Module", bound=nn.Module)


def shaken(module: Module) -> Module:
    """In float64, and with norms that are not all ones, so that a forgotten one shows."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return module


def encoder(**options: bool) -> BlockEncoder:
    return shaken(BlockEncoder(HIDDEN, 16, HEADS, 2, **options))


def test_in_a_block_every_token_sees_every_other() -> None:
    blocks = torch.randn(1, 1, S, HIDDEN, dtype=torch.float64, requires_grad=True)
    states, _ = encoder()(blocks)
    for token in range(S):
        (gradient,) = torch.autograd.grad(states[0, 0, token].sum(), blocks, retain_graph=True)
        assert bool((gradient[0, 0].abs().sum(-1) > 0).all())


def test_blocks_do_not_see_one_another() -> None:
    module, blocks = encoder(), torch.randn(2, 3, S, HIDDEN, dtype=torch.float64)
    states, landmarks = module(blocks)
    for row in range(2):
        for block in range(3):
            alone, landmark = module(blocks[row : row + 1, block : block + 1])
            torch.testing.assert_close(alone[0, 0], states[row, block], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(landmark[0, 0], landmarks[row, block], atol=TOLERANCE, rtol=0)


def test_positions_count_within_the_block() -> None:
    """Tokens in another order have other states: the encoder knows their order."""
    module, blocks = encoder(), torch.randn(1, 1, S, HIDDEN, dtype=torch.float64)
    order = torch.tensor([1, 0, 2, 3, 4])
    assert not torch.allclose(module(blocks[:, :, order])[0], module(blocks)[0][:, :, order])


def test_the_landmark_is_the_state_of_the_last_token() -> None:
    blocks = torch.randn(2, 3, S, HIDDEN, dtype=torch.float64)
    states, landmarks = encoder()(blocks)
    assert torch.equal(landmarks, states[..., -1, :])
    _, normalised = encoder(normalise=True)(blocks)
    torch.testing.assert_close(normalised.norm(dim=-1), torch.ones(2, 3, dtype=torch.float64))


def test_a_score_is_that_of_the_paper() -> None:
    retriever = shaken(CausalRetriever(HIDDEN))
    hidden, landmark = torch.randn(2, HIDDEN, dtype=torch.float64)
    assert retriever.query is not None
    assert retriever.landmark is not None
    w_h, w_l = retriever.query.weight, retriever.landmark.weight
    expected = (w_h @ rms(hidden, retriever.norm.weight)) @ (w_l @ landmark) / math.sqrt(HIDDEN)
    torch.testing.assert_close(retriever.queries(hidden) @ landmark, expected, atol=TOLERANCE, rtol=0)


def test_tied_scores_have_no_projections() -> None:
    retriever = shaken(CausalRetriever(HIDDEN, tied=True))
    hidden, landmark = torch.randn(2, HIDDEN, dtype=torch.float64)
    expected = rms(hidden, retriever.norm.weight) @ landmark / math.sqrt(HIDDEN)
    torch.testing.assert_close(retriever.queries(hidden) @ landmark, expected, atol=TOLERANCE, rtol=0)
    assert [name for name, _ in retriever.named_parameters()] == ["norm.weight"]


def test_normalised_scores_are_cosines_times_a_learned_factor() -> None:
    retriever = CausalRetriever(HIDDEN, normalise=True)
    hidden, landmark = torch.randn(2, HIDDEN)
    assert retriever.query is not None
    assert retriever.landmark is not None
    query = retriever.landmark.weight.T @ retriever.query(rms(hidden, retriever.norm.weight))
    expected = 10 * F.cosine_similarity(query, landmark, dim=0)
    torch.testing.assert_close(retriever.queries(hidden) @ F.normalize(landmark, dim=0), expected)
    assert retriever.log_scale is not None
    assert retriever.log_scale.requires_grad


def test_choosing_takes_the_best_and_weighs_them_by_softmax() -> None:
    chosen = choose(torch.tensor([[0.5, 2.0, -1.0, 1.0]]), 2)
    assert chosen.blocks.tolist() == [[1, 3]]
    assert chosen.scores.tolist() == [[2.0, 1.0]]
    torch.testing.assert_close(chosen.weights, torch.tensor([[2.0, 1.0]]).softmax(-1))


def test_noise_changes_which_blocks_are_taken_and_never_their_weights() -> None:
    scores = torch.randn(50, 9)
    lists = set()
    for _ in range(20):
        chosen = choose(scores, 3, gumbel=1.0)
        torch.testing.assert_close(chosen.weights, scores.gather(-1, chosen.blocks).softmax(-1))
        lists.add(tuple(chosen.blocks[0].tolist()))
    assert len(lists) > 1
    assert torch.equal(choose(scores, 3).blocks, scores.topk(3).indices)


def test_noise_takes_blocks_as_often_as_their_softmax_says() -> None:
    """The maximum of scores with Gumbel noise is a draw from their softmax."""
    scores = torch.tensor([1.0, 0.0, 2.0])
    draws = 20_000
    counts = choose(scores.expand(draws, -1), 1, gumbel=1.0).blocks.flatten().bincount(minlength=3)
    expected = scores.softmax(-1)
    error = (expected * (1 - expected) / draws).sqrt()
    assert bool(((counts / draws - expected).abs() < 5 * error).all())


@pytest.mark.parametrize("gumbel", [0.0, 1.0])
def test_there_may_be_fewer_blocks_than_wanted_or_none(gumbel: float) -> None:
    none = -math.inf
    scores = torch.tensor([[none, none, none], [1.0, none, none], [1.0, 2.0, 0.0]], requires_grad=True)
    chosen = choose(scores, 5, gumbel=gumbel)
    assert chosen.blocks.shape == (3, 3)
    assert (chosen.blocks >= 0).sum(-1).tolist() == [0, 1, 3]
    assert chosen.weights.sum(-1).tolist() == pytest.approx([0, 1, 1])
    assert bool((chosen.weights[chosen.blocks < 0] == 0).all())
    (gradient,) = torch.autograd.grad((chosen.weights * torch.randn(3, 3)).sum(), scores)
    assert bool(gradient.isfinite().all())
    assert bool((gradient[:2] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_empty_list_weighs_nothing_in_half_precision_too(dtype: torch.dtype) -> None:
    weights = weighed(torch.full((1, 2), -math.inf, dtype=dtype), torch.tensor([[0, 1]])).weights
    assert weights.tolist() == [[0, 0]]


def states_and_lists(top_k: int = 3) -> tuple[GroupedCrossAttention, Tensor, Tensor, Tensor]:
    """A layer, states of 7 blocks in 2 rows, queries of 4 lists of 3 tokens, and what the lists are."""
    module = shaken(GroupedCrossAttention(HIDDEN, HEADS, DIM))
    states = torch.randn(2, 7, S, HIDDEN, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 4, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    blocks = torch.stack([torch.stack([torch.randperm(7)[:top_k] for _ in range(4)]) for _ in range(2)])
    blocks[0, 0] = -1
    blocks[1, 2, 1:] = -1
    return module, states, x, blocks


def kv(project: BlockKeysValues, states: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = project(states)
    return keys, values


@pytest.mark.parametrize("off_by_one", [True, False])
@pytest.mark.parametrize("fusion", ["grouped", "chunked"])
def test_fusion_is_attention_to_each_block_or_to_all_tokens_at_once(fusion: Fusion, off_by_one: bool) -> None:
    module, states, x, blocks = states_and_lists()
    module.fusion, module.off_by_one = fusion, off_by_one
    project = shaken(BlockKeysValues(HIDDEN, GROUPS, DIM))
    weights = torch.rand(blocks.shape, dtype=torch.float64)
    out = module(x, ListStates(*kv(project, states), blocks, weights))
    for row in range(2):
        for number in range(4):
            expected = by_hand(module, project, states[row], x[row, number], blocks[row, number], weights[row, number])
            torch.testing.assert_close(out[row, number], expected, atol=TOLERANCE, rtol=0)


def by_hand(
    module: GroupedCrossAttention, project: BlockKeysValues, states: Tensor, x: Tensor, blocks: Tensor, weights: Tensor
) -> Tensor:
    """One list, head by head; keys and values are the two halves of the projection, heads in turn."""
    q = module.query(rms(x, module.norm.weight)).view(len(x), HEADS, DIM)
    keys, values = project.projection(states).view(*states.shape[:2], 2, GROUPS, DIM).unbind(2)
    there = [int(block) for block in blocks if block >= 0]
    pieces = [[block] for block in there] if module.fusion == "grouped" else [there] if there else []
    shares = [weights[list(blocks).index(piece[0])] if module.fusion == "grouped" else 1.0 for piece in pieces]
    out = torch.zeros(len(x), HEADS, DIM, dtype=x.dtype)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        for piece, share in zip(pieces, shares, strict=True):
            k, v = (states[piece, :, group].flatten(0, 1) for states in (keys, values))
            exponentials = (q[:, head] @ k.T / math.sqrt(DIM)).exp()
            total = exponentials.sum(-1, keepdim=True) + (1 if module.off_by_one else 0)
            out[:, head] += share * (exponentials / total @ v)
    result: Tensor = module.out(out.flatten(1))
    return result


@pytest.mark.parametrize("fusion", ["grouped", "chunked"])
def test_lists_without_blocks_find_nothing_and_give_no_gradient(fusion: Fusion) -> None:
    module, states, x, blocks = states_and_lists()
    module.fusion, module.off_by_one = fusion, False
    project = shaken(BlockKeysValues(HIDDEN, GROUPS, DIM))
    weights = torch.rand(blocks.shape, dtype=torch.float64)
    out = module(x, ListStates(*kv(project, states), torch.full_like(blocks, -1), weights))
    assert bool((out == 0).all())
    gradients = torch.autograd.grad(out.sum(), (x, states), allow_unused=True)
    assert all(gradient is None or bool((gradient == 0).all()) for gradient in gradients)


def test_only_grouped_fusion_teaches_the_retriever() -> None:
    module, states, x, _ = states_and_lists()
    project, retriever = shaken(BlockKeysValues(HIDDEN, GROUPS, DIM)), shaken(CausalRetriever(HIDDEN))
    expected: dict[Fusion, bool] = {"grouped": True, "chunked": False}
    for module.fusion, reaches in expected.items():
        scores = retriever.queries(x[:, :, -1]) @ states[:, :, -1].detach().transpose(1, 2)
        chosen = choose(scores, 3)
        out = module(x.detach(), ListStates(*kv(project, states.detach()), chosen.blocks, chosen.weights))
        gradients = torch.autograd.grad(out.sum(), list(retriever.parameters()), allow_unused=True)
        assert all((gradient is not None and bool((gradient != 0).any())) == reaches for gradient in gradients)


@pytest.mark.parametrize("off_by_one", [True, False])
@pytest.mark.parametrize("sizes", [(1, 4, 1, 32, 16, 4, 64), (3, 3, 2, 17, 8, 4, 40), (2, 1, 2, 5, 6, 2, 12)], ids=str)
def test_a_token_finds_the_same_in_every_form_of_its_list(sizes: tuple[int, ...], off_by_one: bool) -> None:
    batch, count, groups, size, dim, heads, hidden = sizes
    layer = GroupedCrossAttention(hidden, heads, dim, off_by_one=off_by_one)
    nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    shape = (batch, count, groups, size, dim)
    blocks = torch.arange(count).repeat(batch, 1, 1)
    blocks[:, :, 1:] = torch.where(torch.rand(batch, 1, count - 1) < 0.4, -1, blocks[:, :, 1:])
    retrieved = ListStates(torch.randn(shape), torch.randn(shape), blocks, torch.rand(batch, 1, count))
    with torch.no_grad():
        prepared = layer.prepare(retrieved)
        assert prepared is not None
        forms: list[Ready] = [prepared, layer.own(prepared)]
        for tokens in (1, 3):
            x = torch.randn(batch, tokens, hidden)
            wide = GroupedCrossAttention(hidden, heads, dim, off_by_one=off_by_one).double()
            wide.load_state_dict(layer.state_dict())
            keys, values, _, weights = (each.double() for each in retrieved)
            truth = x.double() + wide(x[:, None].double(), ListStates(keys, values, blocks, weights))[:, 0]
            for form in forms:
                torch.testing.assert_close(layer.added(x, form).double(), truth, atol=2e-5, rtol=0)


def test_a_layer_that_an_adapter_has_changed_is_not_folded_into_its_list() -> None:
    layer = GroupedCrossAttention(12, 2, 6)
    states = torch.randn(1, 2, 1, 5, 6)
    retrieved = ListStates(states, states, torch.tensor([[[0, 1]]]), torch.rand(1, 1, 2))
    with torch.no_grad():
        prepared = layer.prepare(retrieved)
        assert prepared is not None
        assert isinstance(layer.own(prepared), FoldedList)
        layer.query = nn.utils.parametrizations.weight_norm(layer.query)
        assert layer.own(prepared) is prepared
