"""Recording an attached model: the weights are those of its attention, and nothing of what it computes changes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.kernels.block_attention import attend as attend_plainly
from memstore.memory import Look, Memory, Trace, traces
from memstore.readers.caches import CACHE
from memstore.readers.stock.reader import StockReader
from tests.pairs import each
from tests.readers.lists import lists_of
from tests.readers.models import attach, generate, tiny, tokens
from tests.readers.test_retrieval import (
    HEADS,
    KEY_HEADS,
    LAYERS,
    LENGTH,
    PROMPT,
    SHARES,
    SIZES,
    logits,
    prompt,
    reading,
)

LISTS = {"none": HEADS, "group": KEY_HEADS, "layer": 1, "model": 1}
BLOCK = SIZES["block_size"]
NEW_TOKENS = 4


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write at every third step or so, so that some steps are computed together and others are not."""
    monkeypatch.setattr(traces, "INTERVAL", 0.01)


def last(memory: Memory) -> Trace:
    trace = memory.traces.last()
    assert trace is not None
    return trace


def looks_of(trace: Trace, step: int) -> dict[tuple[int, int], Look]:
    """(layer, row) -> its look."""
    return {(look.layer, look.row): look for look in trace.steps()[step].looks}


@contextmanager
def watched(attached: StockReader, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[int, Tensor]]]:
    """For each attention call, block -> the weight ``[B, H]`` that a plain softmax in float64 gives it.

    Blocks are found by their values, which no position changes. Where heads have lists of their own, a head that has
    not fetched a block gives it nothing.
    """
    memory = attached.memories[0]
    calls: list[dict[int, Tensor]] = []
    document = memory.document("text")

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, **options: Any) -> Tensor:
        if not recording[0]:
            return attend_plainly(q, k, v, mask=mask, **options)
        stored = document.layer(len(calls) % len(attached.architecture.layers)).gather(list(document.blocks))["v"]
        calls.append(own_weights(q, k, v, stored, mask, **options))
        return attend_plainly(q, k, v, mask=mask, **options)

    recording = [False]
    monkeypatch.setattr("memstore.readers.stock.call.attend", attend)
    recording[0] = True
    yield calls
    recording[0] = False


def own_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> dict[int, Tensor]:
    heads = q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    stored = stored.repeat_interleave(heads // stored.shape[1], dim=1)  # [N, H, S, D]
    scores = (q[:, :, -1:].double() @ k.double().transpose(-1, -2))[:, :, 0] * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        whole = mask[:, :, -1].repeat_interleave(heads // mask.shape[1], dim=1)
        scores[..., scores.shape[-1] - whole.shape[-1] :] += whole
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1).expand(len(scores), -1, -1)], dim=-1)
    weights = scores.softmax(-1)
    return {
        block: torch.tensor(
            [
                [_weight_of(v[row, head], states[head], weights[row, head]) for head in range(heads)]
                for row in range(len(q))
            ]
        )
        for block, states in enumerate(stored)
    }


def _weight_of(values: Tensor, block: Tensor, weights: Tensor) -> float:
    """Sum of the weights where ``values [n, D]`` are those of ``block [S, D]``, one after the other."""
    runs = values.unfold(0, len(block), 1)  # [n - S + 1, D, S]
    starts = (runs == block.T).flatten(1).all(-1).nonzero()[:, 0].tolist()
    return sum(float(weights[start : start + len(block)].sum()) for start in starts)


@each(share=SHARES, every=[1, "segment"])
def test_weights_are_those_of_the_models_attention(share: Any, every: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_weights(tiny("llama"), Retrieval(top_k=3, share=share, every=every), monkeypatch)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral", "gpt2", "opt", "gemma3_text"])
def test_weights_are_right_with_caps_sinks_and_sliding_windows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_weights(tiny(name), Retrieval(top_k=3, share="group"), monkeypatch)


@pytest.mark.parametrize("positions", ["true", "clamped"])
def test_weights_are_right_at_all_positions(positions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_weights(tiny("llama"), Retrieval(top_k=3, positions=positions), monkeypatch)


def check_weights(model: PreTrainedModel, retrieval: Retrieval, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, one of them padded, for a prompt and three steps."""
    ids = tokens(PROMPT, seed=5, rows=2)
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :4] = 0
    with reading(model, retrieval) as attached, watched(attached, monkeypatch) as calls:
        with attached.record():
            generate(model, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        steps = last(attached.memories[0]).steps()
        layers_in_all = len(attached.architecture.layers)
    assert len(calls) == NEW_TOKENS * layers_in_all == len(steps) * layers_in_all
    compared = 0
    for step in steps:
        assert {look.row for look in step.looks} == {0, 1}
        for look in step.looks:
            own = calls[step.number * layers_in_all + look.layer]
            for head, of in enumerate(look.by_head()):
                for block, weight in zip(look.blocks[of], look.weights[head], strict=True):
                    assert weight == pytest.approx(float(own[int(block)][look.row, head]), abs=1e-3)
                    compared += weight > 0.01
                own_sum = sum(float(own[int(block)][look.row, head]) for block in look.blocks[of])
                assert look.weights[head].sum() == pytest.approx(own_sum, abs=1e-3)
    assert compared > 50


def test_weights_are_those_of_the_plain_model_that_sees_everything() -> None:
    """With all blocks at their true positions the attached model is the plain one, whose attention is known."""
    model = tiny("llama", attn_implementation="eager")
    ids = prompt()
    with reading(model, Retrieval(top_k="all", positions="true")) as attached:
        with attached.record():
            logits(model, ids)
        looks = looks_of(last(attached.memories[0]), 0)
    with torch.no_grad():
        plain = model(torch.cat([tokens(LENGTH)[None], ids], dim=1), output_attentions=True).attentions
    assert {layer for layer, _ in looks} == set(range(LAYERS))
    for (layer, _), look in looks.items():
        assert np.isnan(look.scores).all()
        for place, block in enumerate(look.blocks[0]):
            expected = plain[layer][0, :, -1, block * BLOCK : (block + 1) * BLOCK].sum(-1)
            np.testing.assert_allclose(look.weights[:, place], expected, atol=1e-3)


def test_attention_that_went_elsewhere_is_that_of_the_plain_model() -> None:
    model = tiny("llama", attn_implementation="eager")
    with reading(model, Retrieval(top_k="all", positions="true")) as attached:
        with attached.record():
            answer = generate(model, prompt(), max_new_tokens=5, do_sample=False)
        steps = last(attached.memories[0]).steps()
    ids = torch.cat([tokens(LENGTH)[None], answer], dim=1)
    for step in steps:
        with torch.no_grad():
            plain = model(ids[:, : LENGTH + PROMPT + step.number], output_attentions=True).attentions
        for look in step.looks:
            own, window = plain[look.layer][0, :, -1], (int(look.blocks.max()) + 1) * BLOCK
            ends = (SIZES["sink"], window, LENGTH, LENGTH + PROMPT)
            sink, _, *parts = own.tensor_split(ends, dim=1)
            assert look.elsewhere is not None
            expected = torch.stack([part.sum(-1) for part in (sink, *parts)], dim=-1)
            np.testing.assert_allclose(look.elsewhere, expected, atol=1e-3)
            np.testing.assert_allclose(look.elsewhere.sum(1) + look.weights.sum(1), 1, atol=5e-3)
    assert max(float(look.elsewhere[:, 3].max()) for look in steps[-1].looks if look.elsewhere is not None) > 0.01


@pytest.mark.parametrize("share", SHARES)
def test_a_trace_says_what_the_attached_trace_says(share: Any) -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=3, share=share, every=2)) as attached:
        with attached.record(question="why?"):
            generate(model, prompt(), max_new_tokens=6, do_sample=False)
        trace = last(attached.memories[0])
        chosen = {(each.step - PROMPT, each.layer, each.head): each for each in lists_of(attached)}
    assert {"mechanism": "attach", "question": "why?", "documents": ["text"], "top_k": 3}.items() <= trace.info.items()
    assert trace.info["prompt"] == prompt()[0].tolist()
    for (step, layer, head), entry in chosen.items():
        look = looks_of(trace, step)[trace.info["layers"][0] if share == "model" else layer, 0]
        assert look.blocks.shape == (LISTS[share], 3)
        best_first = sorted(zip(entry.scores, entry.blocks, strict=True), key=lambda each: (-each[0], each[1]))
        assert look.blocks[head].tolist() == [block for _, block in best_first]
        np.testing.assert_allclose(look.scores[head], [score for score, _ in best_first])
        assert [look.documents[place] for place in look.document[head]] == ["text"] * 3


def test_the_tokens_of_the_answer_are_told() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2)) as attached:
        with attached.record() as writer:
            answer = generate(model, prompt(), max_new_tokens=8, do_sample=False)[0, PROMPT:].tolist()
        assert last(attached.memories[0]).tokens() == [*answer[:-1], None]
        with attached.record() as writer:
            generate(model, prompt(), max_new_tokens=8, do_sample=False)
            writer.close(answer)
        assert last(attached.memories[0]).tokens() == answer


def test_recording_changes_nothing() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2, every=2)) as attached:
        plain = answer_logits(model)
        with attached.record():
            traced = answer_logits(model)
    assert len(plain) == len(traced) == 9
    assert all(map(torch.equal, plain, traced))


def answer_logits(model: Any) -> list[Tensor]:
    with torch.no_grad():
        told = model.generate(prompt(), max_new_tokens=9, output_logits=True, return_dict_in_generate=True)
    return list(told.logits)


def test_searching_and_gathering_are_timed_where_they_happen() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2, every=4)) as attached:
        with attached.record():
            generate(model, prompt(), max_new_tokens=7, do_sample=False)
        steps = last(attached.memories[0]).steps()
    searched = [[look.search_us > 0 for look in step.looks] for step in steps]
    assert [any(looks) for looks in searched] == [True, False, False, False, True, False, False]
    assert all(sum(looks) <= 1 for looks in searched), "one search serves all layers"
    assert all(look.gather_us > 0 for look in steps[0].looks)
    assert all(look.gather_us == 0 for step in steps[1:4] for look in step.looks)


@pytest.mark.parametrize(
    ("host_bytes", "warm", "tiers", "share", "top_k"),
    [
        (0, True, {2}, "group", 3),
        (1 << 24, True, {1}, "model", 3),
        (1 << 24, True, {1}, "group", "all"),
        (1 << 24, False, {2}, "model", "all"),
    ],
)
def test_tiers_are_those_that_the_blocks_came_from(
    tmp_path: Path, host_bytes: int, warm: bool, tiers: set[int], share: Any, top_k: Any
) -> None:
    model, path = tiny("llama"), tmp_path / "m"
    options: dict[str, Any] = {"retrieval": Retrieval(top_k=top_k, share=share), **SIZES}
    with attach(model, path, document="text", **options) as attached:
        attached.read(tokens(LENGTH))
    with memstore.open(path, mode="r", host_bytes=host_bytes) as memory:
        for layer in range(LAYERS if warm else 0):  # so that they are in host memory, where there is room
            memory.document("text").layer(layer).gather(list(memory.document("text").blocks))
        with attach(model, memory, **options) as attached, attached.record():
            logits(model, prompt())
        found = {tier for look in last(memory).steps()[0].looks for tier in look.tiers.ravel().tolist()}
    assert found == tiers


def test_states_of_a_memory_in_ram_come_from_host_memory() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=3)) as attached:
        with attached.record():
            logits(model, prompt())
        assert {int(look.tiers.max()) for look in last(attached.memories[0]).steps()[0].looks} == {1}


def test_several_documents_and_memories_are_told_in_the_first() -> None:
    model = tiny("llama")
    options: dict[str, Any] = {"retrieval": Retrieval(top_k=6, share="layer"), **SIZES}
    with (
        memstore.open("ram:first", spec=_spec(model)) as first,
        memstore.open("ram:second", spec=_spec(model)) as second,
    ):
        for memory, name, seed in ((first, "one", 1), (first, "two", 2), (second, "three", 3)):
            with attach(model, memory, document=name, **options) as attached:
                attached.read(tokens(LENGTH, seed=seed))
        with attach(model, [first, second], **options) as attached:
            lists_of(attached)
            with attached.record():
                logits(model, prompt())
            entries = {(e.layer, e.document): set(e.blocks) for e in lists_of(attached)}
        assert second.traces.list() == []
        trace = last(first)
        assert trace.info["documents"] == ["one", "two", "three"]
        for look in trace.steps()[0].looks:
            for place, name in enumerate(look.documents):
                assert set(look.blocks[look.document == place].tolist()) == entries.get((look.layer, name), set())


def _spec(model: PreTrainedModel) -> memstore.MemorySpec:
    with attach(model, "ram:", retrieval=Retrieval(top_k=6, share="layer"), **SIZES) as attached:
        return attached.memories[0].spec


def test_beams_take_their_steps_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2, every=3)) as attached:
        with attached.record():
            generate(model, prompt(), max_new_tokens=8, num_beams=3, do_sample=False)
        steps = last(attached.memories[0]).steps()
    assert {look.row for look in steps[-1].looks} == {0, 1, 2}
    for step in steps:
        for look in step.looks:
            assert np.isfinite(look.weights).all()
            assert (look.weights.sum(-1) <= 1.001).all()


def test_where_everything_is_direct_there_is_nothing_to_tell() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2), length=40) as attached:
        with attached.record():
            logits(model, prompt())
        assert [step.looks for step in last(attached.memories[0]).steps()] == [[]]


def test_reading_is_not_recorded_and_a_recording_ends_with_its_block() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2)) as attached:
        with attached.record(), pytest.raises(InvalidArgument, match="already recording"), attached.record():
            pass
        with attached.record() as writer:
            attached.read(tokens(LENGTH + 64), "text")
            cache = model(prompt(), use_cache=True).past_key_values
        model(prompt(3), **{CACHE: cache})
        assert not writer.active
        assert len(last(attached.memories[0])) == 1


def test_a_second_question_at_the_same_time_is_told_to_wait() -> None:
    with reading(tiny("llama"), Retrieval(top_k=2)) as attached, attached.record(), ThreadPoolExecutor(1) as pool:
        refused = pool.submit(lambda: attached.record().__enter__())
        with pytest.raises(InvalidArgument, match="recording or answering: leave that with block, or wait"):
            refused.result()


def test_an_answer_that_fails_leaves_a_trace_that_has_ended() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2)) as attached:
        with pytest.raises(IndexError), attached.record():
            logits(model, torch.cat([prompt(), torch.tensor([[10**6]])], dim=1))
        trace = last(attached.memories[0])
        assert trace.info["ended"]
        assert len(trace) == 1
