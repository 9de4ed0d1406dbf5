"""What the options of ``Retrieval`` do, in calls, in generation and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore import Retrieval
from memstore.readers.caches import CACHE
from memstore.readers.stock.architecture import FAR
from memstore.readers.stock.reader import StockReader
from tests.pairs import each
from tests.pretended import on_device, pretended
from tests.readers.lists import layers_fetched, lists_of, lists_of_reading
from tests.readers.models import attach, tiny, tokens

SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
LENGTH = 300
CANDIDATES = range(1, (LENGTH - 32) // 16)
"""Blocks between sink and window."""
PROMPT = 9
SHARES: tuple[Any, ...] = ("none", "group", "layer", "model")
LAYERS, HEADS, KEY_HEADS = 4, 4, 2


@contextmanager
def reading(model: PreTrainedModel, retrieval: Retrieval, length: int = LENGTH, **more: Any) -> Iterator[StockReader]:
    """A memory that has read ``length`` tokens; its trace begins after that."""
    with attach(model, "ram:", document="text", retrieval=retrieval, **{**SIZES, **more}) as attached:
        attached.read(tokens(length))
        lists_of(attached).clear()
        yield attached


def prompt(n: int = PROMPT, seed: int = 5) -> Tensor:
    return tokens(n, seed=seed)[None]


def logits(model: PreTrainedModel, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(ids, **more).logits
    return result


def generate(model: Any, ids: Tensor, new: int = 12, **more: Any) -> Any:
    return model.generate(ids, max_new_tokens=new, do_sample=False, **more)


def answer(model: PreTrainedModel, retrieval: Retrieval, ids: Tensor, **more: Any) -> tuple[list[list[int]], Tensor]:
    """The lists behind the logits of a prompt, and the logits."""
    with reading(model, retrieval, **more) as attached:
        result = logits(model, ids)
        return [entry.blocks for entry in lists_of(attached)], result


# Which layers


def test_no_states_are_fetched_for_layers_that_a_pass_ends_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ends with the keys of the last layer."""
    fetched = layers_fetched(monkeypatch)
    with pretended(), reading(on_device(tiny("llama")), Retrieval(top_k="all")):
        assert fetched
        assert {*fetched[-1]} == {0, 1, 2}


# How often


@each(share=SHARES, often=[("segment", [9]), (1, [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]), (4, [9, 13, 17])])
def test_a_list_is_chosen_every_so_many_tokens(share: Any, often: tuple[Any, list[int]]) -> None:
    every, steps = often
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2, every=every, share=share)) as attached:
        generate(model, prompt())
        assert sorted({entry.step for entry in lists_of(attached)}) == steps
        by_step = [[entry.layer for entry in lists_of(attached) if entry.step == step] for step in steps]
        assert all(layers == by_step[0] for layers in by_step), (
            "every layer that chooses must choose at every such step"
        )


def test_the_list_follows_what_is_being_written() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2, every=1, span=4)) as attached:
        generate(model, prompt(), new=30)
        lists = {tuple(entry.blocks) for entry in lists_of(attached)}
    assert len(lists) > 1


def test_what_was_chosen_before_does_not_sway_what_is_chosen_next() -> None:
    """The layers below the routing one see no list, so that choosing often and seldom agree where both choose."""
    model, ids = tiny("llama"), tokens(30, seed=5)
    chosen = {}
    for every in (1, 4):
        with reading(model, Retrieval(top_k=2, every=every)) as attached:
            cache = None
            for part in (ids[:PROMPT], *ids[PROMPT:].split(1)):
                with torch.no_grad():
                    cache = model(part[None], **{CACHE: cache}, use_cache=True).past_key_values
            chosen[every] = {entry.step: entry.blocks for entry in lists_of(attached)}
    assert list(chosen[4]) == [9, 13, 17, 21, 25, 29]
    assert chosen[4] == {step: chosen[1][step] for step in chosen[4]}


# For whom


@pytest.mark.parametrize(
    ("share", "lists"), [("none", LAYERS * HEADS), ("group", LAYERS * KEY_HEADS), ("layer", LAYERS), ("model", 1)]
)
def test_lists_are_shared_as_asked(share: Any, lists: int) -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2, share=share)) as attached:
        logits(model, prompt())
        assert len(lists_of(attached)) == lists
        assert len({(entry.layer, entry.head) for entry in lists_of(attached)}) == lists


def test_sharing_changes_what_is_retrieved() -> None:
    options = [Retrieval(top_k=2, share=share) for share in SHARES]
    results = [answer(tiny("llama"), each, prompt())[1] for each in options]
    assert_all_differ(results)


@pytest.mark.parametrize("share", ["group", "none"])
def test_a_model_with_one_key_head_can_choose_in_every_layer(share: Any) -> None:
    model = tiny("llama", num_key_value_heads=1)
    lists, result = answer(model, Retrieval(top_k=2, share=share), prompt())
    assert len(lists) == LAYERS * (1 if share == "group" else HEADS)
    assert result.isfinite().all()


def test_layers_can_choose_among_blocks_of_any_size() -> None:
    sizes = {"window": 48, "sink": 24, "segment": 48, "block_size": 24}
    lists, result = answer(tiny("llama"), Retrieval(top_k=2, share="group"), prompt(), **sizes)
    assert len(lists) == LAYERS * KEY_HEADS
    assert result.isfinite().all()


@each(share=SHARES, name=["llama", "gemma3_text"])
def test_the_trace_names_blocks_between_sink_and_window(share: Any, name: str) -> None:
    model = tiny(name)
    with reading(model, Retrieval(top_k=3, share=share, every=2)) as attached:
        generate(model, tokens(PROMPT, seed=5, rows=2), attention_mask=torch.ones(2, PROMPT))
        assert {entry.row for entry in lists_of(attached)} == {0, 1}
        for entry in lists_of(attached):
            assert entry.document == "text"
            assert len(entry.blocks) == 3 == len(set(entry.blocks))
            assert set(entry.blocks) <= set(CANDIDATES)
            assert entry.blocks == sorted(entry.blocks)
            assert torch.tensor(entry.scores).isfinite().all()
            assert len(entry.scores) == 3


# By what, and where


@pytest.mark.parametrize(
    ("share", "one", "other"),
    [
        ("group", {"pool": "max"}, {"pool": "mean"}),
        ("model", {"span": 4}, {"span": 32}),
        ("group", {"top_k": 2}, {"top_k": 3}),
    ],
    ids=["pool", "span", "top_k"],
)
def test_an_option_of_choosing_changes_lists_and_answers(
    share: Any, one: dict[str, Any], other: dict[str, Any]
) -> None:
    model, ids = tiny("llama"), prompt(60)
    base = {"top_k": 2, "span": 6, "share": share}
    lists, results = zip(*(answer(model, Retrieval(**{**base, **each}), ids) for each in (one, other)), strict=True)
    assert lists[0] != lists[1]
    assert_all_differ(results)


@pytest.mark.parametrize(
    ("one", "other"),
    [({"positions": "stingy"}, {"positions": "true"}), ({"order": "score"}, {"order": "time"})],
    ids=["positions", "order"],
)
def test_an_option_of_placing_changes_answers(one: dict[str, Any], other: dict[str, Any]) -> None:
    """A document of one segment is read before there are lists, so both see the same blocks, at other places."""
    model = tiny("llama")
    results, lists = [], []
    for options in (one, other):
        with reading(model, Retrieval(top_k=2, **options), length=224, segment=224) as attached:
            results.append(logits(model, prompt()))
            lists.append([entry.blocks for entry in lists_of(attached)])
    assert len(lists[0]) == 1
    assert lists[0] == lists[1]
    assert_all_differ(results)


def test_clamped_positions_are_true_below_the_limit_and_differ_beyond() -> None:
    near, far = tiny("llama"), tiny("llama", max_position_embeddings=256)
    options = [Retrieval(top_k=2, positions=positions) for positions in ("clamped", "true")]
    clamped, true = (answer(near, each, prompt())[1] for each in options)
    assert torch.equal(clamped, true)
    clamped, true = (answer(far, each, prompt())[1] for each in options)
    assert not torch.allclose(clamped, true, atol=1e-3)


# Batches and beams


PADDED = (0, 5, 27)
"""Padding of each row of a batch of prompts of 40 tokens."""


def padded_batch() -> tuple[Tensor, Tensor]:
    ids, mask = tokens(40, seed=7, rows=3), torch.ones(3, 40, dtype=torch.long)
    for row, pad in enumerate(PADDED):
        mask[row, :pad] = 0
    return ids * mask, mask


WAYS: list[dict[str, Any]] = [
    {},
    {"span": 8},
    {"positions": "true"},
    {"positions": "clamped"},
    {"order": "time"},
    *({"share": share} for share in ("none", "group", "layer")),
    {"share": "none", "positions": "true"},
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("llama", options) for options in WAYS),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name, options in zip(cycle(["gemma3_text", "mistral"]), WAYS, strict=False)
        ),
    ],
    ids=str,
)
def test_every_row_of_a_padded_batch_is_that_row_alone(name: str, options: dict[str, Any]) -> None:
    model = tiny(name)
    ids, mask = padded_batch()
    with reading(model, Retrieval(top_k=2, **options)) as attached:
        together = logits(model, ids, attention_mask=mask)
        lists = by_row(attached)
        assert lists[0] != lists[1] or lists[0] != lists[2], "rows must choose for themselves, or this shows nothing"
        for row, pad in enumerate(PADDED):
            lists_of(attached).clear()
            alone = logits(model, ids[row : row + 1, pad:])
            assert by_row(attached)[0] == lists[row]
            torch.testing.assert_close(together[row, pad:], alone[0], rtol=0, atol=1e-4)


def by_row(attached: StockReader) -> list[list[list[int]]]:
    rows = range(1 + max(entry.row for entry in lists_of(attached)))
    return [[entry.blocks for entry in lists_of(attached) if entry.row == row] for row in rows]


@pytest.mark.parametrize("share", ["model", "group"])
def test_every_row_of_a_padded_batch_is_continued_as_if_alone(share: Any) -> None:
    model = tiny("llama")
    ids, mask = padded_batch()
    with reading(model, Retrieval(top_k=2, every=3, share=share)):
        together = generate(model, ids, attention_mask=mask)[:, 40:]
        for row, pad in enumerate(PADDED):
            alone = generate(model, ids[row : row + 1, pad:])[0, 40 - pad :]
            assert together[row].tolist() == alone.tolist()


@each(share=SHARES, every=[2, "segment", 1])
def test_beams_score_what_their_tokens_score_one_by_one(share: Any, every: Any) -> None:
    """A beam may descend from any other: its list and its states must have gone with it."""
    model = tiny("llama")
    with reading(model, Retrieval(top_k=2, every=every, share=share)):
        beams = generate(
            model,
            prompt(),
            new=10,
            num_beams=4,
            num_return_sequences=4,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for beam, score in zip(beams.sequences, beams.sequences_scores, strict=True):
            assert float(score) == pytest.approx(log_probability(model, beam, PROMPT), abs=1e-3)
        assert (beams.beam_indices[:, 1:] != beams.beam_indices[:, :-1]).any(), "no beam left its row"


def log_probability(model: PreTrainedModel, ids: Tensor, given: int) -> float:
    """Log-probability of the tokens after the first ``given`` ones, which are a prompt; the others come one by one."""
    cache, total = None, 0.0
    for part, following in zip((ids[:given], *ids[given:-1].split(1)), ids[given:], strict=True):
        with torch.no_grad():
            out = model(part[None], **{CACHE: cache}, use_cache=True)
        cache = out.past_key_values
        total += float(out.logits[0, -1].log_softmax(-1)[following])
    return total


# Reading


def states_after(model: PreTrainedModel, retrieval: Retrieval, *, retrieve: bool = True, **more: Any) -> Tensor:
    """Keys of the last layer, after reading in one go."""
    with attach(model, "ram:", document="text", retrieval=retrieval, **{**SIZES, **more}) as attached:
        attached.read(tokens(LENGTH), retrieve=retrieve)
        (document,) = attached.documents
        return document.layer(LAYERS - 1).gather(list(document.blocks))["k"]


def test_reading_without_retrieval_chooses_nothing() -> None:
    model = tiny("llama")
    with attach(model, "ram:", document="text", retrieval=Retrieval(top_k=2), **SIZES) as attached:
        attached.read(tokens(LENGTH), retrieve=False)
        assert not lists_of(attached)
        logits(model, prompt())
        assert lists_of(attached), "what was read without lists can be searched"
    few, many = (states_after(model, Retrieval(top_k=k), retrieve=False) for k in (2, 5))
    assert torch.equal(few, many)
    few, many = (states_after(model, Retrieval(top_k=k)) for k in (2, 5))
    assert not torch.allclose(few, many, atol=1e-3)


@pytest.mark.parametrize("share", ["model", "group"])
def test_a_window_smaller_than_the_segment_reads_blocks_of_the_segment_before(
    share: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = lists_of_reading(monkeypatch)
    sizes = {"window": 16, "segment": 64, "sink": 0}
    model = tiny("llama")
    with attach(
        model, "ram:", document="text", retrieval=Retrieval(top_k=2, share=share), **{**SIZES, **sizes}
    ) as attached:
        attached.read(tokens(LENGTH))
        newest = [max(entry.blocks) for entry in lists]
        assert len(attached.documents[0]) == LENGTH
        assert any(block * 16 >= 64 for block in newest)
        assert logits(model, prompt()).isfinite().all()


def test_a_window_smaller_than_the_segment_is_full_attention_with_all_blocks() -> None:
    model, sizes = tiny("llama"), {"window": 16, "segment": 64}
    _, got = answer(model, Retrieval(top_k="all", positions="true"), prompt(), **sizes)
    want = logits(model, torch.cat((tokens(LENGTH)[None], prompt()), 1))[:, LENGTH:]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_a_span_longer_than_the_window_survives_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses for a segment are the tokens before it, whether or not they were read by this process."""
    model, retrieval = tiny("llama"), Retrieval(top_k=2, span=128)
    lists, heard = [], lists_of_reading(monkeypatch)
    for pieces in ([LENGTH], [250, LENGTH]):
        name = f"ram:{test_a_span_longer_than_the_window_survives_an_interruption.__name__}{len(pieces)}"
        for length in pieces:
            with attach(model, name, document="text", retrieval=retrieval, **SIZES) as attached:
                attached.calibrate(tokens(LENGTH))
                heard.clear()
                attached.read(tokens(length))
                found = [entry.blocks for entry in heard]
        lists.append(found[-len(range(256, LENGTH, SIZES["segment"])) :])
    assert lists[0]
    assert lists[0] == lists[1]


@each(name=["gemma3_text", "gemma2", "mistral"], share=["model", "group"])
def test_models_with_sliding_windows_read_and_generate(name: str, share: Any) -> None:
    model = tiny(name)
    with reading(model, Retrieval(top_k=2, share=share, every=4)) as attached:
        at_once = generate(model, prompt())[0]
        assert at_once.tolist() == token_by_token(model, prompt()).tolist()
        local = {plan.index for plan in attached.architecture.layers if plan.local}
        assert share == "model" or not local & {entry.layer for entry in lists_of(attached)}
        assert lists_of(attached)


def token_by_token(model: PreTrainedModel, ids: Tensor, new: int = 12) -> Tensor:
    """The likeliest continuation, without ``generate``."""
    cache, part = None, ids
    for _ in range(new):
        with torch.no_grad():
            out = model(part, **{CACHE: cache}, use_cache=True)
        cache, part = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, part), 1)
    return ids[0]


def test_retrieved_blocks_reach_the_full_layers_of_a_sliding_model() -> None:
    lists = [answer(tiny("gemma3_text"), Retrieval(top_k=k), prompt()) for k in (1, 2, 4)]
    assert_all_differ([result for _, result in lists])


@pytest.mark.parametrize("positions", ["stingy", "clamped"])
def test_a_text_longer_than_the_trained_positions_is_read_within_them(positions: Any) -> None:
    trained = 64
    model = tiny("llama", max_position_embeddings=trained)
    seen: list[Tensor] = []
    rotary = model.get_submodule("model.rotary_emb")
    rotary.register_forward_hook(
        lambda _, args, kwargs, __: seen.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    retrieval, sizes = Retrieval(top_k=1, positions=positions), {"window": 16, "segment": 16}
    with reading(model, retrieval, length=1_008, **sizes) as attached:
        assert logits(model, prompt()).isfinite().all()
        assert len(generate(model, prompt(), new=5)[0]) == PROMPT + 5
        assert lists_of(attached)
    used = torch.cat([positions.flatten() for positions in seen])
    used = used[used < FAR]  # what the model is tried at before
    assert used.min() == 0
    assert used.max() < trained


def assert_all_differ(results: Sequence[Tensor]) -> None:
    for i, one in enumerate(results):
        assert one.isfinite().all()
        for other in results[:i]:
            assert not torch.allclose(one, other, atol=1e-3)
