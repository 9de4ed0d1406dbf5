"""The trace of a landmark model has the weights that the grouped softmax gives to the blocks, by the equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.memory.trace_file import TIERS, Look, Step
from memstore.models.landmark import LandmarkForCausalLM, LandmarkReader
from tests.models.landmark import make, tokens
from tests.models.landmark_memory import Remembering

GRANULARITIES: dict[str, dict[str, Any]] = {
    "each head and token": {"share": "none", "share_tokens": False, "every": 1},
    "each group and token": {"share": "group", "share_tokens": False, "every": 1},
    "each token": {"share": "layer", "share_tokens": False, "every": 1},
    "one list": {"share": "layer", "every": "segment"},
}
SMALL: dict[str, Any] = {"segment_blocks": 2, "num_hidden_layers": 3, "local_layers": (0,)}
READ, ASKED = 42, 11
"""Three segments, and most of one; with two more calls of one token each."""

Weights = dict[int, float]


class Weighing(Remembering):
    """Keeps the weight that each retrieved block has in each layer, for each head and stream item."""

    def __init__(self, model: LandmarkForCausalLM, retrieval: Retrieval) -> None:
        super().__init__(model, retrieval, [])
        self.kept: dict[tuple[int, int, int], Weights] = {}
        self._layer = self._item = 0

    def attention(self, x: Tensor, miss: Tensor | None, name: str, controlled: list[bool]) -> Tensor:
        self._layer = int(name.rsplit(".", 1)[1])
        return super().attention(x, miss, name, controlled)

    def output(self, *arguments: Any) -> Tensor:
        *_, self._item, _ = arguments
        return super().output(*arguments)

    def shared(self, own: float, landmark: Any, local: Any, chosen: Any, gate: Any, head: int, query: Any) -> Weights:
        shares = super().shared(own, landmark, local, chosen, gate, head, query)
        self.kept[self._layer, head, self._item] = {block: shares[block] for block in chosen}
        return shares


def traced(model: LandmarkForCausalLM, text: Tensor, retrieval: Retrieval, calls: list[int]) -> list[Step]:
    """The steps of calls with so many tokens each, after a document of ``READ`` tokens."""
    with LandmarkReader(model, "ram:", retrieval=retrieval) as reader:
        reader.read(text[:READ])
        with torch.no_grad(), reader.record(text[READ:]):
            cache = reader.cache()
            for piece in text[None, READ : READ + sum(calls)].split(calls, 1):
                model(piece, past_key_values=cache)
        trace = reader.memory.traces.last()
        assert trace is not None
        return trace.steps()


def by_head(look: Look) -> list[Weights]:
    """The weight of each block for each query head."""
    return [
        {block: weight for block, weight in zip(look.blocks[at].tolist(), row.tolist(), strict=True) if block >= 0}
        for at, row in zip(look.by_head(), look.weights, strict=True)
    ]


def agree(look: Look, reference: Weighing, item: int) -> None:
    """Raise unless a look has the blocks and weights of the equations for a stream item."""
    for head, found in enumerate(by_head(look)):
        expected = reference.kept[look.layer, head, item]
        assert found.keys() == expected.keys()
        assert all(abs(found[block] - expected[block]) < 1e-3 for block in expected)
        assert abs(sum(found.values()) - sum(expected.values())) < 1e-3


@pytest.mark.parametrize("kind", ["llama", "context miss"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_weights_are_those_of_the_equations(kind: str, granularity: str) -> None:
    model, text = make(kind, **SMALL), tokens(READ + ASKED)[0]
    retrieval = Retrieval(top_k=2, **GRANULARITIES[granularity])
    reference = Weighing(model, retrieval)
    reference.logits(text.tolist())
    (step,) = traced(model, text, retrieval, [ASKED])
    assert [look.layer for look in step.looks] == [1, 2], "a local layer retrieves nothing"
    last = READ + ASKED - 1
    for look in step.looks:
        assert len(look.blocks) == {"none": 4, "group": model.config.num_key_value_heads, "layer": 1}[retrieval.share]
        agree(look, reference, last + last // model.config.tokens_per_block)
        assert (np.diff(look.scores) <= 0).all(), "best first"


def test_every_token_is_a_step_and_a_call_may_end_anywhere() -> None:
    """Also at the end of a block, where a landmark follows the token, and in the middle of the next segment."""
    model, text = make(**SMALL), tokens(READ + 24)[0]
    retrieval = Retrieval(top_k=2, **GRANULARITIES["each head and token"])
    reference = Weighing(model, retrieval)
    reference.logits(text.tolist())
    calls, end = [3, 1, 1, 1, 1, 7, 1, 1, 8], READ
    for step, count in zip(traced(model, text, retrieval, calls), calls, strict=True):
        end += count
        assert [look.layer for look in step.looks] == [1, 2]
        for look in step.looks:
            agree(look, reference, end - 1 + (end - 1) // model.config.tokens_per_block)


def test_a_threshold_that_nothing_reaches_leaves_no_weight() -> None:
    model, text = make("context miss", **SMALL), tokens(READ + ASKED)[0]
    retrieval = Retrieval(top_k=2, threshold=1.0, **GRANULARITIES["each head and token"])
    (step,) = traced(model, text, retrieval, [ASKED])
    assert step.looks == []


def test_rows_of_different_lengths_are_traced_as_they_would_be_alone() -> None:
    model, text = make(**SMALL), tokens(READ)[0]
    rows, mask = tokens(20, rows=2, seed=1), torch.ones(2, 20, dtype=torch.int64)
    mask[1, 5:] = 0
    with LandmarkReader(model, "ram:") as reader, torch.no_grad():
        reader.read(text)
        alone = []
        for ids, here in ((rows, mask), (rows[:1], None), (rows[1:, :5], None)):
            with reader.record(ids[0]):
                model(ids, past_key_values=reader.cache(len(ids)), attention_mask=here)
            trace = reader.memory.traces.last()
            assert trace is not None
            alone.append(trace.steps()[0].looks)
    both, first, second = alone
    for row, looks in enumerate((first, second)):
        mine = [look for look in both if look.row == row]
        for one, other in zip(mine, looks, strict=True):
            assert one.blocks.tolist() == other.blocks.tolist()
            np.testing.assert_allclose(one.weights, other.weights, atol=1e-3)


def test_blocks_at_hand_and_blocks_of_the_call_are_told_from_stored_ones() -> None:
    model, text = make(**SMALL), tokens(READ + 45)[0]
    steps = traced(model, text, Retrieval(top_k=3, **GRANULARITIES["each head and token"]), [45])
    tiers = {
        (TIERS[tier], block < READ // model.config.tokens_per_block)
        for look in steps[0].looks
        for tier, block in zip(look.tiers.flatten().tolist(), look.blocks.flatten().tolist(), strict=True)
    }
    assert ("own", False) in tiers
    assert ("own", True) not in tiers
    assert any(stored for _, stored in tiers)


def test_generate_records_what_it_chose() -> None:
    model, text = make(**SMALL), tokens(READ + 5)
    with LandmarkReader(model, "ram:") as reader:
        reader.read(text[0, :READ])
        plain = reader.generate(text[:, READ:], max_new_tokens=6, do_sample=False)
        out = reader.generate(text[:, READ:], max_new_tokens=6, do_sample=False, trace=True)
        assert torch.equal(out, plain), "who is watched answers as ever"
        (trace,) = reader.memory.traces.list()
        assert trace.tokens() == out[0, 5:].tolist()
        assert trace.info["mechanism"] == "landmark"
        assert trace.info["layers"] == [1, 2]
        with reader.record([1]), pytest.raises(InvalidArgument, match="keeps the order"):
            reader.cache(2).reorder_cache(torch.tensor([1, 1]))
