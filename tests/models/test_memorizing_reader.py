"""A Memorizing Transformer reads into a memory, is asked later, and its trace says which tokens it looked up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import memstore
from memstore.attention.knn import KNNAttention, Neighbours
from memstore.attention.knn_memory import RecentTokens
from memstore.errors import ForeignMemory, InvalidArgument
from memstore.memory.trace_file import TIERS, Look
from memstore.models.memorizing import MemorizingCache, MemorizingForCausalLM, MemorizingReader
from tests.models.test_memorizing import WINDOW, logits, make, tokens

LENGTH = 3 * WINDOW + 5


def small(**changes: Any) -> MemorizingForCausalLM:
    model = make(**changes)
    return model.float()  # type: ignore[no-any-return, no-untyped-call]  # of transformers


def asked(model: MemorizingForCausalLM, text: Tensor, question: Tensor) -> Tensor:
    """Logits of a question after all of a text has gone into a memory in tensors, with empty windows."""
    reading = MemorizingCache(model.config, 1)
    logits(model, text[None], cache=reading)
    reading.flush()
    assert isinstance(reading.memory, RecentTokens)
    return logits(model, question[None], cache=MemorizingCache(model.config, 1, reading.memory))[0]


@pytest.mark.parametrize("length", [1, WINDOW, LENGTH])
def test_a_question_finds_what_was_read_also_after_reopening(length: int, tmp_path: Path) -> None:
    model, text, question = small(), tokens(length)[0], tokens(WINDOW - 1)
    expected = asked(model, text, question[0])
    with MemorizingReader(model, tmp_path / "m", "book") as reader:
        result = reader.read(text)
        assert (result.tokens, result.new_tokens, len(reader)) == (length, length, length)
        torch.testing.assert_close(logits(model, question, cache=reader.cache())[0], expected, atol=1e-4, rtol=0)
    with MemorizingReader(model, tmp_path / "m", "book", mode="r") as reader:
        torch.testing.assert_close(logits(model, question, cache=reader.cache())[0], expected, atol=1e-4, rtol=0)
        assert len(reader) == length, "a question is not stored"
        assert reader.memory.verify() == []


def test_what_is_asked_can_be_found_too_once_it_has_left_the_window() -> None:
    model, text, question = small(), tokens(LENGTH)[0], tokens(4 * WINDOW)
    expected = asked(model, text, question[0])
    with MemorizingReader(model, "ram:") as reader:
        reader.read(text)
        cache = reader.cache()
        found = logits(model, *question.split([3, 1, 2 * WINDOW, 2 * WINDOW - 4], 1), cache=cache)
        torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = small()
    with MemorizingReader(model, tmp_path / "m", block_size=4) as reader:
        reader.read(tokens(LENGTH)[0])
        with pytest.raises(InvalidArgument, match="at least one row"):
            reader.cache(0)
    with pytest.raises(ForeignMemory):
        MemorizingReader(small(retrieval_top_k=2), tmp_path / "m", block_size=4).open()
    with pytest.raises(InvalidArgument, match="memory_layer is None"):
        MemorizingReader(small(memory_layer=None), "ram:").open()
    with pytest.raises(InvalidArgument, match="expected a MemorizingForCausalLM, got a Linear"):
        MemorizingReader(torch.nn.Linear(1, 1), "ram:").open()


class Mixed:
    """Keeps what the layer with the memory was given last, and says how much of its output each found token carries."""

    def __init__(self, model: MemorizingForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = model.model.layers[1].attention
        assert isinstance(layer, KNNAttention)
        self.mix = layer.mix

        def mix(*given: Any) -> Tensor:
            self.given = given
            return self.mix(*given)

        monkeypatch.setattr(layer, "mix", mix)

    def parts(self, row: int, token: int, head: int, place: int) -> float:
        """By how much the output of a head grows with the value of the token found at ``place`` of its list."""
        q, k, v, mask, found = self.given
        group = head * found.values.shape[1] // q.shape[1]
        values = found.values.clone()
        values[row, group, found.ids[row, head, token, place]] += 1.0
        changed = self.mix(q, k, v, mask, Neighbours(found.keys, values, found.ids))
        return float((changed - self.mix(*self.given))[row, head, token, 0])


def only_look(reader: MemorizingReader) -> Look:
    trace = reader.memory.traces.last()
    assert trace is not None
    *_, step = trace.steps()
    (look,) = step.looks
    return look


@torch.no_grad()
@pytest.mark.parametrize("joint", [False, True])
def test_weights_are_the_parts_that_tokens_have_in_the_output(joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = small(joint=joint), tokens(LENGTH)[0]
    mixed = Mixed(model, monkeypatch)
    with MemorizingReader(model, "ram:", block_size=4) as reader:
        reader.read(text)
        with reader.record([1]):
            cache = reader.cache()
            for piece in tokens(WINDOW + 3).split([5, 1, WINDOW - 3], 1):
                model(piece, past_key_values=cache)
        look = only_look(reader)
        ids = mixed.given[-1].ids
        expected = [[mixed.parts(0, ids.shape[2] - 1, head, place) for place in range(3)] for head in range(4)]
        np.testing.assert_allclose(look.weights, expected, atol=1e-3)
        assert look.offsets is not None
        there = look.document == 0
        assert there.any()
        for block, offset in zip(look.blocks[there].tolist(), look.offsets[there].tolist(), strict=True):
            assert int(reader.document.tokens(block)[offset]) == int(text[4 * block + offset])
        assert look.layer == 1
        assert (np.diff(look.scores) <= 0).all(), "best first"
        assert look.search_us > 0
        assert look.gather_us > 0


@torch.no_grad()
def test_tokens_of_the_call_itself_belong_to_no_document() -> None:
    model, ids = small(), tokens(3 * WINDOW, rows=2)
    with MemorizingReader(model, "ram:", block_size=4) as reader:
        reader.read(tokens(6)[0])
        with reader.record(ids[0]):
            model(ids, past_key_values=reader.cache(2))
        trace = reader.memory.traces.last()
        assert trace is not None
        looks = trace.steps()[0].looks
    assert [look.row for look in looks] == [0, 1]
    for look in looks:
        assert look.offsets is not None
        own = look.blocks * 4 + look.offsets >= 6
        assert own.any()
        assert (look.document == np.where(own, -1, 0)).all()
        assert (look.tiers == TIERS.index("own"))[own].all()
        assert (look.tiers != TIERS.index("own"))[~own].all()


def test_generate_records_what_it_chose() -> None:
    model, ids = small(), tokens(7)
    with MemorizingReader(model, "ram:") as reader:
        reader.read(tokens(LENGTH)[0])
        plain = reader.generate(ids, max_new_tokens=WINDOW, do_sample=False)
        out = reader.generate(ids, max_new_tokens=WINDOW, do_sample=False, trace=True)
        assert torch.equal(out, plain), "who is watched answers as ever"
        (trace,) = reader.memory.traces.list()
        assert trace.tokens() == out[0, 7:].tolist()
        assert trace.info["mechanism"] == "knn"
        assert len(trace.steps()[0].looks) == 1


def test_a_memory_of_another_kind_is_refused() -> None:
    model = small()
    with memstore.open("ram:", spec=memstore.models.memorizing.reader.memory_spec(model, block_size=8)) as memory:
        with MemorizingReader(model, memory) as reader:
            assert reader.memory.spec.block_size == 8
        with pytest.raises(ForeignMemory):
            MemorizingReader(model, memory, block_size=16).open()


def test_a_text_finds_the_blocks_whose_tokens_it_would_look_up() -> None:
    model, text, question = small(), tokens(9 * 8)[0], tokens(2 * WINDOW + 3)[0]
    with MemorizingReader(model, "ram:", block_size=8) as reader:
        reader.read(text)
        asked: list[Tensor] = []
        cache = reader.cache()
        assert cache.memory is not None
        search = cache.memory.search

        def heard(queries: Tensor, top_k: int) -> Neighbours:
            asked.append(queries)
            return search(queries, top_k)

        cache.memory.search = heard  # type: ignore[method-assign]
        logits(model, question[None], cache=cache)
        keys = reader.document.layer(0).gather(range(9))["k"].repeat_interleave(2, 1)  # [9, H, S, D]
        scores = torch.einsum("hd,nhsd->nhs", asked[-1][0, :, -1], keys).amax(2).mean(1)
        found = reader.search(question, 3)
        assert [match.block for match in found] == scores.topk(3).indices.tolist()
        assert [match.score for match in found] == pytest.approx(scores.topk(3).values.tolist(), abs=1e-5)
        assert reader.search(question, 3, layer=model.config.memory_layer) == found
        with pytest.raises(InvalidArgument, match="only layer"):
            reader.search(question, layer=0)
    with MemorizingReader(model, "ram:") as reader:
        assert reader.search(question) == []


def test_a_document_read_under_autocast_is_the_same() -> None:
    model, text = small(), tokens(LENGTH)[0]
    with MemorizingReader(model, "ram:", block_size=4) as plain, MemorizingReader(model, "ram:", block_size=4) as cast:
        plain.read(text)
        with torch.autocast("cpu", torch.bfloat16):
            cast.read(text)
            found = cast.search(text[:5])
        blocks = plain.document.complete_blocks
        assert len(blocks) == LENGTH // 4
        one, other = (reader.document.layer(0).gather(blocks) for reader in (plain, cast))
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert found == plain.search(text[:5])
