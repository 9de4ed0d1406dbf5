"""The kNN layer computes what the paper writes, and what the published code computes where that is right."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from memstore.attention.knn import KNNAttention, Neighbours, WindowAttention
from memstore.attention.knn_memory import RUN, RecentTokens, largest
from memstore.attention.layers import States, after, merged
from memstore.attention.positions import t5_buckets
from memstore.errors import InvalidArgument

DATA = Path(__file__).parents[1] / "data"


def load(name: str) -> dict[str, Tensor]:
    with np.load(DATA / name) as arrays:
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


def test_buckets_are_those_of_t5() -> None:
    published = load("knn_lucidrains_t5bias.npz")
    torch.testing.assert_close(t5_buckets(-published["rel"]), published["bucket"])


def test_heads_that_look_back_begin_with_the_tokens_before() -> None:
    layer = WindowAttention(8, 4, window=20, previous=2)
    values = torch.eye(12).expand(1, 4, 12, 12)
    nothing = torch.zeros(1, 4, 12, 2)  # all scores are equal but for the bias
    weights = layer.attend(nothing, nothing, values, layer.mask(nothing, nothing, None), None)[0, :, -1]
    assert weights[0].argmax() == 10
    assert weights[0, 10] > 0.9
    assert weights[1].argmax() == 9
    assert weights[1, 9] > 0.9
    torch.testing.assert_close(weights[2:], torch.full((2, 12), 1 / 12))
    for previous in (-1, 5):
        with pytest.raises(InvalidArgument, match="previous must be from 0 to 4"):
            WindowAttention(8, 4, previous=previous)


@pytest.fixture
def published() -> dict[str, Tensor]:
    return load("knn_lucidrains_layer.npz")


@pytest.fixture
def layer(published: dict[str, Tensor]) -> KNNAttention:
    """With the published weights. That code sees all of the cache however far back, and scales its biases by 4."""
    made = KNNAttention(32, 4, key_value_heads=1, head_dim=16, window=100, top_k=5, joint=True)
    made.load_state_dict(
        {
            "q.weight": published["w.to_q.weight"],
            "kv.weight": published["w.to_kv.weight"],
            "out.weight": published["w.to_out.weight"],
            "scale": published["w.scale"].flatten(),
            "bias": published["t5.relative_attention_bias"] * 4,
        }
    )
    return made


def retrieved(published: dict[str, Tensor]) -> Neighbours:
    keys, values = published["retrieved_kv"].flatten(1, 3).unsqueeze(1).unbind(-2)
    ids = torch.arange(keys.shape[2]).view(1, 4, 12, 5).expand(2, -1, -1, -1)
    return Neighbours(keys, values, ids)


def run(layer: KNNAttention, x: Tensor, past: States | None, found: Neighbours | None) -> Tensor:
    q, states = layer.project(x)
    k, v = after(past, states)
    out: Tensor = layer.out(merged(layer.mix(q, k, v, layer.mask(q, k, None), found)))
    return out


def test_the_joint_softmax_is_that_of_the_published_code(layer: KNNAttention, published: dict[str, Tensor]) -> None:
    x = published["x"]
    torch.testing.assert_close(run(layer, x, None, retrieved(published)), published["out_no_xl"], rtol=0, atol=2e-5)
    torch.testing.assert_close(run(layer, x, None, None), published["out_empty_memory_no_xl"], rtol=0, atol=2e-5)


def test_so_are_gradients_and_the_cache_but_for_its_misplaced_bias(
    layer: KNNAttention, published: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = layer.mask

    def published_mask(q: Tensor, k: Tensor, empty: Tensor | None) -> Tensor:
        """It counts distances from the wrong end of the cache."""
        return torch.where(own(q, k, empty) > -torch.inf, published["rel_pos_bias"], -torch.inf)

    monkeypatch.setattr(layer, "mask", published_mask)
    past = (published["xl_k"].unsqueeze(1), published["xl_v"].unsqueeze(1))
    x = published["x"].requires_grad_()
    out = run(layer, x, past, retrieved(published))
    torch.testing.assert_close(out, published["out"], rtol=0, atol=2e-5)
    weights = (layer.q.weight, layer.kv.weight, layer.out.weight, layer.scale)
    found = torch.autograd.grad(out, (x, *weights), published["dout"])
    for gradient, name in zip(found, ("dx", "dWq", "dWkv", "dWo", "dscale"), strict=True):
        want = published[name].view_as(gradient)
        torch.testing.assert_close(gradient, want, rtol=0, atol=5e-5 * float(want.abs().max()))


def made(*, window: int = 4, top_k: int = 3, joint: bool = False, groups: int = 2) -> KNNAttention:
    torch.manual_seed(0)
    layer = KNNAttention(32, 4, key_value_heads=groups, window=window, top_k=top_k, joint=joint).double()
    torch.nn.init.normal_(layer.bias)
    if layer.gate is not None:
        torch.nn.init.normal_(layer.gate)
    return layer


def by_hand(layer: KNNAttention, x: Tensor, segment: int) -> Tensor:
    """The paper's equations, one query at a time, with everything before the segment in the memory."""
    q, (k, v) = layer.project(x)
    per_group, factor = layer.heads // layer.groups, layer.scale.exp()
    out = torch.zeros_like(q)
    for row, head, token in np.ndindex(*q.shape[:3]):
        keys, values = k[row, head // per_group], v[row, head // per_group]
        first = max(0, token - layer.window)
        bucket = t5_buckets(torch.arange(token - first, -1, -1))
        local = factor[head] * keys[first : token + 1] @ q[row, head, token] + layer.bias[bucket, head]
        before = token // segment * segment
        scores = factor[head] * keys[:before] @ q[row, head, token]
        chosen = scores.topk(min(layer.top_k, before)).indices
        near, far = values[first : token + 1], values[chosen]
        if layer.gate is None:
            out[row, head, token] = torch.cat([local, scores[chosen]]).softmax(0) @ torch.cat([near, far])
            continue
        gate = layer.gate[head].sigmoid() if before else torch.zeros(())
        remembered = scores[chosen].softmax(0) @ far if before else 0
        out[row, head, token] = gate * remembered + (1 - gate) * (local.softmax(0) @ near)
    result: Tensor = layer.out(merged(out))
    return result


def append(memory: RecentTokens, states: States) -> None:
    """All tokens of all rows."""
    memory.append([torch.arange(states[0].shape[2])] * len(states[0]), *states)


def streamed(layer: KNNAttention, x: Tensor, segment: int, capacity: int = 100) -> Tensor:
    memory = RecentTokens(len(x), layer.groups, capacity, 8, dtype=x.dtype)
    past: States | None = None
    parts = []
    for part in x.split(segment, dim=1):
        out, states = layer(part, past, memory=memory)
        append(memory, states)
        k, v = after(past, states)
        past = (k[:, :, -layer.window :].detach(), v[:, :, -layer.window :].detach())
        parts.append(out)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 100])
def test_segments_in_turn_are_the_papers_equations(joint: bool, top_k: int) -> None:
    layer, x = made(joint=joint, top_k=top_k), torch.randn(2, 17, 32, dtype=torch.float64)
    torch.testing.assert_close(streamed(layer, x, 5), by_hand(layer, x, 5), rtol=0, atol=1e-10)


def test_everything_remembered_is_dense_attention_without_positions() -> None:
    layer, x = made(top_k=100), torch.randn(2, 12, 32, dtype=torch.float64)
    assert layer.gate is not None
    torch.nn.init.constant_(layer.gate, 50.0)
    q, (k, v) = layer.project(x)
    mask = torch.arange(12) < torch.arange(12)[:, None] // 4 * 4
    dense = torch.nn.functional.scaled_dot_product_attention(
        q * layer.scale.exp()[:, None, None], k, v, mask, scale=1.0, enable_gqa=True
    )
    torch.testing.assert_close(streamed(layer, x, 4)[:, 4:], layer.out(merged(dense))[:, 4:], rtol=0, atol=1e-5)


def test_gradients_reach_scale_gate_and_queries_but_not_the_memory() -> None:
    layer, x = made(), torch.randn(1, 10, 32, dtype=torch.float64)
    first, second = x[:, :5].clone().requires_grad_(), x[:, 5:].clone().requires_grad_()
    memory = RecentTokens(1, 2, 10, 8, dtype=torch.float64)
    append(memory, layer(first, memory=memory)[1])
    layer(second, memory=memory)[0].square().sum().backward()
    assert first.grad is None
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())


def test_what_does_not_exist_of_the_past_is_not_seen() -> None:
    layer, x = made(), torch.randn(2, 9, 32, dtype=torch.float64)
    _, (k, v) = layer.project(x[:, :4])
    some = layer(x[:, 4:], (k, v), torch.tensor([3, 4]))[0]
    torch.testing.assert_close(some[0], layer(x[:1, 4:], (k[:1, :, 3:], v[:1, :, 3:]))[0][0])
    torch.testing.assert_close(some[1], layer(x[1:, 4:])[0][0])


def test_a_memory_that_has_nothing_changes_nothing() -> None:
    layer, x = made(), torch.randn(2, 5, 32, dtype=torch.float64)
    empty = RecentTokens(2, 2, 10, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x, memory=empty)[0], layer(x)[0])


@pytest.mark.parametrize("count", [1, 5, RUN, 3 * RUN + 1, 40 * RUN + 7])
def test_the_largest_are_the_largest(count: int) -> None:
    scores = torch.randn(3, count, generator=torch.Generator().manual_seed(count))
    top_k = min(count, 5)
    torch.testing.assert_close(largest(scores, top_k), scores.topk(top_k).indices)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_found_is_what_was_put_whatever_left_or_was_cleared(data: st.DataObject) -> None:
    capacity, memory = 6, RecentTokens(4, 2, 6, 3, dtype=torch.float64)
    model: list[list[int]] = [[] for _ in range(4)]
    made = 0
    while made < 10 * capacity:
        lengths = data.draw(st.lists(st.integers(0, 9), min_size=4, max_size=4))
        tokens = torch.arange(made, made + 4 * 9, dtype=torch.float64).view(4, 1, 9, 1).expand(-1, 2, -1, 3)
        keys = torch.stack([tokens[..., 0].sin(), tokens[..., 0].cos(), tokens[..., 0] / 97], -1)
        memory.append([torch.arange(length) for length in lengths], keys, tokens)
        for row, length in enumerate(lengths):
            model[row] += range(made + 9 * row, made + 9 * row + length)
        made += 36
        if data.draw(st.booleans()):
            row = data.draw(st.integers(0, 3))
            memory.clear(row)
            model[row] = []
        queries = torch.randn(4, 4, 2, 3, generator=torch.Generator().manual_seed(made), dtype=torch.float64)
        _check(memory, model, queries, capacity)


def _check(memory: RecentTokens, model: list[list[int]], queries: Tensor, capacity: int) -> None:
    """Every query of every row finds the tokens that brute force finds among the last ones of that row."""
    found = memory.search(queries, 3)
    numbers = memory.numbers_of(found.ids)
    for row, head, query in np.ndindex(*queries.shape[:3]):
        held = model[row][-capacity:]
        tokens = torch.tensor(held, dtype=torch.float64)
        keys = torch.stack([tokens.sin(), tokens.cos(), tokens / 97], -1)
        want = (keys @ queries[row, head, query]).topk(min(3, len(held))).indices.tolist()
        ids = found.ids[row, head, query]
        there = ids[ids >= 0]
        assert found.values[row, head // 2, there, 0].tolist() == [held[i] for i in want]
        assert numbers[row, head, query][ids >= 0].tolist() == [len(model[row]) - len(held) + i for i in want]


def test_a_state_goes_on_where_it_was() -> None:
    memory, other = RecentTokens(2, 1, 5, 4), RecentTokens(2, 1, 5, 4)
    memory.append([torch.arange(7), torch.arange(3)], torch.randn(2, 1, 7, 4), torch.randn(2, 1, 7, 4))
    other.load_state_dict(memory.state_dict())
    queries = torch.randn(2, 1, 2, 4)
    assert other.numbers(0) == range(2, 7)
    torch.testing.assert_close(other.search(queries, 3), memory.search(queries, 3))
    with pytest.raises(InvalidArgument, match="the batch size and memory size"):
        RecentTokens(2, 1, 6, 4).load_state_dict(memory.state_dict())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="hidden must be a multiple of heads"):
        KNNAttention(30, 4)
    with pytest.raises(InvalidArgument, match="top_k must be at least 1"):
        KNNAttention(32, 4, top_k=0)
    with pytest.raises(InvalidArgument, match=r"expected keys and values \[2, 1, T, 4\]"):
        RecentTokens(2, 1, 5, 4).append([torch.arange(3)] * 2, torch.ones(2, 1, 3, 5), torch.ones(2, 1, 3, 5))
    with pytest.raises(InvalidArgument, match="must each be at least 1"):
        RecentTokens(2, 1, 0, 4)
    memory = RecentTokens(2, 2, 5, 4)
    with pytest.raises(InvalidArgument, match=r"at most T tokens for each row.* \[3, 5\] tokens for 2 rows"):
        memory.append([torch.arange(3), torch.arange(5)], torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4))
    for shape in [(3, 4, 2, 4), (2, 3, 2, 4), (2, 4, 2, 5), (2, 4, 4)]:
        with pytest.raises(InvalidArgument, match=r"expected queries \[2, H, T, 4\] with H a multiple of 2"):
            memory.search(torch.ones(shape), 3)
    for row in (-1, 2):
        with pytest.raises(InvalidArgument, match=f"row {row} does not exist: rows are numbered from 0 to 1"):
            memory.clear(row)
