"""A trace, an audit and a search by text of one question say the same, number by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import memstore
from memstore import Retrieval
from memstore.memory import Traces
from memstore.memory.trace_file import Look
from memstore.readers.reader import Reader
from tests.eval.memorizing import small_memorizing
from tests.models import drt, landmark
from tests.readers.models import attach, tiny, tokens

SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}


def traced(reader: Reader, question: Tensor) -> list[Look]:
    """What each layer retrieved for the question's last token."""
    traces = Traces(None, "ram:")
    with torch.no_grad(), reader.record(traces=traces) as recorder:
        reader.model(question[None])
    return list(traces.get(recorder.number).steps()[0].looks)


def retrieved(look: Look) -> Tensor:
    """``[H]``: the part of each head's attention that fell on retrieved blocks."""
    return torch.from_numpy(look.weights).nan_to_num().sum(-1).double()


@pytest.mark.parametrize("share", ["model", "group"])
def test_a_stock_model_gives_what_it_retrieves_as_much_attention_in_the_trace_as_in_the_audit(share: Any) -> None:
    retrieval = Retrieval(share=share, top_k=3, positions="true")
    with attach(tiny("llama"), "ram:", retrieval=retrieval, **SIZES) as reader:
        reader.read(tokens(300))
        looks, audit = traced(reader, tokens(9, seed=5)), reader.audit(tokens(9, seed=5), tokens=1)
    assert [look.layer for look in looks] == [layer.layer for layer in audit.layers]
    for look, layer in zip(looks, audit.layers, strict=True):
        # An audit counts what was missed among all attention, a trace knows nothing of it.
        assert layer.memory is not None
        held = layer.captured * layer.memory
        torch.testing.assert_close(retrieved(look), (held / (1 - layer.memory + held)).double(), rtol=1e-3, atol=1e-5)
        mine = {missed.block for missed in audit.missed if missed.layer == look.layer}
        assert share == "group" or not mine & set(look.blocks.ravel().tolist())


def test_a_drt_has_one_score_for_a_block_in_search_trace_and_audit() -> None:
    model = drt.make()
    text, size = drt.tokens(200)[0], model.config.tokens_per_block
    with memstore.attach(model, "ram:") as reader:
        reader.read(text[: 12 * size])
        question = text[12 * size : 13 * size]
        # What the end of a block has chosen is used by the tokens after it.
        (look,) = traced(reader, torch.cat([question, question[:1]]))
        audit = reader.audit(question, tokens=1)
        found = {match.block: match.score for match in reader.search(question, 999)}
    blocks, weights = look.blocks[0].tolist(), torch.from_numpy(look.weights[0]).double()
    scores = torch.tensor([found[block] for block in blocks]).double()
    torch.testing.assert_close(weights, scores.softmax(0), rtol=1e-3, atol=1e-4)
    everything = torch.tensor(list(found.values())).double().softmax(0)
    assert float(audit.layers[0].captured.mean()) == pytest.approx(
        float(sum(part for block, part in zip(found, everything, strict=True) if block in blocks)), rel=1e-3
    )


def test_a_landmark_model_has_one_weight_for_a_block_in_search_trace_and_audit() -> None:
    model = landmark.make(segment_blocks=2, num_hidden_layers=3)
    retrieval = Retrieval(top_k=3, share="layer", positions="true", every="segment")
    text, question = landmark.tokens(120)[0], landmark.tokens(5)[0]
    with memstore.attach(model, "ram:", retrieval=retrieval) as reader:
        reader.read(text[: 120 // model.config.segment_tokens * model.config.segment_tokens])
        looks, audit = traced(reader, question), reader.audit(question, tokens=1)
        for look, layer in zip(looks, audit.layers, strict=True):
            assert layer.memory is not None
            held = layer.captured * layer.memory
            all_seen = 1 - layer.memory + held
            torch.testing.assert_close(retrieved(look), (held / all_seen).double(), rtol=1e-3, atol=1e-5)
            if look.layer not in reader.memory.spec.index_layers:
                continue
            found = {match.block: match.score for match in reader.search(question, 999, layer=look.layer)}
            shares = (
                torch.from_numpy(look.weights) * (all_seen / layer.memory)[:, None]
            )  # of the softmax over landmarks
            for column, block in enumerate(look.blocks[0].tolist()):
                assert found[block] == pytest.approx(float(shares[:, column].max()), rel=1e-3)


def test_a_memorizing_transformer_gives_tokens_as_much_in_the_trace_as_in_the_audit() -> None:
    model = small_memorizing()
    text = torch.randint(3, 256, (120,), generator=torch.Generator().manual_seed(0))
    with memstore.attach(model, "ram:", block_size=8) as reader:
        reader.read(text[:100])
        (look,), audit = traced(reader, text[100:107]), reader.audit(text[100:107], tokens=1)
    (layer,) = audit.layers
    assert layer.memory is not None
    torch.testing.assert_close(retrieved(look), layer.memory.double(), rtol=1e-3, atol=1e-5)
