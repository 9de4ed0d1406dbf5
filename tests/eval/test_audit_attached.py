"""What an attached model should have retrieved: compared with dense attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore.errors import InvalidArgument
from memstore.readers.kinds import Retrieval
from memstore.readers.stock.reader import StockReader
from tests.readers.lists import lists_of
from tests.readers.models import attach, tiny, tokens

BLOCK, SINK, WINDOW = 16, 16, 32
SIZES: dict[str, Any] = {"window": WINDOW, "sink": SINK, "segment": 32, "block_size": BLOCK}
TEXT, QUESTION = tokens(213), tokens(9, seed=1)
CANDIDATES = range(1, 11)
"""Blocks between sink and window."""


def attached_to(model: PreTrainedModel, retrieval: Retrieval) -> StockReader:
    return attach(model, "ram:", document="text", retrieval=retrieval, **SIZES)


def dense(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Attention ``[H, n]`` of the last token in each layer, eager and in float64, without a memory."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    exact = model if model.config.model_type == "gpt_oss" else model.double()  # its experts have no float64
    try:
        with torch.no_grad():
            attentions = exact(ids[None], output_attentions=True, use_cache=False).attentions
        return [each[0, :, -1].double() for each in attentions]
    finally:
        model.float().set_attn_implementation(before)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma2", "gpt_oss", "mistral"])
def test_the_first_layer_is_audited_as_dense_attention_has_it(name: str) -> None:
    alternating: dict[str, Any] = (
        {"layer_types": ["full_attention", "sliding_attention"] * 2} if name in ("gemma2", "gpt_oss") else {}
    )
    model = tiny(name, **alternating)
    with attached_to(model, Retrieval(top_k=3, share="group", positions="true")) as attached:
        attached.read(TEXT)
        lists_of(attached).clear()
        audit = attached.audit(QUESTION, tokens=1)
        chosen = [each for each in lists_of(attached) if each.layer == 0]
    layer = audit.layers[0]
    assert layer.layer == 0
    truth = dense(model, torch.cat([TEXT, QUESTION]))[0]
    blocks = truth[:, SINK : SINK + len(CANDIDATES) * BLOCK].unflatten(-1, (-1, BLOCK)).sum(-1)  # [H, N]
    heads = len(truth)
    lists = [chosen[head * len(chosen) // heads].blocks for head in range(heads)]
    held = torch.stack([blocks[head, [block - 1 for block in lists[head]]].sum() for head in range(heads)])
    assert layer.memory is not None
    torch.testing.assert_close(layer.memory.double(), blocks.sum(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.captured.double(), held / blocks.sum(-1), rtol=0, atol=1e-4)
    best = [set((blocks[head].topk(3).indices + 1).tolist()) for head in range(heads)]
    recall = [len(best[head] & set(lists[head])) / 3 for head in range(heads)]
    assert layer.recall.tolist() == pytest.approx(recall)


def test_with_stingy_positions_a_missed_block_has_the_mean_over_all_slots() -> None:
    """Written down slowly for the only layer of a Llama, in float64."""
    model, top_k = tiny("llama", num_hidden_layers=1), 3
    with attached_to(model, Retrieval(top_k=top_k, share="layer")) as attached:
        attached.read(TEXT)
        lists_of(attached).clear()
        audit = attached.audit(QUESTION, tokens=1)
        chosen, document = lists_of(attached)[-1], attached.documents[0]
        keys = document.layer(0).gather(list(CANDIDATES))["k"].double().repeat_interleave(2, 1)  # [N, H, S, D]
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(QUESTION[-1:]))
        query = attention.q_proj(hidden).view(4, 8).double()
    direct = len(TEXT) - (len(TEXT) - WINDOW) // BLOCK * BLOCK
    position = SINK + top_k * BLOCK + direct + len(QUESTION) - 1
    mass = torch.stack([in_slot(query, keys, position, slot) for slot in range(top_k)])  # [slots, H, N]
    slots = torch.tensor(chosen.scores).argsort().argsort().tolist()  # the best block comes last
    held = torch.stack([mass[slots[i], :, block - 1] for i, block in enumerate(chosen.blocks)]).sum(0)
    missed = mass.mean(0)[:, [block - 1 for block in CANDIDATES if block not in chosen.blocks]].sum(1)
    torch.testing.assert_close(audit.layers[0].captured.double(), held / (held + missed), rtol=0, atol=1e-5)


def in_slot(query: Tensor, keys: Tensor, position: int, slot: int) -> Tensor:
    """Sums ``[H, N]`` of exp(score) of ``query [H, D]`` and ``keys [N, H, S, D]``, if each block is in this slot."""
    places = torch.arange(SINK + slot * BLOCK, SINK + (slot + 1) * BLOCK)
    turned = rotated(query, torch.tensor(position))
    return torch.einsum("hd,nhsd->hns", turned, rotated(keys, places)).mul(8**-0.5).exp().sum(-1)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of ``x [..., 8]``, as in Llama."""
    angles = positions[..., None] * 10_000.0 ** -(torch.arange(4).double() / 4)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("share", ["none", "group", "layer", "model"])
@pytest.mark.parametrize("positions", ["stingy", "true"])
def test_with_everything_retrieved_nothing_is_missed(share: Any, positions: Any) -> None:
    model = tiny("llama")
    with attached_to(model, Retrieval(top_k=64, share=share, positions=positions)) as attached:
        attached.read(TEXT)
        audit = attached.audit(QUESTION, tokens=3)
    assert (audit.blocks, audit.steps, audit.missed) == (len(CANDIDATES), 3, [])
    assert audit.captured == pytest.approx(1)
    assert audit.recall == 1
    for layer in audit.layers:
        assert layer.captured.tolist() == pytest.approx([1] * 4)
        assert layer.margin is None


def test_what_the_model_attends_to_is_what_dense_attention_of_everything_is() -> None:
    """Also in deep layers, and at generated tokens."""
    model = tiny("llama")
    with attached_to(model, Retrieval(top_k="all", share="none", positions="true")) as attached:
        attached.read(TEXT)
        audit = attached.audit(QUESTION, tokens=2)
    ids = torch.cat([TEXT, QUESTION])
    steps = [dense(model, ids), dense(model, torch.cat([ids, torch.tensor(audit.tokens[:1])]))]
    for layer in audit.layers:
        want = torch.stack([step[layer.layer][:, SINK : SINK + 160].sum(-1) for step in steps]).mean(0)
        assert layer.memory is not None
        torch.testing.assert_close(layer.memory.double(), want, rtol=0, atol=1e-5)


def test_one_list_for_all_layers_is_audited_in_each_layer_that_uses_it() -> None:
    model = tiny("llama", num_hidden_layers=6)
    with attached_to(model, Retrieval(top_k=2)) as attached:
        attached.read(TEXT)
        audit = attached.audit(QUESTION, tokens=4)
        first = attached.selection.first_layer
    assert [each.layer for each in audit.layers] == list(range(first, 6))
    assert audit.top_k == 2
    assert audit.index_recall == 1  # the exact index
    assert audit.captured is not None
    assert 0 < audit.captured < 1
    worst = audit.missed[0]
    assert worst.document == "text"
    assert worst.block in CANDIDATES
    assert [each.weight for each in audit.missed] == sorted((each.weight for each in audit.missed), reverse=True)
    assert len(audit.to_dict()["layers"]) == len(audit.layers)


def test_the_blocks_missed_most_are_those_with_most_attention_of_the_others() -> None:
    model = tiny("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    with attached_to(model, Retrieval(top_k=1, share="none", positions="true")) as attached:
        attached.read(TEXT)
        lists_of(attached)
        audit = attached.audit(QUESTION, tokens=1)
        chosen = lists_of(attached)[-1].blocks
    truth = dense(model, torch.cat([TEXT, QUESTION]))[0][0, SINK : SINK + 160].unflatten(-1, (-1, BLOCK)).sum(-1)
    left = [block for block in (truth.argsort(descending=True) + 1).tolist() if block not in chosen]
    assert [each.block for each in audit.missed] == left[: len(audit.missed)]
    assert [each.weight for each in audit.missed] == pytest.approx([float(truth[b - 1]) for b in left[:5]], abs=1e-6)


def test_several_documents_are_audited_together() -> None:
    model = tiny("llama")
    with attach(model, "ram:", retrieval=Retrieval(top_k=2, share="group"), **SIZES) as attached:
        attached.read(TEXT, "one")
        attached.read(tokens(120, seed=5), "two")
        audit = attached.audit(QUESTION, tokens=1)
    assert audit.documents == ["one", "two"]
    assert {each.document for each in audit.missed} <= {"one", "two"}


def test_what_cannot_be_audited_is_refused() -> None:
    model = tiny("llama")
    with attached_to(model, Retrieval()) as attached:
        attached.read(TEXT[:50])
        with pytest.raises(InvalidArgument, match="fit into sink and window"):
            attached.audit(QUESTION)
        with pytest.raises(InvalidArgument, match="at least one token"):
            attached.audit([])
    with attached_to(model, Retrieval(on_error="miss")) as attached, pytest.raises(InvalidArgument, match="on_error"):
        attached.audit(QUESTION)


def test_an_audit_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    with attached_to(model, Retrieval(top_k=2)) as attached:
        attached.read(TEXT)
        with torch.no_grad():
            before = model(QUESTION[None]).logits
            attached.audit(QUESTION, tokens=2)
            after = model(QUESTION[None]).logits
        assert attached.observers == []
    assert torch.equal(before, after)
