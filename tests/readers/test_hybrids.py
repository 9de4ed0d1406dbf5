"""A hybrid with a memory is the hybrid: what its linear layers remember goes from segment to segment, and to disk."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.memory.entry import Address
from memstore.readers.stock.reader import StockReader
from memstore.store import Batch, Record
from tests.readers.families import tiny_family
from tests.readers.models import attach, generate, tiny, tokens
from tests.readers.test_exact import BEAMS, EXACT, GREEDY, SIZES, full_logits

FAMILIES = [
    "lfm2",
    "qwen3_next",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("bamba", "olmo_hybrid")),
]
TEXT, OTHER, REST = tokens(213), tokens(90, seed=2), tokens(37, seed=1)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_family(request.param)


def hybrid(model: PreTrainedModel, memory: Any, **options: Any) -> StockReader:
    return attach(model, memory, **{"document": "text", "retrieval": EXACT, **SIZES, **options})


def behind(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Logits of ``REST`` by a model that sees ``text`` and it at once; before a memory is attached."""
    return full_logits(model, torch.cat((text, REST)))[len(text) :]


def check(reader: StockReader, want: Tensor, **options: Any) -> None:
    with torch.no_grad():
        got = reader.model(REST[None], **options).logits[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_read_in_pieces_cut_changed_and_shared_it_is_the_model(model: PreTrainedModel) -> None:
    changed = torch.cat((TEXT[:100], OTHER))
    wanted = {len(text): behind(model, text) for text in (TEXT, TEXT[:100], torch.cat((TEXT, OTHER)), changed)}
    with memstore.open("ram:", spec=hybrid(model, "ram:").spec()) as memory:
        with hybrid(model, memory) as reader:
            for stop in (100, 101, 213):
                reader.read(TEXT[:stop])
            for options in ({}, {"use_cache": False}):
                check(reader, wanted[213], **options)
            reader.append(OTHER)
            check(reader, wanted[303])
        with hybrid(model, memory, document="other") as reader:
            assert reader.read(changed).reused_tokens == 96
            check(reader, wanted[190])
        with hybrid(model, memory) as reader:
            reader.update(TEXT[:100])
            check(reader, wanted[100])
        assert memory.verify() == []


def test_its_tokens_are_those_of_the_whole_prompt(model: PreTrainedModel) -> None:
    rows = tokens(12, seed=1, rows=3)
    prompts = torch.cat((TEXT.expand(3, -1), rows), 1)
    ways = [{**way, "attention_mask": torch.ones_like(prompts)} for way in (GREEDY, BEAMS)]
    wanted = [generate(model, prompts, **way)[:, 225:] for way in ways]
    with hybrid(model, "ram:") as reader:
        reader.read(TEXT)
        for way, want in zip((GREEDY, BEAMS), wanted, strict=True):
            assert generate(model, rows, attention_mask=torch.ones_like(rows), **way)[:, 12:].tolist() == want.tolist()


def test_a_state_that_is_damaged_or_missing_is_computed_again_and_one_that_is_there_is_used() -> None:
    model = tiny("qwen3_next")
    want, longer = behind(model, TEXT), behind(model, torch.cat((TEXT, OTHER)))
    with memstore.open("ram:", spec=hybrid(model, "ram:").spec()) as memory:
        with hybrid(model, memory) as reader:
            reader.read(TEXT)
        document, store = memory.document("text"), memory._shared.store
        key, places = Address(document.id or 0).recurrent(213), document.recurrent_places()
        assert len(places) > 1
        state = store.get(key) or ()
        zeros = tuple(Record(each.layout, np.zeros(each.layout.nbytes, np.uint8)) for each in state)
        store.write(Batch(puts=[(key, zeros)]))
        with hybrid(model, memory) as reader, pytest.raises(AssertionError):
            check(reader, want)
        for harm in (Batch(puts=[(key, state[:1])]), Batch(deletes=[(key, key)])):
            store.write(harm)
            assert len(memory.verify()) == len(harm.puts)
            with hybrid(model, memory) as reader:
                check(reader, want)
        with hybrid(model, memory) as reader:
            reader.append(OTHER)
            check(reader, longer)


def test_a_prompt_that_goes_on_after_no_document_finds_blocks_of_all() -> None:
    model = tiny("qwen3_next")
    with hybrid(model, "ram:", retrieval=Retrieval(top_k=3)) as reader, torch.no_grad():
        reader.read(TEXT)
        with reader.seeing(tail=False):
            first = model(REST[None]).logits
            assert not torch.allclose(first, model(OTHER[None, :37]).logits)
            assert torch.equal(model(REST[None]).logits, first), "what it goes on from is not changed"


def test_rows_with_padding_are_refused() -> None:
    model, rows = tiny("lfm2"), tokens(12, rows=2)
    mask = torch.ones_like(rows)
    mask[1, :3] = 0
    with hybrid(model, "ram:") as reader:
        reader.read(TEXT)
        with pytest.raises(InvalidArgument, match="rows of equal length"):
            model(rows, attention_mask=mask)


def test_a_cache_is_freed_with_its_last_name_and_a_copy_goes_its_own_way() -> None:
    model = tiny("qwen3_next")
    with hybrid(model, "ram:") as reader, torch.no_grad():
        reader.read(TEXT)
        cache = model(REST[None], use_cache=True).past_key_values
        linear = next(layer for layer in cache.layers if hasattr(layer, "recurrent_states"))
        twin, before = copy.deepcopy(linear), linear.recurrent_states[0].clone()
        twin.update_recurrent_state(torch.zeros_like(before))
        assert torch.equal(linear.recurrent_states[0], before)
        assert not twin.recurrent_states[0].any()
        watched = weakref.ref(linear)
        gc.disable()
        try:
            del cache, linear
            assert watched() is None
        finally:
            gc.enable()


def test_gradients_flow_through_a_pass_that_continues_a_document(model: PreTrainedModel) -> None:
    with hybrid(model, "ram:") as reader:
        reader.read(TEXT)
        model(REST[None]).logits.sum().backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
    assert any(weight.grad is not None for weight in model.parameters())
