"""The trace of a DRT says which blocks each token read, with the weights that the paper's equations give them."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import memstore
from memstore.errors import InvalidArgument
from memstore.memory.trace_file import TIERS, Look, Step
from memstore.models.drt import DRTReader
from memstore.models.drt.reader import memory_spec
from tests.models.drt import Reference, make, tokens

LENGTH = 60
CALLS = (19, 1, 1, 1, 1, 1, 1, 1, 1, 30, 1, 7, 14, 1)
"""Tokens of each call after the document: prompts that end within a block, at its end, and after several."""


class Remembering(Reference):
    """Keeps what every block has chosen in each group: blocks and their weights."""

    chosen: dict[tuple[int, int], dict[int, float]]

    def retrieve(
        self, group: int, hidden: torch.Tensor, landmarks: list[torch.Tensor], block: int
    ) -> list[tuple[int, float]]:
        found = super().retrieve(group, hidden, landmarks, block)
        self.chosen[group, block] = dict(found)
        return found


def traced(reader: DRTReader, prompt: torch.Tensor) -> list[Step]:
    """The steps of calls with so many tokens of ``prompt [rows, T]`` each."""
    with torch.no_grad(), reader.record(prompt[0]):
        cache = reader.cache(len(prompt))
        for piece in prompt.split(list(CALLS), 1):
            reader.model(piece, past_key_values=cache)
    last = reader.memory.traces.last()
    assert last is not None
    return last.steps()


def weights(look: Look) -> dict[int, float]:
    """The weight of each block in every head, which are all alike."""
    assert np.ptp(look.weights, 0).max() == 0
    there = look.blocks[0] >= 0
    return dict(zip(look.blocks[0, there].tolist(), look.weights[0, there].tolist(), strict=True))


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups", "landmark uses own", "normalised scores"])
def test_every_step_has_the_lists_and_weights_that_its_last_token_used(kind: str) -> None:
    model, text = make(kind, state_dtype="float32"), tokens(LENGTH + sum(CALLS))[0]
    reference = Remembering(model)
    reference.chosen = {}
    reference.logits(text.tolist())
    with DRTReader(model, "ram:") as reader:
        reader.read(text[:LENGTH])
        steps = traced(reader, text[None, LENGTH:].expand(2, -1))
    assert len(steps) == len(CALLS)
    end, size = LENGTH, model.config.tokens_per_block
    first_layers = [model.config.lower_layers, model.config.lower_layers + model.config.upper_layers[0]]
    for step, count in zip(steps, CALLS, strict=True):
        end += count
        owner = (end - 1) // size - 1
        assert [(look.layer, look.row) for look in step.looks] == [
            (layer, row) for layer, _ in zip(first_layers, model.config.upper_layers, strict=False) for row in (0, 1)
        ]
        for number, look in enumerate(step.looks):
            expected = reference.chosen[number // 2, owner]
            found = weights(look)
            assert found.keys() == expected.keys()
            assert all(abs(found[block] - expected[block]) < 1e-3 for block in expected)
            assert abs(sum(found.values()) - 1) < 1e-3
            assert (np.diff(look.scores[0]) <= 0).all(), "best first"


def test_a_list_is_searched_for_once_and_used_by_a_whole_block() -> None:
    model, text = make(), tokens(LENGTH + sum(CALLS))[0]
    with DRTReader(model, "ram:") as reader:
        reader.read(text[:LENGTH])
        looks = [step.looks[0] for step in traced(reader, text[None, LENGTH:])]
    ends = accumulate(CALLS, initial=LENGTH)
    owners = [(end - 1) // model.config.tokens_per_block for end in ends]
    assert looks[0].search_us > 0
    for look, (before, after) in zip(looks[1:], pairwise(owners[1:]), strict=True):
        assert (look.search_us > 0) == (look.gather_us > 0) == (before != after)


def test_blocks_of_the_call_itself_belong_to_no_document() -> None:
    model, text = make(), tokens(24 + sum(CALLS))[0]
    with DRTReader(model, "ram:") as reader:
        reader.read(text[:24])
        stored = reader.document.complete_blocks.stop
        looks = [look for step in traced(reader, text[None, 24:]) for look in step.looks]
    own = np.concatenate([look.blocks[0] >= stored for look in looks])
    assert own.any()
    assert not own.all()
    assert (np.concatenate([look.document[0] for look in looks]) == np.where(own, -1, 0)).all()
    assert (np.concatenate([look.tiers[0] == TIERS.index("own") for look in looks]) == own).all()


def test_generate_records_what_it_chose_beside_a_memory_that_is_open_for_reading(tmp_path: Path) -> None:
    model, text = make(), tokens(LENGTH + 9)
    with memstore.open(tmp_path / "m", spec=memory_spec(model)) as memory:
        memory.put_info("model", {"name": "somebody"})
        with DRTReader(model, memory, "book") as reader:
            reader.read(text[0, :LENGTH])
    with DRTReader(model, tmp_path / "m", "book", mode="r") as reader:
        plain = reader.generate(text[:, LENGTH:], max_new_tokens=12, do_sample=False)
        assert reader.memory.traces.list() == []
        out = reader.generate(text[:, LENGTH:], max_new_tokens=12, do_sample=False, trace=True)
        assert torch.equal(out, plain), "who is watched answers as ever"
        (trace,) = reader.memory.traces.list()
        assert trace.tokens() == out[0, 9:].tolist()
        facts = {name: trace.info[name] for name in ("mechanism", "model", "documents", "layers", "heads", "top_k")}
        assert facts == {
            "mechanism": "drt", "model": "somebody", "documents": ["book"], "layers": [2], "heads": 4, "top_k": 3,
        }  # fmt: skip
        assert trace.info["prompt"] == text[0, LENGTH:].tolist()
        assert trace.info["ended"]
        (name, block, weight), *_ = trace.used()
        assert (name, block in reader.document.blocks) == ("book", True)
        assert 0 < weight <= 1


def test_a_model_that_reads_its_blocks_as_one_has_weights_that_nobody_knows() -> None:
    model, text = make("chunked"), tokens(LENGTH + 1)
    with DRTReader(model, "ram:") as reader:
        reader.read(text[0, :LENGTH])
        reader.generate(text[:, LENGTH:], max_new_tokens=8, do_sample=False, trace=True)  # into the next block
        trace = reader.memory.traces.last()
        assert trace is not None
        looks = [look for step in trace.steps() for look in step.looks]
        assert looks
        assert all(np.isnan(look.weights).all() for look in looks)


def test_an_empty_document_is_traced_without_looks() -> None:
    model = make()
    with DRTReader(model, "ram:") as reader:
        reader.generate(tokens(3), max_new_tokens=2, do_sample=False, trace=True)
        trace = reader.memory.traces.last()
        assert trace is not None
        assert [step.looks for step in trace.steps()] == [[], []]


def test_a_step_before_any_block_ends_has_the_lists_that_the_end_of_the_document_has_chosen() -> None:
    model = make()
    size = model.config.tokens_per_block
    text = tokens(LENGTH // size * size + 2)
    with DRTReader(model, "ram:") as reader:
        reader.read(text[0, :-1])
        reader.generate(text[:, -1:], max_new_tokens=1, do_sample=False, trace=True)
        trace = reader.memory.traces.last()
        assert trace is not None
        (step,) = trace.steps()
    assert [look.layer for look in step.looks] == trace.info["layers"]


def test_beams_are_not_traced() -> None:
    model = make()
    with DRTReader(model, "ram:") as reader:
        reader.read(tokens(50)[0])
        with pytest.raises(InvalidArgument, match="without beams"):
            reader.generate(tokens(3), max_new_tokens=2, num_beams=2, trace=True)
        with reader.record([1, 2]), pytest.raises(InvalidArgument, match="keeps the order"):
            reader.cache(2).reorder_cache(torch.tensor([1, 1]))
